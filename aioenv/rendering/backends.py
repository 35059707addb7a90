"""OpenGL backends: which ones render workers try, the environment variables they need, and hints if none works."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from aioenv.errors import RenderError, SoftwareRenderWarning, warn_caller
from aioenv.rendering.config import BACKENDS, check_backend

__all__ = [
    "NVIDIA_HINT",
    "backend_environment",
    "candidate_backends",
    "find_gpus",
    "general_install_hint",
    "install_hint",
    "is_software",
    "no_backend_error",
    "platform_backends",
    "software_warning",
    "warn_of_software",
]

# MuJoCo's backends on other platforms than Linux, the best first.
_ELSEWHERE = {"darwin": ("cgl", "glfw"), "win32": ("glfw",)}
# How to install each backend on Debian and Ubuntu.
_INSTALL_HINTS = {
    "egl": "apt-get install libegl1 libgl1-mesa-dri",
    "osmesa": "apt-get install libosmesa6",
    "glfw": "a display is needed: apt-get install xvfb, and run under `xvfb-run -a`",
}
_GENERAL_HINT = (
    "MuJoCo needs OpenGL to draw. Without a GPU, Mesa's software OpenGL does: on Debian or Ubuntu\n"
    "    apt-get install libegl1 libgl1-mesa-dri libosmesa6\n"
    "With an NVIDIA GPU, install its driver with EGL (libnvidia-gl). `aioenv doctor` shows what works."
)
NVIDIA_HINT = (
    "An NVIDIA GPU draws with libegl1 and the EGL of its driver: libnvidia-gl of the driver's own version on Ubuntu, "
    "libegl-nvidia0 on Debian; a container is to be started with NVIDIA_DRIVER_CAPABILITIES=all. Others draw with "
    "libgl1-mesa-dri, and need a user who may open /dev/dri/renderD* (the group render)."
)

# MuJoCo's error for a device that does not exist.
_NO_DEVICE = re.compile(r"MUJOCO_EGL_DEVICE_ID .*between 0 and (\d+) \(inclusive\), got (\S+?)\.?$", re.MULTILINE)

# Parts of the names of OpenGL implementations that draw on the CPU.
_SOFTWARE = ("llvmpipe", "softpipe", "swrast", "software", "swiftshader", "gdi generic", "basic render")
# Kernel drivers of GPUs. (Others only display images that a server draws.)
_GPU_DRIVERS = set(
    "nvidia nouveau amdgpu radeon i915 xe panfrost panthor lima msm v3d vc4 etnaviv tegra asahi powervr".split()
)


def platform_backends() -> tuple[str, ...]:
    """Return MuJoCo's backends on this platform, the best first."""
    return _ELSEWHERE.get(sys.platform, ("egl", "osmesa", "glfw"))


def install_hint(backend: str) -> str:
    """Return what to do if a backend does not work; empty if there is no hint."""
    return "" if sys.platform in _ELSEWHERE else _INSTALL_HINTS.get(backend, "")


def general_install_hint() -> str:
    """Return what to do if no backend works."""
    if sys.platform in _ELSEWHERE:
        return "MuJoCo needs OpenGL to draw; a session on the desktop has it. `aioenv doctor` shows what works."
    return _GENERAL_HINT


def candidate_backends(backend: str | None, devices: Sequence[int] | None = None) -> tuple[str, ...]:
    """Return the backends to try, in order: the one asked for; for None the user's MUJOCO_GL; else the best first.

    The best is EGL, the only one that uses a GPU without a display. Then come GLFW if there is a display, and OSMesa;
    on macOS CGL, then GLFW. With `devices` it is EGL alone, where there is EGL. The others have no devices, and would
    draw on the CPU in place of a device that does not exist.

    Raises:
        ValueError: if there is no such backend here.
    """
    check_backend(backend)
    chosen = os.environ.get("MUJOCO_GL", "").lower() if backend is None else backend
    here = platform_backends()
    if chosen in BACKENDS:
        if chosen not in here:
            raise ValueError(f"backend: expected one of {here}, which MuJoCo has on this platform, got {chosen!r}")
        return (chosen,)
    if "egl" not in here:
        return here
    if devices is not None:
        return ("egl",)
    display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return ("egl", "glfw", "osmesa") if display else ("egl", "osmesa")


def backend_environment(backend: str, device: int | None = None) -> dict[str, str]:
    """Return the environment variables of a render worker.

    Args:
        backend: the OpenGL backend.
        device: the GPU to draw on, as MuJoCo counts them; None for the first that works.
    """
    variables = {
        "MUJOCO_GL": backend,
        "PYOPENGL_PLATFORM": backend if backend in ("egl", "osmesa") else "",
        # llvmpipe draws in the calling thread: its own threads would compete with the other workers for the CPUs
        "LP_NUM_THREADS": "0",
    }
    if device is not None:
        variables["MUJOCO_EGL_DEVICE_ID"] = str(device)
    return variables


def is_software(renderer: str) -> bool:
    """Return whether an OpenGL implementation, by its name (GL_RENDERER), draws on the CPU."""
    return any(part in renderer.lower() for part in _SOFTWARE)


def find_gpus(root: Path = Path("/")) -> list[str]:
    """Return descriptions of the GPUs that the kernel knows; empty if that can't be found out.

    Args:
        root: where /proc, /sys and /dev are.
    """
    found = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = [
            line.partition(":")[2].strip()
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("Model:")
        ]
        found += model or ["an NVIDIA GPU"]
    if not found and any((root / "dev").glob("nvidia[0-9]*")):
        found.append("an NVIDIA GPU")
    for node in sorted((root / "sys/class/drm").glob("renderD*")):
        driver = (node / "device/driver").resolve().name
        if driver in _GPU_DRIVERS and not (driver == "nvidia" and found):
            found.append(f"a GPU of the driver {driver} ({node.name})")
    if (root / "dev/dxg").exists():
        found.append("the GPU of Windows (WSL)")
    return found


def software_warning(renderer: str, gpus: Sequence[str]) -> str | None:
    """Return the warning for an implementation that draws on the CPU though there is a GPU; None if it does not."""
    if not gpus or not is_software(renderer):
        return None
    return (
        f"OpenGL draws on the CPU ({renderer}), though there is {gpus[0]}: it is not used. {NVIDIA_HINT} "
        "`aioenv doctor` shows what works."
    )


def warn_of_software(renderer: str, tried: Sequence[str]) -> None:
    """Warn with a SoftwareRenderWarning if the CPU draws though there is a GPU.

    Args:
        renderer: the name of the OpenGL implementation that draws.
        tried: the backends that might have been used.
    """
    # backend="osmesa" asks for the CPU; all others are expected to use a GPU
    if tuple(tried) != ("osmesa",) and (why := software_warning(renderer, find_gpus())) is not None:
        warn_caller(why, SoftwareRenderWarning)


def no_backend_error(reasons: Sequence[str]) -> RenderError:
    """Return the error for when every backend that was tried has failed.

    Args:
        reasons: the error of each backend.
    """
    for reason in reasons:
        if (found := _NO_DEVICE.search(reason)) is not None:
            last, got = int(found[1]), found[2]
            there = f"devices 0 to {last}" if last else "one device, number 0"
            return RenderError(
                f"devices: there is no device {got} here: EGL has {there}. (Numbers are of `devices`, or of "
                "MUJOCO_EGL_DEVICE_ID; `aioenv doctor` shows what draws on each)"
            )
    listed = "\n".join(f"  {reason}" for reason in reasons)
    return RenderError(f"no OpenGL backend works here:\n{listed}\n{general_install_hint()}")
