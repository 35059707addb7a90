"""Polling for a moment before going to sleep: to be woken takes longer than the moment."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

__all__ = ["MAX_POLL_S", "SpinPoller", "look_for"]

# The longest that a worker may spin for what comes next, in seconds.
MAX_POLL_S = 200e-6

_MISSES = 8  # so many in a row, and polling rests
_FIRST_REST, _LONGEST_REST = 32, 2048


def look_for(ready: Callable[[], object], seconds: float) -> bool:
    """Call `ready` until it gives something true, for so many seconds at most; whether it did."""
    deadline = perf_counter() + seconds
    while not ready():
        if perf_counter() > deadline:
            return False
    return True


class SpinPoller:
    """Waits a moment for something; gives it up where it does not pay.

    After some misses in a row it rests for a number of waits, which doubles each time, and then tries as often
    again: both sides of a conversation have to poll for a while before either hits. A hit makes everything as at
    the start.

    Args:
        poll_s: how long a wait may last, in seconds; 0: never poll.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._misses = 0
        self._resting = 0
        self._rest = _FIRST_REST

    def wait(self, ready: Callable[[], object]) -> bool:
        """Call `ready` until it gives something true, or the moment is over; False at once while polling rests."""
        seconds = self.turn()
        return self.note(look_for(ready, seconds)) if seconds else False

    def turn(self) -> float:
        """How long the next wait may last, in seconds; 0 while polling rests."""
        if not self._resting:
            return self._poll_s
        self._resting -= 1
        return 0.0

    def note(self, hit: bool) -> bool:
        """What came of a wait; gives it back."""
        if hit:
            self._misses = 0
            self._rest = _FIRST_REST
            return True
        self._misses += 1
        if self._misses >= _MISSES:
            self._misses = 0
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        return False
