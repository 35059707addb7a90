"""Arrays of images: colours, depth and segmentation, the memory that they are drawn into, and tiling them into one.

Pools allocate and reuse the memory; render workers map it. Where the platform has anonymous shared memory, workers draw
straight into the arrays that users get. Elsewhere they draw into arrays of their own, and the images are sent with the
replies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.ipc.memory import MemoryBlocks, SharedMemory
from aioenv.spaces.layout import byte_view
from aioenv.worker.worker_context import BlockMapper

__all__ = [
    "BufferMapper",
    "ImageArrays",
    "ImageBuffer",
    "ImageLocation",
    "ImageMemory",
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


class ImageLocation(NamedTuple):
    """The place in shared memory where a worker draws: rows of the arrays in one block (see `map_arrays`)."""

    offset: int  # of the block
    size: int  # of the block, in bytes
    length: int  # how many rows the arrays have
    rows: list[int]  # of each state


class ImageBuffer(NamedTuple):
    """Arrays that render workers draw into, row by row.

    A request for some rows must hold the buffer until it is answered: its memory is reused once there is no reference
    to its arrays.

    Attributes:
        images: the arrays.
        location: where they are in shared memory, without rows; None if images are sent with the replies.
    """

    images: ImageArrays
    location: ImageLocation | None

    def target(self, rows: list[int]) -> tuple[ImageLocation | None, list[memoryview] | None]:
        """Return where a worker draws these rows, ascending; or else the memory that its reply is read into."""
        if self.location is not None:
            return self.location._replace(rows=rows), None
        arrays = self.images.arrays
        if rows[-1] - rows[0] < len(rows):
            return None, [byte_view(array[rows[0] : rows[-1] + 1]) for array in arrays]
        return None, [byte_view(array[row]) for array in arrays for row in rows]


class ImageMemory:
    """Allocates image buffers in shared memory, and reuses blocks that are not used any more.

    Args:
        shared: the memory, which grows; None if there is none.
    """

    def __init__(self, shared: SharedMemory | None) -> None:
        self._blocks = MemoryBlocks(shared)

    def new_buffer(self, shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> ImageBuffer:
        """Return a buffer that is used for nothing else.

        Args:
            shape: of the array of depth images, with the axes of states and cameras.
            depth: whether there are depth images.
            segmentation: whether there are segmentation images.
        """
        block = self._blocks.take(shared_size(shape, depth=depth, segmentation=segmentation))
        if block is None:
            return ImageBuffer(allocate(shape, depth=depth, segmentation=segmentation), None)
        images = map_arrays(block.buffer, shape, depth=depth, segmentation=segmentation)
        return ImageBuffer(images, ImageLocation(block.offset, block.size, shape[0], []))

    def clear(self) -> None:
        """Keep no block: memory is freed with the last array over it."""
        self._blocks.clear()


class BufferMapper:
    """Finds, in a render worker, the arrays that a request is to be drawn into."""

    def __init__(self) -> None:
        self._blocks = BlockMapper()

    def arrays(
        self,
        location: ImageLocation | None,
        count: int,
        state_shape: tuple[int, ...],
        *,
        depth: bool,
        segmentation: bool,
    ) -> tuple[ImageArrays, Sequence[int]]:
        """Return the arrays to draw into, and the row of each state.

        Args:
            location: where they are in shared memory; None for new arrays, which are sent with the reply.
            count: how many states there are.
            state_shape: of one state's depth images, with the axis of cameras.
            depth: whether there are depth images.
            segmentation: whether there are segmentation images.
        """
        if location is None:
            return allocate((count, *state_shape), depth=depth, segmentation=segmentation), range(count)
        memory = self._blocks.map(location.offset, location.size)
        shape = (location.length, *state_shape)
        return map_arrays(memory, shape, depth=depth, segmentation=segmentation), location.rows
