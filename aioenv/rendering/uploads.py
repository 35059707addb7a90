"""The height fields, textures, meshes and planes that an OpenGL context has, and uploading those of other models.

Slots whose models differ in these take turns in one context. To upload a height field takes up to five times as long as
to draw it. So contents are kept for a while, and switching back to one of them costs almost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import mujoco
import numpy as np

from aioenv.errors import RenderError
from aioenv.rendering.contexts import gl_functions, make_plane
from aioenv.rendering.quality import RenderQuality
from aioenv.state.assets import AssetId, Assets, part_of

__all__ = ["Uploads"]

# How much memory contents that are not drawn may take in a context, in bytes, by an estimate of what OpenGL uses.
_MAX_BYTES = 128 << 20
# Bytes that OpenGL uses for each byte of an array: display lists have triangles in place of a grid or of indices.
_EXPANSION = {"hfield": 36, "mesh": 8, "tex": 2}
_PLANE_BYTES = 1 << 20
_COMPILE = 0x1300
_TEXTURE_2D, _TEXTURE_CUBE = 0x0DE1, 0x8513

Key = tuple[str, int, bytes]


class _Content(NamedTuple):
    """One content of a part of a model, in OpenGL."""

    name: int  # of a texture, or the first of its display lists
    size: int  # an estimate, in bytes
    context: Any = None  # that has it, if it is another one


class Uploads:
    """The contents of a context.

    Args:
        context: the context, which has just been made.
        model: the model that it was made for.
        assets: of the model.
        quality: the render quality.
    """

    def __init__(
        self, context: mujoco.MjrContext, model: mujoco.MjModel, assets: Assets, quality: RenderQuality
    ) -> None:
        self._context = context
        self._quality = quality
        self._gl = gl_functions()
        self._shown = dict(assets.parts)
        self._assets = assets
        self._own: dict[int, int] = {}  # the textures that the context was made with
        self._kept: OrderedDict[Key, _Content] = OrderedDict()
        self._size = 0
        self._planes = np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE)
        self._plane_keys = self._keys_of_planes(model)

    def show(self, model: mujoco.MjModel, assets: Assets) -> None:
        """Have the context, which is current, show the parts of a model.

        Args:
            model: a model with the same frame (see `Assets`).
            assets: of the model, as it was examined last.
        """
        if assets is not self._assets:
            for part, digest in assets.parts.items():
                if self._shown[part] != digest:
                    self._put(model, part, digest)
            self._assets = assets

    def _put(self, model: mujoco.MjModel, part: AssetId, digest: bytes) -> None:
        kind, number = part
        if self._gl is None:
            _UPLOAD[kind](model, self._context, number)
            self._shown[part] = part_of(model, part)
            return
        content = self._kept.get((kind, number, digest))
        if content is None:
            # as it is now: an edit in a step may not have been noticed, and that content may be another model's, too
            digest = part_of(model, part)
            content = self._kept.get((kind, number, digest)) or self._upload(model, part, digest)
        self._kept.move_to_end((kind, number, digest))
        self._refer(part, content)
        self._shown[part] = digest

    def _upload(self, model: mujoco.MjModel, part: AssetId, digest: bytes) -> _Content:
        """Upload a part without replacing others."""
        kind, i = part
        context, gl = self._context, self._gl
        if kind == "tex":
            size = 4 * int(model.tex_height[i]) * int(model.tex_width[i])
            name = _new_texture(gl)
            before = int(context.texture[i])
            self._own.setdefault(i, before)
            context.texture[i] = name
            mujoco.mjr_uploadTexture(model, context, i)
            context.texture[i] = before
        elif kind == "hfield":
            size = 4 * int(model.hfield_nrow[i]) * int(model.hfield_ncol[i])
            name = gl.glGenLists(1)
            before = context.baseHField
            context.baseHField = (name - i) % (1 << 32)
            mujoco.mjr_uploadHField(model, context, i)
            context.baseHField = before
        else:
            size = 12 * int(model.mesh_facenum[i])
            name = gl.glGenLists(2)
            before = context.baseMesh
            context.baseMesh = (name - 2 * i) % (1 << 32)
            mujoco.mjr_uploadMesh(model, context, i)
            context.baseMesh = before
        content = _Content(name, _EXPANSION[kind] * size)
        self._keep((kind, i, digest), content)
        return content

    def _keep(self, key: Key, content: _Content) -> None:
        self._kept[key] = content
        self._size += content.size
        shown = {(*part, digest) for part, digest in self._shown.items()} | {key}
        for old in list(self._kept):
            if self._size <= _MAX_BYTES:
                break
            if old not in shown and not (old[0] == "plane" and self._plane_keys[old[1]] == old[2]):
                self._drop(old)

    def _drop(self, key: Key) -> None:
        content = self._kept.pop(key)
        self._size -= content.size
        if key[0] == "tex":
            _delete_texture(self._gl, content.name)
        elif content.context is not None:
            content.context.free()
        else:
            self._gl.glDeleteLists(content.name, 2 if key[0] == "mesh" else 1)

    def _refer(self, part: AssetId, content: _Content) -> None:
        """Draw this content in place of the one that is drawn now."""
        kind, i = part
        context = self._context
        if kind == "tex":
            self._own.setdefault(i, int(context.texture[i]))
            context.texture[i] = content.name
        elif kind == "mesh":
            self._call(context.baseMesh + 2 * i, content.name)
            self._call(context.baseMesh + 2 * i + 1, content.name + 1)
        else:
            self._call(context.baseHField + i, content.name)

    def _call(self, one: int, other: int) -> None:
        """Make a display list draw another one."""
        self._gl.glNewList(one, _COMPILE)
        try:
            self._gl.glCallList(other)
        finally:
            self._gl.glEndList()

    # ------------------------------------------------------------ planes

    def _keys_of_planes(self, model: mujoco.MjModel) -> list[bytes]:
        """Return, for each plane, the values that its patches depend on."""
        which = self._planes
        sizes = model.geom_size[which]
        keys = [row.tobytes() for row in sizes]
        if not sizes[:, :2].all():  # an infinite plane
            far = np.float64(model.vis.map.zfar * model.stat.extent).tobytes()
            for index, material in enumerate(model.geom_matid[which].tolist()):
                repeat = model.mat_texrepeat[material].tobytes() if material >= 0 else b""
                keys[index] += far + repeat
        return keys

    def show_planes(self, model: mujoco.MjModel) -> None:
        """Have the context, which is current, show the planes of a model as they are now.

        Raises:
            RenderError: if they differ from those of the start, and PyOpenGL's functions are not available.
        """
        if not len(self._planes) or (keys := self._keys_of_planes(model)) == self._plane_keys:
            return
        if self._gl is None:
            raise RenderError("a plane has another size than at the start, which takes PyOpenGL's functions to draw")
        for index, (key, before) in enumerate(zip(keys, self._plane_keys, strict=True)):
            if key == before:
                continue
            self._plane_keys[index] = key
            known = ("plane", index, key)
            content = self._kept.get(known)
            if content is None:
                made = make_plane(model, int(self._planes[index]), self._quality)
                content = _Content(made.basePlane + 1, _PLANE_BYTES, made)
                self._keep(known, content)
            self._kept.move_to_end(known)
            self._call(self._context.basePlane + 1 + index, content.name)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)

    def clear(self) -> None:
        """Free the objects that MuJoCo does not know of, before it frees the context. The OpenGL context is current."""
        for i, name in self._own.items():
            self._context.texture[i] = name
        for key in list(self._kept):
            self._drop(key)


_UPLOAD: dict[str, Any] = {
    "hfield": mujoco.mjr_uploadHField,
    "tex": mujoco.mjr_uploadTexture,
    "mesh": mujoco.mjr_uploadMesh,
}


def _new_texture(gl: Any) -> int:
    import ctypes

    name = ctypes.c_uint()
    gl.glGenTextures(1, name)
    return int(name.value)


def _delete_texture(gl: Any, name: int) -> None:
    import ctypes

    gl.glDeleteTextures(1, ctypes.c_uint(name))
