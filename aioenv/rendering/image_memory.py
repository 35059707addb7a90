"""The memory that images are drawn into: shared with the render workers, handed out as arrays, and used again."""

from __future__ import annotations

import mmap
import sys
from sys import getrefcount
from typing import Any

from aioenv.ipc.memory import SharedMemory
from aioenv.rendering.draw_requests import ImageBuffer, Where, allocate, lay_out, size_of

__all__ = ["KEPT", "ImageMemory"]

# How much is kept for images to come, at most: in bytes, and in blocks. What is larger goes with its images.
KEPT_BYTES = 256 << 20
KEPT = 32
# Without a GIL reference counts say nothing: then no block is used again.
_COUNTABLE = getattr(sys, "_is_gil_enabled", lambda: True)()


class _Block:
    """A part of the memory.

    Attributes:
        offset: where it begins.
        size: in bytes.
        buffer: the memory. Every array over it has a reference to this, as have views of such arrays.
    """

    __slots__ = ("buffer", "offset", "size")

    def __init__(self, offset: int, buffer: Any, size: int) -> None:
        self.offset = offset
        self.buffer = buffer
        self.size = size

    @property
    def unused(self) -> bool:
        """Whether nobody has an array over it any more."""
        return _COUNTABLE and getrefcount(self.buffer) == 2  # its own, and the argument


class ImageMemory:
    """Makes what images are drawn on: in blocks of shared memory, of which those that nobody uses are used again.

    Args:
        shared: the memory, which grows; None: there is none, and images travel.
    """

    def __init__(self, shared: SharedMemory | None) -> None:
        self._shared = shared
        self._kept: list[_Block] = []  # those taken last at the end

    def sheet(self, shape: tuple[int, ...], *, depth: bool, segmentation: bool) -> ImageBuffer:
        """A sheet that nobody else has.

        Args:
            shape: all of a depth image's, with the axes of states and cameras before it.
            depth, segmentation: which kinds there are.
        """
        block = self._take(size_of(shape, depth=depth, segmentation=segmentation))
        if block is None:
            return ImageBuffer(allocate(shape, depth=depth, segmentation=segmentation), None)
        images = lay_out(block.buffer, shape, depth=depth, segmentation=segmentation)
        return ImageBuffer(images, Where(block.offset, block.size, shape[0], []))

    def _take(self, size: int) -> _Block | None:
        """A block of at least so many bytes; None if there is no memory to be had."""
        if self._shared is None or size == 0:
            return None
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        for number, block in enumerate(self._kept):
            if size <= block.size <= 2 * size and block.unused:
                self._kept.append(self._kept.pop(number))
                return block
        try:
            block = _Block(*self._shared.extend(size), size)
        except OSError:
            return None
        if size <= KEPT_BYTES:
            self._kept.append(block)
        # whoever has arrays over a block that is let go of keeps its memory as long as them
        while len(self._kept) > KEPT or sum(kept.size for kept in self._kept) > KEPT_BYTES:
            del self._kept[0]
        return block

    def clear(self) -> None:
        """Keep none: images live as long as anybody has them."""
        self._kept.clear()
