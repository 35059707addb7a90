"""Anonymous memory that processes share: passed by descriptor, and freed with the last process that maps it.

Only processes on one machine can share memory. A worker on another machine gets none: `Worker.memory` stays None,
and its frames carry all arrays.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from functools import cache
from sys import getrefcount
from typing import Any

__all__ = [
    "AVAILABLE",
    "KEPT",
    "CurrentRow",
    "MemoryBlock",
    "MemoryBlocks",
    "SharedMemory",
    "check_transport",
    "map_shared",
]

# Whether the platform has anonymous shared memory.
AVAILABLE = hasattr(os, "memfd_create")

_BYTES = 4


def check_transport(transport: str) -> str:
    """Return how large arrays are transported.

    Raises:
        ValueError: if the transport is unknown, or the platform does not have it.
    """
    if transport not in ("auto", "frames", "shared"):
        raise ValueError(f"transport: expected 'auto', 'frames' or 'shared', got {transport!r}")
    if transport == "shared" and not AVAILABLE:
        raise ValueError('transport="shared": this platform has no memory without a name to share; use "auto"')
    return transport


def _memfd(flags: int = 0) -> int | None:
    if not AVAILABLE:
        return None
    try:
        return os.memfd_create("aioenv", os.MFD_CLOEXEC | flags)
    except OSError:
        return None


class CurrentRow:
    """The row whose env a worker is running: the parent can read it even when the worker hangs or has died.

    Args:
        fd: a descriptor from `create`, which stays open; None for memory of this process alone.

    Attributes:
        cell: an int32 memoryview of length 1. It holds row + 1, or 0 while no env runs. A write takes 30 ns.
    """

    def __init__(self, fd: int | None) -> None:
        self._map = mmap.mmap(-1, _BYTES) if fd is None else mmap.mmap(fd, _BYTES)
        self.cell = memoryview(self._map).cast("i")

    @staticmethod
    def create() -> int | None:
        """Return a descriptor of new memory, to be closed by the caller; None if the platform has no such memory."""
        fd = _memfd()
        if fd is not None:
            try:
                os.ftruncate(fd, _BYTES)
            except OSError:  # over the file size limit (`ulimit -f`)
                os.close(fd)
                return None
        return fd

    @property
    def row(self) -> int | None:
        """The row that is being run; None while no env runs."""
        row = self.cell[0] - 1
        return row if row >= 0 else None

    def close(self) -> None:
        """Unmap the memory."""
        self.cell.release()
        self._map.close()


class SharedMemory:
    """Memory of a parent and its workers. It is created before they start, so that they inherit it, and sized later.

    Attributes:
        fd: the descriptor, which workers pass to `map_shared`; -1 once it is closed.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._size = 0

    @classmethod
    def create(cls) -> SharedMemory | None:
        """Create memory of size 0; None if the platform has no such memory."""
        fd = _memfd(getattr(os, "MFD_ALLOW_SEALING", 0))
        return None if fd is None else cls(fd)

    def allocate(self, size: int) -> Any:
        """Set the final size, and map the memory.

        Raises:
            OSError: if the system has not enough memory.
        """
        _, buffer = self._enlarge(size, free_pages=False)
        self._seal("F_SEAL_GROW")
        return buffer

    def extend(self, size: int) -> tuple[int, Any]:
        """Append memory and map it; its pages are freed with the last array over it in this process.

        Pages are allocated when they are first written to. Freed offsets are not used again: the size only grows.

        Args:
            size: in bytes; a multiple of `mmap.ALLOCATIONGRANULARITY`.

        Returns:
            The offset of the new memory, for `map_shared`, and the memory.

        Raises:
            OSError: if the system has not enough memory.
        """
        return self._enlarge(size, free_pages=True)

    def _enlarge(self, size: int, *, free_pages: bool) -> tuple[int, Any]:
        offset = self._size
        os.ftruncate(self.fd, offset + size)
        self._size = offset + size
        # a process that shrank the memory would crash the others on their next access
        self._seal("F_SEAL_SHRINK")
        return offset, map_shared(self.fd, size, offset, free_pages=free_pages)

    def _seal(self, name: str) -> None:
        with contextlib.suppress(ImportError, AttributeError, OSError):
            import fcntl

            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, getattr(fcntl, name))

    def close(self) -> None:
        """Close the descriptor; mappings live as long as the arrays over them. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


# How much memory is kept for later use, in bytes and in blocks. Larger blocks are freed with their arrays.
KEPT_BYTES = 256 << 20
KEPT = 32
# Without a GIL, reference counts can't be relied on: then no block is reused.
_COUNTABLE = getattr(sys, "_is_gil_enabled", lambda: True)()


class MemoryBlock:
    """A part of shared memory.

    Attributes:
        offset: where it begins.
        size: in bytes.
        buffer: the memory. Every array over it, and every view of such an array, holds a reference to this.
    """

    __slots__ = ("buffer", "offset", "size")

    def __init__(self, offset: int, buffer: Any, size: int) -> None:
        self.offset = offset
        self.buffer = buffer
        self.size = size

    @property
    def unused(self) -> bool:
        """Whether there is no array over it any more."""
        return _COUNTABLE and getrefcount(self.buffer) == 2  # this object's reference, and the argument


class MemoryBlocks:
    """Allocates blocks of shared memory, and reuses blocks that are not used any more.

    Args:
        shared: the memory, which grows; None if there is none.
    """

    def __init__(self, shared: SharedMemory | None) -> None:
        self._shared = shared
        self._kept: list[MemoryBlock] = []  # the most recently used last

    def take(self, size: int) -> MemoryBlock | None:
        """Return a block of at least so many bytes; None if there is no memory for it.

        The caller must hold an array over it until the worker has written to it, or the block counts as unused.
        """
        if self._shared is None or size == 0:
            return None
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        for number, block in enumerate(self._kept):
            if size <= block.size <= 2 * size and block.unused:
                self._kept.append(self._kept.pop(number))
                return block
        try:
            block = MemoryBlock(*self._shared.extend(size), size)
        except OSError:
            return None
        if size <= KEPT_BYTES:
            self._kept.append(block)
        # arrays over a block that is dropped here keep its memory
        while len(self._kept) > KEPT or sum(kept.size for kept in self._kept) > KEPT_BYTES:
            del self._kept[0]
        return block

    def clear(self) -> None:
        """Keep no block: memory is freed with the last array over it."""
        self._kept.clear()


def map_shared(fd: int, size: int, offset: int = 0, *, free_pages: bool = False) -> Any:
    """Map a part of `SharedMemory` as a buffer, which is unmapped with the last array over it.

    Before Python 3.13, `mmap.mmap` would keep a duplicate of the descriptor for as long.

    Args:
        fd: the memory's descriptor.
        size: the size of the part, in bytes.
        offset: the offset of the part, in bytes.
        free_pages: whether the contents are unused once this mapping is gone, so that the pages can be freed.

    Raises:
        OSError: if the memory can't be mapped.
    """
    import ctypes

    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: shared memory of {size} bytes")
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, _unmap, libc, address, size, os.getpid() if free_pages else None).atexit = False
    return buffer


@cache
def _libc() -> Any:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _unmap(libc: Any, address: int, size: int, owner: int | None) -> None:
    if owner == os.getpid():  # not in a forked copy
        # frees the pages even if other processes still map them
        libc.madvise(address, size, getattr(mmap, "MADV_REMOVE", 9))
    libc.munmap(address, size)
