"""Where a worker's actions are read: into its own arrays, as frames bring them, or where they lie in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aioenv.ipc.frames import Frame
from aioenv.spaces.layout import Layout, byte_view

__all__ = ["Actions"]


class Actions:
    """The actions of n rows.

    Args:
        layout: of one action.
        n: how many rows.
        shared: for each lane of shared memory, the rows' part of its action arrays by number of leaf; one empty dict
            without shared memory.
        laned: whether requests name a lane.

    Attributes:
        views: where the fixed part of a request for all rows is read into.
    """

    def __init__(self, layout: Layout, n: int, shared: Sequence[dict[int, Any]], *, laned: bool) -> None:
        self._layout = layout
        own = layout.zeros(n)
        self._lanes = [[lane.get(i, array) for i, array in enumerate(own)] for lane in shared]
        self._shared = set(shared[0])
        self._lane = bytearray(laned)  # of the last request that was read into `views`
        framed = [byte_view(array) for i, array in enumerate(own) if i not in self._shared]
        self.views: list[memoryview] = [memoryview(self._lane), *framed] if laned else framed

    @property
    def array(self) -> Any:
        """What is read into `views`, if that is one array, and travels."""
        return self._lanes[0][0]

    def open(self, frame: Frame) -> tuple[int, bytes]:
        """The lane that a request is about, and the actions that were not read into `views`."""
        lane, data = self._lane, b""
        # a request for a few rows may be as long as one for all, if it has nothing but the lane
        if frame.fixed is not self.views:
            # `_lane` may be the next request's already: several come in one read
            data, size = b"".join(frame.fixed), len(self._lane)
            lane, data = bytearray(data[:size]), data[size:]
        return lane[0] if lane else 0, data

    def of_all(self, lane: int, objects: Sequence[Sequence[Any]]) -> list[Any]:
        """The actions of all rows; copies, since envs may keep them, and the next are read into the same memory."""
        return self._layout.rows([array.copy() for array in self._lanes[lane]], objects)

    def of_some(self, lane: int, rows: Sequence[int], data: bytes, objects: Sequence[Sequence[Any]]) -> list[Any]:
        """The actions of some rows: those that travelled, and those in shared memory; likewise copies."""
        here = None
        if self._shared:
            index = list(rows)
            here = {i: self._lanes[lane][i][index] for i in self._shared}
        return self._layout.rows(self._layout.split(data, len(rows), here), objects)
