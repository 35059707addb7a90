"""Which row the worker runs just now, where its parent sees it: it has to know when the worker hangs or dies.

A worker is a process, or, for debugging, a thread of its parent's: what is kept here is the thread's own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from aioenv.ipc.memory import CurrentRow

__all__ = ["alone", "cell", "row", "share", "share_here"]


class _WorkerRow(threading.local):
    """What this thread knows: until `share`, nobody else sees its mark."""

    def __init__(self) -> None:
        self.cell = CurrentRow(None).cell
        self.alone = True


_worker = _WorkerRow()


def cell() -> memoryview:
    """The mark: write `cell[0] = row + 1` before an env runs, and 0 after the last one."""
    return _worker.cell


def alone() -> bool:
    """Whether this process is the worker's own, and not its parent's."""
    return _worker.alone


def share(fd: int | None) -> None:
    """Tell the row to the parent from now on (see `CurrentRow`), and close the descriptor. None: no such memory."""
    if fd is None:
        return
    _worker.cell = CurrentRow(fd).cell
    os.close(fd)


def share_here(mark: memoryview) -> None:
    """From now on, tell it to the parent, which is in this process."""
    _worker.cell, _worker.alone = mark, False


@contextlib.contextmanager
def row(number: int) -> Iterator[None]:
    """Mark a row for the length of a block: for all but the hot path. What ends the worker leaves the mark."""
    mark = _worker.cell
    mark[0] = number + 1
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        mark[0] = 0
        raise
    mark[0] = 0
