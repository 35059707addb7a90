"""The differences between the versions of MuJoCo that aioenv works with, from 3.3 on, and its profiler's clock.

MuJoCo is not imported with this module: callers have imported it.

The profiler's clock (`MjData.timer`) is read before and after each phase of a step, which can take a quarter of the
step. MuJoCo's bindings install a clock of their own when they are imported; `stop_clock` replaces it.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import sys
import zlib
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv import speedups

if TYPE_CHECKING:
    import mujoco

__all__ = ["array_names", "columns_of", "has_only_directional_lights", "lets_sleep", "signature_of", "stop_clock"]


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


# Arrays of MjData in its arena: their sizes change with contacts and constraints, and each step computes them.
_ARENA = re.compile(r"(efc|iefc|island|map)_|(dof_island|dof_islandind|tendon_efcadr|tree_island)$")


def array_names(struct: mujoco.MjModel | mujoco.MjData) -> list[str]:
    """Return the names of the arrays of a model, or of those of an `MjData` that have the same size in each state."""
    names = getattr(struct, "_all_fields", None)  # since MuJoCo 3.3.7
    if names is None:
        names = [name for name in dir(struct) if not name.startswith("_") and not _ARENA.match(name)]
    return [name for name in names if isinstance(getattr(struct, name), np.ndarray)]


def columns_of(model: mujoco.MjModel, whole: int, part: int) -> npt.NDArray[np.int64]:
    """Find where a state of the parts `part` is within one of the parts `whole`, as `mj_extractState` does."""
    import mujoco

    columns: list[int] = []
    at = 0
    for bit in range(whole.bit_length()):  # the parts lie in the order of their bits
        size = mujoco.mj_stateSize(model, whole & 1 << bit)
        if part & 1 << bit:
            columns += range(at, at + size)
        at += size
    return np.array(columns, np.int64)


def has_only_directional_lights(model: mujoco.MjModel) -> bool:
    """Return whether all lights of a model are directional."""
    import mujoco

    if hasattr(model, "light_directional"):  # before MuJoCo 3.3.3
        return bool(model.light_directional.all())
    return bool((model.light_type == mujoco.mjtLightType.mjLIGHT_DIRECTIONAL).all())


def lets_sleep(model: mujoco.MjModel) -> bool:
    """Return whether a model lets bodies sleep, which old versions don't support."""
    import mujoco

    return bool(model.opt.enableflags & int(getattr(mujoco.mjtEnableBit, "mjENBL_SLEEP", 0)))


def signature_of(model: mujoco.MjModel) -> int:
    """Return a signature of a model's structure: MuJoCo's own, or a checksum of all names where it has none."""
    signature: Any = getattr(model, "signature", None)
    return zlib.crc32(model.names) if signature is None else int(signature)
