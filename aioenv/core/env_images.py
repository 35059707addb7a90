"""`EnvImages`: the images of a vector env as its user gets them: of the last result, in one picture, or as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.core.env_calls import call_envs
from aioenv.errors import EnvError, RenderError
from aioenv.rendering.config import check_int
from aioenv.rendering.images import stack_images, tile
from aioenv.rendering.step_images import ImageStream

if TYPE_CHECKING:
    from aioenv.core.backend import Backend
    from aioenv.core.waits import Clock
    from aioenv.rendering.step_images import StepImages

__all__ = ["EnvImages", "colours"]

_DRAWN_BY = 'make them with render_mode="rgb_array", or the vector env with render=aioenv.RenderConfig(...)'


class EnvImages:
    """Images of a started vector env; see `AsyncVectorEnv.render` and `AsyncVectorEnv.render_stream`.

    Args:
        backend: calls the envs that draw themselves.
        images: the images that are drawn beside the steps; None: the envs draw when they are asked.
        clock: counts how long the caller waits.
        render_mode: see `AsyncVectorEnv.render_mode`.
        one_env: whether the slots of a worker, or of this process, are one vector env.
    """

    def __init__(
        self,
        backend: Backend,
        images: StepImages | None,
        clock: Clock,
        *,
        render_mode: str | None,
        one_env: bool,
    ) -> None:
        self._backend = backend
        self._images = images
        self._clock = clock
        self._render_mode = render_mode
        self._one_env = one_env

    async def render(self, mode: str | None) -> Any:
        """Return the images of the states that were returned last."""
        if mode not in (None, "arrays", "grid"):
            raise ValueError(f'render: mode: expected None, "arrays" or "grid", got {mode!r}')
        if self._images is None and self._one_env and self._render_mode is None:
            raise RenderError(
                "render: the vector env was made without render=aioenv.RenderConfig(...), or, if it draws itself, a "
                "render_mode"
            )
        wait = self._clock.images.begin()
        try:
            if self._images is not None:
                images = await self._images.render(self._backend.wait_for_images)
            else:
                images = stack_images(await self._drawn_by_envs())
        finally:
            wait.end()
        return tile(colours(images)) if mode == "grid" else images

    async def _drawn_by_envs(self) -> tuple[Any, ...]:
        try:
            return await call_envs(self._backend, None, "render", (), {})
        except EnvError as error:
            if self._render_mode is None:
                error.add_note(f"render: these envs were made without a render_mode: {_DRAWN_BY}")
            raise

    def stream(self, buffer: int) -> ImageStream:
        """Return an iterator over the images of all results from now on."""
        check_int("buffer", buffer, 1 << 20)
        if self._images is None:
            raise RenderError("render_stream: nothing is drawn; pass render=aioenv.RenderConfig(...) when you make it")
        return ImageStream(self._images, buffer, self._backend.wait_for_images)


def colours(images: Any) -> npt.NDArray[np.uint8]:
    """Return the colours alone of the images that `render` gives.

    Raises:
        RenderError: if they are not of one shape.
    """
    if isinstance(images, tuple) and images and isinstance(images[0], np.ndarray) and images[0].ndim >= 4:
        images = images[0]
    if isinstance(images, tuple) and all(image is None for image in images):
        raise RenderError(f"these envs give no images: {_DRAWN_BY}")
    if not isinstance(images, np.ndarray) or images.ndim < 4:
        raise RenderError("one picture of all takes images of one shape; these envs have no such images")
    return images
