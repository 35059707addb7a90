"""Hide the differences between the versions of MuJoCo that aioenv works with, from 3.3 on.

MuJoCo is not imported with this module: callers have imported it.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import mujoco

__all__ = ["array_names", "columns_of", "has_only_directional_lights", "lets_sleep", "signature_of"]

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
