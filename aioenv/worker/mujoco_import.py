"""What a worker does once MuJoCo is imported.

Warnings go where all that envs print goes, instead of into MUJOCO_LOG.TXT in the working directory; the profiler's
clock stands still; and envs that draw themselves do so each in an OpenGL context of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from aioenv.worker.gl_contexts import CONTEXT_MODULES, keep_contexts_apart, note_contexts

__all__ = ["prepare_contexts", "prepare_mujoco"]


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
