"""One OpenGL context and what is drawn in it, pixel by pixel as `mujoco.Renderer` would."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderError
from aioenv.rendering.contexts import make_contexts, set_top_first
from aioenv.rendering.quality import RenderQuality
from aioenv.rendering.uploads import Uploads
from aioenv.state.assets import Assets

__all__ = ["MAX_GEOM", "TEXTURED", "OffscreenRenderer"]

# Fields of models that a context has copies of (newer versions of MuJoCo look at the copy of the first one alone).
TEXTURED = ("mat_texid", "mat_texuniform", "mat_texrepeat")

# mujoco.Renderer's own default; past it geoms are left out, with one line in MuJoCo's log.
MAX_GEOM = 10_000

_ALL = int(mujoco.mjtCatBit.mjCAT_ALL)
_FLAGS_BY_ID = (mujoco.mjtRndFlag.mjRND_SEGMENT, mujoco.mjtRndFlag.mjRND_IDCOLOR)


class OffscreenRenderer:
    """Draws states of one model, in an OpenGL context of its own. All calls must come from one thread.

    Unlike `mujoco.Renderer` it changes its size without a new context, gives depth and segmentation of one drawing,
    and takes edited textures.

    Args:
        model: the model; `quality` writes into it, and edits of it show in what is drawn afterwards.
        quality: what is drawn.
        max_geom: how many geoms a scene may hold besides the model's own.
        assets: of the model; None: they are found out.

    Attributes:
        model: the model that is drawn (see `show`).

    Raises:
        RenderError: if there is no OpenGL context to be had; its cause says why.
    """

    def __init__(
        self, model: mujoco.MjModel, quality: RenderQuality, max_geom: int = MAX_GEOM, assets: Assets | None = None
    ) -> None:
        assets = Assets(model) if assets is None else assets
        self.model = model
        self._quality = quality
        self._least = (1, 1)
        if quality.buffer == "model":
            self._least = (model.vis.global_.offwidth, model.vis.global_.offheight)
        quality.prepare_model(model)
        self._scene = mujoco.MjvScene(model, max_geom + model.ngeom + model.nsite)
        quality.prepare_scene(self._scene)
        self._gl: Any = None
        self._context: Any = None
        self._contexts: list[mujoco.MjrContext] = []
        self._uploads: Any = None
        try:
            # the window behind a context is never drawn on: its size does not matter
            self._gl = mujoco.GLContext(64, 64)
            self._gl.make_current()
            model.vis.global_.offwidth, model.vis.global_.offheight = self._least
            self._contexts = make_contexts(model, quality)
            self._context = self._contexts[0]
            self._uploads = Uploads(self._context, model, assets, quality)
            self._top_first = set_top_first()
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        except Exception as exc:
            self.close()
            raise RenderError(f"no OpenGL context: {type(exc).__name__}: {exc}") from exc
        self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        self._warm = False
        self._checked = False  # whether OpenGL has drawn an image of this size
        self._resize(*self._least)

    def _resize(self, width: int, height: int) -> None:
        self._size = (0, 0)  # or after an error here the next image would be taken for one of this size
        self._checked = False
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._rgb = np.empty((height, width, 3), np.uint8)
        self._depth = np.empty((height, width), np.float32)
        rows = slice(None, None, 1 if self._top_first else -1)  # by itself, OpenGL has the bottom row first
        self._colours, self._distances = self._rgb[rows], self._depth[rows]
        wanted = (max(width, self._least[0]), max(height, self._least[1]))
        if wanted != (self._context.offWidth, self._context.offHeight):
            self.make_current()
            mujoco.mjr_resizeOffscreen(*wanted, self._context)
        self._size = (width, height)

    def make_current(self) -> None:
        """Make this thread draw here: needed where it has several contexts, before anything else."""
        self._gl.make_current()

    def show(self, model: mujoco.MjModel, assets: Assets) -> None:
        """Draw this model from now on, in the context that is current.

        Args:
            model: of the same making; edits of its fields show, too.
            assets: what OpenGL is to have of it.
        """
        self.model = model
        self._uploads.show(model, assets)
        self.assign_textures()

    def look(
        self, data: mujoco.MjData, camera: mujoco.MjvCamera, option: mujoco.MjvOption, width: int, height: int
    ) -> None:
        """Take in a state, whose derived quantities must be up to date: what is drawn next shows it.

        Args:
            data: the state.
            camera: where it is seen from; a tracking one is written to.
            option: what is visible.
            width: of the images that follow, in pixels.
            height: likewise.
        """
        if self._size != (width, height):
            self._resize(width, height)
        self._uploads.show_planes(self.model)
        # MuJoCo lays an infinite plane around the camera of the scene before: without this, another state's or view's
        mujoco.mjv_updateCamera(self.model, data, camera, self._scene)
        mujoco.mjv_updateScene(self.model, data, option, None, camera, _ALL, self._scene)
        if not self._warm:  # the first image of a new context can differ from all later ones
            self._warm = True
            mujoco.mjr_render(self._rect, self._scene, self._context)
            mujoco.mjr_readPixels(self._rgb, None, self._rect, self._context)

    def draw(self, out: npt.NDArray[np.uint8]) -> None:
        """Draw colours into `out`, uint8 of shape (height, width, 3).

        Raises:
            RenderError: if OpenGL can't draw images of this size; what `out` holds then is of no use.
        """
        if not self._checked:
            mujoco.mjr_getError()  # of whatever went before
        rgb = self._rgb
        at_once = self._top_first and out.shape == rgb.shape and out.dtype == rgb.dtype and out.flags.c_contiguous
        mujoco.mjr_render(self._rect, self._scene, self._context)
        mujoco.mjr_readPixels(out if at_once else rgb, None, self._rect, self._context)
        if not self._checked:
            self._check()
        if not at_once:
            out[:] = self._colours

    def _check(self) -> None:
        """See that the first image of a size was drawn: if no memory was to be had for it, it is black."""
        error = mujoco.mjr_getError()
        if error:
            width, height = self._size
            self._size = (0, 0)
            raise RenderError(
                f"OpenGL can't draw an image of {width} x {height} with {self._context.offSamples} samples a pixel "
                f"(error {error}); make it smaller, or use RenderQuality(samples=0)"
            )
        self._checked = True

    def measure(self, depth: npt.NDArray[np.float32] | None, segmentation: npt.NDArray[np.int32] | None) -> None:
        """Draw distances and what is where.

        Args:
            depth: float32 of shape (height, width), filled with distances from the camera's plane, in metres.
            segmentation: int32 of shape (height, width, 2), filled with the id of the object seen and its type
                (`mujoco.mjtObj`); -1 and -1 where nothing is.
        """
        scene = self._scene
        before = scene.flags.copy()
        for flag in _FLAGS_BY_ID:
            scene.flags[flag] = True
        try:
            mujoco.mjr_render(self._rect, scene, self._context)
        finally:
            scene.flags[:] = before
        colours = self._rgb if segmentation is not None else None
        mujoco.mjr_readPixels(colours, self._depth if depth is not None else None, self._rect, self._context)
        if depth is not None:
            depth[:] = self._metres(self._distances)
        if segmentation is not None:
            segmentation[:] = self._objects()[_numbers(self._colours)]

    def _metres(self, stored: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Distances from a depth buffer that holds 1 at the near plane and 0 at the far one.

        OpenGL computes its projection in float32, so the planes' terms are rounded likewise: the result is then that of
        `mujoco.Renderer`, bit by bit.
        """
        extent = self.model.stat.extent
        near = np.float32(self.model.vis.map.znear * extent)
        far = np.float32(self.model.vis.map.zfar * extent)
        z = stored.astype(np.float64)
        if self._scene.camera[0].orthographic:
            return np.asarray(far - z * (far - near), np.float64)
        half = np.float32(0.5)
        numerator = half * (np.float32(2) * far * near / (far - near))
        offset = half * ((far + near) / (far - near)) - half
        return np.asarray(numerator / (z + offset), np.float64)

    def _objects(self) -> npt.NDArray[np.int32]:
        """(id, type) of what each number stands for; number 0 is the background."""
        scene = self._scene
        table = np.full((scene.ngeom + 1, 2), -1, np.int32)
        for geom in scene.geoms[: scene.ngeom]:
            if geom.segid != -1:
                table[geom.segid + 1] = geom.objid, geom.objtype
        return table

    def upload_texture(self, texture: int) -> None:
        """Show the edits of a texture: OpenGL has a copy of its own."""
        mujoco.mjr_uploadTexture(self.model, self._context, texture)

    def assign_textures(self) -> None:
        """Show the edits of which material has which texture, and how: the context has copies of its own."""
        for name in TEXTURED:
            values = getattr(self.model, name).ravel()
            getattr(self._context, name)[: len(values)] = values

    def close(self) -> None:
        """Free the OpenGL context. Idempotent."""
        contexts, self._contexts, self._context = self._contexts, [], None
        gl, self._gl = self._gl, None
        uploads, self._uploads = self._uploads, None
        if gl is not None:
            if contexts:
                gl.make_current()  # or it would free another context's objects
            if uploads is not None:
                uploads.clear()
            for context in contexts:
                context.free()
            gl.free()


def _numbers(rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Numbers that were drawn as colours."""
    parts = rgb.astype(np.uint32)
    return np.asarray(parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16, np.uint32)
