"""Images of the states that steps return: requested when a step is sent, drawn while the next steps run.

`StepImages` keeps one `ImageRequest` for each step or reset that is sent. Its images are drawn by a `StepRenderPool`,
from the physics states that come with each reply, or by the envs' workers after they have replied. For each slot the
two newest requests are kept: that of the result that was returned last, and that of the one in flight. An older request
whose images are neither returned nor waited for is dropped unless its drawing has begun. `ImageStream` iterates over
the images of all results.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderError, WireError
from aioenv.ipc.frames import Frame
from aioenv.ipc.messages import Failure, find_unreadable, load, load_partially, reason_of
from aioenv.process.supervisor import Worker
from aioenv.rendering.images import stack_images

if TYPE_CHECKING:
    from aioenv.rendering.images import ImageBuffer
    from aioenv.rendering.step_pool import RenderContext, StepRenderPool
    from aioenv.state.render_source import RenderUpdate
    from aioenv.tracing.timeline import Trace

__all__ = ["ImageRequest", "ImageStream", "NoImage", "StepImages"]

Slots = npt.NDArray[np.int64]
States = npt.NDArray[np.float64]

# Waits for images within the user's timeout: the name of the user's call, and a function that gives what to wait for.
WaitForImages: TypeAlias = Callable[[str, Callable[[], Awaitable[object]]], Awaitable[None]]


class ImageRequest:
    """The images of one step or reset: that in row i is of `slots[i]`.

    Attributes:
        slots: int64, ascending.
        buffer: the arrays that the render pool draws on; None until its drawing begins.
        images: the images that the envs' workers drew, where they draw.
        undrawn: the slots that have neither an image nor an error yet.
        drawing: how many slots the render pool draws now.
        users: how many need it: slots for which it is the current request or one of the two newest, waiting callers,
            and streams that hold it.
        error: the first error.
        missing: slots without an image, once that is known.
        active: whether the render pool draws it now.
        waiting: states that wait until it becomes active.
        states: of a vector env in this process, the states to draw, which are read before the result arrives.
        step: the number of the step in the timeline.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.buffer: ImageBuffer | None = None
        self.images: list[Any] = [None] * len(slots)
        self.undrawn: set[int] = set(slots.tolist())
        self.drawing = 0
        self.users = 0
        self.error: Exception | None = None
        self.missing: set[int] = set()
        self._waits: list[tuple[list[int], asyncio.Future[None]]] = []
        self.active = False
        self.waiting: list[tuple[Slots, States, RenderContext]] = []
        self.states: States | None = None
        self.step: int | None = None

    def rows(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Return the rows of these slots."""
        return np.searchsorted(self.slots, slots)

    def row(self, slot: int) -> int:
        """Return the row of one slot."""
        return int(np.searchsorted(self.slots, slot))

    def is_done(self, slots: Iterable[int]) -> bool:
        """Return whether the image of each of these slots is there or has failed."""
        return self.undrawn.isdisjoint(slots)

    def when_done(self, slots: list[int]) -> asyncio.Future[None]:
        """Return a future that has a result once the image of each of these slots is there or has failed.

        Others may come much later: the results of some slots are returned before those of a slow one, after a
        cancelled step say.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits = [wait for wait in self._waits if not wait[1].done()]
        self._waits.append((slots, future))
        self.wake()
        return future

    def wake(self) -> None:
        """Resolve the futures of `when_done` whose images have come."""
        for slots, future in self._waits:
            if not future.done() and self.is_done(slots):
                future.set_result(None)


class NoImage:
    """Stands for an image that a worker could not draw, or that was lost with its worker.

    Attributes:
        why: the reason.
    """

    def __init__(self, why: str) -> None:
        self.why = why


class StepImages:
    """The image requests of a vector env.

    Args:
        num_envs: the number of slots.
        pool: draws states; None if the workers of the envs draw.
        max_active: how many requests the pool draws at once: one is drawn, the next ones are ready in its workers.

    Attributes:
        loop: the event loop that it belongs to.
        pool: as given.
        trace: the timeline that is being collected, if any.
        streams: the open image streams.
        paused: returns which slots are paused; None if none are. Those that were never reset are black.
    """

    def __init__(self, num_envs: int, pool: StepRenderPool | None, max_active: int = 2) -> None:
        self.pool = pool
        self.paused: Callable[[], npt.NDArray[np.bool_] | None] = lambda: None
        self._max_active = max_active
        self.loop = asyncio.get_running_loop()
        self._newest: list[deque[ImageRequest]] = [deque() for _ in range(num_envs)]
        self._current: list[ImageRequest | None] = [None] * num_envs  # the requests whose results were returned last
        self._last_drawn: list[Any] = [None] * num_envs  # by workers: images; None before the first, or a `NoImage`
        self._queue: deque[ImageRequest] = deque()
        self._unfinished: set[ImageRequest] = set()
        self._active = 0
        self._advancing = False
        self._expected: dict[tuple[int, int], tuple[ImageRequest, Slots]] = {}  # IMAGES frames, by worker and request
        self.trace: Trace | None = None
        self.streams: weakref.WeakSet[ImageStream] = weakref.WeakSet()
        self._results = 0

    @property
    def draws(self) -> bool:
        """Whether images are drawn: by the workers of the envs, or by a pool that has render workers."""
        return self.pool is None or self.pool.draws

    def last_drawn(self, slots: Slots) -> list[Any]:
        """Return what the env of each of these slots has drawn last; None if nothing, a `NoImage` if it failed."""
        return [self._last_drawn[slot] for slot in slots.tolist()]

    # ------------------------------------------------------------ called by what sends steps and returns results

    def new_request(self, slots: Slots) -> ImageRequest:
        """Request the images of a step or reset of these slots, which is about to be sent."""
        request = ImageRequest(slots)
        if not self.draws:  # it takes the states of a vector env in this process
            return request
        self._unfinished.add(request)
        request.users = len(slots)
        for slot in slots.tolist():
            newest = self._newest[slot]
            newest.append(request)
            if len(newest) > 2:
                self.release(newest.popleft())
        if not request.undrawn:
            self._finish(request, slots)
        return request

    def expect_frame(self, worker: Worker, request_id: int, request: ImageRequest, slots: Slots) -> None:
        """Expect a worker to draw these slots after it has answered a request; a no-op if there is a render pool."""
        if self.pool is None:
            worker.on_images = lambda frame: self._on_images(worker, frame)
            self._expected[worker.index, request_id] = (request, slots)

    def forget_frame(self, worker: Worker, request_id: int | None) -> None:
        """Expect no images for a request that was not answered and will be sent again."""
        if request_id is not None:
            self._expected.pop((worker.index, request_id), None)

    def update_models(self, updates: Sequence[tuple[int, RenderUpdate]]) -> None:
        """Pass on new models of slots, before the states that are drawn with them."""
        assert self.pool is not None
        self.pool.update_models(updates)

    def draw(self, request: ImageRequest, slots: Slots, states: States) -> None:
        """Draw states that have arrived; they are copied unless they are sent on at once."""
        if request.is_done(slots.tolist()):  # it was dropped, or the vector env is being closed
            return
        assert self.pool is not None
        if request.active or self._active < self._max_active:
            self._submit(request, slots, states)
        else:
            if not request.waiting:
                self._queue.append(request)
            request.waiting.append((slots, states.copy(), self.pool.context_of(slots.tolist(), states)))

    def fail(
        self, worker: Worker | None, request_id: int | None, request: ImageRequest, slots: Slots, error: Exception
    ) -> None:
        """Fail the images of slots whose step failed as a whole, so that there is no state to draw.

        Args:
            worker: the worker that the step was sent to; None if it was sent to none.
            request_id: the number of the worker's request.
            request: the images.
            slots: the slots of that worker.
            error: why the step failed.
        """
        if worker is not None:
            self.forget_frame(worker, request_id)
        self._finish(request, slots, error)
        self._advance(request)

    def fail_worker(self, worker: Worker, error: Exception) -> None:
        """Fail the images that a worker that has ended was still to draw."""
        for key in [key for key in self._expected if key[0] == worker.index]:
            request, slots = self._expected.pop(key)
            for slot in slots.tolist():
                self._last_drawn[slot] = NoImage("its last image was lost with its worker")
            self._finish(request, slots, error)

    def set_current(self, request: ImageRequest, slots: Slots) -> None:
        """Have `render` give these images, as the results of these slots are returned now."""
        request.users += len(slots)
        for slot in slots.tolist():
            before, self._current[slot] = self._current[slot], request
            if before is not None:
                self.release(before)

    def newest_requests(self, slots: Slots) -> dict[int, ImageRequest]:
        """Return the newest request of each of these slots that has one, returned or not."""
        return {slot: self._newest[slot][-1] for slot in slots.tolist() if self._newest[slot]}

    def set_current_of_each(self, requests: Mapping[int, ImageRequest]) -> None:
        """Have `render` give the images of these requests, by slot: a result of other slots repeats their states."""
        for slot, request in requests.items():
            if self._current[slot] is not request:
                self.set_current(request, np.array([slot]))

    def end_result(self) -> None:
        """Give every stream one item, after `set_current` was called for all slots of a result."""
        self._results += 1
        if self.streams and not self._stateless():
            for stream in self.streams:
                stream.add(self._results - 1, list(self._current))

    def _stateless(self) -> list[int]:
        """Return the slots without a state that are not paused; all without one if no slot has any."""
        if None not in self._current:
            return []
        slots = [slot for slot, request in enumerate(self._current) if request is None]
        paused = self.paused()
        if paused is None or len(slots) == len(self._current):
            return slots
        return [slot for slot in slots if not paused[slot]]

    def release(self, request: ImageRequest) -> None:
        """Drop one reason to draw a request; after the last one it is not drawn unless its drawing has begun."""
        request.users -= 1
        if request.users <= 0 and request.waiting:
            self._queue.remove(request)
            request.waiting = []
            self._drop(request, RenderError("these images were dropped: newer ones came twice"))

    def _drop(self, request: ImageRequest, error: Exception) -> None:
        """End a request that is not drawn to the end."""
        self._finish(request, request.slots, error)

    def _finish(
        self, request: ImageRequest, slots: Slots, error: Exception | None = None, missing: Iterable[int] | None = None
    ) -> None:
        """Record that the images of these slots are there; with an error, `missing` (by default all) are not."""
        if error is not None:
            undrawn = request.undrawn.intersection(slots.tolist() if missing is None else missing)
            request.missing.update(undrawn)
            request.error = request.error or error
        request.undrawn.difference_update(slots.tolist())
        if not request.undrawn:
            self._unfinished.discard(request)
        request.wake()

    # ------------------------------------------------------------ drawing

    def _submit(
        self, request: ImageRequest, slots: Slots, states: States, context: RenderContext | None = None
    ) -> None:
        assert self.pool is not None
        if not request.active:
            request.active = True
            self._active += 1
            # not allocated before, since many requests may be dropped
            request.buffer = request.buffer or self.pool.new_buffer(len(request.slots))
        assert request.buffer is not None

        def on_done(error: RenderError | None) -> None:
            request.drawing -= len(slots)
            self._finish(request, slots, error, (error and error.slots) or None)
            self._advance(request)

        request.drawing += len(slots)
        if self.trace is not None:
            self.trace.step = request.step
        # the slots of one worker are adjacent
        self.pool.submit(slots.tolist(), states, request.buffer, request.row(slots[0]), on_done, context)

    def _advance(self, request: ImageRequest) -> None:
        """Begin the next request that is still wanted, if nothing of this one is being drawn."""
        if not request.drawing and request.active:
            request.active = False
            self._active -= 1
        if self._advancing:  # a pool without workers answers at once: don't recurse
            return
        self._advancing = True
        try:
            while self._queue and self._active < self._max_active:
                following = self._queue.popleft()
                parts, following.waiting = following.waiting, []
                for slots, states, context in parts:
                    self._submit(following, slots, states, context)
        finally:
            self._advancing = False

    def _on_images(self, worker: Worker, frame: Frame) -> None:
        expected = self._expected.pop((worker.index, frame.request), None)
        if expected is None:
            return
        request, slots = expected
        try:
            error = self._read_images(worker, request, slots, frame.payload)
        except Exception as exc:
            error = RenderError(f"the images that slots {slots.tolist()} have drawn can't be read: {reason_of(exc)}")
            error.slots = tuple(slots.tolist())
        self._finish(request, slots, error, (error and error.slots) or None)

    def _read_images(
        self, worker: Worker, request: ImageRequest, slots: Slots, payload: memoryview
    ) -> RenderError | None:
        """Put the images that envs have drawn into a request.

        Returns:
            The error of the first slot that has no image, with all such slots; None if every slot has one.
        """
        failed: list[Failure]
        try:
            rows, images, failed = load(payload)
        except WireError:  # images that don't unpickle are errors of their slots
            rows, images, failed = load_partially(payload, ())
        errors = [worker.env_error(failure) for failure in failed]
        drawn = {worker.slots[row] for row in rows}
        for row, image in zip(rows, images, strict=True):
            slot = worker.slots[row]
            found = find_unreadable(image)
            self._last_drawn[slot] = image
            if found is not None:
                why = f"its image does not unpickle in this process: {reason_of(found.exc)}"
                errors.append(worker.parent_env_error(why, [slot]))
        for error in errors:
            self._last_drawn[error.slot] = NoImage(f"its last image could not be drawn: {error}")
        # slots that a masked reset left alone look as before
        for slot, row in zip(slots.tolist(), request.rows(slots), strict=True):
            request.images[row] = last = self._last_drawn[slot]
            if isinstance(last, NoImage) and slot not in drawn:
                errors.append(worker.parent_env_error(last.why, [slot]))
        if not errors:
            return None
        first = min(errors, key=lambda error: error.slot)
        failure = RenderError(f"slot {first.slot} could not be rendered: {first}")
        failure.slots = tuple(sorted({int(error.slot) for error in errors}))
        return failure

    # ------------------------------------------------------------ to the user

    async def render(self, wait: WaitForImages) -> Any:
        """Return images of the states that were returned last: an array, or a tuple of the kinds that were asked for.

        Where the workers draw, it is a tuple of N images if they don't stack.

        Raises:
            RenderError: if there is no state yet, or an image could not be drawn.
            StepTimeout: if the images don't come in time.
        """
        requests = list(self._current)
        if not self.draws:
            raise RenderError("render: nothing is drawn with render=aioenv.RenderConfig(workers=0)")
        if missing := self._stateless():
            raise RenderError(f"render: slots {missing} have no state yet; reset() first")
        distinct = _slots_by_request(requests)
        for request in distinct:
            request.users += 1  # or it might be dropped meanwhile
        try:
            if undone := [one.when_done(slots) for one, slots in distinct.items() if not one.is_done(slots)]:
                await wait("render", partial(asyncio.wait, undone))
        finally:
            for request in distinct:
                self.release(request)
        return self.gather("render", requests)

    def gather(self, what: str, requests: Sequence[ImageRequest | None]) -> Any:
        """Return the images of all slots, each from its request; all of them are done.

        Args:
            what: the user's call, for errors.
            requests: of slot 0, 1, …; not all are None.

        Raises:
            RenderError: if an image could not be drawn; the others are its `partial`.
        """
        missing = [slot for slot, one in enumerate(requests) if one is not None and slot in one.missing]
        if missing:
            wrong = next(one.error for one in requests[missing[0] :] if one is not None)  # others may have failed, too
            more = f"\n(there are no images of slots {missing})" if len(missing) > 1 else ""
            error = RenderError(f"{what}: {wrong}{more}")
            error.slots, error.partial = tuple(missing), self._gather_some(requests)
            raise error from wrong
        first = requests[0]
        of_all = first is not None and all(request is first for request in requests)
        if first is not None and first.buffer is not None and of_all:
            arrays = first.buffer.images.arrays
            return arrays[0] if len(arrays) == 1 else arrays
        drawn = self._drawn(requests)
        if self.pool is not None:
            return _stack_with_blanks(drawn)
        image = next((image for image in drawn if isinstance(image, np.ndarray)), None)
        black = None if image is None else np.zeros_like(image)
        return stack_images([black if one is None else mine for one, mine in zip(requests, drawn, strict=True)])

    def _drawn(self, requests: Sequence[ImageRequest | None]) -> list[Any]:
        """Return what was drawn of each slot, an image or the arrays of all kinds; None where an image is missing."""
        drawn: list[Any] = []
        for slot, request in enumerate(requests):
            if request is None or slot in request.missing:
                drawn.append(None)
            elif request.buffer is None:
                drawn.append(request.images[request.row(slot)])
            else:
                drawn.append(request.buffer.images.row(request.row(slot)).arrays)
        return drawn

    def _gather_some(self, requests: Sequence[ImageRequest | None]) -> Any:
        """Return images as `gather`, where some are missing; None if all are."""
        drawn = self._drawn(requests)
        if all(image is None for image in drawn):
            return None
        return tuple(drawn) if self.pool is None else _stack_with_blanks(drawn)

    def fail_all(self, error: Exception) -> None:
        """End every wait with this error, as the vector env is being closed."""
        for request in self._queue:
            request.waiting = []  # or a stream that releases it would look for it in the queue
        self._queue.clear()
        for stream in self.streams:  # first, while drawn requests can be told from the others
            stream.end(keep_drawn=True)
        for request in list(self._unfinished):
            self._drop(request, error)
        # free the images that only this object refers to
        count = len(self._current)
        self._current, self._last_drawn = [None] * count, [None] * count
        for newest in self._newest:
            newest.clear()


def _slots_by_request(requests: Sequence[ImageRequest | None]) -> dict[ImageRequest, list[int]]:
    """Return the slots that are shown of each request; the requests are those of slot 0, 1, …."""
    slots: dict[ImageRequest, list[int]] = {}
    for slot, request in enumerate(requests):
        if request is not None:
            slots.setdefault(request, []).append(slot)
    return slots


def _stack_with_blanks(drawn: Sequence[tuple[npt.NDArray[Any], ...] | None]) -> Any:
    """Stack the arrays of all slots, one array for each kind of image; those of slots without any are zeros."""
    blank = tuple(np.zeros_like(array) for array in next(arrays for arrays in drawn if arrays is not None))
    stacked = tuple(np.stack(kind) for kind in zip(*[arrays or blank for arrays in drawn], strict=True))
    return stacked[0] if len(stacked) == 1 else stacked


class ImageStream:
    """An async iterator of `(step, images)`; see `AsyncVectorEnv.render_stream`.

    Args:
        images: the image requests of the vector env.
        buffer: how many results may wait here at most.
        wait: waits for images that are being drawn.
    """

    def __init__(self, images: StepImages, buffer: int, wait: WaitForImages) -> None:
        self._wait = wait
        self._images = images
        self._buffer = buffer
        self._items: deque[tuple[int, list[ImageRequest | None]]] = deque()
        self._arrival = asyncio.Event()
        self._ended: asyncio.Future[None] = images.loop.create_future()
        images.streams.add(self)

    def add(self, step: int, requests: list[ImageRequest | None]) -> None:
        """Add a result that was returned, with the request of each slot; the oldest ones over `buffer` are dropped."""
        for request in _slots_by_request(requests):
            request.users += 1
        self._items.append((step, requests))
        while len(self._items) > self._buffer:
            self._release(self._items.popleft()[1])
        self._arrival.set()

    def end(self, *, keep_drawn: bool = False) -> None:
        """End the stream; with `keep_drawn` the items that are drawn already can still be taken."""
        if not self._ended.done():
            self._ended.set_result(None)
        items, self._items = self._items, deque()
        for step, requests in items:
            if keep_drawn and all(one.is_done(slots) for one, slots in _slots_by_request(requests).items()):
                self._items.append((step, requests))
            else:
                self._release(requests)
        self._arrival.set()

    async def next(self) -> tuple[int, Any] | None:
        """Return the next item; None at the end. If this is cancelled, the next call returns it.

        Raises:
            RenderError: if an image could not be drawn; the stream goes on with the next step.
            StepTimeout: if that takes too long; the next call waits for the same item again.
        """
        while not self._ended.done():
            if not self._items:
                self._arrival.clear()
                await self._arrival.wait()
                continue
            # out of the buffer: if images are drawn slower than steps are made, each item would be dropped in turn
            step, requests = self._items.popleft()
            try:
                for request, slots in _slots_by_request(requests).items():
                    if not request.is_done(slots):
                        ends = [request.when_done(slots), self._ended]
                        first = partial(asyncio.wait, ends, return_when=asyncio.FIRST_COMPLETED)
                        await self._wait("render_stream", first)
            except BaseException:
                if self._ended.done():
                    self._release(requests)
                else:
                    self._items = deque(sorted([(step, requests), *self._items], key=itemgetter(0)))
                    self._arrival.set()  # another task may wait for an item
                raise
            if not self._ended.done():
                return self._gather(step, requests)
            self._release(requests)
        return self.next_drawn()

    def next_drawn(self) -> tuple[int, Any] | None:
        """Return the next item that was drawn when the stream ended; None if there is none.

        Raises:
            RenderError: if an image could not be drawn.
        """
        return self._gather(*self._items.popleft()) if self._items else None

    def _gather(self, step: int, requests: list[ImageRequest | None]) -> tuple[int, Any]:
        self._release(requests)
        return step, self._images.gather(f"render_stream: step {step}", requests)

    def _release(self, requests: list[ImageRequest | None]) -> None:
        for request in _slots_by_request(requests):
            self._images.release(request)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        item = await self.next()
        if item is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """End the stream; every task that iterates over it stops."""
        self._images.streams.discard(self)
        self.end()
