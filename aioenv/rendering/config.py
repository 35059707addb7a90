"""`RenderConfig`: which images to draw, and how; `RenderQuality`: "exact", "fast" and "coarse" in MuJoCo's terms.

On software OpenGL nearly all of an image's cost is the shadow map. HalfCheetah at 84x84 takes 20 to 30 ms by default,
and 0.6 ms without shadows, reflections and multisampling. Most of the rest is not pixels but vertices. Planes are cut
into up to 200 x 200 patches (3 ms, where a model asks for it); round shapes come next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from aioenv.mujoco_versions import has_only_directional_lights
from aioenv.state.assets import LOOKS, Looks
from aioenv.worker.mujoco_gl import check_mujoco_gl

if TYPE_CHECKING:
    import mujoco

__all__ = [
    "BACKENDS",
    "COARSE",
    "EXACT",
    "FAST",
    "MAX_SIDE",
    "TRACKING",
    "CameraChoice",
    "Quality",
    "RenderConfig",
    "RenderQuality",
    "check_backend",
    "check_int",
    "check_pixels",
    "gives_arrays",
    "is_sized",
    "parse_devices",
    "parse_quality",
    "refused_by_envs",
]

TRACKING = "tracking"  # the camera that moves with a body

# Switches that are ints: name, minimum and maximum.
_NUMBERS = (
    ("shadow_map", 0, 16_384),
    ("samples", 0, 64),
    ("slices", 3, 1_000),
    ("stacks", 2, 1_000),
    ("side_stacks", 2, 1_000),
    ("plane_patches", 1, 200),
)


@dataclass(frozen=True)
class RenderQuality:
    """The details that images show. The default is "exact": the pixels of `mujoco.Renderer`.

    Args:
        shadows: cast shadows, which cost software OpenGL up to 40 times the rest of the image.
        shadow_map: the side of the shadow map, in texels; None for the model's (4096 by default).
        reflections: draw reflections: the scene once more for each reflecting plane.
        samples: multisampling: how many samples a pixel; 0 for none, None for the model's (4 by default).
        slices: how many sides round shapes (spheres, capsules, cylinders, …) have at most; None for the model's (28 by
            default).
        stacks: how many rings spheres and the ends of capsules have at most; None for the model's (16 by default).
        side_stacks: how many rings the straight sides of cylinders, capsules and the sky have at most (half as many for
            the lids of cylinders); None for as many as `stacks`. Outlines don't change. Light is computed at vertices,
            so only models whose lights are all directional when the OpenGL context is made are drawn with fewer rings.
            There 4 rings change 3 of 10,000 pixels of Gymnasium's tasks by 2 of 255 or more.
        plane_patches: how many patches a side a finite plane is cut into at most; None for its third size (up to 200).
            Light is computed at vertices, so only models whose lights are all directional are drawn with fewer patches
            than they ask for. There 32 patches change a pixel by 2 of 255.
        buffer: the size of the buffer that images are drawn in. "image": that of the image, the least to clear and to
            read. "model": at least the model's `offwidth` and `offheight`. Pixels are the same.

    Raises:
        ValueError: if a switch is neither True nor False, a number is out of range, or a word is none of those above.
    """

    shadows: bool = True
    shadow_map: int | None = None
    reflections: bool = True
    samples: int | None = None
    slices: int | None = None
    stacks: int | None = None
    side_stacks: int | None = None
    plane_patches: int | None = None
    buffer: Literal["image", "model"] = "image"

    def __post_init__(self) -> None:
        for name in ("shadows", "reflections"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name, least, most in _NUMBERS:
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most
            ):
                raise ValueError(f"{name}: expected an int from {least} to {most} or None, got {value!r}")
        if self.buffer not in ("image", "model"):
            raise ValueError(f"buffer: expected 'image' or 'model', got {self.buffer!r}")

    def prepare_model(self, model: mujoco.MjModel) -> None:
        """Write to a model, before its OpenGL context is made from it."""
        quality = model.vis.quality
        if not self.shadows:
            quality.shadowsize = 0
        elif self.shadow_map is not None:
            quality.shadowsize = self.shadow_map
        if self.samples is not None:
            quality.offsamples = self.samples
        if self.slices is not None:
            quality.numslices = min(quality.numslices, self.slices)
        if self.stacks is not None:
            quality.numstacks = min(quality.numstacks, self.stacks)

    @contextlib.contextmanager
    def prepared_planes(self, model: mujoco.MjModel) -> Iterator[None]:
        """Set the patches of planes while an OpenGL context is made, and restore them."""
        import mujoco

        if self.plane_patches is None or not has_only_directional_lights(model):
            yield
            return
        sizes = model.geom_size
        before = sizes.copy()
        # the patches of infinite planes are MuJoCo's own
        planes = (model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE) & (sizes[:, :2] > 0).all(axis=1)
        least = 2 * sizes[planes, :2].max(axis=1) / self.plane_patches
        sizes[planes, 2] = sizes[planes, 2].clip(min=least)
        try:
            yield
        finally:
            sizes[:] = before

    def side_stacks_of(self, model: mujoco.MjModel) -> int | None:
        """Return how many rings a model's straight sides have; None for as many as its other round shapes."""
        few = self.side_stacks
        fewer = few is not None and few < model.vis.quality.numstacks
        return few if fewer and has_only_directional_lights(model) else None

    def prepare_scene(self, scene: mujoco.MjvScene) -> None:
        """Set a scene's flags."""
        import mujoco

        if not self.shadows:
            scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        if not self.reflections:
            scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False


