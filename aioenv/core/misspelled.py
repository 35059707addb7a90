"""Keyword arguments that go to envs, though they look like misspelled ones of our own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from aioenv.errors import ArgumentError
from aioenv.worker.making import TASKS, vector_entry_point

__all__ = ["refuse_misspelled"]

# How much a name resembles another. Of one that names no such argument, but takes any, it must be more.
_ALIKE, _VERY_MUCH_ALIKE = 0.75, 0.9


def refuse_misspelled(
    caller: str, ours: Iterable[str], given: Mapping[str, Any], env: Any, *, native: bool = False
) -> None:
    """Raise if an argument for an env, which names none such, looks like one of ours.

    What can't be told of the env here, that of an id whose module is not imported say, is left to its making.

    Args:
        caller: whose arguments ours are, for the message.
        ours: the names of these.
        given: the arguments that the env is to get.
        env: an id, an EnvSpec, or what makes an env.
        native: whether it makes a vector env.

    Raises:
        ArgumentError: if so; the message says which argument was meant.
    """
    names = list(ours)
    near = {name: get_close_matches(name, names, 1, _ALIKE) for name in given if name not in names}
    if not any(near.values()):
        return
    parameters = _parameters(env, native)
    if parameters is None:
        return
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, meant in near.items():
        if meant and name not in parameters and (not is_open or get_close_matches(name, meant, 1, _VERY_MUCH_ALIKE)):
            raise ArgumentError(
                f"{name}: {caller} has no such argument, and the env names none: did you mean {meant[0]}? (If the env "
                f"does take it: `functools.partial(make_env, {name}=…)` in its place)"
            )


def _parameters(env: Any, native: bool) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of what makes an env, and of `gymnasium.make`, by name; None if they can't be told."""
    try:
        if isinstance(env, str):
            if ":" in env:
                return None
            env = gymnasium.spec(env)
        known: dict[str, inspect.Parameter] = {}
        if isinstance(env, EnvSpec):
            known = {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in env.kwargs}
            makes = inspect.signature(gymnasium.make).parameters.values()
            known |= {each.name: each for each in makes if each.kind is not each.VAR_KEYWORD}
            entry_point: Any = env.entry_point
            if native:
                entry_point = vector_entry_point(env) or TASKS.get(str(entry_point))
            env = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        return {**inspect.signature(env).parameters, **known}
    except Exception:  # who makes it will say what is wrong
        return None
