"""Recovery of restarted workers: the last state of every slot, and how a new process gets it.

The history is kept only where workers are restarted. It costs a copy of the observations a step, and of the
checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.core.requests import BatchRequest, WorkerRequest
from aioenv.core.worker_pool import WorkerPool, WorkerSlots
from aioenv.ipc.frames import Kind
from aioenv.ipc.messages import LostRow, ResetRequest, load, load_step

if TYPE_CHECKING:
    from aioenv.core.service_calls import StatsMerger
    from aioenv.process.supervisor import Worker
    from aioenv.stats.counters import ResetPlan

__all__ = ["SlotHistory", "WorkerRecovery", "derive_seed"]

_log = logging.getLogger("aioenv")


@dataclass(frozen=True, slots=True)
class StateSet:
    """Stands for a `SentRequest` where a slot was put into a state."""

    state: Any


class SlotHistory:
    """The last observation, physics state, seed, operation and checkpoint of each slot.

    Args:
        worker_pool: has the layouts.
        num_envs: the number of slots.
        state_size: float64 numbers of physics state from which images of a slot are drawn; 0 for none.
        same_step: whether the autoreset mode is SAME_STEP: the last step of an episode gives the first observation of
            the next one.
    """

    def __init__(self, worker_pool: WorkerPool, num_envs: int, *, state_size: int, same_step: bool) -> None:
        checkpoint_size = worker_pool.checkpoint_size
        self._seeds: list[int | None] = [None] * num_envs
        self._worker_pool = worker_pool
        self._same_step = same_step
        self._obs = worker_pool.received.zeros(num_envs)
        self._objects = worker_pool.received.no_objects(num_envs)
        self._states = np.zeros((num_envs, state_size))
        self._ended = np.zeros(num_envs, np.bool_)  # includes the exhausted slots
        self._exhausted: set[int] = set()  # the slots whose last reset raised `EpisodesDone`
        # the last operation on each slot, a `SentRequest` or a `StateSet`
        self._done: npt.NDArray[Any] = np.full(num_envs, None, object)
        self._failed: set[int] = set()  # the slots whose envs have raised since, so that they must be reset
        self._before = np.zeros((num_envs, checkpoint_size))
        self._after = np.zeros((num_envs, checkpoint_size))
        self._overflow_before: dict[int, bytes] = {}  # the bytes that did not fit into these two
        self._overflow_after: dict[int, bytes] = {}
        for member, checkpoints in worker_pool.first_checkpoints.items():
            if checkpoints is not None:
                self.note_first(member, checkpoints, list(range(member.stop - member.start)))

    def note_seeds(self, seeds: Mapping[int, int | None]) -> None:
        """Note the seeds of slots that are being reset."""
        for slot, seed in seeds.items():
            if seed is not None:
                self._seeds[slot] = seed

    def note_first(self, member: WorkerSlots, checkpoints: Any, rows: list[int]) -> None:
        """Note the checkpoints of new envs (see `EnvService.configure`), from which these rows start."""
        array, overflow = checkpoints[0], dict(checkpoints[1])
        for row in rows:
            self._note_after(member.start + row, array[row], overflow.get(row))

    def _note_after(self, slot: int, checkpoint: Any, overflow: bytes | None) -> None:
        self._after[slot] = checkpoint
        self._overflow_after.pop(slot, None)
        if overflow is not None:
            self._overflow_after[slot] = overflow

    def note_states(self, states: Mapping[int, tuple[Any, Any]]) -> None:
        """Note that slots were put into states: by slot, the state and its checkpoint."""
        for slot, (state, checkpoint) in states.items():
            self._done[slot] = StateSet(state)
            self._failed.discard(slot)
            self._ended[slot] = False
            self._exhausted.discard(slot)
            if checkpoint is not None:
                self._note_after(slot, *checkpoint)

    def note(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Note the reply to a worker request: the last observations, states and checkpoints of its slots."""
        batch, sent, rows = request.batch, part.sent, slice(part.start, part.stop)
        assert sent is not None
        slots: Any = part.slots
        if slots[-1] - slots[0] + 1 == len(slots):
            slots = slice(int(slots[0]), int(slots[-1]) + 1)
        for mine, theirs in zip(self._obs, batch.received, strict=True):
            mine[slots] = theirs[rows]
        if self._states.shape[1]:
            self._states[slots] = batch.state[rows]
        for mine_, theirs_ in zip(self._objects, part.objects, strict=False):
            for slot, item in zip(part.slots.tolist(), theirs_, strict=True):
                mine_[slot] = item
        if (plan := self._worker_pool.reset_plan) is not None and not plan.counts_shared:
            self._count_episodes(plan, request, part)
        done: Any = slots if sent.kind is Kind.STEP else sent.slots
        self._done[done] = sent
        if plan is not None and plan.counts_shared:
            plan.note_replies(done)
        if self._failed:
            self._failed.difference_update(sent.slots.tolist())
        if sent.kind is Kind.STEP:
            self._ended[slots] = False if self._same_step else batch.terminated[rows] | batch.truncated[rows]
        else:
            self._ended[done] = False
        if self._exhausted:
            self._exhausted.difference_update(sent.slots.tolist())
        if part.exhausted:  # no episode is open, and the next step resets
            self._ended[list(part.exhausted)] = True
            self._exhausted.update(part.exhausted)
        if self._after.shape[1]:
            if not self._worker_pool.vectorized:  # vector envs are resumed without repeating the step
                self._before[done] = self._after[done]
            self._after[slots] = batch.checkpoint[rows]
            if part.overflow or self._overflow_after or self._overflow_before:
                self._note_overflow(sent.slots if sent.kind is Kind.RESET else part.slots, part)
        for error in part.errors:  # their last step can't be repeated; they must be reset
            self._done[list(error.slots)] = None
            self._failed.update(error.slots)

    def _count_episodes(self, plan: ResetPlan, request: BatchRequest, part: WorkerRequest) -> None:
        """Count the episodes that slots have begun, for the next process of their worker."""
        sent, batch, rows = part.sent, request.batch, slice(part.start, part.stop)
        assert sent is not None
        if sent.kind is Kind.RESET:
            asked: ResetRequest = load(sent.payload)
            for slot, seed in zip(sent.slots.tolist(), asked.seeds, strict=True):
                if asked.every_slot and not (asked.listed_seeds and seed is None):
                    plan.start_at(slot, 0)
                plan.begin(slot)
        else:
            begun = self._ended[part.slots]
            if self._same_step:  # those were exhausted
                begun = begun | batch.terminated[rows] | batch.truncated[rows]
            for slot in part.slots[begun].tolist():
                plan.begin(slot)

    def _note_overflow(self, done: npt.NDArray[np.int64], part: WorkerRequest) -> None:
        for slot in done.tolist():
            self._overflow_before.pop(slot, None)
            if (last := self._overflow_after.pop(slot, None)) is not None:
                self._overflow_before[slot] = last
        self._overflow_after.update((part.member.start + row, data) for row, data in part.overflow)

    def lost_rows(self, member: WorkerSlots, rows: list[int]) -> list[LostRow]:
        """Return what rows of a worker that are reset need to know; none for rows without an observation yet.

        A row that had failed gets its seed alone: the user resets it before it is stepped.
        """
        observations = list(self._worker_pool.received.rows(self._obs, self._objects))
        lost = []
        for row in rows:
            slot = member.start + row
            seed = derive_seed(self._seeds[slot], member.worker.generation)
            if self._done[slot] is not None:
                over, exhausted = bool(self._ended[slot]), slot in self._exhausted
                lost.append(LostRow(row, seed, observations[slot], over, self._state(slot), exhausted))
            elif slot in self._failed and not self._worker_pool.vectorized:
                lost.append(LostRow(row, seed, None, True, self._state(slot)))
        return lost

    def last_of(self, slot: int) -> tuple[list[Any], list[Any], Any, npt.NDArray[np.float64]]:
        """Return the last observation of a slot, as the rows of arrays, as objects and as a whole, and its state."""
        arrays, objects = [array[slot : slot + 1] for array in self._obs], [column[slot] for column in self._objects]
        obs = next(iter(self._worker_pool.received.rows([array.copy() for array in arrays], [[o] for o in objects])))
        return [array[0].copy() for array in arrays], objects, obs, self._states[slot]

    def last_observations(self, member: WorkerSlots) -> list[tuple[int, Any]]:
        """Return the rows of a worker that failed or were put into a state, with their last observations if known."""
        every = range(member.start, member.stop)
        slots = [slot for slot in every if slot in self._failed or isinstance(self._done[slot], StateSet)]
        if not slots:
            return []
        observations = list(self._worker_pool.received.rows(self._obs, self._objects))
        known = [slot for slot in slots if all(column[slot] is not None for column in self._objects)]
        return [(slot - member.start, observations[slot]) for slot in known]

    def _state(self, slot: int) -> npt.NDArray[np.float64] | None:
        return self._states[slot] if self._states.shape[1] else None

    def resumed_rows(self, member: WorkerSlots) -> tuple[Any, ...]:
        """Return the arguments of `EnvService.resume` for the rows of a worker that can be resumed."""
        every = range(member.start, member.stop)
        rows = [slot - member.start for slot in every if self._done[slot] is not None or slot in self._failed]
        slots = [member.start + row for row in rows]
        operations = [self._operation(slot, slot - member.start) for slot in slots]
        overflow = [(self._overflow_before.get(slot), self._overflow_after.get(slot)) for slot in slots]
        return rows, self._before[slots], operations, self._after[slots], overflow, self._states[slots]

    def resumed_env(self, member: WorkerSlots) -> tuple[list[int], Any, list[bytes | None], list[Any], list[Any]]:
        """Return the arguments of `VectorService.resume`, for a worker whose slots are one vector env."""
        slots = slice(member.start, member.stop)
        rows = [row for row in range(member.stop - member.start) if self._done[member.start + row] is not None]
        overflow = [self._overflow_after.get(slot) for slot in range(member.start, member.stop)]
        objects = [column[slots] for column in self._objects]
        return rows, self._after[slots], overflow, [array[slots] for array in self._obs], objects

    def _operation(self, slot: int, row: int) -> tuple[Any, ...] | None:
        """Return the last operation on a slot, as `EnvService.resume` takes it; None if the slot has failed since."""
        sent = self._done[slot]
        if sent is None:
            return None
        if isinstance(sent, StateSet):
            return "set_state", sent.state
        if sent.kind is Kind.RESET:
            request: ResetRequest = load(sent.payload)
            return "reset", request.seeds[request.rows.index(row)], request.options, request.automatic
        _, objects, given = load_step(sent.payload)
        slots = sent.slots.tolist()
        index = slots.index(slot)
        if given is not None:
            return "step", given[index]
        actions = self._worker_pool.actions
        arrays = actions.split(b"".join(sent.fixed), len(slots), sent.shared)
        return "step", actions.rows(arrays, objects or ())[index]


def derive_seed(seed: int | None, generation: int) -> int | None:
    """Derive a seed for an episode after a restart."""
    if seed is None:
        return None
    # some envs take no more than 31 bits, and a vector env adds its slot numbers
    return int(np.random.SeedSequence([seed, generation]).generate_state(1)[0]) >> 2


class WorkerRecovery:
    """Brings the slots of restarted workers back to their last states.

    Args:
        worker_pool: the workers.
        history: the last state of each slot.
        merger: merges the statistics that the envs share; None if they share none.
        resume: whether slots go on where they were, if that is possible.
    """

    def __init__(
        self, worker_pool: WorkerPool, history: SlotHistory, merger: StatsMerger | None, *, resume: bool
    ) -> None:
        self._worker_pool = worker_pool
        self._history = history
        self._merger = merger
        self._resume = resume
        self._members = {member.worker: member for member in worker_pool.members}

    async def restore(self, worker: Worker) -> None:
        """Bring the slots of a new process to the states in which the process before it had them.

        Raises:
            WorkerDied, EnvError: if it ends, or fails.
        """
        member = self._members[worker]
        if (plan := self._worker_pool.reset_plan) is not None and plan.counts_shared:
            plan.rewind(range(member.start, member.stop))
        first = await self._worker_pool.configure_worker(worker)
        if self._merger is not None:
            await self._merger.catch_up(worker, resumed=self._resume)
        if self._worker_pool.model_fields is not None:
            await self._worker_pool.model_fields.restore(worker)
        every = range(member.stop - member.start)
        lost = list(every)
        if self._resume:
            vectorized, history = self._worker_pool.vectorized, self._history
            rows, *known = history.resumed_env(member) if vectorized else history.resumed_rows(member)
            differences = await worker.call("resume", rows, *known)
            found = {row: text for row, text in zip(rows, differences, strict=True) if text is not None}
            for row, difference in found.items():
                slot = member.start + row
                with contextlib.suppress(Exception):  # an error of a log handler must not end the worker
                    _log.warning("slot %d could not be resumed: %s; its episode is truncated", slot, difference)
            lost = list(found)
            if not (rows and vectorized):  # a vector env was restored with all rows
                self._history.note_first(member, first, [row for row in every if row not in rows])
        if lost_rows := self._history.lost_rows(member, lost):
            await worker.call("reset_lost_rows", lost_rows)
        if not self._worker_pool.vectorized and (last := self._history.last_observations(member)):
            await worker.call("keep_observations", last)
