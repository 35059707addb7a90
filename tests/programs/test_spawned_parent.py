"""A vector env in a process that multiprocessing has spawned (a rank of a training, say).

The script is `__mp_main__` there, not `__main__`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import environment

SCRIPT = """
import multiprocessing

import gymnasium as gym
import numpy as np

import aioenv


class Oops(Exception):
    pass


class Thing:
    pass


class Things(gym.Space):
    def sample(self, mask=None, probability=None):
        return Thing()

    def contains(self, x):
        return type(x) is Thing

    def __eq__(self, other):
        return type(self) is type(other)


class Mine(gym.Env):
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = Things()

    def reset(self, *, seed=None, options=None):
        return nothing(), {"thing": Thing()}

    def step(self, action):
        if type(action) is Thing:
            raise Oops
        return nothing(), 0.0, False, False, {}


def nothing():
    return np.zeros(1, np.float32)


gym.register("Mine-v0", Mine)
gym.register("Named-v0", entry_point=f"{__name__}:Mine")


def rank():
    for factory in (Mine, lambda: Mine(), lambda: gym.make("Mine-v0"), lambda: gym.make("Named-v0")):
        with aioenv.sync.VectorEnv([factory], start="START") as envs:
            _, info = envs.reset()
            try:
                envs.step([Thing()])
            except aioenv.EnvError as exc:
                print(type(info["thing"][0]) is Thing, type(exc.__cause__) is Oops, flush=True)


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=rank)
    process.start()
    process.join()
    print(process.exitcode)
"""


@pytest.mark.parametrize("start", START_METHODS)
def test_what_the_script_defines_is_known_in_workers(start, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("START", start))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, env=environment())
    assert (done.returncode, done.stdout) == (0, "True True\n" * 4 + "0\n"), done.stderr
