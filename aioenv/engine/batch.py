"""Batches and exchanges: the arrays that replies are read into, and who waits for which replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.batching.infos import Columns
from aioenv.batching.layout import Layout, byte_view
from aioenv.errors import SlotError
from aioenv.wire.frames import Kind

if TYPE_CHECKING:
    from aioenv.engine.fleet import Member

__all__ = ["Batch", "Exchange", "Part", "Ring", "Sent"]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, as it went to one worker.

    Attributes:
        slots: those that it steps or resets, in the order of the request.
    """

    kind: Kind
    fixed: Sequence[memoryview]
    tail: bytes
    slots: npt.NDArray[np.int64]


class Batch:
    """Arrays for the results of n rows.

    Attributes:
        obs: the observations' array leaves, each `(n, *shape)`.
        reward: float64 `(n,)`; `terminated`, `truncated`: bool `(n,)`.
        state: float64 `(n, state_size)`, the physics state for images.
        checkpoint: float64 `(n, checkpoint_size)`, what a slot is resumed from.
    """

    def __init__(self, layout: Layout, n: int, state_size: int, checkpoint_size: int) -> None:
        self.obs = layout.empty(n)
        self.reward: npt.NDArray[np.float64] = np.empty(n)
        self.terminated: npt.NDArray[np.bool_] = np.empty(n, np.bool_)
        self.truncated: npt.NDArray[np.bool_] = np.empty(n, np.bool_)
        self.state: npt.NDArray[np.float64] = np.empty((n, state_size))
        flags = [self.reward, self.terminated, self.truncated]
        self.checkpoint: npt.NDArray[np.float64] = np.empty((n, checkpoint_size))
        state = [array for array in (self.state, self.checkpoint) if array.shape[1]]
        # one view of bytes for each array, and how many bytes a row is: a worker's share is a slice
        self._reset_views = [(byte_view(array), array.nbytes // n) for array in (*self.obs, *state)]
        obs, rest = self._reset_views[: len(self.obs)], self._reset_views[len(self.obs) :]
        self._step_views = [*obs, *((byte_view(array), array.itemsize) for array in flags), *rest]
        self._rows: dict[tuple[int, int, bool], list[memoryview]] = {}

    def rows(self, start: int, stop: int, *, stepped: bool) -> list[memoryview]:
        """The memory that the reply for rows start to stop is read into, in the order of the wire."""
        rows = self._rows.get((start, stop, stepped))
        if rows is None:
            views = self._step_views if stepped else self._reset_views
            rows = [view[start * size : stop * size] for view, size in views]
            self._rows[start, stop, stepped] = rows
        return rows

    def clear(self, start: int, stop: int) -> None:
        """Reward 0 and flags False: what a failed row, or one that was only reset, has."""
        self.reward[start:stop] = 0
        self.terminated[start:stop] = False
        self.truncated[start:stop] = False


class Ring:
    """Where the next batch comes from: new arrays each time, or (copy=False) two in turn.

    Args:
        make: makes a batch.
        reuse: whether to use two batches in turn.
    """

    def __init__(self, make: Callable[[], Batch], *, reuse: bool) -> None:
        self._make = make
        self._batches = [make(), make()] if reuse else []
        self._next = 0

    def take(self) -> Batch:
        """The batch to read the next step into."""
        if not self._batches:
            return self._make()
        self._next ^= 1
        return self._batches[self._next]

    def replace(self, batch: Batch) -> None:
        """A batch is still being read into (its step was cancelled): don't hand it out again."""
        self._batches = [self._make() if b is batch else b for b in self._batches]


class Part:
    """One worker's share of an exchange, and what came back.

    Attributes:
        member: the worker.
        slots: int64 `(k,)`, ascending.
        start: where its k rows begin in the exchange's batch.
        columns: info columns, with positions in the batch.
        objects: the observations' object leaves, each of k objects.
        errors: what went wrong.
        sent: what was sent; None before.
        request: the id of that; None while nothing is in flight.
        arrived: whether its reply is in.
        untaken: which of its slots nobody has taken yet; None until it is ready for `recv`.
    """

    __slots__ = ("arrived", "columns", "errors", "member", "objects", "request", "sent", "slots", "start", "untaken")

    def __init__(self, member: Member, slots: npt.NDArray[np.int64], start: int) -> None:
        self.member = member
        self.slots = slots
        self.start = start
        self.columns: list[Columns] = []
        self.objects: Sequence[Sequence[Any]] = ()
        self.errors: list[SlotError] = []
        self.sent: Sent | None = None
        self.request: int | None = None
        self.arrived = False
        self.untaken: npt.NDArray[np.bool_] | None = None

    @property
    def stop(self) -> int:
        """Where its rows end in the exchange's batch."""
        return self.start + len(self.slots)


class Exchange:
    """A request to one or more workers, and its replies.

    Attributes:
        batch: where the results are.
        parts: one a worker.
        stepped: whether it is a step (else a reset).
        waiting: whether somebody awaits the whole; otherwise its parts are ready one by one, for `recv`.
        polled: whether its replies have been polled for, which is done once at most.
        done: resolved when the last reply is in.
    """

    def __init__(
        self,
        batch: Batch,
        parts: list[Part],
        *,
        stepped: bool,
        waiting: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.batch = batch
        self.parts = parts
        self.stepped = stepped
        self.waiting = waiting
        self.open = len(parts)
        self.done: asyncio.Future[None] = loop.create_future()
        self.images: Any = None
        self.polled = False

    def arrived(self) -> None:
        """One more reply is in."""
        self.open -= 1
        if self.open == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, part: Part, layout: Layout, error: SlotError) -> None:
        """A part has no result: its rows are zero, and all its slots have this error."""
        self.batch.clear(part.start, part.stop)
        for array in self.batch.obs:
            array[part.start : part.stop] = 0
        part.objects = layout.no_objects(len(part.slots))
        error.concern(tuple(part.slots.tolist()))
        part.errors = [error]

    def poll(self) -> bool:
        """Take replies that have come already; whether all are in."""
        for part in self.parts:
            # never a worker whose reply is being handled: its channel is not re-entrant
            if not part.arrived:
                part.member.worker.poll()
        return self.open == 0

    def errors(self) -> list[SlotError]:
        """What went wrong."""
        return [error for part in self.parts for error in part.errors]
