"""MuJoCo's clock: its profiler (`MjData.timer`) reads it before and after each phase of a step.

That can take a quarter of the step. MuJoCo's bindings install one of their own as they are imported.
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
    """Let MuJoCo's own clock stand still in this process, if it has been imported.

    Durations of timers grow no more, while their numbers do; nothing else depends on it. (Those of an `MjData` that
    another thread steps at this moment make no sense any more.) A clock that somebody has installed
    (`mujoco.set_mjcb_time`, or a viewer), before or after, is kept; `mujoco.set_mjcb_time(None)` has MuJoCo's own back.

    Returns:
        Whether it stands still. Without what was compiled it goes on, since there is no function to put in its place.
    """
    mujoco = sys.modules.get("mujoco")
    if speedups.stopped_clock is None or mujoco is None or not hasattr(mujoco, "get_mjcb_time"):
        return False
    place = _place(mujoco)
    if place is None or mujoco.get_mjcb_time() is not None:
        return False
    if place.value and place.value != speedups.stopped_clock and not _is_the_bindings(place.value):
        return False
    place.value = speedups.stopped_clock
    return True


@cache
def _place(mujoco: ModuleType) -> ctypes.c_void_p | None:
    """Where MuJoCo looks which function tells the time."""
    folder = os.path.dirname(mujoco.__file__ or "")
    pattern = "libmujoco.*dylib" if sys.platform == "darwin" else "libmujoco.so*"
    for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
        try:  # what is loaded already, and nothing else
            return ctypes.c_void_p.in_dll(ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD), "mjcb_time")
        except (OSError, ValueError):  # another version has stayed there, or it is not what it was
            continue
    return None


def _is_the_bindings(address: int) -> bool:
    """Whether a function is the clock that MuJoCo's bindings install."""
    found = _Found()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found)) or not found.file:
        return False
    folder, name = os.path.split(os.fsdecode(found.file))
    return os.path.basename(folder) == "mujoco" and name.startswith("_callbacks.")


class _Found(ctypes.Structure):
    """What `dladdr` tells, a `Dl_info`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )
