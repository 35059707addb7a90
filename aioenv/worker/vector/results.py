"""What the `step` and `reset` of a vector env must give, looked at before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

__all__ = ["check_numbers", "reset_result", "step_result"]

_STEP = ("obs", "reward", "terminated", "truncated", "info")
_RESET = ("obs", "info")


def step_result(result: Any) -> Any:
    """The same, if it is what `step` must give; with a mask for "final_obs", if it has none (Atari's).

    Raises:
        TypeError: if it is no tuple, or the info no dict.
        ValueError: if it has another length.
    """
    if type(result) is not tuple or len(result) != 5 or type(result[4]) is not dict:
        result = _checked("step", result, _STEP)
    info = result[4]
    if "final_obs" in info and "_final_obs" not in info:  # what it has for other slots is none
        return (*result[:4], {**info, "_final_obs": np.logical_or(result[2], result[3])})
    return result


def reset_result(result: Any) -> Any:
    """The same, if it is what `reset` must give.

    Raises:
        TypeError, ValueError: as `step_result`.
    """
    return _checked("reset", result, _RESET)


def check_numbers(name: str, values: Any) -> None:
    """Raise a TypeError if rewards or flags are not numbers, but something that numpy makes numbers of: None, say."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values)
    if array.dtype.kind in "biuf":
        return
    if array.dtype.kind != "O" or not all(isinstance(value, (Real, np.bool_)) for value in array.ravel().tolist()):
        what = "numbers" if name == "reward" else "bools"
        raise TypeError(f"{name}: expected {what}, got {values!r:.200}")


def _checked(method: str, result: Any, names: Sequence[str]) -> Any:
    expected = f"{method}: expected {len(names)} values ({', '.join(names)}) from the vector env"
    if not isinstance(result, (tuple, list)):
        raise TypeError(f"{expected}, got {type(result).__name__}")
    if len(result) != len(names):
        hint = "; what was `done` is `terminated` and `truncated`" if method == "step" and len(result) == 4 else ""
        raise ValueError(f"{expected}, got {len(result)}{hint}")
    info = result[-1]
    if not isinstance(info, Mapping):
        hint = (
            "; `VectorEnv._add_info(infos, info, slot)` merges those of single envs" if isinstance(info, list) else ""
        )
        raise TypeError(
            f"{method}: expected info from the vector env as a dict, with an element a slot in each array, got "
            f"{type(info).__name__}{hint}"
        )
    return result
