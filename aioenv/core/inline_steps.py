"""`InlineSteps`: a step of all slots on the caller's thread, where the only worker is a thread of this process.

It takes the place of `WorkerGroup.step` and `RequestScheduler.outcome` for plain steps: there is nothing to wait for,
so no request is made. A step that C leaves to Python, or whose infos must be pickled, becomes a request, and takes the
usual path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from aioenv.core.episode_tracker import EpisodeTracker
from aioenv.core.results import StepResult
from aioenv.core.slots import SlotState
from aioenv.errors import SlotError
from aioenv.ipc.frames import new_tuple
from aioenv.spaces.infos import (
    Gatherer,
    SchemaTable,
    merge_infos,
    merge_infos_or_rows,
    merge_rows,
    row_dicts,
    shares_nothing,
)
from aioenv.spaces.layout import COPIED
from aioenv.worker.service import PartialStep

if TYPE_CHECKING:
    from aioenv.core.requests import BatchRequest, WorkerRequest
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.process.supervisor import Worker
    from aioenv.process.thread_process import ThreadChannel
    from aioenv.spaces.infos import Columns
    from aioenv.stats.episodes import Ended

    Rows: TypeAlias = Sequence[tuple[int, dict[str, Any]]]  # info dicts, with their rows

__all__ = ["InlineSteps"]

_ALL = slice(None)
# Results up to this size get new arrays each time. Larger ones are better put into memory that is used again.
_MAX_BYTES = 1 << 16
# Up to as many info dicts are merged one by one; more cost less in columns.
_FEW = 8


class InlineSteps:
    """Steps all slots, without a request.

    Args:
        scheduler: of a vector env whose only worker is a thread of this process, and which needs nothing of a reply but
            observations, rewards, flags and infos (and to count episodes).
        worker: the worker.
    """

    def __init__(self, scheduler: RequestScheduler, worker: Worker) -> None:
        self._table, self._actions, self._observations = scheduler.table, scheduler.actions, scheduler.observations
        self._worker = worker
        self._num_envs = scheduler.num_envs
        self._single = scheduler.observations.is_single_array
        # of actions that need no further check
        leaf = scheduler.actions.leaves[0]
        self._shape = None if scheduler.actions.ranges else (scheduler.num_envs, *leaf.shape)
        self._dtype = leaf.dtype
        # reads infos; it is never sent
        shares = scheduler.worker_pool.shares(np.arange(scheduler.num_envs))
        self._make = partial(scheduler.dispatcher.make_request, shares, COPIED, reused=False)
        self._reader = self._make()
        self._reader.stepped = True
        self._read_payload = scheduler.dispatcher.read_payload
        self._episodes = scheduler.dispatcher.episodes
        self._everyone = scheduler.everyone
        self._scheduler = scheduler
        self._rows: Rows = ()  # the infos of the last result, unless they are in columns
        self._gatherer, self._schemas = Gatherer(), SchemaTable({})

    @staticmethod
    def suit(scheduler: RequestScheduler) -> bool:
        """Return whether the results of a vector env are small enough, and its actions are one array."""
        size = sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in scheduler.observations.leaves)
        return size * scheduler.num_envs <= _MAX_BYTES and scheduler.actions.is_single_array

    @property
    def possible(self) -> bool:
        """Whether the worker has no work, and the next step would run on the caller's thread."""
        channel = self._worker.thread_channel
        return channel is not None and channel.steps_inline

    def step(self, actions: Any, *, listed: bool = False, limit_s: float = 0.0) -> StepResult | BatchRequest | None:
        """Step all slots.

        Args:
            actions: a batch of actions.
            listed: whether `actions` is a list of one action a slot instead, which its env gets as it is.
            limit_s: see `ThreadChannel.step`.

        Returns:
            The result. Or, after an error or the end of the worker, the request that it has become. Or None, if nothing
            was done.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied: as `AsyncVectorEnv.step`.
        """
        channel, table = self._worker.thread_channel, self._table
        if channel is None:
            return None
        if listed:
            each = actions
        # as `take_apart`, in less than half the time
        elif type(actions) is np.ndarray and actions.shape == self._shape and actions.dtype == self._dtype:
            each = actions.copy()
        else:
            each = self._actions.take_apart(actions, self._num_envs)[0][0]
        table.check_send(_ALL, "step", reset=False)
        payload = channel.step(0, self._num_envs, each, None, limit_s=limit_s)
        if payload is None:
            return None
        if isinstance(payload, tuple):
            started = PartialStep.from_tuple(payload)
            infos = channel.infos_of(started)
            if infos is None or not _share_nothing(infos):
                return self._finish(started)
            return self._result(channel, infos)
        return self._result(channel, payload)

    def _finish(self, started: PartialStep) -> StepResult | BatchRequest:
        done = self._everyone.finish_step(started)
        part = done.parts[0]
        if done.open or part.errors:
            return done
        self._reader.parts[0].columns, self._rows = part.columns, ()
        return self._scheduler.step_result(done)

    def _result(self, channel: ThreadChannel, infos: bytes | Rows) -> StepResult:
        """Make the result of a step of the worker's arrays, and of infos: the payload of a reply, or dicts by row."""
        table, reader = self._table, self._reader
        part = reader.parts[0]
        part.columns = part.errors = part.exhausted = self._rows = ()
        table.note_steps(_ALL, self._num_envs)
        tree, reward, terminated, truncated, _ = channel.results
        obs = tree.copy() if self._single else _copy(tree)
        info: dict[str, Any] = {}
        if not isinstance(infos, bytes) and self._merges_rows and len(infos) <= _FEW:
            info, self._rows = merge_rows(infos, self._num_envs), infos
        elif not infos or (not isinstance(infos, bytes) and self._keeps_rows(infos)):
            self._rows = [] if isinstance(infos, bytes) else infos
            if self._episodes is not None:  # what `EpisodeTracker.note` does if there is no info to read
                self._note_ends(part, self._episodes.stats.step(part.slots, reward, terminated | truncated))
            if self._rows:
                info = row_dicts(self._rows)
            elif part.columns:
                info = self._scheduler.merge_infos(part.columns, self._num_envs)
        else:
            batch = reader.batch
            batch.reward[:], batch.terminated[:], batch.truncated[:] = reward, terminated, truncated
            if isinstance(infos, bytes):
                self._read_payload(reader, part, memoryview(infos))
            else:
                part.columns = self._columns_of(infos)
            if self._episodes is not None:
                self._episodes.note(reader, part)
            if part.columns:
                info = self._scheduler.merge_infos(part.columns, self._num_envs)
        result = new_tuple(StepResult, (obs, reward.copy(), terminated.copy(), truncated.copy(), info))
        if table.must_reset:
            table.note_ends(_ALL, terminated | truncated)
        if part.errors:
            raise SlotError.join(reader.errors(), result)
        return result

    def _note_ends(self, part: WorkerRequest, ended: Ended) -> None:
        """Add the ends of episodes to the infos, which are rows if there are any."""
        if not len(ended.rows):
            return
        if self._scheduler.merge_infos is merge_infos_or_rows:
            self._rows = [*self._rows, *EpisodeTracker.end_infos(ended)]
        else:
            part.columns = [EpisodeTracker.end_columns(ended, ended.rows)]

    @property
    def _merges_rows(self) -> bool:
        """Whether infos that were not gathered into columns become those of the result."""
        return self._episodes is None and self._scheduler.merge_infos is merge_infos

    def _keeps_rows(self, rows: Rows) -> bool:
        """Return whether infos become those of the result row by row, and need not be gathered into columns."""
        if self._scheduler.merge_infos is not merge_infos_or_rows or len(rows) > _FEW:
            return False
        episodes = self._episodes
        return episodes is None or not any(episodes.reads(info) for _, info in rows)

    def _columns_of(self, rows: Rows) -> list[Columns]:
        groups = self._gatherer.gather(rows, range(self._num_envs)) if rows else []
        self._schemas.update(self._gatherer.take_new_schemas())
        columns = []
        for group in groups:
            mine = group.rows
            positions = slice(0, self._num_envs) if mine is None else np.array(mine)
            columns.append(self._schemas.unpack(group, positions, self._num_envs if mine is None else len(mine)))
        return columns

    def leave_to_recv(self, result: StepResult) -> None:
        """Let `recv` take a result that the caller of `step` did not get; no other step was made since."""
        request = self._make()
        part = request.parts[0]
        request.stepped = True  # but not begun: `step` has counted it
        self._table.move(_ALL, SlotState.IN_FLIGHT)
        batch = request.batch
        arrays, objects = self._observations.take_apart(result.obs, self._num_envs)
        for mine, theirs in zip(batch.obs, arrays, strict=True):
            mine[:] = theirs
        batch.reward[:], batch.terminated[:], batch.truncated[:] = result[1:4]
        columns = [*self._columns_of(self._rows), *self._reader.parts[0].columns]
        part.columns, part.objects, part.arrived = columns, objects, True
        request.open = 0
        request.done.set_result(None)
        self._scheduler.leave(request)


def _share_nothing(rows: Rows) -> bool:
    return all(shares_nothing(info) for _, info in rows)


def _copy(tree: Any) -> Any:
    """Copy the arrays of a batch of composite observations."""
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, dict):
        return {key: _copy(item) for key, item in tree.items()}
    return tuple(map(_copy, tree))
