"""What a vector env costs beside its throughput: a round trip, a start, a worker's memory; and who waits for whom."""

from __future__ import annotations

import asyncio
import compileall
import contextlib
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

import aioenv
from aioenv.cli.bench.common import NotApplicable
from aioenv.cli.bench.drawn import SIDE, overlap, pixels_aioenv, pixels_gymnasium, pixels_native
from aioenv.cli.bench.pools import IMAGES_PER_S, QUALITIES, bare_images, pool_images, worker_images
from aioenv.cli.bench.shared_stats import stats_gymnasium, stats_live, stats_slots
from aioenv.cli.bench.tasks import ACTION_BATCHES, Passes, Task
from aioenv.cli.bench.uneven import uneven_gymnasium, uneven_recv, uneven_step
from aioenv.process.child import process_memory
from aioenv.process.launch import START_METHODS

__all__ = ["FIGURES", "Figure"]

PRELOAD = ["numpy", "gymnasium", "mujoco", "gymnasium.envs.mujoco"]
MIN_WORKERS = 8  # with fewer, pages that forked workers share look like their own
MORE_ENVS = 8  # so many more in one process, to know what one of them takes
SETTLE_STEPS = 20

Measure = Callable[[Task], dict[str, float]]
_Loop = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True)
class Figure:
    """Something to measure of several contenders.

    Attributes:
        title: what it is.
        keys: the names of the numbers, as they are shown.
        measures: by contender.
        baselines: column → the contender that the first number is compared with.
        env, num_envs: what is measured unless something else is asked for.
    """

    title: str
    keys: tuple[str, ...]
    measures: dict[str, Measure]
    baselines: dict[str, str]
    env: str
    num_envs: int


# ------------------------------------------------------------ a round trip


def _percentiles(seconds: list[float]) -> dict[str, float]:
    micro = np.array(seconds) * 1e6
    return {"p50 µs": float(np.percentile(micro, 50)), "p99 µs": float(np.percentile(micro, 99))}


def _latency_gymnasium(task: Task) -> dict[str, float]:
    from gymnasium.vector import AsyncVectorEnv

    return _latency_blocking(AsyncVectorEnv, task)


def _latency_blocking(make: Callable[[list[Any]], Any], task: Task) -> dict[str, float]:
    actions = task.actions()
    with contextlib.closing(make([task.make_env] * task.num_envs)) as envs:
        envs.reset(seed=0)
        taken: list[float] = []
        for number in Passes(task):
            if not number:
                taken.clear()
            began = time.perf_counter()
            envs.step(actions[number % ACTION_BATCHES])
            taken.append(time.perf_counter() - began)
    return _percentiles(taken)


def _latency_sync(task: Task) -> dict[str, float]:
    return _latency_blocking(partial(aioenv.sync.VectorEnv, **task.options), task)


def _latency_aioenv(run: _Loop, task: Task) -> dict[str, float]:
    async def main() -> dict[str, float]:
        actions = task.actions()
        async with aioenv.AsyncVectorEnv([task.make_env] * task.num_envs, **task.options) as envs:
            await envs.reset(seed=0)
            taken: list[float] = []
            for number in Passes(task):
                if not number:
                    taken.clear()
                began = time.perf_counter()
                await envs.step(actions[number % ACTION_BATCHES])
                taken.append(time.perf_counter() - began)
        return _percentiles(taken)

    return run(main())  # type: ignore[no-any-return]


def _latency_streams(task: Task) -> dict[str, float]:
    return _latency_aioenv(asyncio.run, dataclasses.replace(task, channel="streams"))


# ------------------------------------------------------------ a start


@contextlib.contextmanager
def _gymnasium_forkserver(task: Task, preload: bool) -> Iterator[Any]:
    """Gymnasium's, from a fork server, as it comes or told to import beforehand what is needed."""
    import multiprocessing
    from multiprocessing import forkserver

    from gymnasium.vector import AsyncVectorEnv

    if preload:
        multiprocessing.set_forkserver_preload(PRELOAD)
    try:
        with contextlib.closing(AsyncVectorEnv([task.make_env] * task.num_envs, context="forkserver")) as envs:
            yield envs
    finally:
        # until somebody waits for the server, the CPU time of its workers looks like that of others
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _aioenv_one_each(task: Task, start: Literal["forkserver", "spawn"]) -> aioenv.AsyncVectorEnv:
    n = task.num_envs
    return aioenv.AsyncVectorEnv([task.make_env] * n, num_workers=n, start=start, channel=task.channel)


