"""All workers hash strings alike: what an env does in the order of a set is the same in each, and in each run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import sync
from aioenv.process.environment import worker_environment
from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import environment, run_alone

NAMES = [f"task {i}" for i in range(20)]


class Tasks(gym.Env):
    """Tells its tasks in the order in which a set of their names gives them."""

    observation_space = gym.spaces.Box(0, len(NAMES), (len(NAMES),), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._order(), {"first": next(iter(set(NAMES)))}

    def step(self, action):
        return self._order(), 0.0, False, False, {}

    def _order(self):
        return np.array([NAMES.index(name) for name in set(NAMES)], np.float32)


def orders(**options):
    """The first observations of four slots, and what their infos name first."""
    with sync.VectorEnv([Tasks] * 4, **options) as envs:
        obs, info = envs.reset()
        return obs.tolist(), info["first"].tolist()


def test_an_order_depends_neither_on_the_launch_nor_on_the_number_of_workers():
    seen = [orders(start=start, num_workers=n) for start in START_METHODS for n in (1, 2, 4)]
    assert all(one == seen[0] for one in seen)
    obs, first = seen[0]
    assert all(row == obs[0] for row in obs) and first == [first[0]] * 4


SCRIPT = """
import sys
from tests.process.test_hash_seed import orders
print(orders(start=sys.argv[1], num_workers=2))
"""


def script(start, **variables):
    env = {name: value for name, value in environment().items() if name != "PYTHONHASHSEED"}
    return run_alone(SCRIPT, start, env={**env, **variables}).stdout


@pytest.mark.parametrize("start", START_METHODS)
def test_an_order_is_the_same_from_run_to_run(start):
    assert script(start) == script(start)


def test_a_seed_of_the_users_own_is_taken(monkeypatch):
    code = "from tests.process import test_hash_seed as t; print(t.Tasks()._order().tolist())"
    here = {seed: run_alone(code, env={**environment(), "PYTHONHASHSEED": seed}).stdout.strip() for seed in ("7", "8")}
    assert here["7"] != here["8"]
    for start in START_METHODS:
        assert script(start, PYTHONHASHSEED="7").startswith(f"([{here['7']}")
        obs, _ = orders(start=start, num_workers=2, worker_env={"PYTHONHASHSEED": "8"})  # of one vector env
        assert str(obs[0]) == here["8"] and obs == [obs[0]] * 4
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert worker_environment(None)["PYTHONHASHSEED"] == "7"
    assert worker_environment({"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "random"


@pytest.mark.parametrize("value", [None, "", "random", "0"])
def test_without_a_number_there_is_a_fixed_seed(value, monkeypatch):
    if value is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    assert worker_environment(None)["PYTHONHASHSEED"] == "0"
    assert os.environ.get("PYTHONHASHSEED") == value  # this process keeps its own


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_render_workers_have_it_too(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    async def look() -> None:
        async with aioenv.make_vec("InvertedPendulum-v5", 1, render=aioenv.RenderConfig(16, 16, workers=1)) as envs:
            pids = [envs.workers[0].pid, *(worker.pid for worker in envs._session.render_workers)]
            seen.extend(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids)  # noqa: ASYNC240

    seen: list[list[bytes]] = []
    asyncio.run(look())
    assert len(seen) == 2 and all(b"PYTHONHASHSEED=0" in variables for variables in seen)
