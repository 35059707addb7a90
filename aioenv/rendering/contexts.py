"""MuJoCo's rendering contexts: made for a quality, cheaper where images are nearly the same, and their uploaded data.

A context holds copies of a model's height fields, textures, meshes and planes. Slots whose models differ in these take
turns in one context. To upload a height field takes up to five times as long as to draw it. So contents are kept for a
while, and switching back to one of them costs almost nothing.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import mujoco
import numpy as np

from aioenv.errors import RenderError
from aioenv.rendering.config import RenderQuality
from aioenv.state.assets import AssetId, Assets, part_of
from aioenv.worker.mujoco_setup import plain_context

__all__ = ["Uploads", "gl_functions", "make_contexts", "make_plane", "opengl_name", "set_top_first"]


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


# OpenGL's constants: to import `OpenGL.GL`, which has them, takes 0.1 s.
_TEXTURE_2D, _TEXTURE1, _ACTIVE_TEXTURE = 0x0DE1, 0x84C1, 0x84E0
_FRAMEBUFFER, _FRAMEBUFFER_BINDING, _FRAMEBUFFER_COMPLETE = 0x8D40, 0x8CA6, 0x8CD5
_COMPILE, _RENDERER, _EXTENSIONS = 0x1300, 0x1F01, 0x1F03
_PACK_INVERT, _PACK_INVERT_EXTENSION = 0x8758, "GL_MESA_pack_invert"
# Internal format, format and type of a shadow map: MuJoCo's, and the same 24 bits of depth without stencil.
_DEPTH24_STENCIL8 = (0x88F0, 0x84F9, 0x84FA)
_DEPTH24 = (0x81A6, 0x1902, 0x1405)
# MuJoCo's display lists of shapes: how many there are, and which are cylinders, closed and open.
_SHAPES, _CYLINDERS = 8, (3, 4)


def make_contexts(model: mujoco.MjModel, quality: RenderQuality) -> list[mujoco.MjrContext]:
    """Make the rendering context of a model, in the OpenGL context that is current.

    Args:
        model: the model; its `vis` has been prepared by the quality.
        quality: the render quality.

    Returns:
        The model's context, and others that it refers to, which must be freed with it.
    """
    gl = gl_functions()
    stacks = quality.side_stacks_of(model) if gl is not None else None
    made: list[mujoco.MjrContext] = []
    try:
        shapes = None
        if stacks is not None:  # before the model's context: the context that is made last sets the fog
            shapes = _make_shapes(stacks, model.vis.quality.numslices)
            made.append(shapes)
        with quality.prepared_planes(model):
            own = _make(model)
        made.insert(0, own)
        if shapes is not None:
            _replace_cylinders(gl, own, shapes)
        if gl is not None and own.shadowSize and opengl_name().startswith("llvmpipe"):
            _drop_stencil(gl, own)
    except BaseException:
        for context in made:  # now: later another OpenGL context is current, whose objects have the same numbers
            context.free()
        raise
    return made


def _make(model: mujoco.MjModel) -> mujoco.MjrContext:
    context: mujoco.MjrContext = plain_context(mujoco)(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)
    return context


def _make_shapes(stacks: int, slices: int) -> mujoco.MjrContext:
    """Make a context that has only MuJoCo's shapes, of so many stacks and slices."""
    empty = mujoco.MjModel.from_xml_string("<mujoco/>")
    quality, buffer = empty.vis.quality, empty.vis.global_
    quality.numstacks, quality.numslices = stacks, slices
    quality.shadowsize = quality.offsamples = 0
    buffer.offwidth = buffer.offheight = 1
    return _make(empty)


def make_plane(model: mujoco.MjModel, geom: int, quality: RenderQuality) -> mujoco.MjrContext:
    """Make a context that has one plane of a model, cut into patches as the model is now.

    Args:
        model: the model.
        geom: the number of the plane.
        quality: the render quality.
    """
    spec = mujoco.MjSpec()
    material = int(model.geom_matid[geom])
    if material >= 0:
        spec.add_material(name="m", texrepeat=model.mat_texrepeat[material])
    plane = spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[1, 1, 1])
    if material >= 0:
        plane.material = "m"
    alone = spec.compile()
    with quality.prepared_planes(model):
        alone.geom_size[0] = model.geom_size[geom]
    alone.stat.extent = model.stat.extent
    for name in ("zfar", "fogstart", "fogend"):  # the context that is made last sets the fog
        setattr(alone.vis.map, name, getattr(model.vis.map, name))
    alone.vis.rgba.fog[:] = model.vis.rgba.fog
    shown, buffer = alone.vis.quality, alone.vis.global_
    shown.numquads = shown.numslices = shown.numstacks = 3  # of shapes that are not drawn
    shown.shadowsize = shown.offsamples = 0
    buffer.offwidth = buffer.offheight = 1
    return _make(alone)


