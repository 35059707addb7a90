"""Holding back Python signal handlers during work that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

try:  # the public functions take 25 µs a step more, for the names of handlers
    from _signal import getsignal  # type: ignore[import-not-found]
    from _signal import signal as handle
except ImportError:
    from signal import getsignal
    from signal import signal as handle

__all__ = ["HeldSignals"]

_ALL = tuple(sorted(map(int, signal.valid_signals())))


class HeldSignals:
    """A `with` block in which no Python signal handler runs: signals that arrive are handled at its end.

    On other threads than the main one none ever runs, and this does nothing.

    Args:
        *numbers: which signals; none: all.
        twice: hold repeated signals of the same number, too; False: a second one is handled at once.
    """

    __slots__ = ("_arrived", "_handlers", "_numbers", "_twice")

    def __init__(self, *numbers: int, twice: bool = True) -> None:
        self._numbers = numbers or _ALL
        self._twice = twice
        self._handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> list[tuple[int, FrameType | None]]:
        """Hold back signals, and return the list of those that have arrived, which grows."""
        if threading.current_thread() is threading.main_thread():
            try:
                for number in self._numbers:
                    handler = getsignal(number)
                    # other signals are ignored, end the process, or have a handler in C
                    if callable(handler):
                        self._handlers.append((number, handler))
                        handle(number, self._hold)
            except BaseException:  # raised by a handler that was not held back yet
                self.__exit__()
                raise
        return self._arrived

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._restore()
        finally:
            self._tell()

    def _restore(self) -> None:
        try:
            while self._handlers:
                handle(*self._handlers[-1])
                self._handlers.pop()
        finally:
            if self._handlers:  # a handler that was restored has raised
                self._restore()

    def _tell(self) -> None:
        try:
            while self._arrived:
                number, frame = self._arrived[0]
                handler = getsignal(number)
                there = callable(handler)
                del self._arrived[0]  # no other handler can run between this and the call
                if there:
                    handler(number, frame)
        finally:
            if self._arrived:  # a handler has raised
                self._tell()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._twice or all(number != other for other, _ in self._arrived):
            self._arrived.append((number, frame))
        else:
            dict(self._handlers)[number](number, frame)
