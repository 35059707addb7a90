"""What blocking code holds of something asynchronous: a loop thread of its own, from start to close."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Any, Self

from aioenv.errors import ClosedError
from aioenv.process.async_resource import AsyncResource
from aioenv.sync.portal import Portal

__all__ = ["Blocking"]


class Blocking:
    """Runs what it is made of on a loop thread of its own.

    Subclasses have a `close`, which calls `_end`. One that is forgotten is closed when it is collected, or at the end
    of the program.

    Attributes:
        closed: whether `close` has been called.
    """

    closed = True  # until there is something to close
    _inner: AsyncResource
    _portal: Portal

    def _run(self, inner: AsyncResource) -> None:
        """Start it on a new thread; if that fails, the thread is ended, and its error raised."""
        self._inner = inner
        self._portal = Portal(f"the {inner._noun}")
        try:
            self._portal.call(inner._ensure_started)
        except BaseException:
            self._portal.close()
            raise
        self.closed = False
        inner._owned = True  # of a cycle that is collected, either may come first
        _open.add(self)

    def _end(self, **how: Any) -> None:
        """End the workers and the loop thread; in a forked copy, which has neither, nothing.

        Args:
            **how: as the `close` of what runs there.
        """
        if not self._portal.is_copy:
            with contextlib.suppress(ClosedError):  # another thread has done it meanwhile
                self._portal.call(self._inner.close, **how)
        self._portal.close()

    def _forget(self) -> None:
        """Nobody has closed this, and nobody will."""
        if self.closed or self._inner._pid != os.getpid():  # a forked copy has no such thread, either
            return
        self.closed = True
        if self._portal.is_here:  # collected there: it can't wait for itself
            self._inner.closed = True
            self._inner._abandon()
            self._portal.close()
        else:
            self._end()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can't be copied or pickled: it owns processes and a thread. Pickle what makes it, a function"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()  # type: ignore[attr-defined]  # what it takes differs

    def __del__(self) -> None:
        self._forget()


_open: weakref.WeakSet[Blocking] = weakref.WeakSet()


@atexit.register
def _forget_all() -> None:
    """At the end of the program, while threads and modules still work."""
    for each in list(_open):
        each._forget()
