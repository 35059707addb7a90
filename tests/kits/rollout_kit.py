"""Kit for tests of rollouts: policies, a plain loop to compare with, and cancelled rollouts."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

import aioenv
from tests.kits.compare import assert_same


async def after_cancellations(envs, policy, most: int):
    """Rollouts that were cancelled after 0, 1, … turns of the loop: two steps of each one that follows."""
    for turns in range(most):
        rollout = asyncio.ensure_future(envs.rollout(policy, 4, 3))
        for _ in range(turns):
            await asyncio.sleep(0)
        rollout.cancel()
        await asyncio.wait([rollout])
        yield await envs.rollout(policy, 2)


FIELDS = ("obs", "actions", "reward", "terminated", "truncated", "valid", "last_obs")


def balance(obs: Any) -> Any:
    """For CartPole; row by row, and exact."""
    return (obs[:, 2] + obs[:, 3] > 0).astype(np.int64)


async def plain(envs: aioenv.AsyncVectorEnv, policy: Any, steps: int, obs: Any) -> dict[str, Any]:
    """What `rollout` does, in the way that one would write it with `reset` and `step`; nothing is due at the start."""
    rows: list[tuple[Any, ...]] = []
    infos = []
    ended = np.zeros(envs.num_envs, bool)
    for _ in range(steps):
        valid = np.ones_like(ended)
        if envs.autoreset_mode is AutoresetMode.NEXT_STEP:
            valid = ~ended
        elif envs.autoreset_mode is AutoresetMode.DISABLED and ended.any():
            obs, _ = await envs.reset(options={"reset_mask": ended})
        actions = policy(obs)
        following, reward, terminated, truncated, info = await envs.step(actions)
        rows.append((obs, actions, reward, terminated, truncated, valid))
        infos.append(info)
        obs, ended = following, terminated | truncated
        if envs.autoreset_mode is AutoresetMode.DISABLED and ended.any():
            info["final_obs"] = np.full(envs.num_envs, None, object)
            for slot in np.flatnonzero(ended):
                info["final_obs"][slot] = obs[slot]
            info["_final_obs"] = ended
    return {**dict(zip(FIELDS, map(np.stack, zip(*rows, strict=True)), strict=False)), "last_obs": obs, "infos": infos}


def assert_equal(got: aioenv.Rollout, expected: Any) -> None:
    """Bit for bit."""
    for name in FIELDS:
        mine = getattr(got, name)
        theirs = expected[name] if isinstance(expected, dict) else getattr(expected, name)
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        assert mine.tobytes() == theirs.tobytes(), name
    infos = expected["infos"] if isinstance(expected, dict) else expected.infos
    assert_same(list(got.infos), list(infos))


EVERY_CASE = list(itertools.product(AutoresetMode, (1, 2, 3)))
