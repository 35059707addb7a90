"""Common mistakes: the message names what was expected, what was got, and what to do."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import traceback
import types

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import sync


class Plain(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, ends: bool = False) -> None:
        self.ends = ends

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 0.0, self.ends, False, {}


class OldReset(Plain):
    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32)


class OldResetOfTwo(Plain):
    """Returns no pair, but something that unpacks as one."""

    def __init__(self, obs) -> None:
        self.obs = obs

    def reset(self, *, seed=None, options=None):
        return self.obs


class OldResetLater(Plain):
    first = True

    def reset(self, *, seed=None, options=None):
        obs = np.zeros(3, np.float32)
        self.first, first = False, self.first
        return (obs, {}) if first else obs


class OldSeeding(Plain):
    def reset(self):
        return np.zeros(3, np.float32), {}


class OldStep(Plain):
    def step(self, action):
        return np.zeros(3, np.float32), 0.0, False, {}


class Forgetful(Plain):
    def step(self, action):
        pass


class Objectives(Plain):
    def step(self, action):
        return np.zeros(3, np.float32), np.arange(2.0), False, False, {}


class Buggy(Plain):
    def step(self, action):
        raise ValueError(f"a bug in {id(self)}")


class Nested(Plain):
    observation_space = gym.spaces.Dict(a=gym.spaces.Dict(b=gym.spaces.Discrete(3), c=gym.spaces.Discrete(3)))

    def __init__(self, obs) -> None:
        self.obs = obs

    def reset(self, *, seed=None, options=None):
        return self.obs, {}


class Pair(Nested):
    observation_space = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Discrete(3)))


def steps(envs, count):
    envs.reset(seed=0)
    for _ in range(count):
        envs.step(np.zeros(envs.num_envs, np.int64))


FIVE = r"step: expected \(observation, reward, terminated, truncated, info\), got"


@pytest.mark.parametrize(
    ("make", "mode", "said"),
    [
        (
            OldReset,
            "NextStep",
            r"reset: expected \(observation, info\), got an array of shape \(3,\), as in the old gym",
        ),
        (
            lambda: OldResetOfTwo(np.zeros(2)),
            "NextStep",
            r"reset: expected .* got an array of shape \(2,\), as in the old gym",
        ),
        (
            lambda: OldResetOfTwo({"goal": 1, "position": 2}),
            "NextStep",
            r"reset: expected \(observation, info\), got .*, as in the old gym",
        ),
        (lambda: OldResetOfTwo((np.zeros(2), None)), "NextStep", r"reset: expected info as a dict, got None"),
        (
            lambda: OldResetLater(True),
            "NextStep",
            r"reset: expected .* got an array of shape \(3,\), as in the old gym",
        ),
        (
            lambda: OldResetLater(True),
            "SameStep",
            r"reset: expected .* got an array of shape \(3,\), as in the old gym",
        ),
        (OldSeeding, "NextStep", r"keyword argument 'seed'(.|\n)*`def reset\(self, \*, seed=None, options=None\)`"),
        (OldStep, "NextStep", FIVE + " a tuple of 4, as in the old gym API"),
        (Forgetful, "NextStep", FIVE + r" None\n"),
        (
            Objectives,
            "NextStep",
            r"\): ValueError: reward: expected a number, got array\(\[0\., 1\.\]\); if there are several",
        ),
        (
            lambda: Nested({"a": {"b": 1}}),
            "NextStep",
            r"\['a'\]: expected a dict with the keys \['b', 'c'\], got .*\['b'\]",
        ),
        (lambda: Nested(None), "NextStep", r"observation: expected a dict with the keys \['a'\], got None"),
        (lambda: Pair((1,)), "NextStep", r"observation: expected a tuple of 2, got \(1,\)"),
    ],
)
def test_an_env_that_gives_something_else(make, mode, said):
    with sync.make_vec(make, 2, autoreset_mode=mode, debug=True) as envs:
        with pytest.raises(aioenv.EnvError, match=said):
            steps(envs, 2)


def test_a_factory_that_does_not_call_the_class():
    with pytest.raises(aioenv.WorkerStartError, match=r"the factory returned the class Plain, .*`Plain\(\.\.\.\)`"):
        sync.make_vec(lambda: Plain, 1, debug=True)


@pytest.mark.parametrize(
    ("env_id", "error"),
    [("Nobodys-v0", gym.error.NameNotFound), ("nobodys/Env-v0", gym.error.NamespaceNotFound)],
)
def test_an_id_whose_package_was_not_imported(env_id, error):
    with pytest.raises(error) as caught:
        aioenv.make_vec(env_id, 2)
    assert f'"package:{env_id}" imports it by itself' in caught.value.__notes__[0]
    with pytest.raises(gym.error.NameNotFound, match="Did you mean") as caught:
        aioenv.make_vec("CartPoel-v1", 2)
    assert not hasattr(caught.value, "__notes__")


class Locked(Plain):
    def __init__(self, name: str) -> None:
        setattr(self, name, gym.spaces.Discrete(2))
        getattr(self, name).lock = threading.Lock()


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_a_space_that_does_not_pickle_is_named(name):
    with pytest.raises(aioenv.WorkerStartError, match=f"the {name} of the env <.*Locked.* does not pickle.*lock"):
        sync.make_vec(lambda: Locked(name), 2, debug=True)


def test_a_bug_of_all_envs_is_told_once():
    with sync.make_vec(Buggy, 4, num_workers=2) as envs, pytest.raises(aioenv.EnvError) as caught:
        steps(envs, 1)
    assert [error.slot for error in caught.value.errors] == [0, 1, 2, 3]
    told = "".join(traceback.format_exception(caught.value))
    assert told.count("raise ValueError(") == 2  # the group, and the first error in it
    for slot, error in enumerate(caught.value.errors):
        assert str(error).startswith(f"slot {slot} (worker") and "raise ValueError(" in error.traceback
        assert str(error).endswith(" (traceback as slot 0's)") == (slot > 0)


@pytest.mark.parametrize(
    ("env_id", "actions", "said"),
    [
        ("CartPole-v1", None, r"expected shape \(2,\), got \(\): None"),
        ("CartPole-v1", {"a": 1}, r"expected shape \(2,\), got \(\): \{'a': 1\}"),
        ("CartPole-v1", 1, r"expected shape \(2,\), got \(\); the first axis is the slots, one action each"),
        (
            "CartPole-v1",
            np.zeros(2),
            r"expected dtype int64, got float64, which can't be cast: `\.astype\('int64'\)` if",
        ),
        ("Pendulum-v1", np.zeros((1, 2, 1)), r"expected shape \(2, 1\), got \(1, 2, 1\); the first axis is the slots"),
        ("Pendulum-v1", np.zeros(1), r"expected shape \(2, 1\), got \(1,\); the first axis is the slots"),
    ],
)
def test_actions_of_another_shape(env_id, actions, said):
    with sync.make_vec(env_id, 2, debug=True) as envs:
        envs.reset(seed=0)
        with pytest.raises(aioenv.ActionError, match=said):
            envs.step(actions)


@pytest.mark.parametrize("kwargs", [{"debug": True}, {"backend": "native"}], ids=str)
def test_a_misspelled_argument_is_named(kwargs):
    with pytest.raises(aioenv.ArgumentError, match=r"num_worker: aioenv\.make_vec has no .*did you mean num_workers"):
        sync.make_vec("CartPole-v1", 2, num_worker=3, **kwargs)


@pytest.mark.parametrize("kwargs", [{"debug": True}, {"backend": "native"}], ids=str)
def test_a_seed_is_of_reset(kwargs):
    """Other libraries' functions take it where envs are made."""
    with pytest.raises(aioenv.WorkerStartError, match=r"seed: envs are seeded by reset\(seed=…\)"):
        sync.make_vec("CartPole-v1", 2, seed=3, **kwargs)


