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

# The worker that was last to reply must be last so many more steps in a row before the loop watches it alone. A wrong
# guess costs less than a right one saves in a step.
_REPEATS = 4


class WakeupCoalescer:
    """Wakes the loop once for all replies to a plain step, if the last worker to reply can be predicted.

    With a worker for each CPU the parent wakes up on a CPU that a worker needs. A wake-up for a reply that is not the
    last one is of no use: it can be read together with the last. So the readers of the other channels are disabled
    while their workers owe replies to plain steps alone. They are enabled again when the last worker has replied before
    the others. So they are when anything else happens: another request, the end of a process, a timeout, an abandoned
    step.

    Args:
        channels: the channels of all workers, in the order of the worker requests of a step.
    """

    def __init__(self, channels: Sequence[ScatterChannel]) -> None:
        self._channels = channels
        self._requests: list[BatchRequest] = []  # the steps in flight, oldest first
        self._disabled: Sequence[ScatterChannel] = ()
        self._last: ScatterChannel | None = None  # the one that replied last
        self._repeats = 0  # how often it was last again, in a row
        self._looking = False
        for channel in channels:
            channel.on_read = self._on_read

    def begin(self, request: BatchRequest) -> None:
        """Note that a plain step was sent to all workers."""
        requests = self._requests
        if requests:  # a request may be used again before its replies were noted
            requests[:] = [one for one in requests if one.open and one is not request]
        requests.append(request)
        if self._repeats >= _REPEATS and not self._disabled and self._owe_nothing_else():
            self._disabled = [channel for channel in self._channels if channel is not self._last]
            for channel in self._disabled:
                channel.disable_reader()

    def _owe_nothing_else(self) -> bool:
        """Return whether the workers, but for the last one, owe replies to these steps alone."""
        for number, channel in enumerate(self._channels):
            steps = sum(not request.parts[number].arrived for request in self._requests)
            if channel is not self._last and len(channel.requests.pending) != steps:
                return False
        return True

    def _on_read(self, channel: ScatterChannel) -> None:
        requests = self._requests
        if not requests or self._looking:
            return
        if self._disabled:
            self._look(len(channel.requests.pending))
        if requests[0].open:
            return
        while requests and not requests[0].open:
            del requests[0]
        if channel is self._last:
            self._repeats += 1
        else:
            self._last, self._repeats = channel, 0

    def _look(self, owed: int) -> None:
        """Read the replies of the other channels, after the last one has replied and owes so many more."""
        self._looking = True
        late = False
        try:
            for channel in self._disabled:
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
        """Watch all channels again."""
        disabled, self._disabled = self._disabled, ()
        self._last, self._repeats = None, 0
        for channel in disabled:
            channel.enable_reader()

    def forget(self) -> None:
        """Release the last steps."""
        self._requests.clear()


class ReplyPoller:
    """Waits for replies on the descriptors of the workers, without the loop.

    Args:
        members: the workers.
    """

    def __init__(self, members: Sequence[WorkerSlots]) -> None:
        self._workers = [member.worker for member in members]
        self._by_descriptor: dict[int, Worker] = {}
        self._polls: dict[tuple[int, ...], select.poll] = {}

    def suffices(self) -> bool:
        """Return whether a caller waits for replies alone: nothing is left to be sent, and no worker restarts."""
        return all(worker.poll_fd is not None for worker in self._workers)

    def wait(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Read replies until there are enough; blocks.

        Args:
            enough: returns whether there are.
            seconds: the longest wait; with 0, too, replies that have come are read.

        Returns:
            Whether there are enough. False if that takes longer, or if the loop has to do something first.
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
                if worker.poll_fd is None:  # it has ended, which the loop handles
                    return enough()
            if left <= 0:
                return enough()
        return True

    def _poll(self) -> select.poll:
        """Return a poll object for the channels whose readers are enabled (see `WakeupCoalescer`)."""
        descriptors = tuple(fd for fd, worker in self._by_descriptor.items() if not worker.reader_disabled)
        poll = self._polls.get(descriptors)
        if poll is None:
            poll = self._polls[descriptors] = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
        return poll
