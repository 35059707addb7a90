"""The fast path of a plain step in C, if it was compiled when the package was installed; see `_c.pyi`.

Otherwise each function is None, and the callers do the same work in Python, with the same results.
"""

from __future__ import annotations

import os
import sys

__all__ = [
    "VARIABLE", "compiled", "crc32", "merge_columns", "read_columns", "read_frame", "send_steps", "serve_steps",
    "spin", "step_rows", "stopped_clock", "take_replies", "why_not", "within", "write_frame",
]  # fmt: skip

# If this environment variable is set, other than to "" or "0", C is not used. It helps to find out whether C has a bug.
VARIABLE = "AIOENV_NO_SPEEDUPS"

# replaced below if the extension can be imported
step_rows = read_frame = write_frame = spin = send_steps = take_replies = serve_steps = None
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
            send_steps,
            serve_steps,
            spin,
            step_rows,
            stopped_clock,
            take_replies,
            within,
            write_frame,
        )
    except ImportError as exc:
        why_not = f"there was no C compiler, or it was for another Python ({exc})"
compiled = not why_not
