"""Check actions: shape, dtype and range; an error says what was expected and got, and how to mend it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from aioenv.errors import ActionError
from aioenv.speedups import within

__all__ = ["Range", "as_array", "check_range", "fit_actions", "has_fast_check", "range_of"]


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
    array = value if type(value) is np.ndarray else as_array(value, f"actions{path}", f"an array of shape {expected}")
    if array.shape != expected:
        hint = ""
        if not array.shape:
            hint = f": {value!r:.60}" if array.dtype == object else "; the first axis is the slots, one action each"
        elif array.shape == (1, *expected) or (n > 1 and array.shape == shape):
            hint = f"; the first axis is the slots, of which there are {n}"
        raise ActionError(f"actions{path}: expected shape {expected}, got {array.shape}{hint}")
    if array.dtype != dtype:
        _check_castable(array, dtype, path)
    # always a copy: the caller may change the array while it is still being sent (a step may be cancelled)
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
