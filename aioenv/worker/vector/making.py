"""How a `gymnasium.vector.VectorEnv` is made. Wherever it lives."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.requirements import require_batch
from aioenv.worker.making import what_is_no_env
from aioenv.worker.mujoco_gl import check_mujoco_gl
from aioenv.worker.native_tasks import TASKS, is_native_task
from aioenv.worker.vector.specs import made_plain

__all__ = ["AnyVectorEnv", "make_registered", "make_vector_env", "vector_entry_point", "versioned"]

AnyVectorEnv = VectorEnv[Any, Any, Any]

# What is registered, and what gives the very same results faster.
_FASTER = {
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv": "aioenv.native.cartpole:CartPoleVectorEnv",
}


def make_vector_env(factory: Callable[..., Any], num_envs: int) -> AnyVectorEnv:
    """Call `factory(num_envs=num_envs)`, and see that a vector env of so many slots comes of it.

    Raises:
        TypeError: if it is something else.
        ValueError: if it has another number of slots, or lacks a space.
    """
    try:
        env = factory(num_envs=num_envs)
    except TypeError as exc:
        if "'num_envs'" in str(exc):
            exc.add_note(
                f"it is called with num_envs={num_envs}, to make one gymnasium.vector.VectorEnv of so many slots; what "
                'makes single envs goes with backend="workers" (aioenv.AsyncVectorEnv)'
            )
        raise
    if problem := what_is_no_env(env, "gymnasium.vector.VectorEnv"):
        raise TypeError(f"expected a function that makes a gymnasium.vector.VectorEnv, got {problem}")
    if not isinstance(env, VectorEnv):
        raise TypeError(
            f"expected a function that makes a gymnasium.vector.VectorEnv, got {type(env).__name__} from it; "
            'for single envs use backend="workers" (aioenv.AsyncVectorEnv)'
        )
    if env.num_envs != num_envs:
        problem = f"it was called with num_envs={num_envs} and made a vector env of {env.num_envs} slots"
    for name in ("single_observation_space", "observation_space", "single_action_space", "action_space"):
        if getattr(env, name, None) is None:
            native = name.endswith("observation_space") and hasattr(env, "set_observation_size")
            hint = ": call set_observation_size at the end of its __init__" * native
            problem = f"the vector env that it made has no {name}{hint}"
    if problem:
        env.close()
        raise ValueError(f"{factory!r}: {problem}")
    return env


def make_registered(env: str | EnvSpec, env_kwargs: dict[str, Any], *, num_envs: int) -> AnyVectorEnv:
    """Make what is registered for an id, "module:id" or spec as a vector env, or ours with the same results."""
    env = copy.deepcopy(_spec(env))
    if is_native_task(env):
        require_batch()
        check_mujoco_gl()
        env.vector_entry_point = TASKS[str(env.entry_point)]
        env_kwargs = {name: value for name, value in env_kwargs.items() if name != "disable_env_checker"}
        env_kwargs.setdefault("autoreset_mode", AutoresetMode.NEXT_STEP)
        if env_kwargs.get("max_episode_steps") is None:
            env_kwargs["max_episode_steps"] = env.max_episode_steps
    else:
        env.vector_entry_point = vector_entry_point(env)
    made = gymnasium.make_vec(env, num_envs, vectorization_mode="vector_entry_point", **env_kwargs)
    if made.unwrapped.spec is not None:
        made.unwrapped.spec = made_plain(made.unwrapped.spec)
    return made


def vector_entry_point(spec: EnvSpec) -> Any:
    """What makes the vector env of a spec: what is registered, or ours in its place; None if nothing does."""
    entry_point: Any = spec.vector_entry_point
    return _FASTER.get(entry_point, entry_point) if isinstance(entry_point, str) else entry_point


def versioned(env_id: str) -> str:
    """An id as `gymnasium.make` takes it: without a version it is that of the latest one, with Gymnasium's warning.

    Raises:
        gymnasium.error.Error: if it is malformed.
    """
    namespace, name, version = parse_env_id(env_id)
    latest = find_highest_version(namespace, name) if version is None else None
    if latest is None:
        return env_id
    found = get_env_id(namespace, name, latest)
    logger.warn(f"Using the latest versioned environment `{found}` instead of the unversioned environment `{env_id}`.")
    return found


def _spec(env: str | EnvSpec) -> EnvSpec:
    """The spec of an id or "module:id", whose module is imported."""
    if isinstance(env, EnvSpec):
        return env
    module, _, env_id = env.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(versioned(env_id))
