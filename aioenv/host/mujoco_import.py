"""What a worker does once MuJoCo is imported.

Warnings go where all that envs print goes, instead of into MUJOCO_LOG.TXT in the working directory; and the profiler's
clock stands still.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["prepare_mujoco"]


def prepare_mujoco() -> None:
    """Print MuJoCo's warnings to stderr, and stop its clock, from now on or from when it will be imported.

    It is not imported for that. Whoever installs a handler (`mujoco.set_mju_user_warning`) or a clock
    (`mujoco.set_mjcb_time`), before or after, keeps it. Errors are not warnings: they stay exceptions
    (`mujoco.FatalError`).
    """
    module = sys.modules.get("mujoco")
    if module is not None:
        _install(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


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


class _Finder:
    """Lets others find MuJoCo, and has its loader call `_install` at the end.

    It stays until MuJoCo has been imported: whoever only asks whether there is one (`importlib.util.find_spec`) gets
    here too.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "mujoco":
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        others = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
                _install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
