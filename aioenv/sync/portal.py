"""A thread with an event loop, and the way for blocking code to have coroutines run on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aioenv.errors import ClosedError, LoopError
from aioenv.make import new_event_loop

__all__ = ["Portal"]

T = TypeVar("T")


class Portal:
    """An event loop on a thread of its own, which lives until `close`.

    Worker processes are started from that thread, and the kernel ends them with it; so a portal must outlive what
    runs on it. The thread is a daemon: a program that forgets to close one still ends.
    """

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="aioenv-portal", daemon=True)
        self._closed = False
        self._thread.start()

    def _run(self) -> None:
        # the runner also ends what is left on the loop, and closes it, on this thread
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._stop.wait()

    @property
    def is_here(self) -> bool:
        """Whether this is the portal's own thread."""
        return threading.get_ident() == self._thread.ident

    def call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
        """Run a coroutine function on the loop, and wait for its result.

        If the wait is interrupted (Ctrl-C), the coroutine is cancelled, and its end is waited for first.

        Raises:
            LoopError: if this is called on the portal's own thread, where it would wait for itself for ever.
            ClosedError: if the portal is closed.
        """
        if self.is_here:
            raise LoopError(
                "a blocking call was made on the loop thread that should serve it: it would wait for itself for "
                "ever. On a loop, use the async API (aioenv.AsyncVectorEnv)"
            )
        if self._closed:
            raise ClosedError("the loop thread is closed")
        call = _Call(function, args, kwargs)
        self._loop.call_soon_threadsafe(call.start)
        try:
            call.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(call.cancel)
            call.wait()
            raise
        return call.result()  # type: ignore[no-any-return]

    def run_soon(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a plain function on the loop's thread, and wait for its result."""

        async def run() -> Any:
            return function(*args)

        return self.call(run)

    def close(self) -> None:
        """Stop the loop and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._stop.set)
        if not self.is_here:
            self._thread.join()


class _Call:
    """One call on its way to the loop and back. A bare lock wakes the caller sooner than a condition would."""

    __slots__ = ("_args", "_finished", "_function", "_kwargs", "_task")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._task: asyncio.Task[Any] | None = None
        self._finished = threading.Lock()
        self._finished.acquire()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._function(*self._args, **self._kwargs))
        self._task.add_done_callback(lambda _: self._finished.release())

    def wait(self) -> None:
        # a signal that comes just before a thread blocks is not seen until it wakes: don't block for ever
        while not self._finished.acquire(timeout=0.5):
            pass

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self) -> Any:
        assert self._task is not None
        try:
            return self._task.result()
        finally:
            self._task = None  # an exception's traceback would otherwise keep the call alive
