"""MuJoCo's warnings go where all that envs print goes, instead of into MUJOCO_LOG.TXT in the working directory."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["divert_warnings"]


def divert_warnings() -> None:
    """Print MuJoCo's warnings to stderr, from now on or from when it will be imported.

    It is not imported for that. An env that installs a handler of its own (`mujoco.set_mju_user_warning`) keeps it.
    """
    module = sys.modules.get("mujoco")
    if module is not None:
        _install(module)
    else:
        sys.meta_path.insert(0, _Finder())


def _install(module: ModuleType) -> None:
    if hasattr(module, "set_mju_user_warning"):
        module.set_mju_user_warning(lambda text: sys.stderr.write(f"MuJoCo: {text}\n"))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets others find MuJoCo, and has its loader call `_install` at the end."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "mujoco":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