EXACT = RenderQuality()
FAST = RenderQuality(shadows=False, reflections=False, samples=0, side_stacks=4, plane_patches=32)
COARSE = dataclasses.replace(FAST, slices=14, stacks=8)

# A user's argument.
Quality: TypeAlias = "Literal['exact', 'fast', 'coarse'] | RenderQuality"


def parse_quality(quality: Quality) -> RenderQuality:
    """Return a quality by its name, or as it is.

    Raises:
        ValueError: if it is neither a name nor a `RenderQuality`.
    """
    if isinstance(quality, RenderQuality):
        return quality
    named = {"exact": EXACT, "fast": FAST, "coarse": COARSE}
    if not isinstance(quality, str) or quality not in named:
        raise ValueError(f"quality: expected one of {list(named)} or a RenderQuality, got {quality!r}")
    return named[quality]


BACKENDS = ("egl", "osmesa", "glfw", "cgl")

# The maximum width and height of an image; more than any OpenGL implementation allows.
MAX_SIDE = 16_384
_MAX_WORKERS = 1024

CameraChoice: TypeAlias = "str | int | None"


class _Default(int):
    """A size that the user did not give."""

    __slots__ = ()


@dataclass(frozen=True)
class RenderConfig:
    """Settings for drawing a vector env: `render=` draws its states, `pixels=` makes images observations.

    `render=`: MuJoCo envs are drawn by a pool of render workers, from their physics states and the edits of their
    models (see `edits`). If any env is not a MuJoCo env, or it or a wrapper has a `render` of its own, all envs of the
    vector env draw themselves. They do so in their own workers, after their replies were sent, with their own sizes and
    cameras; the arguments here have no effect. If `camera` names only cameras of the model, MuJoCo envs with a `render`
    of their own are drawn by the pool, too.

    `pixels=`: each worker draws its own MuJoCo envs as it steps them, in one OpenGL context for each model. With
    `workers` given, that many render workers draw, each state as soon as it arrives. Any other env draws itself, in its
    own size: another size is refused, unless the env draws with Gymnasium's `MujocoRenderer`. To know the shape of its
    images, each worker makes one more env, and closes it. The states of vector envs (`backend="native"`) are always
    drawn by render workers.

    Args:
        width: of an image, in pixels.
        height: of an image, in pixels.
        camera: a camera of the model by name or number, -1 for the free camera; None for the env's own view;
            "tracking" for the first camera of the model that moves with a body, or without one the env's own view. A
            list of C of them adds an axis of C before that of the height.
        quality: "exact" gives the pixels of `mujoco.Renderer`. "fast" leaves out shadows, reflections and
            multisampling, which cost software OpenGL up to 50 times the rest of the image, and cuts straight sides into
            fewer rings. "coarse" also draws round shapes with half as many sides and rings, which takes a third less
            time. A `RenderQuality` has each switch by name.
        workers: the number of render workers. None: one for each usable CPU, at most four and at most one an env; for
            `pixels=` of single envs none. (Eight processes that draw on one GPU were seen to hang: mujoco issue 3444.)
            0, for `render=` alone: the states of MuJoCo envs come with the replies, for `AsyncVectorEnv.watch`, and no
            image is drawn of them.
        backend: "egl", "osmesa", "glfw" or "cgl". "auto": the best that works (EGL, GLFW if there is a display, OSMesa;
            on macOS CGL, GLFW). None: `MUJOCO_GL` if it is set, else "auto". (With a list of `devices` EGL alone: the
            others know none.)
        depth: for `render=`, give distances from the camera's plane too, in metres, float32 without the last axis.
        segmentation: for `render=`, give the visible objects too: id and `mujoco.mjtObj`, int32 with a last axis of 2,
            -1 for the background.
        devices: the GPUs to draw on: how many, or a list of their numbers as MuJoCo counts them. Worker i draws on the
            i-th, in turn. 1 leaves the choice to MuJoCo.
        max_in_flight: for `render=`, the number of results whose images may be drawn at a time. At most two more
            results wait; older ones are dropped.
        render_only: for `pixels=`, whether the image is the whole observation. Otherwise it is one key of a Dict beside
            the observation itself, or beside the keys of one that is a Dict.
        render_key: the key of the image in that Dict.
        obs_key: the key of an observation that is not a Dict itself.
        edits: when to check whether an env has edited what OpenGL has copies of: height fields, textures, meshes,
            skins, fog. "each reset" is also after `call`, `set_attr` and `set_state`. If an edit in a step is found
            later, there is a warning, and that env is checked in each step from then on. "never" is for models with
            large assets that are not edited. (All other fields are sent with each state, and a model that an env makes
            later is always drawn.)

    Raises:
        ValueError: if a size is not a positive int of at most 16384, or another argument has none of its values.
    """

    width: int = _Default(256)
    height: int = _Default(256)
    camera: CameraChoice | Sequence[CameraChoice] = None
    quality: Quality = "exact"
    workers: int | None = None
    backend: Literal["auto", "egl", "osmesa", "glfw", "cgl"] | None = None
    depth: bool = False
    segmentation: bool = False
    devices: int | Sequence[int] = 1
    max_in_flight: int = 2
    render_only: bool = True
    render_key: str = "pixels"
    obs_key: str = "state"
    edits: Looks = "each reset"

    def __post_init__(self) -> None:
        for name in ("camera", "devices"):  # so that it is hashable, and equal to a config with tuples
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_int("width", self.width, MAX_SIDE)
        check_int("height", self.height, MAX_SIDE)
        check_int("max_in_flight", self.max_in_flight, 1024)
        if self.workers is not None and (self.workers != 0 or isinstance(self.workers, bool)):
            check_int("workers", self.workers, _MAX_WORKERS)
        parse_quality(self.quality)
        parse_devices(self.devices)
        check_backend(self.backend)
        for name in ("depth", "segmentation", "render_only"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name in ("render_key", "obs_key"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: expected a str, got {getattr(self, name)!r}")
        if self.edits not in LOOKS:
            raise ValueError(f"edits: expected one of {LOOKS}, got {self.edits!r}")
        if not self.render_only and self.render_key == self.obs_key:
            raise ValueError(f"render_key, obs_key: expected two different keys, got {self.render_key!r} twice")
        if not self.cameras or not all(_is_camera(camera) for camera in self.cameras):
            raise ValueError(f"camera: expected a name, a number, None or a list of these, got {self.camera!r}")

    @property
    def cameras(self) -> tuple[CameraChoice, ...]:
        """The cameras, be it one or several."""
        camera: Any = self.camera
        return tuple(camera) if isinstance(camera, (list, tuple)) else (camera,)

    @property
    def by_camera(self) -> bool:
        """Whether only cameras of the model are asked for, not the env's own view."""
        return None not in self.cameras and TRACKING not in self.cameras

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one env's images without the channels: `(height, width)`, or `(C, height, width)`."""
        return (*((len(self.cameras),) if self.several else ()), self.height, self.width)

    @property
    def several(self) -> bool:
        """Whether a list of cameras was given: images have an axis for them."""
        return isinstance(self.camera, (list, tuple))


def gives_arrays(config: RenderConfig) -> bool:
    """Return whether there is more than colours: depth or segmentation."""
    return config.depth or config.segmentation


def is_sized(config: RenderConfig) -> bool:
    """Return whether a size was asked for."""
    return not (isinstance(config.width, _Default) and isinstance(config.height, _Default))


def refused_by_envs(config: RenderConfig) -> str:
    """Return the arguments that envs that draw themselves can't follow, for errors; empty if there are none."""
    wants = [f"{name}=True" for name in ("depth", "segmentation") if getattr(config, name)]
    if config.camera not in (None, TRACKING):
        wants.append(f"camera={config.camera!r}")
    return ", ".join(wants)


def check_pixels(config: RenderConfig) -> None:
    """Raise a ValueError if these images can't be observations."""
    if config.workers == 0:
        raise ValueError("pixels: workers=0 is for render=; observations have to be drawn")
    for name in ("depth", "segmentation"):
        if getattr(config, name):
            raise ValueError(f"pixels: {name}=True is for render=; an observation has colours alone")


def _is_camera(camera: Any) -> bool:
    return camera is None or isinstance(camera, str) or _is_int(camera)


def check_int(name: str, value: Any, maximum: int) -> None:
    """Raise a ValueError unless it is an int from 1 to the maximum."""
    if not _is_int(value) or not 1 <= value <= maximum:
        raise ValueError(f"{name}: expected an int from 1 to {maximum}, got {value!r}")


def check_backend(backend: str | None) -> None:
    """Check a backend, and the environment variable MUJOCO_GL.

    Raises:
        ValueError: if there is no such backend.
        RenderError: if MUJOCO_GL is not a backend.
    """
    check_mujoco_gl()
    if backend is not None and backend not in (*BACKENDS, "auto"):
        raise ValueError(f"backend: expected one of {BACKENDS}, 'auto' or None, got {backend!r}")


def parse_devices(devices: Any) -> tuple[int, ...] | None:
    """Return the devices to draw on; None for one that MuJoCo chooses.

    Raises:
        ValueError: if it is neither a positive int nor a sequence of ints.
    """
    if _is_int(devices) and devices >= 1:
        return None if devices == 1 else tuple(range(devices))
    if isinstance(devices, (list, tuple, range)) and devices and all(_is_int(d) and d >= 0 for d in devices):
        return tuple(int(device) for device in devices)
    raise ValueError(f"devices: expected how many (a positive int) or a list of their numbers, got {devices!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
