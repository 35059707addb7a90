"""Make envs in a worker or in the parent: single or vector envs of ids, specs and factories, and native tasks.

The fork server imports this module for its workers: keep its imports few, since each costs every worker memory.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import gymnasium
from gymnasium import Env, logger
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.requirements import require_batch
from aioenv.worker.mujoco_gl import check_mujoco_gl

__all__ = [
    "NAMESPACE",
    "OUR_ENTRY_POINTS",
    "TASKS",
    "AnyVectorEnv",
    "VectorSpec",
    "explain_no_env",
    "is_native_task",
    "is_our_entry_point",
    "make_env",
    "make_registered",
    "make_vector_env",
    "make_with_hints",
    "refuse_wrappers",
    "split_spec",
    "vector_entry_point",
    "versioned",
    "with_json_values",
    "with_num_envs",
]


def make_env(env: Any, wrappers: Sequence[Any], kwargs: Mapping[str, Any], hints: Mapping[str, str]) -> Env[Any, Any]:
    """Make an env, and wrap it.

    Args:
        env: an id, an EnvSpec, or a function that makes it.
        wrappers: functions that wrap an env; the first is the innermost.
        kwargs: the arguments of the env.
        hints: arguments that may be meant for something else, a misspelled argument of `make_vec` say, and the note to
            add if the env refuses them.

    Raises:
        TypeError: if the env does not take these arguments; a note suggests others.
    """
    try:
        made: Env[Any, Any] = gymnasium.make(env, **kwargs) if isinstance(env, (str, EnvSpec)) else env(**kwargs)
    except TypeError as exc:
        _add_hint(exc, hints)
        raise
    for wrapper in wrappers if not explain_no_env(made) else ():  # `check_env` refuses it later
        made = wrapper(made)
    return made


def explain_no_env(made: Any, kind: str = "gymnasium.Env") -> str:
    """Explain a factory's result that is clearly no env, and how to mend it; empty if it may be an env.

    Args:
        made: the object that the factory returned.
        kind: the expected class.
    """
    expected = f"expected a {kind}"
    if made is None:
        return f"None, {expected}; does it lack a `return`?"
    if isinstance(made, type):
        return f"the class {made.__name__}, {expected}: `{made.__name__}(...)` makes one"
    if isinstance(made, str):
        return f"{made!r}, {expected}: `gymnasium.make({made!r})` makes one of an id"
    if isinstance(made, VectorEnv) and kind == "gymnasium.Env":
        return f"a vector env, {made!r}, expected a single {kind}; for vector envs there is aioenv.NativeVectorEnv"
    if isinstance(made, (FunctionType, partial)):
        return f"a function, {expected}: call it in the factory"
    if not isinstance(made, (tuple, list)):
        return ""
    what, several = f"a {type(made).__name__} of {len(made)}", f"the {kind} alone"
    if any(hasattr(part, "reset") and hasattr(part, "step") for part in made):
        hint = "`return env`" if isinstance(made, tuple) else "pass one factory for each env"
        return f"a {type(made).__name__} with an env in it, expected {several}: {hint}"
    if len(made) == 2 and isinstance(made[1], dict):
        what = "(observation, info), as `reset` does"
    elif len(made) == 5:
        what += ", as `step` does"
    return f"{what}, expected {several}: `return env`"


def make_with_hints(factory: Callable[..., Any], hints: Mapping[str, str], *, num_envs: int) -> Any:
    """Make a vector env; for `hints` see `make_env`."""
    try:
        return factory(num_envs=num_envs)
    except TypeError as exc:
        _add_hint(exc, hints)
        raise


def _add_hint(exc: TypeError, hints: Mapping[str, str]) -> None:
    for name, hint in hints.items():
        if f"'{name}'" in str(exc):
            exc.add_note(f"{name}: {hint}")


# ------------------------------------------------------------ native tasks


# Entry points of single envs, and those of vector envs that step many of them as one batch, with the same results.
TASKS = {
    f"gymnasium.envs.mujoco.{module}_v5:{name}Env": f"aioenv.native.tasks.{ours}:{name}"
    for module, name, ours in (
        ("ant", "Ant", "locomotion_3d"),
        ("half_cheetah", "HalfCheetah", "locomotion_2d"),
        ("hopper", "Hopper", "locomotion_2d"),
        ("humanoid", "Humanoid", "locomotion_3d"),
        ("humanoidstandup", "HumanoidStandup", "locomotion_3d"),
        ("inverted_double_pendulum", "InvertedDoublePendulum", "arms_and_pendulums"),
        ("inverted_pendulum", "InvertedPendulum", "arms_and_pendulums"),
        ("pusher", "Pusher", "arms_and_pendulums"),
        ("reacher", "Reacher", "arms_and_pendulums"),
        ("swimmer", "Swimmer", "locomotion_2d"),
        ("walker2d", "Walker2d", "locomotion_2d"),
    )
}


# In Gymnasium's registry: the namespace of the ids that `aioenv.adapters.gymnasium` registers, and what the
# `vector_entry_point` of these, and of others that it sets, begins with.
NAMESPACE = "aioenv"
OUR_ENTRY_POINTS = "aioenv.adapters.gymnasium:"


def is_our_entry_point(spec: EnvSpec) -> bool:
    """Return whether a spec's vector env is what aioenv itself makes of its single envs."""
    point = spec.vector_entry_point
    return isinstance(point, str) and point.startswith(OUR_ENTRY_POINTS)


