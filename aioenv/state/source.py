"""What a MuJoCo env's images are drawn from: its model and camera, told once, and the state of each step.

This runs in the env's own worker and touches no OpenGL: images are drawn elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.state.model_edits import field_of, flat_fields, may_edit, seen_fields

if TYPE_CHECKING:
    import mujoco

__all__ = [
    "CameraView",
    "MujocoSource",
    "dump_model",
    "find_source",
    "has_source",
    "load_model",
    "patch_model",
    "read_state",
    "source_of",
]


@dataclass(frozen=True)
class CameraView:
    """The view that an env renders from, as Gymnasium's `MujocoRenderer` would set it up.

    Attributes:
        fixed: a camera of the model by number; -1 for the free camera.
        settings: attributes of `MjvCamera` for the free camera, by name; arrays as tuples.
    """

    fixed: int
    settings: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class MujocoSource:
    """All that a renderer needs to know of one env; equal for equal models and views.

    Attributes:
        model: the model as the bytes of an MJB file.
        view: where the env looks from.
        visual_options: flags of `MjvOption` that differ from the default, as (index, value).
        max_geom: how many geoms a scene may hold.
        state_spec: which parts of the state an image depends on, of `mujoco.mjtState`.
        state_size: of how many float64 a row is, with the fields.
        fields: of the model, which come behind the state: those that an env may edit, or has a value of for each slot.
        numbered: whether a row begins with the number of its model (see `subject`).
        patches: arrays of the model that are others than in `model`, by name, as bytes.
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


# mujoco.Renderer's own default; Gymnasium's 1000 is too few for some models, and cuts in silence.
_MIN_GEOM = 10_000


# Wrappers of Gymnasium's, and ours, whose `render` gives the picture of the env within.
_PASS_ON = (
    "gymnasium.core",
    "gymnasium.wrappers.common",
    "gymnasium.wrappers.array_conversion",
    "aioenv.rendering.pixels",
)


# Classes whose `render` gives the picture that `MujocoRenderer` draws, or none.
_PLAIN = ("gymnasium.core", "gymnasium.envs.mujoco.mujoco_env")


def find_source(env: Any, *, by_camera: bool = False) -> MujocoSource | None:
    """The source of an env whose innermost env has a MuJoCo `model` and `data`; None for any other env.

    An env or a wrapper with a `render` of its own may show anything: such an env must draw itself.

    Args:
        env: the env.
        by_camera: whether only cameras of the model are asked for, by name or number. These can be drawn whatever the
            `render` of the innermost env shows.
    """
    if not has_source(env, by_camera=by_camera):
        return None
    base = env.unwrapped
    model = base.model
    edits = may_edit(env)
    fields = seen_fields(model) if edits else ()
    return source_of(model, getattr(base, "mujoco_renderer", None), fields, numbered=edits)


def has_source(env: Any, *, by_camera: bool = False) -> bool:
    """Whether `find_source` finds one."""
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
    """The source of a model.

    Args:
        model: the model.
        renderer: it is seen as this would see it: Gymnasium's `MujocoRenderer`, what has its attributes, or None.
        fields: of the model, that pictures are to show as they are with each state.
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
    """Gymnasium's rules: a camera asked for by id or name, else a free one that looks at the median of all geoms.

    Gymnasium takes that median when it draws its first image; here it is that of the model's initial state, so
    that it does not depend on when an image was first asked for.
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
        if key in ("type", "fixedcamid"):  # Gymnasium makes it a free one for each picture
            continue
        settings[key] = tuple(np.asarray(value, float).tolist()) if np.ndim(value) else value
    return CameraView(-1, tuple(sorted(settings.items())))


def _state_spec(mujoco: Any, *, more: bool) -> int:
    """Which parts of the state an image depends on: physics, and mocap bodies, which physics does not move.

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
    """Write these parts of the state into `row`, float64 of their size, and then these fields of the model.

    Raises:
        ValueError: if they are of another size.
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
    """A model as the bytes of an MJB file, as it is now."""
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
    """The model of the bytes of an MJB file, a new one each time."""
    import mujoco

    return mujoco.MjModel.from_binary_path("model.mjb", {"model.mjb": data})
