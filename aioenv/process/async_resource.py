"""The life of what has workers, from before its start until it is closed or forgotten."""

from __future__ import annotations

import asyncio
import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ClassVar, Self, TypeVar

from aioenv.errors import ClosedError, LoopError

__all__ = ["AsyncResource", "own_task", "to_the_end", "together"]

T = TypeVar("T")


def own_task(coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """A task on the running loop that `asyncio.all_tasks()` does not tell of.

    Who cancels all tasks, as `asyncio.run` does when its main coroutine has returned, means those of the program: one
    that is cancelled so may still have to close a vector env, and waits for the end of workers, of which tasks like
    this know. What is left of it when its loop is closed ends with it, silently.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    asyncio._unregister_task(task)  # see "Extending" in asyncio's documentation
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


def together(*coroutines: Coroutine[Any, Any, T]) -> asyncio.Future[list[T]]:
    """As `asyncio.gather`, of tasks of one's own."""
    return asyncio.gather(*map(own_task, coroutines))


async def to_the_end(task: asyncio.Future[Any]) -> None:
    """Wait for what takes little time, also if this is cancelled, however often; its error is not raised.

    Raises:
        CancelledError: after that, if this was cancelled.
    """
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled


class AsyncResource:
    """Something that is started by an await, belongs to the loop of that await, and must be closed.

    Subclasses say what that means: `_start`, `_abandon`, and `close` by `_close_once`.

    Attributes:
        closed: whether `close` has been called, or the start has failed.
    """

    closed = True  # until there is something to close
    _noun: ClassVar[str]  # what errors call it
    _loop: asyncio.AbstractEventLoop | None = None
    _starting: asyncio.Task[None] | None = None
    _closing: asyncio.Task[None] | None = None
    _pid = -1  # of the process that started it
    _owned = False  # by who closes it when both are forgotten

    def _start(self) -> Coroutine[Any, Any, None]:
        """What starts it; called once, on its loop. If that is cancelled, or fails, nothing may be left of it."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Kill every process without waiting. It may not have been started to the end."""
        raise NotImplementedError

    async def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ensure_started().__await__()

    async def __aenter__(self) -> Self:
        return await self._ensure_started()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _ensure_started(self) -> Self:
        """Start it, once; whoever comes later waits for that too. If this is cancelled, it is ended."""
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._pid = os.getpid()
            starting = self._start()
            _open.add(self)
            self._starting = own_task(starting)
        self._check_loop()
        assert self._starting is not None
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            await self.close()
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # it is another who was cancelled, or has closed it
                raise ClosedError(f"the {self._noun} was closed while it was being started") from None
            raise
        except GeneratorExit:  # who waited here is no more, but what is being started is
            raise
        except BaseException:
            self.closed = True
            raise
        return self

    async def _close_once(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Close it, or wait until it is.

        If this is cancelled, it is abandoned, and what is left to do is waited for. If its loop is closed, its
        processes are killed.

        Raises:
            LoopError: if this is another loop than the one that it was started on.

        Args:
            end: ends what was started; called at most once.
        """
        if self._loop is None or self._pid != os.getpid():  # a forked copy has nothing to end
            self.closed = True
            return
        if self._loop.is_closed():  # nobody can wait for anything there any more
            if not self.closed:
                self.closed = True
                _open.discard(self)
                self._abandon()
            return
        self._check_loop()
        self.closed = True
        _open.discard(self)
        if self._closing is None:
            self._closing = own_task(self._finish(end))
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._abandon()
            await to_the_end(self._closing)  # not for long: every process is being killed
            raise

    async def _finish(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._starting is not None
        if not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await end()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._loop is not None:
            raise TypeError(
                f"{self!r} can't be copied or pickled: it owns processes. Pickle what makes it, a function, or do so "
                "before it is started"
            )
        return super().__reduce_ex__(protocol)

    def __del__(self) -> None:
        if not self.closed and not self._owned and self._loop is not None and self._pid == os.getpid():
            text = f"unclosed {self!r}; its workers were killed"  # while it still is
            self.closed = True
            self._abandon()
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError.of(f"the {self._noun}")

    def _check_loop(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise LoopError(f"this {self._noun} is used on an event loop, in a coroutine; none runs here") from None
        if loop is not self._loop:
            where = "" if self._pid == os.getpid() else f", of which process {os.getpid()} is a forked copy"
            raise LoopError(
                f"this {self._noun} belongs to the event loop on which it was started, {_named(self._loop)} in process "
                f"{self._pid}{where}; it was used from {_named(loop)}: make another one there"
            )


def _named(loop: Any) -> str:
    return f"<{type(loop).__name__} at {id(loop):#x}>"


# Started and not closed: at the end of the program, before modules are taken down, their workers are killed.
_open: weakref.WeakSet[AsyncResource] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for each in list(_open):
        each.__del__()
