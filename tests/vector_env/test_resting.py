"""What paused slots show: their last observation, whatever happened to who asked for it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aioenv

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.asyncio
async def test_in_a_rollout_where_all_slots_of_a_worker_are_paused():
    async with aioenv.make_vec("CartPole-v1", 4, num_workers=2) as envs:
        await envs.reset(seed=0)
        last, *_ = await envs.step(np.zeros(4, int))
        envs.pause([0, 2, 3])
        rollout = await envs.rollout(lambda obs: np.zeros(len(obs), int), 3)
        assert np.array_equal(rollout.obs[:, [0, 2, 3]], [last[[0, 2, 3]]] * 3)
        assert np.array_equal(rollout.last_obs[[0, 2, 3]], last[[0, 2, 3]])
        assert np.array_equal(rollout.obs[0, 1], last[1])
        assert rollout.valid.tolist() == [[False, True, False, False]] * 3


@pytest.mark.asyncio
async def test_after_a_cancelled_step_that_had_just_asked():
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=2) as envs:
        for turns in range(1, 9):
            last, _ = await envs.reset(seed=turns)
            envs.pause(0)
            step = asyncio.ensure_future(envs.step(np.zeros(2, int)))
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])
            if turns % 2:
                obs, *_ = await envs.step(np.zeros(2, int))
            else:
                obs = (await envs.rollout(lambda obs: np.zeros(len(obs), int), 1)).obs[0]
            assert np.array_equal(obs[0], last[0]), turns
            envs.resume()
