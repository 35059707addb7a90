"""What a render worker draws on: memory that it shares with its parent, or its own, of which the parent gets a copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from aioenv.rendering.draw_requests import ImageArrays, Where, allocate, lay_out
from aioenv.rendering.image_memory import KEPT
from aioenv.spaces.layout import byte_view
from aioenv.worker.service import Reply
from aioenv.worker.worker_context import map_memory_part

__all__ = ["BufferMapper"]


class BufferMapper:
    """Finds the images that a request is about; the blocks that were drawn on last stay mapped."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def put_up(
        self, where: Where | None, count: int, a_state: tuple[int, ...], *, depth: bool, segmentation: bool
    ) -> tuple[ImageArrays, Sequence[int]]:
        """Images to draw on, and which row each state is drawn on.

        Args:
            where: what the request says of that; None: images travel.
            count: how many states there are.
            a_state: the shape of a state's depth images, with the axis of cameras before.
            depth, segmentation: which kinds of images there are.
        """
        if where is None:
            return allocate((count, *a_state), depth=depth, segmentation=segmentation), range(count)
        memory = self._find(where.offset, where.size)
        return lay_out(memory, (where.length, *a_state), depth=depth, segmentation=segmentation), where.rows

    def reply(self, where: Where | None, images: ImageArrays) -> Reply:
        """The answer, once they are drawn."""
        return Reply([byte_view(array) for array in images.arrays] if where is None else ())

    def _find(self, offset: int, size: int) -> Any:
        known, key = self._known, (offset, size)
        if key not in known:
            known[key] = map_memory_part(offset, size)
            if len(known) > KEPT:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]
