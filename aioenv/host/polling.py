"""Polling for a moment before a process sleeps: to be woken takes longer than the moment."""

from __future__ import annotations

import select
from time import perf_counter

__all__ = ["MAX_POLL_S", "Poller"]

# The longest that a worker may spin for its next request, in seconds.
MAX_POLL_S = 50e-6

_MISSES = 8  # so many in a row, and polling rests
_FIRST_REST, _LONGEST_REST = 16, 1024


class Poller:
    """Waits a moment for a descriptor to become readable; gives it up where it does not pay.

    After some misses in a row it rests for a number of waits that doubles each time, and then tries once. A hit
    makes everything as at the start.

    Args:
        fd: what is going to be read.
        poll_s: how long a wait may last, in seconds; 0: never poll.
    """

    def __init__(self, fd: int, poll_s: float) -> None:
        self._poll_s = poll_s if hasattr(select, "poll") else 0.0
        self._misses = 0
        self._resting = 0
        self._rest = _FIRST_REST
        if self._poll_s:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            self._poll = poll.poll

    def wait(self) -> None:
        """Return when there is something to read, or the moment is over, or polling rests."""
        if not self._poll_s:
            return
        if self._resting:
            self._resting -= 1
            return
        poll = self._poll
        deadline = perf_counter() + self._poll_s
        while not poll(0):
            if perf_counter() > deadline:
                self._miss()
                return
        self._misses = 0
        self._rest = _FIRST_REST

    def _miss(self) -> None:
        self._misses += 1
        if self._misses >= _MISSES:
            self._misses = _MISSES - 1
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
