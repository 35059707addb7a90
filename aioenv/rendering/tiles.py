"""Several images as one picture."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["parse_grid", "side_by_side", "tile"]


def tile(images: npt.NDArray[Any], grid: tuple[int, int] | None = None) -> npt.NDArray[Any]:
    """Images as one picture, row by row.

    Args:
        images: of shape `(n, height, width, channels)`; where there are C of each, `(n, C, height, width, channels)`,
            these stand side by side.
        grid: how many rows and columns, `None` for as square a grid as it gets. Images that find no room are left out.

    Returns:
        An array of shape `(rows * height, columns * width, channels)`; cells without an image are zero.
    """
    if images.ndim == 5:
        images = side_by_side(images)
    n, height, width, channels = images.shape
    if grid is None:
        columns = math.ceil(math.sqrt(n))
        rows = math.ceil(n / columns)
    else:
        rows, columns = grid
    shown = min(n, rows * columns)
    cells = np.zeros((rows * columns, height, width, channels), images.dtype)
    cells[:shown] = images[:shown]
    cells = cells.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return np.ascontiguousarray(cells.reshape(rows * height, columns * width, channels))


def side_by_side(images: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Images of C cameras, of shape `(…, C, height, width, channels)`, as one picture of shape `(…, height, C * width,
    channels)`.
    """
    *others, cameras, height, width, channels = images.shape
    return images.swapaxes(-4, -3).reshape(*others, height, cameras * width, channels)


def parse_grid(text: str) -> tuple[int, int]:
    """Rows and columns from a text such as "4x4".

    Raises:
        ValueError: if it is none.
    """
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise ValueError(f"grid: expected ROWSxCOLUMNS, as 4x4, got {text!r}")
    return int(rows), int(columns)
