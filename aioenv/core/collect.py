"""Taking ready parts together into one compact batch, in the order of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from aioenv.core.requests import BatchRequest, WorkerRequest
from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.errors import SlotError
from aioenv.spaces.infos import Columns, merge_infos
from aioenv.spaces.layout import Layout

__all__ = ["Merge", "harvest", "so_far"]

Parts = list[tuple[BatchRequest, WorkerRequest]]
Merge: TypeAlias = Callable[[Sequence[Columns], int], dict[str, Any]]


def so_far(layout: Layout, exchange: BatchRequest) -> StepResult | ResetResult:
    """What there is of a whole batch of which some parts are missing: zeros there; in arrays of its own."""
    batch = exchange.batch
    n = len(batch.reward)
    obs, objects = layout.zeros(n), layout.no_objects(n)
    reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    columns: list[Columns] = []
    for part in exchange.parts:
        if not part.arrived:
            continue
        rows = slice(part.start, part.stop)
        for mine, theirs in zip(obs, batch.obs, strict=True):
            mine[rows] = theirs[rows]
        for mine_, theirs_ in zip(objects, part.objects, strict=False):
            mine_[rows] = theirs_
        reward[rows], terminated[rows] = batch.reward[rows], batch.terminated[rows]
        truncated[rows] = batch.truncated[rows]
        columns += part.columns
    if not exchange.stepped:
        return ResetResult(layout.assemble(obs, objects), merge_infos(columns, n))
    return StepResult(layout.assemble(obs, objects), reward, terminated, truncated, merge_infos(columns, n))


def harvest(
    layout: Layout, parts: Parts, max_slots: int | None, merge_infos: Merge
) -> tuple[Ready, list[tuple[BatchRequest, Any]], list[tuple[SlotError, set[int]]], Parts]:
    """Take the results of up to `max_slots` slots, of the oldest parts first; `merge_infos` makes their info dict.

    Returns:
        The results; the exchanges they come from with the slots taken of each; the errors, each with those of its slots
        that are taken; and the parts of which something is left.
    """
    taken: list[tuple[BatchRequest, WorkerRequest, list[int]]] = []  # with rows of the part
    rest: Parts = []
    room = sum(len(part.slots) for _, part in parts) if max_slots is None else max_slots
    for exchange, part in parts:
        assert part.untaken is not None
        rows, part.untaken = part.untaken[:room], part.untaken[room:]
        room -= len(rows)
        if rows:
            taken.append((exchange, part, rows))
        if part.untaken:
            rest.append((exchange, part))
    slots = np.array([slot for _, part, rows in taken for slot in part.slots[rows].tolist()], np.int64)
    order = np.argsort(slots)
    n = len(slots)
    place = np.empty_like(order)  # where the i-th taken row stands in the result
    place[order] = np.arange(n)
    obs = layout.empty(n)
    objects = layout.no_objects(n)
    reward, terminated, truncated = np.empty(n), np.empty(n, np.bool_), np.empty(n, np.bool_)
    columns: list[Columns] = []
    errors: list[tuple[SlotError, set[int]]] = []
    moves: dict[BatchRequest, tuple[list[int], list[int]]] = {}  # rows of its batch, and rows of the result
    begin = 0
    for exchange, part, rows in taken:
        source = [row + part.start for row in rows]
        target = place[begin : begin + len(rows)].tolist()
        begin += len(rows)
        theirs, mine = moves.setdefault(exchange, ([], []))
        theirs += source
        mine += target
        for column, items in zip(objects, part.objects, strict=False):
            for row, index in zip(rows, target, strict=True):
                column[index] = items[row]
        if part.columns:
            columns += [c for c in (_chosen(c, source, target) for c in part.columns) if c is not None]
        if part.errors:
            numbers = set(part.slots[rows].tolist())
            errors += [(error, hit) for error in part.errors if (hit := numbers.intersection(error.slots))]
    for exchange, (theirs, mine) in moves.items():
        batch = exchange.batch
        for array, other in zip(obs, batch.obs, strict=True):
            array[mine] = other[theirs]
        reward[mine] = batch.reward[theirs]
        terminated[mine] = batch.terminated[theirs]
        truncated[mine] = batch.truncated[theirs]
    info = merge_infos(columns, n)
    ready = Ready(slots[order], layout.assemble(obs, objects), reward, terminated, truncated, info)
    exchanges = [(exchange, part.slots[rows]) for exchange, part, rows in taken]
    return ready, exchanges, errors, rest


def _chosen(columns: Columns, source: Any, target: Any) -> Columns | None:
    """Info columns of the rows `source` of their batch alone, at the positions `target`."""
    positions = columns.positions
    if isinstance(positions, slice):
        positions = np.arange(positions.start, positions.stop)
    where = {int(row): int(place) for row, place in zip(source, target, strict=True)}
    keep = [i for i, position in enumerate(positions.tolist()) if position in where]
    if not keep:
        return None
    values: Any = [
        None if v is None else v[keep] if isinstance(v, np.ndarray) else [v[i] for i in keep] for v in columns.values
    ]
    return Columns(np.array([where[int(positions[i])] for i in keep]), columns.schema, values)
