"""What envs edit in their MuJoCo models while they run: goals that are moved, colours and masses drawn at random.

None of it is part of MuJoCo's state, so it goes beside the state where an env may do that.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium import Env

if TYPE_CHECKING:
    import mujoco

__all__ = ["SEEN", "ModelEdits", "editable_fields", "may_edit", "seen_fields", "write_fields"]

# Fields that a picture shows, and where it is.
SEEN = (
    "body_pos body_quat geom_rgba geom_pos geom_quat geom_size geom_matid geom_castshadow geom_group site_rgba "
    "site_pos site_quat site_size site_matid site_group mat_rgba mat_emission mat_specular mat_shininess "
    "mat_reflectance mat_metallic mat_roughness mat_texrepeat mat_texuniform mat_texid tendon_rgba tendon_width "
    "tendon_matid skin_rgba skin_matid flex_rgba flex_matid light_type light_softness light_pos light_pos0 "
    "light_poscom0 light_dir light_dir0 light_ambient light_diffuse light_specular light_active light_castshadow "
    "light_attenuation light_cutoff light_exponent light_intensity light_range light_bulbradius cam_pos cam_pos0 "
    "cam_poscom0 cam_quat cam_mat0 cam_fovy cam_intrinsic"
).split()

# And those in which another model of the same sizes may differ, which an env has compiled anew.
_SHAPES = "qpos0 jnt_pos jnt_axis geom_type geom_dataid geom_sameframe site_type site_sameframe".split()

# Of fields of integers, those that are settings rather than the structure of the model.
_SETTINGS = (
    "geom_contype geom_conaffinity geom_condim geom_priority geom_matid geom_group geom_castshadow site_group "
    "site_matid light_active light_castshadow eq_active0 jnt_limited tendon_limited actuator_ctrllimited "
    "actuator_forcelimited mat_texid"
).split()
_OPTIONS = ("gravity", "wind", "magnetic")
_NUMBERS = ("timestep", "density", "viscosity", "impratio")
# Assets, names and what MuJoCo builds on them.
_ASSETS = tuple("mesh_ tex_ skin_ bvh_ oct_ flex name text_ tuple_ numeric_ key_ efm plugin".split())
_LARGEST = 1 << 16  # bytes of a field


def may_edit(env: Env[Any, Any]) -> bool:
    """Whether an env may edit its model: Gymnasium's own tasks under Gymnasium's wrappers don't."""
    while env is not env.unwrapped:
        if not type(env).__module__.startswith(("gymnasium.", "aioenv.")):
            return True
        env = env.env  # type: ignore[attr-defined]
    return not type(env).__module__.startswith("gymnasium.envs.mujoco.")


def seen_fields(model: mujoco.MjModel) -> tuple[str, ...]:
    """The fields that this model has of those that a picture shows."""
    return tuple(name for name in (*SEEN, *_SHAPES) if getattr(model, name).size)


def write_fields(model: mujoco.MjModel, names: tuple[str, ...], row: npt.NDArray[np.float64]) -> None:
    """Set fields to what a row holds of them, one after the other."""
    at = 0
    for name in names:
        field = getattr(model, name)
        field.flat = row[at : at + field.size]
        at += field.size


def editable_fields(model: mujoco.MjModel) -> dict[str, npt.NDArray[Any]]:
    """The live arrays of a model that an env may edit, by name: all numbers but assets, up to 64 KiB each."""
    fields: dict[str, npt.NDArray[Any]] = {}
    for name in model._all_fields:
        field = getattr(model, name)
        if not isinstance(field, np.ndarray) or not 0 < field.nbytes <= _LARGEST or name.startswith(_ASSETS):
            continue
        if field.dtype.kind == "f" or name in _SETTINGS:
            fields[name] = field
    for name in _OPTIONS:
        fields[f"opt.{name}"] = getattr(model.opt, name)
    return fields


class ModelEdits:
    """Tells whether a model is another than before, by a number."""

    def __init__(self) -> None:
        self._model: Any = None
        self._fields: list[Any] = []

    def digest(self, model: mujoco.MjModel) -> int:
        """A number that is another one if fields of the model are others."""
        if model is not self._model:
            self._model, self._fields = model, list(editable_fields(model).values())
        numbers = [getattr(model.opt, name) for name in _NUMBERS]
        return zlib.crc32(b"".join([*self._fields, np.array(numbers).tobytes()]))  # at once: 0.2 µs a field
