"""The sources of images: the MuJoCo model and view of an env or a vector env, and the state of each step.

This runs beside the env and needs no OpenGL: the images are drawn elsewhere.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import Wrapper

from aioenv.ipc.messages import dump
from aioenv.mujoco_versions import columns_of
from aioenv.state.assets import AssetWatch, Looks
from aioenv.state.model_edits import SHOWN, field_of, flat_fields, may_edit, seen_fields

if TYPE_CHECKING:
    import mujoco

__all__ = [
    "CameraView",
    "EnvRenderable",
    "MujocoSource",
    "PhysicsBatch",
    "PhysicsReader",
    "RenderUpdate",
    "dump_model",
    "find_physics",
    "find_pixel_renderable",
    "find_source",
    "has_source",
    "load_model",
    "patch_model",
    "process_of",
    "read_state",
    "source_of",
]


@dataclass(frozen=True)
class CameraView:
    """The view that an env renders from, set up as Gymnasium's `MujocoRenderer` does.

    Attributes:
        fixed: the number of a camera of the model; -1 for the free camera.
        settings: attributes of `MjvCamera` for the free camera, by name; arrays as tuples.
    """

    fixed: int
    settings: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class MujocoSource:
    """Everything that a renderer needs to know about one env; equal for equal models and views.

    Attributes:
        model: the model as the bytes of an MJB file.
        view: the camera that the env renders from.
        visual_options: flags of `MjvOption` that differ from the default, as (index, value).
        max_geom: how many geoms a scene may hold.
        state_spec: the parts of the state that an image depends on, of `mujoco.mjtState`.
        state_size: the number of float64 in a row, fields included.
        fields: fields of the model that follow the state in a row: those that an env may edit, or that have a value
            for each slot.
        numbered: whether a row begins with the number of its model (see `EnvRenderable`).
        patches: arrays of the model that differ from those in `model`, by name, as bytes.
    """

    model: bytes
    view: CameraView
    visual_options: tuple[tuple[int, bool], ...]
    max_geom: int
    state_spec: int
    state_size: int
    fields: tuple[str, ...] = ()
    numbered: bool = False
    patches: tuple[tuple[str, bytes], ...] = ()


# The default of mujoco.Renderer; Gymnasium's 1000 is too few for some models, and geoms are left out silently.
_MIN_GEOM = 10_000


# Modules of wrappers whose `render` returns the image of the env within.
_PASS_ON = (
    "gymnasium.core",
    "gymnasium.wrappers.common",
    "gymnasium.wrappers.array_conversion",
    "aioenv.rendering.pixels",
)


# Modules of envs whose `render` returns the image that `MujocoRenderer` draws, or none.
_PLAIN = ("gymnasium.core", "gymnasium.envs.mujoco.mujoco_env")


def find_source(env: Any, *, by_camera: bool = False) -> MujocoSource | None:
    """Return the source of an env whose innermost env has a MuJoCo `model` and `data`; None for any other env.

    An env or a wrapper with a `render` of its own may show anything, so it must draw its images itself.

    Args:
        env: the env.
        by_camera: whether images show cameras of the model, by name or number. They don't depend on the `render` of
            the innermost env.
    """
    if not has_source(env, by_camera=by_camera):
        return None
    base = env.unwrapped
    model = base.model
    edits = may_edit(env)
    fields = seen_fields(model) if edits else ()
    return source_of(model, getattr(base, "mujoco_renderer", None), fields, numbered=edits)


def has_source(env: Any, *, by_camera: bool = False) -> bool:
    """Return whether `find_source` finds a source."""
    wrapper = env
    while wrapper is not env.unwrapped:
        render = type(wrapper).render
        if getattr(render, "__module__", None) not in _PASS_ON and render.__qualname__ != "RecordVideo.render":
            return False
        wrapper = wrapper.env
    mujoco = sys.modules.get("mujoco")
    base = env.unwrapped
    model, data = getattr(base, "model", None), getattr(base, "data", None)
    if mujoco is None or not isinstance(model, mujoco.MjModel) or not isinstance(data, mujoco.MjData):
        return False
    return by_camera or getattr(getattr(type(base), "render", None), "__module__", _PLAIN[0]) in _PLAIN


def source_of(
    model: mujoco.MjModel, renderer: Any, fields: tuple[str, ...] = (), *, numbered: bool = False
) -> MujocoSource:
    """Return the source of a model.

    Args:
        model: the model.
        renderer: gives the view: Gymnasium's `MujocoRenderer`, an object with its attributes, or None.
        fields: fields of the model that images show with the value that they have in each state.
        numbered: see `MujocoSource`.
    """
    import mujoco

    options = getattr(renderer, "_vopt", None) or {}
    spec = _state_spec(mujoco, more=any(options.values()))
    return MujocoSource(
        model=dump_model(model),
        view=_view(model, renderer, mujoco),
        visual_options=tuple(sorted((int(flag), bool(value)) for flag, value in options.items())),
        max_geom=max(_MIN_GEOM, int(getattr(renderer, "max_geom", 0) or 0)),
        state_spec=spec,
        state_size=numbered + mujoco.mj_stateSize(model, spec) + sum(np.size(field_of(model, name)) for name in fields),
        fields=fields,
        numbered=numbered,
    )


def _view(model: mujoco.MjModel, renderer: Any, mujoco: Any) -> CameraView:
    """Return the view by Gymnasium's rules: a camera by id or name, else a free one that looks at the median geom.

    Gymnasium takes that median when it draws its first image. Here it is that of the model's initial state, so that
    it does not depend on when the first image was asked for.
    """
    fixed = getattr(renderer, "camera_id", None)
    if fixed is None:
        fixed = -1
    if fixed >= 0:
        return CameraView(int(fixed), ())
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    settings: dict[str, Any] = {
        "lookat": tuple(float(np.median(data.geom_xpos[:, i])) for i in range(3)) if model.ngeom else (0.0,) * 3,
        "distance": float(model.stat.extent),
    }
    for key, value in (getattr(renderer, "default_cam_config", None) or {}).items():
        if key in ("type", "fixedcamid"):  # Gymnasium always draws from a free camera then
            continue
        settings[key] = tuple(np.asarray(value, float).tolist()) if np.ndim(value) else value
    return CameraView(-1, tuple(sorted(settings.items())))


def _state_spec(mujoco: Any, *, more: bool) -> int:
    """Return the parts of the state that an image depends on: physics, and mocap bodies, which physics does not move.

    Args:
        mujoco: the module.
        more: whether visual options show more, such as controls and forces.
    """
    state = mujoco.mjtState
    if more:
        return int(state.mjSTATE_INTEGRATION)
    return int(state.mjSTATE_FULLPHYSICS) | int(state.mjSTATE_MOCAP_POS) | int(state.mjSTATE_MOCAP_QUAT)


def read_state(
    model: mujoco.MjModel, data: mujoco.MjData, row: npt.NDArray[np.float64], spec: int, fields: tuple[str, ...] = ()
) -> None:
    """Write parts of the state and then fields of the model into `row`, float64 of their size.

    Raises:
        ValueError: if they have another size.
    """
    import mujoco

    try:
        if fields:
            size = mujoco.mj_stateSize(model, spec)
            np.concatenate(flat_fields(model, fields), out=row[size:], casting="unsafe")
            mujoco.mj_getState(model, data, row[:size], spec)
        else:
            mujoco.mj_getState(model, data, row, spec)
    except (TypeError, ValueError):
        sizes = (
            f"expected a state of {len(row)} numbers, as it was at the start, got one of {_size(model, spec, fields)}"
        )
        raise ValueError(f"images: the env has made itself another MuJoCo model: {sizes}") from None


def _size(model: mujoco.MjModel, spec: int, fields: tuple[str, ...]) -> int:
    import mujoco

    return int(mujoco.mj_stateSize(model, spec) + sum(np.size(field_of(model, name)) for name in fields))


def dump_model(model: mujoco.MjModel) -> bytes:
    """Return a model, as it is now, as the bytes of an MJB file."""
    import mujoco

    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return buffer.tobytes()


def patch_model(model: mujoco.MjModel, patches: Sequence[tuple[str, bytes]]) -> None:
    """Write the patches of a source into its model."""
    for name, data in patches:
        array = getattr(model, name)
        array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)


def load_model(data: bytes) -> mujoco.MjModel:
    """Return a new model, made of the bytes of an MJB file."""
    import mujoco

    return mujoco.MjModel.from_binary_path("model.mjb", {"model.mjb": data})


# ------------------------------------------------------------ one env

# A row begins with the number of its model: 0 is the one of the start. The env may edit its model or replace it, which
# gets a new number. The new model goes to the parent once, beside the first row that shows it. A row that is longer
# than the parent has room for also goes beside the rows; a negative number stands in its place.


class RenderUpdate(NamedTuple):
    """A model, or a whole row, that is sent beside the rows.

    Attributes:
        number: the number of the model in rows; negative for a row.
        key: equal for equal models; empty for a row.
        data: the source, pickled; or the row.
        late: whether earlier images may have missed this edit.
    """

    number: int
    key: bytes
    data: bytes
    late: bool = False


_COUNT_BITS = 20


def process_of(number: int) -> int:
    """Return a number that tells the processes apart in which numbers of updates were made."""
    return abs(number) >> _COUNT_BITS


class EnvRenderable:
    """Reads what images of one env are drawn from; the env may edit its model, or make itself another one.

    Args:
        env: the env, with its wrappers.
        source: of the env as it is now.
        by_camera: see `find_source`.
        looks: when to look for edits.

    Attributes:
        source: the source of the next image.
        updates: must be sent beside the next rows; `take_updates` clears it.
    """

    def __init__(self, env: Any, source: MujocoSource, *, by_camera: bool, looks: Looks) -> None:
        self.source = self._start = self._unedited = source
        self.updates: list[RenderUpdate] = []
        self._env = env
        self._base: Any = env.unwrapped
        self._by_camera = by_camera
        self._model = self._base.model
        self._watch = AssetWatch(self._model, looks) if source.fields else None
        self._number = 0
        # random and high, so that different processes use different numbers; float64 holds them exactly
        self._count = int.from_bytes(os.urandom(4)) << _COUNT_BITS

    def refresh(self) -> bool:
        """Update `source` if the env has another model or has edited it; return whether it did.

        Raises:
            ValueError: if the new model can't be drawn.
        """
        model, watch = self._base.model, self._watch
        if model is not self._model:
            source = find_source(self._env, by_camera=self._by_camera)
            if source is None:
                raise ValueError("images: expected a MuJoCo model and data, as the env had at the start")
            self.source = self._unedited = source
            self._model = model
            if watch is not None:
                watch.watch(model)
            return True
        if watch is None or not watch.check():
            return False
        if (edited := watch.edited_arrays()) is None:
            self.source = dataclasses.replace(self._unedited, model=dump_model(model))  # the view stays
        else:
            patches = tuple((name, array.tobytes()) for name, array in edited.items())
            self.source = dataclasses.replace(self._unedited, patches=patches)
        return True

    def _compact(self) -> MujocoSource:
        """Return the source as it is sent: patches alone if the parent knows the model that they belong to."""
        if not self.source.patches:
            return self.source
        if self._unedited is self._start:
            return dataclasses.replace(self.source, model=b"")
        return dataclasses.replace(self.source, model=dump_model(self._model), patches=())

    @property
    def late(self) -> bool:
        """Whether an edit was found that images may have missed, and that was not reported yet."""
        return self._watch is not None and self._watch.late

    def note_episode_end(self) -> None:
        """Note that an episode has ended: edits that are found now were made in its steps."""
        if self._watch is not None and self._base.model is self._model:
            self._watch.note_episode_end()

    def expect_edit(self) -> None:
        """Expect an edit: the env was reset, called, or brought into a state."""
        if self._watch is not None:
            self._watch.expect_edit()

    def clear_late(self) -> None:
        """Note that a late edit was reported."""
        if self._watch is not None:
            self._watch.late = False

    def read(self, row: npt.NDArray[np.float64]) -> None:
        """Write the state that an image is drawn from into a row, and add the data to send beside it to `updates`.

        Raises:
            ValueError: as `refresh`; or if the state does not fit and nothing can be sent beside it.
        """
        base = self._base
        if not self.source.numbered:
            read_state(base.model, base.data, row[: self.source.state_size], self.source.state_spec)
            return
        if self.refresh():
            self._count += 1
            self._number = self._count
            data = dump(self._compact())
            key = blake2b(data, digest_size=16).digest()
            self.updates.append(RenderUpdate(self._number, key, data, self.late))
            self.clear_late()
        source = self.source
        size = source.state_size
        whole = row[:size] if size <= len(row) else np.empty(size)
        whole[0] = self._number
        read_state(base.model, base.data, whole[1:], source.state_spec, source.fields)
        if size > len(row):
            self._count += 1
            self.updates.append(RenderUpdate(-self._count, b"", whole.tobytes()))
            row[:] = 0
            row[0] = -self._count

    def take_updates(self) -> list[RenderUpdate]:
        """Return the data to send beside the rows that were read, and clear it."""
        updates, self.updates = self.updates, []
        return updates


def find_pixel_renderable(env: Any) -> EnvRenderable | None:
    """Return the renderable of the wrapper that makes images the observations, if there is such a wrapper."""
    while isinstance(env, Wrapper):
        try:  # not `vars(env)`: CPython makes a dict of it for good, and each step of the env is slower by 3 %
            if isinstance(renderable := getattr(env, "_renderable", None), EnvRenderable):
                return renderable
            env = env.env
        except Exception:  # raised by a property of that name
            return None
    return None


# ------------------------------------------------------------ a vector env


class PhysicsBatch(Protocol):
    """A vector env whose images can be drawn elsewhere.

    It may set the view by attributes that are named as arguments of Gymnasium's `MujocoEnv`: `camera_id`,
    `camera_name`, `default_camera_config`, `visual_options`, `max_geom`.

    For terminal images under SAME_STEP it has `final_physics_states(slots)`: the terminal states of slots whose
    episodes the last step has ended, in the same form.

    Slots may be put into states while their observations stay the same until the next step. Then it has
    `observed_physics_states(slots)`: the states that the observations show, in the same form.

    If its `pool` is a `SimPool`, images show the fields of the model that have a value for each slot.

    Attributes:
        model: the model of all slots.
    """

    model: mujoco.MjModel

    def physics_states(
        self, slots: Sequence[int] | None = None, out: npt.NDArray[np.float64] | None = None
    ) -> npt.NDArray[np.float64]:
        """Return the state of each of `slots` (None: all), as `mj_getState` gives `mjSTATE_INTEGRATION`.

        Args:
            slots: k slots.
            out: float64 `(k, n)` to write them into; None: a new array.
        """


class PhysicsReader:
    """Reads what images of a vector env are drawn from.

    Args:
        env: the innermost vector env.
        num_envs: how many slots it has.

    Attributes:
        source: the model and the view.

    Raises:
        ValueError: if its states are not float64, or of another size than its model's.
    """

    def __init__(self, env: PhysicsBatch, num_envs: int) -> None:
        import mujoco

        self._env = env
        model, whole = env.model, int(mujoco.mjtState.mjSTATE_INTEGRATION)
        fixed, name = getattr(env, "camera_id", None), getattr(env, "camera_name", None)
        if fixed is None and name is not None:
            fixed = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name)
        view = SimpleNamespace(
            camera_id=fixed,
            default_cam_config=getattr(env, "default_camera_config", None),
            _vopt=getattr(env, "visual_options", None),
            max_geom=getattr(env, "max_geom", None),
        )
        pool: Any = getattr(env, "pool", None)
        own = {name: pool.changed_field(name) for name in sorted(SHOWN)} if hasattr(pool, "changed_field") else {}
        self._fields = {name: field for name, field in own.items() if field is not None}
        self.source: MujocoSource = source_of(model, view, tuple(self._fields))
        states: Any = env.physics_states()
        expected = num_envs, mujoco.mj_stateSize(model, whole)
        got = f"{states.dtype} {states.shape}" if isinstance(states, np.ndarray) else type(states).__name__
        if got != f"float64 {expected}":
            raise ValueError(
                f"physics_states of {type(env).__name__}: expected float64 {expected}, as mj_getState gives "
                f"mjSTATE_INTEGRATION of its model, got {got}"
            )
        self._columns = columns_of(model, whole, self.source.state_spec)

    @property
    def has_finals(self) -> bool:
        """Whether the env has the states that episodes ended in."""
        return callable(getattr(self._env, "final_physics_states", None))

    def read_finals(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return what images of the ends of episodes are drawn from, for `slots` whose episodes the last step ended."""
        states: npt.NDArray[np.float64] = self._env.final_physics_states(slots)  # type: ignore[attr-defined]
        out = np.empty((len(slots), self.source.state_size))
        self._write_rows(states, slots, out)
        return out

    def read(self, slots: Sequence[int] | None, out: npt.NDArray[np.float64]) -> None:
        """Write what images of `slots` (None: all) are drawn from into `out`, float64 `(k, source.state_size)`."""
        observed = getattr(self._env, "observed_physics_states", self._env.physics_states)
        self._write_rows(observed(slots), slots, out)

    def _write_rows(
        self, states: npt.NDArray[np.float64], slots: Sequence[int] | None, out: npt.NDArray[np.float64]
    ) -> None:
        """Write the parts of whole states that images depend on, followed by the fields."""
        if not self._fields:
            states.take(self._columns, 1, out)
            return
        size = len(self._columns)
        out[:, :size] = states[:, self._columns]
        for field in self._fields.values():
            values = (field if slots is None else field[list(slots)]).reshape(len(out), -1)
            out[:, size : size + values.shape[1]] = values
            size += values.shape[1]


def find_physics(env: Any) -> PhysicsReader | None:
    """Return the reader of a vector env that is a `PhysicsBatch`; None for any other.

    Raises:
        ValueError: see `PhysicsReader`.
    """
    base = env.unwrapped
    if not callable(getattr(base, "physics_states", None)) or getattr(base, "model", None) is None:
        return None
    return PhysicsReader(base, env.num_envs)
