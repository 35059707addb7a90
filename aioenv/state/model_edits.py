"""Edit fields of MuJoCo models, and tell which were edited: goals that move, colours and masses drawn at random.

MuJoCo's state has no fields of the model, so they are sent beside the state where an env may edit them.
"""

from __future__ import annotations

import os
import zlib
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from gymnasium import Env
from gymnasium.vector import VectorEnv

from aioenv.ipc.memory import map_shared
from aioenv.ipc.messages import dump
from aioenv.mujoco_versions import array_names

if TYPE_CHECKING:
    import mujoco

__all__ = [
    "SEEN",
    "SHOWN",
    "FieldPlace",
    "ModelEdits",
    "SharedFields",
    "check_edit",
    "editable_fields",
    "field_of",
    "flat_fields",
    "has_field",
    "implied_edits",
    "may_edit",
    "seen_fields",
    "set_field",
    "unchanged_fields",
    "write_fields",
]

# Fields that an image depends on. Masses are among them, as cameras and lights may follow a centre of mass, and so are
# the fields that make a tendon sag. (Rays of rangefinders end at their `sensor_cutoff`.)
SEEN = (
    "qpos0 jnt_pos jnt_axis jnt_group body_pos body_quat body_ipos body_iquat body_mass body_subtreemass body_inertia "
    "geom_rgba geom_pos geom_quat geom_size geom_matid geom_castshadow geom_group site_rgba site_pos site_quat "
    "site_size site_matid site_group mat_rgba mat_emission mat_specular mat_shininess mat_reflectance mat_metallic "
    "mat_roughness mat_texrepeat mat_texuniform mat_texid tendon_rgba tendon_width tendon_matid tendon_group "
    "tendon_limited tendon_range tendon_stiffness tendon_stiffnesspoly tendon_damping tendon_dampingpoly "
    "tendon_frictionloss opt.gravity actuator_group skin_rgba skin_matid skin_group skin_inflate flex_rgba flex_matid "
    "flex_group flex_radius light_type light_directional light_softness light_pos light_pos0 light_poscom0 light_dir "
    "light_dir0 light_ambient light_diffuse light_specular light_active light_castshadow light_attenuation "
    "light_cutoff light_exponent light_intensity light_range light_bulbradius vis.headlight.ambient "
    "vis.headlight.diffuse vis.headlight.specular vis.headlight.active cam_pos cam_pos0 cam_poscom0 cam_quat cam_mat0 "
    "cam_fovy cam_intrinsic cam_sensorsize cam_resolution sensor_cutoff vis.global_.fovy vis.map.znear vis.map.zfar"
).split()

# Fields in which another model of the same sizes may differ, which an env has compiled. MuJoCo does not check them.
_SHAPES = (
    "geom_type geom_dataid geom_sameframe site_type site_sameframe body_sameframe cam_mode cam_bodyid "
    "cam_targetbodyid cam_projection cam_orthographic light_mode light_bodyid light_targetbodyid"
).split()
SHOWN = frozenset((*SEEN, *_SHAPES))

# The fields of integers that are settings rather than the structure of the model.
_SETTINGS = (
    "geom_contype geom_conaffinity geom_condim geom_priority geom_matid geom_group geom_castshadow site_group "
    "site_matid light_active light_castshadow eq_active0 jnt_limited tendon_limited actuator_ctrllimited "
    "actuator_forcelimited mat_texid"
).split()
# Endings of fields that hold indices, and the size that bounds them: MuJoCo does not check indices.
_REFERENCES = {"matid": "nmat", "texid": "ntex"}
# The smallest distance of the near plane, as a part of the model's extent.
_NEAREST = 1e-6
_OPTIONS = ("gravity", "wind", "magnetic")
_NUMBERS = ("timestep", "density", "viscosity", "impratio")
# Prefixes of assets, names and what MuJoCo derives from them.
_ASSETS = tuple("mesh_ tex_ skin_ bvh_ oct_ flex name text_ tuple_ numeric_ key_ efm plugin".split())
_LARGEST = 1 << 16  # bytes of a field


