"""Who wakes the loop for a step of all workers: the one that is last most of the time."""

from __future__ import annotations

from collections.abc import Sequence

from aioenv.core.requests import BatchRequest
from aioenv.process.channel import ScatterChannel

__all__ = ["WakeupCoalescer"]

# So many steps in a row the same worker must have been last before the loop hears of it alone. To be wrong costs less
# than a step of being right saves.
_TIMES = 4


class WakeupCoalescer:
    """Lets the loop sleep until the last reply to a plain step is there: of all slots, or of a group of a rollout.

    With a worker for each CPU the parent is woken on a CPU that a worker needs. Being woken for a reply that is not the
    last is of no use: it can be taken in with that one. So the channels of the others *rest*: the loop does not look at
    them, while they have nothing but plain steps to answer. When the one that is listened to replies, and others have
    not yet, and whenever anything else happens (another request goes through a channel, its process ends, a timeout
    passes, what is in flight is abandoned), they are listened to again.

    Args:
        channels: of all workers, in the order of the parts of a step.
    """

    def __init__(self, channels: Sequence[ScatterChannel]) -> None:
        self._channels = channels
        self._requests: list[BatchRequest] = []  # the steps that are under way, oldest first
        self._resting: Sequence[ScatterChannel] = ()
        self._last: ScatterChannel | None = None  # whose reply came last
        self._times = 0  # how often in a row
        self._looking = False
        for channel in channels:
            channel.on_read = self._on_read

    def begin(self, request: BatchRequest) -> None:
        """A plain step has been sent to all workers."""
        requests = self._requests
        if requests:  # one may be used again before anything was read
            requests[:] = [one for one in requests if one.open and one is not request]
        requests.append(request)
        if self._times >= _TIMES and not self._resting and self._owe_nothing_else():
            self._resting = [channel for channel in self._channels if channel is not self._last]
            for channel in self._resting:
                channel.rest()

    def _owe_nothing_else(self) -> bool:
        """Whether all but the last one have nothing to answer but these steps."""
        for number, channel in enumerate(self._channels):
            steps = sum(not request.parts[number].arrived for request in self._requests)
            if channel is not self._last and len(channel.requests.pending) != steps:
                return False
        return True

    def _on_read(self, channel: ScatterChannel) -> None:
        requests = self._requests
        if not requests or self._looking:
            return
        if self._resting:
            self._look(len(channel.requests.pending))
        if requests[0].open:
            return
        while requests and not requests[0].open:
            del requests[0]
        if channel is self._last:
            self._times += 1
        else:
            self._last, self._times = channel, 0

    def _look(self, owed: int) -> None:
        """Whoever was expected to be last has replied, and owes so many more replies: have the others?"""
        self._looking = True
        late = False
        try:
            for channel in self._resting:
                pending = channel.requests.pending
                while len(pending) > owed and not late:
                    before = len(pending)
                    channel.poll()
                    late = len(pending) == before
        finally:
            self._looking = False
        if late:
            self.wake()

    def wake(self) -> None:
        """Listen to all workers."""
        resting, self._resting = self._resting, ()
        self._last, self._times = None, 0
        for channel in resting:
            channel.listen()

    def forget(self) -> None:
        """Let go of the last steps."""
        self._requests.clear()
