"""An env whose steps take 50 ms and no CPU: how it scales does not depend on what else the machine does."""

from __future__ import annotations

import time

import gymnasium

STEP_S = 0.05


class Sleepy(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        time.sleep(STEP_S)
        return 0, 0.0, False, False, {}


gymnasium.register("Sleepy-v0", entry_point=Sleepy)
