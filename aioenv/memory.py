"""Memory that processes share: anonymous, passed by descriptor, gone with the last of them."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

__all__ = ["AVAILABLE", "Marker", "Shared", "map_shared"]

# Whether the platform has memory without a name to share.
AVAILABLE = hasattr(os, "memfd_create")

_BYTES = 4


def _create(flags: int = 0) -> int | None:
    if not AVAILABLE:
        return None
    try:
        return os.memfd_create("aioenv", os.MFD_CLOEXEC | flags)
    except OSError:
        return None


class Marker:
    """One number that a worker writes and its parent reads, even when the worker hangs or has died: the row it runs.

    Args:
        fd: memory of `create`; None for memory that nobody else sees. It is not closed here.

    Attributes:
        cell: an int32 memoryview of length 1. It holds row + 1, or 0 while no env runs; to write it costs 30 ns.
    """

    def __init__(self, fd: int | None) -> None:
        self._map = mmap.mmap(-1, _BYTES) if fd is None else mmap.mmap(fd, _BYTES)
        self.cell = memoryview(self._map).cast("i")

    @staticmethod
    def create() -> int | None:
        """A descriptor of new memory, to be closed by the caller; None where the platform has none without a name."""
        fd = _create()
        if fd is not None:
            os.ftruncate(fd, _BYTES)
        return fd

    @property
    def row(self) -> int | None:
        """The row that is being run; None if none is."""
        row = self.cell[0] - 1
        return row if row >= 0 else None

    def close(self) -> None:
        """Unmap it."""
        self.cell.release()
        self._map.close()


class Shared:
    """Memory for a parent and its workers: made before they start, so that they get it, and given its size later.

    Attributes:
        fd: to be passed on; `map_shared` takes it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Shared | None:
        """New memory of size 0; None where the platform has none without a name."""
        fd = _create(getattr(os, "MFD_ALLOW_SEALING", 0))
        return None if fd is None else cls(fd)

    def allocate(self, size: int) -> Any:
        """Give it its size, once and for all, and map it.

        Raises:
            OSError: if there is not so much memory.
        """
        os.ftruncate(self.fd, size)
        # a process that made it smaller would take the memory from under the others' feet
        with contextlib.suppress(ImportError, AttributeError, OSError):
            import fcntl

            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return map_shared(self.fd, size)

    def close(self) -> None:
        """Close the descriptor; what has been mapped lives as long as anybody uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_shared(fd: int, size: int) -> Any:
    """Map memory of `Shared`: a buffer, which is unmapped with the last array over it.

    Python's own `mmap` would keep a descriptor for as long (before 3.13).

    Raises:
        OSError: if it can't be mapped.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: shared memory of {size} bytes")
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, size).atexit = False
    return buffer
