"""Measure how long a step in flight keeps the event loop busy."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import aioenv
from aioenv.cli.contenders import ACTION_BATCHES, TimedLoop, Workload

__all__ = ["LOOP_TIME_KEYS", "CallbackClock", "loop_time"]

# Times of callbacks alone, tasks and the step's own coroutine included; of the whole thread, with the loop's own work
# and its system calls; and the wall time of a step.
LOOP_TIME_KEYS = ("callbacks p50", "callbacks p99", "thread p50", "thread p99", "step p50", "step p99")


class CallbackClock:
    """Measures the CPU time of asyncio's callbacks on this thread.

    A task's step is a callback too. Each callback costs two more readings of the clock, which count as its own.

    Attributes:
        spans: how long each callback took, in seconds.
    """

    def __init__(self) -> None:
        self.spans: list[float] = []
        self._past = 0.0
        self._since: float | None = None

    def read(self) -> float:
        """Return the seconds of CPU time in callbacks so far, the running one included."""
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
                if self._since is not None:  # measuring may begin and end within a callback
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


def loop_time(workload: Workload) -> dict[str, float]:
    """Step envs on asyncio's own loop and measure its thread: `LOOP_TIME_KEYS` in microseconds, and "steps"."""
    return asyncio.run(_loop_time(workload))


async def _loop_time(workload: Workload) -> dict[str, float]:
    actions = workload.actions()
    rows: list[tuple[float, float, float]] = []
    async with aioenv.AsyncVectorEnv(workload.factories, **workload.options) as envs:
        await envs.reset(seed=0)
        with CallbackClock().running() as clock:
            await asyncio.sleep(0)  # from here on every callback is measured
            for number in TimedLoop(workload):
                if not number:
                    rows.clear()
                before = clock.read(), time.thread_time(), time.perf_counter()
                await envs.step(actions[number % ACTION_BATCHES])
                after = clock.read(), time.thread_time(), time.perf_counter()
                rows.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
    callbacks, thread, wall = np.array(rows).T * 1e6
    percentiles = [np.percentile(times, (50, 99)) for times in (callbacks, thread, wall)]
    numbers = [float(number) for pair in percentiles for number in pair]
    return dict(zip(LOOP_TIME_KEYS, numbers, strict=True)) | {"steps": len(rows)}
