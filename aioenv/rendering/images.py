"""Arrays of images: colours, depth and segmentation, how they lie in shared memory, and tiling them into one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "ImageArrays",
    "allocate",
    "image_kinds",
    "map_arrays",
    "parse_grid",
    "shared_size",
    "side_by_side",
    "stack_images",
    "tile",
]

_ALIGNMENT = 64  # of each array in shared memory, in bytes: a cache line


class ImageArrays(NamedTuple):
    """The images of some states, in the order in which they are sent; None for a kind that was not asked for."""

    rgb: npt.NDArray[np.uint8]
    depth: npt.NDArray[np.float32] | None
    segmentation: npt.NDArray[np.int32] | None

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays that are not None."""
        return tuple(array for array in self if array is not None)

    def row(self, row: int) -> ImageArrays:
        """Return views of one state's images."""
        rgb, depth, segmentation = self
        return ImageArrays(
            rgb[row],
            None if depth is None else depth[row],
            None if segmentation is None else segmentation[row],
        )


def image_kinds(shape: tuple[int, ...], depth: bool, segmentation: bool) -> list[tuple[tuple[int, ...], Any] | None]:
    """Return the shape and dtype of each kind of image; `shape` is that of the array of depth images."""
    return [
        ((*shape, 3), np.uint8),
        (shape, np.float32) if depth else None,
        ((*shape, 2), np.int32) if segmentation else None,
    ]


def allocate(shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> ImageArrays:
    """Make arrays for images; `shape` is that of the array of depth images, with the axes of states and cameras."""
    kinds = image_kinds(shape, depth, segmentation)
    return ImageArrays(*(kind and np.empty(*kind) for kind in kinds))  # type: ignore[arg-type]


def shared_size(shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> int:
    """Return how many bytes such images take in shared memory."""
    return sum(_aligned_size(kind) for kind in image_kinds(shape, depth, segmentation) if kind is not None)


def map_arrays(memory: Any, shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> ImageArrays:
    """Make arrays over a block of shared memory; the pool and its worker make the same ones."""
    arrays: list[Any] = []
    offset = 0
    for kind in image_kinds(shape, depth, segmentation):
        arrays.append(kind and np.ndarray(*kind, memory, offset))
        offset += 0 if kind is None else _aligned_size(kind)
    return ImageArrays(*arrays)


def _aligned_size(kind: tuple[tuple[int, ...], Any]) -> int:
    shape, dtype = kind
    return -(-math.prod(shape) * int(np.dtype(dtype).itemsize) // _ALIGNMENT) * _ALIGNMENT


# ------------------------------------------------------------ several images in one


def stack_images(images: Sequence[Any]) -> Any:
    """Return images as one array if they are arrays of one shape and dtype, else as a tuple."""
    first = images[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(i, np.ndarray) and i.shape == first.shape and i.dtype == first.dtype for i in images
    ):
        return np.stack(images)
    return tuple(images)


def tile(images: npt.NDArray[Any], grid: tuple[int, int] | None = None) -> npt.NDArray[Any]:
    """Return images as one picture, row by row.

    Args:
        images: of shape `(n, height, width, channels)`; or `(n, C, height, width, channels)`, where the C images of
            each row stand side by side.
        grid: how many rows and columns; None for a grid that is as square as possible. Images that don't fit are left
            out.

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
    """Return images of C cameras, of shape `(…, C, height, width, channels)`, as one picture of shape `(…, height, C *
    width, channels)`.
    """
    *others, cameras, height, width, channels = images.shape
    return images.swapaxes(-4, -3).reshape(*others, height, cameras * width, channels)


def parse_grid(text: str) -> tuple[int, int]:
    """Parse rows and columns from a text such as "4x4".

    Raises:
        ValueError: if it is no such text.
    """
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise ValueError(f"grid: expected ROWSxCOLUMNS, as 4x4, got {text!r}")
    return int(rows), int(columns)
