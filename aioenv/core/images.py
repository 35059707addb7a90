"""The images of a vector env: `EnvImages` for its user, and images as observations, drawn by render workers.

With images as observations the envs return states, and the user gets images in their place. `PixelRenderer` draws
replies of workers, `ResultPixelRenderer` results of a vector env in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.core.env_calls import call_envs
from aioenv.core.requests import Batch, WorkerRequest
from aioenv.core.results import ResetResult, StepResult
from aioenv.errors import EnvError, RenderError
from aioenv.rendering.config import check_int
from aioenv.rendering.images import stack_images, tile
from aioenv.rendering.step_images import ImageStream

if TYPE_CHECKING:
    from aioenv.core.backend import Backend
    from aioenv.core.waits import Clock
    from aioenv.rendering.images import ImageBuffer
    from aioenv.rendering.step_images import StepImages
    from aioenv.rendering.step_pool import StepRenderPool
    from aioenv.state.render_source import RenderUpdate

__all__ = ["EnvImages", "PixelRenderer", "ResultPixelRenderer", "colours"]


Done = Callable[[RenderError | None], None]
# A terminal observation: its slot, and the array of infos and the index there that it is at.
Final = tuple[int, Any, int]


class PixelRenderer:
    """Draws the states of replies before they are returned.

    Args:
        pool: draws states.
        leaf: the number of the leaf of the observations that is drawn.
        key: its key in a Dict of observations; None if it is the whole observation.
    """

    def __init__(self, pool: StepRenderPool, leaf: int, key: str | None) -> None:
        self._pool = pool
        self._leaf = leaf
        self._key = key

    def new_buffer(self, n: int) -> ImageBuffer:
        """Return a buffer for n rows of observations."""
        return self._pool.new_buffer(n)

    def update_models(self, updates: Sequence[tuple[int, RenderUpdate]]) -> None:
        """Pass on new models of slots, before the states that are drawn with them."""
        self._pool.update_models(updates)

    def draw(self, batch: Batch, part: WorkerRequest, done: Done) -> None:
        """Draw the images of a worker request whose reply has been read; never blocks.

        Args:
            batch: the batch of the request; the images are drawn into rows of its image buffer.
            part: the worker request. Terminal observations in its infos are drawn, too.
            done: called once, when all are drawn or have failed.
        """
        assert batch.image_buffer is not None
        states = batch.received[self._leaf][part.start : part.stop]
        finals = list(self._finals(part))
        _draw(self._pool, self._key, part.slots.tolist(), states, batch.image_buffer, part.start, finals, done)

    def _finals(self, part: WorkerRequest) -> Iterator[Final]:
        """Yield the terminal observations of a worker request."""
        for columns in part.columns:
            for column, values in zip(columns.schema.columns, columns.values, strict=True):
                if column.path != ("final_obs",):
                    continue
                positions = columns.positions
                numbers = range(positions.start, positions.stop) if isinstance(positions, slice) else positions.tolist()
                for index, position in enumerate(numbers):
                    yield int(part.slots[position - part.start]), values, index


class ResultPixelRenderer:
    """Draws the results of a vector env in this process before they are returned.

    Args:
        pool: draws states.
        key: of the states in a Dict of observations; None if they are the whole observation.
        error_of: makes the vector env's error of a failure to draw.

    Attributes:
        drawing: how many results are being drawn.
    """

    def __init__(self, pool: StepRenderPool, key: str | None, error_of: Callable[[Exception], EnvError]) -> None:
        self._pool = pool
        self._key = key
        self._error_of = error_of
        self.drawing = 0

    def draw(
        self,
        result: StepResult | ResetResult,
        slots: npt.NDArray[np.int64],
        done: Callable[[StepResult | ResetResult | EnvError], None],
    ) -> None:
        """Draw the images of a result; never blocks.

        Args:
            result: a batch of all slots that has no other user; images replace its terminal observations in place.
            slots: int64, ascending: the slots that are returned. The images of others are black.
            done: called once, with the result that has images; or with the error, whose `partial` has the images that
                could be drawn.
        """
        key, info = self._key, result.info
        states = result.obs if key is None else result.obs[key]
        finals = info.get("final_obs", ())
        buffer = self._pool.new_buffer(len(slots))
        self.drawing += 1

        def on_done(error: RenderError | None) -> None:
            self.drawing -= 1
            drawn = buffer.images.rgb
            if len(slots) < len(states):
                drawn = np.zeros((len(states), *drawn.shape[1:]), drawn.dtype)
                drawn[slots] = buffer.images.rgb
            whole = result._replace(obs=drawn if key is None else {**result.obs, key: drawn})
            if error is None:
                done(whole)
                return
            failure = self._error_of(error)
            failure.partial = whole
            done(failure)

        ends = [(slot, finals, slot) for slot, obs in enumerate(finals) if obs is not None]
        some = states if len(slots) == len(states) else states[slots]
        _draw(self._pool, key, slots.tolist(), some, buffer, 0, ends, on_done)


def _draw(
    pool: StepRenderPool,
    key: str | None,
    slots: Sequence[int],
    states: npt.NDArray[np.float64],
    buffer: ImageBuffer,
    first: int,
    finals: Sequence[Final],
    done: Done,
) -> None:
    """Draw states into a buffer from row `first` on, and replace terminal observations by images."""
    final_buffer = pool.new_buffer(len(finals)) if finals else None
    left = 2 if finals else 1
    first_error: RenderError | None = None
    missing: set[int] = set()

    def on_done(error: RenderError | None) -> None:
        nonlocal left, first_error
        left -= 1
        if error is not None:
            missing.update(error.slots)
            first_error = first_error or error
            first_error.slots = tuple(sorted(missing))
        if left:
            return
        images = final_buffer.images.rgb if final_buffer is not None else ()
        for (_, column, index), image in zip(finals, images, strict=True):
            # copies: views would each keep the whole buffer
            column[index] = image.copy() if key is None else {**column[index], key: image.copy()}
        done(first_error)

    if final_buffer is not None:
        each = [column[index] for _, column, index in finals]
        final_states = np.stack([obs if key is None else obs[key] for obs in each])
        pool.submit([slot for slot, _, _ in finals], final_states, final_buffer, 0, on_done)
    pool.submit(slots, states, buffer, first, on_done)


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
        if self._images is None or not self._images.draws:
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
