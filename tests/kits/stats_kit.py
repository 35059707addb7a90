"""Envs and helpers for the tests of shared statistics."""

from __future__ import annotations

import os
import pickle
import signal

import gymnasium as gym
import numpy as np
import pytest

from aioenv.stats.sharing import can_share

needs_sharing = pytest.mark.skipif(not can_share(), reason="no memory without a name here")

SHAPE = (3,)


def samples(writer, n):
    """What a writer sees: nothing that float32 rounds, means and deviations of different sizes."""
    rng = np.random.default_rng(writer)
    return rng.normal([3, -40, 1000], [1, 7, 0.5], (n, 3)).astype(np.float32)


class Walker(gym.Env):
    """Observes random numbers; its reward is the first of them. It ends every fourth episode step, more or less."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, SHAPE, np.float32)
    action_space = gym.spaces.Discrete(3)

    def _observe(self):
        return self.np_random.normal([3, -40, 1000], [1, 7, 0.5]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        obs = self._observe()
        return obs, float(obs[0]), bool(self.np_random.random() < 0.25), False, {}


class Endless(Walker):
    """The same, but it never ends."""

    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, False, False, {}


class Writer(Endless):
    """Its process writes to statistics when called, and dies in the middle of it when told to."""

    def __init__(self, stats, counter=None):
        self.stats, self.counter = stats, counter

    def hammer(self, n):
        for sample in samples(self.stats.slot, n):
            self.stats.update(sample)
        return os.getpid()

    def draw(self, n):
        return [self.counter.next_id() for _ in range(n)]

    def know(self):
        return pickle.dumps(self.stats.stats.moments)

    def step(self, action):
        if action == 1:
            table = self.stats.stats._table
            table.block.acquire()
            for cell in (table.whole, *table.slots):
                head, state, *_ = cell._buffers[cell.sequence[0] >> cell._shift & 1 ^ 1]
                state[...] = head[0] = np.nan  # as far as it came
            for cell in table.slots:
                cell._samples[cell.sequence[0] & cell._mask :] = np.nan
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().step(action)
        self.stats.update(result[0])
        return result


def close_to(moments, array, rtol):
    array = np.asarray(array, np.float64)
    np.testing.assert_allclose(moments.mean, array.mean(0), rtol)
    np.testing.assert_allclose(moments.var, array.var(0), rtol)
    assert moments.count == len(array)


def same(a, b):
    return a.count == b.count and a.weight == b.weight and (a.mean == b.mean).all() and (a.m2 == b.m2).all()
