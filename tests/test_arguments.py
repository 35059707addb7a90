"""Arguments that are no good are refused at once: what was expected, what was got, what to do."""

from __future__ import annotations

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest

import aioenv


def make_env():
    return gym.make("CartPole-v1")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"env_fns": None}, TypeError, "env_fns: expected a sequence .* got None"),
        ({"env_fns": make_env}, TypeError, r"env_fns: .* got one function, .*; pass `\[function\] \* num_envs`"),
        ({"restart": True}, TypeError, "restart: expected an aioenv.RestartPolicy or None, got True"),
        ({"preload": 3}, TypeError, "preload: expected names of modules, got 3"),
        ({"preload": [3]}, TypeError, "preload: expected names of modules"),
        ({"worker_env": {"A=B": "1"}}, ValueError, "worker_env: no environment can have .* 'A=B'"),
        ({"worker_env": {"": "1"}}, ValueError, "worker_env: no environment can have"),
        ({"worker_env": {"A": "1\0"}}, ValueError, "worker_env: no environment can have"),
        ({"seed_plan": [1, [2], 3]}, ValueError, "seed_plan: expected a sequence of ints"),
        ({"timeout_s": np.float32(-1)}, ValueError, "timeout_s: expected a positive number of seconds"),
    ],
)
def test_refused_before_anything_is_started(given, error, message):
    with pytest.raises(error, match=message):
        aioenv.AsyncVectorEnv(**{"env_fns": [make_env] * 2, **given})


def test_of_make_vec():
    with pytest.raises(TypeError, match="wrappers: expected a sequence of functions"):
        aioenv.make_vec("CartPole-v1", 2, wrappers=gym.wrappers.ClipReward)
    with pytest.raises(TypeError, match=r"wrappers: .* got \[None\]"):
        aioenv.make_vec("CartPole-v1", 2, wrappers=[None])
    aioenv.make_vec("CartPole-v1", np.int64(2), timeout_s=np.float32(3), start_timeout_s=np.int64(60))


class NoSpaces(gym.Env):
    pass


class NoSpace(gym.Env):
    observation_space = None


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: None, "returned None, expected a gymnasium.Env; does it lack a `return`"),
        (lambda: 3, "returned 3, expected a gymnasium.Env: it has no reset, step, unwrapped"),
        (lambda: gym.make_vec("CartPole-v1", 2), "returned a vector env"),
        (NoSpaces, "has no observation_space"),
        (NoSpace, "observation_space of the env .*: expected a gymnasium.Space, got None"),
    ],
)
def test_factories_that_make_no_env(factory, message):
    with pytest.raises(aioenv.WorkerStartError, match=f"slot 1: TypeError: .*{message}"):
        aioenv.sync.VectorEnv([make_env, factory], debug=True)


@pytest.mark.asyncio
async def test_what_is_started_is_neither_copied_nor_pickled():
    envs = aioenv.AsyncVectorEnv([make_env], debug=True)
    assert isinstance(pickle.loads(pickle.dumps(envs)), aioenv.AsyncVectorEnv)
    async with envs:
        await envs.reset()
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="can't be copied or pickled: it owns processes"):
                how(envs)
        await envs.step([0])


def test_nor_is_its_blocking_twin():
    with aioenv.sync.VectorEnv([make_env], debug=True) as envs:
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="can't be copied or pickled: it owns processes"):
                how(envs)
        envs.reset()
