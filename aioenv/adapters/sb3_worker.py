"""The worker's side of the Stable-Baselines3 adapter: counted episodes, and queries of an env and its wrappers.

A query has two functions: one for a single env, and one for rows of a vector env, with a result for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from types import MethodType
from typing import Any, NamedTuple, SupportsFloat

from gymnasium import Env, Wrapper
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv

from aioenv.ipc.messages import dump
from aioenv.worker.vector_access import call_vector_env, set_vector_attr

__all__ = [
    "ASSIGN",
    "CALL",
    "HAS",
    "IS_WRAPPED",
    "READ",
    "AttributeMissing",
    "CountInnerEpisodes",
    "EnvQuery",
    "QueryRefused",
]

_Rows = Sequence[int]


class CountInnerEpisodes(Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Put an episode's return, length and seconds into the info of its last step, unless the env does so itself.

    It stands beneath the user's wrappers, as Stable-Baselines3's `Monitor` does: these may change rewards, and the ends
    of episodes.
    """

    # attribute names that no env has: `get_attr` reads the outermost attribute of a name
    def __init__(self, env: Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.counted_return = 0.0
        self.counted_length = 0
        self._counted_since = perf_counter()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env and the counts."""
        result = self.env.reset(seed=seed, options=options)
        self.counted_return = 0.0
        self.counted_length = 0
        self._counted_since = perf_counter()
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the env, and count."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.counted_return += float(reward)
        self.counted_length += 1
        if (terminated or truncated) and "episode" not in info:
            episode = {
                "r": self.counted_return,
                "l": self.counted_length,
                "t": round(perf_counter() - self._counted_since, 6),
            }
            info = {**info, "episode": episode}
        return obs, reward, terminated, truncated, info


class AttributeMissing(AttributeError):
    """An env has no attribute of the name."""


class QueryRefused(TypeError):
    """An attribute is not of the kind that the query is for, or can't leave its process."""


class EnvQuery(NamedTuple):
    """The functions of a query, which run where the env lives.

    Attributes:
        single: called with a single env and the arguments.
        rows: called with a vector env, rows of it and the arguments; returns one result for each row.
    """

    single: Callable[..., Any]
    rows: Callable[..., list[Any]]


def _read(env: Env[Any, Any], name: str) -> Any:
    value = _checked(_find(env, name), name)
    try:
        dump(value)
    except Exception as exc:
        raise QueryRefused(
            f"of type {type(value).__name__}, which does not pickle, and so stays in the env's process "
            f"({type(exc).__name__}: {exc})"
        ) from exc
    return value


def _read_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, name: str) -> list[Any]:
    return [_checked(value, name) for value in _find_rows(env, rows, name)]


def _checked(value: Any, name: str) -> Any:
    """Return a value, unless it is a method of the env: that pickles with the env, and arrives as another env."""
    if isinstance(value, MethodType) and isinstance(value.__self__, (Env, VectorEnv)):
        raise QueryRefused(f"a method of the env, and stays with it; env_method({name!r}) calls it")
    return value


def _find(env: Env[Any, Any], name: str) -> Any:
    try:
        return env.get_wrapper_attr(name)
    except AttributeError as exc:
        raise AttributeMissing(str(exc)) from exc


def _find_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, name: str) -> list[Any]:
    try:
        return call_vector_env(env, rows, "get_wrapper_attr", (name,), {})
    except AttributeError as exc:
        raise AttributeMissing(str(exc)) from exc


def _has(env: Env[Any, Any], name: str) -> bool:
    return env.has_wrapper_attr(name)


def _has_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, name: str) -> list[Any]:
    return call_vector_env(env, rows, "has_wrapper_attr", (name,), {})


def _call(env: Env[Any, Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _callable(_find(env, name))(*args, **kwargs)


def _call_rows(
    env: VectorEnv[Any, Any, Any], rows: _Rows, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    if not hasattr(env.unwrapped, "call"):  # (`call` looks the name up itself, env by env)
        _callable(_find_rows(env, rows, name)[0])
    return call_vector_env(env, rows, name, args, kwargs)


def _callable(value: Any) -> Any:
    if not callable(value):
        raise QueryRefused(f"no method, but of type {type(value).__name__}; get_attr reads it")
    return value


def _assign(env: Env[Any, Any], name: str, value: Any) -> None:
    setattr(env, name, value)


def _assign_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, name: str, value: Any) -> list[None]:
    set_vector_attr(env, name, [value] * env.num_envs)
    return [None] * len(rows)


def _is_wrapped(env: Env[Any, Any], module: str, name: str) -> bool:
    """Return whether a wrapper is of a class, given by name, so that a worker need not import it (`Monitor`, torch).

    The innermost env is no wrapper, even if it holds another env: what stands around that one is its own affair.
    """
    layer = env
    while isinstance(layer, Wrapper):
        if any((kind.__module__, kind.__qualname__) == (module, name) for kind in type(layer).__mro__):
            return True
        layer = layer.env
    return False


def _is_wrapped_rows(env: VectorEnv[Any, Any, Any], rows: _Rows, module: str, name: str) -> list[bool]:
    return [False] * len(rows)  # a slot of a vector env is no env that could have a wrapper


READ, HAS, CALL = EnvQuery(_read, _read_rows), EnvQuery(_has, _has_rows), EnvQuery(_call, _call_rows)
ASSIGN, IS_WRAPPED = EnvQuery(_assign, _assign_rows), EnvQuery(_is_wrapped, _is_wrapped_rows)
