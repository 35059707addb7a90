"""What of a scene is visible: from the `MjvOption` that users write to the one that is drawn with."""

from __future__ import annotations

from typing import Any, TypeAlias

import mujoco
import numpy as np

__all__ = ["Option", "describe_option", "make_option"]

# What travels: attributes of an `MjvOption`, which does not pickle; arrays as tuples. None: as it comes.
Option: TypeAlias = "tuple[tuple[str, Any], ...] | None"

_NAMES = tuple(name for name in dir(mujoco.MjvOption) if not name.startswith("_"))
_LIMITS = {"label": int(mujoco.mjtLabel.mjNLABEL), "frame": int(mujoco.mjtFrame.mjNFRAME)}


def describe_option(option: Any) -> Option:
    """What an option says, as it is now.

    Raises:
        ValueError: if it is none, or has a number that MuJoCo has no meaning for.
    """
    if option is None:
        return None
    if not isinstance(option, mujoco.MjvOption):
        raise ValueError(f"scene_option: expected a mujoco.MjvOption or None, got {option!r}")
    for name, count in _LIMITS.items():
        if not 0 <= getattr(option, name) < count:
            raise ValueError(f"scene_option: {name}: expected 0 to {count - 1}, got {getattr(option, name)}")
    values = ((name, getattr(option, name)) for name in _NAMES)
    return tuple((name, tuple(value.tolist()) if isinstance(value, np.ndarray) else value) for name, value in values)


def make_option(described: Option) -> mujoco.MjvOption:
    """A new option that says this."""
    option = mujoco.MjvOption()
    for name, value in described or ():
        if isinstance(value, tuple):
            getattr(option, name)[:] = value
        else:
            setattr(option, name, value)
    return option
