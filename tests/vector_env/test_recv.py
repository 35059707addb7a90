"""`recv` where envs take uneven times: ready slots are taken, and no slot starves."""

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv

SLOTS = 32


class Uneven(gym.Env):
    """A step takes an exponential time, 2 ms on average; it tells how many there were."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(1), {}

    def step(self, action):
        time.sleep(self.np_random.exponential(0.002))
        self._t += 1
        return np.full(1, self._t), 1.0, False, False, {}


@pytest.mark.asyncio
async def test_uneven_envs_none_starved():
    async with aioenv.AsyncVectorEnv([Uneven] * SLOTS, num_workers=SLOTS) as envs:
        for max_slots in (None, 8):
            envs.send_reset(seed=0)
            counts = np.full(SLOTS, -1)  # the first result is of the reset
            while counts.min() < 10:
                ready = await envs.recv(8, max_slots)
                assert len(ready.slots) == 8 if max_slots else len(ready.slots) >= 8
                counts[ready.slots] += 1
                assert ready.obs[:, 0].tolist() == counts[ready.slots].tolist(), "each slot's own, and in turn"
                assert counts.sum() < 10 * SLOTS * 4, f"starved: {counts}"
                envs.send(np.zeros(len(ready.slots), int), ready.slots)
            async for ready in envs.ready(8, max_slots):
                counts[ready.slots] += 1
            assert counts.min() >= 11, "nothing is left"


@pytest.mark.asyncio
async def test_paused_slots_are_sent_nothing_and_count_no_steps():
    async with aioenv.make_vec("CartPole-v1", 3, debug=True) as envs:
        await envs.reset(seed=0)
        envs.pause(np.flatnonzero([False] * 3))  # no slot
        envs.pause(1)
        envs.send(np.zeros(3, int))
        assert (await envs.recv(2)).slots.tolist() == [0, 2]
        envs.resume([])
        assert envs.active_slots.tolist() == [0, 2]
        assert envs.stats().env_steps == 2
        envs.resume()
        envs.send(np.zeros(3, int))
        await envs.recv(3)
        assert envs.stats().env_steps == 5
