"""Small envs for tests: every sort of space, infos of every sort, short episodes."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SPACES: dict[str, spaces.Space] = {
    "box": spaces.Box(-1, 1, (2, 3), np.float32),
    "scalar_box": spaces.Box(-1, 1, (), np.float64),
    "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
    "half": spaces.Box(-1, 1, (3,), np.float16),
    "discrete": spaces.Discrete(7, start=-3),
    "multi_discrete": spaces.MultiDiscrete([3, 4, 5]),
    "multi_binary": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict(position=spaces.Box(-1, 1, (3,)), button=spaces.Discrete(2)),
    "tuple": spaces.Tuple((spaces.Discrete(4), spaces.Box(0, 1, (2,), np.float64))),
    "text": spaces.Text(8),
    "sequence": spaces.Sequence(spaces.Box(0, 1, (2,), np.float32)),
    "stacked_sequence": spaces.Sequence(spaces.Discrete(5), stack=True),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), spaces.Discrete(3)),
    "one_of": spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1, (2,)))),
    "nested": spaces.Dict(
        a=spaces.Tuple((spaces.Text(4), spaces.Dict(b=spaces.MultiBinary(3), c=spaces.Box(0, 1, (1,))))),
        d=spaces.Discrete(3),
    ),
}


class Sampler(gym.Env):
    """Observes samples of a space, seeded by `reset`; its infos try every rule of merging them."""

    def __init__(self, space: str, action: str = "discrete", rich_infos: bool = True) -> None:
        self.observation_space = SPACES[space]
        self.action_space = SPACES[action]
        self._source: spaces.Space[Any] | None = None
        self._rich = rich_infos

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._source = copy.deepcopy(self.observation_space)
        self._source.seed(int(self.np_random.integers(2**31)))
        self._t = 0
        self._length = int(self.np_random.integers(1, 7))
        return self._source.sample(), {"fresh": True, "length": self._length}

    def step(self, action):
        self._t += 1
        reward = float(self.np_random.normal())
        over = self._t >= self._length
        terminated = bool(over and self._length % 2)
        return self._source.sample(), reward, terminated, bool(over and not terminated), self._info(action)

    def _info(self, action) -> dict[str, Any]:
        if not self._rich:
            return {}
        rng = self.np_random
        info: dict[str, Any] = {
            "t": self._t,
            "reward_like": float(rng.normal()),
            "single": np.float32(rng.normal()),
            "flag": bool(rng.integers(2)),
            "numpy_flag": np.bool_(rng.integers(2)),
            "vector": rng.normal(size=3).astype(np.float32),
            "word": "odd" if self._t % 2 else "even",
            "none": None,
            "nested": {"x": int(rng.integers(9)), "deeper": {"y": rng.normal(size=2)}, "empty": {}},
            "action": action,
        }
        if self._t % 2:
            info["odd_only"] = np.int16(self._t)
        # the first value of a batch decides the dtype of its column, as in Gymnasium
        info["int_or_float"] = self._t if rng.integers(2) else float(rng.normal())
        return info
