"""Runs whose workers are killed and resumed, compared with runs without."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import numpy as np
from gymnasium.vector import SyncVectorEnv

import aioenv
from aioenv import RestartPolicy

POLICY = RestartPolicy(max_restarts=1000, backoff_s=0.0, resume=True)
NUM_ENVS, LENGTH = 4, 5  # of episodes


def same(a, b) -> bool:
    """Whether two results are equal, bit for bit, infos too."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


def kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it was killed after its reply, a moment ago
            os.kill(pid, signal.SIGKILL)


async def step_and_kill(envs, actions, victim: int | None, idle: bool):
    """A step in which a worker is killed, before it or in the middle."""
    if victim is None:
        return await envs.step(actions)
    pid = envs.workers[victim].pid
    if idle:
        kill(pid)
        while envs.workers[victim].state == "ready" and envs.workers[victim].pid == pid:
            await asyncio.sleep(0)
        return await envs.step(actions)
    task = asyncio.ensure_future(envs.step(actions))
    await asyncio.sleep(0)
    kill(pid)
    return await task


async def compare(make, mode, steps: int, kills, **kwargs) -> None:
    reference = SyncVectorEnv([make] * NUM_ENVS, autoreset_mode=mode)
    reference.action_space.seed(3)
    try:
        expected = reference.reset(seed=11)
        async with aioenv.AsyncVectorEnv(
            [make] * NUM_ENVS, num_workers=2, autoreset_mode=mode, restart=POLICY, **kwargs
        ) as envs:
            obs, info = await envs.reset(seed=11)
            assert same(obs, expected[0]) and same(info, expected[1])
            for t in range(steps):
                actions = reference.action_space.sample()
                expected = reference.step(actions)
                result = await step_and_kill(envs, actions, *kills.get(t, (None, False)))
                for name, mine, theirs in zip(result._fields, result, expected, strict=True):
                    assert same(mine, theirs), f"step {t}: {name}"
    finally:
        reference.close()
