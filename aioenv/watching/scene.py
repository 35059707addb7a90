"""Slots as tiles of one viser scene: `MujocoTiles` in 3D, `ImageTiles` as images.

Each geom of a model is one mesh with an instance for each slot, so that an update is a few arrays, however many slots
there are. (mjviser's scene draws fixed geoms once for all envs, gives models the same names, and its Pillow is too new
for moviepy.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import copy
from enum import IntEnum
from typing import Any, NamedTuple

import mujoco
import numpy as np
import numpy.typing as npt
import trimesh
import viser
import viser.transforms

from aioenv.ipc.messages import load
from aioenv.state.model_edits import set_field, write_fields
from aioenv.state.render_source import MujocoSource, load_model, patch_model
from aioenv.watching.messages import PageUpdate, Setup

__all__ = ["FOV", "GAP", "ImageTiles", "MujocoTiles", "ShownModel", "arrange"]

Floats = npt.NDArray[np.float64]


class _GeomType(IntEnum):
    """Types of geoms, as ints."""

    PLANE = int(mujoco.mjtGeom.mjGEOM_PLANE)
    HFIELD = int(mujoco.mjtGeom.mjGEOM_HFIELD)
    SPHERE = int(mujoco.mjtGeom.mjGEOM_SPHERE)
    CAPSULE = int(mujoco.mjtGeom.mjGEOM_CAPSULE)
    ELLIPSOID = int(mujoco.mjtGeom.mjGEOM_ELLIPSOID)
    CYLINDER = int(mujoco.mjtGeom.mjGEOM_CYLINDER)
    BOX = int(mujoco.mjtGeom.mjGEOM_BOX)
    MESH = int(mujoco.mjtGeom.mjGEOM_MESH)


_FREE, _SLIDE = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_SLIDE)
# geoms of these groups are shown, as by mjvOption
_GROUPS = 3
_GREY = (0.5, 0.5, 0.5, 1.0)
FOV = math.radians(50)
_TEXT_S = 0.5
_LETTER = 0.045  # the height of letters, of tiles of width 1: 40 of them fit
GAP = 1.3  # tiles are so much larger than what they show
_LINES = 4  # of the ground, for each tile


class View(NamedTuple):
    """The places of tiles, and the view of all of them.

    Attributes:
        places: float64 `(k, 3)`, the middle of each tile: in rows, the first one at the back.
        width: of all tiles, in x; depth: in y.
        position, target: of the camera.
    """

    places: Floats
    width: float
    depth: float
    position: tuple[float, float, float]
    target: tuple[float, float, float]

    @classmethod
    def of(cls, k: int, width: float, depth: float, *, height: float) -> View:
        """Arrange k tiles of this width and depth; with height 0 they are seen from above, else from the front."""
        columns = math.ceil(math.sqrt(k))
        rows = math.ceil(k / columns)
        places = np.zeros((k, 3))
        places[:, 0] = (np.arange(k) % columns - (columns - 1) / 2) * width
        places[:, 1] = ((rows - 1) / 2 - np.arange(k) // columns) * depth
        width, depth = columns * width, rows * depth
        away = 1.05 * max(0.65 * width, depth) / (2 * math.tan(FOV / 2))  # windows are half as wide again as high
        if not height:
            return cls(places, width, depth, (0.0, 0.0, away), (0.0, 0.0, 0.0))
        return cls(places, width, depth, (0.0, -0.85 * away, 0.8 * away + height), (0.0, -0.02 * away, height / 2))


class Labels:
    """A label for each tile.

    Args:
        server: the page.
        slots: the slots that are shown.
        places: where the labels stand.
        height: of their letters, in metres.
    """

    def __init__(self, server: viser.ViserServer, slots: Sequence[int], places: Floats, height: float) -> None:
        self._slots = slots
        self._texts = [""] * len(slots)
        self._written_s = 0.0
        self._handles = [
            server.scene.add_label(
                f"/labels/{slot}",
                f"slot {slot}",
                position=place,
                font_size_mode="scene",
                font_scene_height=height,
                anchor="bottom-center",
            )
            for slot, place in zip(slots, places, strict=True)
        ]

    def write(self, update: PageUpdate) -> None:
        """Write slot, return and length of the current episode, and the return of the last one, now and then.

        A browser that lays out new texts all the time shows none.
        """
        now = time.monotonic()
        if now - self._written_s < _TEXT_S:
            return
        self._written_s = now
        for number, slot in enumerate(self._slots):
            last = update.last_returns[number]
            text = f"slot {slot}"
            if (length := update.lengths[number]) >= 0:
                text += f": {update.returns[number]:,.1f} in {length} steps"
            if not np.isnan(last):
                text += f" (last {last:,.1f})"
            if update.paused[number]:
                text += ", paused"
            if text != self._texts[number]:
                self._texts[number] = self._handles[number].text = text


class ImageTiles:
    """The images of envs that draw themselves.

    Args:
        server: the page.
        setup: what is shown.
    """

    def __init__(self, server: viser.ViserServer, setup: Setup) -> None:
        self._server = server
        self._slots = setup.slots
        self._images: dict[int, viser.ImageHandle] = {}
        self._view: View | None = None
        self._labels: Labels | None = None
        server.scene.set_up_direction("+y")

    def show(self, update: PageUpdate) -> None:
        """Show the images that have changed."""
        for row, image in update.images.items():
            channels = image.reshape(*image.shape[:2], -1)
            rgb = np.repeat(channels, 3, 2) if channels.shape[2] == 1 else channels[:, :, :3]
            height = rgb.shape[0] / rgb.shape[1]  # of a width of 1
            if self._view is None:
                self._view = View.of(len(self._slots), 1.06, height + 0.16, height=0)
                top = np.array([0.0, height / 2 + 0.01, 0.0])
                self._labels = Labels(self._server, self._slots, self._view.places + top, _LETTER)
                _look(self._server, self._view)
            if row in self._images:
                self._images[row].image = rgb
                continue
            self._images[row] = self._server.scene.add_image(
                f"/images/{self._slots[row]}",
                rgb,
                1.0,
                height,
                format="jpeg",
                # an image lies face down, with its first row towards -y
                wxyz=(0.0, 1.0, 0.0, 0.0),
                position=self._view.places[row],
                cast_shadow=False,
                receive_shadow=False,
            )
        if self._labels is not None:
            self._labels.write(update)


class MujocoTiles:
    """The states of MuJoCo envs in 3D, each in its tile, over one ground.

    A body that travels stays in its tile: it comes back by one line of the ground for each that it has passed.

    Args:
        server: the page.
        setup: what is shown.
    """

    def __init__(self, server: viser.ViserServer, setup: Setup) -> None:
        self._server = server
        self._sources = setup.sources
        self._start = [ShownModel(source) for source in setup.sources]
        self._later: dict[bytes, ShownModel] = {}  # by key
        self._of = [self._start[number] for number in setup.source_of]
        self._states: list[Floats | None] = [None] * len(setup.slots)
        shown = [self._start[number] for number in sorted(set(setup.source_of))]
        self._view, self._line = arrange(len(setup.slots), shown)
        height = max(model.height for model in shown)
        top = np.array([0.0, 0.0, 1.05 * height])
        self._labels = Labels(
            server,
            setup.slots,
            self._view.places + top,
            _LETTER * self._view.width / math.ceil(math.sqrt(len(setup.slots))),
        )
        self._groups: dict[ShownModel, _Instances] = {}
        _look(server, self._view)
        grounds = [model.ground for model in shown if model.ground is not None]
        if grounds:
            server.scene.add_grid(
                "/ground",
                infinite_grid=True,
                cell_size=self._line,
                section_size=_LINES * self._line,
                cell_color=(90, 90, 90),
                section_color=(120, 120, 120),
                fade_distance=6 * self._view.width,
                shadow_opacity=0.0,
                position=(0.0, 0.0, min(grounds)),
            )

    def show(self, update: PageUpdate) -> None:
        """Show the states of an update."""
        assert update.states is not None
        changed = self._take_models(update)
        for row in np.flatnonzero(update.known).tolist():
            edits = {name: values[row] for name, values in update.edits.items()}
            state = np.frombuffer(update.rows[row]) if row in update.rows else update.states[row]
            self._of[row].read(state, edits)
            self._states[row] = self._of[row].poses()
        known = [row for row, poses in enumerate(self._states) if poses is not None]
        if changed or sum(len(group.rows) for group in self._groups.values()) != len(known):
            self._regroup(known)
        for group in self._groups.values():
            places = np.stack([self._view.places[row] for row in group.rows])
            group.show(np.stack([self._states[row] for row in group.rows]), places, self._line)  # type: ignore[misc]
        self._labels.write(update)

    def _take_models(self, update: PageUpdate) -> bool:
        """Note which model each slot has; return whether one has changed."""
        changed = False
        for row in np.flatnonzero(update.known).tolist():
            key = update.models.get(row)
            if key is None:
                continue
            if key not in self._later:
                source = update.new.get(key)
                if source is None or not source.data:
                    continue  # it was lost with a reply: the slot is shown with the model before
                theirs: MujocoSource = load(source.data)
                self._later[key] = ShownModel(theirs, None if theirs.model else self._start[source.first])
            if self._of[row] is not self._later[key]:
                self._of[row], changed = self._later[key], True
        # the run sends others again
        self._later = {key: self._later[key] for key in update.models.values() if key in self._later}
        return changed

    def _regroup(self, known: Sequence[int]) -> None:
        """Make the meshes anew, since slots have other models than before."""
        for group in self._groups.values():
            group.remove()
        rows: dict[ShownModel, list[int]] = {}
        for row in known:
            rows.setdefault(self._of[row], []).append(row)
        self._groups = {
            model: _Instances(self._server, f"/models/{number}", model, mine)
            for number, (model, mine) in enumerate(rows.items())
        }


def arrange(k: int, models: Sequence[ShownModel]) -> tuple[View, float]:
    """Return where k tiles are that each of these models fits into, and the distance of two lines of the ground."""
    width = GAP * max(model.extent[0] for model in models)
    depth = 1.2 * GAP * max(model.extent[1] for model in models)  # labels stand between the rows
    view = View.of(k, width, depth, height=max(model.height for model in models))
    return view, min(width, depth) / _LINES


class ShownModel:
    """A model, and what of it is shown.

    Args:
        source: the model.
        base: has the model that the source patches; None if the source has it itself.

    Attributes:
        extent: of the geoms at the start, in x and y, in metres; of bodies that can turn, the greater of the two.
        height: how high they reach above the ground.
        ground: the height of a plane that stands for the ground; None if there is none.
        geoms: the geoms that are shown.
    """

    def __init__(self, source: MujocoSource, base: ShownModel | None = None) -> None:
        self.model: mujoco.MjModel = load_model(source.model) if base is None else copy(base.model)
        patch_model(self.model, source.patches)
        self._data = mujoco.MjData(self.model)
        self._source = source
        self._written = np.empty(0)  # the fields that were written last
        self._looks: Floats | None = None  # sizes and colours; None once they may have changed
        self._size = mujoco.mj_stateSize(self.model, source.state_spec)
        model, data = self.model, self._data
        mujoco.mj_kinematics(model, data)
        visible = (model.geom_group < _GROUPS) & (colours_of(model)[:, 3] > 0)
        planes = model.geom_type == _GeomType.PLANE
        solid = np.flatnonzero(visible & ~planes & (model.geom_type <= _GeomType.MESH))
        reach = model.geom_rbound[solid, None]
        low = (data.geom_xpos[solid] - reach).min(0) if len(solid) else np.full(3, -1.0)
        high = (data.geom_xpos[solid] + reach).max(0) if len(solid) else np.full(3, 1.0)
        size = (high - low).tolist()
        turns = bool((model.jnt_type == _FREE).any())
        self.extent = (max(size),) * 2 if turns else (max(size[0], 0.6 * size[2]), max(size[1], size[2]))
        level = data.geom_xmat[:, 8] > 0.99
        grounds = np.flatnonzero(planes & level & ~_small(model, max(size)))
        self.ground = float(data.geom_xpos[grounds, 2].min()) if len(grounds) else None
        self.height = float(high[2] - max(low[2], 0.0 if self.ground is None else self.ground))
        self.geoms = np.concatenate([solid, np.flatnonzero(visible & planes & _small(model, max(size)))])
        travelling = np.flatnonzero(np.isin(model.jnt_type, (_FREE, _SLIDE)))
        self._travels = int(model.jnt_bodyid[travelling[0]]) if len(travelling) else None
        self._home = np.zeros(3) if self._travels is None else data.xpos[self._travels].copy()
        self._home[2] = 0

    def read(self, state: Floats, edits: dict[str, Any]) -> None:
        """Put the model into a state."""
        state = state[int(self._source.numbered) :]
        fields = state[self._size : self._source.state_size - int(self._source.numbered)]
        if self._source.fields and not np.array_equal(fields, self._written):
            self._written, self._looks = fields.copy(), None
            write_fields(self.model, self._source.fields, fields)
        for name, value in edits.items():
            self._looks = None
            set_field(self.model, name, value)
        mujoco.mj_setState(self.model, self._data, state[: self._size].copy(), self._source.state_spec)
        mujoco.mj_kinematics(self.model, self._data)

    def poses(self) -> Floats:
        """Return a row for each geom that is shown: 3 numbers of its place, 9 of its orientation, 3 of its size, 4 of
        its colour; and one more row, with the way that its body has travelled in x and y.
        """
        data, geoms = self._data, self.geoms
        if self._looks is None:
            self._looks = np.hstack([_half_sizes(self.model)[geoms], colours_of(self.model)[geoms]])
        rows = np.zeros((len(geoms) + 1, 19))
        rows[:-1, :3] = data.geom_xpos[geoms]
        rows[:-1, 3:12] = data.geom_xmat[geoms]
        rows[:-1, 12:] = self._looks
        if self._travels is not None:
            rows[-1, :2] = (data.xpos[self._travels] - self._home)[:2]
        return np.nan_to_num(rows, posinf=0, neginf=0)  # a simulation that has become unstable


class _Instances:
    """The meshes of a model, with an instance for each slot that has it.

    Args:
        server: the page.
        name: of the model in the scene.
        model: the model.
        rows: the slots that have it, by their numbers in an update.
    """

    def __init__(self, server: viser.ViserServer, name: str, model: ShownModel, rows: Sequence[int]) -> None:
        self.rows = rows
        shapes: dict[tuple[Any, ...], list[int]] = {}
        for index, geom in enumerate(model.geoms.tolist()):
            shapes.setdefault(_shape_of(model.model, geom), []).append(index)
        self._shapes: list[tuple[npt.NDArray[np.int64], Floats, viser.BatchedMeshHandle]] = []
        for number, (shape, indices) in enumerate(shapes.items()):
            vertices, faces, unit = _mesh_of(model.model, shape)
            n = len(indices) * len(rows)
            handle = server.scene.add_batched_meshes_simple(
                f"{name}/{number}",
                vertices,
                faces,
                np.tile([1.0, 0.0, 0.0, 0.0], (n, 1)),
                np.zeros((n, 3)),
                batched_scales=np.ones((n, 3)),
                batched_colors=np.full((n, 3), 128, np.uint8),
                batched_opacities=np.ones(n),
                lod="off",
                side="double" if shape[0] == _GeomType.HFIELD else "front",
                cast_shadow=False,
                receive_shadow=False,
            )
            self._shapes.append((np.array(indices), unit, handle))
        self._looks: list[Any] = [None] * len(self._shapes)

    def show(self, poses: Floats, places: Floats, line: float) -> None:
        """Move all instances.

        Args:
            poses: what `ShownModel.poses` gives for each slot.
            places: `(k, 3)`, the middle of each slot's tile.
            line: the distance of two lines of the ground.
        """
        # back by as many lines of the ground as it has passed: it stays in its tile, and moves over the ground
        offsets = places - line * np.round(poses[:, -1, :3] / line)
        for number, (indices, unit, handle) in enumerate(self._shapes):
            part = poses[:, indices]
            handle.batched_positions = (part[:, :, :3] + offsets[:, None]).reshape(-1, 3).astype(np.float32)
            turned = viser.transforms.SO3.from_matrix(part[:, :, 3:12].reshape(-1, 3, 3))
            handle.batched_wxyzs = np.nan_to_num(turned.wxyz).astype(np.float32)
            looks = part[:, :, 12:].reshape(-1, 7)
            if not np.array_equal(looks, self._looks[number]):
                self._looks[number] = looks
                scales = np.where(unit > 0, looks[:, :3] / np.where(unit > 0, unit, 1), 1)
                handle.batched_scales = scales.astype(np.float32)
                handle.batched_colors = (looks[:, 3:6].clip(0, 1) * 255).astype(np.uint8)
                handle.batched_opacities = looks[:, 6].clip(0, 1).astype(np.float32)

    def remove(self) -> None:
        """Remove all meshes from the scene."""
        for _, _, handle in self._shapes:
            handle.remove()


def _small(model: mujoco.MjModel, extent: float) -> npt.NDArray[np.bool_]:
    """Return which planes are as small as the other geoms: a table, not the ground."""
    sides = model.geom_size[:, :2]
    small: npt.NDArray[np.bool_] = (sides > 0).all(1) & (sides < extent).all(1)
    return small


def _half_sizes(model: mujoco.MjModel) -> Floats:
    """Return half the size of each geom in x, y and z; of capsules without their ends, of meshes 0."""
    sizes: Floats = model.geom_size.copy()
    kinds = model.geom_type
    sizes[kinds == _GeomType.SPHERE, 1:] = sizes[kinds == _GeomType.SPHERE, :1]
    round_ = np.isin(kinds, (_GeomType.CAPSULE, _GeomType.CYLINDER))
    sizes[round_, 2] = sizes[round_, 1]
    sizes[round_, 1] = sizes[round_, 0]
    return sizes


def colours_of(model: mujoco.MjModel) -> Floats:
    """Return the colour of each geom, float64 `(ngeom, 4)`: that of its material, or its own, as MuJoCo chooses.

    A texture is shown as its mean colour.
    """
    rgba: Floats = model.geom_rgba.astype(np.float64)
    materials = model.geom_matid
    use = (materials >= 0) & (rgba == _GREY).all(1)
    rgba[use] = model.mat_rgba[materials[use]]
    for geom in np.flatnonzero(materials >= 0).tolist():
        textures = np.atleast_1d(model.mat_texid[materials[geom]])
        for texture in textures[textures >= 0][:1].tolist():
            rgba[geom, :3] *= _mean_colour(model, texture)
    return rgba


def _mean_colour(model: mujoco.MjModel, texture: int) -> Floats:
    channels = int(model.tex_nchannel[texture])
    start = int(model.tex_adr[texture])
    count = int(model.tex_width[texture]) * int(model.tex_height[texture]) * channels
    pixels = model.tex_data[start : start + count].reshape(-1, channels)[::97, :3]
    mean: Floats = np.broadcast_to(pixels.mean(0) / 255.0, 3)
    return mean


def _shape_of(model: mujoco.MjModel, geom: int) -> tuple[Any, ...]:
    """Return a key that is equal for geoms that are one mesh, scaled."""
    kind = _GeomType(int(model.geom_type[geom]))
    if kind == _GeomType.CAPSULE:  # its ends stay round
        return kind, *model.geom_size[geom, :2].tolist()
    if kind in (_GeomType.MESH, _GeomType.HFIELD):
        return kind, int(model.geom_dataid[geom])
    return (_GeomType.ELLIPSOID if kind == _GeomType.SPHERE else kind,)


def _mesh_of(model: mujoco.MjModel, shape: tuple[Any, ...]) -> tuple[Any, Any, Floats]:
    """Return vertices, faces, and the sizes of the geom that they show (0: a size without a meaning)."""
    match shape:
        case (_GeomType.CAPSULE, radius, half):
            mesh = trimesh.creation.capsule(height=2 * half, radius=radius, count=(16, 16))
            return mesh.vertices, mesh.faces, np.array([radius, radius, half])
        case (_GeomType.MESH, number):
            start, count = int(model.mesh_vertadr[number]), int(model.mesh_vertnum[number])
            first, faces = int(model.mesh_faceadr[number]), int(model.mesh_facenum[number])
            return model.mesh_vert[start : start + count], model.mesh_face[first : first + faces], np.zeros(3)
        case (_GeomType.HFIELD, number):
            return *_height_field(model, number), np.zeros(3)
        case (_GeomType.BOX,):
            mesh = trimesh.creation.box((2.0, 2.0, 2.0))
        case (_GeomType.PLANE,):
            mesh = trimesh.creation.box((2.0, 2.0, 0.002))
            return mesh.vertices, mesh.faces, np.array([1.0, 1.0, 0.0])
        case (_GeomType.CYLINDER,):
            mesh = trimesh.creation.cylinder(radius=1.0, height=2.0, sections=24)
        case _:
            mesh = trimesh.creation.icosphere(subdivisions=2, radius=1.0)
    return mesh.vertices, mesh.faces, np.ones(3)


def _height_field(model: mujoco.MjModel, number: int) -> tuple[Any, Any]:
    rows, columns = int(model.hfield_nrow[number]), int(model.hfield_ncol[number])
    x, y, top, _ = model.hfield_size[number]
    start = int(model.hfield_adr[number])
    heights = model.hfield_data[start : start + rows * columns] * top
    across, along = np.meshgrid(np.linspace(-x, x, columns), np.linspace(-y, y, rows))
    corner = (np.arange(rows - 1)[:, None] * columns + np.arange(columns - 1)).ravel()
    faces = np.concatenate(
        [
            np.stack([corner, corner + 1, corner + columns + 1], 1),
            np.stack([corner, corner + columns + 1, corner + columns], 1),
        ]
    )
    return np.stack([across.ravel(), along.ravel(), heights], 1), faces


def _look(server: viser.ViserServer, view: View) -> None:
    """Set where the camera of a new visitor stands."""
    server.initial_camera.fov = FOV
    server.initial_camera.look_at = np.array(view.target)
    server.initial_camera.position = np.array(view.position)
