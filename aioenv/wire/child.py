"""Whether this process was started by aioenv, and may start others.

A worker may: an env of envs is a fine thing. But a module whose own code starts workers when it is imported is imported
by these again, if a factory is of that module, and so on without end. (Python's multiprocessing guards `__main__` only,
which we never import.)
"""

from __future__ import annotations

import sys

__all__ = ["be_child", "imported_now"]

_child = False


def be_child() -> None:
    """This is a worker, or a fork server."""
    global _child
    _child = True


def imported_now() -> str | None:
    """In a process that aioenv has started: the module that is being imported just now, if one is."""
    if not _child:
        return None
    for frame in sys._current_frames().values():
        module: str | None = None
        while frame is not None:
            if frame.f_code.co_name == "<module>":
                module = frame.f_globals.get("__name__")
            elif frame.f_code.co_name == "_load_unlocked" and module not in (None, "__main__"):
                return module
            frame = frame.f_back  # type: ignore[assignment]
    return None
