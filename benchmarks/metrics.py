"""Metrics besides throughput: latency, start-up, memory, uneven steps, statistics, images, loop time, training.

This module is the suite's registry of contenders: see `REGISTRY`.
"""

from __future__ import annotations

import asyncio
import compileall
import contextlib
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import aioenv
from aioenv.cli.bench import load_mark, median_load, ratios
from aioenv.cli.contenders import ACTION_BATCHES, Contender, NotApplicable, Outcome, TimedLoop, Workload, rows_of_batch
from aioenv.process.child import process_memory
from aioenv.process.launch import START_METHODS
from aioenv.stats.running import SharedRunningStats
from aioenv.stats.sharing import can_share
from benchmarks import contenders
from benchmarks.cluster import CLUSTER, TIANSHOU
from benchmarks.collectors import COLLECTED_KEYS, by_collectors, by_processes, by_rllib
from benchmarks.delayed_rollouts import DELAY_MS, DELAYED, DELAYED_KEYS
from benchmarks.images import (
    IMAGES_PER_S,
    QUALITIES,
    SIDE,
    bare_images,
    overlap,
    pixels_aioenv,
    pixels_gymnasium,
    pixels_native,
    pool_images,
    worker_images,
)
from benchmarks.loop_time import LOOP_TIME_KEYS, loop_time
from benchmarks.network import NETWORK, NETWORK_KEYS, NUM_ENVS
from benchmarks.resets import RATE, RESETS
from benchmarks.training import TRAINING_KEYS, TRAJECTORY, train_cleanrl, train_sac, train_sb3

__all__ = [
    "CONTENDERS",
    "METRICS",
    "REGISTRY",
    "Metric",
    "MetricContender",
    "print_metric",
    "refuse_differing",
    "summarize_metric",
]

REGISTRY = __name__  # in the terms of `aioenv.cli.contenders`

PRELOAD = ["numpy", "gymnasium", "mujoco", "gymnasium.envs.mujoco"]
MIN_WORKERS = 8  # with fewer, pages that forked workers share look like their own
MORE_ENVS = 8  # made in one process, to find out what one env takes
SETTLE_STEPS = 20
MIN_SLOTS = 8  # results that `recv` waits for
SHAPE = (17,)  # a HalfCheetah's observation
UPDATES = 20  # timed together

Measure = Callable[[Workload], dict[str, float]]
Loop = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True)
class Metric:
    """Numbers that are measured of several contenders.

    Attributes:
        title: its title in tables.
        keys: the names of the numbers.
        measures: by contender.
        baselines: column → the contender that the first number is compared with.
        env, num_envs: the default workload.
        same: a further number of each round, which is the same for all contenders; "" for none.
    """

    title: str
    keys: tuple[str, ...]
    measures: dict[str, Measure]
    baselines: dict[str, str]
    env: str
    num_envs: int
    same: str = ""


@dataclass(frozen=True)
class MetricContender:
    """A contender of a metric, as `rounds` measures it."""

    measure: Measure


# ---------------------------------------------------------------- latency


def _percentiles(seconds: list[float]) -> dict[str, float]:
    micro = np.array(seconds) * 1e6
    return {"p50 µs": float(np.percentile(micro, 50)), "p99 µs": float(np.percentile(micro, 99))}


def _latency_gymnasium(workload: Workload) -> dict[str, float]:
    from gymnasium.vector import AsyncVectorEnv

    return _latency_blocking(AsyncVectorEnv, workload)


def _latency_blocking(make: Callable[[list[Any]], Any], workload: Workload) -> dict[str, float]:
    actions = workload.actions()
    with contextlib.closing(make(workload.factories)) as envs:
        envs.reset(seed=0)
        taken: list[float] = []
        for number in TimedLoop(workload):
            if not number:
                taken.clear()
            began = time.perf_counter()
            envs.step(actions[number % ACTION_BATCHES])
            taken.append(time.perf_counter() - began)
    return _percentiles(taken)


def _latency_sync(workload: Workload) -> dict[str, float]:
    return _latency_blocking(partial(aioenv.sync.VectorEnv, **workload.options), workload)


def _latency_aioenv(run: Loop, workload: Workload) -> dict[str, float]:
    async def main() -> dict[str, float]:
        actions = workload.actions()
        async with aioenv.AsyncVectorEnv(workload.factories, **workload.options) as envs:
            await envs.reset(seed=0)
            taken: list[float] = []
            for number in TimedLoop(workload):
                if not number:
                    taken.clear()
                began = time.perf_counter()
                await envs.step(actions[number % ACTION_BATCHES])
                taken.append(time.perf_counter() - began)
        return _percentiles(taken)

    return run(main())  # type: ignore[no-any-return]


