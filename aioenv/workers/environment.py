"""The surroundings of a worker: its environment variables, the CPUs, how its interpreter finds this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from aioenv.trace.timeline import VARIABLE as TRACE_VARIABLE

__all__ = ["BOOTSTRAP", "identity", "server_environment", "usable_cpus", "worker_environment"]

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

# Variables that libraries read when they are loaded: a fork server has one set of them. (MUJOCO_GL would be one,
# but a worker makes MuJoCo choose again: `host/mujoco_gl.py`.)
_IMPORT_TIME = (
    "PYTHON LD_ OMP_ OPENBLAS_ MKL_ BLIS_ VECLIB_ NUMEXPR_ NUMBA_ CUDA_ DISPLAY MALLOC_ GLIBC_ XLA_ JAX_ TF_ TORCH_"
).split()
_CHOSEN_LATE = ("MUJOCO_GL", "PYOPENGL_PLATFORM")

# Works from any directory and for a package that is on no path but the parent's.
BOOTSTRAP = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r}); "
    "from aioenv.host.{module} import main; main({arguments})"
)


def worker_environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a worker: the parent's, one thread a numeric library, and `extra` over all."""
    environ = {**os.environ, **_THREAD_LIMITS}
    environ.pop(TRACE_VARIABLE, None)  # what an env starts itself must not write to the parent's file
    return {**environ, **(extra or {})}


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the fork server for workers that have `environ`: nothing in it loads OpenGL."""
    return {name: value for name, value in environ.items() if name not in _CHOSEN_LATE}


def identity(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What must be the same for two workers to come from one fork server."""
    return tuple(sorted((n, v) for n, v in environ.items() if n.startswith(tuple(_IMPORT_TIME))))


def usable_cpus() -> int:
    """How many CPUs this process may use (its affinity, where the platform has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
