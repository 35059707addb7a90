"""Check that a function that is called very often leaks no reference, no object and no memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def held(*objects: Any) -> Any:
    gc.collect()
    counts = [min(sys.getrefcount(item), 10**9) for item in objects]  # some begin there, and are everybody's
    return counts, len(gc.get_objects()), sys.getallocatedblocks()


def check_nothing_grows(act: Callable[[], Any], *objects: Any, times: int = 10_000) -> None:
    """Do something very often; afterwards no object has more references, and there are no more objects or blocks."""
    for _ in range(100):
        act()
    counts, number, blocks = held(*objects)
    for _ in range(times):
        act()
    counts_after, number_after, blocks_after = held(*objects)
    assert counts_after == counts
    # a leak would be one each time; numbers and dicts take and give a few of their own
    assert number_after - number < times // 20 and blocks_after - blocks < times // 20
