"""Images of the states that steps return: asked for when a step is sent, drawn while the next ones run.

Each exchange has a *shot*: the images of its slots. A shot is drawn either by the render pool, from the physics
states that come with each reply, or by the workers themselves after they have replied. For each slot the two
newest shots are kept (the one that was returned last, and the one in flight); one that nobody claims before it is
third in line is not drawn.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from aioenv.engine.patience import Patience
from aioenv.engine.stream import ImageStream
from aioenv.errors import RenderError, WireError
from aioenv.wire.frames import Frame
from aioenv.wire.messages import Failure, load
from aioenv.workers.supervisor import Worker

if TYPE_CHECKING:
    from aioenv.trace.timeline import Trace

__all__ = ["Images", "Pool", "Shot"]

Slots = npt.NDArray[np.int64]
States = npt.NDArray[np.float64]
ImageArrays = Sequence[npt.NDArray[Any]]


class Pool(Protocol):
    """What `Images` needs of `rendering.LatePool`."""

    def allocate(self, n: int) -> tuple[npt.NDArray[Any], ...]:
        """New arrays for all that is drawn of n slots."""

    def submit(
        self,
        slots: Sequence[int],
        states: States,
        images: ImageArrays,
        on_done: Callable[[Exception | None], None],
    ) -> None:
        """Draw k states into k rows of each array; never blocks."""


class Shot:
    """The images of one exchange, that in row i of `slots[i]`.

    Attributes:
        images: arrays, one for each thing that the pool draws; or, where the workers draw, a list of images.
    """

    def __init__(self, slots: Slots, done: asyncio.Future[None]) -> None:
        self.slots = slots
        self.images: Any = [None] * len(slots)
        self.open = len(slots)
        self.kept = len(slots)  # slots for which this is one of the two newest
        self.error: Exception | None = None
        self.done = done
        self.active = False
        self.waiting: list[tuple[Slots, States]] = []
        self.states: States | None = None  # of a vector env in this process, which has them before its results are in
        self.step: int | None = None  # its number in the timeline

    def rows(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Where slots stand in this shot."""
        return np.searchsorted(self.slots, slots)

    def finish(self, count: int, error: Exception | None = None) -> None:
        """`count` more images are there, or will never be."""
        self.open -= count
        self.error = self.error or error
        if self.open == 0 and not self.done.done():
            self.done.set_result(None)


