"""Arguments that are no good are refused at once: what was expected, what was got, what to do."""

from __future__ import annotations

import copy
import pickle
import threading

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import EpisodeCounter
from aioenv.stats import SharedRunningStats


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
    with pytest.raises(TypeError, match=r"vectorization_mode, vector_kwargs: gymnasium.make_vec has that"):
        aioenv.make_vec("CartPole-v1", 2, vectorization_mode="async", vector_kwargs={})
    aioenv.make_vec("CartPole-v1", np.int64(2), timeout_s=np.float32(3), start_timeout_s=np.int64(60))


def test_of_shared_objects():
    number = np.int64(2)
    with SharedRunningStats(number, number) as stats, EpisodeCounter(number) as counter:
        assert stats.shape == (2,) and stats.at(number - 1).slot == counter.at(number - 1).slot == 1
        with pytest.raises(ValueError, match="slot: expected 0 … 1, got "):
            counter.at(number)
    with EpisodeCounter() as counter, pytest.raises(ValueError, match="slot: expected an int from 0, got 'a'"):
        counter.at("a")
    with pytest.raises(ValueError, match="decay: expected a number above 0 and up to 1, got 'a'"):
        SharedRunningStats(num_slots=1, decay="a")


ONE_OR_MORE = "slots: expected one or more slot numbers, got "
INTS = "seed: expected an int, a sequence of ints or None, got "


@pytest.mark.parametrize("where", [{"debug": True}, {"backend": "native"}], ids=["workers", "native"])
@pytest.mark.asyncio
async def test_of_methods(where):
    async with aioenv.make_vec("CartPole-v1", 2, **where) as envs:
        await envs.reset(seed=0)
        for refused, error, message in [
            (lambda: envs.pause(1.5), ValueError, ONE_OR_MORE + "1.5"),
            (lambda: envs.send([0], 5), ValueError, ONE_OR_MORE + "5"),
            (lambda: envs.send_reset(5), ValueError, ONE_OR_MORE + "5"),
            (lambda: envs.send_reset(seed=1.5), TypeError, INTS + "1.5"),
            (lambda: envs.send_reset(seed="ab"), TypeError, INTS + "'ab'"),
            (lambda: envs.send_reset([0], seed=[1, 2]), ValueError, "match the number of slots, 1, but got length=2"),
            (lambda: envs.send_reset(options=3), TypeError, "options: expected a dict or None, got 3"),
        ]:
            with pytest.raises(error, match=message):
                refused()
        for awaited, error, message in [
            (envs.call_at(1.0, "gravity"), ValueError, ONE_OR_MORE + "1.0"),
            (envs.call_at(True, "gravity"), ValueError, ONE_OR_MORE + "True"),
            (envs.call_at(None, "gravity"), ValueError, ONE_OR_MORE + "None"),
            (envs.reset(seed=[1.5, 2]), TypeError, INTS + r"\[1.5, 2\]"),
            (envs.reset(seed=np.array(5)), TypeError, INTS + r"array\(5\)"),
            (envs.reset_at(0, seed=[1]), TypeError, r"seed: expected an int or None, got \[1\]"),
            (envs.step_at(0, [1]), aioenv.ActionError, r"step_at, the action as a batch of one: .* got \(1, 1\)"),
            (envs.step([[0], [0, 1]]), aioenv.ActionError, "expected an array of .*, got what makes none: "),
            (envs.recv("a"), ValueError, "recv: min_slots: expected how many slots to wait for, an int .* 1, got 'a'"),
            (envs.recv(2.5), ValueError, "recv: min_slots: .*, got 2.5"),
            (envs.recv(True), ValueError, "recv: min_slots: .*, got True"),
            (envs.recv(1, "a"), ValueError, "recv: max_slots: expected how many slots to take, .* or None, got 'a'"),
            (envs.recv(1, 0), ValueError, "recv: max_slots: .*, got 0"),
            (envs.recv(deadline_s=True), ValueError, "recv: deadline_s: .*, got True"),
            (envs.call(3), TypeError, "call: name: expected a string, .* got 3"),
            (envs.get_attr(3), TypeError, "get_attr: name: expected a string, .* got 3"),
            (envs.set_attr(3, 1), TypeError, "set_attr: name: expected a string, .* got 3"),
            (envs.reset(options=3), TypeError, "options: expected a dict or None, got 3"),
            (envs.reset_at(0, options=3), TypeError, "options: expected a dict or None, got 3"),
            (
                envs.reset(options={"reset_mask": [True, False]}),
                TypeError,
                "reset_mask.*must be a numpy array, got .*list",
            ),
            (
                envs.reset(options={"reset_mask": np.ones(3, bool)}),
                ValueError,
                r"reset_mask.* shape `\(2,\)`, got \(3,\)",
            ),
            (envs.reset(options={"reset_mask": np.ones(2)}), TypeError, "reset_mask.*`dtype=np.bool_`, got float64"),
            (envs.reset(options={"reset_mask": np.zeros(2, bool)}), ValueError, "reset_mask.* at least one True value"),
            (envs.reset(seed=[1]), ValueError, "the length must match num_envs=2 but got length=1"),
            (envs.recv(deadline_s="x"), ValueError, "recv: deadline_s: expected a number of seconds or None, got 'x'"),
            (aioenv.evaluate(envs, len, 2, seed=[1.5, 2]), TypeError, INTS + r"\[1.5, 2\]"),
            (aioenv.evaluate(envs, len, 2, seed="ab"), TypeError, INTS + "'ab'"),
            (aioenv.evaluate(envs, len, 2, seed=np.random.default_rng()), TypeError, INTS + "Generator"),
        ]:
            with pytest.raises(error, match=message):
                await awaited
        assert not envs.outstanding
        await envs.step([0, 0])  # nothing was sent, and no episode lost
        assert await envs.get_attr("steps_beyond_terminated") == (None, None)


