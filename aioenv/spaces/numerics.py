"""NaN and infinite numbers in rewards and observations: found where an env gives them, by step and place."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np
from gymnasium import Env

from aioenv.errors import NumericsError

__all__ = ["checked", "first_bad", "refuse"]


def checked(env: Env[Any, Any]) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """The step and the reset of an env, which raise a NumericsError if a number is NaN or infinite."""
    take_step, take_reset = env.step, env.reset
    steps = 0

    def step(action: Any) -> Any:
        nonlocal steps
        outcome = take_step(action)
        steps += 1
        if type(outcome) is tuple and len(outcome) == 5:
            try:
                good = isfinite(outcome[1])
            except (TypeError, ValueError, OverflowError):  # that it is no number is said elsewhere
                good = True
            if not good:
                refuse("reward", outcome[1], steps)
            if (found := first_bad(outcome[0])) is not None:
                refuse(*found, steps)
        return outcome

    def reset(**kwargs: Any) -> Any:
        nonlocal steps
        outcome = take_reset(**kwargs)
        steps = 0
        if type(outcome) is tuple and len(outcome) == 2 and (found := first_bad(outcome[0])) is not None:
            refuse(*found, steps)
        return outcome

    return step, reset


def refuse(where: str, number: Any, steps: int) -> None:
    """Raise a NumericsError: in which step since its reset an env has given a bad number, where."""
    when = f"step {steps} since its reset" if steps else "its reset"
    raise NumericsError(f"{where}: {float(number) if np.isreal(number) else number} in {when}", steps)


def first_bad(value: Any, where: str = "observation") -> tuple[str, Any] | None:
    """Where the first number stands that is NaN or infinite, and the number; None if there is none."""
    if type(value) is np.ndarray and value.dtype.kind == "f" and b"\0" not in np.isfinite(value).tobytes():
        return None  # in half of the time of `all`, if it is small
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
    return next((found for place, part in parts if (found := first_bad(part, place)) is not None), None)
