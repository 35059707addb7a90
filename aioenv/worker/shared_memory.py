"""The memory that this worker shares with its parent and the other workers: kept until it is known what lies in it."""

from __future__ import annotations

import os
import threading
from typing import Any

from aioenv.ipc.memory import map_shared
from aioenv.worker.descriptors import move_high

__all__ = ["drop", "keep", "mapped", "mapped_part"]


class _WorkerMemory(threading.local):
    """Of this thread alone: a worker may be one of its parent's."""

    fd: int | None = None


_worker = _WorkerMemory()


def keep(fd: int | None) -> None:
    """Take a descriptor of `memory.Shared` into safety from what env factories do to low ones. None: there is none."""
    if fd is not None:
        try:
            _worker.fd = move_high(fd)
        finally:
            os.close(fd)


def mapped(size: int) -> Any:
    """Map it; once only."""
    if _worker.fd is None:
        raise RuntimeError("this worker was started without shared memory")
    memory = map_shared(_worker.fd, size)
    drop()
    return memory


def mapped_part(offset: int, size: int) -> Any:
    """Map a part of it, of memory that grows; as often as one likes."""
    if _worker.fd is None:
        raise RuntimeError("this worker was started without shared memory")
    return map_shared(_worker.fd, size, offset)


def drop() -> None:
    """Close the descriptor, if it is still there."""
    fd, _worker.fd = _worker.fd, None
    if fd is not None:
        os.close(fd)
