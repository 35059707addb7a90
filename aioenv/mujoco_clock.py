"""MuJoCo's clock: its profiler reads it several times a phase of each step, which can take a quarter of the step.

MuJoCo's bindings install one with the first `MjData`, if there is none by then.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from functools import cache
from types import ModuleType

from aioenv import speedups

__all__ = ["let_clock_go", "stop_clock"]


def stop_clock() -> bool:
    """Let MuJoCo's own clock stand still in this process, if it has been imported: `MjData.timer` counts, and says 0.

    Nothing else depends on it. A clock that somebody has installed (`mujoco.set_mjcb_time`), before or after, is kept.

    Returns:
        Whether it stands still. Without what was compiled it goes on, since there is no function to put in its place.
    """
    mujoco = sys.modules.get("mujoco")
    if speedups.stopped_clock is None or mujoco is None or getattr(mujoco, "get_mjcb_time", bool)() is not None:
        return False
    place = _place(mujoco)
    if place is None:
        return False
    if place.value and place.value != speedups.stopped_clock and not _is_of(mujoco, place.value):
        return False
    place.value = speedups.stopped_clock
    return True


def let_clock_go() -> None:
    """Let it go again, and be MuJoCo's own, whoever had installed one."""
    import mujoco

    mujoco.set_mjcb_time(None)
    mujoco.MjData(mujoco.MjSpec().compile())  # bindings that have taken it away by that install it with this


@cache
def _place(mujoco: ModuleType) -> ctypes.c_void_p | None:
    """Where MuJoCo looks which function tells the time."""
    pattern = {"win32": "mujoco.dll", "darwin": "libmujoco.*dylib"}.get(sys.platform, "libmujoco.so*")
    for path in glob.glob(os.path.join(glob.escape(_folder(mujoco)), pattern)):
        try:
            return ctypes.c_void_p.in_dll(ctypes.CDLL(path), "mjcb_time")
        except (OSError, ValueError):  # it is not what it was
            continue
    return None


def _is_of(mujoco: ModuleType, address: int) -> bool:
    """Whether a function is one of MuJoCo's bindings."""
    found = _Found()
    try:
        told = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found))
    except (AttributeError, TypeError, OSError):  # Windows has none
        return False
    return bool(told and found.file) and os.path.dirname(os.path.realpath(os.fsdecode(found.file))) == _folder(mujoco)


class _Found(ctypes.Structure):
    """What `dladdr` tells, a `Dl_info`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _folder(mujoco: ModuleType) -> str:
    return os.path.dirname(os.path.realpath(mujoco.__file__ or ""))
