"""What a vector env costs beside its throughput: a round trip, a start, a worker's memory."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import aioenv
from aioenv.cli.bench.contenders import closing
from aioenv.cli.bench.tasks import ACTION_BATCHES, Task
from aioenv.workers.launch import START_METHODS

__all__ = ["FIGURES", "Figure"]

MIN_WORKERS = 8  # with fewer, pages that forked workers share look like their own
MORE_ENVS = 4  # so many more in each worker, to know what one env takes
COLLECT_STEPS = 20

Measure = Callable[[Task], dict[str, float]]
_Loop = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True)
class Figure:
    """Something to measure of several contenders.

    Attributes:
        title: what it is.
        keys: the names of the numbers, as they are shown.
        measures: by contender; ratios are those of the first number to the first contender's.
    """

    title: str
    keys: tuple[str, ...]
    measures: dict[str, Measure]


# ------------------------------------------------------------ a round trip


def _percentiles(seconds: list[float]) -> dict[str, float]:
    micro = np.array(seconds) * 1e6
    return {"p50 µs": float(np.percentile(micro, 50)), "p99 µs": float(np.percentile(micro, 99))}


def _latency_gymnasium(task: Task) -> dict[str, float]:
    from gymnasium.vector import AsyncVectorEnv

    actions = task.actions()
    envs = AsyncVectorEnv([task.make_env] * task.num_envs)
    with closing([envs]):
        envs.reset(seed=0)
        taken: list[float] = []
        for budget in (task.warm_up_s, task.seconds):
            taken, end = [], time.perf_counter() + budget
            while not taken or time.perf_counter() < end:
                began = time.perf_counter()
                envs.step(actions[len(taken) % ACTION_BATCHES])
                taken.append(time.perf_counter() - began)
    return _percentiles(taken)


def _latency_aioenv(run: _Loop, channel: str, task: Task) -> dict[str, float]:
    async def main() -> dict[str, float]:
        actions = task.actions()
        async with aioenv.AsyncVectorEnv([task.make_env] * task.num_envs, channel=channel) as envs:
            await envs.reset(seed=0)
            taken: list[float] = []
            for budget in (task.warm_up_s, task.seconds):
                taken, end = [], time.perf_counter() + budget
                while not taken or time.perf_counter() < end:
                    began = time.perf_counter()
                    await envs.step(actions[len(taken) % ACTION_BATCHES])
                    taken.append(time.perf_counter() - began)
        return _percentiles(taken)

    return run(main())  # type: ignore[no-any-return]


# ------------------------------------------------------------ a start


def _start_gymnasium(preload: bool, task: Task) -> dict[str, float]:
    import multiprocessing

    from gymnasium.vector import AsyncVectorEnv

    if preload:
        multiprocessing.set_forkserver_preload(["numpy", "gymnasium", "mujoco", "gymnasium.envs.mujoco"])
    began = time.perf_counter()
    envs = AsyncVectorEnv([task.make_env] * task.num_envs, context="forkserver")
    with closing([envs]):
        return {"ready s": time.perf_counter() - began}


def _start_aioenv(start: str, task: Task) -> dict[str, float]:
    async def main() -> dict[str, float]:
        began = time.perf_counter()
        n = task.num_envs
        async with aioenv.AsyncVectorEnv([task.make_env] * n, num_workers=n, start=start):
            return {"ready s": time.perf_counter() - began}

    return aioenv.run(main())


# ------------------------------------------------------------ a worker's memory


def _memory(start: str, task: Task) -> dict[str, float]:
    """Private_Dirty of a worker: after a reset, some steps and a collection, without what its envs take."""

    async def of_a_worker(envs_each: int) -> float:
        workers = max(task.num_envs, MIN_WORKERS)
        factories = [partial(_collectable, task)] * (workers * envs_each)
        async with aioenv.AsyncVectorEnv(factories, num_workers=workers, start=start) as envs:
            await envs.reset(seed=0)
            for _ in range(COLLECT_STEPS):
                await envs.step(envs.action_space.sample())
            await envs.call("collect_garbage")
            sizes = [worker.memory.private_dirty for worker in envs.workers if worker.memory is not None]
        return statistics.median(sizes) / 2**20

    async def main() -> dict[str, float]:
        one, more = await of_a_worker(1), await of_a_worker(1 + MORE_ENVS)
        env = (more - one) / MORE_ENVS
        return {"worker MiB": one - env, "and an env MiB": env}

    return aioenv.run(main())


def _collectable(task: Task) -> Any:
    env = task.make_env()
    env.unwrapped.collect_garbage = gc.collect
    return env


_ASYNCIO: _Loop = asyncio.run
_UVLOOP: _Loop = aioenv.run

FIGURES: dict[str, Figure] = {
    "latency": Figure(
        "Round trip of one step",
        ("p50 µs", "p99 µs"),
        {
            "gymnasium AsyncVectorEnv": _latency_gymnasium,
            "aioenv (uvloop)": partial(_latency_aioenv, _UVLOOP, "auto"),
            "aioenv (asyncio)": partial(_latency_aioenv, _ASYNCIO, "auto"),
            "aioenv (asyncio, streams)": partial(_latency_aioenv, _ASYNCIO, "streams"),
        },
    ),
    "startup": Figure(
        "From the constructor until every env is built, one worker an env",
        ("ready s",),
        {
            "gymnasium forkserver": partial(_start_gymnasium, False),
            "the same, preload set": partial(_start_gymnasium, True),
            **{f"aioenv {start}": partial(_start_aioenv, start) for start in START_METHODS},
        },
    ),
    "memory": Figure(
        f"Private memory of a worker, with at least {MIN_WORKERS} alive",
        ("worker MiB", "and an env MiB"),
        {f"aioenv {start}": partial(_memory, start) for start in START_METHODS},
    ),
}
