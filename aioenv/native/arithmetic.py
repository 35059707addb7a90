"""Sums over rows, in the very order in which numpy sums one row alone; and several live arrays as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy import vecdot  # numpy 2: before it, float32 costs came out as float64

__all__ = ["clamp", "less", "norm", "side_by_side", "square_sum"]

Array = npt.NDArray[Any]


def norm(rows: Array) -> Array:
    """What `np.linalg.norm` says of each row: the root of its BLAS dot product with itself."""
    lengths: Array = np.sqrt(vecdot(rows, rows))
    return lengths


def square_sum(rows: Array) -> Array:
    """What `np.sum(np.square(row))` says of each row, in the dtype of the rows."""
    total: Array = np.add.reduce(np.square(rows), axis=1)
    return total


def clamp(values: Array, limit: float) -> None:
    """What `np.clip` makes of numbers between -limit and limit, in place and without its detour through Python."""
    np.minimum(np.maximum(values, -limit, out=values), limit, out=values)


def less(weight: float) -> float:
    """The weight with the other sign: `values * less(weight)` is `-(weight * values)`, zeros too, in one operation."""
    if isinstance(weight, (np.unsignedinteger, np.bool_)):
        weight = weight * np.float32(1)  # of the dtype that products with float32 have; these know no sign
    return -weight or weight * -0.0


def side_by_side(left: Array, right: Array) -> Array:
    """One live view of two arrays `(n, ...)` whose rows lie one behind the other, as positions and velocities do."""
    at, then = (array.__array_interface__["data"][0] for array in (left, right))
    if at + left.shape[1] * left.itemsize != then or left.strides[0] != right.strides[0]:
        raise ValueError(f"expected rows one behind the other, got {left.shape} at {at} and {right.shape} at {then}")
    shape = (len(left), left.shape[1] + right.shape[1])
    return np.lib.stride_tricks.as_strided(left, shape, left.strides)
