"""Prepare MuJoCo in a worker when it is imported: warnings, the clock, and an OpenGL context for each env that draws.

Warnings go to stderr instead of MUJOCO_LOG.TXT in the working directory, and the profiler's clock is stopped.

MuJoCo draws in the OpenGL context that is current. An env with a process to itself may make its own current once. In a
worker of several envs the current one may be that of another slot, whose textures, meshes and height fields have the
same numbers. So each `MjrContext` makes the context current that it was made in.
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
    "plain_context",
    "prepare_contexts",
    "prepare_mujoco",
    "track_contexts",
]


def _pointer(value: Any) -> int:
    return ctypes.cast(value, ctypes.c_void_p).value or 0 if value else 0


# MuJoCo's modules with a class GLContext, and for each a function that returns the current context.
_CURRENT: dict[str, Callable[[Any], Any]] = {
    "mujoco.glfw": lambda module: module.glfw.get_current_context(),
    "mujoco.egl": lambda module: module.EGL.eglGetCurrentContext(),
    "mujoco.osmesa": lambda module: module.osmesa.OSMesaGetCurrentContext(),
}
CONTEXT_MODULES = tuple(_CURRENT)

_used_modules: set[str] = set()  # those that have made a context: GLFW must not be asked before that
# Live contexts, by module and pointer.
_contexts: dict[tuple[str, int], weakref.ref[Any]] = {}


def track_contexts(module: ModuleType) -> None:
    """Track the OpenGL contexts that a module of CONTEXT_MODULES makes from now on."""
    kind: Any = module.GLContext
    make, free, name = kind.__init__, kind.free, module.__name__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._drawn_with = weakref.WeakSet()  # the MjrContexts that were made in it
        _used_modules.add(name)
        _contexts[name, _pointer(self._context)] = weakref.ref(self)

    @functools.wraps(free)
    def free_all(self: Any) -> None:
        if sys.is_finalizing():  # modules that the rest needs may be gone
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
    """Return the context that this thread draws in, as module and pointer; ("", 0) if there is none that is known."""
    for name in _used_modules:
        module = sys.modules.get(name)  # None when the interpreter ends
        if module is not None and (pointer := _pointer(_CURRENT[name](module))):
            return name, pointer
    return "", 0


def keep_contexts_apart(mujoco: ModuleType) -> None:
    """Make each `MjrContext` of this process draw in its own OpenGL context from now on. Idempotent.

    Contexts of other modules (dm_control's, which handles this itself) are left alone.
    """
    plain = getattr(mujoco, "MjrContext", None)  # MUJOCO_GL=disable leaves it out
    if plain is None or hasattr(plain, "free_here"):
        return
    kind = _own_context(plain)
    for module in (mujoco, sys.modules["mujoco._render"]):
        vars(module)["MjrContext"] = kind
        for name in [name for name in dir(module) if name.startswith("mjr_")]:
            setattr(module, name, _in_own_context(getattr(module, name), kind))


def plain_context(mujoco: Any) -> Any:
    """Return MuJoCo's own class, for callers that make the right OpenGL context current themselves."""
    return getattr(mujoco.MjrContext, "plain", mujoco.MjrContext)


def _own_context(plain: Any) -> Any:
    class MjrContext(plain):  # type: ignore[misc]
        """MuJoCo's MjrContext, which makes its own OpenGL context current before it is used."""

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
            """Make its own OpenGL context current; a no-op if that is unknown or gone."""
            if self._gl is not None and _current() != self._key and (gl := self._gl()) is not None and gl._context:
                gl.make_current()

        def free_here(self) -> None:
            """Free its OpenGL objects in the current context, which must be its own."""
            self._gl = None  # so that nothing is freed twice, in another context
            super().free()

        def free(self) -> None:
            """Free it in its own OpenGL context, and make the current one current again."""
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
            if self._gl is not None and not sys.is_finalizing():  # else MuJoCo's class frees it
                self.free()

    MjrContext.plain = plain
    MjrContext.__name__ = MjrContext.__qualname__ = plain.__name__
    MjrContext.__module__ = plain.__module__
    return MjrContext


def _in_own_context(function: Any, kind: Any) -> Any:
    """Wrap a function of MuJoCo that draws, so that it makes the right OpenGL context current first."""

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
    """Print MuJoCo's warnings to stderr and stop its clock, now or when MuJoCo is imported.

    This does not import it. A handler (`mujoco.set_mju_user_warning`) or a clock (`mujoco.set_mjcb_time`) that an env
    installs, before or after, stays. Errors are not warnings: they stay exceptions (`mujoco.FatalError`).
    """
    _when_imported("mujoco", _prepare_warnings_and_clock)
    prepare_contexts()


def prepare_contexts() -> None:
    """Make each env of this process that draws use an OpenGL context of its own. Idempotent."""
    for name in CONTEXT_MODULES:  # before MuJoCo, which may import one of them
        _when_imported(name, track_contexts)
    _when_imported("mujoco", keep_contexts_apart)


def _when_imported(name: str, prepare: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now, or at the end of its import."""
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _ImportHook)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _ImportHook())
    finder.prepare(name, prepare)


def _prepare_warnings_and_clock(module: ModuleType) -> None:
    if hasattr(module, "set_mju_user_warning") and module.get_mju_user_warning() is None:
        module.set_mju_user_warning(_print_warning)
    from aioenv.mujoco_versions import stop_clock  # it needs ctypes, as MuJoCo does

    stop_clock()


def _print_warning(text: str) -> None:
    """Print a warning to descriptor 2, as an env may have closed `sys.stderr`.

    This must not raise: MuJoCo calls it from C++, where an exception would end the process.
    """
    with contextlib.suppress(Exception):
        os.write(2, f"MuJoCo: {text}\n".encode(errors="replace"))


class _ImportHook:
    """A finder on `sys.meta_path` that calls functions at the end of the imports of some modules."""

    def __init__(self) -> None:
        self._known: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._done: set[tuple[str, Callable[[ModuleType], None]]] = set()

    def prepare(self, name: str, prepare: Callable[[ModuleType], None]) -> None:
        """Call `prepare` once with a module: now if it was imported, else at the end of its import."""
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
