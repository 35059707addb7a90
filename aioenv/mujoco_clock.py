"""Stop the clock of MuJoCo's profiler (`MjData.timer`), which reads it before and after each phase of a step.

The clock can take a quarter of the step. MuJoCo's bindings install a clock of their own when they are imported.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from functools import cache
from types import ModuleType

from aioenv import speedups

__all__ = ["stop_clock"]


def stop_clock() -> bool:
    """Stop MuJoCo's own clock in this process, if MuJoCo has been imported.

    Durations of timers stop growing, their numbers do not; nothing else depends on the clock. (Durations in an `MjData`
    that another thread steps at this moment become meaningless.) A clock that a program or a viewer has installed
    (`mujoco.set_mjcb_time`), before or after, is kept; `mujoco.set_mjcb_time(None)` restores MuJoCo's own.

    Returns:
        Whether it is stopped. Without the compiled extension it is not: there is no C function to replace it.
    """
    mujoco = sys.modules.get("mujoco")
    if speedups.stopped_clock is None or mujoco is None or not hasattr(mujoco, "get_mjcb_time"):
        return False
    clock = _clock_variable(mujoco)
    if clock is None or mujoco.get_mjcb_time() is not None:
        return False
    if clock.value and clock.value != speedups.stopped_clock and not _is_the_bindings(clock.value):
        return False
    clock.value = speedups.stopped_clock
    return True


@cache
def _clock_variable(mujoco: ModuleType) -> ctypes.c_void_p | None:
    """Return the variable in which MuJoCo keeps the address of its clock."""
    folder = os.path.dirname(mujoco.__file__ or "")
    pattern = "libmujoco.*dylib" if sys.platform == "darwin" else "libmujoco.so*"
    for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
        try:  # only a library that is loaded already
            return ctypes.c_void_p.in_dll(ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD), "mjcb_time")
        except (OSError, ValueError):  # another version of the library, or no such variable
            continue
    return None


def _is_the_bindings(address: int) -> bool:
    """Return whether a function is the clock that MuJoCo's bindings install."""
    found = _DlInfo()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found)) or not found.file:
        return False
    folder, name = os.path.split(os.fsdecode(found.file))
    return os.path.basename(folder) == "mujoco" and name.startswith("_callbacks.")


class _DlInfo(ctypes.Structure):
    """The result of `dladdr`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )
