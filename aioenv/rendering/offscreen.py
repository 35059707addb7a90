"""`OffscreenRenderer`: an OpenGL context, and drawing in it, with the pixels of `mujoco.Renderer`.

`acquire_offscreen` has models that differ only in contents that can be uploaded share one context.
"""

from __future__ import annotations

import threading
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderError
from aioenv.rendering.config import RenderQuality
from aioenv.rendering.contexts import Uploads, make_contexts, set_top_first
from aioenv.state.assets import Assets

__all__ = ["MAX_GEOM", "TEXTURED", "OffscreenRenderer", "acquire_offscreen", "release_offscreen"]

# Fields of models that a context has copies of. (Newer versions of MuJoCo read the copy of the first one alone.)
TEXTURED = ("mat_texid", "mat_texuniform", "mat_texrepeat")

# The default of mujoco.Renderer. Geoms past it are not drawn, with one line in MuJoCo's log.
MAX_GEOM = 10_000

_ALL = int(mujoco.mjtCatBit.mjCAT_ALL)
# Contexts that no renderer uses are kept for a while: an env that makes itself one model after another may need them.
_MAX_IDLE = 2
_FLAGS_BY_ID = (mujoco.mjtRndFlag.mjRND_SEGMENT, mujoco.mjtRndFlag.mjRND_IDCOLOR)


class OffscreenRenderer:
    """Draws states of one model, in an OpenGL context of its own. All calls must come from one thread.

    Unlike `mujoco.Renderer` it changes its size without a new context, reads depth and segmentation of one drawing, and
    shows edited textures.

    Args:
        model: the model; `quality` writes to it, and later edits of it show.
        quality: the render quality.
        max_geom: how many geoms a scene may have besides the model's own.
        assets: of the model; None to compute them.

    Attributes:
        model: the model that is drawn (see `use_model`).

    Raises:
        RenderError: if no OpenGL context can be made; its cause says why.
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
            # nothing is drawn into the window of a context: its size does not matter
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
        self._warm = False  # whether an image was drawn
        self._checked = False  # whether an image of this size was drawn
        self._resize(*self._least)

    def _resize(self, width: int, height: int) -> None:
        self._size = (0, 0)  # or after an error here the next image would seem to be of this size
        self._checked = False
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._rgb = np.empty((height, width, 3), np.uint8)
        self._depth = np.empty((height, width), np.float32)
        rows = slice(None, None, 1 if self._top_first else -1)  # OpenGL's default is the bottom row first
        self._colours, self._distances = self._rgb[rows], self._depth[rows]
        wanted = (max(width, self._least[0]), max(height, self._least[1]))
        if wanted != (self._context.offWidth, self._context.offHeight):
            self.make_current()
            mujoco.mjr_resizeOffscreen(*wanted, self._context)
        self._size = (width, height)

    def make_current(self) -> None:
        """Make this context the one that the thread draws in, which is necessary if it has several."""
        self._gl.make_current()

    def use_model(self, model: mujoco.MjModel, assets: Assets) -> None:
        """Draw this model from now on, in the context that is current.

        Args:
            model: a model with the same frame (see `Assets`); edits of its fields show.
            assets: of the model.
        """
        self.model = model
        self._uploads.show(model, assets)
        self.assign_textures()

    def update_scene(
        self, data: mujoco.MjData, camera: mujoco.MjvCamera, option: mujoco.MjvOption, width: int, height: int
    ) -> None:
        """Have the next images show a state, whose derived quantities must be up to date.

        Args:
            data: the state.
            camera: where it is seen from; a tracking one is written to.
            option: the visual options.
            width: of the images, in pixels.
            height: of the images, in pixels.
        """
        if self._size != (width, height):
            self._resize(width, height)
        self._uploads.show_planes(self.model)
        # MuJoCo centres an infinite plane at the camera of the last scene: without this, that of another state or view
        mujoco.mjv_updateCamera(self.model, data, camera, self._scene)
        mujoco.mjv_updateScene(self.model, data, option, None, camera, _ALL, self._scene)
        if not self._warm:  # the first image of a new context can differ from all later ones
            self._warm = True
            mujoco.mjr_render(self._rect, self._scene, self._context)
            mujoco.mjr_readPixels(self._rgb, None, self._rect, self._context)

    def draw(self, out: npt.NDArray[np.uint8]) -> None:
        """Draw colours into `out`, uint8 of shape (height, width, 3).

        Raises:
            RenderError: if OpenGL can't draw images of this size; the contents of `out` are undefined then.
        """
        if not self._checked:
            mujoco.mjr_getError()  # clears earlier errors
        rgb = self._rgb
        direct = self._top_first and out.shape == rgb.shape and out.dtype == rgb.dtype and out.flags.c_contiguous
        mujoco.mjr_render(self._rect, self._scene, self._context)
        mujoco.mjr_readPixels(out if direct else rgb, None, self._rect, self._context)
        if not self._checked:
            self._check()
        if not direct:
            out[:] = self._colours

    def _check(self) -> None:
        """Raise unless the first image of a size was drawn: it is black if there was no memory for it."""
        error = mujoco.mjr_getError()
        if error:  # of the scene, maybe: a light whose cutoff is 120 degrees, say. Then reading alone has none
            mujoco.mjr_readPixels(self._rgb, None, self._rect, self._context)
            error = mujoco.mjr_getError()
        if error:
            width, height = self._size
            self._size = (0, 0)
            raise RenderError(
                f"OpenGL can't draw an image of {width} x {height} with {self._context.offSamples} samples a pixel "
                f"(error {error}); make it smaller, or use RenderQuality(samples=0)"
            )
        self._checked = True

    def draw_depth(self, depth: npt.NDArray[np.float32] | None, segmentation: npt.NDArray[np.int32] | None) -> None:
        """Draw depth and segmentation images.

        Args:
            depth: float32 of shape (height, width), filled with distances from the camera's plane, in metres.
            segmentation: int32 of shape (height, width, 2), filled with the id of the visible object and its type
                (`mujoco.mjtObj`); -1 and -1 for the background.
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
            segmentation[:] = self._objects()[_segmentation_numbers(self._colours)]

    def _metres(self, stored: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Return the distances for a depth buffer that holds 1 at the near plane and 0 at the far one.

        OpenGL computes its projection in float32, so the terms of the planes are rounded likewise: the result equals
        that of `mujoco.Renderer` bit for bit.
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
        """Return the (id, type) that each segmentation number stands for; number 0 is the background."""
        scene = self._scene
        table = np.full((scene.ngeom + 1, 2), -1, np.int32)
        for geom in scene.geoms[: scene.ngeom]:
            if geom.segid != -1:
                table[geom.segid + 1] = geom.objid, geom.objtype
        return table

    def upload_texture(self, texture: int) -> None:
        """Show the edits of a texture, of which OpenGL has a copy."""
        mujoco.mjr_uploadTexture(self.model, self._context, texture)

    def assign_textures(self) -> None:
        """Show the edits of the textures of materials, of which the context has copies."""
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
                gl.make_current()  # or objects of another context would be freed
            if uploads is not None:
                uploads.clear()
            for context in contexts:
                context.free()
            gl.free()


def _segmentation_numbers(rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Return the numbers that were drawn as colours."""
    parts = rgb.astype(np.uint32)
    return np.asarray(parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16, np.uint32)


# ------------------------------------------------------------ sharing contexts


class _ThreadContexts(threading.local):
    """The shared renderers of one thread, which alone may draw with them: a worker may be a thread of its parent."""

    def __init__(self) -> None:
        self.users: dict[OffscreenRenderer, int] = {}
        self.by_key: dict[Any, OffscreenRenderer] = {}
        self.idle: list[Any] = []  # keys, the longest idle first


_contexts = _ThreadContexts()


def acquire_offscreen(
    model: mujoco.MjModel, assets: Assets, quality: RenderQuality, max_geom: int
) -> OffscreenRenderer:
    """Return a renderer that fits a model: one that is used for other models already, or a new one.

    `quality` writes to the model of a new one. Call `release_offscreen` when the model is drawn no more.

    Raises:
        RenderError: if no OpenGL context can be made.
    """
    contexts = _contexts
    key = (assets.frame, quality, max_geom)
    offscreen = contexts.by_key.get(key)
    if offscreen is None:
        offscreen = OffscreenRenderer(model, quality, max_geom, assets)
        contexts.by_key[key], contexts.users[offscreen] = offscreen, 0
    elif key in contexts.idle:
        contexts.idle.remove(key)
    contexts.users[offscreen] += 1
    return offscreen


def release_offscreen(offscreen: OffscreenRenderer) -> None:
    """End one use of a renderer; when no renderer is used any more, all contexts are freed."""
    contexts = _contexts
    contexts.users[offscreen] -= 1
    if not contexts.users[offscreen]:
        contexts.idle.append(next(key for key, known in contexts.by_key.items() if known is offscreen))
    most = _MAX_IDLE if any(contexts.users.values()) else 0
    while len(contexts.idle) > most:
        gone = contexts.by_key.pop(contexts.idle.pop(0))
        del contexts.users[gone]
        gone.close()
