"""Envs, policies and weights that a script defines: its code is in the collectors, and in their workers."""

from __future__ import annotations

import pytest

from tests.kits.process_kit import run_alone

SCRIPT = """
import sys
from dataclasses import dataclass
import gymnasium as gym, numpy as np
import aioenv

SIZE = 3

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (SIZE,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(SIZE, np.float32), {"note": Note("reset")}
    def step(self, action):
        return np.full(SIZE, helper(action), np.float32), 0.0, False, False, {"note": Note("step")}

@dataclass
class Note:
    text: str

def helper(action):
    return 1 + action

class Twice(gym.ObservationWrapper):
    def observation(self, obs):
        return 2 * obs

gym.register("Mine-v0", entry_point=Mine)

@dataclass
class Weights:
    action: int

class Policy:
    action = 0
    def update(self, weights):
        assert type(weights) is Weights
        self.action = weights.action
    def __call__(self, obs):
        return np.full(len(obs), self.action), {"twice": obs * SIZE}

make = {"id": "Mine-v0", "class": Mine, "lambda": lambda: Mine()}[sys.argv[2]]
with aioenv.sync.RolloutCollector(
    make, 4, policy=Policy, steps=3, num_collectors=2, num_workers=int(sys.argv[1]), wrappers=[Twice]
) as collector:
    collector.update(Weights(1))
    rollouts = []
    while {rollout.collector for rollout in rollouts} != {0, 1}:  # the one that is ready first may hand out several
        rollouts.append(next(collector))
for rollout in rollouts:
    assert (rollout.last_obs == 4).all() and (rollout.extras["twice"][1:] == 12).all()
    assert rollout.infos[0]["note"].tolist() == [Note("step")] * 2
print("done")
"""


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make", ["id", "class", "lambda"])
def test_code_of_a_script(num_workers, make):
    assert run_alone(SCRIPT, str(num_workers), make).stdout == "done\n"