def is_native_task(env: Any) -> bool:
    """Return whether an id, spec or class makes a `NativeMujocoEnv`.

    These are ids and specs of Gymnasium's own MuJoCo tasks without further wrappers, and subclasses of
    `NativeMujocoEnv`, with or without arguments (`functools.partial`).
    """
    while isinstance(env, partial):
        env = env.func
    if isinstance(env, type):
        home = sys.modules.get("aioenv.native.mujoco_env")  # don't import it here: it imports MuJoCo
        return home is not None and issubclass(env, home.NativeMujocoEnv)
    if not isinstance(env, EnvSpec):
        if not isinstance(env, str) or ":" in env:
            return False
        env = gymnasium.spec(env)
    return vector_entry_point(env) is None and env.entry_point in TASKS and not env.additional_wrappers


# ------------------------------------------------------------ vector envs


AnyVectorEnv = VectorEnv[Any, Any, Any]

# Entry points of vector envs, and faster ones with the same results.
_FASTER = {
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv": "aioenv.native.cartpole:CartPoleVectorEnv",
}


def make_vector_env(factory: Callable[..., Any], num_envs: int) -> AnyVectorEnv:
    """Call `factory(num_envs=num_envs)`, and check that it returns a vector env of so many slots.

    Raises:
        TypeError: if it returns something else.
        ValueError: if it has another number of slots, or lacks a space.
    """
    try:
        env = factory(num_envs=num_envs)
    except TypeError as exc:
        if "'num_envs'" in str(exc):
            exc.add_note(
                f"it is called with num_envs={num_envs}, to make one gymnasium.vector.VectorEnv of so many slots; "
                'a function that makes single envs goes with backend="workers" (aioenv.AsyncVectorEnv)'
            )
        raise
    if problem := explain_no_env(env, "gymnasium.vector.VectorEnv"):
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
    """Make the vector env that is registered for an id, "module:id" or spec, or ours with the same results."""
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
        made.unwrapped.spec = with_json_values(made.unwrapped.spec)
    return made


def vector_entry_point(spec: EnvSpec) -> Any:
    """Return the entry point of a spec's vector env: the registered one, or a faster one; None if there is none."""
    if is_our_entry_point(spec):
        return None
    entry_point: Any = spec.vector_entry_point
    return _FASTER.get(entry_point, entry_point) if isinstance(entry_point, str) else entry_point


def versioned(env_id: str) -> str:
    """Add the latest version to an id without one, and warn as `gymnasium.make` does. Leave out aioenv's namespace.

    Raises:
        gymnasium.error.Error: if it is malformed.
    """
    env_id = env_id.removeprefix(f"{NAMESPACE}/")
    namespace, name, version = parse_env_id(env_id)
    latest = find_highest_version(namespace, name) if version is None else None
    if latest is None:
        return env_id
    found = get_env_id(namespace, name, latest)
    logger.warn(f"Using the latest versioned environment `{found}` instead of the unversioned environment `{env_id}`.")
    return found


