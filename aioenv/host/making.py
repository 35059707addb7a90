"""What the factories of `make_vec` do in a worker.

Next to nothing is imported here: a fork server imports this module for its workers, and what it has imported besides
costs each of them memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec

__all__ = ["make_env", "make_noted"]


def make_env(env: Any, wrappers: Sequence[Any], kwargs: Mapping[str, Any], near: Mapping[str, str]) -> Env[Any, Any]:
    """Make an env, and wrap it.

    Args:
        env: an id, an EnvSpec, or a function that makes it.
        wrappers: functions that wrap an env; the first is the innermost.
        kwargs: of the env.
        near: those of them that look meant for somebody else, a misspelled argument of `make_vec` say, and what to say.

    Raises:
        TypeError: if the env does not take these arguments; a note says what may have been meant.
    """
    try:
        made: Env[Any, Any] = gymnasium.make(env, **kwargs) if isinstance(env, (str, EnvSpec)) else env(**kwargs)
    except TypeError as exc:
        _note(exc, near)
        raise
    for wrapper in wrappers:
        made = wrapper(made)
    return made


def make_noted(factory: Callable[..., Any], near: Mapping[str, str], *, num_envs: int) -> Any:
    """Make a vector env; `near` and its note as of `make_env`."""
    try:
        return factory(num_envs=num_envs)
    except TypeError as exc:
        _note(exc, near)
        raise


def _note(exc: TypeError, near: Mapping[str, str]) -> None:
    for name, hint in near.items():
        if f"'{name}'" in str(exc):
            exc.add_note(f"{name}: {hint}")
