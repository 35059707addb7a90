"""Where envs live: what Stable-Baselines3 asks of an env and its wrappers, and `call` does not tell apart.

Each question comes twice: for a single env, and for some rows of a vector env, with a result for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

from gymnasium import Env
from gymnasium.vector import VectorEnv

from aioenv.ipc.messages import dump
from aioenv.worker.vector_access import call_vector_env, set_vector_attr

__all__ = ["ASSIGN", "CALL", "HAS", "IS_WRAPPED", "READ", "Absent", "Question", "Refused"]

_Rows = Sequence[int]


class Absent(AttributeError):
    """There is nothing of that name."""


class Refused(TypeError):
    """What was asked for is not what it was asked for as, or can't leave its process."""


class Question(NamedTuple):
    """What is called where the env lives.

    Attributes:
        single: with a single env and the arguments.
        rows: with a vector env, rows of it and the arguments; gives one result for each row.
    """

    single: Callable[..., Any]
    rows: Callable[..., list[Any]]


def _read(env: Env[Any, Any], name: str) -> Any:
    value = _checked(_find(env, name), name)
    try:
        dump(value)
    except Exception as exc:
        raise Refused(
            f"of type {type(value).__name__}, which does not pickle, and so stays in the env's process "
            f"({type(exc).__name__}: {exc})"
        ) from exc
    return value


def _read_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, name: str) -> list[Any]:
    return [_checked(value, name) for value in _find_rows(env, rows, name)]


def _checked(value: Any, name: str) -> Any:
    """What was read, unless with it the whole env would be sent: that pickles, and comes out as another env."""
    if isinstance(value, MethodType) and isinstance(value.__self__, (Env, VectorEnv)):
        raise Refused(f"a method of the env, and stays with it; env_method({name!r}) calls it")
    return value


def _find(env: Env[Any, Any], name: str) -> Any:
    try:
        return env.get_wrapper_attr(name)
    except AttributeError as exc:
        raise Absent(str(exc)) from exc


def _find_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, name: str) -> list[Any]:
    try:
        return call_vector_env(env, rows, "get_wrapper_attr", (name,), {})
    except AttributeError as exc:
        raise Absent(str(exc)) from exc


def _has(env: Env[Any, Any], name: str) -> bool:
    return env.has_wrapper_attr(name)


def _has_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, name: str) -> list[Any]:
    return call_vector_env(env, rows, "has_wrapper_attr", (name,), {})


def _call(env: Env[Any, Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _callable(_find(env, name))(*args, **kwargs)


def _call_rows(
    env: VectorEnv[Any, Any, Any], rows: _Rows, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    if not hasattr(env.unwrapped, "call"):  # which looks itself, env by env
        _callable(_find_rows(env, rows, name)[0])
    return call_vector_env(env, rows, name, args, kwargs)


def _callable(value: Any) -> Any:
    if not callable(value):
        raise Refused(f"no method, but of type {type(value).__name__}; get_attr reads it")
    return value


def _assign(env: Env[Any, Any], name: str, value: Any) -> None:
    setattr(env, name, value)


def _assign_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, name: str, value: Any) -> list[None]:
    set_vector_attr(env, name, [value] * env.num_envs)
    return [None] * len(rows)


def _is_wrapped(env: Env[Any, Any], module: str, name: str) -> bool:
    """Whether a layer is of a class, which goes by its name: no worker need import `Monitor`, and torch, to say no."""
    layer: Any = env
    while layer is not None:
        if any((kind.__module__, kind.__qualname__) == (module, name) for kind in type(layer).__mro__):
            return True
        layer = getattr(layer, "env", None)
    return False


def _is_wrapped_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, module: str, name: str) -> list[bool]:
    return [False] * len(rows)  # no slot is an env that could be


READ, HAS, CALL = Question(_read, _read_rows), Question(_has, _has_rows), Question(_call, _call_rows)
ASSIGN, IS_WRAPPED = Question(_assign, _assign_rows), Question(_is_wrapped, _is_wrapped_rows)
