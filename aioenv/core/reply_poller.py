"""Waiting for replies without a loop, by whoever stands in for it."""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Sequence
from time import perf_counter

from aioenv.core.worker_pool import WorkerSlots
from aioenv.process.supervisor import Worker

__all__ = ["ReplyPoller"]


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
        return all(worker.waitable is not None for worker in self._workers)

    def wait(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Take in replies until there are enough; blocks.

        Args:
            enough: whether there are.
            seconds: how long to wait at most; what is in by then is taken, with 0, too.

        Returns:
            Whether there are enough. False, maybe at once, if that takes longer, or the loop has to do something first.
        """
        by_descriptor = {worker.waitable: worker for worker in self._workers}
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
                if worker.waitable is None:  # it has ended: the loop finds out how
                    return enough()
            if left <= 0:
                return enough()
        return True

    def _poll(self) -> select.poll:
        """What to sleep on: those that don't rest (see `WakeupCoalescer`)."""
        descriptors = tuple(fd for fd, worker in self._by_descriptor.items() if not worker.rests)
        poll = self._polls.get(descriptors)
        if poll is None:
            poll = self._polls[descriptors] = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
        return poll
