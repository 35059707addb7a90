"""Batches and exchanges: the arrays that replies are read into, and who waits for which replies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.errors import SlotError
from aioenv.ipc.frames import Buffer, Kind
from aioenv.process.connection import OnReply, PendingReply
from aioenv.spaces.infos import Columns
from aioenv.spaces.layout import Layout, Leaf, byte_view
from aioenv.spaces.shared_layout import COPIED
from aioenv.speedups.attributes import read_by_c

if TYPE_CHECKING:
    from aioenv.core.worker_pool import WorkerSlots
    from aioenv.rendering.image_memory import ImageBuffer

__all__ = ["KEPT", "TURNS", "Batch", "BatchRequest", "BatchRequestPool", "SentRequest", "WorkerRequest"]

# How many batches there are with copy=False; and how many are kept for when the caller has let go of them: one is
# with the caller, one in flight, one ready for the next step, and one more for whoever looks back a step.
TURNS, KEPT = 2, 4
# Without a GIL reference counts say nothing: then every step gets arrays of its own.
_COUNTABLE = getattr(sys, "_is_gil_enabled", lambda: True)()


class SentRequest:
    """A request, as it went to one worker.

    Attributes:
        kind: STEP or RESET.
        fixed: arrays of actions, but for those in shared memory.
        tail: what varies in length.
        slots: those that it steps or resets, in the order of the request.
        shared: the arrays of actions that go into shared memory, by number of leaf.
    """

    __slots__ = ("fixed", "kind", "shared", "slots", "tail")

    def __init__(
        self,
        kind: Kind,
        fixed: Sequence[Buffer],
        tail: bytes,
        slots: npt.NDArray[np.int64],
        shared: Mapping[int, npt.NDArray[Any]] | None = None,
    ) -> None:
        self.kind = kind
        self.fixed = fixed
        self.tail = tail
        self.slots = slots
        self.shared = shared


class Batch:
    """Arrays for the results of n rows.

    Args:
        layout: of the observations.
        n: how many rows.
        state_size, checkpoint_size: of one row, in float64.
        shared: the arrays of the lane of shared memory that the workers write into, by number of leaf.
        lane: the number of that lane. What they write into `COPIED` is copied from there, other lanes are the arrays.
        instead: leaves, by number, in whose place workers send something else, and what that is: the parent draws it.
        image_buffer: what its images are drawn into; None if there is nothing to draw.

    Attributes:
        obs: the observations' array leaves, each `(n, *shape)`.
        received: what is read into: the same, but for those `instead`.
        reward: float64 `(n,)`; `terminated`, `truncated`: bool `(n,)`.
        state: float64 `(n, state_size)`, the physics state for images.
        checkpoint: float64 `(n, checkpoint_size)`, what a slot is resumed from.
        lane, image_buffer: as given.
    """

    def __init__(
        self,
        layout: Layout,
        n: int,
        state_size: int,
        checkpoint_size: int,
        shared: Mapping[int, npt.NDArray[Any]],
        lane: int,
        instead: Mapping[int, Leaf],
        image_buffer: ImageBuffer | None = None,
    ) -> None:
        self.lane = lane
        self.image_buffer = image_buffer
        self.obs = layout.empty(n, instead if lane == COPIED else {**shared, **instead})
        self._copies: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        for number, array in shared.items():
            if lane == COPIED:
                self._copies.append((self.obs[number], array))
            else:
                self.obs[number] = array  # itself: views of a view would not count as references to that
        self.received = list(self.obs)
        for number, leaf in instead.items():
            self.received[number] = np.empty((n, *leaf.shape), leaf.dtype)
            assert image_buffer is not None
            self.obs[number] = image_buffer.images.rgb
        self.reward: npt.NDArray[np.float64] = np.empty(n)
        self.terminated: npt.NDArray[np.bool_] = np.empty(n, np.bool_)
        self.truncated: npt.NDArray[np.bool_] = np.empty(n, np.bool_)
        self.state: npt.NDArray[np.float64] = np.empty((n, state_size))
        self.checkpoint: npt.NDArray[np.float64] = np.empty((n, checkpoint_size))
        flags = [self.reward, self.terminated, self.truncated]
        state = [array for array in (self.state, self.checkpoint) if array.shape[1]]
        framed = [array for number, array in enumerate(self.received) if number not in shared]
        # one view of bytes for each array, and how many bytes a row is: a worker's share is a slice
        self._reset_views = [(byte_view(array), array.nbytes // n) for array in (*framed, *state)]
        obs, rest = self._reset_views[: len(framed)], self._reset_views[len(framed) :]
        self._step_views = [*obs, *((byte_view(array), array.itemsize) for array in flags), *rest]
        self._arrays = (*self.obs, *flags, *state)  # nobody is given what was received
        self._when_unused: list[int] = []

    def _references(self) -> list[int]:
        return list(map(getrefcount, self._arrays))  # no comprehension: before Python 3.12 that is a call

    @property
    def unused(self) -> bool:
        """Whether nobody but the batch itself has its arrays, or views of them, any more."""
        return _COUNTABLE and self._references() == self._when_unused

    def note_unused(self) -> None:
        """To be called once, when nobody else has seen the arrays."""
        self._when_unused = self._references()

    def rows(self, start: int, stop: int, *, stepped: bool) -> list[memoryview]:
        """The memory that the reply for rows start to stop is read into, in the order of the wire."""
        views = self._step_views if stepped else self._reset_views
        return [view[start * size : stop * size] for view, size in views]

    @property
    def copies(self) -> bool:
        """Whether there is something to `copy_out`."""
        return bool(self._copies)

    def copy_out(self, start: int, slots: Any) -> None:
        """Copy what the workers of `slots` have written into the lane `COPIED`, from row `start` on."""
        for mine, theirs in self._copies:
            mine[start : start + len(slots)] = theirs[slots]

    def clear(self, start: int, stop: int) -> None:
        """Reward 0 and flags False: what a failed row, or one that was only reset, has."""
        self.reward[start:stop] = 0
        self.terminated[start:stop] = False
        self.truncated[start:stop] = False


@read_by_c
class WorkerRequest:
    """One worker's share of an exchange, and what came back.

    Args:
        member: the worker.
        slots: int64 `(k,)`, ascending.
        start: where its k rows begin in the batch.
        batch: where they are read into.

    Attributes:
        stop: where its rows end.
        into: the memory that replies are read into, after a step and after a reset.
        on_reply: what takes its reply, if that is the same each time.
        express: what awaits the reply to a step, if nothing but counting it need be done; None if there is more.
        columns: info columns, with positions in the batch.
        objects: the observations' object leaves, each of k objects.
        errors: what went wrong.
        over: slots whose envs have no further episode.
        sent: what was sent; None before.
        request: the id of that; None while nothing is in flight.
        arrived: whether its reply is in.
        beyond: rows of the worker, and what did not fit into their checkpoints.
        parcels: rows of the worker, and what images of them need besides their states.
        untaken: those of its rows that nobody has taken yet; None until it is ready for `recv`.
    """

    __slots__ = (
        "arrived", "beyond", "columns", "errors", "express", "into", "member", "objects", "on_reply", "over", "parcels",
        "request", "sent", "slots", "start", "stop", "untaken",
    )  # fmt: skip

    # as `BatchRequest.begin` sets them
    columns: Sequence[Columns]
    objects: Sequence[Sequence[Any]]
    errors: Sequence[SlotError]
    over: Sequence[int]
    beyond: Sequence[tuple[int, bytes]]
    parcels: Sequence[tuple[int, Any]]
    sent: SentRequest | None
    request: int | None
    arrived: bool
    untaken: list[int] | None

    def __init__(self, member: WorkerSlots, slots: npt.NDArray[np.int64], start: int, batch: Batch) -> None:
        self.member = member
        self.slots = slots
        self.start = start
        self.stop = start + len(slots)
        self.into = batch.rows(start, self.stop, stepped=True), batch.rows(start, self.stop, stepped=False)
        self.on_reply: OnReply | None = None
        self.express: PendingReply | None = None


@read_by_c
class BatchRequest:
    """A request to one or more workers, and its replies.

    Attributes:
        batch: where the results are.
        parts: one a worker.
        stepped: whether it is a step (else a reset).
        waiting: whether somebody awaits the whole; otherwise its parts are ready one by one, for `recv`.
        looks: whether it asks nothing of the envs, so that its replies are of no use to `recv`.
        open: how many replies have yet to come.
        done: resolved when the last reply is in.
        images: of its slots, if images are drawn.
        idle: whether it is over: its results have been given to whoever wanted them.
    """

    def __init__(self, batch: Batch, parts: list[WorkerRequest], loop: asyncio.AbstractEventLoop) -> None:
        self.batch = batch
        self.parts = parts
        self._loop = loop
        self.idle = True

    def begin(self, *, stepped: bool, waiting: bool) -> None:
        """Be as new, parts included."""
        self.stepped = stepped
        self.waiting = waiting
        self.looks = False
        self.open = len(self.parts)
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.images: Any = None
        for part in self.parts:
            part.columns = part.objects = part.errors = part.over = part.beyond = part.parcels = ()
            part.sent = part.request = part.untaken = None
            part.arrived = False
        self.idle = False

    @cached_property
    def slots(self) -> npt.NDArray[np.int64]:
        """Those of all parts, one for each row of the batch."""
        return np.concatenate([part.slots for part in self.parts])

    def fail(self, part: WorkerRequest, layout: Layout, error: SlotError) -> None:
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


class BatchRequestPool:
    """Exchanges with all workers, and their batches, used again and again: a step allocates next to nothing.

    Args:
        make: makes an exchange whose batch is on a lane of shared memory (of which `COPIED` takes any number).
        in_turn: whether two are used in turn, whoever still looks at their arrays (copy=False); else one is used
            again when nobody has its arrays any more.
    """

    def __init__(self, make: Callable[[int], BatchRequest], *, in_turn: bool) -> None:
        self._make = make
        self._in_turn = in_turn
        self._most = TURNS if in_turn else KEPT
        self._kept: list[BatchRequest] = []
        self._turn = 0

    def take(self) -> BatchRequest:
        """One for the next step or reset."""
        kept = self._kept
        if self._in_turn:
            turn = self._turn
            self._turn = (turn + 1) % TURNS
            if len(kept) == TURNS:
                exchange = kept[turn]
                # else a cancelled step is still being read into it
                return exchange if exchange.idle else self._make(COPIED)
        else:
            for exchange in kept:
                if exchange.idle and exchange.batch.unused:
                    return exchange
        if len(kept) == self._most:
            return self._make(COPIED)
        exchange = self._make(len(kept) + 1)
        exchange.batch.note_unused()
        kept.append(exchange)
        return exchange

    def clear(self) -> None:
        """Let go of all, so that their memory goes with its last user, not with a later garbage collection."""
        kept, self._kept = self._kept, []
        for exchange in kept:
            for part in exchange.parts:
                part.on_reply = part.express = None
