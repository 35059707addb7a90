"""What the factories of `make_vec` do in a worker.

Next to nothing is imported here: a fork server imports this module for its workers, and what it has imported besides
costs each of them memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import gymnasium
from gymnasium import Env
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

__all__ = ["make_env", "make_noted", "what_is_no_env"]


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
    for wrapper in wrappers if not what_is_no_env(made) else ():  # else it is said what it is
        made = wrapper(made)
    return made


def what_is_no_env(made: Any, kind: str = "gymnasium.Env") -> str:
    """What a factory has returned that is plainly no env, and what to do; empty if it may be one.

    Args:
        made: what it has returned.
        kind: what was expected.
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
