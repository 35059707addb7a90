"""Which OpenGL the render workers use, and what to do when there is none."""

from __future__ import annotations

import os
from collections.abc import Sequence

from aioenv.errors import RenderError
from aioenv.rendering.config import BACKENDS

__all__ = ["INSTALL_HINT", "candidates", "environment", "no_backend_works"]

INSTALL_HINT = (
    "MuJoCo needs OpenGL to draw. Without a GPU, Mesa's software OpenGL does: on Debian or Ubuntu\n"
    "    apt-get install libegl1 libgl1-mesa-dri libosmesa6\n"
    "With an NVIDIA GPU, install its driver with EGL (libnvidia-gl). `aioenv doctor` shows what works."
)


def candidates(backend: str | None) -> tuple[str, ...]:
    """The backends to try, in order: the one asked for, else the user's MUJOCO_GL, else EGL and then OSMesa."""
    chosen = backend or os.environ.get("MUJOCO_GL", "").lower()
    return (chosen,) if chosen in BACKENDS else ("egl", "osmesa")


def environment(backend: str, device: int | None = None) -> dict[str, str]:
    """Environment variables for a render worker.

    Args:
        backend: the OpenGL backend.
        device: the GPU to draw on, as MuJoCo counts them; None for the first that works.
    """
    variables = {
        "MUJOCO_GL": backend,
        "PYOPENGL_PLATFORM": backend if backend in ("egl", "osmesa") else "",
        # llvmpipe draws in the calling thread: its own threads would fight the other workers for the CPUs
        "LP_NUM_THREADS": "0",
    }
    if device is not None:
        variables["MUJOCO_EGL_DEVICE_ID"] = str(device)
    return variables


def no_backend_works(reasons: Sequence[str]) -> RenderError:
    """The error for when every backend that was tried has failed.

    Args:
        reasons: what each of them reported.
    """
    listed = "\n".join(f"  {reason}" for reason in reasons)
    return RenderError(f"no OpenGL backend works here:\n{listed}\n{INSTALL_HINT}")
