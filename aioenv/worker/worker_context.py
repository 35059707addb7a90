"""The memory that a worker shares with its parent: the row that runs now, and a block for arrays.

The parent reads that row when the worker hangs or dies. A worker is a process or a thread of its parent, so all of
this is thread-local.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from aioenv.ipc.memory import KEPT, CurrentRow, map_shared
from aioenv.ipc.shared_data import DataInbox

__all__ = [
    "BlockMapper",
    "current_row",
    "is_spare_env",
    "keep_inbox",
    "keep_memory",
    "map_memory",
    "map_memory_part",
    "move_high",
    "owns_process",
    "release_memory",
    "running_row",
    "set_spare",
    "share_current_row",
    "take_data",
    "use_current_row_of_parent",
]


_HIGH_FD = 100  # out of the way of code that closes "all" low descriptors


class _WorkerContext(threading.local):
    """The context of the worker on this thread; until a word is shared, only this thread sees its own."""

    def __init__(self) -> None:
        self.current_row = CurrentRow(None).cell
        self.owns_process = True
        self.memory_fd: int | None = None
        self.inbox: DataInbox | None = None
        self.spare = False


_context = _WorkerContext()


def owns_process() -> bool:
    """Return whether this process is the worker's own, and not its parent's."""
    return _context.owns_process


def set_spare(spare: bool) -> None:
    """Note whether the envs of this worker are the second ones of their slots."""
    _context.spare = spare


def is_spare_env() -> bool:
    """Return whether this is the worker of a slot's second env (see `spare_envs=`).

    It is for factories of envs that need a port, a file or a display of their own: both envs of a slot live at the same
    time, in processes of their own. Ask it on the thread that makes the env; False in any other place.
    """
    return _context.spare


# ------------------------------------------------------------ the current row


def current_row() -> memoryview:
    """Return the word that says which row runs: write `word[0] = row + 1` before an env runs, 0 after the last one."""
    return _context.current_row


def share_current_row(fd: int | None) -> None:
    """Share that word with the parent (see `CurrentRow`) and close the descriptor; None means no such memory."""
    if fd is None:
        return
    _context.current_row = CurrentRow(fd).cell
    os.close(fd)


def use_current_row_of_parent(current_row: memoryview) -> None:
    """Use a word that the parent, in this same process, has made."""
    _context.current_row, _context.owns_process = current_row, False


@contextlib.contextmanager
def running_row(number: int) -> Iterator[None]:
    """Mark a row for the length of a block; too slow for the hot path. SystemExit, which ends the worker, keeps it."""
    current_row = _context.current_row
    current_row[0] = number + 1
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        current_row[0] = 0
        raise
    current_row[0] = 0


# ------------------------------------------------------------ shared memory


def keep_memory(fd: int | None) -> None:
    """Move a descriptor of shared memory out of the reach of env factories, until its layout is known.

    Args:
        fd: a descriptor of `ipc.memory.SharedMemory`; None if nothing is shared.
    """
    if fd is not None:
        try:
            _context.memory_fd = move_high(fd)
        finally:
            os.close(fd)


def map_memory(size: int) -> Any:
    """Map the shared memory and close its descriptor: this works once."""
    memory = map_memory_part(0, size)
    release_memory()
    return memory


def map_memory_part(offset: int, size: int) -> Any:
    """Map a part of shared memory that grows; this works any number of times."""
    if _context.memory_fd is None:
        raise RuntimeError("this worker was started without shared memory")
    return map_shared(_context.memory_fd, size, offset)


class BlockMapper:
    """Maps blocks of shared memory (see `MemoryBlocks`); recently used ones stay mapped."""

    def __init__(self) -> None:
        self._mapped: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def map(self, offset: int, size: int) -> Any:
        """Return the memory of a block."""
        mapped, key = self._mapped, (offset, size)
        if key not in mapped:
            mapped[key] = map_memory_part(offset, size)
            if len(mapped) > KEPT:
                mapped.popitem(last=False)
        mapped.move_to_end(key)
        return mapped[key]


def release_memory() -> None:
    """Close the descriptor if it is still open."""
    fd, _context.memory_fd = _context.memory_fd, None
    if fd is not None:
        os.close(fd)


def keep_inbox(fd: int | None) -> None:
    """Move the descriptor of a `DataInbox` out of the reach of env factories; None: the worker has none."""
    if fd is not None:
        try:
            _context.inbox = DataInbox(move_high(fd))
        finally:
            os.close(fd)


def take_data(number: int) -> memoryview | None:
    """Wait for data of this machine (see `DataInbox.take`)."""
    return None if _context.inbox is None else _context.inbox.take(number)


def move_high(fd: int) -> int:
    """Duplicate a descriptor under a high number, which code that closes all low descriptors does not reach."""
    try:
        import fcntl

        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    except (ImportError, OSError):  # no fcntl on Windows; a low `ulimit -n`
        return os.dup(fd)
