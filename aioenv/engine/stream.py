"""A stream of images: those of every result that is handed out, in order, while stepping goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from aioenv.errors import RenderError

if TYPE_CHECKING:
    from aioenv.engine.images import Images, Shot

__all__ = ["ImageStream"]


class ImageStream:
    """An async iterator of `(step, images)`; see `AsyncVectorEnv.render_stream`.

    Args:
        images: where they come from.
        buffer: how many results may wait here at most.
    """

    def __init__(self, images: Images, buffer: int) -> None:
        self._images = images
        self._buffer = buffer
        self._waiting: deque[tuple[int, list[Shot]]] = deque()
        self._arrival = asyncio.Event()
        self._open = True

    def add(self, step: int, shots: list[Shot]) -> None:
        """A result has been handed out: each slot's image is, or will be, in its shot."""
        for shot in set(shots):
            shot.kept += 1  # it must be drawn
        self._waiting.append((step, shots))
        if len(self._waiting) > self._buffer:
            _release(self._waiting.popleft()[1])
        self._arrival.set()

    def end(self) -> None:
        """Nothing more will come."""
        self._open = False
        while self._waiting:
            _release(self._waiting.popleft()[1])
        self._arrival.set()

    async def next(self) -> tuple[int, Any] | None:
        """The next one; None at the end. If this is cancelled, it comes next time.

        Raises:
            RenderError: if an image could not be drawn; the stream goes on with the next step.
        """
        while not self._waiting:
            if not self._open:
                return None
            self._arrival.clear()
            await self._arrival.wait()
        step, shots = self._waiting[0]
        for shot in set(shots):
            await asyncio.shield(shot.done)
        if not self._waiting:  # closed meanwhile
            return None
        if self._waiting[0][0] != step:  # dropped meanwhile
            return await self.next()
        _release(self._waiting.popleft()[1])
        for shot in shots:
            if shot.error is not None:
                raise RenderError(f"render_stream: step {step}: {shot.error}") from shot.error
        return step, self._images.gather(shots)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        item = await self.next()
        if item is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Take no more part; whoever iterates comes to an end."""
        self._images.streams.discard(self)
        self.end()


def _release(shots: list[Shot]) -> None:
    for shot in set(shots):
        shot.kept -= 1
