"""What a step of an env must give beside its observation: a number, two flags and a dict."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

__all__ = ["BOOLS", "NUMBERS", "briefly", "check_info", "flag_of", "number_of"]

# Of these types no more need be looked at.
NUMBERS = frozenset((float, int, bool, np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_))
BOOLS = frozenset((bool, np.bool_))

_SEVERAL = "; if there are several (objectives, say), have a wrapper make one of them, and tell the others in the info"


def number_of(reward: Any) -> Any:
    """A reward, if it is a number, or an object that stands for one, as a tensor without axes.

    Raises:
        TypeError, ValueError: if it is none, or several.
        Exception: what the object raises when it is asked for its number.
    """
    if isinstance(reward, (int, float, np.integer, np.floating, np.bool_)):
        return reward
    shape = _shape_of(reward)
    if isinstance(reward, np.ndarray) and not shape and reward.dtype.kind in "biuf":
        return reward.item()
    beside = (str, bytes, bytearray, complex, np.generic, np.ndarray)
    if prod(shape) == 1 and not isinstance(reward, beside) and hasattr(reward, "__float__"):
        try:
            return float(reward)
        except Exception as exc:
            exc.add_note(f"reward: expected a number, got {reward!r:.200}")
            raise
    hint = ""
    if shape:
        hint = _SEVERAL
        if prod(shape) == 1:
            hint = f", of shape {shape}; " + (
                "`reward.item()` is one" if hasattr(reward, "item") else "give its element"
            )
    raise (ValueError if shape else TypeError)(f"reward: expected a number, got {reward!r:.200}{hint}")


def flag_of(name: str, flag: Any) -> bool:
    """A flag: a bool, a 0 or 1, or an array of one such element.

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
        raise TypeError(f"{method}: expected info as a dict, got {briefly(info)}")


def _shape_of(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        try:
            return np.shape(value)
        except ValueError:  # of unequal lengths
            return (len(value),)
    return tuple(getattr(value, "shape", ()))


def briefly(value: Any) -> str:
    """What somebody returned, in a few words."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return "None" if value is None else f"a {type(value).__name__}"
