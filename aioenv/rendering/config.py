"""`RenderConfig`: which images to draw, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioenv.rendering.quality import Quality, parse_quality

__all__ = ["BACKENDS", "MAX_SIDE", "RenderConfig", "check_backend", "check_int"]

BACKENDS = ("egl", "osmesa", "glfw")

# What one render target may measure in each direction; more than any OpenGL implementation here allows.
MAX_SIDE = 16_384


@dataclass(frozen=True)
class RenderConfig:
    """How a vector env draws the states that it returns.

    MuJoCo envs are drawn by a pool of render workers from their physics states. Any other env draws itself in its
    own worker, after its reply has gone out, with its own size and camera; then only that it is drawn is taken
    from here.

    Args:
        width: of an image, in pixels.
        height: of an image, in pixels.
        camera: a camera of the model by name or number, -1 for the free camera; None for the env's own view.
        quality: "exact" gives the pixels of `mujoco.Renderer`; "fast" leaves out shadows, reflections and
            multisampling, which cost software OpenGL up to 40 times the rest of the image. A `RenderQuality` has
            each switch by name.
        num_workers: how many render workers; None for one a usable CPU, at most four and at most one an env.
            (Eight processes that draw on one GPU have been seen to hang, mujoco issue 3444.)
        backend: "egl", "osmesa" or "glfw"; "auto" for the best that works (EGL, GLFW if there is a display, OSMesa);
            None for `MUJOCO_GL` if it is set, else "auto".

    Raises:
        ValueError: if a size is not a positive int of at most 16384, or a word is none of those above.
    """

    width: int = 256
    height: int = 256
    camera: str | int | None = None
    quality: Quality = "exact"
    num_workers: int | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        check_int("width", self.width, MAX_SIDE)
        check_int("height", self.height, MAX_SIDE)
        if self.num_workers is not None:
            check_int("num_workers", self.num_workers, 1024)
        parse_quality(self.quality)
        check_backend(self.backend)
        if isinstance(self.camera, bool) or not isinstance(self.camera, (str, int, type(None))):
            raise ValueError(f"camera: expected a name, a number or None, got {self.camera!r}")


def check_int(name: str, value: Any, maximum: int) -> None:
    """Raise a ValueError unless it is an int from 1 to the maximum."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise ValueError(f"{name}: expected an int from 1 to {maximum}, got {value!r}")


def check_backend(backend: str | None) -> None:
    """Raise a ValueError unless there is such a backend."""
    if backend is not None and backend not in (*BACKENDS, "auto"):
        raise ValueError(f"backend: expected one of {BACKENDS}, 'auto' or None, got {backend!r}")
