"""How long a step in flight keeps the event loop from doing anything else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import aioenv
from aioenv.cli.bench.tasks import ACTION_BATCHES, Passes, Task

__all__ = ["CallbackClock", "LoopTime", "loop_time"]


@dataclass(frozen=True)
class LoopTime:
    """CPU time of the loop's thread per step, in milliseconds.

    Attributes:
        steps: how many steps were measured.
        callbacks_p50, callbacks_p99: of callbacks alone, tasks and the step's own coroutine included.
        thread_p50, thread_p99: of the whole thread, the loop's own work and its system calls included.
        wall_p50: how long a step took.
    """

    steps: int
    callbacks_p50: float
    callbacks_p99: float
    thread_p50: float
    thread_p99: float
    wall_p50: float


class CallbackClock:
    """CPU time that asyncio's callbacks take on this thread, from entering it to leaving it.

    A task's step is a callback too. Each callback costs two readings of the clock more, which count as its own.

    Attributes:
        spans: how long each callback took, in seconds.
    """

    def __init__(self) -> None:
        self.spans: list[float] = []
        self._past = 0.0
        self._since: float | None = None

    def read(self) -> float:
        """Seconds of CPU time in callbacks so far, the one that runs now included."""
        running = 0.0 if self._since is None else time.thread_time() - self._since
        return self._past + running

    @contextlib.contextmanager
    def running(self) -> Iterator[CallbackClock]:
        """Measure while the block runs; only asyncio's own loop can be measured."""
        handles: Any = asyncio.Handle
        original = handles._run

        def run(handle: Any) -> None:
            self._since = time.thread_time()
            try:
                original(handle)
            finally:
                if self._since is not None:  # measuring may have begun within this callback, and ends within one
                    self.spans.append(time.thread_time() - self._since)
                    self._past += self.spans[-1]
                    self._since = None

        self._since = time.thread_time()
        handles._run = run
        try:
            yield self
        finally:
            handles._run = original
            self._past, self._since = self.read(), None


def loop_time(task: Task) -> LoopTime:
    """Step envs on asyncio's own loop and measure its thread."""
    return asyncio.run(_loop_time(task))


async def _loop_time(task: Task) -> LoopTime:
    actions = task.actions()
    rows: list[tuple[float, float, float]] = []
    async with aioenv.AsyncVectorEnv([task.make_env] * task.num_envs, **task.options) as envs:
        await envs.reset(seed=0)
        with CallbackClock().running() as clock:
            await asyncio.sleep(0)  # from here on every callback is measured
            for number in Passes(task):
                if not number:
                    rows.clear()
                before = clock.read(), time.thread_time(), time.perf_counter()
                await envs.step(actions[number % ACTION_BATCHES])
                after = clock.read(), time.thread_time(), time.perf_counter()
                rows.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
    callbacks, thread, wall = np.array(rows).T * 1e3
    return LoopTime(
        steps=len(rows),
        callbacks_p50=float(np.percentile(callbacks, 50)),
        callbacks_p99=float(np.percentile(callbacks, 99)),
        thread_p50=float(np.percentile(thread, 50)),
        thread_p99=float(np.percentile(thread, 99)),
        wall_p50=float(np.percentile(wall, 50)),
    )
