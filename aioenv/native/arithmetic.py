"""Sums over rows, in the very order in which numpy sums one row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["norm", "square_sum"]

Array = npt.NDArray[Any]


def norm(rows: Array) -> Array:
    """What `np.linalg.norm` says of each row: the root of its BLAS dot product with itself."""
    dots: Array = np.matmul(rows[:, None, :], rows[:, :, None])[:, 0, 0]
    return np.sqrt(dots)


def square_sum(rows: Array) -> Array:
    """What `np.sum(np.square(row))` says of each row, in the dtype of the rows."""
    total: Array = np.add.reduce(np.square(rows), axis=1)
    return total
