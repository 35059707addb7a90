"""Check the results of an env: its reward, flags and info dict, and, if asked for, NaN and infinite numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, prod
from typing import Any

import numpy as np
from gymnasium import Env

from aioenv.errors import NumericsError

__all__ = [
    "BOOLS",
    "NUMBERS",
    "check_info",
    "describe",
    "find_not_finite",
    "flag_of",
    "number_of",
    "raise_not_finite",
    "with_numerics_check",
]

# Types of rewards and flags that need no further check.
NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_))
BOOLS = frozenset((bool, np.bool_))

_SEVERAL_HINT = (
    "; if there are several (objectives, say), have a wrapper make one of them, and tell the others in the info"
)


def number_of(reward: Any) -> Any:
    """Return a reward as a number; it may be an object that stands for one number, such as a tensor of one element.

    Raises:
        TypeError, ValueError: if it is no number, or several.
        Exception: if the object's own conversion raises.
    """
    if isinstance(reward, (int, float, np.integer, np.floating, np.bool_)):
        return reward
    shape = _shape_of(reward)
    if isinstance(reward, np.ndarray) and not shape and reward.dtype.kind in "biuf":
        return reward.item()
    others = (str, bytes, bytearray, complex, np.generic, np.ndarray)
    if prod(shape) == 1 and not isinstance(reward, others) and hasattr(reward, "__float__"):
        try:
            return float(reward)
        except Exception as exc:
            exc.add_note(f"reward: expected a number, got {reward!r:.200}")
            raise
    hint = ""
    if shape:
        hint = _SEVERAL_HINT
        if prod(shape) == 1:
            hint = f", of shape {shape}; " + (
                "`reward.item()` is one" if hasattr(reward, "item") else "give its element"
            )
    raise (ValueError if shape else TypeError)(f"reward: expected a number, got {reward!r:.200}{hint}")


def flag_of(name: str, flag: Any) -> bool:
    """Return a flag as a bool; it may be a bool, a 0 or 1, or an array of one such element.

    Raises:
        TypeError: if it is anything else.
    """
    value = flag
    if not isinstance(flag, (list, tuple)) and prod(_shape_of(flag)) == 1 and hasattr(flag, "item"):
        value = flag.item()
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}: expected a bool, got {flag!r:.200}")


def check_info(method: str, info: Any) -> None:
    """Raise a TypeError unless an info is a dict, or like one."""
    if not hasattr(info, "items"):
        raise TypeError(f"{method}: expected info as a dict, got {describe(info)}")


def _shape_of(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        try:
            return np.shape(value)
        except ValueError:  # of unequal lengths
            return (len(value),)
    return tuple(getattr(value, "shape", ()))


def describe(value: Any) -> str:
    """Describe a return value in a few words."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"


def with_numerics_check(env: Env[Any, Any]) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """Return the `step` and `reset` of an env, wrapped to raise a NumericsError for a NaN or infinite number."""
    env_step, env_reset = env.step, env.reset
    steps = 0

    def step(action: Any) -> Any:
        nonlocal steps
        outcome = env_step(action)
        steps += 1
        if type(outcome) is tuple and len(outcome) == 5:
            try:
                good = isfinite(outcome[1])
            except (TypeError, ValueError, OverflowError):  # `number_of` reports it
                good = True
            if not good:
                raise_not_finite("reward", outcome[1], steps)
            if (found := find_not_finite(outcome[0])) is not None:
                raise_not_finite(*found, steps)
        return outcome

    def reset(**kwargs: Any) -> Any:
        nonlocal steps
        outcome = env_reset(**kwargs)
        steps = 0
        if type(outcome) is tuple and len(outcome) == 2 and (found := find_not_finite(outcome[0])) is not None:
            raise_not_finite(*found, steps)
        return outcome

    return step, reset


def raise_not_finite(where: str, number: Any, steps: int) -> None:
    """Raise a NumericsError that says which number is not finite, where it stands, and in which step since a reset."""
    when = f"step {steps} since its reset" if steps else "its reset"
    raise NumericsError(f"{where}: {float(number) if np.isreal(number) else number} in {when}", steps)


def find_not_finite(value: Any, where: str = "observation") -> tuple[str, Any] | None:
    """Find the first number that is NaN or infinite: return its place and the number, or None."""
    if type(value) is np.ndarray and value.dtype.kind == "f" and b"\0" not in np.isfinite(value).tobytes():
        return None  # for small arrays in half of the time of `all`
    if isinstance(value, dict):
        parts: Any = ((f"{where}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (tuple, list)) and not all(type(part) is float for part in value):
        parts = ((f"{where}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, (np.ndarray, np.generic, tuple, list, float)):
        array = np.asarray(value)
        if array.dtype.kind not in "fc" or np.isfinite(array).all():
            return None
        index = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
        return where + f"{list(index)}" * bool(index), array[index]
    else:
        return None
    return next((found for place, part in parts if (found := find_not_finite(part, place)) is not None), None)
