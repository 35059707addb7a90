"""The drop-in's `shared_memory=True`: observations of another dtype or shape than their space's are cast."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from aioenv.sync import AsyncVectorEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*ERROR")  # what an env raises is logged so

ODD = {
    "floats for bytes": (spaces.Box(0, 255, (2, 2), np.uint8), np.array([[0.0, 1.0], [2.7, 255.0]])),
    "ints for bytes": (spaces.Box(0, 255, (2,), np.uint8), np.array([1, 200])),
    "a list": (spaces.Box(0, 255, (2,), np.uint8), [1, 2]),
    "a float": (spaces.Discrete(3, start=1), 2.0),
    "an array of one": (spaces.Discrete(3), np.array([1])),
    "floats for choices": (spaces.MultiDiscrete([3, 4]), np.array([1.0, 3.0])),
    "flat": (spaces.Box(-1, 1, (2, 2)), np.linspace(-1, 1, 4)),
    "an axis less": (spaces.Box(-1, 1, (3, 1)), np.ones(3, np.float32)),
    "an axis more": (spaces.Box(-1, 1, (2,)), np.ones((1, 2), np.float32)),
    "a number": (spaces.Box(-1, 1, (1,)), 0.5),
    "objects": (spaces.Box(-1, 1, (2,)), np.array([0, 1], object)),
    "usual": (spaces.Box(-1, 1, (2,)), np.full(2, 0.25, np.float32)),
}


class Gives(gym.Env):
    """Observes what it was made with."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space, value) -> None:
        self.observation_space = space
        self.value = value

    def reset(self, *, seed=None, options=None):
        return self.value, {}

    def step(self, action):
        return self.value, 0.0, bool(action), False, {}


SPACE = spaces.Dict({name: space for name, (space, _) in ODD.items()})
VALUE = {name: value for name, (_, value) in ODD.items()}


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_they_are_cast(mode):
    with AsyncVectorEnv([lambda: Gives(SPACE, VALUE)] * 2, autoreset_mode=mode) as envs:
        got = [envs.reset().obs, envs.step([0, 0]).obs, envs.step([0, 1]).obs, envs.step([0, 0]).obs]
    for obs in got:
        for name, space in SPACE.items():
            # as Gymnasium's `write_to_shared_memory` does
            assert obs[name].dtype == space.dtype
            assert np.array_equal(obs[name], [np.asarray(VALUE[name], space.dtype).reshape(space.shape)] * 2)


@pytest.mark.parametrize("name", [name for name in ODD if name != "usual"])
def test_one_beside_another_that_is_as_its_space_says(name):
    space, value = ODD[name]
    usual = np.zeros(space.shape, space.dtype)[()]
    with AsyncVectorEnv([lambda: Gives(space, usual), lambda: Gives(space, value)], num_workers=1) as envs:
        for obs in (envs.reset().obs, envs.step([0, 0]).obs):
            assert obs.dtype == space.dtype and not obs[0].any()
            assert np.array_equal(obs[1], np.asarray(value, space.dtype).reshape(space.shape))


class Draws(gym.Env):
    """Observes samples of its space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space) -> None:
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize(
    "space", [spaces.Text(6), spaces.OneOf([spaces.Discrete(4), spaces.Box(0, 1, (2,))])], ids=repr
)
def test_what_gymnasium_reads_from_its_shared_memory_only_once(space):
    factories = [lambda: Draws(copy.deepcopy(space))] * 3
    reference = gym.vector.SyncVectorEnv(factories)
    with AsyncVectorEnv(factories) as envs:
        assert data_equivalence(envs.reset(seed=3).obs, reference.reset(seed=3)[0])
        for _ in range(5):
            assert data_equivalence(envs.step([0] * 3).obs, reference.step([0] * 3)[0])


@pytest.mark.parametrize("value", [0.5, np.ones(1), np.ones(3), "many"], ids=repr)
def test_what_has_too_few_numbers_or_too_many_is_refused(value):
    space = spaces.Box(-1, 1, (2,))
    with AsyncVectorEnv([lambda: Gives(space, value)]) as envs:
        with pytest.raises(ValueError, match=r"expected shape \(2,\), got|could not convert"):
            envs.reset()


def test_none_is_no_number():
    with AsyncVectorEnv([lambda: Gives(spaces.Box(-1, 1, (1,)), None)]) as envs:
        with pytest.raises(TypeError, match="expected dtype float32, got None"):
            envs.reset()


@pytest.mark.parametrize("name", ["floats for bytes", "a float", "an axis less"])
def test_without_shared_memory_they_are_refused(name):
    with AsyncVectorEnv([lambda: Gives(*ODD[name])], shared_memory=False) as envs:
        with pytest.raises((TypeError, ValueError), match=r"observation: expected"):
            envs.reset()
