"""Envs that draw themselves in one process: each `MjrContext` draws in the OpenGL context that it was made in.

MuJoCo draws in the context that is current. An env that has a process to itself may make its own current once; in a
worker of several, that of another slot would be, which has other textures, meshes and heights under the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["CONTEXT_MODULES", "keep_contexts_apart", "note_contexts", "plain_context"]


def _pointer(value: Any) -> int:
    return ctypes.cast(value, ctypes.c_void_p).value or 0 if value else 0


# MuJoCo's modules with a class GLContext, and how each tells which one is current.
_CURRENT: dict[str, Callable[[Any], Any]] = {
    "mujoco.glfw": lambda module: module.glfw.get_current_context(),
    "mujoco.egl": lambda module: module.EGL.eglGetCurrentContext(),
    "mujoco.osmesa": lambda module: module.osmesa.OSMesaGetCurrentContext(),
}
CONTEXT_MODULES = tuple(_CURRENT)

_makers: set[str] = set()  # those of these that have made any: GLFW does not like to be asked before
# Contexts that live, by module and pointer.
_contexts: dict[tuple[str, int], weakref.ref[Any]] = {}


def note_contexts(module: ModuleType) -> None:
    """Know of the OpenGL contexts that this module makes from now on: one of CONTEXT_MODULES."""
    kind: Any = module.GLContext
    make, free, name = kind.__init__, kind.free, module.__name__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._drawn_with = weakref.WeakSet()  # each MjrContext that was made in it
        _makers.add(name)
        _contexts[name, _pointer(self._context)] = weakref.ref(self)

    @functools.wraps(free)
    def free_all(self: Any) -> None:
        if sys.is_finalizing():  # modules that this needs may be gone
            free(self)
            return
        if drawn_with := list(getattr(self, "_drawn_with", ())):
            self._drawn_with.clear()
            self.make_current()
            for context in drawn_with:
                context.free_here()
        key = name, _pointer(getattr(self, "_context", None))
        free(self)
        if key in _contexts and _contexts[key]() in (self, None):
            del _contexts[key]

    kind.__init__, kind.free = init, free_all


def _current() -> tuple[str, int]:
    """Which context this thread would draw in: its module and pointer; ("", 0): none, or none that is known."""
    for name in _makers:
        module = sys.modules.get(name)  # gone when the interpreter ends
        if module is not None and (pointer := _pointer(_CURRENT[name](module))):
            return name, pointer
    return "", 0


def keep_contexts_apart(mujoco: ModuleType) -> None:
    """Have each `MjrContext` of this process draw in its own OpenGL context from now on. Idempotent.

    Those that are drawn with in contexts of other makers (dm_control's, which takes care itself) stay as they are.
    """
    plain = getattr(mujoco, "MjrContext", None)  # MUJOCO_GL=disable leaves it out
    if plain is None or hasattr(plain, "free_here"):
        return
    kind = _own_context(plain)
    for module in (mujoco, sys.modules["mujoco._render"]):
        vars(module)["MjrContext"] = kind
        for name in [name for name in dir(module) if name.startswith("mjr_")]:
            setattr(module, name, _in_its_own(getattr(module, name), kind))


def plain_context(mujoco: Any) -> Any:
    """MuJoCo's own class, for who makes the right OpenGL context current each time."""
    return getattr(mujoco.MjrContext, "plain", mujoco.MjrContext)


def _own_context(plain: Any) -> Any:
    class MjrContext(plain):  # type: ignore[misc]
        """As MuJoCo's, but in its own OpenGL context."""

        _gl: Any = None  # a weak reference to the GLContext
        _key = "", 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._key = _current()
            self._gl = _contexts.get(self._key)
            gl = self._gl() if self._gl is not None else None
            if gl is not None:
                gl._drawn_with.add(self)

        def make_current(self) -> None:
            """Draw in its own from now on; does nothing where that is not known, or gone."""
            if self._gl is not None and _current() != self._key and (gl := self._gl()) is not None and gl._context:
                gl.make_current()

        def free_here(self) -> None:
            """Free what OpenGL has of it in the context that is current, which is its own."""
            self._gl = None  # so that nothing is freed twice, in another's
            super().free()

        def free(self) -> None:
            """As MuJoCo's, in its own OpenGL context; the one that is current stays so."""
            if sys.is_finalizing():
                super().free()
                return
            gl = self._gl() if self._gl is not None else None
            before = _contexts.get(_current()) if gl is not None else None
            self.make_current()
            self.free_here()
            other = before() if before is not None else None
            if other is not None and other is not gl:
                other.make_current()

        def __del__(self) -> None:
            if self._gl is not None and not sys.is_finalizing():  # else MuJoCo's class does what there is to do
                self.free()

    MjrContext.plain = plain
    MjrContext.__name__ = MjrContext.__qualname__ = plain.__name__
    MjrContext.__module__ = plain.__module__
    return MjrContext


def _in_its_own(function: Any, kind: Any) -> Any:
    """A function of MuJoCo's that draws, first made to draw in the right OpenGL context."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if type(value) is kind:
                value.make_current()
        for value in kwargs.values():
            if type(value) is kind:
                value.make_current()
        return function(*args, **kwargs)

    return call
