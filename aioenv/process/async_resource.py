"""`AsyncResource`: an object with workers, from its start until it is closed or garbage-collected; internal tasks."""

from __future__ import annotations

import asyncio
import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ClassVar, Self, TypeVar

from aioenv.errors import ClosedError, LoopError

__all__ = ["AsyncResource", "gather_internal", "internal_task", "wait_through_cancel"]

T = TypeVar("T")


def internal_task(coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """Start a task on the running loop that `asyncio.all_tasks()` does not list.

    `asyncio.run` cancels all tasks once its main coroutine has returned. A task that is cancelled then may still have
    to close a vector env, and wait for the end of workers, which internal tasks report. An internal task that is left
    when its loop is closed ends with the loop, silently.
    """
    task = asyncio.get_running_loop().create_task(coroutine, name=name)
    asyncio._unregister_task(task)  # see "Extending" in asyncio's documentation
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


def gather_internal(*coroutines: Coroutine[Any, Any, T]) -> asyncio.Future[list[T]]:
    """Gather coroutines as `asyncio.gather` does, in internal tasks."""
    return asyncio.gather(*map(internal_task, coroutines))


async def wait_through_cancel(task: asyncio.Future[Any]) -> None:
    """Wait for a short task, even if this is cancelled, however often; the task's error is not raised.

    Raises:
        CancelledError: after the task's end, if this was cancelled.
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
    """An object that is started by an await, belongs to the loop of that await, and must be closed.

    Subclasses implement `_start`, `_abandon`, and `close` by `_close_once`.

    Attributes:
        closed: whether `close` has been called, or the start has failed.
    """

    closed = True  # until `__init__` has finished
    _noun: ClassVar[str]  # its name in errors
    _loop: asyncio.AbstractEventLoop | None = None
    _starting: asyncio.Task[None] | None = None
    _closing: asyncio.Task[None] | None = None
    _pid = -1  # of the process that started it
    _owned = False  # whether another object closes it when both are garbage-collected

    def _start(self) -> Coroutine[Any, Any, None]:
        """Start it; called once, on its loop. If this is cancelled, or fails, it must leave nothing behind."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Kill every process without waiting. The start may not have finished."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ensure_started().__await__()

    async def __aenter__(self) -> Self:
        return await self._ensure_started()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _ensure_started(self) -> Self:
        """Start it, or wait until it is started. If this is cancelled, it is closed."""
        self._check_open()
        loop = self._running_loop()
        if self._loop is None:
            self._loop = loop
            self._pid = os.getpid()
            starting = self._start()
            _open.add(self)
            self._starting = internal_task(starting)
        self._check_loop()
        assert self._starting is not None
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            await self.close()
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # another task was cancelled, or has closed it
                raise ClosedError(f"the {self._noun} was closed while it was being started") from None
            raise
        except GeneratorExit:  # the awaiting coroutine was closed, but the start goes on
            raise
        except BaseException:
            self.closed = True
            raise
        return self

    async def _close_once(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Close it, or wait until it is closed.

        If this is cancelled, the processes are killed, and the rest of the work is waited for. If its loop is closed,
        the processes are killed.

        Args:
            end: does the work; called at most once.

        Raises:
            LoopError: if this is not the loop that it was started on.
        """
        if self._loop is None or self._pid != os.getpid():  # a forked copy owns nothing
            self.closed = True
            return
        if self._loop.is_closed():  # nothing can be awaited there any more
            if not self.closed:
                self.closed = True
                _open.discard(self)
                self._abandon()
            return
        self._check_loop()
        self.closed = True
        _open.discard(self)
        if self._closing is None:
            self._closing = internal_task(self._finish(end))
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._abandon()
            await wait_through_cancel(self._closing)  # this is short: every process is being killed
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
            text = f"unclosed {self!r}; its workers were killed"  # its repr changes once it is closed
            self.closed = True
            self._abandon()
            warnings.warn(text, ResourceWarning, source=self, stacklevel=2)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError.of(f"the {self._noun}")

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            copied = self._loop is not None and self._pid != os.getpid()
            where = f": this is a forked copy of process {self._pid}" if copied else ""
            why = f"this {self._noun} is used on an event loop of asyncio, in a coroutine; none runs here{where}"
            raise LoopError(why) from None

    def _check_loop(self) -> None:
        loop = self._running_loop()
        if loop is not self._loop:
            where = "" if self._pid == os.getpid() else f", of which process {os.getpid()} is a forked copy"
            raise LoopError(
                f"this {self._noun} belongs to the event loop on which it was started, {_named(self._loop)} in process "
                f"{self._pid}{where}; it was used from {_named(loop)}: make another one there"
            )


def _named(loop: Any) -> str:
    return f"<{type(loop).__name__} at {id(loop):#x}>"


# Started and not closed: their workers are killed at the end of the program, before modules are torn down.
_open: weakref.WeakSet[AsyncResource] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for each in list(_open):
        each.__del__()
