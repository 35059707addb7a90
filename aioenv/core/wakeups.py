"""Waking up for replies: fewer wake-ups of the loop for a step of all workers, and waiting for replies without it."""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from aioenv.process.channel import ScatterChannel

if TYPE_CHECKING:
    from aioenv.core.requests import BatchRequest
    from aioenv.core.worker_pool import WorkerSlots
    from aioenv.process.supervisor import Worker

__all__ = ["ReplyPoller", "WakeupCoalescer"]

# The same worker must have been the last to reply so many steps in a row before the loop watches it alone. A wrong
# guess costs less than a right one saves in a step.
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
                channel.disable_reader()

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
            channel.enable_reader()

    def forget(self) -> None:
        """Let go of the last steps."""
        self._requests.clear()


class ReplyPoller:
    """Waits for replies on the descriptors of the workers.

    Args:
        members: the workers.
    """

    def __init__(self, members: Sequence[WorkerSlots]) -> None:
        self._workers = [member.worker for member in members]
        self._by_descriptor: dict[int, Worker] = {}
        self._polls: dict[tuple[int, ...], select.poll] = {}

    def suffices(self) -> bool:
        """Whether the loop has nothing to do, like sending what a socket has not taken, or starting a worker again."""
        return all(worker.poll_fd is not None for worker in self._workers)

    def wait(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Take in replies until there are enough; blocks.

        Args:
            enough: whether there are.
            seconds: how long to wait at most; what is in by then is taken, with 0, too.

        Returns:
            Whether there are enough. False, maybe at once, if that takes longer, or the loop has to do something first.
        """
        by_descriptor = {worker.poll_fd: worker for worker in self._workers}
        if None in by_descriptor:
            return enough()
        if by_descriptor != self._by_descriptor:
            self._by_descriptor = by_descriptor  # type: ignore[assignment]
            self._polls.clear()
        deadline = perf_counter() + seconds
        while not enough():
            left = deadline - perf_counter()
            for descriptor, _ in self._poll().poll(max(0, math.ceil(left * 1e3))):
                worker = self._by_descriptor[descriptor]
                worker.poll()
                if worker.poll_fd is None:  # it has ended: the loop finds out how
                    return enough()
            if left <= 0:
                return enough()
        return True

    def _poll(self) -> select.poll:
        """What to sleep on: those that don't rest (see `WakeupCoalescer`)."""
        descriptors = tuple(fd for fd, worker in self._by_descriptor.items() if not worker.reader_disabled)
        poll = self._polls.get(descriptors)
        if poll is None:
            poll = self._polls[descriptors] = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
        return poll
