"""Specs of vector envs: `make_vec` makes of them what `gymnasium.make_vec` makes, and the other way round."""

from __future__ import annotations

import dataclasses
import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeAwareObservation

import aioenv
from aioenv import sync
from tests.kits.version_kit import needs_mujoco_batch

STEPS = 9


def trajectory(envs):
    """What some steps give: observations and ends; the vector env is closed."""
    with envs if hasattr(envs, "_portal") else _Closing(envs) as envs:
        obs, _ = envs.reset(seed=3)
        told = [obs]
        actions = np.random.default_rng(0)
        for _ in range(STEPS):
            if isinstance(envs.single_action_space, gym.spaces.Discrete):
                action = actions.integers(0, 2, envs.num_envs)
            else:
                action = actions.uniform(-1, 1, envs.action_space.shape).astype(np.float32)
            obs, _, terminated, truncated, _ = envs.step(action)
            told += [obs, terminated, truncated]
        return envs.num_envs, np.concatenate([np.ravel(one).astype(float) for one in told])


class _Closing:
    def __init__(self, envs):
        self.envs = envs

    def __enter__(self):
        return self.envs

    def __exit__(self, *exc):
        self.envs.close()


def spec_of(envs):
    envs.close()
    return envs.spec


def same(one, other):
    assert one[0] == other[0]
    assert np.array_equal(one[1], other[1])


GYMNASIUMS = {
    "of its own kind": {},
    "sync": {"vectorization_mode": "sync"},
    "vector entry point": {"vectorization_mode": "vector_entry_point"},
    "shorter": {"vectorization_mode": "sync", "max_episode_steps": 4},
    "with arguments": {"vectorization_mode": "sync", "sutton_barto_reward": True, "max_episode_steps": 4},
    "wrapped": {"vectorization_mode": "sync", "wrappers": [TimeAwareObservation]},
}


@pytest.mark.parametrize("kwargs", GYMNASIUMS.values(), ids=GYMNASIUMS)
def test_the_spec_of_gymnasiums_vector_env(kwargs):
    spec = spec_of(gym.make_vec("CartPole-v1", 2, **kwargs))
    sync_kwargs = {**kwargs, "vectorization_mode": "sync"}
    if spec.kwargs["vectorization_mode"] == "sync":  # Gymnasium's processes leave descriptors behind
        told = dataclasses.replace(spec, kwargs={**spec.kwargs, "vectorization_mode": "async"})
        assert aioenv.make_vec(told).num_envs == 2
    same(trajectory(sync.make_vec(spec)), trajectory(gym.make_vec("CartPole-v1", 2, **sync_kwargs)))
    same(trajectory(sync.make_vec(spec, 3)), trajectory(gym.make_vec("CartPole-v1", 3, **sync_kwargs)))
    if "wrappers" not in kwargs:
        again = EnvSpec.from_json(spec.to_json())
        same(trajectory(sync.make_vec(again, 3)), trajectory(gym.make_vec("CartPole-v1", 3, **sync_kwargs)))
        with sync.make_vec(again, 3, backend="native") as envs:
            assert envs.num_envs == 3 and envs.spec.max_episode_steps == kwargs.get("max_episode_steps", 500)


def test_arguments_of_the_vector_env_are_taken_from_its_spec():
    kwargs = {"copy": False, "autoreset_mode": AutoresetMode.SAME_STEP, "observation_mode": "different"}
    spec = spec_of(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs=kwargs))
    envs = aioenv.make_vec(spec)
    assert not envs.copy and envs.autoreset_mode is AutoresetMode.SAME_STEP and envs.num_envs == 2
    assert aioenv.make_vec(spec, autoreset_mode="Disabled").autoreset_mode is AutoresetMode.DISABLED
    spec.kwargs["vector_kwargs"] = {"shared_memory": False, "context": "spawn"}  # of Gymnasium's processes
    assert aioenv.make_vec(spec).num_envs == 2
    spec.kwargs["vector_kwargs"] = {"worker": print}
    with pytest.raises(ValueError, match=r"CartPole-v1 is of a vector env that was made with worker.*vector_kwargs"):
        aioenv.make_vec(spec)