def _start_gymnasium(preload: bool, task: Task) -> dict[str, float]:
    began = time.perf_counter()
    with _gymnasium_forkserver(task, preload):  # its constructor compares the spaces of all envs
        return {"ready s": time.perf_counter() - began}


def _start_aioenv(start: Literal["forkserver", "spawn"], task: Task) -> dict[str, float]:
    # as pip does with whatever it installs; of a checkout Python may be told not to (PYTHONDONTWRITEBYTECODE)
    compileall.compile_dir(Path(aioenv.__file__).parent, quiet=2)

    async def main() -> dict[str, float]:
        began = time.perf_counter()
        async with _aioenv_one_each(task, start):
            return {"ready s": time.perf_counter() - began}

    return aioenv.run(main())


# ------------------------------------------------------------ a worker's memory


def _private_mib(pids: Sequence[int | None]) -> float:
    """The median of these processes' private dirty memory, in MiB.

    Raises:
        NotApplicable: if the platform does not tell.
    """
    found = [memory.private_dirty for pid in pids if pid is not None and (memory := process_memory(pid)) is not None]
    if not found:
        raise NotApplicable("this platform does not tell how much memory a process holds")
    return statistics.median(found) / 2**20


def _env_mib(task: Task) -> float:
    """What one env more takes in a process that holds one already, in MiB."""
    envs = []

    def add() -> None:
        envs.append(env := task.make_env())
        env.reset(seed=0)
        for _ in range(SETTLE_STEPS):
            if any(env.step(env.action_space.sample())[2:4]):
                env.reset()

    add()
    gc.collect()
    one = _private_mib([os.getpid()])
    for _ in range(MORE_ENVS):
        add()
    gc.collect()
    more = _private_mib([os.getpid()])
    for env in envs:
        env.close()
    return (more - one) / MORE_ENVS


def _figures_of_memory(task: Task, private_mib: Callable[[Task], float]) -> dict[str, float]:
    """A worker's private memory without that of its env, and that of an env."""
    env = _env_mib(task)
    worker = private_mib(dataclasses.replace(task, num_envs=max(task.num_envs, MIN_WORKERS)))
    return {"worker MiB": worker - env, "an env MiB": env}


def _memory_gymnasium(preload: bool, task: Task) -> dict[str, float]:
    def private_mib(task: Task) -> float:
        with _gymnasium_forkserver(task, preload) as envs:
            envs.reset(seed=0)
            for _ in range(SETTLE_STEPS):
                envs.step(envs.action_space.sample())
            envs.set_attr("collect_garbage", gc.collect)
            envs.call("collect_garbage")
            return _private_mib([process.pid for process in envs.processes])

    return _figures_of_memory(task, private_mib)


def _memory_aioenv(start: Literal["forkserver", "spawn"], task: Task) -> dict[str, float]:
    async def main(task: Task) -> float:
        async with _aioenv_one_each(task, start) as envs:
            await envs.reset(seed=0)
            for _ in range(SETTLE_STEPS):
                await envs.step(envs.action_space.sample())
            await envs.set_attr("collect_garbage", gc.collect)
            await envs.call("collect_garbage")
            return _private_mib([worker.pid for worker in envs.workers])

    return _figures_of_memory(task, lambda task: aioenv.run(main(task)))


def _by_launcher(gymnasium: Callable[..., Any], ours: Callable[..., Any]) -> dict[str, Measure]:
    """The contenders that differ in how they start their workers."""
    return {
        "gymnasium-forkserver": partial(gymnasium, False),
        "gymnasium-preload": partial(gymnasium, True),
        **{f"aioenv-{start}": partial(ours, start) for start in START_METHODS},
    }


