"""Envs that draw themselves in one process: each `MjrContext` draws in the OpenGL context that it was made in.

MuJoCo draws in the context that is current. An env that has a process to itself may make its own current once; in a
worker of several, that of another slot would be, which has other textures, meshes and heights under the same numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = [
    "CONTEXT_MODULES",
    "keep_contexts_apart",
    "note_contexts",
    "plain_context",
    "prepare_contexts",
    "prepare_mujoco",
]


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


# ------------------------------------------------------------ imports of MuJoCo


def prepare_mujoco() -> None:
    """Print MuJoCo's warnings to stderr, and stop its clock, from now on or from when it will be imported.

    It is not imported for that. Whoever installs a handler (`mujoco.set_mju_user_warning`) or a clock
    (`mujoco.set_mjcb_time`), before or after, keeps it. Errors are not warnings: they stay exceptions
    (`mujoco.FatalError`).
    """
    _when_imported("mujoco", _install)
    prepare_contexts()


def prepare_contexts() -> None:
    """Have envs that draw themselves in this process do so each in an OpenGL context of its own. Idempotent."""
    for name in CONTEXT_MODULES:  # before MuJoCo, which may make one of them
        _when_imported(name, note_contexts)
    _when_imported("mujoco", keep_contexts_apart)


def _when_imported(name: str, prepare: Callable[[ModuleType], None]) -> None:
    """Have a module prepared: now, or at the end of its import."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _ImportHook)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _ImportHook())
    finder.prepare(name, prepare)


def _install(module: ModuleType) -> None:
    if hasattr(module, "set_mju_user_warning") and module.get_mju_user_warning() is None:
        module.set_mju_user_warning(_tell)
    from aioenv.mujoco_clock import stop_clock  # which needs ctypes, as MuJoCo does

    stop_clock()


def _tell(text: str) -> None:
    """Print a warning to the descriptor, as MuJoCo does: an env may have closed `sys.stderr`.

    Nothing may be raised: MuJoCo calls this from C++, where that would end the process.
    """
    with contextlib.suppress(Exception):
        os.write(2, f"MuJoCo: {text}\n".encode(errors="replace"))


class _ImportHook:
    """Lets others find modules, and has the loaders of some prepare them at the end."""

    def __init__(self) -> None:
        self._known: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._done: set[tuple[str, Callable[[ModuleType], None]]] = set()

    def prepare(self, name: str, prepare: Callable[[ModuleType], None]) -> None:
        """Call this once, with a module that has been imported or when it will be."""
        steps = self._known.setdefault(name, [])
        if prepare in steps:
            return
        steps.append(prepare)
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            self._prepare(module, [prepare])

    def _prepare(self, module: ModuleType, steps: Sequence[Callable[[ModuleType], None]]) -> None:
        for step in steps:
            if (module.__name__, step) not in self._done:
                self._done.add((module.__name__, step))
                step(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._known:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        others = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._prepare(module, self._known[fullname])

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