def test_a_spec_that_is_not_a_vector_envs_stays_one_env():
    assert aioenv.make_vec(gym.spec("CartPole-v1")).num_envs == 1
    own = EnvSpec("Own-v0", lambda num_envs, wrappers: gym.make("CartPole-v1"), kwargs={"num_envs": 5, "wrappers": ()})
    with sync.make_vec(own, 2) as envs:  # arguments of the env itself, whatever they are called
        assert envs.num_envs == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_the_spec_of_a_native_cartpole(workers):
    kwargs = {"max_episode_steps": 4}
    envs = sync.make_vec("CartPole-v1", 4, backend="native", num_workers=workers, **kwargs)
    spec = spec_of(envs)
    assert spec.kwargs["num_envs"] == 4
    expected = trajectory(gym.make_vec("CartPole-v1", 4, vectorization_mode="sync", **kwargs))
    for again in (spec, EnvSpec.from_json(spec.to_json())):
        same(trajectory(sync.make_vec(again)), expected)
        for envs in (sync.make_vec(again, 3, backend="native"), gym.make_vec(again)):
            assert envs.num_envs == (3 if isinstance(envs, sync.VectorEnv) else 4)
            envs.reset(seed=0)
            envs.close()


@needs_mujoco_batch
@pytest.mark.parametrize("workers", [0, 2])
def test_the_spec_of_a_native_mujoco_task(workers):
    kwargs = {"max_episode_steps": 4, "healthy_reward": 2.0}
    envs = sync.make_vec(
        "Hopper-v5", 4, backend="native", num_workers=workers, autoreset_mode=AutoresetMode.SAME_STEP, **kwargs
    )
    spec = spec_of(envs)
    assert spec.kwargs["num_envs"] == 4 and json.loads(spec.to_json())["kwargs"]["autoreset_mode"] == "SameStep"
    settings = {"autoreset_mode": AutoresetMode.SAME_STEP}
    expected = trajectory(gym.make_vec("Hopper-v5", 4, vector_kwargs=settings, **kwargs))
    for again in (spec, EnvSpec.from_json(spec.to_json())):
        for envs in (sync.make_vec(again), sync.make_vec(again, backend="native"), gym.make_vec(again)):
            assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
            same(trajectory(envs), expected)
    with sync.make_vec(spec, 3, backend="native") as envs:
        assert envs.num_envs == 3


def test_the_spec_of_single_envs_in_workers():
    """It is that of one env, as `gymnasium.make` takes it."""
    envs = sync.make_vec("CartPole-v1", 2, max_episode_steps=4, wrappers=[TimeAwareObservation])
    spec = spec_of(envs)
    same(trajectory(sync.make_vec(spec, 2)), trajectory(gym.make_vec(spec, 2, vectorization_mode="sync")))
    again = EnvSpec.from_json(spec.to_json())
    same(trajectory(sync.make_vec(again, 2)), trajectory(gym.make_vec(again, 2, vectorization_mode="sync")))
    assert spec_of(sync.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)) is None  # as Gymnasium's


def wrapped(env_id):
    return TimeAwareObservation(gym.make(env_id)).spec


SPECS = {
    "a task of ours": lambda: wrapped("Hopper-v5"),
    "a vector entry point": lambda: wrapped("CartPole-v1"),
    "registered": lambda: gym.spec("Wrapped-v0"),
    "a vector env's": lambda: spec_of(
        gym.make_vec("CartPole-v1", 2, vectorization_mode="sync", wrappers=[TimeAwareObservation])
    ),
}


@pytest.mark.parametrize("made", SPECS.values(), ids=SPECS)
def test_wrappers_and_a_native_task(made):
    wrapper = wrapped("CartPole-v1").additional_wrappers
    gym.register("Wrapped-v0", "gymnasium.envs.mujoco.hopper_v5:HopperEnv", additional_wrappers=wrapper)
    try:
        spec = made()
        with pytest.raises(ValueError, match=r'wrappers of single envs \(TimeAwareObservation\).*backend="workers"'):
            aioenv.make_vec(spec, 2, backend="native")
        if spec.id != "CartPole-v1":
            return
        bare = dataclasses.replace(spec, additional_wrappers=(), kwargs={})
        assert aioenv.make_vec(bare, 2, backend="native").num_envs == 2
    finally:
        del gym.registry["Wrapped-v0"]
