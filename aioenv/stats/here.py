"""What a process knows of all statistics in it: which are copies, what is being pickled, whether samples count now.

The statistics are `SharedRunningStats` each.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["collected", "copies", "counting", "note_pickled", "uncounted"]

# Statistics that are not in shared memory: a process has one of each, however often it is unpickled.
copies: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
# Whether samples count.
counting = True

_local = threading.local()  # `found`: what is being pickled in a thread


def note_pickled(stats: Any) -> None:
    """These are being pickled."""
    found: dict[int, Any] | None = getattr(_local, "found", None)
    if found is not None:
        found[id(stats)] = stats


@contextlib.contextmanager
def collected() -> Iterator[list[Any]]:
    """A list which at the end of the block has all statistics that this thread has pickled in it."""
    listed: list[Any] = []
    _local.found = {}
    try:
        yield listed
    finally:
        listed.extend(_local.found.values())
        _local.found = None


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """What this process sees meanwhile does not count: it was seen before."""
    global counting
    counting = False
    try:
        yield
    finally:
        counting = True
