"""Signals that end a command: they become an exception, so that it ends what it has started."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["CommandEnded", "raised"]

# For so long after the first, others are not heard: a terminal that is closed sends more than one.
CLEANUP_S = 3.0
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class CommandEnded(SystemExit):
    """A signal is to end this process: a SystemExit, which alone, with a KeyboardInterrupt, gets through event loops.

    Attributes:
        signum: which.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.signum).name}"


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise `CommandEnded` in this block, unless ignored (`nohup`) or handled already.

    Outside of the main thread, which alone may say what signals do, nothing changes.
    """
    ours = []
    if threading.current_thread() is threading.main_thread():
        ours = [signum for signum in _SIGNALS if signal.getsignal(signum) == signal.SIG_DFL]

    heard = float("-inf")

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal heard
        if (now := time.monotonic()) >= heard + CLEANUP_S:
            heard = now
            raise CommandEnded(signum)

    for signum in ours:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in ours:
            signal.signal(signum, signal.SIG_DFL)
