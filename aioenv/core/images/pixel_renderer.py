"""Images as observations, drawn by render workers: envs give states, in whose place the user gets images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.core.images.pool import Pool
from aioenv.core.requests import Batch, WorkerRequest
from aioenv.core.results import ResetResult, StepResult
from aioenv.errors import EnvError, RenderError

if TYPE_CHECKING:
    from aioenv.rendering.draw_requests import ImageBuffer
    from aioenv.state.render_source import RenderUpdate

__all__ = ["PixelRenderer", "ResultPixelRenderer"]

Done = Callable[[RenderError | None], None]
# A terminal observation: whose it is, and the element of infos that it is.
Final = tuple[int, Any, int]


class PixelRenderer:
    """Draws what has arrived, before it is handed out.

    Args:
        pool: draws states.
        leaf: the number of the observations' leaf that is drawn.
        key: its key in a Dict of observations; None if it is the whole observation.
    """

    def __init__(self, pool: Pool, leaf: int, key: str | None) -> None:
        self._pool = pool
        self._leaf = leaf
        self._key = key

    def sheet(self, n: int) -> ImageBuffer:
        """What n rows of observations are drawn on."""
        return self._pool.sheet(n)

    def receive(self, parcels: Sequence[tuple[int, RenderUpdate]]) -> None:
        """Models have come, of slots whose states are drawn next."""
        self._pool.receive(parcels)

    def paint(self, batch: Batch, part: WorkerRequest, done: Done) -> None:
        """Draw the images of a part whose reply has been read; never blocks.

        Args:
            batch: the part's, with a sheet of `sheet`, whose rows are drawn on.
            part: with the terminal observations in its infos, which are drawn too.
            done: called once, when all are drawn or can't be.
        """
        assert batch.image_buffer is not None
        states = batch.received[self._leaf][part.start : part.stop]
        finals = list(self._finals(part))
        _draw(self._pool, self._key, part.slots.tolist(), states, batch.image_buffer, part.start, finals, done)

    def _finals(self, part: WorkerRequest) -> Iterator[Final]:
        """The terminal observations of a part."""
        for columns in part.columns:
            for column, values in zip(columns.schema.columns, columns.values, strict=True):
                if column.path != ("final_obs",):
                    continue
                positions = columns.positions
                numbers = range(positions.start, positions.stop) if isinstance(positions, slice) else positions.tolist()
                for index, position in enumerate(numbers):
                    yield int(part.slots[position - part.start]), values, index


class ResultPixelRenderer:
    """Draws the results of a vector env in this process, before they are handed out.

    Args:
        pool: draws states.
        key: of the states in a Dict of observations; None if they are the whole observation.
        error_of: what the vector env's error is if they can't be drawn.

    Attributes:
        drawing: how many results are being drawn.
    """

    def __init__(self, pool: Pool, key: str | None, error_of: Callable[[Exception], EnvError]) -> None:
        self._pool = pool
        self._key = key
        self._error_of = error_of
        self.drawing = 0

    def paint(
        self,
        result: StepResult | ResetResult,
        slots: npt.NDArray[np.int64],
        done: Callable[[StepResult | ResetResult | EnvError], None],
    ) -> None:
        """Draw the images of a result; never blocks.

        Args:
            result: a batch of all slots, which nobody else has; its terminal observations are drawn in place.
            slots: int64, ascending: those that are handed out. The images of others are black.
            done: called once, with the result that has images; or the error, whose `partial` has those that could be
                drawn.
        """
        key, info = self._key, result.info
        states = result.obs if key is None else result.obs[key]
        finals = info.get("final_obs", ())
        sheet = self._pool.sheet(len(slots))
        self.drawing += 1

        def on_done(error: RenderError | None) -> None:
            self.drawing -= 1
            drawn = sheet.images.rgb
            if len(slots) < len(states):
                drawn = np.zeros((len(states), *drawn.shape[1:]), drawn.dtype)
                drawn[slots] = sheet.images.rgb
            whole = result._replace(obs=drawn if key is None else {**result.obs, key: drawn})
            if error is None:
                done(whole)
                return
            failure = self._error_of(error)
            failure.partial = whole
            done(failure)

        ends = [(slot, finals, slot) for slot, obs in enumerate(finals) if obs is not None]
        some = states if len(slots) == len(states) else states[slots]
        _draw(self._pool, key, slots.tolist(), some, sheet, 0, ends, on_done)


def _draw(
    pool: Pool,
    key: str | None,
    slots: Sequence[int],
    states: npt.NDArray[np.float64],
    sheet: ImageBuffer,
    first: int,
    finals: Sequence[Final],
    done: Done,
) -> None:
    """Draw states on a sheet from row `first` on, and terminal observations in their place."""
    aside = pool.sheet(len(finals)) if finals else None
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
        for (_, column, index), image in zip(finals, aside.images.rgb if aside is not None else (), strict=True):
            # its own: views of a batch of them would all keep that
            column[index] = image.copy() if key is None else {**column[index], key: image.copy()}
        done(first_error)

    if aside is not None:
        each = [column[index] for _, column, index in finals]
        final_states = np.stack([obs if key is None else obs[key] for obs in each])
        pool.submit([slot for slot, _, _ in finals], final_states, aside, 0, on_done)
    pool.submit(slots, states, sheet, first, on_done)
