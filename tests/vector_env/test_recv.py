"""`recv` where envs take uneven times: ready slots are taken, and no slot starves."""

from __future__ import annotations

import gc
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv import speedups
from aioenv.core.requests import BatchRequest
from aioenv.ipc import frame_io

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


class Counting(gym.Env):
    """It tells how many steps there were, and in an info the slot's action."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(1), {}

    def step(self, action):
        self._t += 1
        return np.full(1, self._t), float(action), False, False, {"action": int(action)}


def alive():
    return sum(type(one) is BatchRequest for one in gc.get_objects())


@pytest.mark.asyncio
@pytest.mark.parametrize("workers", [4, 2])
async def test_requests_of_some_slots_are_used_again_or_freed_at_once(workers):
    async with aioenv.AsyncVectorEnv([Counting] * 4, num_workers=workers) as envs:
        await envs.reset(seed=0)
        counts, kept, known = np.zeros(4, int), [], 0
        gc.collect()
        gc.disable()
        try:
            for turn in range(8):
                for slots in ([0], [2], [3, 1], [1, 0, 2]):
                    counts[slots] += 1
                    envs.send(np.array(slots) + 2, slots)
                    ready = await envs.recv(len(slots))
                    kept.append((ready, counts[sorted(slots)].copy(), np.sort(slots)))
                assert turn < 2 or alive() <= known, "none waits for the garbage collector"
                known = alive()
        finally:
            gc.enable()
        for ready, count, slots in kept:  # the results are the caller's
            assert ready.slots.tolist() == slots.tolist() and ready.obs[:, 0].tolist() == count.tolist()
            assert ready.reward.tolist() == (slots + 2).tolist() == ready.info["action"].tolist()


@pytest.mark.asyncio
@pytest.mark.skipif(not speedups.compiled, reason="without C the same is done in Python")
async def test_steps_of_some_slots_are_sent_and_received_in_c(monkeypatch):
    async with aioenv.AsyncVectorEnv([Counting] * 4, num_workers=4) as envs:
        await envs.reset(seed=0)
        monkeypatch.setattr(frame_io, "write", None)
        monkeypatch.setattr(frame_io, "read", None)
        for _ in range(3):
            for slots in ([1], [3, 0]):
                envs.send(np.array(slots), slots)
                assert (await envs.recv(len(slots))).slots.tolist() == sorted(slots)
        monkeypatch.undo()
