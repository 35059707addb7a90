"""The environment of a worker: its variables, its interpreter's command, and the path that it imports from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from aioenv.errors import WorkerStartError
from aioenv.tracing.timeline import VARIABLE as TRACE_VARIABLE

__all__ = ["bootstrap", "graphics", "identity", "import_path", "worker_environment"]

# Workers step in parallel: threads inside each would only compete for the same CPUs.
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

# Variables that libraries read when they are loaded: each fork server has one set of them.
_IMPORT_TIME = tuple(
    "PYTHON LD_ OMP_ OPENBLAS_ MKL_ BLIS_ VECLIB_ NUMEXPR_ NUMBA_ CUDA_ DISPLAY MALLOC_ GLIBC_ XLA_ JAX_ TF_ TORCH_ "
    "WAYLAND_DISPLAY XDG_SESSION_TYPE PYGLFW_ PYGLET_ PYGAME_ SDL_VIDEODRIVER SDL_AUDIODRIVER MPLBACKEND "
    "QT_QPA_PLATFORM OPENCV_".split()
)
# Variables that select an OpenGL: dm_control reads them when it is imported, MuJoCo when a worker first draws.
_GRAPHICS = tuple("MUJOCO_ PYOPENGL_ EGL_ __EGL_ __GLX_ LIBGL_ MESA_ GALLIUM_ LP_".split())

# The hash seed of workers whose parent's is random. The iteration order of a set of strings depends on it, and so does
# an env that iterates over one.
_HASH_SEED = "0"

_ROOT = Path(__file__).resolve().parents[2]  # where this package is imported from


def bootstrap(module: str, arguments: str, folder: str = "worker") -> list[str]:
    """Return the command that runs `main(arguments)` of a module, in an interpreter like this one.

    The interpreter gets this process's options (`-O`, `-W`, `-X dev`, `-I` …) and its `sys.path`, which is set before
    the first import. So a file in the working directory does not shadow the standard library.

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
    code = f"import sys; sys.path[:] = {path!a}; from aioenv.{folder}.{module} import main; main({arguments})"
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if sys.flags.warn_default_encoding:  # which that function leaves out
        options += ["-X", "warn_default_encoding"]
    return [sys.executable, *options, "-c", code]


def import_path() -> tuple[str, ...]:
    """Return `sys.path` with absolute entries, for a fork server, whose working directory may be another."""
    entries = [str(entry) for entry in sys.path if isinstance(entry, str)]  # `import` ignores the others
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
    """Return a worker's environment: the parent's, one thread per numeric library, a fixed hash seed, and `extra`.

    PyOpenGL's platform is MuJoCo's backend, unless `extra` has one.

    An interpreter that ignores its environment (`-E`, `-I`) ignores PYTHONHASHSEED too, and Python has no option
    instead: the workers of one fork server then share a random seed, and each spawned worker draws its own.
    """
    environ = {**os.environ, **_THREAD_LIMITS}
    if not environ.get("PYTHONHASHSEED", "").isdecimal():  # "random", or not set
        environ["PYTHONHASHSEED"] = _HASH_SEED
    environ.pop(TRACE_VARIABLE, None)  # a program that an env starts must not write to the parent's file
    environ.update(extra or {})
    backend = environ.get("MUJOCO_GL", "").lower().strip()
    if backend in ("egl", "osmesa") and "PYOPENGL_PLATFORM" not in (extra or {}):
        # as MuJoCo does when it is imported; this process may have drawn on another backend, and inherited its platform
        environ["PYOPENGL_PLATFORM"] = backend
    return environ


def identity(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that must be equal for two workers to come from one fork server."""
    return _with_prefixes(_IMPORT_TIME, environ)


def graphics(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that must be equal too once the fork server has imported a module that may read them."""
    return _with_prefixes(_GRAPHICS, environ)


def _with_prefixes(prefixes: tuple[str, ...], environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in environ.items() if name.startswith(prefixes)))