def _replace_cylinders(gl: Any, context: mujoco.MjrContext, shapes: mujoco.MjrContext) -> None:
    """Have a context draw the cylinders of another one: for such geoms, the sides of capsules, arrows and the sky."""
    if context.rangeBuiltin != _SHAPES:  # a version of MuJoCo with other shapes
        return
    for shape in _CYLINDERS:
        gl.glNewList(context.baseBuiltin + shape, _COMPILE)
        try:
            gl.glCallList(shapes.baseBuiltin + shape)
        finally:
            gl.glEndList()


def _drop_stencil(gl: Any, context: mujoco.MjrContext) -> None:
    """Make the shadow map without a stencil, which nothing uses.

    MuJoCo's has 24 bits of depth and 8 bits of stencil a texel, and only the depth is cleared before each image. For
    that llvmpipe reads, masks and writes all 4096 x 4096 texels. Without a stencil it only writes them, and a small
    image takes four fifths of the time. The depths are the same, and so are the images.
    """
    unit, target = ctypes.c_int(), ctypes.c_int()
    gl.glGetIntegerv(_ACTIVE_TEXTURE, unit)
    gl.glGetIntegerv(_FRAMEBUFFER_BINDING, target)
    gl.glActiveTexture(_TEXTURE1)
    gl.glBindTexture(_TEXTURE_2D, context.shadowTex)  # as MuJoCo does
    gl.glBindFramebuffer(_FRAMEBUFFER, context.shadowFBO)
    if not _set_format(gl, context.shadowSize, _DEPTH24):
        _set_format(gl, context.shadowSize, _DEPTH24_STENCIL8)
    gl.glBindFramebuffer(_FRAMEBUFFER, target.value)
    gl.glActiveTexture(unit.value)


def _set_format(gl: Any, side: int, texture_format: tuple[int, int, int]) -> bool:
    """Allocate the bound texture in a format; return whether it can be drawn into."""
    internal, form, kind = texture_format
    try:
        gl.glTexImage2D(_TEXTURE_2D, 0, internal, side, side, 0, form, kind, None)
    except Exception:  # PyOpenGL's
        return False
    return bool(gl.glCheckFramebufferStatus(_FRAMEBUFFER) == _FRAMEBUFFER_COMPLETE)


def set_top_first() -> bool:
    """Have images read with the top row first; return False if the current context can't. (Mesa's can.)"""
    gl = gl_functions()
    if gl is None or _PACK_INVERT_EXTENSION not in _text(_EXTENSIONS).split():
        return False
    gl.glPixelStorei(_PACK_INVERT, 1)
    return True


def opengl_name() -> str:
    """Return the name of the OpenGL implementation whose context is current, if it is known."""
    return _text(_RENDERER) or "unknown"


def _text(name: int) -> str:
    try:
        from OpenGL.raw.GL.VERSION.GL_1_0 import glGetString

        text = glGetString(name)  # bytes once OpenGL.GL has been imported, else a pointer
        return (text if isinstance(text, bytes) else ctypes.cast(text, ctypes.c_char_p).value or b"").decode()
    except Exception:  # the name is not worth a failure to start
        return ""


def gl_functions() -> Any:
    """Return OpenGL's functions; None if PyOpenGL does not find them all. (MuJoCo finds its own, and draws even so.)"""
    try:
        from OpenGL.raw.GL.VERSION import GL_1_0, GL_1_1, GL_1_3, GL_3_0

        found = {
            name: getattr(version, name)
            for version, names in (
                (
                    GL_1_0,
                    "glCallList glDeleteLists glEndList glGenLists glGetIntegerv glNewList glPixelStorei glTexImage2D",
                ),
                (GL_1_1, "glBindTexture glDeleteTextures glGenTextures"),
                (GL_1_3, "glActiveTexture"),
                (GL_3_0, "glBindFramebuffer glCheckFramebufferStatus"),
            )
            for name in names.split()
        }
    except Exception:  # without libGL it is not an ImportError
        return None
    return SimpleNamespace(**found) if all(found.values()) else None