def may_edit(env: Env[Any, Any]) -> bool:
    """Return whether an env may edit its model: Gymnasium's own tasks under Gymnasium's wrappers don't."""
    while env is not env.unwrapped:
        if not type(env).__module__.startswith(("gymnasium.", "aioenv.")):
            return True
        env = env.env  # type: ignore[attr-defined]
    return not type(env).__module__.startswith("gymnasium.envs.mujoco.")


def field_of(model: mujoco.MjModel, name: str) -> Any:
    """Return a field by its name, as "geom_rgba" or "opt.gravity": the live array, or a number."""
    return _getter(name)(model)


def has_field(model: mujoco.MjModel, name: str) -> bool:
    """Return whether the installed version of MuJoCo has such a field."""
    try:
        field_of(model, name)
    except AttributeError:
        return False
    return True


def flat_fields(model: mujoco.MjModel, names: tuple[str, ...]) -> list[npt.ArrayLike]:
    """Return fields by their names, each in one dimension."""
    known = _flat.setdefault(model, {})
    if names not in known:
        fields = [(name, field_of(model, name)) for name in names]
        known[names] = [field.ravel() if isinstance(field, np.ndarray) else name for name, field in fields]
    return [(field_of(model, each),) if type(each) is str else each for each in known[names]]


def set_field(model: mujoco.MjModel, name: str, value: Any) -> None:
    """Set a field by its name to a value of its size."""
    field = field_of(model, name)
    if isinstance(field, (int, float)):
        owner, _, last = name.rpartition(".")
        setattr(field_of(model, owner), last, type(field)(np.asarray(value).item()))
    else:
        field.flat = value


def implied_edits(model: mujoco.MjModel, name: str, row: int | None = None) -> dict[str, npt.NDArray[Any]]:
    """Return the edits that an edit of a field needs to show, and to move nothing else: whole fields by name.

    A geom or a site may be compiled to share the frame of its body, or of the body's inertia. Then MuJoCo takes the
    place from there and ignores the model's own. The same holds for an inertia.

    Args:
        model: the model; nothing is written to it.
        name: the field that is edited.
        row: the row of it that is edited; None for all.
    """
    import mujoco

    same = mujoco.mjtSameFrame
    owner, _, what = name.partition("_")
    rows = slice(None) if row is None else row
    frames: dict[str, npt.NDArray[Any]] = {}
    if (owner in ("geom", "site") and what in ("pos", "quat")) or name in ("body_ipos", "body_iquat"):
        frames[f"{owner}_sameframe"] = own = np.array(field_of(model, f"{owner}_sameframe"))
        own[rows] = int(same.mjSAMEFRAME_NONE)
    if owner == "body" and frames:  # geoms and sites that shared the frame of the inertia stay where they are
        for part in ("geom", "site"):
            frames[f"{part}_sameframe"] = theirs = np.array(field_of(model, f"{part}_sameframe"))
            follows = np.isin(theirs, (int(same.mjSAMEFRAME_INERTIA), int(same.mjSAMEFRAME_INERTIAROT)))
            if row is not None:
                follows &= field_of(model, f"{part}_bodyid") == row
            theirs[follows] = int(same.mjSAMEFRAME_NONE)
    return frames


def check_edit(model: mujoco.MjModel, name: str, values: npt.NDArray[Any], what: str) -> None:
    """Refuse values that MuJoCo does not check: it would draw something else, read invalid memory, or end the process.

    Args:
        model: the model.
        name: the field.
        values: values of any of its rows, of shape `(..., rows, columns)`.
        what: the edited field, for errors.

    Raises:
        ValueError: if they can't be drawn.
    """
    if name == "vis.map.znear" and not (values >= _NEAREST).all():
        raise ValueError(f"{what}: expected {_NEAREST} or more (MuJoCo ends the process otherwise)")
    if (of := _REFERENCES.get(name.rpartition("_")[2])) is not None:
        count = int(getattr(model, of))
        if values.size and not (values.min() >= -1 and values.max() < count):
            raise ValueError(f"{what}: expected numbers from -1 to {count - 1}, as the model has {of}={count}")


