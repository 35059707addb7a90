"""Envs within envs, and modules that start envs when they are imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import platform, sync
from tests.kits.process_kit import environment

TRAIN = """
import os, sys
import gymnasium as gym, numpy as np, aioenv
print("imported", file=sys.stderr, flush=True)

class Own(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

async def main():
    async with aioenv.make_vec(Own, 2, num_workers=2, start=os.environ["START"]) as envs:
        await envs.reset()

if os.environ["HOW"] == "sync":
    aioenv.sync.make_vec(Own, 2, num_workers=2, start=os.environ["START"])
else:
    aioenv.run(main())
"""


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_module_that_starts_envs_when_it_is_imported_starts_no_end_of_them(start, how, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    environ = {**environment(), "START": start, "HOW": how}
    command = [sys.executable, "-c", "import train"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=80, cwd=tmp_path, env=environ)
    assert result.returncode == 1
    assert "WorkerStartError: module train starts envs when it is imported" in result.stderr
    assert result.stderr.splitlines().count("imported") <= 6  # here, in a fork server, and in what is told of 2 workers


class Planning(gym.Env):
    """Has envs of its own."""

    observation_space = gym.spaces.Box(-10, 10, (2, 4), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.own = sync.make_vec("CartPole-v1", 2, num_workers=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.own.reset(seed=seed)[0], {}

    def step(self, action):
        return self.own.step(np.full(2, action)).obs, 0.0, False, False, {}

    def close(self):
        self.own.close()


def test_envs_may_have_envs():
    with sync.make_vec("CartPole-v1", 2, num_workers=1) as plain:
        expected = plain.reset(seed=3).obs, plain.step(np.ones(2, int)).obs
    with aioenv.sync.VectorEnv([Planning], num_workers=1) as envs:
        assert np.array_equal(envs.reset(seed=3).obs[0], expected[0])
        assert np.array_equal(envs.step([1]).obs[0], expected[1])


def test_a_lazy_module_is_not_loaded_to_see_whether_it_is_half_done(monkeypatch, tmp_path):
    (tmp_path / "loads_badly.py").write_text("raise ImportError('it was loaded')")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.find_spec("loads_badly")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loads_badly", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(platform, "_is_worker_process", True)
    platform.check_nested_start()
