"""The payloads of frames: those of requests to workers are made, and those of their replies read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aioenv import speedups
from aioenv.definitions.table import DefinitionTable
from aioenv.errors import ActionError, SlotError
from aioenv.ipc.messages import ResetRequest, StepReply, StepRequest, dump, dump_step, load, load_columns, reason_of
from aioenv.ipc.partial_unpickling import Unreadable, find_unreadable, load_partially
from aioenv.spaces.infos import ColumnGroup, Columns

if TYPE_CHECKING:
    from aioenv.core.requests import WorkerRequest
    from aioenv.core.worker_pool import WorkerSlots

__all__ = ["compact", "load_reply", "read_partial_payload", "read_payload", "reset_payload", "step_payload"]

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
) -> bytes:
    """Make the payload of a RESET of some slots of a worker (see `ResetRequest`).

    Raises:
        TypeError: if the options can't be pickled.
    """
    rows = tuple(slot - member.start for slot in slots)
    try:
        return dump(ResetRequest(rows, tuple(seeds), options, whole, shown, each), member.worker.definitions)
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