_LAUNCHERS = {"x stock": "gymnasium-forkserver", "x preload": "gymnasium-preload"}

FIGURES: dict[str, Figure] = {
    "latency": Figure(
        "Round trip of one step",
        ("p50 µs", "p99 µs"),
        {
            "gymnasium-async": _latency_gymnasium,
            "aioenv": partial(_latency_aioenv, aioenv.run),
            "aioenv-asyncio": partial(_latency_aioenv, asyncio.run),
            "aioenv-sync": _latency_sync,
            "aioenv-streams": _latency_streams,
        },
        {"x async": "gymnasium-async"},
        env="noop",
        num_envs=1,
    ),
    "startup": Figure(
        "From the constructor until every env is built and its spaces are known, one worker an env",
        ("ready s",),
        _by_launcher(_start_gymnasium, _start_aioenv),
        _LAUNCHERS,
        env="HalfCheetah-v5",
        num_envs=64,
    ),
    "memory": Figure(
        f"Private dirty memory of a worker without its env's, with at least {MIN_WORKERS} workers of one env alive",
        ("worker MiB", "an env MiB"),
        _by_launcher(_memory_gymnasium, _memory_aioenv),
        _LAUNCHERS,
        env="HalfCheetah-v5",
        num_envs=MIN_WORKERS,
    ),
    "uneven": Figure(
        "Steps that take unevenly long, one worker a slot",
        ("env-steps/s", "least share", "most share"),
        {"gymnasium-async": uneven_gymnasium, "aioenv-step": uneven_step, "aioenv-recv": uneven_recv},
        {"x async": "gymnasium-async", "x lock-step": "aioenv-step"},
        env="uneven",
        num_envs=32,
    ),
    "stats": Figure(
        "Shared statistics of a HalfCheetah's observations: an update, and the merge of one from each slot",
        ("update µs", "merge µs"),
        {"gymnasium": stats_gymnasium, "aioenv-slots": stats_slots, "aioenv-live": stats_live},
        {"x gymnasium": "gymnasium"},
        env="noop",
        num_envs=64,
    ),
    "images": Figure(
        f"Images of {SIDE}x{SIDE} as observations",
        ("env-steps/s",),
        {
            "gymnasium-async": pixels_gymnasium,
            "aioenv-exact": partial(pixels_aioenv, "exact", None),
            "aioenv-fast": partial(pixels_aioenv, "fast", None),
            "aioenv-coarse": partial(pixels_aioenv, "coarse", None),
            "aioenv-native-exact": partial(pixels_native, "exact"),
            "aioenv-native-fast": partial(pixels_native, "fast"),
            "aioenv-native-coarse": partial(pixels_native, "coarse"),
        },
        {"x async": "gymnasium-async"},
        env="HalfCheetah-v5",
        num_envs=16,
    ),
    "overlap": Figure(
        "Physics and images at once, in one worker each, over the longer of the two, and over one after the other",
        ("of longer", "of serial", "physics ms", "images ms"),
        {"aioenv": overlap},
        {},
        env="Humanoid-v5",
        num_envs=16,
    ),
    **{
        f"pool-{quality}": Figure(
            f"Images of 84x84, {quality}, of a pool with a worker a CPU",
            (IMAGES_PER_S,),
            {
                "bare": partial(bare_images, quality, 1, False),
                "bare-all": partial(bare_images, quality, None, False),
                "bare-all-alike": partial(bare_images, quality, None, True),
                "aioenv": partial(pool_images, quality, "auto"),
                "aioenv-frames": partial(pool_images, quality, "frames"),
            },
            {"x bare": "bare", "x bare-all": "bare-all", "x alike": "bare-all-alike"},
            env="HalfCheetah-v5",
            num_envs=64,
        )
        for quality in QUALITIES
    },
    "render-workers": Figure(
        "Images of 84x84 a second, by the number of render workers on one device",
        tuple(f"{quality} /s" for quality in QUALITIES),
        {f"aioenv-{n}": partial(worker_images, n) for n in (1, 2, 4, 8)},
        {"x 1": "aioenv-1"},
        env="HalfCheetah-v5",
        num_envs=64,
    ),
}
