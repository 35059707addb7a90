"""MuJoCo's rendering contexts: made for a quality, and cheaper where images are the same or nearly so."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import mujoco

from aioenv.rendering.quality import RenderQuality
from aioenv.worker.mujoco_setup import plain_context

__all__ = ["gl_functions", "make_contexts", "make_plane", "opengl_name", "set_top_first"]

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
