"""What shared statistics cost: a worker's update in each step, and the parent's merge."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from aioenv.cli.bench.common import NotApplicable
from aioenv.cli.bench.tasks import Task
from aioenv.stats.running import SharedRunningStats
from aioenv.stats.sharing import can_share

__all__ = ["SHAPE", "stats_gymnasium", "stats_live", "stats_slots"]

SHAPE = (17,)  # a HalfCheetah's observation
_UPDATES = 20  # that are timed together


def _micro(seconds: float, work: Callable[[], object], times: int) -> float:
    """The median time of one of `times` calls at a time, in µs."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(times):
            work()
        taken.append((time.perf_counter() - began) / times)
    return float(np.median(taken)) * 1e6


def _stats(task: Task, live: bool) -> dict[str, float]:
    if not can_share():
        raise NotApplicable("no shared memory without a name here")
    sample = np.zeros(SHAPE, np.float32)
    with SharedRunningStats(SHAPE, task.num_envs, live=live) as stats:
        slots = [stats.at(slot) for slot in range(task.num_envs)]
        update_us = _micro(task.seconds, lambda: slots[0].update(sample), _UPDATES)

        def step() -> None:
            for slot in slots:
                slot.update(sample)
            stats.merge()

        # what a merge takes, when each slot has seen something
        whole = _micro(task.seconds, step, 1)
    return {"update µs": update_us, "merge µs": max(0.0, whole - update_us * task.num_envs)}


def stats_slots(task: Task) -> dict[str, float]:
    """Each slot's samples in memory of its own, merged once a step."""
    return _stats(task, live=False)


def stats_live(task: Task) -> dict[str, float]:
    """Samples that count at once for all."""
    return _stats(task, live=True)


def stats_gymnasium(task: Task) -> dict[str, float]:
    """What Gymnasium's wrapper of one env does, whose statistics are that env's alone."""
    from gymnasium.wrappers.utils import RunningMeanStd

    make: Any = RunningMeanStd
    stats = make(shape=SHAPE, dtype=np.float32)
    update = partial(stats.update, np.zeros((1, *SHAPE), np.float32))
    return {"update µs": _micro(task.seconds, update, _UPDATES), "merge µs": 0.0}
