"""Misspelled arguments, factories that return something else, actions of other libraries: an early, clear error."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv import sync


class Plain(gym.Env):
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, size: int = 0) -> None:
        self.size = size

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), float(action[0]), False, False, {}


def open_to_all(**kwargs):
    """Takes whatever it is given, as many wrappers of factories do."""
    return Plain()


def own_word(num_worker=1):
    return Plain()


class Slotted(Plain):
    def __init__(self, render_mode=None, timeout=None, **kwargs) -> None:
        super().__init__()


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "env", ["CartPole-v1", Plain, open_to_all, aioenv.EnvCreator(Plain)], ids=["id", "class", "function", "creator"]
)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_worker", "num_workers"),
        ("numworkers", "num_workers"),
        ("auto_reset_mode", "autoreset_mode"),
        ("timeouts", "timeout_s"),
        ("episode_stat", "episode_stats"),
        ("check_numeric", "check_numerics"),
    ],
)
def test_a_misspelled_argument(env, name, meant):
    with pytest.raises(TypeError, match=rf"{name}: .*did you mean {meant}\?") as caught:
        aioenv.make_vec(env, 2, **{name: 1})
    assert isinstance(caught.value, aioenv.AioenvError)
    with pytest.raises(aioenv.AioenvError, match=f"did you mean {meant}"):
        sync.make_vec(env, 2, **{name: 1})


@pytest.mark.parametrize("backend", ["workers", "native"])
def test_of_both_backends(backend):
    with pytest.raises(aioenv.ArgumentError, match=r"num_worker: .*did you mean num_workers\?"):
        aioenv.make_vec("CartPole-v1", 2, backend=backend, num_worker=3)
    with pytest.raises(aioenv.ArgumentError, match=r"autorest_mode: .*did you mean autoreset_mode\?"):
        aioenv.make_vec("Hopper-v5", 2, backend=backend, autorest_mode="SameStep")


def test_what_an_env_names_goes_to_it():
    with sync.make_vec(own_word, 2, num_worker=3, debug=True) as envs:
        envs.reset()
    with sync.make_vec(Slotted, 2, timeout=3, debug=True) as envs:
        envs.reset()
    gym.register("Slotted-v0", entry_point=Slotted, kwargs={"preloads": 1})
    try:
        with sync.make_vec("Slotted-v0", 2, timeout=3, preloads=2, debug=True) as envs:
            envs.reset()
    finally:
        del gym.registry["Slotted-v0"]


@pytest.mark.parametrize("name", ["size", "max_episode_steps", "xml_file", "frame_skip", "map_name", "continuous"])
def test_names_that_resemble_nothing_of_ours(name):
    aioenv.make_vec(open_to_all, 2, **{name: 1})


@pytest.mark.parametrize(
    "make",
    [
        lambda **kwargs: aioenv.AsyncVectorEnv([Plain], **kwargs),
        lambda **kwargs: sync.VectorEnv([Plain], **kwargs),
        lambda **kwargs: aioenv.NativeVectorEnv(Plain, 2, **kwargs),
        lambda **kwargs: sync.AsyncVectorEnv([Plain], **kwargs),
    ],
    ids=["async", "sync", "native", "drop-in"],
)
def test_of_classes(make):
    """Python's own TypeError has the name."""
    with pytest.raises(TypeError, match="num_worker'"):
        make(num_worker=2)


def test_of_a_creator():
    for env in ("CartPole-v1", Plain, aioenv.EnvCreator(Plain)):
        with pytest.raises(aioenv.ArgumentError, match=r"shares: aioenv\.EnvCreator has no .*did you mean share\?"):
            aioenv.EnvCreator(env, shares=False)
    assert aioenv.EnvCreator(open_to_all, shape=3).kwargs == {"shape": 3}


# ---------------------------------------------------------------- factories


def wrap(env):
    return gym.wrappers.ClipReward(env, -1, 1)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda: Plain().reset(), r"returned \(observation, info\), as `reset` does, expected the gymnasium.Env alone"),
        (lambda: (np.zeros(3), {}), r"returned \(observation, info\), as `reset` does"),
        (lambda: Plain().step(np.zeros(2)), r"returned a tuple of 5, as `step` does"),
        (lambda: (Plain(), {}), r"returned a tuple with an env in it, expected the gymnasium.Env alone: `return env`"),
        (lambda: [Plain(), Plain()], r"returned a list with an env in it, .*one factory for each env"),
        (lambda: None, r"returned None, .*lack a `return`"),
        (lambda: Plain, r"returned the class Plain"),
        (lambda: lambda: Plain(), r"returned a function, .*call it"),
        (lambda: "CartPole-v1", r"returned 'CartPole-v1', .*gymnasium\.make\('CartPole-v1'\)"),
        (lambda: gym.make_vec("CartPole-v1", 2), r"returned a vector env"),
    ],
    ids="reset pair step pair-of-env list none class function id vector".split(),
)
@pytest.mark.parametrize("how", ["list", "make_vec", "wrapped", "pixels"])
def test_a_factory_that_returns_something_else(factory, said, how):
    with pytest.raises(aioenv.WorkerStartError, match=said):
        if how == "list":
            sync.VectorEnv([factory], debug=True)
        elif how == "pixels":
            sync.VectorEnv([factory], debug=True, pixels=aioenv.RenderConfig())
        else:
            sync.make_vec(factory, 1, debug=True, wrappers=[wrap] * (how == "wrapped"))


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda num_envs: gym.make_vec("CartPole-v1", num_envs).reset(), r"\(observation, info\), as `reset` does"),
        (lambda num_envs: None, "got None, .*does it lack a `return`"),
        (lambda num_envs: gym.vector.SyncVectorEnv, "got the class SyncVectorEnv"),
        (lambda num_envs: Plain(), r'got Plain from it; for single envs use backend="workers"'),
    ],
    ids="reset none class single".split(),
)
def test_a_factory_of_a_vector_env(factory, said):
    with pytest.raises(aioenv.WorkerStartError, match=said):
        sync.make_vec(factory, 2, backend="native")


