"""Ctrl-C during a piece of work that must not be left half done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType
from typing import Any

try:  # what the public functions call; they take 25 µs a step more, in which they look for names of handlers
    from _signal import getsignal, signal  # type: ignore[import-not-found]
except ImportError:
    from signal import getsignal, signal

__all__ = ["HeldInterrupt"]


class HeldInterrupt:
    """Holds back what SIGINT would do to the main thread until a `with` block is over; a second one is not held.

    On other threads, which signals don't interrupt, it does nothing.
    """

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = getsignal(SIGINT)
            if callable(handler):  # else it is ignored, or ends the process, or is not Python's
                self._handler = handler
                signal(SIGINT, self._hold)

    def __exit__(self, *exc_info: object) -> None:
        handler = self._handler
        if handler is not None:
            signal(SIGINT, handler)
            came, self._handler, self._came = self._came, None, None
            if came is not None:
                handler(*came)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._came is None:
            self._came = number, frame
        elif self._handler is not None:  # whoever asks twice does not want to wait
            self._handler(number, frame)