@pytest.mark.parametrize("where", [{}, {"num_workers": 1}], ids=str)
def test_what_makes_single_envs_is_not_native(where):
    with pytest.raises(aioenv.WorkerStartError, match=r'called with num_envs=2, .*single envs goes with backend="work'):
        sync.make_vec(lambda: gym.make("CartPole-v1"), 2, backend="native", **where)


@pytest.mark.parametrize(("name", "wrong"), [("num_workers", "x"), ("num_workers", -1), ("num_envs", "x")])
@pytest.mark.parametrize("backend", ["native", "workers"])
def test_what_is_no_number_of_envs_or_workers(backend, name, wrong):
    with pytest.raises(ValueError, match=f"{name}: expected a positive int"):
        aioenv.make_vec("Swimmer-v5", **{"num_envs": 2, "num_workers": 1, "backend": backend, name: wrong})


def test_one_wrapper_is_a_list_too():
    with pytest.raises(TypeError, match=r"wrappers: expected a sequence .*; one alone goes into a list, too"):
        aioenv.make_vec("CartPole-v1", 2, wrappers=gym.wrappers.ClipAction)  # type: ignore[arg-type]


def test_two_runs_are_two_loops():
    async def start():
        return await aioenv.make_vec("CartPole-v1", 2, debug=True)

    with asyncio.Runner() as runner:
        envs = runner.run(start())
        with asyncio.Runner() as other, pytest.raises(aioenv.LoopError, match=r"used from .*: make another one there"):
            other.run(envs.reset())
        runner.run(envs.close())