_getter = cache(attrgetter)
# Live arrays of models, and the names of fields that are numbers: asking for all of them takes as long as a short step.
_flat: WeakKeyDictionary[Any, dict[tuple[str, ...], list[npt.NDArray[Any] | str]]] = WeakKeyDictionary()


def seen_fields(model: mujoco.MjModel) -> tuple[str, ...]:
    """Return the fields of this model that an image depends on."""
    return tuple(name for name in (*SEEN, *_SHAPES) if has_field(model, name) and np.size(field_of(model, name)))


def write_fields(model: mujoco.MjModel, names: tuple[str, ...], row: npt.NDArray[np.float64]) -> None:
    """Set fields to the values in a row, which holds one field after the other."""
    at = 0
    for name in names:
        size = np.size(field_of(model, name))
        set_field(model, name, row[at : at + size])
        at += size


def editable_fields(model: mujoco.MjModel) -> dict[str, npt.NDArray[Any]]:
    """Return the live arrays of a model that an env may edit, by name: all numbers but assets, up to 64 KiB each."""
    fields: dict[str, npt.NDArray[Any]] = {}
    for name in array_names(model):
        field = getattr(model, name)
        if not 0 < field.nbytes <= _LARGEST or name.startswith(_ASSETS):
            continue
        if field.dtype.kind == "f" or name in _SETTINGS:
            fields[name] = field
    for name in _OPTIONS:
        fields[f"opt.{name}"] = getattr(model.opt, name)
    return fields


class ModelEdits:
    """Tells by a checksum whether a model has changed."""

    def __init__(self) -> None:
        self._model: Any = None
        self._fields: list[Any] = []

    def digest(self, model: mujoco.MjModel) -> int:
        """Return a checksum of the editable fields of a model."""
        if model is not self._model:
            self._model, self._fields = model, list(editable_fields(model).values())
            if model.hfield_data.nbytes > _LARGEST:
                self._fields.append(model.hfield_data)
        numbers = [getattr(model.opt, name) for name in _NUMBERS]
        return zlib.crc32(b"".join([*self._fields, np.array(numbers).tobytes()]))  # of all at once: 0.2 µs a field


# ------------------------------------------------------------ fields that a native vector env shares with its parent


class FieldPlace(NamedTuple):
    """The place of the values of a field in shared memory.

    Attributes:
        path: the path of the memory, as one of the parent's descriptors.
        offset, size: the part to map, in bytes.
        shape: the shape of the values, with all slots first.
        dtype: the dtype of the values.
    """

    path: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str


class SharedFields:
    """The shared fields of one worker's vector env.

    Args:
        env: the vector env, with its wrappers.
        num_envs: how many slots it has.
        start: the slot of its first row.

    Attributes:
        error: why a field could not be shared. The next step raises it, since nothing awaits the reply to `share`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], num_envs: int, start: int) -> None:
        self._pool: Any = getattr(env.unwrapped, "pool", None)
        self._slots = slice(start, start + num_envs)
        self._shared: set[str] = set()
        self.error: Exception | None = None

    def share(self, name: str, place: FieldPlace) -> None:
        """Replace a field by shared memory, which the parent writes; sharing it again is a no-op.

        Args:
            name: the field.
            place: where its values lie.
        """
        if name in self._shared:
            return
        try:
            assert self._pool is not None
            fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = map_shared(fd, place.size, place.offset)
            finally:
                os.close(fd)
            array = np.frombuffer(memory, place.dtype, int(np.prod(place.shape))).reshape(place.shape)
            self._pool.share_model_field(name, array[self._slots])
        except Exception as exc:
            self.error = exc
            raise
        self._shared.add(name)


def unchanged_fields(env: VectorEnv[Any, Any, Any]) -> bytes | None:
    """Return the model's own values of the fields that can be shared; None if the env is no `NativeMujocoEnv`.

    It is a pickle of a dict of arrays, since few callers need it.
    """
    pool: Any = getattr(env.unwrapped, "pool", None)
    return dump(pool.unchanged_fields()) if hasattr(pool, "unchanged_fields") else None
