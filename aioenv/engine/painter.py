"""Images as observations, drawn by render workers: workers send states, in whose place the user gets images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from aioenv.engine.batch import Batch, Part

if TYPE_CHECKING:
    from aioenv.engine.images import Pool
    from aioenv.rendering.drawing import Sheet

__all__ = ["Painter"]

Done = Callable[[Exception | None], None]


class Painter:
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

    def sheet(self, n: int) -> Sheet:
        """What n rows of observations are drawn on."""
        return self._pool.sheet(n)

    def paint(self, batch: Batch, part: Part, done: Done) -> None:
        """Draw the images of a part whose reply has been read; never blocks.

        Args:
            batch: the part's, with a sheet of `sheet`, whose rows are drawn on.
            part: with the terminal observations in its infos, which are drawn too.
            done: called once, when all are drawn or can't be.
        """
        finals = list(self._finals(part))
        aside = self._pool.sheet(len(finals)) if finals else None
        left = 2 if finals else 1
        first_error: Exception | None = None

        def on_done(error: Exception | None) -> None:
            nonlocal left, first_error
            left -= 1
            first_error = first_error or error
            if left:
                return
            for (_, column, index), image in zip(finals, aside.images.rgb if aside is not None else (), strict=True):
                # its own: views of a batch of them would all keep that
                column[index] = image.copy() if self._key is None else {**column[index], self._key: image.copy()}
            done(first_error)

        if aside is not None:
            states = np.stack([self._state(column[index]) for _, column, index in finals])
            self._pool.submit([slot for slot, _, _ in finals], states, aside, 0, on_done)
        assert batch.sheet is not None
        states = batch.received[self._leaf][part.start : part.stop]
        self._pool.submit(part.slots.tolist(), states, batch.sheet, part.start, on_done)

    def _state(self, obs: Any) -> Any:
        return obs if self._key is None else obs[self._key]

    def _finals(self, part: Part) -> Iterator[tuple[int, list[Any], int]]:
        """The terminal observations of a part: whose each is, and where it stands."""
        for columns in part.columns:
            for column, values in zip(columns.schema.columns, columns.values, strict=True):
                if column.path != ("final_obs",):
                    continue
                positions = columns.positions
                numbers = range(positions.start, positions.stop) if isinstance(positions, slice) else positions.tolist()
                for index, position in enumerate(numbers):
                    yield int(part.slots[position - part.start]), values, index
