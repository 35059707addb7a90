"""Two slots with one env: each would step the other's, so it is an error that names both."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

import aioenv
from aioenv import sync
from aioenv.process.launch import START_METHODS

WAYS = [
    *(pytest.param({"start": start, "num_workers": 1}, id=start) for start in START_METHODS),
    pytest.param({"debug": True}, id="debug"),
]
SAME = "slots 0 and 1 have the same env"


class Counts(gym.Env):
    observation_space = gym.spaces.Box(0, 99, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self):
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), 0.0, False, False, {}

    def render(self):
        return np.zeros((4, 4, 3), np.uint8)


class Hides(gym.Wrapper):
    """Says that it is its own base, so that `unwrapped` shows nothing of what is below."""

    @property
    def unwrapped(self):
        return self


class Adapter(gym.Env):
    """Is no `gymnasium.Wrapper`, but keeps an env as one does."""

    observation_space, action_space = Counts.observation_space, Counts.action_space

    def __init__(self, env):
        self.env = env

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed)

    def step(self, action):
        return self.env.step(action)


class Lazy(Adapter):
    """Makes its env when that is first asked for: the attribute has the name of a descriptor of the class."""

    def __init__(self):
        self.reset()

    @functools.cached_property
    def env(self):
        return cached()


class Same(gym.Wrapper):
    """One object for all: a singleton."""

    _one = None

    def __new__(cls):
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    def __init__(self):
        super().__init__(Counts())


@functools.lru_cache
def cached():
    return Counts()


@functools.lru_cache
def cached_cart_pole():
    return gym.make("InvertedPendulum-v5", render_mode="rgb_array")


def limited():
    return TimeLimit(cached(), 10)


def hidden():
    return Hides(TimeLimit(cached(), 10))


def adapted():
    return Adapter(Hides(cached()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "factory",
    [cached, Same, limited, hidden, adapted, Lazy, aioenv.EnvCreator(limited)],
    ids=["cached", "singleton", "limited", "hidden", "adapted", "lazy", "creator"],
)
def test_two_slots_with_one_env_are_refused(factory, way):
    with pytest.raises(aioenv.WorkerStartError, match=SAME) as caught:
        sync.VectorEnv([factory] * 3, **way)
    assert "make a new env in each call" in str(caught.value)
    assert caught.value.slots == (0, 1)


def fresh():
    return Counts()


@pytest.mark.parametrize("way", WAYS)
def test_slots_are_named_and_not_rows(way):
    """Of the second worker's slots, 3 to 5, the first has an env of its own; debug's workers are one process."""
    factories = [fresh, fresh, fresh, fresh, limited, cached]
    with pytest.raises(aioenv.WorkerStartError, match="slots 4 and 5 have the same env") as caught:
        sync.VectorEnv(factories, **{**way, "num_workers": 2})
    assert caught.value.slots == (4, 5)


def test_so_are_slots_of_two_workers_on_threads():
    with pytest.raises(aioenv.WorkerStartError, match=SAME):
        sync.VectorEnv([limited] * 2, num_workers=2, debug=True)


@pytest.mark.parametrize("start", START_METHODS)
def test_processes_have_a_cache_each(start):
    with sync.VectorEnv([limited] * 2, num_workers=2, start=start) as envs:
        envs.reset()
        assert envs.step([0, 0]).obs.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: sync.make_vec(cached, 2, num_workers=1),
        lambda: sync.make_vec(aioenv.EnvCreator(cached), 2, num_workers=1),
        lambda: sync.make_vec(limited, 2, num_workers=1, wrappers=[Hides]),
        lambda: sync.make_vec(cached_cart_pole, 2, num_workers=1, pixels=aioenv.RenderConfig(16, 16)),
        lambda: sync.make_vec(cached_cart_pole, 2, num_workers=1, pixels=aioenv.RenderConfig(16, 16, workers=1)),
        lambda: sync.make_vec(cached, 2, num_workers=1, render=aioenv.RenderConfig(4, 4)),
        lambda: sync.AsyncVectorEnv([cached] * 2, num_workers=1),
    ],
    ids=["function", "creator", "wrappers", "pixels", "drawn_elsewhere", "render", "drop_in"],
)
def test_however_the_vector_env_is_made(make):
    with pytest.raises(aioenv.WorkerStartError, match=SAME):
        make()


def test_one_vector_env_of_all_slots_is_another_matter():
    with sync.make_vec("CartPole-v1", 4, backend="native", num_workers=1) as envs:
        envs.reset(seed=0)
    with sync.make_vec("CartPole-v1", 4, backend="native") as envs:
        envs.reset(seed=0)


class Strange(gym.Wrapper):
    """Gives another env each time that it is asked, and raises at the end."""

    def __init__(self):
        self._env = Counts()

    @property
    def env(self):
        raise RuntimeError("not now")

    observation_space, action_space = Counts.observation_space, Counts.action_space
    metadata, render_mode, spec = {}, None, None

    @property
    def unwrapped(self):
        return self._env

    def reset(self, *, seed=None, options=None):
        return self._env.reset(seed=seed)

    def step(self, action):
        return self._env.step(action)

    def close(self):
        pass


def circular():
    env = Adapter(Counts())
    env.reset = env.env.reset
    env.step = env.env.step
    env.env = env
    env.close = lambda: None
    return env


@pytest.mark.parametrize("factory", [Strange, circular])
def test_an_unusual_wrapper_prevents_no_start(factory):
    with sync.VectorEnv([factory] * 2, num_workers=1) as envs:
        envs.reset()
        assert envs.step([0, 0]).obs.tolist() == [[1], [1]]
