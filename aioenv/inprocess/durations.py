"""Whether the loop does a piece of work itself, or an env's thread: by how long such work takes."""

from __future__ import annotations

import types
from collections.abc import Generator

__all__ = ["SHORT_S", "TURN_S", "RunTimes", "yield_to_loop"]

# What takes less comes to the loop itself, and leaves it when it takes twice as long: less than the half millisecond
# for which anything may keep the loop, and after which it turns to its other tasks. In seconds.
SHORT_S = 200e-6
TURN_S = 500e-6
# What takes so long is moved to the thread at once, in seconds.
_LONG_S = 10e-3
# The moving mean: what the newest weighs, how many times the mean it may count (one that was preempted says nothing
# about the rest), and where it begins, in limits.
_WEIGHT = 1 / 8
_MOST = 3.0
_BEGIN = 4.0


class RunTimes:
    """How long one sort of work takes, and so whether the loop does it itself.

    It begins on the thread, comes to the loop once the moving mean is below the limit, and goes back when it is above
    twice the limit.

    Args:
        limit_s: in seconds.
        inline: where it is done for ever; None to choose.

    Attributes:
        inline: whether the loop does it.
        mean_s: the moving mean, in seconds.
    """

    __slots__ = ("_chooses", "inline", "limit_s", "mean_s")

    def __init__(self, limit_s: float, inline: bool | None) -> None:
        self._chooses = inline is None
        self.inline = bool(inline)
        self.limit_s = limit_s
        self.mean_s = _BEGIN * limit_s

    def note(self, seconds: float) -> None:
        """It took so long this time."""
        mean_s = self.mean_s
        if seconds < _LONG_S:
            self.mean_s = mean_s = mean_s + (min(seconds, _MOST * mean_s) - mean_s) * _WEIGHT
        else:
            self.mean_s = mean_s = max(seconds, _BEGIN * self.limit_s)
        if self._chooses:
            self.inline = mean_s < (2 * self.limit_s if self.inline else self.limit_s)


@types.coroutine
def yield_to_loop() -> Generator[None, None, None]:
    """Let the loop do something else: what `asyncio.sleep(0)` does, and no more."""
    yield
