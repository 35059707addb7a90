"""Kit of the tests of spare envs: envs whose episodes depend on seed, options and actions, and gates for resets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import aioenv
from tests.kits.compare import assert_same

N = 3
MODES = ["NextStep", "SameStep"]
# of different lengths in digits, and more than the episodes of a slot in most runs
PLAN = [11, 5, 900, 7, 3, 28, 61, 4, 99, 1234, 17, 86, 2]
SPACES = {
    "box": spaces.Box(-1e9, 1e9, (3,), np.float64),
    "dict": spaces.Dict({"image": spaces.Box(0, 255, (4, 2), np.uint8), "name": spaces.Text(20)}),
    "graph": spaces.Graph(spaces.Box(-1e9, 1e9, (2,), np.float32), spaces.Discrete(9)),
}


class Told(gymnasium.Env[Any, Any]):
    """Its observations, rewards and infos tell seed, options, actions and steps; keys and types of infos change.

    Args:
        kind: of `SPACES`.
    """

    action_space = spaces.Discrete(5)

    def __init__(self, kind: str = "box") -> None:
        self.kind, self.observation_space = kind, SPACES[kind]
        self.t = self.length = 0
        self.level: Any = None
        self.mark = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.level = None if options is None else options.get("level")
        if isinstance(self.level, BaseException):
            raise self.level
        self.t, self.length = 0, int(self.np_random.integers(1, 6))
        info = {"length": self.length, "level": self.level, "small": np.float32(self.length), "new": True}
        if self.length % 2:
            info |= {"words": ["a"] * self.length, "deep": {"at": np.arange(2, dtype=np.int16), "t": "0"}}
        return self.obs(0), info

    def obs(self, action: int) -> Any:
        seen = [self.t, self.length, action]
        if self.kind == "box":
            return np.array(seen, np.float64)
        if self.kind == "dict":
            return {"image": np.full((4, 2), sum(seen), np.uint8), "name": "n" + "".join(map(str, seen))}
        nodes = np.full((1 + self.t, 2), self.length, np.float32)
        return spaces.GraphInstance(nodes, np.array([action], np.int64), np.array([[0, self.t]], np.int32))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        ends, cut = self.t >= self.length, self.t == 4
        info = {"half": self.t / 2, "array": np.full(2, self.t), "text": "t" * self.t}
        if self.t == 2:
            info = {"half": None, "deep": {"at": np.arange(2, dtype=np.int16), "more": {"b": b"x"}}, 7: self.mark}
        if self.t == 3:
            info = {}
        return self.obs(int(action)), float(self.np_random.random()), ends and not cut, cut, info


def level(slot: int, episode: int) -> dict[str, Any]:
    """Options of automatic resets."""
    return {"level": 100 * slot + episode}


def plain(value: Any, key: str = "") -> Any:
    """Return a result with the order of the keys of its infos, and without the times of episodes."""
    if isinstance(value, dict):
        rest = {name: plain(item, str(name)) for name, item in value.items() if (key, name) != ("episode", "t")}
        return {**rest, "keys": list(map(str, value))}
    if isinstance(value, (tuple, list)) and not isinstance(value, spaces.GraphInstance):
        return [plain(item) for item in value]
    return value


def assert_equal_runs(with_spares: list[Any], without: list[Any]) -> None:
    """Compare what was found in two runs, one by one, bit for bit, dtypes and the order of keys too."""
    assert len(with_spares) == len(without)
    for number, (mine, theirs) in enumerate(zip(with_spares, without, strict=True)):
        assert_same(plain(mine), plain(theirs), f"result {number}: ")


class Gates:
    """Fifos at which the resets of envs wait, each until the test opens the other end.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def path(self, slot: int, number: int) -> str:
        return f"{self.folder}/{slot}-{number}"

    def close(self, slot: int, *numbers: int) -> None:
        """Have resets of a slot wait; they are numbered over both of its envs, in the order of its episodes."""
        for number in numbers:
            os.mkfifo(self.path(slot, number))

    def open(self, slot: int, number: int) -> None:
        """Let a reset go on that waits, or will."""
        path = self.path(slot, number)
        fd = os.open(path, os.O_WRONLY)  # until the env has opened its end
        os.unlink(path)
        os.close(fd)


class Gated(gymnasium.Env[Any, Any]):
    """Draws from its generator, which goes on from episode to episode. Its resets may wait at a gate.

    Episodes have `length` steps. Observations are (the number of the slot's episode, step, which env, a random number).
    """

    observation_space = spaces.Box(-1e9, 1e9, (4,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, folder: str, slot: int, length: int = 3) -> None:
        self.gates, self.slot, self.length = Gates(Path(folder)), slot, length
        self.spare = aioenv.is_spare_env()
        self.episode, self.t = int(self.spare) - 2, 0
        self.seeds: list[int | None] = []

    def obs(self) -> Any:
        return np.array([self.episode, self.t, self.spare, self.np_random.random()])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.t = self.episode + 2, 0
        path = self.gates.path(self.slot, self.episode)
        if os.path.exists(path):
            with open(path) as fifo:
                fifo.read()
        return self.obs(), {"drawn": float(self.np_random.random())}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.obs(), float(self.np_random.random()), self.t == self.length, False, {"t": self.t}
