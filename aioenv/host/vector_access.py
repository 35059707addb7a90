"""A `gymnasium.vector.VectorEnv` as one env of many slots: how it is made, reset, called. Wherever it lives."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.batching.layout import Layout
from aioenv.errors import ActionError
from aioenv.host.mujoco_gl import check_mujoco_gl
from aioenv.host.vector_results import reset_result

__all__ = [
    "TASKS",
    "call_vector_env",
    "has_one_generator",
    "is_native_task",
    "make_registered",
    "make_vector_env",
    "refuse_some",
    "reset_vector_env",
    "set_vector_attr",
    "steps_some",
    "take_observations",
    "versioned",
    "with_rows",
]

AnyVectorEnv = VectorEnv[Any, Any, Any]

# What is registered, and what gives the very same results faster.
_FASTER = {
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv": "aioenv.native.cartpole:CartPoleVectorEnv",
}

# What is registered for single envs, and what steps many of them as one, with the very same results.
TASKS = {
    f"gymnasium.envs.mujoco.{module}_v5:{name}Env": f"aioenv.native.tasks.{ours}:{name}"
    for module, name, ours in (
        ("ant", "Ant", "ant"),
        ("half_cheetah", "HalfCheetah", "runners"),
        ("hopper", "Hopper", "runners"),
        ("humanoid", "Humanoid", "humanoid"),
        ("humanoidstandup", "HumanoidStandup", "humanoid"),
        ("inverted_double_pendulum", "InvertedDoublePendulum", "pendulums"),
        ("inverted_pendulum", "InvertedPendulum", "pendulums"),
        ("pusher", "Pusher", "arms"),
        ("reacher", "Reacher", "arms"),
        ("swimmer", "Swimmer", "runners"),
        ("walker2d", "Walker2d", "runners"),
    )
}


def make_vector_env(factory: Callable[..., Any], num_envs: int) -> AnyVectorEnv:
    """Call `factory(num_envs=num_envs)`, and see that a vector env of so many slots comes of it.

    Raises:
        TypeError: if it is something else.
        ValueError: if it has another number of slots, or lacks a space.
    """
    env = factory(num_envs=num_envs)
    if not isinstance(env, VectorEnv):
        raise TypeError(
            f"expected a function that makes a gymnasium.vector.VectorEnv, got {type(env).__name__} from it; "
            'for single envs use backend="workers" (aioenv.AsyncVectorEnv)'
        )
    problem = None
    if env.num_envs != num_envs:
        problem = f"it was called with num_envs={num_envs} and made a vector env of {env.num_envs} slots"
    for name in ("single_observation_space", "observation_space", "single_action_space", "action_space"):
        if getattr(env, name, None) is None:
            problem = f"the vector env that it made has no {name}"
    if problem is not None:
        env.close()
        raise ValueError(f"{factory!r}: {problem}")
    return env


def make_registered(env: str | EnvSpec, env_kwargs: dict[str, Any], *, num_envs: int) -> AnyVectorEnv:
    """Make what is registered for an id, "module:id" or spec as a vector env, or ours with the same results."""
    env = copy.deepcopy(_spec(env))
    if is_native_task(env):
        check_mujoco_gl()
        env.vector_entry_point = TASKS[str(env.entry_point)]
        env_kwargs = {name: value for name, value in env_kwargs.items() if name != "disable_env_checker"}
        env_kwargs.setdefault("autoreset_mode", AutoresetMode.NEXT_STEP)
        if env_kwargs.get("max_episode_steps") is None:
            env_kwargs["max_episode_steps"] = env.max_episode_steps
    elif isinstance(env.vector_entry_point, str):
        env.vector_entry_point = _FASTER.get(env.vector_entry_point, env.vector_entry_point)
    return gymnasium.make_vec(env, num_envs, vectorization_mode="vector_entry_point", **env_kwargs)


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


def is_native_task(env: Any) -> bool:
    """Whether this makes a `NativeMujocoEnv`.

    Such are ids and specs of Gymnasium's own MuJoCo tasks, its class and no wrapper, and classes of that kind, with or
    without arguments (`functools.partial`).
    """
    while isinstance(env, partial):
        env = env.func
    if isinstance(env, type):
        home = sys.modules.get("aioenv.native.mujoco_env")  # not imported for that: it imports MuJoCo
        return home is not None and issubclass(env, home.NativeMujocoEnv)
    if not isinstance(env, EnvSpec):
        if not isinstance(env, str) or ":" in env:
            return False
        env = gymnasium.spec(env)
    return env.vector_entry_point is None and env.entry_point in TASKS and not env.additional_wrappers


class _Options(dict[str, Any]):
    """Reset options that notice whether anybody looked for the mask: an env that does not has reset every slot."""

    looked = False

    def _look(self, key: Any) -> None:
        self.looked = self.looked or key == "reset_mask"

    def __getitem__(self, key: str) -> Any:
        self._look(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._look(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._look(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._look(key)
        return super().pop(key, *default)

    # whoever takes all of it has the mask too
    def __iter__(self) -> Iterator[str]:
        self.looked = True
        return super().__iter__()

    def keys(self) -> Any:
        self.looked = True
        return super().keys()

    def items(self) -> Any:
        self.looked = True
        return super().items()

    def copy(self) -> dict[str, Any]:
        self.looked = True
        return super().copy()


def reset_vector_env(
    env: AnyVectorEnv, seed: Any, mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Reset a vector env, or those of its slots that a mask names.

    Raises:
        ValueError: if a mask is given and the env did not look at it: all of its slots have been reset.
        TypeError, ValueError: if what it gives is no result of a reset.
    """
    if mask is None:
        return reset_result(env.reset(seed=seed, options=options))  # type: ignore[no-any-return]
    masked = _Options({**(options or {}), "reset_mask": mask})
    result: tuple[Any, dict[str, Any]] = reset_result(env.reset(seed=seed, options=masked))
    if not masked.looked:
        raise ValueError(
            f"{type(env.unwrapped).__name__} can't reset some of its slots: it did not look at options['reset_mask'] "
            'and has reset all of them. Call reset() for all, or use backend="workers"'
        )
    return result