@pytest.mark.parametrize("make", [sync.VectorEnv, sync.AsyncVectorEnv])
def test_a_module_that_is_in_this_process_alone(make, monkeypatch):
    """As one that `runpy.run_path` runs, or that a loader of plugins makes."""
    module = types.ModuleType("made_here")
    monkeypatch.setitem(sys.modules, "made_here", module)
    module.Env = type("Env", (Plain,), {"__module__": "made_here"})
    with pytest.raises((aioenv.WorkerStartError, ModuleNotFoundError)) as caught:
        make([module.Env])
    told = "".join(traceback.format_exception(caught.value))
    assert "No module named 'made_here'" in told and "cloudpickle.register_pickle_by_value(module) it is sent" in told


def test_a_loop_that_is_not_asyncios():
    """As under trio, which pytest's plugin of anyio takes, too: a coroutine runs, and no loop of asyncio does."""
    starting = aioenv.make_vec("CartPole-v1", 2).__aenter__()
    with pytest.raises(aioenv.LoopError, match=r"an event loop of asyncio, in a coroutine; none runs here$"):
        starting.send(None)


@pytest.mark.asyncio
async def test_what_is_closed_says_what_it_was():
    """The same words for blocking code and for the other."""
    said = {}
    with sync.make_vec("CartPole-v1", 2, debug=True) as blocking:
        pass
    async with aioenv.make_vec("CartPole-v1", 2, debug=True) as envs:
        pass
    with aioenv.SimPool("<mujoco/>", 1) as sims:
        pass
    pool = aioenv.RenderPool("<mujoco/>")
    await pool.close()
    for name, use in (("blocking", blocking.reset), ("sims", sims.step)):
        with pytest.raises(aioenv.ClosedError) as caught:
            use()
        said[name] = str(caught.value)
    for name, coroutine in (("envs", envs.reset()), ("pool", pool.render(width=1, height=1))):
        with pytest.raises(aioenv.ClosedError) as caught:
            await coroutine
        said[name] = str(caught.value)
    what = {"blocking": "vector env", "envs": "vector env", "sims": "pool of simulations", "pool": "render pool"}
    end = "was closed: it can't be used any more, make another one"
    assert said == {name: f"the {noun} {end}" for name, noun in what.items()}


@pytest.mark.asyncio
async def test_two_that_step_at_once_are_told_so():
    """Tasks, or threads, which come one after the other on the loop."""
    actions = np.zeros(2, np.int64)
    turns = "they take turns, with a lock"
    async with aioenv.make_vec("CartPole-v1", 2, debug=True) as envs:
        await envs.reset(seed=0)
        both = await asyncio.gather(*(envs.step(actions) for _ in range(2)), return_exceptions=True)
        assert isinstance(both[0], tuple) and isinstance(both[1], aioenv.PendingCallError)
        assert re.search(f"If another task or thread awaits it.* {turns}", str(both[1]))
    with sync.make_vec("CartPole-v1", 2, debug=True) as blocking:
        blocking.reset(seed=0)
        begun = blocking._begin_step(
            actions
        )  # one thread waits in a step, which belongs to no thread between two looks
        blocking.step(actions)  # and another comes
        with pytest.raises(aioenv.NoAsyncCallError, match=f"dropped by a later call, .*another thread.* {turns}"):
            begun.wait() and begun.result()


def test_an_id_that_is_one_vector_env_alone():
    gym.register("Whole-v0", vector_entry_point="gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv")
    try:
        with pytest.raises(ValueError, match=r'Whole-v0 is registered as one vector env alone, .* backend="native"'):
            aioenv.make_vec("Whole-v0", 2)
        with sync.make_vec("Whole-v0", 2, backend="native") as envs:
            envs.reset(seed=0)
    finally:
        del gym.registry["Whole-v0"]


class NoMetadata(Plain):
    metadata = None  # as robosuite's wrapper has it


def test_an_env_without_metadata():
    with sync.VectorEnv([NoMetadata] * 2) as envs:
        envs.reset(seed=0)
    with sync.AsyncVectorEnv([NoMetadata] * 2) as envs:
        envs.reset(seed=0)
