"""MuJoCo's choice of an OpenGL backend, where it is made after MuJoCo was imported."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

__all__ = ["choose_backend", "choose_backend_late"]


def choose_backend(backend: str) -> None:
    """Have MuJoCo draw on a backend in this process; its own choice, GLFW, hangs where there is no display."""
    if os.environ.get("MUJOCO_GL", "").lower() != backend:
        os.environ["MUJOCO_GL"] = backend
        os.environ["PYOPENGL_PLATFORM"] = backend if backend in ("egl", "osmesa") else ""
        choose_backend_late()


def choose_backend_late() -> None:
    """Let MuJoCo choose by this process's MUJOCO_GL, when it is first asked for a context.

    It chooses when it is imported, and a fork server imports it without MUJOCO_GL: loading EGL there would start
    Mesa's threads. Does nothing where MuJoCo has not been imported, or nothing is chosen.
    """
    backends = sys.modules.get("mujoco.rendering.classic.gl_context")
    if backends is None or not os.environ.get("MUJOCO_GL"):
        return
    modules = (sys.modules["mujoco"], backends)

    def choose(name: str) -> Any:
        if name != "GLContext":
            raise AttributeError(f"module has no attribute {name!r}")
        for module in modules:
            vars(module).pop("__getattr__", None)
        importlib.reload(backends)
        modules[0].GLContext = backends.GLContext  # type: ignore[attr-defined]
        return backends.GLContext

    for module in modules:
        vars(module).pop("GLContext", None)
        module.__getattr__ = choose  # type: ignore[method-assign]