# ---------------------------------------------------------------- actions


@pytest.fixture(scope="module")
def envs():
    with sync.VectorEnv([Plain] * 2, debug=True) as envs:
        envs.reset()
        yield envs


def test_tensors(envs):
    torch = pytest.importorskip("torch")
    envs.step(torch.zeros(2, 2))
    with pytest.raises(aioenv.ActionError, match=r"actions: .*requires grad.*`\.detach\(\)`"):
        envs.step(torch.zeros(2, 2, requires_grad=True))
    with pytest.raises(aioenv.ActionError, match=r"actions: .*bfloat16.*`\.float\(\)`"):
        envs.step(torch.zeros(2, 2, dtype=torch.bfloat16))
    with pytest.raises(aioenv.ActionError, match=r"actions: .*on the device meta.*`\.cpu\(\)`"):
        envs.step(torch.zeros(2, 2, device="meta"))
    with pytest.raises(aioenv.ActionError, match=r"actions: .*sparse.*`\.to_dense\(\)`"):
        envs.step(torch.zeros(2, 2).to_sparse())
    with pytest.raises(
        aioenv.ActionError, match=r"actions: .*conjugate.*`\.resolve_conj\(\)`|complex64.*can't be cast"
    ):
        envs.step(torch.zeros(2, 2, dtype=torch.complex64).conj())
    for wrong in (torch.zeros(2, 2, requires_grad=True), torch.zeros(2, 2, dtype=torch.bfloat16)):
        with pytest.raises(aioenv.ActionError, match="actions: "):  # of a list of tensors, too
            envs.step([wrong[0], wrong[1]])
    envs.step(torch.zeros(2, 2, dtype=torch.float16))
    rollout = envs.rollout(lambda obs: torch.zeros(len(obs), 2), 2)
    assert rollout.actions.dtype == np.float32
    with pytest.raises(aioenv.ActionError, match=r"rollout, group 0 .*detach"):
        envs.rollout(lambda obs: torch.zeros(len(obs), 2, requires_grad=True), 2)


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        (np.array([[0.0, None], [0.0, 1.0]], object), r"expected dtype float32, got object"),
        (np.array([["a", "b"]] * 2), r"expected dtype float32, got <U1"),
        (np.array([["0", "1"]] * 2, object), r"expected dtype float32, got object"),
        (np.zeros((2, 2), [("x", "f4")]), r"expected dtype float32, got .*\('x'"),
        (np.zeros((2, 2), "M8[s]"), r"expected dtype float32, got datetime64"),
        (np.zeros((2, 2), complex), r"expected dtype float32, got complex128"),
        ([[0, 1], [2]], r"expected an array of shape \(2, 2\), got what makes none"),
        ({"a": 1}, r"expected shape \(2, 2\), got \(\)"),
        (None, r"expected shape \(2, 2\), got \(\): None"),
    ],
    ids="none text texts structured dates complex ragged dict nothing".split(),
)
def test_arrays_that_are_no_numbers(envs, actions, said):
    with pytest.raises(aioenv.ActionError, match=f"actions: {said}"):
        envs.step(actions)


class Broken:
    """Looks like an array, until it is one."""

    shape = (2, 2)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, *args, **kwargs):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("lazy"), TypeError("no"), OSError("x")])
def test_what_can_not_be_an_array(envs, error):
    with pytest.raises(aioenv.ActionError, match=f"got a Broken that makes none: {type(error).__name__}: ") as caught:
        envs.step(Broken(error))
    assert caught.value.__cause__ is error


def test_what_a_policy_gives_beside_actions(envs):
    torch = pytest.importorskip("torch")

    def policy(obs):
        return np.zeros((len(obs), 2), np.float32), {"value": torch.zeros(len(obs), requires_grad=True)}

    with pytest.raises(aioenv.ActionError, match=r"extras\['value'\]: .*requires grad.*`\.detach\(\)`"):
        envs.rollout(policy, 2)
    with pytest.raises(aioenv.AioenvError, match=r"extras\['value'\]: expected shape \(1,\), one row a slot"):
        envs.rollout(lambda obs: (np.zeros((len(obs), 2), np.float32), {"value": np.zeros(3)}), 2)


def test_in_the_drop_in():
    torch = pytest.importorskip("torch")
    with sync.AsyncVectorEnv([Plain] * 2) as envs:
        envs.reset()
        envs.step(torch.zeros(2, 2))


def test_of_native_envs():
    torch = pytest.importorskip("torch")
    with sync.make_vec("Swimmer-v5", 2, backend="native") as envs:
        envs.reset(seed=1)
        envs.step(torch.zeros(2, 2))
        with pytest.raises(aioenv.ActionError, match=r"detach"):
            envs.step(torch.zeros(2, 2, requires_grad=True))
