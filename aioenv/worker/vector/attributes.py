"""Methods and attributes of a `gymnasium.vector.VectorEnv`, slot by slot. Wherever it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from aioenv.worker.vector.making import AnyVectorEnv

__all__ = ["call_vector_env", "set_vector_attr"]


def call_vector_env(env: AnyVectorEnv, rows: Sequence[int], name: str, args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Call a method, or read an attribute: one result for each of `rows`.

    A vector env that has a `call` of its own (as Gymnasium's SyncVectorEnv) is asked by that. Of any other it is the
    vector env's own method or attribute: an array, list or tuple of `num_envs` has one result a slot, anything else is
    every slot's. It answers `get_wrapper_attr`, `has_wrapper_attr` and `set_wrapper_attr` as a single env does.

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
        reads = name in ("get_wrapper_attr", "has_wrapper_attr")
        if callable(per_slot) or (not reads and callable(_own(env, name))):
            raise ValueError(
                f"call_at: {type(env.unwrapped).__name__} is one env of {env.num_envs} slots, of which none can be "
                f"called alone; call({name!r}) calls it for all"
            )
    if name == "render" and whole:  # the vector env's own, whatever draws in it
        value = env.render()
    elif callable(per_slot):
        value = per_slot(name, *args, **kwargs)
    else:
        value = _own(env, name)
        value = value(*args, **kwargs) if callable(value) else value
    each = _each(value, env.num_envs)
    return [each[row] for row in rows]


_ERROR = object()


def _own(env: AnyVectorEnv, name: str) -> Any:
    """As `_find`; also what a single env has to be asked about its stack of wrappers, and vector envs lack."""
    try:
        return _find(env, name)
    except AttributeError:
        if name not in _ANSWERS:
            raise
    return partial(_ANSWERS[name], env)


def _has(env: AnyVectorEnv, name: str) -> bool:
    try:
        _own(env, name)
    except AttributeError:
        return False
    return True


def _set(env: AnyVectorEnv, name: str, value: Any, *, force: bool = True) -> bool:
    """Set an attribute that is there, or, with `force`, any; whether it was set."""
    if force or _has(env, name):
        set_vector_attr(env, name, [value] * env.num_envs)
        return True
    return False


def _find(env: AnyVectorEnv, name: str, default: Any = _ERROR) -> Any:
    """An attribute, of the outermost layer of wrappers that has it: vector wrappers don't pass on what they lack."""
    layer: Any = env
    while layer is not env.unwrapped and not hasattr(layer, name):
        layer = layer.env
    return getattr(layer, name) if default is _ERROR else getattr(layer, name, default)


_ANSWERS: dict[str, Callable[..., Any]] = {"get_wrapper_attr": _own, "has_wrapper_attr": _has, "set_wrapper_attr": _set}


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
