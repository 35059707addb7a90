"""The tails of frames, what varies in length: of requests to workers, and of their replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aioenv.batching.infos import Group
from aioenv.errors import ActionError
from aioenv.wire.messages import ResetRequest, StepReply, StepRequest, dump, load, load_usual

if TYPE_CHECKING:
    from aioenv.engine.batch import Part
    from aioenv.engine.fleet import Member

__all__ = ["compact", "load_reply", "read_tail", "reset_tail", "step_tail"]

# Those of requests are made before anything is sent or marked: what they carry may not pickle.


def compact(rows: list[int]) -> Sequence[int]:
    """Ascending rows as a range, if they follow one another: it travels faster, and so do their results."""
    run = range(rows[0], rows[-1] + 1)
    return run if len(run) == len(rows) else tuple(rows)


def step_tail(rows: Sequence[int] | None, objects: Sequence[Sequence[Any]], given: list[Any] | None = None) -> bytes:
    """The tail of a STEP: which rows (None: all), and actions or parts of them that are no arrays.

    Raises:
        ActionError: if an action can't be pickled.
    """
    if rows is None and not objects and given is None:
        return b""
    try:
        return dump(StepRequest(rows, [list(column) for column in objects], given))
    except Exception as exc:
        raise ActionError(f"actions: expected what can be pickled, got {type(exc).__name__}: {exc}") from exc


def reset_tail(
    member: Member,
    slots: list[int],
    seeds: Sequence[int | None],
    options: dict[str, Any] | None,
    *,
    whole: bool,
    shown: Sequence[int] | None = None,
    each: bool = False,
) -> bytes:
    """The tail of a RESET of some slots of a worker (see `ResetRequest`).

    Raises:
        TypeError: if the options can't be pickled.
    """
    rows = tuple(slot - member.start for slot in slots)
    try:
        return dump(ResetRequest(rows, tuple(seeds), options, whole, shown, each))
    except Exception as exc:
        raise TypeError(f"options: expected what can be pickled, got {type(exc).__name__}: {exc}") from exc


def load_reply(tail: memoryview) -> StepReply:
    """What a worker has said beyond the arrays.

    Raises:
        WireError: if it can't be understood.
    """
    usual = load_usual(tail)
    if usual is None:
        reply: StepReply = load(tail)
        return reply
    number, data = usual
    return StepReply([], [Group(number, None, data, [])], [], [])


def read_tail(part: Part, tail: memoryview) -> list[int]:
    """Put what a worker has said beyond the arrays into its part: infos, objects, errors.

    Returns:
        The slots whose envs have no further episode.

    Raises:
        Exception: if it can't be understood.
    """
    member = part.member
    reply = load_reply(tail)
    member.schemas.learn(reply.schemas)
    part.objects = reply.objects
    part.errors = [member.worker.failure(failure) for failure in reply.failures]
    # where each of the worker's rows stands in the batch
    first = int(part.slots[0]) - member.start
    whole = len(part.slots) == member.stop - member.start
    part.beyond = reply.beyond
    columns = []
    for group in reply.infos:
        if group.rows is None:
            positions: Any = slice(part.start, part.stop)
            count = len(part.slots)
        else:
            count = len(group.rows)
            rows = np.asarray(group.rows, np.int64)
            if whole:
                positions = rows - first + part.start
            else:
                positions = np.searchsorted(part.slots, rows + member.start) + part.start
        columns.append(member.schemas.unpack(group, positions, count))
    part.columns = columns
    return [member.start + row for row in reply.over]
