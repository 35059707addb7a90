"""Cameras and visual options: checked in the parent, sent as tuples, and made again where MuJoCo draws with them."""

from __future__ import annotations

from typing import Any, TypeAlias

import mujoco
import numpy as np

from aioenv.rendering.config import TRACKING
from aioenv.state.render_source import CameraView

__all__ = ["Camera", "Option", "ResolvedCamera", "View", "describe_option", "find_camera", "make_option", "source_view"]

# A user's argument: a camera of the model by name or number (-1 or None for the free camera), or an `MjvCamera`.
Camera: TypeAlias = "str | int | mujoco.MjvCamera | None"
# A camera as it is sent to workers: attributes of an `MjvCamera`, with arrays as tuples.
View: TypeAlias = "tuple[tuple[str, Any], ...]"

_SETTINGS = ("orthographic", "lookat", "distance", "azimuth", "elevation")
_ATTRIBUTES = ("type", "fixedcamid", "trackbodyid", *_SETTINGS)


def find_camera(model: mujoco.MjModel, asked: Camera) -> View:
    """Return the view of a camera.

    Args:
        model: the model.
        asked: a name or number of a camera of the model; None or -1 for the free camera; or an `MjvCamera`.

    Raises:
        ValueError: if the model has no such camera, with those that it has; or if an `MjvCamera` can't be drawn.
    """
    if isinstance(asked, mujoco.MjvCamera):
        _check_own(model, asked)
        return _describe(asked, _ATTRIBUTES)
    number = -1 if asked is None else asked
    if isinstance(number, str):
        number = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, number)
        if number == -1:
            names = [model.camera(i).name for i in range(model.ncam)]
            raise ValueError(f"camera: the model has no camera {asked!r}; it has {names}")
    elif isinstance(number, bool) or not isinstance(number, (int, np.integer)):
        raise ValueError(f"camera: expected a name, a number, an MjvCamera or None, got {asked!r}")
    if not -1 <= number < model.ncam:
        known = f"a number from -1 to {model.ncam - 1}" if model.ncam else "-1 (the model has no cameras)"
        raise ValueError(f"camera: expected {known}, got {asked}")
    if number >= 0:
        return _fixed(int(number))
    free = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, free)
    return _free(_describe(free, _SETTINGS))


def _check_own(model: mujoco.MjModel, camera: mujoco.MjvCamera) -> None:
    """Refuse a camera that would make MuJoCo end the process that draws it.

    Raises:
        ValueError: if it is not a camera of this model, or not of a kind that can be drawn.
    """
    kinds = mujoco.mjtCamera
    numbers = {kinds.mjCAMERA_FIXED: ("fixedcamid", model.ncam), kinds.mjCAMERA_TRACKING: ("trackbodyid", model.nbody)}
    if camera.type not in (kinds.mjCAMERA_FREE, *numbers):
        raise ValueError(
            f"camera: expected an MjvCamera that is a free, a tracking or a fixed one, got {camera.type!r}"
        )
    name, count = numbers.get(kinds(camera.type), ("", 0))
    if name and not 0 <= getattr(camera, name) < count:
        raise ValueError(
            f"camera: {name}: expected 0 to {count - 1} for this model, which has {model.ncam} cameras and "
            f"{model.nbody} bodies, got {getattr(camera, name)}"
        )
    for name in ("lookat", "distance", "azimuth", "elevation"):
        if not np.isfinite(getattr(camera, name)).all():
            raise ValueError(f"camera: {name}: expected finite numbers, got {getattr(camera, name)}")


def source_view(model: mujoco.MjModel, view: CameraView, asked: str | int | None) -> View:
    """Return the view of a vector env's slot: of the camera asked for, or for None of the env's own.

    For `TRACKING` it is the model's camera of that name, else its first camera that moves with a body, else the env's
    own view.

    Raises:
        ValueError: as `find_camera`; or if the model does not have the env's own camera.
    """
    if asked == TRACKING and mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, TRACKING) == -1:
        asked = next((i for i in range(model.ncam) if model.cam_mode[i] in _FOLLOWS), None)
    if asked is not None:
        return find_camera(model, asked)
    if view.fixed >= model.ncam:  # or MuJoCo would refuse it at the first image
        names = [model.camera(i).name for i in range(model.ncam)]
        raise ValueError(f"camera: the env itself asks for camera_id={view.fixed}, of a model that has only {names}")
    return _fixed(view.fixed) if view.fixed >= 0 else _free(view.settings)


class ResolvedCamera:
    """Gives the camera object of a view, for one image after another."""

    def __init__(self, view: View) -> None:
        self._view = view
        camera = _make_camera(view)
        self._camera = None if camera.type == _TRACKING else camera

    @property
    def camera(self) -> mujoco.MjvCamera:
        """The camera object. (A tracking camera is made again for each image, since MuJoCo writes to it.)"""
        return _make_camera(self._view) if self._camera is None else self._camera


_TRACKING = int(mujoco.mjtCamera.mjCAMERA_TRACKING)
_FOLLOWS = {int(mujoco.mjtCamLight.mjCAMLIGHT_TRACK), int(mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM)}


def _make_camera(view: View) -> mujoco.MjvCamera:
    """Make a camera object."""
    camera = mujoco.MjvCamera()
    for name, value in view:
        if isinstance(value, tuple):
            getattr(camera, name)[:] = value
        else:
            setattr(camera, name, value)
    return camera


def _fixed(number: int) -> View:
    return (("type", int(mujoco.mjtCamera.mjCAMERA_FIXED)), ("fixedcamid", number))


def _free(settings: View) -> View:
    return (("type", int(mujoco.mjtCamera.mjCAMERA_FREE)), ("fixedcamid", -1), *settings)


def _describe(camera: mujoco.MjvCamera, names: tuple[str, ...]) -> View:
    values = [(name, getattr(camera, name)) for name in names]
    return tuple((name, tuple(value.tolist()) if isinstance(value, np.ndarray) else value) for name, value in values)


# ------------------------------------------------------------ visual options

# Options as they are sent to workers: attributes of an `MjvOption`, which does not pickle, with arrays as tuples; None
# for MuJoCo's defaults.
Option: TypeAlias = "tuple[tuple[str, Any], ...] | None"

_OPTION_NAMES = tuple(name for name in dir(mujoco.MjvOption) if not name.startswith("_"))
_OPTION_LIMITS = {"label": int(mujoco.mjtLabel.mjNLABEL), "frame": int(mujoco.mjtFrame.mjNFRAME)}


def describe_option(option: Any) -> Option:
    """Return the values of an option, as they are now.

    Raises:
        ValueError: if it is not an option, or has a number that is out of range.
    """
    if option is None:
        return None
    if not isinstance(option, mujoco.MjvOption):
        raise ValueError(f"scene_option: expected a mujoco.MjvOption or None, got {option!r}")
    for name, count in _OPTION_LIMITS.items():
        if not 0 <= getattr(option, name) < count:
            raise ValueError(f"scene_option: {name}: expected 0 to {count - 1}, got {getattr(option, name)}")
    values = ((name, getattr(option, name)) for name in _OPTION_NAMES)
    return tuple((name, tuple(value.tolist()) if isinstance(value, np.ndarray) else value) for name, value in values)


def make_option(described: Option) -> mujoco.MjvOption:
    """Make an option with these values."""
    option = mujoco.MjvOption()
    for name, value in described or ():
        if isinstance(value, tuple):
            getattr(option, name)[:] = value
        else:
            setattr(option, name, value)
    return option
