"""Waiting for replies without a loop, by whoever stands in for it."""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Sequence
from time import perf_counter

from aioenv.engine.fleet import Member

__all__ = ["Here"]


class Here:
    """Waits for replies on the descriptors of the workers.

    Args:
        members: the workers.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._workers = [member.worker for member in members]
        self._descriptors: list[int | None] = []

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
        descriptors = [worker.waitable for worker in self._workers]
        if None in descriptors:
            return enough()
        if descriptors != self._descriptors:
            self._descriptors = descriptors
            self._by_descriptor = dict(zip(descriptors, self._workers, strict=True))
            self._poll = select.poll()
            for descriptor in self._by_descriptor:
                assert descriptor is not None
                self._poll.register(descriptor, select.POLLIN)
        deadline = perf_counter() + seconds
        while not enough():
            left = deadline - perf_counter()
            for descriptor, _ in self._poll.poll(max(0, math.ceil(left * 1e3))):
                worker = self._by_descriptor[descriptor]
                worker.poll()
                if worker.waitable is None:  # it has ended: the loop finds out how
                    return enough()
            if left <= 0:
                return enough()
        return True
