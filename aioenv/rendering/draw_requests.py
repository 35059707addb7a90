"""What render workers are asked: the tail of a RENDER, of either pool. The fixed part is the states, one row each.

The images are the fixed part of the reply, unless the request says where in shared memory they shall be; its tail, of a
`RenderPool`, is how long they took. And what images are, and what they are drawn on.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aioenv.ipc.messages import dump, load
from aioenv.spaces.layout import byte_view

__all__ = [
    "DrawSettings",
    "Edits",
    "ImageArrays",
    "ImageBuffer",
    "ModelChanges",
    "RenderContext",
    "StateDetails",
    "Where",
    "allocate",
    "dump_drawing",
    "dump_rest",
    "dump_sources",
    "dump_time",
    "kinds_of",
    "lay_out",
    "load_request",
    "load_sources",
    "load_time",
    "size_of",
]


# Fields of the model by name, one row a state.
Edits: TypeAlias = dict[str, npt.NDArray[Any]]


class Where(NamedTuple):
    """Where images go: rows of arrays that lie in a block of shared memory (see `lay_out`)."""

    offset: int  # of the block
    size: int
    length: int  # how many rows the arrays have
    rows: list[int]  # of each state


class DrawSettings(NamedTuple):
    """How the states of a call are drawn."""

    width: int
    height: int
    views: tuple[Any, ...]  # see `cameras.View`
    depth: bool
    segmentation: bool
    option: Any = None  # see `scene_option.Option`


class StateDetails(NamedTuple):
    """What else there is to know of the states of one request."""

    looks: list[list[int]] | None = None  # of each: its slot, and how often that was randomised
    edits: Edits | None = None
    where: Where | None = None


class RenderContext(NamedTuple):
    """What some states of a vector env are drawn with, as it was when they came."""

    edits: Edits
    # of states whose model has come since the start: its key, the slot's source at the start, and the one of now
    models: dict[int, tuple[bytes, tuple[int, bytes]]]
    rows: dict[int, bytes]  # of states that are longer than rows


class ModelChanges(NamedTuple):
    """What a vector env's request says of models that have come since the start."""

    # by their keys those that the worker does not have: the number of the slot's source at the start, and the one of
    # now, pickled; without a model it patches that
    new: dict[bytes, tuple[int, bytes]]
    dropped: list[bytes]  # keys of those that it needs no longer
    keys: dict[int, bytes]  # of states, by their numbers in the request; of the others the source is as at the start
    rows: dict[int, bytes]  # of states that are longer than rows


_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("<d")


def dump_drawing(drawing: DrawSettings) -> bytes:
    """The beginning of the tails of all requests of a call; `dump_rest` gives the other part."""
    head = dump(drawing)
    return _LENGTH.pack(len(head)) + head


def dump_rest(rest: StateDetails) -> bytes:
    """The end of a tail. (To pickle plain tuples takes a sixth of the time of named ones.)"""
    return dump((rest.looks, rest.edits, rest.where and tuple(rest.where)))


def load_request(tail: memoryview) -> tuple[DrawSettings, StateDetails]:
    """What a tail holds."""
    end = _LENGTH.size + _LENGTH.unpack_from(tail)[0]
    looks, edits, where = load(tail[end:])
    return load(tail[_LENGTH.size : end]), StateDetails(looks, edits, where and Where(*where))


def dump_sources(
    sources: list[int] | None, where: Where | None, edits: Edits, later: ModelChanges | None = None
) -> bytes:
    """The tail of a vector env's request.

    Args:
        sources: of each state the number of its source, None if there is but one.
        where: where in shared memory the images go.
        edits: of the model.
        later: of states whose models have come since the start.
    """
    return dump((sources, where and tuple(where), edits, later and tuple(later)))


def load_sources(tail: memoryview) -> tuple[list[int] | None, Where | None, Edits, ModelChanges | None]:
    """What such a tail holds."""
    sources, where, edits, later = load(tail)
    return sources, where and Where(*where), edits, later and ModelChanges(*later)


def dump_time(seconds: float) -> bytes:
    """The tail of a reply: how long the worker took over the images."""
    return _TIME.pack(seconds)


def load_time(tail: memoryview) -> float:
    """What such a tail holds, in seconds."""
    return float(_TIME.unpack(tail)[0])


class ImageArrays(NamedTuple):
    """The images of some states, in the order in which they travel; None for what was not asked for."""

    rgb: npt.NDArray[np.uint8]
    depth: npt.NDArray[np.float32] | None
    segmentation: npt.NDArray[np.int32] | None

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Those that there are."""
        return tuple(array for array in self if array is not None)

    def row(self, row: int) -> ImageArrays:
        """Those of one state; views."""
        rgb, depth, segmentation = self
        return ImageArrays(
            rgb[row],
            None if depth is None else depth[row],
            None if segmentation is None else segmentation[row],
        )


class ImageBuffer(NamedTuple):
    """What images are drawn on, row by row.

    Whoever has asked for a row keeps the sheet until the answer is there: its memory may be used for other images when
    nobody has its arrays any more.

    Attributes:
        images: the arrays.
        where: where they are in shared memory, without rows; None if images travel.
    """

    images: ImageArrays
    where: Where | None

    def ask(self, rows: list[int]) -> tuple[Where | None, list[memoryview] | None]:
        """What a request for these rows, ascending, says: where they are, or else what its reply is read into."""
        if self.where is not None:
            return self.where._replace(rows=rows), None
        arrays = self.images.arrays
        if rows[-1] - rows[0] < len(rows):
            return None, [byte_view(array[rows[0] : rows[-1] + 1]) for array in arrays]
        return None, [byte_view(array[row]) for array in arrays for row in rows]


def kinds_of(shape: tuple[int, ...], depth: bool, segmentation: bool) -> list[tuple[tuple[int, ...], Any] | None]:
    """Shape and dtype of each kind of images; `shape` is all of a depth image's."""
    return [
        ((*shape, 3), np.uint8),
        (shape, np.float32) if depth else None,
        ((*shape, 2), np.int32) if segmentation else None,
    ]


def allocate(shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> ImageArrays:
    """New images; `shape` is all of a depth image's, with the axes of states and cameras before it."""
    return ImageArrays(*(kind and np.empty(*kind) for kind in kinds_of(shape, depth, segmentation)))  # type: ignore[arg-type]


_ALIGNMENT = 64  # of each array in shared memory, in bytes: a cache line


def _room(kind: tuple[tuple[int, ...], Any]) -> int:
    shape, dtype = kind
    return -(-math.prod(shape) * int(np.dtype(dtype).itemsize) // _ALIGNMENT) * _ALIGNMENT


def size_of(shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> int:
    """How many bytes such images take in shared memory."""
    return sum(_room(kind) for kind in kinds_of(shape, depth, segmentation) if kind is not None)


def lay_out(memory: Any, shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> ImageArrays:
    """Images in shared memory; both sides make the same."""
    arrays: list[Any] = []
    offset = 0
    for kind in kinds_of(shape, depth, segmentation):
        arrays.append(kind and np.ndarray(*kind, memory, offset))
        offset += 0 if kind is None else _room(kind)
    return ImageArrays(*arrays)
