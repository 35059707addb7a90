"""The results of a vector env, and how ready worker requests become one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aioenv.errors import SlotError
from aioenv.process.child import ProcessMemory, process_memory
from aioenv.spaces.infos import Columns, merge_infos
from aioenv.spaces.layout import Layout

if TYPE_CHECKING:
    from aioenv.core.requests import BatchRequest, WorkerRequest

__all__ = ["Ready", "ResetResult", "SlotStep", "StepResult", "WorkerInfo", "collect_ready", "partial_result"]


class ResetResult(NamedTuple):
    """The outcome of a `reset`; unpacks as Gymnasium's.

    Attributes:
        obs: a batch of the batched observation space.
        info: arrays of shape `(num_envs,)` by key, with a bool mask under `_key`.
    """

    obs: Any
    info: dict[str, Any]


class StepResult(NamedTuple):
    """The outcome of a `step`; unpacks as Gymnasium's.

    Attributes:
        obs: a batch of the batched observation space.
        reward: float64, shape `(num_envs,)`.
        terminated: bool, shape `(num_envs,)`.
        truncated: bool, shape `(num_envs,)`.
        info: arrays of shape `(num_envs,)` by key, with a bool mask under `_key`.
    """

    obs: Any
    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    info: dict[str, Any]


class SlotStep(NamedTuple):
    """The outcome of `step_at`: of one env, no batch; unpacks as that of its `step`.

    Attributes:
        obs: an observation of the single observation space.
        reward: a float.
        terminated: a bool.
        truncated: a bool.
        info: the env's own dict.
    """

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Ready(NamedTuple):
    """Slots whose results are in; always in arrays that are the caller's.

    Attributes:
        slots: int64, shape `(k,)`, ascending.
        obs: a batch of k observations.
        reward: float64, shape `(k,)`; 0 after a reset.
        terminated: bool, shape `(k,)`.
        truncated: bool, shape `(k,)`.
        info: arrays of shape `(k,)` by key, with a bool mask under `_key`.
    """

    slots: npt.NDArray[np.int64]
    obs: Any
    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    info: dict[str, Any]


class WorkerInfo(NamedTuple):
    """A report on one worker process, for `envs.workers`.

    Attributes:
        pid: the process id; None before the start.
        state: "new", "starting", "ready", "busy", "draining" (busy with a request that was abandoned),
            "restarting", "dead", "closing" or "closed".
        slots: the slots that it holds.
        cpus: the CPUs that it is pinned to (`cpu_affinity`); None if it is not.
        node: the machine of its cluster that it is on; empty: this one.
    """

    pid: int | None
    state: str
    slots: tuple[int, ...]
    cpus: tuple[int, ...] | None = None
    node: str = ""

    @property
    def memory(self) -> ProcessMemory | None:
        """The memory that it holds, in bytes, looked up now; None if it is gone, or on another machine.

        A worker takes some milliseconds, in which the loop waits. Where that matters, ask from a thread:
        `await asyncio.to_thread(lambda: [worker.memory for worker in envs.workers])`.
        """
        if (
            self.pid is None or self.node or self.state in ("dead", "closed")
        ):  # the number may be another process's by now
            return None
        return process_memory(self.pid)


# ------------------------------------------------------------ made of worker requests

Parts: TypeAlias = "list[tuple[BatchRequest, WorkerRequest]]"
Merge: TypeAlias = Callable[[Sequence[Columns], int], dict[str, Any]]


def partial_result(layout: Layout, request: BatchRequest) -> StepResult | ResetResult:
    """Make a whole batch of the worker requests that have arrived, in new arrays; the rows of others are zero."""
    batch = request.batch
    n = len(batch.reward)
    obs, objects = layout.zeros(n), layout.no_objects(n)
    reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    columns: list[Columns] = []
    for part in request.parts:
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
    if not request.stepped:
        return ResetResult(layout.assemble(obs, objects), merge_infos(columns, n))
    return StepResult(layout.assemble(obs, objects), reward, terminated, truncated, merge_infos(columns, n))


def collect_ready(
    layout: Layout, parts: Parts, max_slots: int | None, merge_infos: Merge
) -> tuple[Ready, list[tuple[BatchRequest, Any]], list[tuple[SlotError, set[int]]], Parts]:
    """Take the results of up to `max_slots` slots from ready worker requests, the oldest first, as one compact batch.

    Args:
        layout: the layout of the observations.
        parts: ready worker requests, each with its batch request, oldest first. The rows that are taken are removed
            from them.
        max_slots: the most slots to take; None for all.
        merge_infos: makes the info dict.

    Returns:
        The results, by ascending slot; their batch requests, each with the slots taken; the errors, each with those of
        its slots that were taken; and the worker requests that have rows left.
    """
    taken: list[tuple[BatchRequest, WorkerRequest, list[int]]] = []  # with rows of the worker request
    rest: Parts = []
    room = sum(len(part.slots) for _, part in parts) if max_slots is None else max_slots
    for request, part in parts:
        assert part.untaken is not None
        rows, part.untaken = part.untaken[:room], part.untaken[room:]
        room -= len(rows)
        if rows:
            taken.append((request, part, rows))
        if part.untaken:
            rest.append((request, part))
    slots = np.array([slot for _, part, rows in taken for slot in part.slots[rows].tolist()], np.int64)
    n = len(slots)
    order = place = np.arange(n)
    if n > 1:
        order = np.argsort(slots)
        place = np.empty_like(order)  # the row in the result of the i-th row that is taken
        place[order] = np.arange(n)
    obs = layout.empty(n)
    objects = layout.no_objects(n)
    reward, terminated, truncated = np.empty(n), np.empty(n, np.bool_), np.empty(n, np.bool_)
    columns: list[Columns] = []
    errors: list[tuple[SlotError, set[int]]] = []
    moves: dict[BatchRequest, tuple[list[int], list[int]]] = {}  # rows in its batch, and rows in the result
    begin = 0
    for request, part, rows in taken:
        source = [row + part.start for row in rows]
        target = place[begin : begin + len(rows)].tolist()
        begin += len(rows)
        rows_there, rows_here = moves.setdefault(request, ([], []))
        rows_there += source
        rows_here += target
        for column, items in zip(objects, part.objects, strict=False):
            for row, index in zip(rows, target, strict=True):
                column[index] = items[row]
        if part.columns:
            columns += [c for c in (_chosen(c, source, target) for c in part.columns) if c is not None]
        if part.errors:
            numbers = set(part.slots[rows].tolist())
            errors += [(error, hit) for error in part.errors if (hit := numbers.intersection(error.slots))]
    for request, (rows_there, rows_here) in moves.items():
        batch = request.batch
        # single rows, the usual case of `recv(min_slots=1)`, are copied five times as fast as by lists of one
        theirs: Any
        mine: Any
        theirs, mine = (rows_there[0], rows_here[0]) if len(rows_here) == 1 else (rows_there, rows_here)
        for array, other in zip(obs, batch.obs, strict=True):
            array[mine] = other[theirs]
        reward[mine] = batch.reward[theirs]
        terminated[mine] = batch.terminated[theirs]
        truncated[mine] = batch.truncated[theirs]
    info = merge_infos(columns, n)
    ready = Ready(slots[order], layout.assemble(obs, objects), reward, terminated, truncated, info)
    requests = [(request, part.slots[rows]) for request, part, rows in taken]
    return ready, requests, errors, rest


def _chosen(columns: Columns, source: Any, target: Any) -> Columns | None:
    """Return the columns of some rows, `source` in their batch and `target` in the result; None if it has none."""
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
