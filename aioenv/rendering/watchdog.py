"""Whether a render worker gets on with what it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["FIRST_S", "LAST_CHANCE_S", "Watchdog"]

# The loop itself may have stood still: replies that came meanwhile are looked at before anybody is called late.
LAST_CHANCE_S = 0.1
# What a process draws first takes far longer than the rest: shaders are compiled, meshes and textures uploaded.
FIRST_S = 10.0


class Watchdog:
    """Tells when a worker that has requests has answered none for too long.

    Args:
        timeout_s: how long that is, in seconds; the first answer of a process may take 10 seconds at least.
        on_late: called once each time.

    Attributes:
        fresh: whether it is a process that has answered nothing yet.
    """

    def __init__(self, timeout_s: float, on_late: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self.fresh = True
        self._open = 0
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None  # not set anew each time: that would cost more than all else

    def sent(self) -> None:
        """The worker has been given something."""
        self._open += 1
        if self._open == 1:
            self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._since + self._timeout_s, self._expire, None)

    def came(self, *, died: bool) -> None:
        """It has answered, or died."""
        self.fresh = died
        self._open -= 1
        self._since = self._loop.time()

    def _expire(self, suspected: float | None) -> None:
        """The time is up: since `suspected` it has done nothing, or a first look is to be taken (None)."""
        self._timer = None
        if not self._open:
            return
        due = self._since + (max(self._timeout_s, FIRST_S) if self.fresh else self._timeout_s)
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._expire, None)
        elif suspected != self._since:
            self._timer = self._loop.call_later(LAST_CHANCE_S, self._expire, self._since)
        else:
            self._on_late()

    def close(self) -> None:
        """Look no more."""
        self._open = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
