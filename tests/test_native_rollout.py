"""Rollouts of vector envs over workers: whole workers are groups."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from native_kit import Batch, Walk
from parity.compare import assert_same

import aioenv
from aioenv import sync

pytestmark = pytest.mark.asyncio

STEPS = 20


def policy(obs):
    return np.abs(obs[:, 0] * 7).astype(np.int64) % 9


@pytest.mark.parametrize(
    ("mode", "num_workers", "groups"),
    [
        *((mode, 2, 2) for mode in AutoresetMode),
        (AutoresetMode.NEXT_STEP, 3, 2),
        (AutoresetMode.SAME_STEP, 1, 4),
    ],
)
async def test_the_same_as_step_by_step(mode, num_workers, groups):
    make = partial(Walk, mode=mode)
    async with (
        aioenv.NativeVectorEnv(make, 5, num_workers=num_workers) as envs,
        aioenv.NativeVectorEnv(make, 5, run_in="inline") as single,
    ):
        for each in (envs, single):
            obs, _ = await each.reset(seed=2)
            for _ in range(7):  # it begins in the middle of episodes, or with resets that are due
                result = await each.step(policy(obs))
                obs = result.obs
                over = result.terminated
                if mode is AutoresetMode.DISABLED and over.any():
                    obs, _ = await each.reset(options={"reset_mask": over})
        due = over if mode is AutoresetMode.NEXT_STEP else np.zeros(5, np.bool_)
        seen = []

        def choose(obs, slots):
            seen.append(tuple(slots.tolist()))
            return policy(obs)

        record = await envs.rollout(choose, STEPS, groups)
        assert len(set(seen)) == min(groups, num_workers)
        for t in range(STEPS):
            assert_same(record.obs[t], obs)
            result = await single.step(record.actions[t])
            assert_same([record.reward[t], record.terminated[t]], [result.reward, result.terminated])
            assert_same(record.valid[t], ~due)
            obs = result.obs
            if mode is AutoresetMode.NEXT_STEP:
                due = result.terminated
            elif mode is AutoresetMode.DISABLED and result.terminated.any() and t < STEPS - 1:
                obs, _ = await single.reset(options={"reset_mask": result.terminated})
        assert_same(record.last_obs, obs)
        assert record.terminated.sum() > 5


async def test_lost_episodes_are_not_valid():
    restart = aioenv.RestartPolicy()
    async with aioenv.NativeVectorEnv(Walk, 4, num_workers=2, restart=restart) as envs:
        await envs.reset(seed=1)
        asked = 0

        def choose(obs, slots):
            nonlocal asked
            asked += 0 in slots
            return np.where((slots == 0) & (asked == 2), 9, 0)

        record = await envs.rollout(choose, 4)
        assert record.truncated[1].tolist() == [True, True, False, False] == (~record.valid[1]).tolist()
        assert record.infos[1]["restarted"][:2].all() and not record.valid[2, :2].any() and record.valid[3].all()


async def test_in_this_process_there_are_none():
    async with aioenv.NativeVectorEnv(Batch, 3) as envs:
        await envs.reset()
        with pytest.raises(ValueError, match="num_workers=2"):
            await envs.rollout(lambda obs: [0] * 3, 3)


async def test_blocking():
    with sync.make_vec("Hopper-v5", 4, backend="native", num_workers=2) as envs:
        envs.reset(seed=1)
        record = envs.rollout(lambda obs: np.zeros((len(obs), 3), np.float32), 5)
        assert record.obs.shape == (5, 4, 11) and record.valid.all() and len(record.infos[0]["x_position"]) == 4
