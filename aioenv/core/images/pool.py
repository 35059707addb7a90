"""What the images of a vector env need of what draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderError

if TYPE_CHECKING:
    from aioenv.rendering.draw_requests import ImageBuffer, RenderContext
    from aioenv.state.render_source import RenderUpdate

__all__ = ["Pool", "States"]

States = npt.NDArray[np.float64]


class Pool(Protocol):
    """What `Images` needs of `rendering.LatePool`."""

    def sheet(self, n: int) -> ImageBuffer:
        """What the images of n slots are drawn on; nobody else has it."""

    def submit(
        self,
        slots: Sequence[int],
        states: States,
        sheet: ImageBuffer,
        first: int,
        on_done: Callable[[RenderError | None], None],
        beside: RenderContext | None = None,
    ) -> None:
        """Draw k states on k rows of a sheet; never blocks. An error tells the slots whose rows stay zero."""

    def beside(self, slots: Sequence[int], states: States) -> RenderContext:
        """What they are drawn with beside their states, as it is now."""

    def receive(self, parcels: Sequence[tuple[int, RenderUpdate]]) -> None:
        """Models have come, of slots whose states come next."""
