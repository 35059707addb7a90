"""A loop's thread that stands still for a moment, so that another may do its work: two wake-ups a step less."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from aioenv.core.held_signals import HeldSignals

__all__ = ["PARK_S", "LoopHandoff"]

# How long the thread stands still at most, in seconds. Longer than most steps take; and what else it has to do waits so
# long: what envs print, a worker that has died between two steps.
PARK_S = 10e-3


class LoopHandoff:
    """Where the thread of a loop waits for visitors.

    To wake a thread takes 50 µs and more, so a step that goes over the thread and back costs 100 µs before it does
    anything. Who calls again and again finds the thread parked instead, in a callback of its loop: nothing else runs on
    the loop then, and the visitor may do there what only the thread itself may do otherwise.

    Args:
        loop: the loop.

    Attributes:
        visitor: the thread that is there; None if there is none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._gate = threading.Lock()  # who has it may use what belongs to the loop
        self._gate.acquire()  # the thread, as long as it is not parked
        self._open = False
        self._wanted = False
        self._bell = threading.Lock()  # an Event is left locked if a signal's handler raises in it
        self.visitor: int | None = None

    def park(self) -> bool:
        """Stand still, on the loop's thread, until it is wanted, for `PARK_S` at most; then wait for a visitor's end.

        Returns:
            Whether it stood still. False if it was wanted already: what is on the loop has its turn first.
        """
        self._bell.acquire(blocking=False)  # it has rung for what comes first, or before
        if self._wanted:
            self._wanted = False
            return False
        self._gate.release()
        self._open = True
        self._bell.acquire(timeout=PARK_S)
        self._open = False  # nobody overtakes the thread, which may wait for a visitor
        self._gate.acquire()
        return True

    def wake(self) -> None:
        """Something was put on the loop, by another thread."""
        self._wanted = True
        if self._bell.locked():
            with contextlib.suppress(RuntimeError):  # somebody else has rung it
                self._bell.release()

    def visit(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a plain function in place of the thread, if that is parked; whether it was.

        Handlers of signals don't interrupt it: they run when it is over, and may raise then. It is called with a list
        of those that wait (see `HeldSignals`), and with `args`.
        """
        if not self._open or self._wanted:  # what was put on the loop before comes first
            return False
        with HeldSignals() as signals:
            if not self._gate.acquire(blocking=False):
                return False
            outside = asyncio._get_running_loop()  # a notebook's
            self.visitor = threading.get_ident()
            asyncio._set_running_loop(self._loop)
            try:
                function(signals, *args)
            finally:
                asyncio._set_running_loop(outside)
                self.visitor = None
                self._gate.release()
        return True
