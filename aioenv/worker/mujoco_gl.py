"""Check MUJOCO_GL, and let MuJoCo choose its OpenGL backend after it was imported."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any

from aioenv.errors import RenderError

__all__ = [
    "check_mujoco_gl",
    "choose_backend_here",
    "choose_backend_late",
    "import_undecided",
    "note_missing_opengl",
    "without_mujoco_gl",
]

# The values of MUJOCO_GL that MuJoCo can be imported with: on or off, and backends by platform.
_SWITCHES = ("", "glfw", "enable", "enabled", "on", "true", "1", "disable", "disabled", "off", "false", "0")
_OTHERS = {"linux": ("egl", "osmesa", "glx"), "win32": ("wgl",), "darwin": ("cgl",)}

# MuJoCo's modules that choose a backend, the newer one first: since 3.10 the older one re-exports its names.
_CHOOSERS = ("mujoco.rendering.classic.gl_context", "mujoco.gl_context")

# MuJoCo's error where an env draws without a context.
_NO_OPENGL = "an OpenGL platform library has not been loaded"

_choosing = threading.Lock()


def check_mujoco_gl() -> None:
    """Check MUJOCO_GL before MuJoCo is imported, whose import fails with an unknown value.

    Raises:
        RenderError: if the value is unknown.
    """
    value = os.environ.get("MUJOCO_GL", "")
    others = _OTHERS.get(sys.platform, ())
    if value.lower().strip() not in (*_SWITCHES, *others):
        names = ", ".join(repr(name) for name in ("egl", "osmesa", "cgl", "glfw") if name in (*_SWITCHES, *others))
        raise RenderError(
            f"MUJOCO_GL (an environment variable): expected one of {names}, or that it is not set (then the best that "
            f"works draws), got {value!r}; MuJoCo can't be imported with it. `aioenv doctor` shows what works"
        )


def without_mujoco_gl() -> RenderError | None:
    """Delete MUJOCO_GL if MuJoCo could not be imported with it; return the error that says so."""
    try:
        check_mujoco_gl()
    except RenderError as exc:
        del os.environ["MUJOCO_GL"]
        return exc
    return None


def note_missing_opengl(exc: BaseException) -> None:
    """Add advice to MuJoCo's error about drawing without an OpenGL context.

    Further attempts in this process raise the same error.
    """
    if type(exc).__name__ == "FatalError" and _NO_OPENGL in str(exc):
        got = os.environ.get("MUJOCO_GL", "")
        exc.add_note(
            f"MUJOCO_GL is {got!r} here. Where there is no display, envs draw with MUJOCO_GL=egl or osmesa in "
            'the environment, or with worker_env={"MUJOCO_GL": "egl"}. render=aioenv.RenderConfig() chooses by itself; '
            "`aioenv doctor` shows what works"
        )
        # MuJoCo would end the process at the next attempt
        sys.modules["mujoco"].MjrContext = type("MjrContext", (), {"__init__": _raise_no_opengl})  # type: ignore[attr-defined]


def _raise_no_opengl(*_: Any, **__: Any) -> None:
    raise sys.modules["mujoco"].FatalError(_NO_OPENGL)


def choose_backend_here(backend: str) -> None:
    """Make MuJoCo draw on a backend in this process; its own choice, GLFW, hangs where there is no display.

    MUJOCO_GL is not changed, since it is the user's setting for other vector envs.
    """
    if os.environ.get("MUJOCO_GL", "").lower() != backend:
        importlib.import_module("mujoco")
        _choose_on_demand(backend)


def choose_backend_late() -> None:
    """Let MuJoCo choose by this process's MUJOCO_GL when it makes its first context.

    MuJoCo chooses when it is imported, and a worker's fork server may have had another MUJOCO_GL. This is a no-op if
    MuJoCo was not imported, or MUJOCO_GL is not set.
    """
    if _backends() is not None and (backend := os.environ.get("MUJOCO_GL")):
        _choose_on_demand(backend)


def _backends() -> Any:
    """Return MuJoCo's module that has chosen a backend, if it was imported."""
    return next((sys.modules[name] for name in _CHOOSERS if name in sys.modules), None)


def import_undecided() -> None:
    """Import MuJoCo so that it chooses a backend when it makes its first context.

    So a fork server loads no OpenGL for workers that never draw, and no OpenGL that starts threads.

    Raises:
        ImportError: if MuJoCo can't be imported.
    """
    before = os.environ.pop("MUJOCO_GL", None)
    try:
        importlib.import_module("mujoco")
    finally:
        if before is not None:
            os.environ["MUJOCO_GL"] = before
    choose_backend_late()


def _choose_on_demand(backend: str) -> None:
    backends = _backends()
    modules: tuple[Any, Any] = (sys.modules["mujoco"], backends)

    def choose(name: str) -> Any:
        if name != "GLContext":
            raise AttributeError(f"module has no attribute {name!r}")
        with _choosing:  # workers may be threads of one process
            if "GLContext" not in vars(modules[0]):
                _reload(backends, backend)
                if "GLContext" not in vars(backends):
                    raise AttributeError(f"MuJoCo has no GLContext with MUJOCO_GL={backend!r}")
                modules[0].GLContext = backends.GLContext
        return modules[0].GLContext

    for module in modules:
        vars(module).pop("GLContext", None)
        module.__getattr__ = choose  # it stays: another thread may be about to call it


def _reload(backends: Any, backend: str) -> None:
    """Reload a module with MUJOCO_GL set to this backend."""
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = backend
    try:
        importlib.reload(backends)
    finally:
        if before is None:
            del os.environ["MUJOCO_GL"]
        else:
            os.environ["MUJOCO_GL"] = before
