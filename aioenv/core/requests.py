"""Requests to workers: the arrays that replies are read into, one worker's share, and the payloads of their frames.

A pool reuses the arrays. Payloads are made for requests, and read from replies.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv import speedups
from aioenv.definitions.table import DefinitionTable
from aioenv.errors import ActionError, SlotError
from aioenv.ipc.frames import Buffer, Kind
from aioenv.ipc.messages import (
    ResetRequest,
    StepReply,
    StepRequest,
    Unreadable,
    dump,
    dump_step,
    find_unreadable,
    load,
    load_columns,
    load_partially,
    reason_of,
)
from aioenv.process.connection import OnReply, PendingReply
from aioenv.spaces.infos import ColumnGroup, Columns
from aioenv.spaces.layout import COPIED, Layout, Leaf, byte_view
from aioenv.speedups import read_by_c

if TYPE_CHECKING:
    from aioenv.core.worker_pool import WorkerSlots
    from aioenv.rendering.images import ImageBuffer

__all__ = [
    "BATCHES_IN_TURN",
    "BATCHES_KEPT",
    "Batch",
    "BatchRequest",
    "BatchRequestPool",
    "SentRequest",
    "WorkerRequest",
    "as_index",
    "compact",
    "load_reply",
    "read_partial_payload",
    "read_payload",
    "reset_payload",
    "step_payload",
]


# The payloads of a request are made before any of it is sent: an object in them may not pickle.


def compact(rows: list[int]) -> Sequence[int]:
    """Return ascending rows as a range if they are successive: it is sent faster, and so are their results."""
    run = range(rows[0], rows[-1] + 1)
    return run if len(run) == len(rows) else tuple(rows)


def step_payload(
    rows: Sequence[int] | None,
    objects: Sequence[Sequence[Any]],
    given: list[Any] | None = None,
    table: DefinitionTable | None = None,
) -> bytes:
    """Make the payload of a STEP: the rows (None: all), and actions or parts of them that are no arrays.

    Args:
        rows: of the worker.
        objects: parts of actions, by column.
        given: in place of all actions: one a row.
        table: of the definitions that the worker has.

    Raises:
        ActionError: if an action can't be pickled.
    """
    if rows is None and not objects and given is None:
        return b""
    try:
        return dump_step(StepRequest(rows, [list(column) for column in objects], given), table)
    except Exception as exc:
        raise ActionError(f"actions: expected what can be pickled, got {type(exc).__name__}: {exc}") from exc


def reset_payload(
    member: WorkerSlots,
    slots: list[int],
    seeds: Sequence[int | None],
    options: dict[str, Any] | None,
    *,
    whole: bool,
    shown: Sequence[int] | None = None,
    each: bool = False,
    automatic: bool = False,
    every_slot: bool = False,
    episodes: tuple[int, ...] | None = None,
    restored: bool = False,
) -> bytes:
    """Make the payload of a RESET of some slots of a worker (see `ResetRequest`).

    Raises:
        TypeError: if the options can't be pickled.
    """
    rows = tuple(slot - member.start for slot in slots)
    try:
        request = ResetRequest(
            rows, tuple(seeds), options, whole, shown, each, automatic, every_slot, episodes, restored
        )
        return dump(request, member.worker.definitions)
    except Exception as exc:
        raise TypeError(f"options: expected what can be pickled, got {type(exc).__name__}: {exc}") from exc


def load_reply(payload: memoryview) -> StepReply:
    """Read the payload of a reply to a step or reset.

    Raises:
        WireError: if it can't be understood.
    """
    columns = load_columns(payload)
    if columns is None:
        reply: StepReply = load(payload)
        return reply
    return StepReply([], [ColumnGroup(*group, []) for group in columns], [], [])


def read_payload(part: WorkerRequest, payload: memoryview) -> Sequence[int]:
    """Read the payload of a reply into its worker request: infos, objects, errors.

    Returns:
        The slots whose envs have no further episode.

    Raises:
        Exception: if it can't be understood.
    """
    if speedups.read_columns is not None and (floats := speedups.read_columns(part, payload, Columns)) is not None:
        part.columns = floats
        return ()
    columns = load_columns(payload)
    if columns is None:
        return _apply_reply(part, load(payload))
    part.columns = _unpack(part, [ColumnGroup(*group, []) for group in columns])
    return ()


def _apply_reply(part: WorkerRequest, reply: StepReply) -> list[int]:
    member = part.member
    member.schemas.update(reply.schemas)
    part.objects = reply.objects
    part.errors = [member.worker.env_error(failure) for failure in reply.failures]
    part.overflow = reply.overflow
    part.render_updates = reply.render_updates
    part.columns = _unpack(part, reply.infos)
    return [member.start + row for row in reply.exhausted]


def _unpack(part: WorkerRequest, groups: Sequence[ColumnGroup]) -> list[Columns]:
    unpack = part.member.schemas.unpack
    return [unpack(group, *_positions(part, group.rows)) for group in groups]


def _positions(part: WorkerRequest, group_rows: Sequence[int] | None) -> tuple[Any, int]:
    """Return the positions in the batch of the rows of a group, and their number."""
    if group_rows is None:
        return slice(part.start, part.stop), part.stop - part.start
    rows = np.asarray(group_rows, np.int64)
    if len(part.slots) == part.member.stop - part.member.start:
        return rows - (int(part.slots[0]) - part.member.start) + part.start, len(rows)
    return np.searchsorted(part.slots, rows + part.member.start) + part.start, len(rows)


def read_partial_payload(part: WorkerRequest, payload: memoryview) -> list[int]:
    """Read a reply of which not all unpickles: such values become errors of their slots, which keep the rest.

    Raises:
        Exception: if nothing can be understood.
    """
    member, slots = part.member, part.slots.tolist()
    plain = load_columns(payload) is not None  # with a schema that was unreadable when it was new
    reply: StepReply = load_reply(payload) if plain else load_partially(payload, (StepReply, ColumnGroup))
    bad: dict[int, list[tuple[str, Unreadable]]] = {}  # by slot: the names of unreadable values, and why
    for column in reply.objects:
        for row, value in enumerate(column):
            if found := find_unreadable(value):
                bad.setdefault(slots[row], []).append(("its observation", found))
                column[row] = None
    member.schemas.update(reply.schemas)
    readable = []
    for group in reply.infos:
        schema: Any = member.schemas.schema_of(group)
        if type(schema) is Unreadable:  # one of its keys is
            for row in np.arange(part.stop)[_positions(part, group.rows)[0]].tolist():
                bad.setdefault(slots[row - part.start], []).append(("a key of its info", schema))
        else:
            readable.append(group)
    over = _apply_reply(part, reply._replace(infos=readable))
    part.columns = [each for columns in part.columns for each in _readable(part, columns, bad)]
    part.errors = [*part.errors, *(_unreadable_error(part, slot, what) for slot, what in sorted(bad.items()))]
    return over


def _readable(part: WorkerRequest, columns: Columns, bad: dict[int, list[tuple[str, Unreadable]]]) -> Iterator[Columns]:
    """Yield columns without the values that are unreadable, which are added to `bad`."""
    positions, schema, values = columns
    where: list[int] = np.arange(part.stop)[positions].tolist()
    rest: list[int] = []
    for index, position in enumerate(where):
        lost: set[int] = set()
        for number, (column, items) in enumerate(zip(schema.columns, values, strict=True)):
            if isinstance(items, list) and (found := find_unreadable(items[index])):
                lost.add(number)
                name = "".join(f"[{key!r}]" for key in column.path)
                bad.setdefault(int(part.slots[position - part.start]), []).append((f"info{name}", found))
        if not lost:
            rest.append(index)
            continue
        kept = [number for number in range(len(values)) if number not in lost]
        fewer = schema._replace(columns=tuple(schema.columns[number] for number in kept))
        alone = [values[number] if values[number] is None else values[number][index : index + 1] for number in kept]
        yield Columns(np.array([position]), fewer, alone)
    if len(rest) == len(where):
        yield columns
    elif rest:
        some: list[Any] = [
            items[rest] if isinstance(items, np.ndarray) else items and [items[i] for i in rest] for items in values
        ]
        yield Columns(np.array([where[i] for i in rest]), schema, some)


def _unreadable_error(part: WorkerRequest, slot: int, what: list[tuple[str, Unreadable]]) -> SlotError:
    names = ", ".join(name for name, _ in what)
    cause = what[0][1].exc
    error = part.member.worker.parent_env_error(
        f"{names}: pickled in the worker, but does not unpickle in this process: {reason_of(cause)}; the rest of its "
        "result is there. Let envs return what both processes can make: arrays, numbers, strings, lists and dicts",
        [slot],
    )
    error.__cause__ = cause
    return error


# With copy=False two batches are used in turn. Otherwise at most four are kept for reuse: the caller's, the one in
# flight, the one for the next step, and one more for a caller that looks back a step.
BATCHES_IN_TURN, BATCHES_KEPT = 2, 4
# Without a GIL reference counts are not exact: then every step gets new arrays.
_COUNTABLE = getattr(sys, "_is_gil_enabled", lambda: True)()


class SentRequest:
    """A request as it was sent to one worker.

    Attributes:
        kind: STEP or RESET.
        fixed: arrays of actions, except those in shared memory.
        payload: the part whose length varies.
        slots: the slots that it steps or resets, in the order of the request.
        shared: the arrays of actions that go into shared memory, by number of leaf.
    """

    __slots__ = ("fixed", "kind", "payload", "shared", "slots")

    def __init__(
        self,
        kind: Kind,
        fixed: Sequence[Buffer],
        payload: bytes,
        slots: npt.NDArray[np.int64],
        shared: Mapping[int, npt.NDArray[Any]] | None = None,
    ) -> None:
        self.kind = kind
        self.fixed = fixed
        self.payload = payload
        self.slots = slots
        self.shared = shared


class Batch:
    """Arrays for the results of n rows.

    Args:
        layout: the layout of the observations.
        n: the number of rows.
        state_size, checkpoint_size: float64 numbers of one row.
        shared: the arrays of the shared batch that the workers write into, by number of leaf.
        shared_batch: the number of the shared batch. Results in `COPIED` are copied from there; the arrays of others
            are used directly.
        replaced: the leaves, by number, in whose place workers send another one, which the parent draws from.
        image_buffer: the memory that these are drawn into; None if nothing is drawn.

    Attributes:
        obs: the array leaves of the observations, each `(n, *shape)`.
        received: the arrays that replies are read into: `obs`, except for `replaced` leaves.
        reward: float64 `(n,)`; `terminated`, `truncated`: bool `(n,)`.
        state: float64 `(n, state_size)`, the physics state for images.
        checkpoint: float64 `(n, checkpoint_size)`, from which a slot is resumed.
        shared_batch, image_buffer: as given.
    """

    def __init__(
        self,
        layout: Layout,
        n: int,
        state_size: int,
        checkpoint_size: int,
        shared: Mapping[int, npt.NDArray[Any]],
        shared_batch: int,
        replaced: Mapping[int, Leaf],
        image_buffer: ImageBuffer | None = None,
    ) -> None:
        self.shared_batch = shared_batch
        self.image_buffer = image_buffer
        self.obs = layout.empty(n, replaced if shared_batch == COPIED else {**shared, **replaced})
        self._copies: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        for number, array in shared.items():
            if shared_batch == COPIED:
                self._copies.append((self.obs[number], array))
            else:
                self.obs[number] = array  # not a view of it: views of a view don't count as references to that
        self.received = list(self.obs)
        for number, leaf in replaced.items():
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
        # one view of bytes for each array, and the bytes of a row: the rows of a worker are a slice
        self._reset_views = [(byte_view(array), array.nbytes // n) for array in (*framed, *state)]
        obs, rest = self._reset_views[: len(framed)], self._reset_views[len(framed) :]
        self._step_views = [*obs, *((byte_view(array), array.itemsize) for array in flags), *rest]
        self._arrays = (*self.obs, *flags, *state)  # everything that callers may hold
        self._when_unused: list[int] = []

    @property
    def unused(self) -> bool:
        """Whether nothing but the batch itself refers to its arrays, or to views of them."""
        return _COUNTABLE and list(map(getrefcount, self._arrays)) == self._when_unused

    def note_unused(self) -> None:
        """Count the references to the arrays; call it once, before they are handed out."""
        self._when_unused = list(map(getrefcount, self._arrays))  # no comprehension: before Python 3.12 that is a call

    def rows(self, start: int, stop: int, *, stepped: bool) -> list[memoryview]:
        """Return the memory that the reply for rows start to stop is read into, in the order of the frame."""
        views = self._step_views if stepped else self._reset_views
        return [view[start * size : stop * size] for view, size in views]

    @property
    def copies(self) -> bool:
        """Whether `copy_out` has anything to copy."""
        return bool(self._copies)

    def copy_out(self, start: int, slots: Any) -> None:
        """Copy the results of `slots` from the shared batch `COPIED` to the rows from `start` on."""
        for mine, theirs in self._copies:
            mine[start : start + len(slots)] = theirs[slots]

    def clear(self, start: int, stop: int) -> None:
        """Set reward 0 and flags False, as in rows that failed or were only reset."""
        self.reward[start:stop] = 0
        self.terminated[start:stop] = False
        self.truncated[start:stop] = False


@read_by_c
class WorkerRequest:
    """One worker's part of a `BatchRequest`, and its reply.

    Args:
        member: the worker.
        slots: int64 `(k,)`, ascending.
        start: the row of the batch at which its k rows begin.
        batch: the arrays that they are read into.

    Attributes:
        stop: the row at which its rows end.
        into: the memory that replies are read into, after a step and after a reset.
        on_reply: handles its reply; None: the dispatcher makes it when the request is sent.
        fast_reply: the `PendingReply` of a step whose reply needs only to be counted; None if there is more to do.
        columns: columns of infos, with positions in the batch.
        objects: the object leaves of the observations, each of k objects.
        errors: the errors of its slots.
        exhausted: the slots whose envs have no further episode.
        sent: the request as it was sent; None before.
        request_id: the id of this request; None while nothing is in flight.
        arrived: whether its reply is in.
        overflow: rows of the worker, and the bytes that did not fit into their checkpoints.
        render_updates: rows of the worker, and data beside their states that images of them need.
        untaken: those of its rows that `recv` has not taken; None until `recv` may take them.
    """

    __slots__ = (
        "arrived", "columns", "errors", "exhausted", "fast_reply", "into", "member", "objects", "on_reply", "overflow",
        "render_updates", "request_id", "sent", "slots", "start", "stop", "untaken",
    )  # fmt: skip

    # set by `BatchRequest.reset`
    columns: Sequence[Columns]
    objects: Sequence[Sequence[Any]]
    errors: Sequence[SlotError]
    exhausted: Sequence[int]
    overflow: Sequence[tuple[int, bytes]]
    render_updates: Sequence[tuple[int, Any]]
    sent: SentRequest | None
    request_id: int | None
    arrived: bool
    untaken: list[int] | None

    def __init__(self, member: WorkerSlots, slots: npt.NDArray[np.int64], start: int, batch: Batch) -> None:
        self.member = member
        self.slots = slots
        self.start = start
        self.stop = start + len(slots)
        self.into = batch.rows(start, self.stop, stepped=True), batch.rows(start, self.stop, stepped=False)
        self.on_reply: OnReply | None = None
        self.fast_reply: PendingReply | None = None


@read_by_c
class BatchRequest:
    """A step or reset of slots of one or more workers, and the replies.

    Attributes:
        batch: the arrays of the results.
        parts: the worker requests, one a worker.
        stepped: whether it is a step; otherwise it is a reset.
        waiting: whether a caller awaits all of it; otherwise its worker requests are ready for `recv` one by one.
        looks: whether it only asks for observations, so that its replies are of no use to `recv`.
        open: the number of replies that are not in.
        done: resolved when the last reply is in.
        images: the images of its slots, if images are drawn.
        idle: whether its results were handed out or dropped, so that it can be used again.
    """

    def __init__(self, batch: Batch, parts: list[WorkerRequest], loop: asyncio.AbstractEventLoop) -> None:
        self.batch = batch
        self.parts = parts
        self._loop = loop
        self.idle = True

    def reset(self, *, stepped: bool, waiting: bool) -> None:
        """Forget the last replies, so that the request can be sent."""
        self.stepped = stepped
        self.waiting = waiting
        self.looks = False
        self.open = len(self.parts)
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.images: Any = None
        for part in self.parts:
            part.columns = part.objects = part.errors = part.exhausted = part.overflow = part.render_updates = ()
            part.sent = part.request_id = part.untaken = None
            part.arrived = False
        self.idle = False

    def clear(self) -> None:
        """Forget how replies to a later step are handled: then the request does not refer to itself."""
        for part in self.parts:
            part.on_reply = part.fast_reply = None

    @cached_property
    def slots(self) -> npt.NDArray[np.int64]:
        """The slots of all worker requests, one for each row of the batch."""
        return np.concatenate([part.slots for part in self.parts])

    @cached_property
    def index(self) -> npt.NDArray[np.int64] | slice:
        """The slots as an index of arrays with one element a slot: a slice where that is possible, which is faster."""
        return as_index(self.slots)

    def fail(self, part: WorkerRequest, layout: Layout, error: SlotError) -> None:
        """Give a worker request an error in place of a result: its rows are zero, and the error is of all its slots."""
        self.batch.clear(part.start, part.stop)
        for array in self.batch.obs:
            array[part.start : part.stop] = 0
        part.objects = layout.no_objects(len(part.slots))
        error.concern(tuple(part.slots.tolist()))
        part.errors = [error]

    def poll(self) -> bool:
        """Read replies that have come already, and return whether all are in."""
        for part in self.parts:
            # never a worker whose reply is being handled: its channel is not re-entrant
            if not part.arrived:
                part.member.worker.poll()
        return self.open == 0

    def errors(self) -> list[SlotError]:
        """Return the errors of all worker requests."""
        return [error for part in self.parts for error in part.errors]

    def columns(self) -> list[Columns]:
        """Return the columns of infos of all worker requests."""
        columns: list[Columns] = []
        for part in self.parts:
            columns += part.columns
        return columns

    def objects(self, layout: Layout) -> list[list[Any]]:
        """Return the object leaves of the observations of all rows."""
        objects: list[list[Any]] = layout.no_objects(len(self.batch.reward))
        for part in self.parts:
            for column, items in zip(objects, part.objects, strict=False):
                column[part.start : part.stop] = items
        return objects


def as_index(slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | slice:
    """Return slots as a slice if they are successive and ascending, else as they are."""
    first, stop = int(slots[0]), int(slots[-1]) + 1
    return slice(first, stop) if stop - first == len(slots) else slots


class BatchRequestPool:
    """The requests of one group of slots, used again and again: a step allocates next to nothing.

    Args:
        make: makes a request; it gets the number of its shared batch, `COPIED` for one that is used only once.
        in_turn: whether two requests are used in turn, even if callers still hold their arrays (copy=False). Otherwise
            a request is used again when nothing refers to its arrays any more.
    """

    def __init__(self, make: Callable[[int], BatchRequest], *, in_turn: bool) -> None:
        self._make = make
        self._in_turn = in_turn
        self._most = BATCHES_IN_TURN if in_turn else BATCHES_KEPT
        self._kept: list[BatchRequest] = []
        self._turn = 0
        self._next: BatchRequest | None = None

    def acquire(self) -> BatchRequest:
        """Return a request that can be sent: the one that was prepared, if there is one."""
        if (request := self._next) is None:
            request = self.prepare()
        self._next = None
        return request

    def prepare(self) -> BatchRequest:
        """Have the next request ready: while the workers are busy, rather than when they wait for it."""
        if (request := self._next) is None:
            self._next = request = self._find()
            request.reset(stepped=True, waiting=True)
        return request

    def _find(self) -> BatchRequest:
        kept = self._kept
        if self._in_turn:
            turn = self._turn
            self._turn = (turn + 1) % BATCHES_IN_TURN
            if len(kept) == BATCHES_IN_TURN:
                request = kept[turn]
                # else a cancelled step is still being read into it
                return request if request.idle else self._make(COPIED)
        else:
            for request in kept:
                if request.idle and request.batch.unused:
                    return request
        if len(kept) == self._most:
            return self._make(COPIED)
        request = self._make(len(kept) + 1)
        request.batch.note_unused()
        kept.append(request)
        return request

    def clear(self) -> None:
        """Release all requests, so that their memory goes with its last user, not with a later garbage collection."""
        kept, self._kept = self._kept, []
        self._next = None
        for request in kept:
            request.clear()
