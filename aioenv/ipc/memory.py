"""Memory that processes share: anonymous, passed by descriptor, gone with the last of them."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from functools import cache
from typing import Any

__all__ = ["AVAILABLE", "CurrentRow", "Shared", "check_transport", "map_shared"]

# Whether the platform has memory without a name to share.
AVAILABLE = hasattr(os, "memfd_create")

_BYTES = 4


def check_transport(transport: str) -> str:
    """How large arrays reach the other side; ValueError if it is unknown, or the platform does not have it."""
    if transport not in ("auto", "frames", "shared"):
        raise ValueError(f"transport: expected 'auto', 'frames' or 'shared', got {transport!r}")
    if transport == "shared" and not AVAILABLE:
        raise ValueError('transport="shared": this platform has no memory without a name to share; use "auto"')
    return transport


def _create(flags: int = 0) -> int | None:
    if not AVAILABLE:
        return None
    try:
        return os.memfd_create("aioenv", os.MFD_CLOEXEC | flags)
    except OSError:
        return None


class CurrentRow:
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
        """A descriptor of new memory, to be closed by the caller; None where there is none without a name."""
        fd = _create()
        if fd is not None:
            try:
                os.ftruncate(fd, _BYTES)
            except OSError:  # files may not be so large (`ulimit -f`)
                os.close(fd)
                return None
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
        self._size = 0

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
        _, buffer = self._enlarge(size, give_back=False)
        self._seal("F_SEAL_GROW")
        return buffer

    def extend(self, size: int) -> tuple[int, Any]:
        """Make it larger, and map what is new: memory that the system gets back with the last array over it here.

        Pages are taken when they are first written to, and what was given back is not used again: only addresses
        within it ever grow.

        Args:
            size: in bytes; a multiple of `mmap.ALLOCATIONGRANULARITY`.

        Returns:
            Where it begins, for `map_shared`, and the memory.

        Raises:
            OSError: if there is not so much memory.
        """
        return self._enlarge(size, give_back=True)

    def _enlarge(self, size: int, *, give_back: bool) -> tuple[int, Any]:
        offset = self._size
        os.ftruncate(self.fd, offset + size)
        self._size = offset + size
        # a process that made it smaller would take the memory from under the others' feet
        self._seal("F_SEAL_SHRINK")
        return offset, map_shared(self.fd, size, offset, give_back=give_back)

    def _seal(self, name: str) -> None:
        with contextlib.suppress(ImportError, AttributeError, OSError):
            import fcntl

            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, getattr(fcntl, name))

    def close(self) -> None:
        """Close the descriptor; what has been mapped lives as long as anybody uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_shared(fd: int, size: int, offset: int = 0, *, give_back: bool = False) -> Any:
    """Map memory of `Shared`: a buffer, which is unmapped with the last array over it.

    Python's own `mmap` would keep a descriptor for as long (before 3.13).

    Args:
        fd: its descriptor.
        size: of the part that is mapped, in bytes.
        offset: where that begins.
        give_back: whether nobody needs what it holds any more once this mapping is gone.

    Raises:
        OSError: if it can't be mapped.
    """
    import ctypes

    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: shared memory of {size} bytes")
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, _unmap, libc, address, size, os.getpid() if give_back else None).atexit = False
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
    if owner == os.getpid():  # not in a fork of it
        # the pages themselves: others may still have them mapped
        libc.madvise(address, size, getattr(mmap, "MADV_REMOVE", 9))
    libc.munmap(address, size)
