"""Attributes that Stable-Baselines3 reads through `aioenv.adapters.sb3` are read, and no method is called."""

from __future__ import annotations

import importlib.util
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest

from aioenv import sync

INSTALLED = importlib.util.find_spec("stable_baselines3") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="Stable-Baselines3 is not installed")


class Opponent:
    """An env with a strategy, which it tells when it is called."""

    def __call__(self) -> str:
        raise AssertionError("it was called")


class Game(gym.Wrapper):
    calls = 0

    def __init__(self, env):
        super().__init__(env)
        self.opponent = Opponent()
        self.lock = threading.Lock()

    def has_torch(self):
        return "torch" in sys.modules

    def count(self, by=1):
        self.calls += by
        return self.calls


def make() -> gym.Env:
    return Game(gym.make("CartPole-v1"))


def over(kind: str):
    from aioenv.adapters import sb3

    if kind == "factories":
        return sb3.VecEnv([make] * 2)
    if kind == "given":  # a vector env that was made elsewhere
        return sb3.VecEnv(sync.VectorEnv([make] * 2, autoreset_mode="SameStep"))
    num_workers = 0 if kind == "here" else None
    return sb3.make_vec("CartPole-v1", 2, wrappers=[Game], debug=kind == "debug", num_workers=num_workers)


@pytest.mark.parametrize("kind", ["factories", "given", "make_vec", "debug", "here"])
def test_attributes_are_read_and_not_called(kind):
    envs = over(kind)
    try:
        envs.reset()
        assert [type(one) for one in envs.get_attr("opponent")] == [Opponent] * 2
        assert all(map(envs.has_attr, ["count", "opponent", "lock", "close"])) and not envs.has_attr("nothing")
        assert envs.get_attr("calls") == [0, 0]  # so it was not called
        assert envs.env_method("count", by=2, indices=[1]) == [2]
        assert envs.get_attr("calls", [1, 0]) == [2, 0]
        with pytest.raises(TypeError, match=r"get_attr\('count'\): a method of the env, .* env_method\('count'\)"):
            envs.get_attr("count")
        with pytest.raises(TypeError, match=r"get_attr\('lock'\): of type lock, which does not pickle"):
            envs.get_attr("lock")
        with pytest.raises(TypeError, match=r"env_method\('calls'\): no method, but of type int; get_attr reads it"):
            envs.env_method("calls")
        for ask in envs.get_attr, envs.env_method:
            with pytest.raises(AttributeError, match="no attribute 'nothing'"):
                ask("nothing")
        envs.set_attr("calls", [7, 8, 9], indices=1)
        assert envs.get_attr("calls") == [0, [7, 8, 9]]
        assert envs.env_is_wrapped(Game) == [True] * 2
        assert envs.env_is_wrapped(gym.wrappers.ClipReward, [1]) == [False]
        assert envs.step(np.zeros(2, int))[1].tolist() == [1, 1]
    finally:
        envs.close()


def test_no_worker_imports_torch_to_say_that_there_is_no_monitor():
    from stable_baselines3.common.monitor import Monitor

    from aioenv.adapters import sb3

    # a fork server may have imported torch for another test
    envs = sb3.make_vec("CartPole-v1", 2, wrappers=[Game], episode_stats=False, start="spawn")
    try:
        assert envs.env_is_wrapped(Monitor) == [False] * 2
        assert envs.env_is_wrapped(gym.Wrapper, [0]) == [True]  # of which it is a subclass
        assert envs.env_method("has_torch") == [False] * 2
    finally:
        envs.close()