def _latency_streams(workload: Workload) -> dict[str, float]:
    return _latency_aioenv(asyncio.run, dataclasses.replace(workload, channel="streams"))


# ---------------------------------------------------------------- start-up


@contextlib.contextmanager
def _gymnasium_forkserver(workload: Workload, preload: bool) -> Iterator[Any]:
    """Start Gymnasium's with a fork server; with `preload` it imports beforehand what envs need."""
    import multiprocessing
    from multiprocessing import forkserver

    from gymnasium.vector import AsyncVectorEnv

    if preload:
        multiprocessing.set_forkserver_preload(PRELOAD)
    try:
        with contextlib.closing(AsyncVectorEnv(workload.factories, context="forkserver")) as envs:
            yield envs
    finally:
        # until the server is reaped, the CPU time of its workers counts as foreign load
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _aioenv_one_each(workload: Workload, start: Literal["forkserver", "spawn"]) -> aioenv.AsyncVectorEnv:
    n = workload.num_envs
    return aioenv.AsyncVectorEnv(workload.factories, num_workers=n, start=start, channel=workload.channel)


def _start_gymnasium(preload: bool, workload: Workload) -> dict[str, float]:
    began = time.perf_counter()
    with _gymnasium_forkserver(workload, preload):  # its constructor compares the spaces of all envs
        return {"ready s": time.perf_counter() - began}


def _start_aioenv(start: Literal["forkserver", "spawn"], workload: Workload) -> dict[str, float]:
    # as pip does; in a checkout PYTHONDONTWRITEBYTECODE may prevent it
    compileall.compile_dir(Path(aioenv.__file__).parent, quiet=2)

    async def main() -> dict[str, float]:
        began = time.perf_counter()
        async with _aioenv_one_each(workload, start):
            return {"ready s": time.perf_counter() - began}

    return aioenv.run(main())


# ---------------------------------------------------------------- a worker's memory


def _private_mib(pids: Sequence[int | None]) -> float:
    """Return the median of these processes' private dirty memory, in MiB.

    Raises:
        NotApplicable: if the platform does not report it.
    """
    found = [memory.private_dirty for pid in pids if pid is not None and (memory := process_memory(pid)) is not None]
    if not found:
        raise NotApplicable("this platform does not report the memory of a process")
    return statistics.median(found) / 2**20


def _env_mib(workload: Workload) -> float:
    """Measure what one more env takes in a process that holds one already, in MiB."""
    envs = []

    def add() -> None:
        envs.append(env := workload.make_env())
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


def _worker_memory(workload: Workload, private_mib: Callable[[Workload], float]) -> dict[str, float]:
    """Measure a worker's private memory without its env's, and an env's."""
    env = _env_mib(workload)
    worker = private_mib(dataclasses.replace(workload, num_envs=max(workload.num_envs, MIN_WORKERS)))
    return {"worker MiB": worker - env, "an env MiB": env}


def _memory_gymnasium(preload: bool, workload: Workload) -> dict[str, float]:
    def private_mib(workload: Workload) -> float:
        with _gymnasium_forkserver(workload, preload) as envs:
            envs.reset(seed=0)
            for _ in range(SETTLE_STEPS):
                envs.step(envs.action_space.sample())
            envs.set_attr("collect_garbage", gc.collect)
            envs.call("collect_garbage")
            return _private_mib([process.pid for process in envs.processes])

    return _worker_memory(workload, private_mib)


def _memory_aioenv(start: Literal["forkserver", "spawn"], workload: Workload) -> dict[str, float]:
    async def main(workload: Workload) -> float:
        async with _aioenv_one_each(workload, start) as envs:
            await envs.reset(seed=0)
            for _ in range(SETTLE_STEPS):
                await envs.step(envs.action_space.sample())
            await envs.set_attr("collect_garbage", gc.collect)
            await envs.call("collect_garbage")
            return _private_mib([worker.pid for worker in envs.workers])

    return _worker_memory(workload, lambda workload: aioenv.run(main(workload)))


def _by_launcher(gymnasium: Callable[..., Any], ours: Callable[..., Any]) -> dict[str, Measure]:
    """Name the contenders by how they start their workers."""
    return {
        "gymnasium-forkserver": partial(gymnasium, False),
        "gymnasium-preload": partial(gymnasium, True),
        **{f"aioenv-{start}": partial(ours, start) for start in START_METHODS},
    }


# ---------------------------------------------------------------- steps that take unevenly long