def steps_some(env: AnyVectorEnv) -> bool:
    """Whether a vector env can step some of its slots: whether it has `step_some`.

        def step_some(self, actions, slots): ...

    It takes actions of all slots, and int64 numbers of those that are stepped, ascending, maybe none. It gives what
    `step` does; for the other slots, which are as they were, their last observations (zeros, if they had none). What
    else it says of those is not looked at.
    """
    return callable(getattr(env, "step_some", None))


def has_one_generator(env: AnyVectorEnv) -> bool:
    """Whether slots draw from a generator that they share: whether it says so, by an attribute `one_generator`.

    Then what a slot draws depends on who was reset before it, and so on which slots are stepped together.
    """
    return bool(getattr(env.unwrapped, "one_generator", False))


def refuse_some(name: str, env: Any) -> ValueError:
    """The error of a vector env that can't step some of its slots."""
    kind = env if isinstance(env, str) else type(env).__name__
    return ValueError(
        f"{name}: {kind} steps all of its slots at once; give it step_some(actions, slots), or use "
        'backend="workers", which steps slots alone'
    )


def with_rows(
    layout: Layout, num_envs: int, rows: Sequence[int], arrays: Sequence[Any], objects: Sequence[Sequence[Any]]
) -> Any:
    """A batch of actions of all slots, given those of some; the others are zero, or one of these."""
    whole = layout.zeros(num_envs)
    for mine, theirs in zip(whole, arrays, strict=True):
        mine[rows] = theirs
    columns = []
    for column in objects:
        by_row = dict(zip(rows, column, strict=True))
        columns.append([by_row.get(row, column[0]) for row in range(num_envs)])
    return layout.assemble(whole, columns)


def take_observations(layout: Layout, obs: Any, num_envs: int) -> tuple[Any, Any]:
    """The arrays and objects of a batch of observations (see `Layout.take_apart`).

    Raises:
        ValueError: if it does not fit the space.
    """
    try:
        return layout.take_apart(obs, num_envs)
    except ActionError as exc:
        raise ValueError(str(exc).replace("actions", "observations", 1)) from None


def call_vector_env(env: AnyVectorEnv, rows: Sequence[int], name: str, args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Call a method, or read an attribute: one result for each of `rows`.

    A vector env that has a `call` of its own (as Gymnasium's SyncVectorEnv) is asked by that. Of any other it is the
    vector env's own method or attribute: an array, list or tuple of `num_envs` has one result a slot, anything else is
    every slot's.

    Raises:
        ValueError: if some slots alone can't be asked.
    """
    whole = len(rows) == env.num_envs
    per_slot = _find(env, "call", None)
    if not whole:
        single = getattr(env.unwrapped, "envs", None)
        if isinstance(single, (list, tuple)) and len(single) == env.num_envs:
            values = [single[row].get_wrapper_attr(name) for row in rows]
            return [value(*args, **kwargs) if callable(value) else value for value in values]
        if callable(per_slot) or callable(_find(env, name)):
            raise ValueError(
                f"call_at: {type(env.unwrapped).__name__} is one env of {env.num_envs} slots, of which none can be "
                f"called alone; call({name!r}) calls it for all"
            )
    if name == "render" and whole:  # the vector env's own, whatever draws in it
        value = env.render()
    elif callable(per_slot):
        value = per_slot(name, *args, **kwargs)
    else:
        value = _find(env, name)
        value = value(*args, **kwargs) if callable(value) else value
    each = _each(value, env.num_envs)
    return [each[row] for row in rows]


_ERROR = object()


def _find(env: AnyVectorEnv, name: str, default: Any = _ERROR) -> Any:
    """An attribute, of the outermost layer of wrappers that has it: vector wrappers don't pass on what they lack."""
    layer: Any = env
    while layer is not env.unwrapped and not hasattr(layer, name):
        layer = layer.env
    return getattr(layer, name) if default is _ERROR else getattr(layer, name, default)


def _each(value: Any, num_envs: int) -> Sequence[Any]:
    if isinstance(value, np.ndarray) and value.ndim and len(value) == num_envs:
        return list(value)
    if isinstance(value, (list, tuple)) and len(value) == num_envs:
        return value
    return [value] * num_envs


def set_vector_attr(env: AnyVectorEnv, name: str, values: Sequence[Any]) -> None:
    """Set an attribute, given one value a slot: by the env's own `set_attr` if it has one, else on the vector env.

    Raises:
        ValueError: if the env has one such attribute for all slots, and the values are not one.
    """
    per_slot = _find(env, "set_attr", None)
    if callable(per_slot):
        per_slot(name, list(values))
        return
    first = values[0]
    if not all(value is first or bool(np.array_equal(value, first)) for value in values):
        raise ValueError(
            f"set_attr: {type(env.unwrapped).__name__} has one {name!r} for all of its slots; "
            "pass one value, not a list"
        )
    layer: Any = env
    while layer is not env.unwrapped and name not in vars(layer):
        layer = layer.env
    setattr(layer, name, first)
