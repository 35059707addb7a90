"""Gymnasium's registry: `gymnasium.make_vec` makes vector envs of aioenv, and processes that need none pay nothing."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
import aioenv.sync
from aioenv.adapters import gymnasium as registered
from aioenv.worker import specs
from tests.kits.compare import assert_same
from tests.kits.process_kit import run_alone
from tests.kits.version_kit import needs_mujoco_batch


def steps(envs, actions):
    results = [envs.reset(seed=3), *(envs.step(action) for action in actions)]
    envs.close()
    return [tuple(result) for result in results]


def test_ids_make_vector_envs_with_the_results_of_gymnasiums():
    theirs = SyncVectorEnv([partial(gym.make, "Pendulum-v1", max_episode_steps=5)] * 3)
    actions = [theirs.action_space.sample() for _ in range(12)]
    envs = gym.make_vec("aioenv/Pendulum-v1", num_envs=3, max_episode_steps=5)
    assert isinstance(envs, aioenv.sync.VectorEnv) and isinstance(envs, gym.vector.VectorEnv)
    assert_same(steps(envs, actions), steps(theirs, actions))


@needs_mujoco_batch
def test_native_tasks_are_native():
    envs = gym.make_vec("aioenv/HalfCheetah-v5", num_envs=4)
    assert envs.backend == "native" and envs.spec.id == "aioenv/HalfCheetah-v5"
    theirs = SyncVectorEnv([partial(gym.make, "HalfCheetah-v5")] * 4)
    actions = [theirs.action_space.sample() for _ in range(4)]
    assert_same(steps(envs, actions), steps(theirs, actions))


def test_arguments_are_passed_on():
    envs = gym.make_vec(
        "aioenv/CartPole-v1",
        num_envs=3,
        backend="workers",
        num_workers=2,
        autoreset_mode=AutoresetMode.SAME_STEP,
        env_wrappers=[partial(gym.wrappers.FrameStackObservation, stack_size=2)],
        sutton_barto_reward=True,
        max_episode_steps=4,
    )
    assert (envs.backend, len(envs.workers), envs.num_envs) == ("workers", 2, 3)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.observation_space.shape == (3, 2, 4)
    envs.reset(seed=0)
    for _ in range(4):
        _, reward, terminated, truncated, _ = envs.step(np.array([0, 1, 0]))
        assert (reward[~terminated] == 0).all()
    assert truncated.any()
    with pytest.raises(
        ValueError, match="CartPole-v1 is of a vector env that was made with backend, env_wrappers, num_w"
    ):
        aioenv.sync.make_vec(envs.spec)
    again = gym.make_vec(envs.spec)
    assert again.observation_space == envs.observation_space and len(again.workers) == 2
    again.close()
    envs.close()
    with pytest.raises(gym.error.Error, match="with the wrappers argument"):
        gym.make_vec("aioenv/CartPole-v1", 2, wrappers=[gym.wrappers.FlattenObservation])


def test_specs_of_vector_envs():
    """As JSON too; and to aioenv itself."""
    envs = gym.make_vec("aioenv/Acrobot-v1", num_envs=2, max_episode_steps=7)
    text = envs.spec.to_json()
    envs.close()
    for make in (gym.make_vec, aioenv.sync.make_vec):
        again = make(EnvSpec.from_json(text))
        again.reset(seed=0)
        for _ in range(7):
            result = again.step(np.array([0, 1]))
        assert again.num_envs == 2 and result[3].all()
        again.close()


def test_other_modes_and_single_envs():
    env = gym.make("aioenv/Pendulum-v1", g=9.0)
    assert env.unwrapped.g == 9.0 and env.spec.max_episode_steps == 200
    env.close()
    envs = gym.make_vec("aioenv/Pendulum-v1", 2, vectorization_mode="sync")
    assert type(envs) is SyncVectorEnv
    envs.close()


def test_aioenv_takes_these_ids_as_gymnasiums():
    for env_id in ("CartPole-v1", "aioenv/CartPole-v1"):
        envs = aioenv.sync.make_vec(env_id, 2, backend="auto")
        assert envs.backend == "native"
        envs.close()
    with pytest.raises(gym.error.NameNotFound):
        aioenv.sync.make_vec("aioenv/NoSuchEnv-v1", 2)


def test_ids_that_are_registered_later(monkeypatch):
    monkeypatch.setitem(gym.registry, "Late-v0", EnvSpec("Late-v0", "gymnasium.envs.classic_control:PendulumEnv"))
    with pytest.raises(gym.error.Error):
        gym.make_vec("aioenv/Late-v0", 2)
    with monkeypatch.context() as undone:
        undone.setitem(gym.registry, "aioenv/Late-v0", None)  # and removed at the end
        registered.register_ids("Late-v0")
        gym.make_vec("aioenv/Late-v0", 2, num_workers=1).close()
    for env_id in ("a/Late-v0", "OnlyVector-v0"):
        monkeypatch.setitem(gym.registry, env_id, EnvSpec(env_id, None if "Only" in env_id else "x:Y"))
        with pytest.raises(ValueError, match="expected an id without a namespace, of an env that has an entry_point"):
            registered.register_ids(env_id)
    with pytest.raises(gym.error.Error):
        registered.register_ids("NoSuchEnv-v0")
    assert not [env_id for env_id in gym.registry if env_id.startswith("aioenv/GymV")], "which only raise an error"


def test_the_vector_entry_point_of_gymnasiums_ids(monkeypatch):
    spec = gym.spec("Pendulum-v1")
    monkeypatch.setattr(spec, "vector_entry_point", None)
    with pytest.raises(gym.error.Error, match="doesn't have a vector entry point"):
        gym.make_vec("Pendulum-v1", 2, vectorization_mode="vector_entry_point")
    registered.set_vector_entry_points("Pendulum-v1")
    registered.set_vector_entry_points("Pendulum-v1")
    envs = gym.make_vec("Pendulum-v1", 2, vectorization_mode="vector_entry_point", num_workers=1)
    assert isinstance(envs, aioenv.sync.VectorEnv) and len(envs.workers) == 1
    envs.close()
    for backend in ("workers", "auto"):
        aioenv.sync.make_vec("Pendulum-v1", 2, backend=backend).close()
    with pytest.raises(ValueError, match="there is no vector env of it"):
        aioenv.sync.make_vec("Pendulum-v1", 2, backend="native")
    with pytest.raises(ValueError, match=r'CartPole-v1 has a vector_entry_point of its own.*"aioenv/CartPole-v1"'):
        registered.set_vector_entry_points("Acrobot-v1", "CartPole-v1")
    assert gym.spec("Acrobot-v1").vector_entry_point is None


@needs_mujoco_batch
def test_a_native_task_whose_vector_entry_point_is_aioenv(monkeypatch):
    monkeypatch.setattr(gym.spec("Hopper-v5"), "vector_entry_point", None)
    registered.set_vector_entry_points("Hopper-v5")
    for make in (
        partial(gym.make_vec, vectorization_mode="vector_entry_point"),
        partial(aioenv.sync.make_vec, backend="native"),
        partial(aioenv.sync.make_vec, backend="auto"),
    ):
        envs = make("Hopper-v5", 2)
        assert envs.backend == "native"
        envs.close()


def test_the_registry_that_workers_get_has_none_of_it(monkeypatch):
    """So its digest is that of the workers' own, and they unpickle nothing."""
    mine = [env_id for env_id in gym.registry if env_id.startswith("aioenv/")]
    assert len(mine) > 20
    before = specs.capture_registry().entries[0]
    monkeypatch.setattr(gym.spec("Acrobot-v1"), "vector_entry_point", None)
    registered.set_vector_entry_points("Acrobot-v1")
    assert specs.capture_registry().entries[0] == before
    with monkeypatch.context() as without:
        for env_id in mine:
            without.delitem(gym.registry, env_id)
        without.setattr(gym.spec("Acrobot-v1"), "vector_entry_point", None)
        assert specs.capture_registry().entries[0] == before


def test_importing_gymnasium_imports_nothing_of_it():
    """And the registration needs neither asyncio nor MuJoCo."""
    code = """
    import sys, gymnasium
    assert not [name for name in sys.modules if name.partition(".")[0] == "aioenv"]
    import aioenv
    assert "aioenv/CartPole-v1" not in gymnasium.registry
    envs = gymnasium.make_vec
    import aioenv.adapters.gymnasium
    assert "aioenv/CartPole-v1" in gymnasium.registry
    assert not {"asyncio", "mujoco", "uvloop"} & set(sys.modules)
    """
    run_alone(code)


def test_an_id_that_names_the_module():
    code = """
    import gymnasium
    envs = gymnasium.make_vec("aioenv.adapters.gymnasium:aioenv/CartPole-v1", num_envs=2)
    print(envs.backend)
    envs.close()
    """
    assert run_alone(code).stdout == "native\n"


def test_other_names_of_the_module():
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchEnv-v0'"):
        getattr(registered, "NoSuchEnv-v0")
