"""Who wakes the loop for a step of all workers: the one that is last most of the time."""

from __future__ import annotations

from collections.abc import Sequence

from aioenv.engine.batch import Exchange
from aioenv.workers.channel import ScatterChannel

__all__ = ["Bell"]

# So many steps in a row the same worker must have been last before the loop hears of it alone. To be wrong costs less
# than a step of being right saves.
_TIMES = 4


class Bell:
    """Lets the loop sleep until the last reply to a plain step is there.

    With a worker for each CPU the parent is woken on a CPU that a worker needs. Being woken for a reply that is not the
    last is of no use: it can be taken in with that one. So the channels of the others *rest*: the loop does not look at
    them, while they have nothing but plain steps to answer. When the one that is listened to replies, and others have
    not yet, and whenever anything else happens (another request goes through a channel, its process ends, a timeout
    passes, what is in flight is abandoned), they are listened to again.

    Args:
        channels: of all workers.
    """

    def __init__(self, channels: Sequence[ScatterChannel]) -> None:
        self._channels = channels
        self._exchange: Exchange | None = None  # the step that is under way
        self._resting: Sequence[ScatterChannel] = ()
        self._last: ScatterChannel | None = None  # whose reply came last
        self._times = 0  # how often in a row
        self._looking = False
        for channel in channels:
            channel.on_read = self._on_read

    def begin(self, exchange: Exchange) -> None:
        """A plain step has been sent to all workers."""
        self._exchange = exchange
        if self._times >= _TIMES and not self._resting:
            others = [channel for channel in self._channels if channel is not self._last]
            # else they have something else to answer, too
            if all(len(channel.requests.pending) == 1 for channel in others):
                self._resting = others
                for channel in others:
                    channel.rest()

    def _on_read(self, channel: ScatterChannel) -> None:
        exchange = self._exchange
        if exchange is None or self._looking:
            return
        if exchange.open and self._resting:
            self._look(exchange)
        if exchange.open:
            return
        self._exchange = None
        if channel is self._last:
            self._times += 1
        else:
            self._last, self._times = channel, 0

    def _look(self, exchange: Exchange) -> None:
        """Whoever was expected to be last has replied: have the others?"""
        self._looking = True
        try:
            for channel in self._resting:
                channel.poll()
        finally:
            self._looking = False
        if exchange.open:
            self.wake()

    def wake(self) -> None:
        """Listen to all workers."""
        resting, self._resting = self._resting, ()
        self._last, self._times = None, 0
        for channel in resting:
            channel.listen()

    def forget(self) -> None:
        """Let go of the last step."""
        self._exchange = None
