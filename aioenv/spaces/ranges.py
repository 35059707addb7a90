"""Which numbers the int leaves of an action space have, and whether those of a batch are among them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from aioenv.errors import ActionError
from aioenv.speedups import within

__all__ = ["Range", "check_range", "is_quick", "range_of"]

_INT64 = np.dtype(np.int64)


class Range(NamedTuple):
    """The numbers of a leaf: `count` of them from `low` on. Ints, or arrays of the leaf's shape."""

    low: Any
    count: Any


def range_of(space: Space[Any]) -> Range | None:
    """The range of a leaf; None if it has none that is checked, as a Box, whose bounds are left to the envs."""
    if isinstance(space, spaces.Discrete):
        return Range(int(space.start), int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return Range(space.start, space.nvec.astype(np.uint64))
    return Range(0, 2) if isinstance(space, spaces.MultiBinary) else None


def is_quick(known: Range, dtype: np.dtype[Any]) -> bool:
    """Whether `speedups.within` can look at numbers of this dtype."""
    return within is not None and dtype == _INT64 and type(known.low) is int and known.low + known.count < 1 << 63


def check_range(array: np.ndarray[Any, Any], known: Range, path: str) -> None:
    """Raise an ActionError if a number of a batch is not in its range.

    Args:
        array: ints, C-contiguous, one row for each action.
        known: the range.
        path: where the leaf stands in the space, for the message.
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
    """How far numbers are above the lowest; what is below it comes out as a huge number."""
    if np.any(low):
        array = np.subtract(array, low, dtype=array.dtype)
    return array.view(f"u{array.dtype.itemsize}")
