"""In the worker: questions about an env's stack of wrappers that Gymnasium has no method for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gymnasium import Env

__all__ = ["IS_WRAPPED", "SET_ATTR", "answering", "answering_from"]

# names under which an env answers `call`
IS_WRAPPED, SET_ATTR = "aioenv_is_wrapped", "aioenv_set_attr"


def answering(env: Env[Any, Any]) -> Env[Any, Any]:
    """Let an env answer these questions. That costs a step nothing, as a wrapper would."""
    setattr(env, IS_WRAPPED, partial(_is_wrapped, env))
    setattr(env, SET_ATTR, partial(setattr, env))
    return env


def answering_from(make: Callable[[], Env[Any, Any]]) -> Callable[[], Env[Any, Any]]:
    """A factory of envs that do."""
    return partial(_make, make)


def _make(make: Callable[[], Env[Any, Any]]) -> Env[Any, Any]:
    return answering(make())


def _is_wrapped(env: Env[Any, Any], wrapper: type) -> bool:
    layer: Any = env
    while layer is not None:
        if isinstance(layer, wrapper):
            return True
        layer = getattr(layer, "env", None)
    return False
