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
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from aioenv.core.backend import Backend
from aioenv.core.images.pool import Pool
from aioenv.errors import RenderError, WireError
from aioenv.ipc.frames import Frame
from aioenv.ipc.messages import Failure, load, reason_of
from aioenv.ipc.partial_unpickling import find_unreadable, salvage
from aioenv.process.supervisor import Worker

if TYPE_CHECKING:
    from aioenv.rendering.draw_requests import ImageBuffer, RenderContext
    from aioenv.state.render_source import RenderUpdate
    from aioenv.tracing.timeline import Trace

__all__ = ["ImageRequest", "StepImages"]

Slots = npt.NDArray[np.int64]
States = npt.NDArray[np.float64]


class ImageSubscriber(Protocol):
    """What `StepImages` tells of each result: an `ImageStream`."""

    def add(self, step: int, shots: list[ImageRequest]) -> None:
        """A result has been handed out, each slot's image in its shot."""

    def end(self, *, drawn: bool = False) -> None:
        """Nothing more will come; what is drawn may be taken still, if that is wanted."""


class ImageRequest:
    """The images of one exchange, that in row i of `slots[i]`.

    Attributes:
        sheet: what the pool draws on; None before it has begun.
        images: where the workers draw, what they have drawn.
    """

    def __init__(self, slots: Slots, done: asyncio.Future[None]) -> None:
        self.slots = slots
        self.sheet: ImageBuffer | None = None
        self.images: list[Any] = [None] * len(slots)
        self.open = len(slots)
        self.kept = 0  # why it is to be drawn: for whom it is one of the two newest or is shown, and who waits for it
        self.error: Exception | None = None
        self.missing: set[int] = set()  # slots without an image, once that is known
        self.done = done
        self.active = False
        self.waiting: list[tuple[Slots, States, RenderContext]] = []
        self.states: States | None = None  # of a vector env in this process, which has them before its results are in
        self.step: int | None = None  # its number in the timeline

    def rows(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Where slots stand in this shot."""
        return np.searchsorted(self.slots, slots)


class _NoImage:
    """In the place of an image that a worker could not draw, or has taken with it; and why."""

    def __init__(self, why: str) -> None:
        self.why = why


class StepImages:
    """The shots of a vector env.

    Args:
        num_envs: how many slots there are.
        pool: draws states; None if the workers draw.
        max_active: how many shots the pool works on at once: one being drawn, others to go on with at once.
    """

    def __init__(self, num_envs: int, pool: Pool | None, max_active: int = 2) -> None:
        self._pool = pool
        self._max_active = max_active
        self.loop = asyncio.get_running_loop()
        self._newest: list[deque[ImageRequest]] = [deque() for _ in range(num_envs)]
        self._shown: list[ImageRequest | None] = [None] * num_envs
        self._latest: list[Any] = [None] * num_envs  # what the workers drew last; None before, or a `_NoImage`
        self._queue: deque[ImageRequest] = deque()
        self._unfinished: set[ImageRequest] = set()
        self._active = 0
        self._advancing = False
        self._late: dict[tuple[int, int], tuple[ImageRequest, Slots]] = {}
        self.trace: Trace | None = None  # the timeline that is being collected
        self.streams: weakref.WeakSet[ImageSubscriber] = weakref.WeakSet()
        self._results = 0

    # ------------------------------------------------------------ from the schedule

    def begin(self, slots: Slots) -> ImageRequest:
        """A step or reset of these slots is about to be sent."""
        shot = ImageRequest(slots, self.loop.create_future())
        self._unfinished.add(shot)
        shot.kept = shot.open
        for slot in slots.tolist():
            newest = self._newest[slot]
            newest.append(shot)
            if len(newest) > 2:
                self.let_go(newest.popleft())
        if not shot.open:
            self._finish(shot, slots)
        return shot

    def expect(self, worker: Worker, request: int, shot: ImageRequest, slots: Slots) -> None:
        """A worker will answer this request, and then draw (if there is no pool)."""
        if self._pool is None:
            worker.on_images = lambda frame: self._on_images(worker, frame)
            self._late[worker.index, request] = (shot, slots)

    def receive(self, parcels: Sequence[tuple[int, RenderUpdate]]) -> None:
        """Models have come, of slots whose states come next."""
        assert self._pool is not None
        self._pool.receive(parcels)

    def draw(self, shot: ImageRequest, slots: Slots, states: States) -> None:
        """States have arrived; they are copied unless they go out at once."""
        if shot.done.done():  # everything is being closed
            return
        if shot.active or self._active < self._max_active:
            self._activate(shot)
            self._dispatch(shot, slots, states)
        else:
            if not shot.waiting:
                self._queue.append(shot)
            assert self._pool is not None
            shot.waiting.append((slots, states.copy(), self._pool.beside(slots.tolist(), states)))

    def give_up(
        self, worker: Worker | None, request: int | None, shot: ImageRequest, slots: Slots, error: Exception
    ) -> None:
        """A request has failed as a whole: nothing comes of it that could be drawn."""
        if worker is not None and request is not None:
            self._late.pop((worker.index, request), None)
        self._finish(shot, slots, error)
        self._advance(shot)

    def forget(self, worker: Worker, request: int | None) -> None:
        """A request was not answered, and will be sent again."""
        if request is not None:
            self._late.pop((worker.index, request), None)

    def lose(self, worker: Worker, error: Exception) -> None:
        """A worker has ended: what it was still to draw after its replies will not come."""
        for key in [key for key in self._late if key[0] == worker.index]:
            shot, slots = self._late.pop(key)
            for slot in slots.tolist():
                self._latest[slot] = _NoImage("its last image was lost with its worker")
            self._finish(shot, slots, error)

    def show(self, shot: ImageRequest, slots: Slots) -> None:
        """The results of these slots are handed out: `render` gives their images from now on."""
        shot.kept += len(slots)
        for slot in slots.tolist():
            before, self._shown[slot] = self._shown[slot], shot
            if before is not None:
                self.let_go(before)

    def newest(self, slots: Slots) -> dict[int, ImageRequest]:
        """The shot of the last step or reset of each of these slots that had one, whatever became of its result."""
        return {slot: self._newest[slot][-1] for slot in slots.tolist() if self._newest[slot]}

    def show_again(self, shots: Mapping[int, ImageRequest]) -> None:
        """Slots are handed out as these shots have them, with a result that is of others."""
        for slot, shot in shots.items():
            if self._shown[slot] is not shot:
                self.show(shot, np.array([slot]))

    def publish(self) -> None:
        """All of a result has been shown: this is one item of each stream."""
        self._results += 1
        if self.streams:
            shots = [shot for shot in self._shown if shot is not None]
            if len(shots) == len(self._shown):
                for stream in self.streams:
                    stream.add(self._results - 1, shots)

    def let_go(self, shot: ImageRequest) -> None:
        """A reason less to draw a shot; without any, it is not drawn unless that has begun."""
        shot.kept -= 1
        if shot.kept <= 0 and shot.waiting:
            self._queue.remove(shot)
            shot.waiting = []
            self._give_up(shot, RenderError("these images were dropped: newer ones came twice"))

    def _give_up(self, shot: ImageRequest, error: Exception) -> None:
        """Nothing more will come of a shot."""
        shot.open = 0
        self._finish(shot, shot.slots[:0], error, shot.slots)

    def _finish(
        self, shot: ImageRequest, slots: Slots, error: Exception | None = None, missing: Iterable[int] | None = None
    ) -> None:
        """The images of more slots are there, or will never be: with an error these are `missing`, all by default."""
        shot.open -= len(slots)
        shot.error = shot.error or error
        if error is not None:
            shot.missing.update(map(int, slots if missing is None else missing))
        if shot.open == 0 and not shot.done.done():
            self._unfinished.discard(shot)
            shot.done.set_result(None)

    # ------------------------------------------------------------ drawing

    def _activate(self, shot: ImageRequest) -> None:
        if not shot.active:
            shot.active = True
            self._active += 1
            assert self._pool is not None
            # not before: of those that are dropped there may be many
            shot.sheet = shot.sheet or self._pool.sheet(len(shot.slots))

    def _dispatch(self, shot: ImageRequest, slots: Slots, states: States, beside: RenderContext | None = None) -> None:
        assert self._pool is not None and shot.sheet is not None

        def on_done(error: RenderError | None) -> None:
            self._finish(shot, slots, error, (error and error.slots) or None)
            self._advance(shot)

        if self.trace is not None:
            self.trace.step = shot.step
        # a part's slots stand next to each other
        self._pool.submit(slots.tolist(), states, shot.sheet, int(shot.rows(slots[:1])[0]), on_done, beside)

    def _advance(self, shot: ImageRequest) -> None:
        """A shot may be complete: go on with the next one that anybody may still want."""
        if shot.open <= 0 and shot.active:
            shot.active = False
            self._active -= 1
        if self._advancing:  # a pool without workers answers at once: no deeper with each shot
            return
        self._advancing = True
        try:
            while self._queue and self._active < self._max_active:
                following = self._queue.popleft()
                parts, following.waiting = following.waiting, []
                self._activate(following)
                for slots, states, beside in parts:
                    self._dispatch(following, slots, states, beside)
        finally:
            self._advancing = False

    def _on_images(self, worker: Worker, frame: Frame) -> None:
        known = self._late.pop((worker.index, frame.request), None)
        if known is None:  # nobody asked
            return
        shot, slots = known
        try:
            error = self._take_images(worker, shot, slots, frame.tail)
        except Exception as exc:
            error = RenderError(f"what slots {slots.tolist()} have drawn can't be read: {reason_of(exc)}")
            error.slots = tuple(slots.tolist())
        self._finish(shot, slots, error, (error and error.slots) or None)

    def _take_images(self, worker: Worker, shot: ImageRequest, slots: Slots, tail: memoryview) -> RenderError | None:
        """Put what envs have drawn into a shot; the error of the first that has no image, if any has none."""
        failed: list[Failure]
        try:
            rows, images, failed = load(tail)
        except WireError:  # images that don't unpickle are errors of their slots
            rows, images, failed = salvage(tail, ())
        errors = [worker.failure(failure) for failure in failed]
        drawn = {worker.slots[row] for row in rows}
        for row, image in zip(rows, images, strict=True):
            slot = worker.slots[row]
            found = find_unreadable(image)
            self._latest[slot] = image
            if found is not None:
                why = f"its image does not unpickle in this process: {reason_of(found.exc)}"
                errors.append(worker.failure_here(why, [slot]))
        for error in errors:
            self._latest[error.slot] = _NoImage(f"its last image could not be drawn: {error}")
        # slots that a reset left as they were look as before
        for slot, row in zip(slots.tolist(), shot.rows(slots), strict=True):
            shot.images[row] = latest = self._latest[slot]
            if isinstance(latest, _NoImage) and slot not in drawn:
                errors.append(worker.failure_here(latest.why, [slot]))
        if not errors:
            return None
        first = min(errors, key=lambda error: error.slot)
        failure = RenderError(f"slot {first.slot} could not be rendered: {first}")
        failure.slots = tuple(sorted({int(error.slot) for error in errors}))
        return failure

    # ------------------------------------------------------------ to the user

    async def render(self, backend: Backend) -> Any:
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
        shown = list(dict.fromkeys(shot for shot in shots if shot is not None))
        for shot in shown:
            shot.kept += 1  # claimed: it must not be dropped while we wait
        try:
            if waited_for := [shot.done for shot in shown if not shot.done.done()]:
                await backend.wait_for_images("render", partial(asyncio.wait, waited_for))
        finally:
            for shot in shown:
                self.let_go(shot)
        return self.gather("render", [shot for shot in shots if shot is not None])

    def gather(self, what: str, shots: Sequence[ImageRequest]) -> Any:
        """The images of all slots, of which each has its shot.

        Args:
            what: asks for them, for errors.
            shots: of slot 0, 1, …; all that could be drawn is.

        Raises:
            RenderError: if one could not, with the others.
        """
        missing = [slot for slot, shot in enumerate(shots) if slot in shot.missing]
        if missing:
            wrong = shots[missing[0]].error  # of one worker; others may have failed, too
            more = f"\n(there are no images of slots {missing})" if len(missing) > 1 else ""
            error = RenderError(f"{what}: {wrong}{more}")
            error.slots, error.partial = tuple(missing), self._gather_some(shots)
            raise error from wrong
        first = shots[0]
        if first.sheet is not None and all(shot is first for shot in shots):  # then it is of all slots
            arrays = first.sheet.images.arrays
            return arrays[0] if len(arrays) == 1 else arrays
        rows = [int(shot.rows(np.array([slot]))[0]) for slot, shot in enumerate(shots)]
        if self._pool is None:
            return stack_images([shot.images[row] for shot, row in zip(shots, rows, strict=True)])
        each = [shot.sheet.images.row(row).arrays for shot, row in zip(shots, rows, strict=True) if shot.sheet]
        stacked = tuple(np.stack(kind) for kind in zip(*each, strict=True))
        return stacked[0] if len(stacked) == 1 else stacked

    def _gather_some(self, shots: Sequence[ImageRequest]) -> Any:
        """Likewise, where some are missing; None if all are."""
        drawn: list[Any] = []
        for slot, shot in enumerate(shots):
            row = int(shot.rows(np.array([slot]))[0])
            if slot in shot.missing:
                drawn.append(None)
            else:
                drawn.append(shot.images[row] if shot.sheet is None else shot.sheet.images.row(row).arrays)
        first = next((image for image in drawn if image is not None), None)
        if first is None or self._pool is None:
            return None if first is None else tuple(drawn)
        blank = tuple(map(np.zeros_like, first))
        each = [blank if arrays is None else arrays for arrays in drawn]
        stacked = tuple(np.stack(kind) for kind in zip(*each, strict=True))
        return stacked[0] if len(stacked) == 1 else stacked

    def fail_all(self, error: Exception) -> None:
        """Nothing will be drawn any more (the vector env is closing): end every wait."""
        for shot in self._queue:
            shot.waiting = []  # or a stream that lets go of it would look for it in the queue
        self._queue.clear()
        for stream in self.streams:  # first, as long as what is drawn can be told from the rest
            stream.end(drawn=True)
        for shot in list(self._unfinished):
            self._give_up(shot, error)
        # what nobody else has goes now
        count = len(self._shown)
        self._shown, self._latest = [None] * count, [None] * count
        for newest in self._newest:
            newest.clear()


def stack_images(images: Sequence[Any]) -> Any:
    """Images as one array if they are arrays of one shape and dtype, else as a tuple."""
    first = images[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(i, np.ndarray) and i.shape == first.shape and i.dtype == first.dtype for i in images
    ):
        return np.stack(images)
    return tuple(images)
