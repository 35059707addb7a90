"""Envs whose steps take unevenly long: whoever is first, against everybody waiting for the slowest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import aioenv
from aioenv.cli.bench.tasks import ACTION_BATCHES, Passes, Task, part

__all__ = ["uneven_gymnasium", "uneven_recv", "uneven_step"]

MIN_SLOTS = 8  # so many results are taken at once


def _figures(counts: npt.NDArray[np.int64], seconds: float) -> dict[str, float]:
    """Throughput, and how many steps the slots that got least and most of them took, relative to an even share."""
    even = counts.mean()
    return {
        "env-steps/s": float(counts.sum() / seconds),
        "least share": float(counts.min() / even),
        "most share": float(counts.max() / even),
    }


def uneven_recv(task: Task) -> dict[str, float]:
    """Of aioenv, one worker a slot, whose results are taken as soon as some are there."""

    async def main() -> dict[str, float]:
        actions = task.actions()
        n = task.num_envs
        async with aioenv.AsyncVectorEnv([task.make_env] * n, num_workers=n, **task.options) as envs:
            envs.send_reset(seed=0)
            counts = np.zeros(n, np.int64)
            for number in (passes := Passes(task)):
                if not number:
                    counts[:] = 0
                ready = await envs.recv(min(MIN_SLOTS, n))
                counts[ready.slots] += 1
                batch = actions[number % ACTION_BATCHES]
                envs.send(part(batch, ready.slots, envs.single_action_space), ready.slots)
            return _figures(counts, passes.seconds)

    return aioenv.run(main())


def uneven_step(task: Task) -> dict[str, float]:
    """Of aioenv, one worker a slot, in lock-step."""

    async def main() -> dict[str, float]:
        actions = task.actions()
        n = task.num_envs
        async with aioenv.AsyncVectorEnv([task.make_env] * n, num_workers=n, **task.options) as envs:
            await envs.reset(seed=0)
            for number in (passes := Passes(task)):
                await envs.step(actions[number % ACTION_BATCHES])
            return _figures(np.full(n, passes.count), passes.seconds)

    return aioenv.run(main())


def uneven_gymnasium(task: Task) -> dict[str, float]:
    """Of Gymnasium's, which has lock-step alone."""
    from gymnasium.vector import AsyncVectorEnv

    actions = task.actions()
    with contextlib.closing(AsyncVectorEnv([task.make_env] * task.num_envs)) as envs:
        envs.reset(seed=0)
        step: Callable[[object], object] = envs.step
        for number in (passes := Passes(task)):
            step(actions[number % ACTION_BATCHES])
    return _figures(np.full(task.num_envs, passes.count), passes.seconds)