def _shares(counts: npt.NDArray[np.int64], seconds: float) -> dict[str, float]:
    """Return the throughput, and the least and the most steps of a slot, relative to an even share."""
    even = counts.mean()
    return {
        "env-steps/s": float(counts.sum() / seconds),
        "least share": float(counts.min() / even),
        "most share": float(counts.max() / even),
    }


def _uneven_recv(workload: Workload) -> dict[str, float]:
    """Step one worker a slot; take results as soon as some are ready."""

    async def main() -> dict[str, float]:
        actions = workload.actions()
        n = workload.num_envs
        async with aioenv.AsyncVectorEnv(workload.factories, num_workers=n, **workload.options) as envs:
            envs.send_reset(seed=0)
            counts = np.zeros(n, np.int64)
            for number in (loop := TimedLoop(workload)):
                if not number:
                    counts[:] = 0
                ready = await envs.recv(min(MIN_SLOTS, n))
                counts[ready.slots] += 1
                batch = actions[number % ACTION_BATCHES]
                envs.send(rows_of_batch(batch, ready.slots, envs.single_action_space), ready.slots)
            return _shares(counts, loop.seconds)

    return aioenv.run(main())


def _uneven_step(workload: Workload) -> dict[str, float]:
    """Step one worker a slot, in lock-step."""

    async def main() -> dict[str, float]:
        actions = workload.actions()
        n = workload.num_envs
        async with aioenv.AsyncVectorEnv(workload.factories, num_workers=n, **workload.options) as envs:
            await envs.reset(seed=0)
            for number in (loop := TimedLoop(workload)):
                await envs.step(actions[number % ACTION_BATCHES])
            return _shares(np.full(n, loop.count), loop.seconds)

    return aioenv.run(main())


def _uneven_gymnasium(workload: Workload) -> dict[str, float]:
    """Step Gymnasium's, in lock-step."""
    from gymnasium.vector import AsyncVectorEnv

    actions = workload.actions()
    with contextlib.closing(AsyncVectorEnv(workload.factories)) as envs:
        envs.reset(seed=0)
        for number in (loop := TimedLoop(workload)):
            envs.step(actions[number % ACTION_BATCHES])
    return _shares(np.full(workload.num_envs, loop.count), loop.seconds)


# ---------------------------------------------------------------- shared statistics