@pytest.mark.parametrize("num_workers", [None, 2])
def test_a_native_env_is_asked_without_being_called(num_workers):
    from aioenv.adapters import sb3

    envs = sb3.make_vec("Hopper-v5", 2, backend="native", num_workers=num_workers)
    actions = np.zeros((2, 3), np.float32)
    try:
        envs.reset()
        envs.step(actions)
        before = envs._envs.get_state()
        assert all(map(envs.has_attr, ["step", "reset", "close", "frame_skip"])) and not envs.has_attr("nothing")
        after = envs._envs.get_state()
        for was, is_now in zip(before, after, strict=True):
            np.testing.assert_equal(is_now.arrays, was.arrays)
        with pytest.raises(TypeError, match=r"get_attr\('close'\): a method of the env"):
            envs.get_attr("close")
        with pytest.raises(TypeError, match=r"env_method\('frame_skip'\): no method, but of type int"):
            envs.env_method("frame_skip")
        for ask in envs.get_attr, envs.env_method:
            with pytest.raises(AttributeError, match="no attribute 'nothing'"):
                ask("nothing")
        assert envs.get_attr("frame_skip", [-1]) == [4]
        assert np.isfinite(envs.step(actions)[1]).all()  # it is not closed
    finally:
        envs.close()


def test_a_native_env_has_one_attribute_for_all_slots():
    from aioenv.adapters import sb3

    envs = sb3.make_vec("Hopper-v5", 2, backend="native")
    try:
        with pytest.raises(ValueError, match=r'set_attr\(.marker.\): with backend="native" all 2 slots are one env'):
            envs.set_attr("marker", 3, indices=[0])
        envs.set_attr("marker", (3, 4, 5))
        assert envs.env_method("get_wrapper_attr", "marker") == [(3, 4, 5)] * 2
        envs.set_attr("marker", 6, indices=[1, 0])
        assert envs.env_method("get_wrapper_attr", "marker", indices=1) == [6]
        assert envs.env_method("has_wrapper_attr", "marker") == [True] * 2
        assert envs.env_method("has_wrapper_attr", "nothing", indices=[0]) == [False]
        assert envs.env_method("set_wrapper_attr", "marker", 7) == [True] * 2
        assert envs.env_method("set_wrapper_attr", "nothing", 7, force=False) == [False] * 2
        assert envs.get_attr("marker") == [7, 7] and not envs.has_attr("nothing")
    finally:
        envs.close()


def test_native_envs_made_of_single_ones_are_asked_one_by_one():
    from aioenv.adapters import sb3

    def made(num_envs):
        return gym.vector.SyncVectorEnv([make] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    envs = sb3.make_vec(made, 2, backend="native")
    try:
        assert [type(one) for one in envs.get_attr("opponent")] == [Opponent] * 2
        assert envs.has_attr("count") and not envs.has_attr("nothing")
        assert envs.env_method("count", indices=[1]) == [1]
        assert envs.get_attr("calls") == [0, 1]
        with pytest.raises(TypeError, match="a method of the env"):
            envs.get_attr("count", [0])
    finally:
        envs.close()


def test_an_attribute_is_set_in_both_envs_of_a_slot():
    from aioenv.adapters import sb3

    envs = sb3.VecEnv([lambda: Game(gym.make("CartPole-v1", max_episode_steps=2))] * 2, spare_envs=True)
    envs.reset()
    envs.set_attr("calls", 7, indices=[1])
    for _ in range(7):
        assert envs.get_attr("calls") == [0, 7]
        envs.step(np.zeros(2, np.int64))
    envs.close()


class Holds(gym.Env):
    """Uses another env, and passes none of its infos on."""

    def __init__(self):
        from stable_baselines3.common.monitor import Monitor

        self.env = Monitor(gym.make("CartPole-v1"))
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed)[0], {}

    def step(self, action):
        return *self.env.step(action)[:4], {}


def test_an_env_that_holds_another_one_is_not_wrapped():
    from stable_baselines3.common.env_util import is_wrapped
    from stable_baselines3.common.monitor import Monitor

    from aioenv.adapters import sb3

    envs = sb3.VecEnv([lambda: gym.wrappers.TimeLimit(Holds(), 9)], num_workers=0)
    try:
        for kind in (Monitor, Holds, gym.wrappers.TimeLimit):
            assert envs.env_is_wrapped(kind) == [is_wrapped(gym.wrappers.TimeLimit(Holds(), 9), kind)]
    finally:
        envs.close()
