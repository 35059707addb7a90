"""Which row the worker runs just now, where its parent sees it: it has to know when the worker hangs or dies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from aioenv.memory import Marker

__all__ = ["mark", "row", "share"]

# Until `share`, nobody sees it. Write `mark[0] = row + 1` before an env runs, and 0 after the last one.
mark: memoryview = Marker(None).cell


def share(fd: int | None) -> None:
    """From now on, tell it to the parent (see `Marker`); the descriptor is closed. None: there is no such memory."""
    global mark
    if fd is None:
        return
    mark = Marker(fd).cell
    os.close(fd)


@contextlib.contextmanager
def row(number: int) -> Iterator[None]:
    """Mark a row for the length of a block: for all but the hot path. What ends the worker leaves the mark."""
    cell = mark
    cell[0] = number + 1
    try:
        yield
    except Exception:
        cell[0] = 0
        raise
    cell[0] = 0
