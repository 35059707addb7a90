"""Ring buffers in shared memory: a worker writes a row for each action, and its parent reads the rows."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["CAPACITY", "DRAW", "KINDS", "REPLY", "RING_BYTES", "TRACE", "Handle", "Ring", "RingMemory"]

TRACE = "trace"  # a CALL that the worker itself handles, not its service

# The actions of workers: the kinds of requests, the start, and what follows them.
KINDS = ("start", "call", "reset", "step", "render", "reply", "draw")
REPLY, DRAW = "reply", "draw"
_NUMBER = {name: number for number, name in enumerate(KINDS)}

_ROW = struct.Struct("<iiqdd")  # kind, generation, request, begin, end
_HEAD = struct.Struct("<16sq")  # the key of the ring, the number of rows written
RING_BYTES = 2 << 20
CAPACITY = RING_BYTES // _ROW.size - 1  # in rows; the head takes the place of the first


class Handle(NamedTuple):
    """The place where a worker finds its ring."""

    path: str
    offset: int
    key: bytes


class Ring:
    """Rows in memory that a worker writes and its parent reads; the oldest are overwritten.

    Args:
        memory: a buffer of `RING_BYTES`.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._counter = self._view[16:24].cast("q")
        self._read = 0

    @staticmethod
    def open(handle: Handle) -> Ring:
        """Open the ring of a handle, in a worker.

        Raises:
            OSError, ValueError: if the parent has stopped tracing meanwhile.
        """
        fd = os.open(handle.path, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, RING_BYTES, offset=handle.offset)
        finally:
            os.close(fd)
        if _HEAD.unpack_from(memory)[0] != handle.key:
            memory.close()
            raise ValueError("this is another trace's memory")
        return Ring(memory)

    def append(self, kind: str, generation: int, request: int, begin: float, end: float) -> None:
        """Add a row; this takes 1 µs. The parent can read it even if the process dies right afterwards."""
        count = self._counter[0]
        _ROW.pack_into(self._view, _ROW.size * (1 + count % CAPACITY), _NUMBER[kind], generation, request, begin, end)
        self._counter[0] = count + 1

    def read_new(self) -> Iterator[tuple[int, int, int, float, float]]:
        """Yield the rows added since the last call, in the parent; overwritten ones are missing."""
        count = self._counter[0]
        first = max(self._read, count - CAPACITY)
        self._read = count
        for row in range(first, count):
            yield _ROW.unpack_from(self._view, _ROW.size * (1 + row % CAPACITY))

    def close(self) -> None:
        """Release the memory."""
        self._counter.release()
        self._view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        else:
            self._memory.release()


class RingMemory:
    """The parent's memory for the rings of its workers; empty where the platform has no such memory.

    Args:
        count: the number of rings.
    """

    def __init__(self, count: int) -> None:
        self._memory, self._fd = _allocate(count)

    def ring(self, index: int) -> tuple[Handle, Ring] | tuple[None, None]:
        """Make the ring with this index; return its handle for the worker, and the ring, or None for both."""
        if self._memory is None:
            return None, None
        offset = index * RING_BYTES
        key = secrets.token_bytes(16)
        _HEAD.pack_into(self._memory, offset, key, 0)
        ring = Ring(memoryview(self._memory)[offset : offset + RING_BYTES])
        return Handle(f"/proc/{os.getpid()}/fd/{self._fd}", offset, key), ring

    def close(self) -> None:
        """Release the memory; all rings must be closed before."""
        if self._memory is not None:
            self._memory.close()
            os.close(self._fd)


def _allocate(rings: int) -> tuple[mmap.mmap | None, int]:
    if not rings or not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return None, -1
    fd = os.memfd_create("aioenv-trace", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, rings * RING_BYTES)  # pages are allocated as they are written
        return mmap.mmap(fd, rings * RING_BYTES), fd
    except BaseException:
        os.close(fd)
        raise
