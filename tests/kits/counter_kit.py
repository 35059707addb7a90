"""An env that counts its steps, and misbehaves when its action says so."""

from __future__ import annotations

import functools
import os
import signal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import aioenv


class Counter(gym.Env):
    """Counts its steps; an episode has `length` of them. The action tells it to misbehave."""

    OK, RAISE, EXIT, KILL, WAIT = range(5)

    def __init__(self, length: int = 5, gate: str = "") -> None:
        self.observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.action_space = spaces.Discrete(5)
        self.length = length
        self.gate = gate
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.base = float(self.np_random.integers(1000))
        return np.array([self.base, 0.0]), {"options": options, "seed": seed}

    def step(self, action):
        if action == self.RAISE:
            raise KeyError("as asked")
        if action == self.EXIT:
            print("about to exit")
            os._exit(7)
        if action == self.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == self.WAIT:
            with open(self.gate) as gate:  # a fifo: blocks until the test opens its other end
                gate.read()
        self.t += 1
        return np.array([self.base, self.t]), float(self.t), self.t >= self.length, False, {"t": self.t}

    def double(self, x, *, plus=0):
        return 2 * x + plus


class Finite(gym.Env):
    """Has so many episodes of 3 steps each."""

    def __init__(self, episodes: int) -> None:
        self.observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.left = episodes

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if not self.left:
            raise aioenv.EpisodesDone
        self.left -= 1
        self.t = 0
        return np.array([self.left, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        return np.array([self.left, self.t], np.float32), 1.0, self.t == 3, False, {}


def finite(mode, **kwargs):
    """A blocking vector env, whose slot 0 has one episode, and slot 1 two."""
    return aioenv.sync.VectorEnv([functools.partial(Finite, n) for n in (1, 2)], autoreset_mode=mode, **kwargs)


def counters(n: int, **kwargs):
    return [lambda: Counter(**kwargs)] * n
