"""Envs that return the same arrays and dicts again and again, and write into them."""

from __future__ import annotations

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from gymnasium.vector import AutoresetMode

from aioenv import sync

BOX = spaces.Box(-9, 9, (2,), np.float32)


class Reuses(gym.Env):
    """Observes its time; -1 after a reset."""

    action_space = spaces.Discrete(2)

    def __init__(self, kind: str) -> None:
        self.array = np.zeros(2, np.float32)
        self.observed = {
            "box": self.array,
            "dict": {"deep": (self.array, self.array)},
            "graph": GraphInstance(self.array.reshape(1, 2), None, None),
        }[kind]
        self.observation_space = {
            "box": BOX,
            "dict": spaces.Dict(deep=spaces.Tuple((BOX, BOX))),
            "graph": spaces.Graph(BOX, None),
        }[kind]
        self.info = {"time": 0, "nested": {"array": self.array, "list": [self.array]}}

    def _at(self, time):
        self.array[:] = self.time = self.info["time"] = time
        return self.observed

    def reset(self, *, seed=None, options=None):
        return self._at(-1), self.info

    def step(self, action):
        return self._at(max(self.time, 0) + 1), 1.0, self.time == 3, False, self.info


@pytest.mark.parametrize("kind", ["box", "dict", "graph"])
def test_the_end_of_an_episode_is_not_overwritten_by_the_next(kind):
    with sync.VectorEnv([lambda: Reuses(kind)] * 2, autoreset_mode=AutoresetMode.SAME_STEP, debug=True) as envs:
        envs.reset()
        for _ in range(3):
            *_, terminated, _, info = envs.step([0, 0])
        assert terminated.all()
        of = {"box": lambda o: o, "dict": lambda o: o["deep"][1], "graph": lambda o: o.nodes[0]}[kind]
        for slot in range(2):
            assert of(info["final_obs"][slot]).tolist() == [3, 3]
            assert info["final_info"]["nested"]["list"][slot][0].tolist() == [3, 3]
        assert info["final_info"]["time"].tolist() == [3, 3] and info["time"].tolist() == [-1, -1]
        assert info["final_info"]["nested"]["array"].tolist() == [[3, 3]] * 2


class SharesInfos(gym.Env):
    """All of them write into the same arrays and dicts, and return these as infos."""

    observation_space = action_space = spaces.Discrete(2)
    array = np.zeros(2)
    graph = GraphInstance(array.reshape(2, 1), None, None)
    nested: ClassVar = {"list": [array], "dict": {"array": array}, "tuple": (array,), "graph": graph}
    info: ClassVar = {}

    def __init__(self, number):
        self.number = number

    def _write(self, value):
        self.array[:] = self.info["number"] = value
        return self.info

    def reset(self, *, seed=None, options=None):
        return 0, self._write(self.number)

    def step(self, action):
        self._write(self.number + 10)
        return 0, 0.0, False, False, {"array": self.array, **(self.nested if action else {})}


@pytest.mark.parametrize("make", [sync.VectorEnv, sync.SyncVectorEnv])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_slot_has_its_own_infos(make, num_workers):
    """As with Gymnasium, also while steps still run in Python: C takes over after some of them."""
    how = {"num_workers": num_workers} if make is sync.VectorEnv else {}
    with make([lambda number=number: SharesInfos(number) for number in range(3)], **how) as envs:
        assert envs.reset()[1]["number"].tolist() == [0, 1, 2]
        expected = [[10, 10], [11, 11], [12, 12]]
        for _ in range(60):
            info = envs.step(np.zeros(3, int))[4]
            assert info["array"].tolist() == expected
        for _ in range(60):
            info = envs.step(np.ones(3, int))[4]
            assert info["array"].tolist() == info["dict"]["array"].tolist() == expected
            for name in ("list", "tuple"):
                assert [value[0].tolist() for value in info[name]] == expected
            assert [graph.nodes[:, 0].tolist() for graph in info["graph"]] == expected
