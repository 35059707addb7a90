"""The fast path of a plain step in C, if it was compiled when the package was installed; see `_c.pyi`.

Otherwise each function is None, and the callers do the same work in Python, with the same results.

C reads and sets attributes of Python objects: `ATTRIBUTES` lists them by class, and a class checks its own when it is
defined. `tests/tools/speedups_header.py` writes them to `shared.h`.
"""

from __future__ import annotations

import os
import sys
from types import FunctionType
from typing import Any, TypeVar

__all__ = [
    "ATTRIBUTES",
    "OTHERS",
    "VARIABLE",
    "compiled",
    "crc32",
    "merge_columns",
    "read_by_c",
    "read_columns",
    "read_frame",
    "send_steps",
    "serve_steps",
    "spin",
    "step_below",
    "step_here",
    "step_rows",
    "stopped_clock",
    "take_replies",
    "why_not",
    "within",
    "write_frame",
]


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
# attributes of numpy's, asyncio's and Gymnasium's objects, and keys of infos
OTHERS = (
    *("_elapsed_steps", "_max_episode_steps", "env", "step"),
    *("astype", "copy", "done", "final_info", "final_obs", "itemsize", "set_result"),
)

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


# If this environment variable is set, other than to "" or "0", C is not used. It helps to find out whether C has a bug.
VARIABLE = "AIOENV_NO_SPEEDUPS"

# replaced below if the extension can be imported
step_rows = read_frame = write_frame = spin = send_steps = take_replies = serve_steps = step_here = None
read_columns = merge_columns = stopped_clock = crc32 = within = step_below = None
why_not = ""
if os.environ.get(VARIABLE, "0") not in ("", "0"):
    why_not = f"{VARIABLE} is set"
elif not getattr(sys, "_is_gil_enabled", lambda: True)():
    why_not = "this Python has no global interpreter lock"
else:
    try:
        from aioenv.speedups._c import (  # type: ignore[assignment]
            crc32,
            merge_columns,
            read_columns,
            read_frame,
            send_steps,
            serve_steps,
            spin,
            step_below,
            step_here,
            step_rows,
            stopped_clock,
            take_replies,
            within,
            write_frame,
        )
    except ImportError as exc:
        why_not = f"there was no C compiler, or it was for another Python ({exc})"
compiled = not why_not
