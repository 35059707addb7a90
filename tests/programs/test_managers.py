"""Objects of a `multiprocessing.Manager`, which envs and their parent share: its server asks for the parent's key."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import run_alone


class Shares(gym.Env):
    """Writes down in a shared dict what is done to it."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, shared=None, name="env"):
        self.shared, self.name = shared, name
        self.note("made")

    def note(self, what):
        if self.shared is not None:
            self.shared[self.name] = what

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.note("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.note("stepped")
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def put(self, other, value):
        other[self.name] = value
        return other.copy()


SCRIPT = """
import functools, multiprocessing, sys
import gymnasium as gym
from aioenv import sync
from tests.programs.test_managers import Shares

options = {"debug": True} if sys.argv[1] == "debug" else {"start": sys.argv[1]}
if len(sys.argv) > 2:
    multiprocessing.current_process().authkey = sys.argv[2].encode()
before = bytes(multiprocessing.current_process().authkey)
with multiprocessing.Manager() as manager:
    shared, other = manager.dict(), manager.dict()
    with sync.VectorEnv([functools.partial(Shares, shared, i) for i in range(2)], num_workers=2, **options) as envs:
        print(sorted(shared.items()))
        envs.reset()
        print(sorted(shared.items()))
        shared[0] = "ours"
        envs.step_at(1, 0)
        print(sorted(shared.items()))
        envs.call("put", other, "called")
        print(sorted(other.items()))
    with sync.make_vec(Shares, 1, shared=shared, name="make_vec", **options) as envs:
        print(shared["make_vec"])
    gym.register("Shares-v0", "tests.programs.test_managers:Shares")
    with sync.make_vec("Shares-v0", 1, shared=shared, name="registered", **options) as envs:
        print(shared["registered"])
    later = manager.dict()
    with sync.VectorEnv([Shares], **options) as envs:
        envs.call("put", later, "later")
        print(dict(later))
        envs.set_attr("shared", later)
        envs.reset()
        print(dict(later))
print(bytes(multiprocessing.current_process().authkey) == before)
"""
EXPECTED = """\
[(0, 'made'), (1, 'made')]
[(0, 'reset'), (1, 'reset')]
[(0, 'ours'), (1, 'stepped')]
[(0, 'called'), (1, 'called')]
made
made
{'env': 'later'}
{'env': 'reset'}
True
"""


@pytest.mark.parametrize("key", [(), ("a key of the user's own",)], ids=["own key", "given key"])
@pytest.mark.parametrize("how", [*START_METHODS, "debug"])
def test_a_managers_objects_are_shared(how, key):
    """As arguments of factories, of envs and of calls."""
    assert run_alone(SCRIPT, how, *key).stdout == EXPECTED


IN_A_WORKER = """
import sys
from aioenv import sync
from tests.programs.test_managers import Manages

with sync.VectorEnv([Manages], start=sys.argv[1]) as envs:
    _, info = envs.reset()
    print(dict(info["scores"][0]))
"""


class Manages(Shares):
    """Has a manager of its own, whose objects it hands out."""

    def __init__(self):
        import multiprocessing

        super().__init__()
        self.manager = multiprocessing.get_context("fork").Manager()
        self.scores = self.manager.dict(best=3)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"scores": self.scores}

    def close(self):
        self.manager.shutdown()


@pytest.mark.parametrize("start", START_METHODS)
def test_so_are_those_of_a_manager_that_an_env_has(start):
    assert run_alone(IN_A_WORKER, start).stdout == "{'best': 3}\n"
