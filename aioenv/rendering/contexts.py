"""What MuJoCo draws with, as a quality wants it, and with less of it where no image shows that."""

from __future__ import annotations

import ctypes

import mujoco

from aioenv.rendering.quality import RenderQuality

__all__ = ["make_contexts", "opengl_name", "read_upright"]

# OpenGL's numbers, since `OpenGL.GL`, which names them, takes 0.1 s to import.
_TEXTURE_2D, _TEXTURE1, _ACTIVE_TEXTURE = 0x0DE1, 0x84C1, 0x84E0
_FRAMEBUFFER, _FRAMEBUFFER_BINDING, _FRAMEBUFFER_COMPLETE = 0x8D40, 0x8CA6, 0x8CD5
_COMPILE, _RENDERER, _EXTENSIONS = 0x1300, 0x1F01, 0x1F03
_PACK_INVERT, _PACK_INVERT_EXTENSION = 0x8758, "GL_MESA_pack_invert"
# internal format, format and type: as MuJoCo makes it, and with the same 24 bits of depth alone
_DEPTH24_STENCIL8 = (0x88F0, 0x84F9, 0x84FA)
_DEPTH24 = (0x81A6, 0x1902, 0x1405)
# MuJoCo's display lists of shapes: how many there are, and which are cylinders, closed and open
_SHAPES, _STRAIGHT = 8, (3, 4)


def make_contexts(model: mujoco.MjModel, quality: RenderQuality) -> list[mujoco.MjrContext]:
    """Make what a model is drawn with, in the OpenGL context that is current.

    Args:
        model: the model; its `vis` has been prepared by the quality.
        quality: what is drawn.

    Returns:
        The model's own, and whatever has to live as long and is to be freed with it.
    """
    contexts = []
    stacks = quality.side_stacks_of(model)
    if stacks is not None:  # before the model's own: what is made last sets the fog
        contexts.append(_shapes(stacks, model.vis.quality.numslices))
    with quality.prepared_planes(model):
        contexts.insert(0, _make(model))
    if stacks is not None:
        _take_sides(*contexts)
    if contexts[0].shadowSize and opengl_name().startswith("llvmpipe"):
        _drop_stencil(contexts[0])
    return contexts


def _make(model: mujoco.MjModel) -> mujoco.MjrContext:
    return mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)


def _shapes(stacks: int, slices: int) -> mujoco.MjrContext:
    """What has nothing but MuJoCo's shapes, of so many stacks and slices."""
    empty = mujoco.MjModel.from_xml_string("<mujoco/>")
    quality, buffer = empty.vis.quality, empty.vis.global_
    quality.numstacks, quality.numslices = stacks, slices
    quality.shadowsize = quality.offsamples = 0
    buffer.offwidth = buffer.offheight = 1
    return _make(empty)


def _take_sides(context: mujoco.MjrContext, other: mujoco.MjrContext) -> None:
    """Draw cylinders, the straight sides of capsules and the sky as the other one does."""
    if context.rangeBuiltin != _SHAPES:  # a MuJoCo that has others
        return
    from OpenGL.raw.GL.VERSION.GL_1_0 import glCallList, glEndList, glNewList

    for shape in _STRAIGHT:
        glNewList(context.baseBuiltin + shape, _COMPILE)
        glCallList(other.baseBuiltin + shape)
        glEndList()


def _drop_stencil(context: mujoco.MjrContext) -> None:
    """Make the shadow map anew, without the stencil that nothing uses.

    MuJoCo has 24 bits of depth and 8 of stencil a texel, and clears the depth alone before each image. llvmpipe reads,
    masks and writes all 4096 x 4096 texels for that; where there is no stencil it just writes them, and a small image
    takes four fifths of the time. The depths are the same, and so are the images.
    """
    from OpenGL.raw.GL.VERSION.GL_1_0 import glGetIntegerv, glTexImage2D
    from OpenGL.raw.GL.VERSION.GL_1_1 import glBindTexture
    from OpenGL.raw.GL.VERSION.GL_1_3 import glActiveTexture
    from OpenGL.raw.GL.VERSION.GL_3_0 import glBindFramebuffer, glCheckFramebufferStatus

    unit, target = ctypes.c_int(), ctypes.c_int()
    glGetIntegerv(_ACTIVE_TEXTURE, unit)
    glGetIntegerv(_FRAMEBUFFER_BINDING, target)
    glActiveTexture(_TEXTURE1)
    glBindTexture(_TEXTURE_2D, context.shadowTex)  # where MuJoCo has it bound, too
    glBindFramebuffer(_FRAMEBUFFER, context.shadowFBO)
    side = context.shadowSize
    for internal, form, kind in (_DEPTH24, _DEPTH24_STENCIL8):
        glTexImage2D(_TEXTURE_2D, 0, internal, side, side, 0, form, kind, None)
        if glCheckFramebufferStatus(_FRAMEBUFFER) == _FRAMEBUFFER_COMPLETE:
            break  # else as it was
    glBindFramebuffer(_FRAMEBUFFER, target.value)
    glActiveTexture(unit.value)


def read_upright() -> bool:
    """Have images read with the top row first, where the context that is current can: Mesa's can."""
    if _PACK_INVERT_EXTENSION not in _text(_EXTENSIONS).split():
        return False
    from OpenGL.raw.GL.VERSION.GL_1_0 import glPixelStorei

    glPixelStorei(_PACK_INVERT, 1)
    return True


def opengl_name() -> str:
    """The name of the OpenGL implementation whose context is current, if it can be had."""
    return _text(_RENDERER) or "unknown"


def _text(name: int) -> str:
    try:
        from OpenGL.raw.GL.VERSION.GL_1_0 import glGetString

        text = glGetString(name)  # bytes once OpenGL.GL has been imported, else a pointer
        return (text if isinstance(text, bytes) else ctypes.string_at(text)).decode()
    except Exception:  # a convenience, not worth a failure to start
        return ""
