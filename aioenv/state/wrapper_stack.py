"""Inspect a stack of wrappers: its memory between steps, the known wrappers, and those that prevent a state."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env, Wrapper

__all__ = ["KINDS", "REMEDY", "Stack", "inspect_stack", "mark_in_progress", "python_values"]

# Known wrappers by full name, with the attributes that they count in; a subclass is another wrapper.
_COMMON = "gymnasium.wrappers.common."
_KNOWN: dict[str, tuple[str, ...]] = {
    _COMMON + "TimeLimit": ("_elapsed_steps",),
    _COMMON + "OrderEnforcing": ("_has_reset",),
    _COMMON + "PassiveEnvChecker": (),  # see `mark_in_progress`
    _COMMON + "Autoreset": ("autoreset",),
    # not its queues of past episodes, on which no result depends, nor the time of day
    _COMMON + "RecordEpisodeStatistics": ("episode_count", "episode_returns", "episode_lengths"),
    "gymnasium.wrappers.stateful_observation.TimeAwareObservation": ("timesteps",),
    "gymnasium.wrappers.stateful_action.RepeatAction": (),
    **{f"gymnasium.wrappers.transform_action.{name}Action": () for name in ("Clip", "Rescale", "Discretize")},
    **{
        f"gymnasium.wrappers.transform_observation.{name}Observation": ()
        for name in "Filter Flatten Grayscale Resize Reshape Rescale Dtype Discretize".split()
    },
    "gymnasium.wrappers.transform_reward.ClipReward": (),
    "aioenv.rendering.pixels.PixelObservation": (),
    "aioenv.adapters.sb3_worker.CountInnerEpisodes": ("counted_return", "counted_length"),  # nor its time of day
}
# wrappers that are stateless if their function is
_BY_FUNCTION = {
    "gymnasium.wrappers.transform_action.TransformAction",
    "gymnasium.wrappers.transform_observation.TransformObservation",
    "gymnasium.wrappers.transform_reward.TransformReward",
}
# The types of counters and simple attributes. The exact type matters: `0.0 + np.float32(1)` is a float32, and so is the
# info that it ends in.
KINDS: tuple[type, ...] = (type(None), bool, int, float, np.float64, np.float32, np.int64, np.int32, np.bool_)

REMEDY = "give it get_state() and set_state(state)"


class Stack(NamedTuple):
    """One env and its wrappers.

    Attributes:
        base: the unwrapped env.
        counters: wrappers and their attributes that count, from the outside in.
        own: the wrappers, and maybe the base, that have `get_state` and `set_state`.
        physics: whether the base's state is that of its MuJoCo `model` and `data`.
        obstacle: why the state of the whole can't be read; None if it can.
    """

    base: Any
    counters: list[tuple[Any, str]]
    own: list[Any]
    physics: bool
    obstacle: str | None


def inspect_stack(env: Env[Any, Any]) -> Stack:
    """Find everything in an env and its wrappers that the next step depends on."""
    counters: list[tuple[Any, str]] = []
    own: list[Any] = []
    obstacle: str | None = None
    while isinstance(env, Wrapper):
        name = _name(type(env))
        if _has_own_state(type(env)):
            own.append(env)
        elif name in _KNOWN:
            counters += [(env, attribute) for attribute in _KNOWN[name]]
        elif name in _BY_FUNCTION and _is_plain(env.func):  # type: ignore[attr-defined]
            pass
        elif name in _BY_FUNCTION:
            obstacle = obstacle or f"the wrapper {type(env).__name__}: its function may remember something; {REMEDY}"
        else:
            obstacle = obstacle or f"the wrapper {type(env).__name__} may remember something; {REMEDY}"
        env = env.env
    physics = not _has_own_state(type(env)) and _has_physics(env)
    if _has_own_state(type(env)):
        own.append(env)
    elif not physics:
        obstacle = obstacle or f"the env {type(env).__name__} is no MuJoCo env; {REMEDY}"
    return Stack(env, counters, own, physics, obstacle)


def mark_in_progress(env: Env[Any, Any]) -> None:
    """Put wrappers that have no counter into the state of an env whose episode is in progress."""
    for wrapper in _wrappers(env):
        name = _name(type(wrapper))
        if name == _COMMON + "PassiveEnvChecker":
            # its checks only warn, and the data to compare with is gone
            wrapper.checked_reset = wrapper.checked_step = wrapper.checked_data_reuse = True
            wrapper._previous_data = None
        elif name == _COMMON + "RecordEpisodeStatistics":
            wrapper.episode_start_time = sys.modules[type(wrapper).__module__].time.perf_counter()


def python_values(base: Any) -> dict[str, Any]:
    """Return the attributes of an env that are numbers, strings or arrays, without the seed."""
    return {
        name: value
        for name, value in vars(base).items()
        if name != "_np_random_seed"
        and (
            type(value) in KINDS or type(value) is str or (type(value) is np.ndarray and value.dtype.kind in "biufcSU")
        )
    }


def _wrappers(env: Any) -> Iterator[Any]:
    while isinstance(env, Wrapper):
        yield env
        env = env.env


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _has_physics(base: Any) -> bool:
    mujoco = sys.modules.get("mujoco")
    if hasattr(type(base), "__getattr__") and "model" not in vars(base):
        return False  # the model may belong to another env, whose state is more than model and data
    return (
        mujoco is not None
        and isinstance(getattr(base, "model", None), mujoco.MjModel)
        and isinstance(getattr(base, "data", None), mujoco.MjData)
    )


def _has_own_state(kind: type) -> bool:
    """Return whether a class has `get_state()` and `set_state(state)`, unlike Gymnasium's `set_state(qpos, qvel)`."""
    get, put = getattr(kind, "get_state", None), getattr(kind, "set_state", None)
    if not callable(get) or not callable(put):
        return False
    try:
        inspect.signature(get).bind(None)
        inspect.signature(put).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _is_plain(function: Any) -> bool:
    """Return whether a function has no closure; it could still use globals, as any env could."""
    if isinstance(function, np.ufunc | types.BuiltinFunctionType | type):
        return True
    return isinstance(function, types.FunctionType) and function.__closure__ is None