def _spec(env: str | EnvSpec) -> EnvSpec:
    """Return the spec of an id or "module:id", whose module is imported."""
    if isinstance(env, EnvSpec):
        return env
    module, _, env_id = env.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(versioned(env_id))


# ------------------------------------------------------------ specs of vector envs


# Arguments of Gymnasium's vector envs that aioenv has too, and those that have no meaning with aioenv's workers.
_SETTINGS = ("copy", "observation_mode", "autoreset_mode")
_IGNORED = ("shared_memory", "context", "daemon", "max_concurrency")


class VectorSpec(NamedTuple):
    """The parts of a vector env's spec.

    Attributes:
        spec: the spec of one env.
        num_envs: the number of envs; None if the spec is of a single env.
        wrappers: the wrappers of each env.
        settings: those of the arguments `copy`, `observation_mode` and `autoreset_mode` that the vector env had.
    """

    spec: EnvSpec
    num_envs: int | None = None
    wrappers: tuple[Callable[[Env[Any, Any]], Env[Any, Any]], ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012 (never written to)


def split_spec(spec: EnvSpec) -> VectorSpec:
    """Separate the vector env's arguments, which `gymnasium.make_vec` records among the env's own, from a spec.

    Raises:
        ValueError: if the vector env had an argument that has no meaning here.
    """
    if "vectorization_mode" not in spec.kwargs:
        return VectorSpec(spec)
    kwargs = {name: value for name, value in spec.kwargs.items() if name != "vectorization_mode"}
    num_envs = kwargs.pop("num_envs", 1)
    wrappers = tuple(kwargs.pop("wrappers", ()))
    given = dict(kwargs.pop("vector_kwargs", {}))
    if others := sorted(given.keys() - {*_SETTINGS, *_IGNORED}):
        raise ValueError(
            f"env: the spec of {spec.id} is of a vector env that was made with {', '.join(others)}, which is "
            "Gymnasium's alone. Take it out of spec.kwargs['vector_kwargs']"
        )
    settings = {name: given[name] for name in _SETTINGS if name in given}
    if "autoreset_mode" in kwargs:
        settings["autoreset_mode"] = kwargs.pop("autoreset_mode")
    steps = kwargs.pop("max_episode_steps", None)
    ours = spec.vector_entry_point in TASKS.values() or is_our_entry_point(spec)  # `make_registered` finds it again
    single = dataclasses.replace(
        spec,
        kwargs=kwargs,
        max_episode_steps=spec.max_episode_steps if steps is None else steps,
        vector_entry_point=None if ours else spec.vector_entry_point,
    )
    return VectorSpec(single, num_envs, wrappers, settings)


def with_json_values(spec: EnvSpec) -> EnvSpec:
    """Return a spec that can be written as JSON: autoreset modes as strings."""
    values = {key: value.value if isinstance(value, AutoresetMode) else value for key, value in spec.kwargs.items()}
    return dataclasses.replace(spec, kwargs=values)


def with_num_envs(spec: EnvSpec | None, num_envs: int) -> EnvSpec | None:
    """Return the spec of a vector env that is split over workers, given that of one worker's part."""
    if spec is None or "vectorization_mode" not in spec.kwargs:
        return spec
    return dataclasses.replace(spec, kwargs={**spec.kwargs, "num_envs": num_envs})


def refuse_wrappers(spec: EnvSpec, others: Sequence[Any] = ()) -> None:
    """Refuse a spec with wrappers of single envs, where one vector env must be made.

    Args:
        spec: the spec.
        others: further wrappers that a vector env's spec names.

    Raises:
        ValueError: if there are any; the message names them, and says what to do.
    """
    names = [wrapper.name for wrapper in spec.additional_wrappers]
    names += [getattr(wrapper, "__name__", repr(wrapper)) for wrapper in others]
    if names:
        raise ValueError(
            f'backend="native": the spec of {spec.id} has wrappers of single envs ({", ".join(names)}), which can\'t '
            'be put around one vector env. Use backend="workers", or take them out of the spec (additional_wrappers, '
            "kwargs['wrappers']) and wrap the vector env in their namesakes of gymnasium.wrappers.vector"
        )