class Images:
    """The shots of a vector env.

    Args:
        num_envs: how many slots there are.
        pool: draws states; None if the workers draw.
        max_active: how many shots the pool works on at once: one being drawn, others to go on with at once.
    """

    def __init__(self, num_envs: int, pool: Pool | None, max_active: int = 2) -> None:
        self._pool = pool
        self._max_active = max_active
        self._loop = asyncio.get_running_loop()
        self._newest: list[deque[Shot]] = [deque() for _ in range(num_envs)]
        self._shown: list[Shot | None] = [None] * num_envs
        self._latest: list[Any] = [None] * num_envs  # what the workers drew last
        self._queue: deque[Shot] = deque()
        self._active = 0
        self._late: dict[tuple[int, int], tuple[Shot, Slots]] = {}
        self.trace: Trace | None = None  # the timeline that is being collected
        self.streams: weakref.WeakSet[ImageStream] = weakref.WeakSet()
        self._results = 0

    # ------------------------------------------------------------ from the schedule

    def begin(self, slots: Slots) -> Shot:
        """A step or reset of these slots is about to be sent."""
        shot = Shot(slots, self._loop.create_future())
        if self._pool is not None:
            shot.images = self._pool.allocate(len(slots))
        for slot in slots.tolist():
            newest = self._newest[slot]
            newest.append(shot)
            if len(newest) > 2:
                newest.popleft().kept -= 1
        return shot

    def expect(self, worker: Worker, request: int, shot: Shot, slots: Slots) -> None:
        """A worker will answer this request, and then draw (if there is no pool)."""
        if self._pool is None:
            worker.on_images = lambda frame: self._on_images(worker, frame)
            self._late[worker.index, request] = (shot, slots)

    def draw(self, shot: Shot, slots: Slots, states: States) -> None:
        """States have arrived; they are copied unless they go out at once."""
        if shot.active or self._active < self._max_active:
            self._activate(shot)
            self._dispatch(shot, slots, states)
        else:
            if not shot.waiting:
                self._queue.append(shot)
            shot.waiting.append((slots, states.copy()))

    def give_up(self, worker: Worker | None, request: int | None, shot: Shot, slots: Slots, error: Exception) -> None:
        """A request has failed as a whole: nothing comes of it that could be drawn."""
        if worker is not None and request is not None:
            self._late.pop((worker.index, request), None)
        shot.finish(len(slots), error)
        self._advance(shot)

    def forget(self, worker: Worker, request: int | None) -> None:
        """A request was not answered, and will be sent again."""
        if request is not None:
            self._late.pop((worker.index, request), None)

    def lose(self, worker: Worker, error: Exception) -> None:
        """A worker has ended: what it was still to draw after its replies will not come."""
        for key in [key for key in self._late if key[0] == worker.index]:
            shot, slots = self._late.pop(key)
            shot.finish(len(slots), error)

    def show(self, shot: Shot, slots: Slots) -> None:
        """The results of these slots are handed out: `render` gives their images from now on."""
        for slot in slots.tolist():
            self._shown[slot] = shot

    def publish(self) -> None:
        """All of a result has been shown: this is one item of each stream."""
        self._results += 1
        if self.streams:
            shots = [shot for shot in self._shown if shot is not None]
            if len(shots) == len(self._shown):
                for stream in self.streams:
                    stream.add(self._results - 1, shots)

    def stream(self, buffer: int) -> ImageStream:
        """The images of all results from now on."""
        stream = ImageStream(self, buffer)
        self.streams.add(stream)
        return stream

    # ------------------------------------------------------------ drawing

    def _activate(self, shot: Shot) -> None:
        if not shot.active:
            shot.active = True
            self._active += 1

    def _dispatch(self, shot: Shot, slots: Slots, states: States) -> None:
        assert self._pool is not None
        rows = shot.rows(slots)
        count = len(slots)

        def on_done(error: Exception | None) -> None:
            shot.finish(count, error)
            self._advance(shot)

        # a part's slots stand next to each other: its images are a slice
        images = [array[int(rows[0]) : int(rows[0]) + count] for array in shot.images]
        if self.trace is not None:
            self.trace.step = shot.step
        self._pool.submit(slots.tolist(), states, images, on_done)

    def _advance(self, shot: Shot) -> None:
        """A shot may be complete: go on with the next one that anybody may still want."""
        if shot.open == 0 and shot.active:
            shot.active = False
            self._active -= 1
        while self._queue and self._active < self._max_active:
            following = self._queue.popleft()
            parts, following.waiting = following.waiting, []
            if following.kept <= 0:
                following.finish(following.open, RenderError("these images were dropped: newer ones came twice"))
                continue
            self._activate(following)
            for slots, states in parts:
                self._dispatch(following, slots, states)

    def _on_images(self, worker: Worker, frame: Frame) -> None:
        known = self._late.pop((worker.index, frame.request), None)
        if known is None:  # nobody asked
            return
        shot, slots = known
        try:
            rows, images, failures = load(frame.tail)
        except WireError as exc:
            shot.finish(len(slots), exc)
            return
        for row, image in zip(rows, images, strict=True):
            self._latest[worker.slots[row]] = image
        # slots that a reset left as they were look as before
        for slot, row in zip(slots.tolist(), shot.rows(slots), strict=True):
            shot.images[row] = self._latest[slot]
        failed: list[Failure] = failures
        error = None
        if failed:
            cause = worker.failure(failed[0])
            error = RenderError(f"slot {cause.slot} could not be rendered: {cause}")
        shot.finish(len(slots), error)

    # ------------------------------------------------------------ to the user

    async def render(self, patience: Patience) -> Any:
        """Images of the states that were returned last: an array, or a tuple of what was asked for.

        Where the workers draw, it is a tuple of N images if they don't stack.

        Raises:
            RenderError: if there is no state yet, or an image could not be drawn.
            StepTimeout: if the images don't come in time.
        """
        shots = list(self._shown)
        missing = [slot for slot, shot in enumerate(shots) if shot is None]
        if missing:
            raise RenderError(f"render: slots {missing} have no state yet; reset() first")
        for shot in dict.fromkeys(shots):
            assert shot is not None
            shot.kept += 1  # claimed: it must not be dropped while we wait
            try:
                await patience.wait_for_images(asyncio.shield(shot.done))
            finally:
                shot.kept -= 1
            if shot.error is not None:
                raise RenderError(f"render: {shot.error}") from shot.error
        return self.gather([shot for shot in shots if shot is not None])

    def gather(self, shots: Sequence[Shot]) -> Any:
        """The images of all slots, of which each has its shot."""
        first = shots[0]
        rows = [int(shot.rows(np.array([slot]))[0]) for slot, shot in enumerate(shots)]
        if self._pool is None:
            return stack_images([shot.images[row] for shot, row in zip(shots, rows, strict=True)])
        arrays = first.images
        if any(shot is not first for shot in shots):
            each = range(len(arrays))
            arrays = [np.stack([shot.images[i][row] for shot, row in zip(shots, rows, strict=True)]) for i in each]
        return arrays[0] if len(arrays) == 1 else tuple(arrays)

    def fail_all(self, error: Exception) -> None:
        """Nothing will be drawn any more (the vector env is closing): end every wait."""
        pending = {id(s): s for newest in self._newest for s in newest if not s.done.done()}
        for shot in pending.values():
            shot.finish(shot.open, error)
        for stream in self.streams:
            stream.end()


def stack_images(images: Sequence[Any]) -> Any:
    """Images as one array if they are arrays of one shape and dtype, else as a tuple."""
    first = images[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(i, np.ndarray) and i.shape == first.shape and i.dtype == first.dtype for i in images
    ):
        return np.stack(images)
    return tuple(images)
