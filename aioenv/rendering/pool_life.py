"""The life of a `RenderPool`, from before its start until it is closed or forgotten."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import count
from typing import Self

from aioenv.errors import ClosedError
from aioenv.process.async_resource import AsyncResource
from aioenv.rendering.queue import RenderQueue
from aioenv.rendering.workers import HasRenderWorkers, RenderWorkers
from aioenv.tracing.timeline import Trace, Traced, path_from_environment

__all__ = ["PoolLife"]


class PoolLife(AsyncResource, Traced, HasRenderWorkers):
    """The workers of a pool, as something that is started and closed.

    Args:
        crew: the workers.
        timeout_s, retry: see `RenderQueue`.

    Attributes:
        closed: whether `close` has been called.
    """

    _noun = "render pool"

    def __init__(self, crew: RenderWorkers, timeout_s: float | None, retry: bool) -> None:
        self._crew = crew
        self._timeout_s = timeout_s
        self._retry = retry
        self._lanes: list[RenderQueue] = []
        self._number: Callable[[], int] = count(1).__next__  # of the next call, in a timeline

    def __repr__(self) -> str:
        state = "closed" if self.closed else "running" if self._lanes else "not started"
        return f"<{type(self).__name__} num_workers={self._crew.count} {state}>"

    async def _ensure_started(self) -> Self:
        """Start the workers, once. If this is cancelled, they are ended.

        Raises:
            RenderError: if no OpenGL backend works, or a device does not exist; the message says what to install.
            WorkerStartError: if a worker did not come up for another reason, a modder that raised, say; it has the
                worker's traceback.
            StartTimeout: if none was up within `start_timeout_s`: where it hung is in the message.
        """
        return await super()._ensure_started()

    async def _start(self) -> None:
        crew = self._crew
        path = path_from_environment()
        await crew.start()
        lanes = [RenderQueue(worker, crew.restarter, self._timeout_s, self._retry) for worker in crew.workers]
        crew.on_death = lambda worker: lanes[worker.index].on_death(worker)
        self._lanes = lanes
        if path is not None:
            self.trace(path)

    async def close(self) -> None:
        """End the workers. What is being drawn fails with a ClosedError.

        Idempotent. If this is cancelled, the workers are killed at once.
        """
        await self._close_once(self._close)

    async def _close(self) -> None:
        try:
            for lane in self._lanes:
                lane.drop(ClosedError("the render pool was closed"))
        finally:  # whatever went wrong before: no process may be left
            try:
                await self._crew.close()
            finally:
                self._stop_trace()

    def _abandon(self) -> None:
        self._crew.abandon()
        self._stop_trace()

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

        def attach(trace: Trace | None) -> None:
            self._number = count(1).__next__
            for lane, worker in zip(self._lanes, self._crew.workers, strict=True):
                lane.trace = trace
                worker.trace(trace.tracks[worker.index] if trace is not None else None)

        return self._start_trace(path, [f"render worker {worker.index}" for worker in self._crew.workers], attach)

    def _check_running(self) -> asyncio.AbstractEventLoop:
        """The loop, if this is started, open, and used from it."""
        self._check_open()
        if self._loop is None or not self._lanes:
            raise RuntimeError(f"{self!r}: start it first, with `async with pool:` or `await pool`")
        self._check_loop()
        return self._loop
