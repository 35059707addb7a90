"""Images of a vector env, for its user: those of the last result, all of them in one, or as a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from aioenv.core.calls import call_envs
from aioenv.core.images.image_requests import stack_images
from aioenv.core.images.stream import ImageStream
from aioenv.errors import EnvError, RenderError
from aioenv.rendering.config import check_int
from aioenv.rendering.tiles import tile

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.session import Session
    from aioenv.core.waits import Clock

__all__ = ["Pictures", "as_grid", "check_mode", "colours"]

_DRAWN_BY = 'make them with render_mode="rgb_array", or the vector env with render=aioenv.RenderConfig(...)'


class Pictures:
    """The part of a vector env that gives images."""

    _clock: Clock
    _session: Session | None

    if TYPE_CHECKING:

        @property
        def _running(self) -> RequestScheduler: ...

        @property
        def render_mode(self) -> str | None:
            """See `Lifecycle`."""

    @property
    def draws_beside(self) -> bool:
        """Whether images are drawn beside the steps (`render=`): `render` may be awaited while a step is in flight."""
        return self._session is not None and self._session.images is not None

    @overload
    async def render(self, mode: Literal["arrays"] | None = None) -> Any: ...
    @overload
    async def render(self, mode: Literal["grid"]) -> npt.NDArray[np.uint8]: ...
    async def render(self, mode: Literal["arrays", "grid"] | None = None) -> Any:
        """Images of the states that `reset` and `step` (or `recv`) returned last.

        With `render=` given to the constructor they are already on their way, drawn from the very state that was
        returned, and a step may be in flight meanwhile. Without, this is `call("render")`: with `pixels=` the images
        that observations hold, several cameras side by side; else None, unless the envs were made with a `render_mode`,
        "rgb_array" say.

        If this is cancelled, the images are drawn all the same.

        Args:
            mode: None or "arrays" for one image a slot (the blocking API tells these two apart); "grid" for one picture
                of all, as square a grid as it gets.

        Returns:
            uint8 of shape `(num_envs, height, width, 3)`, row by row from the top; a tuple where the images of
            the envs differ in shape. With `depth` or `segmentation` a tuple of that and of these arrays: depth float32
            `(num_envs, height, width)` in metres, and segmentation int32 `(num_envs, height, width, 2)`. With a list of
            C cameras an axis of C comes second. The same arrays again if nothing was returned in between. With "grid"
            colours alone, `(rows * height, columns * width, 3)`.

        Raises:
            RenderError: if there is no state yet; if an image could not be drawn (`slots`), with the others as
                `partial`; with "grid" also if the envs' images differ in shape.
            StepTimeout: if `timeout_s` passed. The images are drawn all the same, by another render worker if
                this one hangs and `restart` allows it.
            ValueError: if `mode` is neither.
        """
        check_mode(mode)
        schedule = self._running
        assert self._session is not None
        wait = self._clock.images.begin()
        try:
            if self._session.images is not None:
                images = await self._session.images.render(schedule.timeouts)
            else:
                images = stack_images(await self._drawn_by_envs(schedule))
        finally:
            wait.end()
        return as_grid(images) if mode == "grid" else images

    async def _drawn_by_envs(self, schedule: RequestScheduler) -> tuple[Any, ...]:
        try:
            return await call_envs(schedule, None, "render", (), {})
        except EnvError as error:
            if self.render_mode is None:
                error.add_note(f"render: these envs were made without a render_mode: {_DRAWN_BY}")
            raise

    def render_stream(self, buffer: int = 8) -> ImageStream:
        """Iterate over the images of all results from now on, in order, while stepping goes on::

            async for step, images in envs.render_stream():
                video.append(images)

        Each result of `reset`, `step` or `recv` that is handed out, and each of a group of `rollout`, gives one item:
        its number, counted from 0 at the first result of this vector env, and what `render()` would have given then
        (nothing, as long as a slot has had no result yet). The arrays may be those that `render()` and other streams
        give: copy what you write to.
        Stepping never waits for the stream. When more than `buffer` items wait, because they are drawn or taken
        slower than steps are made, the oldest is dropped, which shows as a gap in the numbers. There may be several.

        It ends when the vector env is closed, with what is not drawn by then left out; `await stream.aclose()` ends
        it before. A cancelled iteration loses nothing.

        Args:
            buffer: how many items may wait.

        Raises:
            RenderError: if nothing is drawn, since `render=` was not given; while iterating, if an image could
                not be drawn: iterate again to go on with the next step.
            StepTimeout: while iterating, if a result's images are not drawn within `timeout_s` from when they are
                waited for: iterate again to wait on.
            ValueError: if `buffer` is not a positive int.
        """
        check_int("buffer", buffer, 1 << 20)
        schedule = self._running
        assert self._session is not None
        if self._session.images is None:
            raise RenderError("render_stream: nothing is drawn; pass render=aioenv.RenderConfig(...) when you make it")
        return ImageStream(self._session.images, buffer, schedule.timeouts)


def check_mode(mode: str | None) -> None:
    """Raise a ValueError unless it is a mode of `render`."""
    if mode not in (None, "arrays", "grid"):
        raise ValueError(f'render: mode: expected None, "arrays" or "grid", got {mode!r}')


def colours(images: Any) -> npt.NDArray[np.uint8]:
    """The colours alone of what `render` gives.

    Raises:
        RenderError: if they are not of one shape.
    """
    if isinstance(images, tuple) and images and isinstance(images[0], np.ndarray) and images[0].ndim >= 4:
        images = images[0]
    if isinstance(images, tuple) and all(image is None for image in images):
        raise RenderError(f"these envs give no images: {_DRAWN_BY}")
    if not isinstance(images, np.ndarray) or images.ndim < 4:
        raise RenderError("one picture of all takes images of one shape, which those of these envs are not")
    return images


def as_grid(images: Any) -> npt.NDArray[np.uint8]:
    """The colours of what `render` gives as one picture."""
    return tile(colours(images))
