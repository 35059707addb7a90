"""The attributes of Python objects that C reads or sets, by class. A class checks its own when it is defined.

C looks attributes up by name. Without this check, an attribute that was renamed in Python alone would show at the
first step. `tests/tools/speedups_header.py` writes the names into the header that C includes.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

__all__ = ["ATTRIBUTES", "OTHERS", "read_by_c"]

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "BatchRequest": ("done", "open", "waiting"),
    "Decoder": ("_head", "_header", "_spill", "_wanted", "chain", "error", "feed", "frames"),
    "Encoder": ("chain",),
    "OutstandingRequests": ("abandoned", "generation", "next_id", "pending"),
    "ScatterChannel": ("decoder", "encoder", "fd", "requests", "send_later", "unsent"),
    "SchemaTable": ("_schemas",),
    "Worker": ("fast_channel",),
    "WorkerRequest": ("arrived", "fast_reply", "member", "request_id", "slots", "start", "stop"),
    "WorkerSlots": ("schemas", "start", "worker"),
}
# attributes of numpy's and asyncio's objects
OTHERS = ("astype", "copy", "done", "itemsize", "set_result")

_Class = TypeVar("_Class", bound=type[Any])


def read_by_c(cls: _Class) -> _Class:
    """Check a class whose attributes C looks up; used as a decorator.

    Raises:
        TypeError: if no method of the class uses one of these attributes, as if it had been renamed.
    """
    known = set(vars(cls))
    for value in vars(cls).values():
        if isinstance(value, FunctionType):
            known.update(value.__code__.co_names)
    if missing := [name for name in ATTRIBUTES[cls.__name__] if name not in known]:
        raise TypeError(f"C looks up attributes that {cls.__name__} does not have: {', '.join(missing)}")
    return cls