class NoSpaces(gym.Env):
    pass


class NoSpace(gym.Env):
    observation_space = None


class OldBox:
    """A space of the package `gym`."""

    __module__ = "gym.spaces.box"

    def __repr__(self):
        return "Box(0, 255)"


class OldGym(gym.Env):
    observation_space = OldBox()


class Parallel(gym.Env):
    """Spaces by agent, as PettingZoo's envs have them."""

    possible_agents = ("a", "b")

    def observation_space(self, agent): ...


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (OldGym, r"got gym's Box\(0, 255\); shimmy adapts most"),
        (Parallel, "got that of PettingZoo: a method; aioenv.envs.PettingZooEnv makes"),
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


def make_locked():
    env = make_env()
    env.metadata = {**env.metadata, "lock": threading.Lock(), "nothing": None}
    return env


@pytest.mark.asyncio
async def test_an_env_may_have_no_metadata():
    """As one of the old gym's that shimmy has adapted."""

    def make_bare():
        env = make_env()
        env.unwrapped.metadata = None
        return env

    async with aioenv.AsyncVectorEnv([make_bare] * 2) as envs:
        await envs.reset(seed=0)
        assert "render_modes" not in envs.metadata
    sync_envs = aioenv.sync.AsyncVectorEnv([make_bare])
    sync_envs.reset(seed=0)
    sync_envs.close()


@pytest.mark.asyncio
async def test_metadata_that_do_not_pickle_are_left_out():
    """They are no reason not to start; Gymnasium, which reads them in its own process, starts too."""
    async with aioenv.AsyncVectorEnv([make_locked]) as envs:
        metadata = envs.metadata
    assert metadata["render_fps"] == 50 and metadata["nothing"] is None and "lock" not in metadata
    metadata = (await aioenv.EnvCreator(make_locked).metadata()).metadata
    assert metadata["render_fps"] == 50 and "lock" not in metadata


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


@pytest.mark.parametrize("seed", [1.5, "12", [1.0, 2.0], np.array([1.5, 2.5])], ids=repr)
@pytest.mark.asyncio
async def test_seeds_are_ints(seed):
    async with aioenv.AsyncVectorEnv([make_env] * 2, debug=True) as envs:
        with pytest.raises(TypeError, match=r"seed: expected an int|as an integer"):
            await envs.reset(seed=seed)
        await envs.reset(seed=np.array([1, 2]))


@pytest.mark.parametrize(
    "given", [{"restart": aioenv.RestartPolicy()}, {"cpu_affinity": "spread"}, {"worker_env": {"A": "b"}}], ids=str
)
def test_what_is_about_worker_processes_is_refused_without_any(given):
    (name,) = given
    with pytest.raises(ValueError, match=f"{name}: it is about worker processes; use num_workers=1 or more"):
        aioenv.make_vec("CartPole-v1", 2, backend="native", **given)
