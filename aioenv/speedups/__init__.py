"""The path of a plain step in C, if that could be compiled when the package was installed; see `_c.pyi`.

Where it could not, all is done in Python, by the callers; the same things come of it.
"""

from __future__ import annotations

import os
import sys

__all__ = [
    "VARIABLE", "compiled", "crc32", "merge_columns", "read_columns", "read_frame", "send_express", "serve_express",
    "spin", "step_rows", "stopped_clock", "take_express", "why_not", "within", "write_frame",
]  # fmt: skip

# Set to anything but "" or "0", all is done in Python: to find out whether C is to blame for something.
VARIABLE = "AIOENV_NO_SPEEDUPS"

# what callers do without then
step_rows = read_frame = write_frame = spin = send_express = take_express = serve_express = None
read_columns = merge_columns = stopped_clock = crc32 = within = None
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
            send_express,
            serve_express,
            spin,
            step_rows,
            stopped_clock,
            take_express,
            within,
            write_frame,
        )
    except ImportError as exc:
        why_not = f"there was no C compiler, or it was for another Python ({exc})"
compiled = not why_not
