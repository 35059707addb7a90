"""Signals that wait while a piece of work is done that must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

try:  # what the public functions call; they take 25 µs a step more, in which they look for names of handlers
    from _signal import getsignal  # type: ignore[import-not-found]
    from _signal import signal as handle
except ImportError:
    from signal import getsignal
    from signal import signal as handle

__all__ = ["HeldSignals"]

_ALL = tuple(sorted(map(int, signal.valid_signals())))


class HeldSignals:
    """A `with` block in which no handler runs that is written in Python: what has come is handled at its end.

    On other threads than the main one none ever runs, and this does nothing.

    Args:
        *numbers: which signals; none: all.
        twice: hold the second of a number, too, and all that come after it; else whoever asks twice does not wait.
    """

    __slots__ = ("_came", "_handlers", "_numbers", "_twice")

    def __init__(self, *numbers: int, twice: bool = True) -> None:
        self._numbers = numbers or _ALL
        self._twice = twice
        self._handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> list[tuple[int, FrameType | None]]:
        """Begin; gives the list of those that have come and wait, as they come."""
        if threading.current_thread() is threading.main_thread():
            try:
                for number in self._numbers:
                    handler = getsignal(number)
                    # else it is ignored, or ends the process, or is not Python's
                    if callable(handler):
                        self._handlers.append((number, handler))
                        handle(number, self._hold)
            except BaseException:  # raised by one that was not held yet
                self.__exit__()
                raise
        return self._came

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
            if self._handlers:  # one that is itself again has raised
                self._restore()

    def _tell(self) -> None:
        try:
            while self._came:
                number, frame = self._came[0]
                handler = getsignal(number)
                there = callable(handler)
                del self._came[0]  # no other handler can run between this and the call
                if there:
                    handler(number, frame)
        finally:
            if self._came:  # one has raised
                self._tell()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._twice or all(number != other for other, _ in self._came):
            self._came.append((number, frame))
        else:
            dict(self._handlers)[number](number, frame)
