"""The life of a `RenderPool`, from before its start until it is closed or forgotten."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Generator
from itertools import count
from typing import Any, Self

from aioenv.errors import ClosedError, LoopError
from aioenv.rendering.crew import Crew
from aioenv.rendering.lanes import Lane
from aioenv.trace import Trace, wanted

__all__ = ["PoolLife"]

_log = logging.getLogger("aioenv")


class PoolLife:
    """Something that is started by an await, belongs to the loop of that await, and must be closed.

    Args:
        crew: the workers.
        timeout_s, retry: see `Lane`.

    Attributes:
        closed: whether `close` has been called.
    """

    closed = True  # until there is something to close
    _loop: asyncio.AbstractEventLoop | None = None
    _trace: Trace | None = None

    def __init__(self, crew: Crew, timeout_s: float | None, retry: bool) -> None:
        self._crew = crew
        self._timeout_s = timeout_s
        self._retry = retry
        self._lanes: list[Lane] = []
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._pid = os.getpid()
        self._number: Callable[[], int] = count(1).__next__  # of the next call, in a timeline

    def __repr__(self) -> str:
        state = "closed" if self.closed else "running" if self._lanes else "not started"
        return f"<{type(self).__name__} num_workers={self._crew.count} {state}>"

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ensure_started().__await__()

    async def __aenter__(self) -> Self:
        return await self._ensure_started()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _ensure_started(self) -> Self:
        """Start the workers, once. If this is cancelled, they are ended.

        Raises:
            RenderError: if no OpenGL backend works, or a device does not exist; the message says what to install.
            WorkerStartError: if a worker did not come up for another reason, a modder that raised, say; it has the
                worker's traceback.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            _open.add(self)
            self._starting = loop.create_task(self._start())
        self._check_loop()
        assert self._starting is not None
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            await self.close()
            raise
        except BaseException:
            self.closed = True
            raise
        return self

    async def _start(self) -> None:
        crew = self._crew
        await crew.start()
        lanes = [Lane(worker, crew.restarter, self._timeout_s, self._retry) for worker in crew.workers]
        crew.on_death = lambda worker: lanes[worker.index].on_death(worker)
        self._lanes = lanes
        if (path := wanted()) is not None:
            self.trace(path)

    async def close(self) -> None:
        """End the workers. What is being drawn fails with a ClosedError.

        Idempotent. If this is cancelled, the workers are killed at once.
        """
        self.closed = True
        _open.discard(self)
        if self._loop is None:
            return
        self._check_loop()
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._crew.abandon()
            while not self._closing.done():  # not for long: every process is being killed
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([self._closing])
            raise

    async def _close(self) -> None:
        assert self._starting is not None
        if not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        for lane in self._lanes:
            lane.drop(ClosedError("the render pool was closed"))
        await self._crew.close()
        self._end_trace()

    def __del__(self) -> None:
        if not self.closed and self._loop is not None and self._pid == os.getpid():
            self.closed = True
            self._crew.abandon()
            self._end_trace()
            warnings.warn(f"unclosed {self!r}; its workers were killed", ResourceWarning, source=self, stacklevel=2)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Collect a timeline of the workers, from now until the end of a `with` block over it, its `stop()` or `close`.

        Spans have the number of the call that they are of, from 1 (see `AsyncVectorEnv.trace`).

        Args:
            path: of the JSON file; one that is there is overwritten.

        Raises:
            RuntimeError: if a timeline is being collected already, or the pool is not started.
            ClosedError: if it is closed.
            OSError: if the file can't be written.
        """
        self._check_running()
        if self._trace is not None:
            raise RuntimeError(f"trace: {self._trace!r} is being collected; stop() it first")

        def attach(trace: Trace | None) -> None:
            self._trace = trace
            self._number = count(1).__next__
            for lane, worker in zip(self._lanes, self._crew.workers, strict=True):
                lane.trace = trace
                worker.trace(trace.tracks[worker.index] if trace is not None else None)

        trace = Trace(path, [f"render worker {worker.index}" for worker in self._crew.workers], lambda: attach(None))
        attach(trace)
        return trace

    def _end_trace(self) -> None:
        if self._trace is not None:
            try:
                self._trace.stop()
            except OSError:
                _log.exception("the timeline could not be written")

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the render pool has been closed")

    def _check_loop(self) -> None:
        if (loop := asyncio.get_running_loop()) is not self._loop:
            raise LoopError(f"this render pool belongs to the event loop {self._loop}, it was used from {loop}")

    def _check_running(self) -> asyncio.AbstractEventLoop:
        """The loop, if this is started, open, and used from it."""
        self._check_open()
        if self._loop is None or not self._lanes:
            raise RuntimeError(f"{self!r}: start it first, with `async with pool:` or `await pool`")
        self._check_loop()
        return self._loop


# Started and not closed: at the end of the program, before modules are taken down, their workers are killed.
_open: weakref.WeakSet[PoolLife] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for pool in list(_open):
        pool.__del__()
