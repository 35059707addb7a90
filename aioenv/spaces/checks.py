"""Check actions, and the results of an env: shape, dtype, range, and, if asked for, NaN and infinite numbers.

An error says what was expected, what was got, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Env, Space, spaces

from aioenv.errors import ActionError, NumericsError
from aioenv.speedups import within

__all__ = [
    "BOOLS",
    "NUMBERS",
    "Range",
    "as_array",
    "check_info",
    "check_range",
    "describe",
    "find_not_finite",
    "fit_actions",
    "flag_of",
    "has_fast_check",
    "number_of",
    "raise_not_finite",
    "range_of",
    "with_numerics_check",
]


def as_array(value: Any, name: str, expected: str = "an array") -> np.ndarray[Any, Any]:
    """Convert anything that `numpy.asarray` takes to an array.

    Args:
        value: the value.
        name: its name in errors.
        expected: the expected value, for errors.

    Raises:
        ActionError: if numpy can't convert it.
    """
    try:
        return np.asarray(value)
    except MemoryError:
        raise
    except Exception as exc:
        got = f"a {type(value).__name__} that makes none: {type(exc).__name__}: {exc}"
        if isinstance(exc, ValueError):
            got = f"what makes none: {exc}"
        raise ActionError(f"{name}: expected {expected}, got {_tensor_hint(value) or got}") from exc


def fit_actions(value: Any, n: int, path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the actions of n slots for a leaf of their space as a new C-contiguous array of the leaf's dtype.

    Args:
        value: the actions.
        n: how many there must be.
        path: the path of the leaf in the space.
        shape, dtype: of one action.

    Raises:
        ActionError: if shape or dtype don't fit.
    """
    expected = (n, *shape)
    array: np.ndarray[Any, Any]
    array = value if type(value) is np.ndarray else as_array(value, f"actions{path}", f"an array of shape {expected}")
    if array.shape != expected:
        hint = ""
        if not array.shape:
            hint = f": {value!r:.60}" if array.dtype == object else "; the first axis is the slots, one action each"
        elif array.shape == (1, *expected) or (n > 1 and array.shape == shape):
            hint = f"; the first axis is the slots, of which there are {n}"
        raise ActionError(f"actions{path}: expected shape {expected}, got {array.shape}{hint}")
    # always a copy: the caller may change the array while it is still being sent (a step may be cancelled)
    if array.dtype == dtype:
        return array.copy()  # twice as fast as `numpy.array`
    _check_castable(array, dtype, path)
    return np.array(array, dtype, order="C")


def _check_castable(array: np.ndarray[Any, Any], dtype: np.dtype[Any], path: str) -> None:
    """Raise an ActionError if a cast would change numbers; integers are judged by value (Python ints are int64)."""
    if array.dtype.kind in "iu" and dtype.kind in "iu" and not np.can_cast(array.dtype, dtype):
        info = np.iinfo(dtype)
        if array.size and (array.min() < info.min or array.max() > info.max):
            got = f"numbers from {array.min()} to {array.max()}"
            raise ActionError(f"actions{path}: expected {dtype}, {info.min} to {info.max}, got {got}")
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        hint = f": `.astype({dtype.name!r})` if that is meant" * (array.dtype.kind == "f" and dtype.kind in "iu")
        raise ActionError(f"actions{path}: expected dtype {dtype}, got {array.dtype}, which can't be cast{hint}")


def _tensor_hint(value: Any) -> str:
    """Say how a torch tensor, or a list of them, can be made into an array; empty for anything else."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    if type(value).__module__.partition(".")[0] != "torch" or not hasattr(value, "device"):
        return ""
    for applies, what, method in (
        (str(value.layout) != "torch.strided", "that is sparse", "to_dense()"),
        (getattr(value, "requires_grad", False), "that requires grad", "detach()"),
        (value.device.type != "cpu", f"on the device {value.device}", "cpu()"),
        (str(value.dtype) == "torch.bfloat16", "of bfloat16, which numpy does not have", "float()"),
        (value.is_conj(), "that is a conjugate view", "resolve_conj()"),
        (value.is_neg(), "that is a negative view", "resolve_neg()"),
    ):
        if applies:
            return f"a tensor {what}: `.{method}` makes one that can be taken"
    return ""


_INT64 = np.dtype(np.int64)


class Range(NamedTuple):
    """The numbers that a leaf allows: `count` of them from `low` on. Ints, or arrays of the leaf's shape."""

    low: Any
    count: Any


def range_of(space: Space[Any]) -> Range | None:
    """Return the range of a leaf; None if it is not checked, as a Box, whose bounds are left to the envs."""
    if isinstance(space, spaces.Discrete):
        return Range(int(space.start), int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return Range(space.start, space.nvec.astype(np.uint64))
    return Range(0, 2) if isinstance(space, spaces.MultiBinary) else None


def has_fast_check(known: Range, dtype: np.dtype[Any]) -> bool:
    """Return whether `speedups.within` can check a range of numbers of this dtype."""
    return within is not None and dtype == _INT64 and type(known.low) is int and known.low + known.count < 1 << 63


def check_range(array: np.ndarray[Any, Any], known: Range, path: str) -> None:
    """Raise an ActionError if a number of a batch is not in its range.

    Args:
        array: ints, C-contiguous, one row for each action.
        known: the range.
        path: the path of the leaf in the space, for the message.
    """
    low, count = known
    if (_above(array, low) < count).all():
        return
    row, *index = np.argwhere(~(_above(array, low) < count))[0].tolist()
    least, many = (int(np.broadcast_to(part, array.shape[1:])[tuple(index)]) for part in known)
    where = f"row {row}" + f", {index}" * bool(index)
    got = array[(row, *index)]
    raise ActionError(f"actions{path}: expected {array.dtype} from {least} to {least + many - 1}, got {got} in {where}")


def _above(array: np.ndarray[Any, Any], low: Any) -> np.ndarray[Any, Any]:
    """Return how far numbers are above the lowest; a number below it wraps around to a huge one."""
    if np.any(low):
        array = np.subtract(array, low, dtype=array.dtype)
    return array.view(f"u{array.dtype.itemsize}")


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
