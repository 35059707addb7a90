"""The surroundings of a worker: its environment variables, its interpreter, how that finds this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from aioenv.errors import WorkerStartError
from aioenv.tracing.timeline import VARIABLE as TRACE_VARIABLE

__all__ = ["bootstrap", "graphics", "identity", "import_path", "worker_environment"]

# Several envs step in several workers: threads inside each would only fight for the same CPUs.
_THREAD_LIMITS = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    ),
    "1",
)

# Variables that libraries read when they are loaded: a fork server has one set of them.
_IMPORT_TIME = tuple(
    "PYTHON LD_ OMP_ OPENBLAS_ MKL_ BLIS_ VECLIB_ NUMEXPR_ NUMBA_ CUDA_ DISPLAY MALLOC_ GLIBC_ XLA_ JAX_ TF_ TORCH_ "
    "WAYLAND_DISPLAY XDG_SESSION_TYPE PYGLFW_ PYGLET_ PYGAME_ SDL_VIDEODRIVER SDL_AUDIODRIVER MPLBACKEND "
    "QT_QPA_PLATFORM OPENCV_".split()
)
# And those that choose an OpenGL: dm_control reads them when it is imported, MuJoCo when a worker first draws.
_GRAPHICS = tuple("MUJOCO_ PYOPENGL_ EGL_ __EGL_ __GLX_ LIBGL_ MESA_ GALLIUM_ LP_".split())

# The hash seed of workers whose parent has none that could be repeated. A set of strings is iterated in an order that
# depends on it, and so is what an env does in that order.
_HASH_SEED = "0"

_ROOT = Path(__file__).resolve().parents[2]  # where this package is imported from


def bootstrap(module: str, arguments: str) -> list[str]:
    """The command that runs `main(arguments)` of a module of `host`, in an interpreter like this one.

    It has this process's options (`-O`, `-W`, `-X dev`, `-I` …) and imports from where this process does, from the
    first module on: what lies in the working directory must not stand in for the standard library.

    Raises:
        WorkerStartError: if there is no interpreter.
    """
    if not sys.executable:
        raise WorkerStartError("sys.executable is empty: no Python interpreter to start a worker with")
    if getattr(sys, "frozen", False) and not Path(sys.executable).name.startswith("python"):
        raise WorkerStartError(
            f"this program is frozen: {sys.executable} is no Python interpreter, and no worker can be started with it. "
            'backend="native" and debug=True need no processes; or set sys.executable to a Python that has the packages'
        )
    path = [entry for entry in sys.path if isinstance(entry, str)]
    if not any(_is_root(entry) for entry in path):
        path.insert(0, str(_ROOT))
    code = f"import sys; sys.path[:] = {path!a}; from aioenv.worker.{module} import main; main({arguments})"
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if sys.flags.warn_default_encoding:  # which those leave out
        options += ["-X", "warn_default_encoding"]
    return [sys.executable, *options, "-c", code]


def import_path() -> tuple[str, ...]:
    """Where this process imports from, for a fork server, whose working directory may be another."""
    entries = [str(entry) for entry in sys.path if isinstance(entry, str)]  # `import` passes over the others
    try:
        here = os.getcwd()
    except OSError:  # it has been removed
        return tuple(entry for entry in entries if os.path.isabs(entry))
    return tuple(os.path.join(here, entry) if entry else here for entry in entries)


def _is_root(entry: str) -> bool:
    try:
        return Path(entry).resolve() == _ROOT
    except OSError:  # the working directory has been removed
        return False


def worker_environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a worker: the parent's, one thread a numeric library, one hash seed, and `extra` over all.

    PyOpenGL's platform is MuJoCo's backend, unless `extra` has one.

    An interpreter that ignores its environment (`-E`, `-I`) ignores PYTHONHASHSEED, too, and Python has no option in
    its place: the workers of one fork server share a random seed then, and each spawned worker draws its own.
    """
    environ = {**os.environ, **_THREAD_LIMITS}
    if not environ.get("PYTHONHASHSEED", "").isdecimal():  # "random", or nothing
        environ["PYTHONHASHSEED"] = _HASH_SEED
    environ.pop(TRACE_VARIABLE, None)  # what an env starts itself must not write to the parent's file
    environ.update(extra or {})
    backend = environ.get("MUJOCO_GL", "").lower().strip()
    if backend in ("egl", "osmesa") and "PYOPENGL_PLATFORM" not in (extra or {}):
        # as MuJoCo does where it is imported; this process may have drawn on another backend, and have that one's
        environ["PYOPENGL_PLATFORM"] = backend
    return environ


def identity(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that must be the same for two workers to come from one fork server."""
    return _those_with(_IMPORT_TIME, environ)


def graphics(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables that must be the same, too, once the fork server has imported a module that may read them."""
    return _those_with(_GRAPHICS, environ)


def _those_with(prefixes: tuple[str, ...], environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in environ.items() if name.startswith(prefixes)))
