"""A thousand slots on fifty workers of one machine; `test_ray.py` has them on Ray."""

from __future__ import annotations

import time

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.cluster.local import LocalCluster
from tests.kits.cluster_kit import NAME, PORTS, left_here

SLOTS, WORKERS, UP_S = 1000, 50, 60.0


class Noop(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.full(4, action, np.float32), float(action), False, False, {}


async def up_steps_and_closes(cluster) -> None:
    begun = time.monotonic()
    options = {"worker_env": {NAME: "1"}, "start_timeout_s": 2 * UP_S}
    async with aioenv.make_vec(Noop, SLOTS, num_workers=WORKERS, cluster=cluster, **options) as envs:
        await envs.reset(seed=0)
        up = time.monotonic()
        actions = np.arange(SLOTS) % 2
        for _ in range(100):
            assert ((await envs.step(actions)).reward == actions).all()
        stepped = time.monotonic()
    closed = time.monotonic()
    rate = 100 * SLOTS / (stepped - up)
    print(f"up in {up - begun:.1f} s, {rate:,.0f} env-steps/s, closed in {closed - stepped:.1f} s")
    assert up - begun < UP_S
    while left_here():
        assert time.monotonic() - closed < 10


@pytest.mark.stress
@pytest.mark.timeout(240)
@pytest.mark.asyncio
async def test_processes():
    await up_steps_and_closes(LocalCluster(ports=PORTS))
