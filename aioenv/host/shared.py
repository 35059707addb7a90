"""The memory that this worker shares with its parent and the other workers: kept until it is known what lies in it."""

from __future__ import annotations

import os
from typing import Any

from aioenv.host.boot import move_high
from aioenv.memory import map_shared

__all__ = ["keep", "mapped", "mapped_part"]

_fd: int | None = None


def keep(fd: int | None) -> None:
    """Take a descriptor of `memory.Shared` into safety from what env factories do to low ones. None: there is none."""
    global _fd
    if fd is not None:
        _fd = move_high(fd)
        os.close(fd)


def mapped(size: int) -> Any:
    """Map it; once only."""
    global _fd
    if _fd is None:
        raise RuntimeError("this worker was started without shared memory")
    memory = map_shared(_fd, size)
    os.close(_fd)
    _fd = None
    return memory


def mapped_part(offset: int, size: int) -> Any:
    """Map a part of it, of memory that grows; as often as one likes."""
    if _fd is None:
        raise RuntimeError("this worker was started without shared memory")
    return map_shared(_fd, size, offset)
