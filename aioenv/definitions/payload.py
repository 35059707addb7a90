"""Memory for the parts of a snapshot that are too large for messages: written once, and mapped by every worker."""

from __future__ import annotations

import os
import weakref
from typing import Any

import numpy as np

from aioenv.definitions.restore import HEAD, Place

__all__ = ["CAN_SHARE", "Payload"]

CAN_SHARE = hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")
_ALIGN = 4096


class Payload:
    """Memory for large pickles and buffers; each buffer is in it once. The mappings of workers outlive it.

    Args:
        token: what it begins with.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._pieces: list[tuple[int, Any]] = []  # offset and bytes, until they are written
        self._known: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self._size = HEAD

    def add(self, view: memoryview) -> tuple[int, int, bool]:
        """Take in a buffer; gives its offset, its size, and whether it is read-only."""
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        key = address, view.nbytes
        if key not in self._known:
            self._known[key] = (*self.append(view), view.readonly)
        offset, size, _ = self._known[key]
        return offset, size, view.readonly

    def append(self, data: Any) -> tuple[int, int]:
        """Take in bytes; gives their offset and their size."""
        offset = -(-self._size // _ALIGN) * _ALIGN
        self._pieces.append((offset, data))
        self._size = offset + len(data)
        return offset, len(data)

    def finish(self) -> Place | None:
        """Write everything; None if there is nothing.

        Raises:
            OSError: if there is not so much memory.
        """
        if not self._pieces:
            return None
        fd = os.memfd_create("aioenv-code", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self._size)
        for offset, data in ((0, self._token), *self._pieces):
            _write(fd, data, offset)
        self._pieces, self._known = [], {}
        return Place(f"/proc/{os.getpid()}/fd/{fd}", self._size)


def _write(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[written:], offset + written