def _median_us(seconds: float, work: Callable[[], object], times: int) -> float:
    """Time a function, so many calls at a time; return the median of one call, in µs."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(times):
            work()
        taken.append((time.perf_counter() - began) / times)
    return float(np.median(taken)) * 1e6


def _stats_aioenv(live: bool, workload: Workload) -> dict[str, float]:
    """Time an update and a merge; with `live` samples count at once for all slots."""
    if not can_share():
        raise NotApplicable("no anonymous shared memory here")
    sample = np.zeros(SHAPE, np.float32)
    with SharedRunningStats(SHAPE, workload.num_envs, live=live) as stats:
        slots = [stats.at(slot) for slot in range(workload.num_envs)]
        update_us = _median_us(workload.seconds, lambda: slots[0].update(sample), UPDATES)

        def step() -> None:
            for slot in slots:
                slot.update(sample)
            stats.merge()

        # a merge is timed when each slot has new samples
        whole = _median_us(workload.seconds, step, 1)
    return {"update µs": update_us, "merge µs": max(0.0, whole - update_us * workload.num_envs)}


def _stats_gymnasium(workload: Workload) -> dict[str, float]:
    """Time Gymnasium's wrapper of one env, whose statistics are that env's alone."""
    from gymnasium.wrappers.utils import RunningMeanStd

    make: Any = RunningMeanStd
    stats = make(shape=SHAPE, dtype=np.float32)
    update = partial(stats.update, np.zeros((1, *SHAPE), np.float32))
    return {"update µs": _median_us(workload.seconds, update, UPDATES), "merge µs": 0.0}


# ---------------------------------------------------------------- all metrics

_LAUNCHERS = {"x stock": "gymnasium-forkserver", "x preload": "gymnasium-preload"}

METRICS: dict[str, Metric] = {
    "latency": Metric(
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
    "startup": Metric(
        "From the constructor until every env is built and its spaces are known, one worker an env",
        ("ready s",),
        _by_launcher(_start_gymnasium, _start_aioenv),
        _LAUNCHERS,
        env="HalfCheetah-v5",
        num_envs=64,
    ),
    "memory": Metric(
        f"Private dirty memory of a worker without its env's, with at least {MIN_WORKERS} workers of one env alive",
        ("worker MiB", "an env MiB"),
        _by_launcher(_memory_gymnasium, _memory_aioenv),
        _LAUNCHERS,
        env="HalfCheetah-v5",
        num_envs=MIN_WORKERS,
    ),
    "uneven": Metric(
        "Steps that take unevenly long, one worker a slot",
        ("env-steps/s", "least share", "most share"),
        {"gymnasium-async": _uneven_gymnasium, "aioenv-step": _uneven_step, "aioenv-recv": _uneven_recv},
        {"x async": "gymnasium-async", "x lock-step": "aioenv-step"},
        env="uneven",
        num_envs=32,
    ),
    "resets": Metric(
        "Resets that take as long as many steps, one worker an env",
        (RATE,),
        RESETS,
        {"x async": "gymnasium-async", "x bare": "bare", "x instant": "aioenv-instant"},
        env="SleepingResets-v0",
        num_envs=32,
    ),
    "cluster": Metric(
        "Workers over TCP and on Ray, one a CPU, and what else steps envs on Ray",
        (RATE,),
        CLUSTER,
        {"x local": "aioenv", "x sockets": "sockets", "x actors": "ray-actors", "x Tianshou": TIANSHOU},
        env="CartPole-v1",
        num_envs=64,
    ),
    "network": Metric(
        "Steps of workers over a network that delays, by the delay each way in ms",
        NETWORK_KEYS,
        NETWORK,
        {},
        env="noop",
        num_envs=NUM_ENVS,
    ),
    "network-rollouts": Metric(
        f"Rollouts of two collectors over a network that delays by {DELAY_MS:g} ms each way, against no delay",
        DELAYED_KEYS,
        DELAYED,
        {},
        env="noop",
        num_envs=NUM_ENVS,
    ),
    "stats": Metric(
        "Shared statistics of a HalfCheetah's observations: an update, and the merge of one from each slot",
        ("update µs", "merge µs"),
        {
            "gymnasium": _stats_gymnasium,
            "aioenv-slots": partial(_stats_aioenv, False),
            "aioenv-live": partial(_stats_aioenv, True),
        },
        {"x gymnasium": "gymnasium"},
        env="noop",
        num_envs=64,
    ),
    "images": Metric(
        f"Images of {SIDE}x{SIDE} as observations",
        ("env-steps/s",),
        {
            "gymnasium-async": pixels_gymnasium,
            "aioenv-exact": partial(pixels_aioenv, "exact"),
            "aioenv-fast": partial(pixels_aioenv, "fast"),
            "aioenv-coarse": partial(pixels_aioenv, "coarse"),
            "aioenv-native-exact": partial(pixels_native, "exact"),
            "aioenv-native-fast": partial(pixels_native, "fast"),
            "aioenv-native-coarse": partial(pixels_native, "coarse"),
        },
        {"x async": "gymnasium-async"},
        env="HalfCheetah-v5",
        num_envs=16,
    ),
    "overlap": Metric(
        "Physics and images at once, in one worker each, over the longer of the two, and over one after the other",
        ("of longer", "of serial", "physics ms", "images ms"),
        {"aioenv": overlap},
        {},
        env="Humanoid-v5",
        num_envs=16,
    ),
    **{
        f"pool-{quality}": Metric(
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
    "render-workers": Metric(
        "Images of 84x84 a second, by the number of render workers on one device",
        tuple(f"{quality} /s" for quality in QUALITIES),
        {f"aioenv-{n}": partial(worker_images, n) for n in (1, 2, 4, 8)},
        {"x 1": "aioenv-1"},
        env="HalfCheetah-v5",
        num_envs=64,
    ),
    "loop-time": Metric(
        "CPU time of the loop's thread in one step, in µs: of callbacks, and of the whole thread",
        LOOP_TIME_KEYS,
        {"aioenv-asyncio": loop_time},
        {},
        env="CartPole-v1",
        num_envs=64,
    ),
    "collectors": Metric(
        "Rollouts with a policy: collectors, and as many plain processes that keep their rollouts to themselves",
        COLLECTED_KEYS,
        {
            "processes": partial(by_processes, False),
            "aioenv": partial(by_collectors, False, 0),
            "aioenv-prefetch": partial(by_collectors, False, 1),
            "processes-torch": partial(by_processes, True),
            "aioenv-torch": partial(by_collectors, True, 0),
            "rllib": by_rllib,
        },
        {"x processes": "processes", "x processes-torch": "processes-torch", "x rllib": "rllib"},
        env="CartPole-v1",
        num_envs=64,
    ),
    "training": Metric(
        "PPO as in CleanRL, learning included: env-steps a second of the whole, and the mean return in the end",
        TRAINING_KEYS,
        {
            "gymnasium-sync": partial(train_cleanrl, "gymnasium"),
            "aioenv-in-process-sync": partial(train_cleanrl, "in process"),
            "aioenv-sync": partial(train_cleanrl, "workers"),
            "aioenv-auto": partial(train_cleanrl, "auto"),
        },
        {"x sync": "gymnasium-sync"},
        env="CartPole-v1",
        num_envs=8,
        same=TRAJECTORY,
    ),
    "training-continuous": Metric(
        "PPO as in CleanRL with actions that are vectors: env-steps a second, and the mean return in the end",
        TRAINING_KEYS,
        {"gymnasium-sync": partial(train_cleanrl, "gymnasium"), "aioenv-auto": partial(train_cleanrl, "auto")},
        {"x sync": "gymnasium-sync"},
        env="HalfCheetah-v5",
        num_envs=8,
        same=TRAJECTORY,
    ),
    "training-sac": Metric(
        "SAC as in CleanRL, an update a step: env-steps a second, and the mean return in the end",
        TRAINING_KEYS,
        {"gymnasium-sync": partial(train_sac, "gymnasium"), "aioenv-auto": partial(train_sac, "auto")},
        {"x sync": "gymnasium-sync"},
        env="Hopper-v5",
        num_envs=8,
        same=TRAJECTORY,
    ),
    "training-sb3": Metric(
        "PPO of Stable-Baselines3, learning included: env-steps a second of the whole, and the mean return in the end",
        TRAINING_KEYS,
        {
            "sb3-dummy": partial(train_sb3, "dummy"),
            "aioenv-sb3-in-process": partial(train_sb3, "in process"),
            "aioenv-sb3": partial(train_sb3, "workers"),
        },
        {"x dummy": "sb3-dummy"},
        env="CartPole-v1",
        num_envs=8,
        same=TRAJECTORY,
    ),
}

CONTENDERS: dict[str, Contender | MetricContender] = {
    **contenders.CONTENDERS,
    **{
        f"{key}: {name}": MetricContender(measure)
        for key, metric in METRICS.items()
        for name, measure in metric.measures.items()
    },
}


def refuse_differing(metric: Metric, outcomes: Mapping[str, Outcome]) -> None:
    """Drop the results of contenders that did not do the same as the first one, if the metric asks for it."""
    if not metric.same:
        return
    measured = {name: [each[metric.same] for each in outcome.rounds] for name, outcome in outcomes.items()}
    first, expected = next(((name, found[0]) for name, found in measured.items() if found), ("", None))
    for name, found in measured.items():
        if any(one != expected for one in found):
            outcome = outcomes[name]
            outcome.rounds, outcome.broken = [], True
            outcome.problem = f"its {metric.same} differs from that of the first round of {first}"


def summarize_metric(env: str, metric: Metric, outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """Make a row for each contender.

    Returns:
        For each: "env", "contender", "problem", "rounds" (as measured) and, if there are any, the medians of the
        metric's numbers, and the "ratios" of the first of them to its baselines', medians over rounds.
    """
    own = {name.partition(": ")[2]: [r[metric.keys[0]] for r in o.rounds] for name, o in outcomes.items()}
    rows = []
    for name, outcome in zip(own, outcomes.values(), strict=True):
        row: dict[str, Any] = {"env": env, "contender": name, "problem": outcome.problem, "rounds": outcome.rounds}
        if outcome.rounds:
            row |= {key: statistics.median(r[key] for r in outcome.rounds) for key in metric.keys}
            row["others_cpus"] = median_load(outcome.rounds)
            to_all = ratios(own[name], own)
            row["ratios"] = {base: to_all[base] for base in metric.baselines.values() if base in to_all}
        rows.append(row)
    return rows


def print_metric(title: str, metric: Metric, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of one env."""
    widths = {key: max(12, len(key) + 2) for key in metric.keys}
    heads = "".join(f"{key:>{widths[key]}}" for key in metric.keys)
    print(f"\n{title:<27}{heads}{''.join(f'{head:>13}' for head in metric.baselines)}")
    for row in rows:
        if "ratios" not in row:
            print(f"{row['contender']:<27}{row['problem']}")
            continue
        numbers = "".join(f"{row[key]:>{widths[key]},.2f}" for key in metric.keys)
        columns = (
            f"{row['ratios'][b]:>13.3f}" if b in row["ratios"] else f"{'-':>13}" for b in metric.baselines.values()
        )
        print(f"{row['contender']:<27}{numbers}{''.join(columns)}{load_mark(row)}")
        if row["problem"]:
            print(f"{'':<27}after {len(row['rounds'])} rounds: {row['problem']}")
