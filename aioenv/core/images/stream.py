"""A stream of images: those of every result that is handed out, in order, while stepping goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from aioenv.core.backend import Backend
    from aioenv.core.images.image_requests import ImageRequest, StepImages

__all__ = ["ImageStream"]


class ImageStream:
    """An async iterator of `(step, images)`; see `AsyncVectorEnv.render_stream`.

    Args:
        images: where they come from.
        buffer: how many results may wait here at most.
        backend: waits for what is being drawn.
    """

    def __init__(self, images: StepImages, buffer: int, backend: Backend) -> None:
        self._backend = backend
        self._images = images
        self._buffer = buffer
        self._waiting: deque[tuple[int, list[ImageRequest]]] = deque()
        self._arrival = asyncio.Event()
        self._ended: asyncio.Future[None] = images.loop.create_future()
        images.streams.add(self)

    def add(self, step: int, shots: list[ImageRequest]) -> None:
        """A result has been handed out: each slot's image is, or will be, in its shot."""
        for shot in set(shots):
            shot.kept += 1  # it must be drawn
        self._waiting.append((step, shots))
        while len(self._waiting) > self._buffer:
            self._release(self._waiting.popleft()[1])
        self._arrival.set()

    def end(self, *, drawn: bool = False) -> None:
        """Nothing more will come; of what waits here that stays which is drawn, if it is still wanted."""
        if not self._ended.done():
            self._ended.set_result(None)
        items, self._waiting = self._waiting, deque()
        for step, shots in items:
            if drawn and all(shot.done.done() for shot in shots):
                self._waiting.append((step, shots))
            else:
                self._release(shots)
        self._arrival.set()

    async def next(self) -> tuple[int, Any] | None:
        """The next one; None at the end. If this is cancelled, it comes next time.

        Raises:
            RenderError: if an image could not be drawn; the stream goes on with the next step.
            StepTimeout: if that takes too long; it is waited for again next time.
        """
        while not self._ended.done():
            if not self._waiting:
                self._arrival.clear()
                await self._arrival.wait()
                continue
            # it is out of the buffer, or who draws slower than steps are made would wait in vain for one after another
            step, shots = self._waiting.popleft()
            try:
                for shot in set(shots):
                    if not shot.done.done():
                        ends = [shot.done, self._ended]
                        wait = partial(asyncio.wait, ends, return_when=asyncio.FIRST_COMPLETED)
                        await self._backend.wait_for_images("render_stream", wait)
            except BaseException:
                if self._ended.done():
                    self._release(shots)
                else:
                    self._waiting = deque(sorted([(step, shots), *self._waiting], key=itemgetter(0)))
                    self._arrival.set()  # another task may wait for one
                raise
            if not self._ended.done():
                return self._give(step, shots)
            self._release(shots)
        return self.take_left()

    def take_left(self) -> tuple[int, Any] | None:
        """The next one of what was drawn when the stream ended; None: there is no more.

        Raises:
            RenderError: if an image could not be drawn.
        """
        return self._give(*self._waiting.popleft()) if self._waiting else None

    def _give(self, step: int, shots: list[ImageRequest]) -> tuple[int, Any]:
        self._release(shots)
        return step, self._images.gather(f"render_stream: step {step}", shots)

    def _release(self, shots: list[ImageRequest]) -> None:
        for shot in set(shots):
            self._images.let_go(shot)

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
