"""Groups of slots: how a step or reset of some slots, or of all, becomes requests to their workers.

A whole batch is the group of all slots. A rollout has several groups, of which one is stepped while the policy chooses
for another. Paused slots, numbered episodes, a single slot and `send` have a group of the slots that they ask. If some
slots are paused, `ActiveSlots` asks the others as a group, and puts their results into their rows of the whole batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.assign import spread
from aioenv.core.backend import InitialState, StepOutcome
from aioenv.core.requests import (
    BatchRequest,
    BatchRequestPool,
    SentRequest,
    WorkerRequest,
    as_index,
    compact,
    reset_payload,
    step_payload,
)
from aioenv.core.results import ResetResult, StepResult
from aioenv.core.slots import SlotState
from aioenv.errors import SlotError, StepTimeout, WorkerDied
from aioenv.ipc.frames import Kind
from aioenv.process.supervisor import ACCEPTS_REQUESTS, Worker, WorkerState
from aioenv.spaces.infos import Columns, merge_infos, merge_infos_or_rows
from aioenv.spaces.layout import COPIED, Arrays, byte_view
from aioenv.spaces.seeding import is_seed_list

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.worker_pool import WorkerSlots
    from aioenv.worker.service import PartialStep

__all__ = ["ActiveSlots", "RememberedState", "SingleSlots", "WorkerGroup", "WorkerRolloutBackend"]


Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Objects = Sequence[Sequence[Any]]


class WorkerGroup:
    """Some slots of one or more workers, which are asked together (see `SlotGroup`).

    Args:
        scheduler: sends the requests and waits for the replies.
        slots: ascending.
        whole: whether these are all slots, whose requests use the shared batches, in turn where results are views.

    Attributes:
        slots: int64 `(k,)`, read-only.
    """

    def __init__(self, scheduler: RequestScheduler, slots: Slots, *, whole: bool = False) -> None:
        self.slots = slots
        self.slots.flags.writeable = False
        self._index = as_index(slots)
        self._scheduler = scheduler
        self._whole = whole
        self._shares = scheduler.worker_pool.shares(slots)
        # the rows of each worker; None: all
        self._rows = [None if _holds_only(m, mine) else compact((mine - m.start).tolist()) for m, mine in self._shares]
        # made with the first use: a group may be used once
        self._pool: BatchRequestPool | None = None
        self._cuts: list[list[slice]] = []  # the bytes of each worker in each array of actions
        self._payloads: list[bytes] = []  # the payload of a step for each worker, if actions are no objects
        self._request: BatchRequest | None = None  # in flight, for `recv`

    def _make_pool(self) -> BatchRequestPool:
        self._pool = BatchRequestPool(self._make, in_turn=self._whole and not self._scheduler.copy)
        return self._pool

    def _make(self, shared_batch: int) -> BatchRequest:
        return self._scheduler.dispatcher.make_request(
            self._shares, shared_batch if self._whole else COPIED, reused=shared_batch != COPIED
        )

    def _prepare_fast_path(self) -> None:
        """Compute the payloads and cuts of a step whose actions are arrays in frames: they are the same each time."""
        sizes = [leaf.dtype.itemsize * prod(leaf.shape) for leaf in self._scheduler.actions.leaves]
        stops = np.cumsum([len(mine) for _, mine in self._shares]).tolist()
        self._cuts = [[slice(start * size, stop * size) for size in sizes] for start, stop in pairwise([0, *stops])]
        self._payloads = [step_payload(rows, ()) for rows in self._rows]  # last: Ctrl-C may come before

    # ------------------------------------------------------------ requests

    def step(
        self,
        arrays: Arrays,
        objects: Objects,
        name: str,
        *,
        action_list: Sequence[Any] | None = None,
        waiting: bool = True,
    ) -> BatchRequest:
        """Send a step of all slots of the group.

        Args:
            arrays, objects: actions that were taken apart, one row a slot.
            name: the user's call, for errors.
            action_list: one action a slot in their place, which its env gets as it is.
            waiting: whether the caller awaits the request as a whole; else `recv` takes the results.

        Raises:
            ActionError: if an action can't be pickled. Nothing was sent.
            PendingCallError, ResetNeededError, EnvError, WorkerDied: if a slot can't be stepped. Nothing was sent.
        """
        scheduler = self._scheduler
        dispatcher = scheduler.dispatcher
        scheduler.table.check_send(self._index, name, reset=False)
        if action_list is not None or objects or dispatcher.shared_actions or not (waiting or dispatcher.fast):
            return self._submit(self._step_requests(arrays, objects, action_list), stepped=True, waiting=waiting)
        if not self._payloads:
            self._prepare_fast_path()
        if not waiting:
            return self._step_plainly(arrays)
        pool = self._pool or self._make_pool()
        request = pool.acquire()
        try:
            scheduler.begin(request, self._index, stepped=True)
            here = dispatcher.here is not None and len(arrays) == 1
            if not (here and dispatcher.step_here(request, arrays[0], self._rows[0])):
                views = list(map(byte_view, arrays))
                dispatcher.submit_steps(request, views, self._cuts, self._payloads)
            if self._whole:
                pool.prepare()
        except BaseException:
            scheduler.roll_back(request)
            raise
        return request

    def _step_plainly(self, arrays: Arrays) -> BatchRequest:
        """Send a step whose actions are arrays in frames, and whose results `recv` takes."""
        scheduler = self._scheduler
        request = scheduler.dispatcher.make_plain_request(self._shares)
        try:
            scheduler.begin(request, self._index, stepped=True)
            scheduler.dispatcher.submit_steps(request, list(map(byte_view, arrays)), self._cuts, self._payloads)
        except BaseException:
            scheduler.roll_back(request)
            raise
        finally:
            request.clear()
        return request

    def finish_step(self, started: PartialStep) -> BatchRequest:
        """Make a request of a step of all slots that C has started on this thread, and finish it.

        Args:
            started: of `ThreadChannel.step`.
        """
        scheduler, request = self._scheduler, (self._pool or self._make_pool()).acquire()
        try:
            scheduler.begin(request, self._index, stepped=True)
            scheduler.dispatcher.finish_step(request, started)
        except BaseException:
            scheduler.roll_back(request)
            raise
        return request

    def _step_requests(self, arrays: Arrays, objects: Objects, action_list: Sequence[Any] | None) -> list[SentRequest]:
        shared = self._scheduler.dispatcher.shared_actions
        table = self._scheduler.worker_pool.definitions
        n = len(self.slots)
        sized = [(byte_view(array), array.nbytes // n) for i, array in enumerate(arrays) if i not in shared]
        sent, stop = [], 0
        for (_, mine), rows in zip(self._shares, self._rows, strict=True):
            start, stop = stop, stop + len(mine)
            own = None if action_list is None else list(action_list[start:stop])
            payload = step_payload(rows, [column[start:stop] for column in objects], own, table)
            fixed = [view[start * size : stop * size] for view, size in sized]
            placed = {number: arrays[number][start:stop] for number in shared} if arrays else None
            sent.append(SentRequest(Kind.STEP, fixed, payload, mine, placed))
        return sent

    def reset(
        self,
        slots: Slots,
        seeds: Mapping[int, int | None],
        options: dict[str, Any] | None,
        name: str,
        *,
        each: bool = True,
        waiting: bool = True,
        whole: bool = True,
        automatic: bool = False,
        every_slot: bool = False,
    ) -> BatchRequest:
        """Send a reset of some slots of the group.

        Args:
            slots: the slots, ascending.
            seeds: by slot; those that are missing get none.
            options: for all of them.
            name: the user's call, for errors.
            each: whether each slot has a seed of its own, rather than a batch one that was spread.
            waiting: as for `step`.
            whole: whether the latest observations of the other slots of the group come, too. Otherwise `slots` must be
                all of them.
            automatic: whether to pass the options of automatic resets instead.
            every_slot: whether the user resets all slots, so that episodes are numbered from 0 again.

        Raises:
            TypeError: if options can't be pickled. Nothing was sent.
            PendingCallError, WorkerDied: if a slot can't be asked. Nothing was sent.
        """
        scheduler = self._scheduler
        scheduler.table.check_send(self._index, name, reset=True)
        spares, sent = scheduler.spares, []

        def starts_over(slot: int) -> bool:  # None in a list of seeds: this slot goes on with its plan
            return every_slot and not (each and seeds.get(slot) is None)

        for (member, mine), shown in zip(self._shares, self._rows, strict=True):
            chosen = mine[np.isin(mine, slots)] if whole else mine
            numbers = chosen.tolist()
            own = [seeds.get(slot) for slot in numbers]
            episodes = None
            if spares is not None and numbers:
                episodes = spares.episodes_of(numbers, start_over=starts_over(numbers[0]))
            payload = reset_payload(
                member,
                numbers,
                own,
                options,
                whole=whole,
                shown=shown if whole else None,
                each=each,
                automatic=automatic,
                every_slot=every_slot,
                episodes=episodes,
            )
            sent.append(SentRequest(Kind.RESET, (), payload, chosen))
        scheduler.note_reset(slots, {slot: seeds.get(slot) for slot in slots.tolist()}, start_over=starts_over)
        return self._submit(sent, stepped=False, waiting=waiting)

    def look(self) -> BatchRequest:
        """Ask for the latest observations: a reset of no slot. The group must have all slots of its workers.

        Raises:
            PendingCallError: if a slot has a request in flight, or a result that was not taken.
            WorkerDied: if a worker is gone.
        """
        self._scheduler.table.check_send(self._index, "rollout", reset=True)
        none = self.slots[:0]
        payloads = [reset_payload(member, [], [], None, whole=True) for member, _ in self._shares]
        return self._submit([SentRequest(Kind.RESET, (), one, none) for one in payloads], stepped=False, looks=True)

    def _submit(
        self, sent: Iterable[SentRequest], *, stepped: bool, waiting: bool = True, looks: bool = False
    ) -> BatchRequest:
        """Send a request to each worker of the group; return the (last) batch request that they belong to."""
        scheduler = self._scheduler
        pool = None
        if waiting and (stepped or self._whole):
            pool = self._pool or self._make_pool()
            requests = [pool.acquire()]
        else:
            # for `recv` one for each worker if there are images: those of a request are shown when all are drawn
            apart = scheduler.images is not None and not waiting
            parts_of = [[share] for share in self._shares] if apart else [self._shares]
            make = scheduler.dispatcher.make_request
            requests = [make(shares, COPIED, reused=False, waiting=waiting) for shares in parts_of]
        parts = [(request, part) for request in requests for part in request.parts]
        try:
            for request in requests:
                index = self._index if len(requests) == 1 else request.index
                scheduler.begin(request, index, stepped=stepped, looks=looks)
            for (request, part), one in zip(parts, sent, strict=True):
                scheduler.dispatcher.submit(request, part, one)
            if pool is not None and self._whole:
                pool.prepare()
        except BaseException:
            for request in requests:
                scheduler.roll_back(request)
            raise
        return requests[-1]

    # ------------------------------------------------------------ one request at a time (see `SlotGroup`)

    @property
    def in_flight(self) -> bool:
        """Whether a request was sent whose result was not received yet."""
        return self._request is not None

    def send(self, actions: Any) -> tuple[Arrays, Objects]:
        """Step all slots (see `SlotGroup.send`)."""
        arrays, objects = self._scheduler.actions.take_apart(actions, len(self.slots))
        self.send_arrays(arrays, objects, "rollout")
        return arrays, objects

    def send_arrays(self, arrays: Arrays, objects: Objects, name: str) -> None:
        """Step all slots, with actions that were taken apart."""
        self._request = self.step(arrays, objects, name)

    def send_reset(
        self,
        slots: Slots,
        seeds: Mapping[int, int | None] | None = None,
        options: dict[str, Any] | None = None,
        name: str = "rollout",
        *,
        automatic: bool = False,
    ) -> None:
        """Reset some of the slots; the result has their rows alone."""
        group = self if len(slots) == len(self.slots) else WorkerGroup(self._scheduler, slots)
        self._request = group.reset(group.slots, seeds or {}, options, name, whole=False, automatic=automatic)

    def send_look(self) -> None:
        """Ask for the latest observations (see `look`)."""
        self._request = self.look()

    async def recv(self) -> StepOutcome:
        """Wait for the result (see `SlotGroup.recv`)."""
        scheduler, request, error = self._scheduler, self.take(), None
        try:
            await scheduler.outcome(request, lambda _: None, None)
        except SlotError as exc:
            error = exc
        batch = request.batch
        # the slots of the columns are looked up when they are merged (`_at_slots`)
        infos = [(columns, request.slots) for columns in request.columns()]
        valid = None
        if error is not None or scheduler.restarter is not None:
            valid = _valid(request)
        objects = request.objects(scheduler.observations) if scheduler.observations.num_objects else []
        return StepOutcome(
            list(batch.obs), objects, batch.reward, batch.terminated, batch.truncated, valid, infos, error
        )

    def take(self) -> BatchRequest:
        """Hand over the request in flight: the caller waits for it."""
        request, self._request = self._request, None
        assert request is not None
        return request

    def abandon(self) -> None:
        """Leave the request in flight, if there is one, to `recv` of the vector env."""
        request, self._request = self._request, None
        if request is not None:
            self._scheduler.abandon(request)

    def close(self) -> None:
        """Release the memory of results, except for requests in flight; nothing more is sent."""
        if self._pool is not None:
            self._pool.clear()


def _holds_only(member: WorkerSlots, slots: Slots) -> bool:
    return len(slots) == member.stop - member.start


def _valid(request: BatchRequest) -> Bools:
    """Return which rows are results of the request (see `StepOutcome.valid`)."""
    valid: Bools = ~np.isin(request.slots, [slot for error in request.errors() for slot in error.slots])
    for columns in request.columns():
        if any(column.path == ("restarted",) for column in columns.schema.columns):
            valid[columns.positions] = False
    return valid


class SingleSlots:
    """Sends plain steps to single slots for `recv`, which copies the results: so each slot keeps its request.

    Args:
        scheduler: sends the requests.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._scheduler = scheduler
        self._alone = len(scheduler.worker_pool.members) == scheduler.num_envs  # each slot has a worker of its own
        self._sizes = [leaf.dtype.itemsize * prod(leaf.shape) for leaf in scheduler.actions.leaves]
        self._requests: dict[int, tuple[BatchRequest, bytes]] = {}

    def suit(self, slots: Slots, objects: Objects) -> bool:
        """Return whether `step` can send to these slots, with these objects in the actions."""
        dispatcher = self._scheduler.dispatcher
        plain = dispatcher.fast and not (objects or dispatcher.shared_actions or dispatcher.in_thread)
        return plain and (self._alone or len(slots) == 1)

    def step(self, slots: Slots, arrays: Arrays) -> None:
        """Send a step of these slots, with a row of the actions for each; raises as `WorkerGroup.step`."""
        scheduler, table = self._scheduler, self._scheduler.table
        table.check_send(slots, "send", reset=False)
        views = list(map(byte_view, arrays))
        asked = [self._acquire(slot) for slot in slots.tolist()]
        try:
            table.move(slots, SlotState.IN_FLIGHT)
            table.note_steps(slots, len(slots))
            for row, (request, payload) in enumerate(asked):
                cuts = [[slice(row * size, (row + 1) * size) for size in self._sizes]]
                scheduler.dispatcher.submit_steps(request, views, cuts, [payload])
        except BaseException:
            for request, _ in asked:
                scheduler.roll_back(request)
            raise

    def _acquire(self, slot: int) -> tuple[BatchRequest, bytes]:
        known = self._requests.get(slot)
        if known is not None:
            request, _ = known
            if request.parts[0].untaken == []:  # its last result was taken
                request.reset(stepped=True, waiting=False)
                return known
            request.clear()
        (share,) = self._scheduler.worker_pool.shares(np.array([slot]))
        request = self._scheduler.dispatcher.make_plain_request([share])
        member, _ = share
        rows = None if member.stop - member.start == 1 else compact([slot - member.start])
        self._requests[slot] = known = request, step_payload(rows, ())
        return known

    def clear(self) -> None:
        """Release all requests."""
        for request, _ in self._requests.values():
            request.clear()
        self._requests.clear()


# ------------------------------------------------------------ rollouts


class RememberedState:
    """The state in which the last rollout left the slots, valid until their workers are asked for anything else."""

    def __init__(self) -> None:
        self._state: InitialState | None = None
        self._asked: list[tuple[Worker, tuple[int, int]]] = []

    def note(self, state: InitialState | None, asked: list[tuple[Worker, tuple[int, int]]]) -> None:
        """Note the state after a rollout.

        Args:
            state: the state; None if it is not known.
            asked: the requests that the workers had got when the rollout had sent its last one.
        """
        self._state, self._asked = state, asked

    def recall(self, scheduler: RequestScheduler) -> InitialState | None:
        """Return the state if it is known, and forget it."""
        state, self._state = self._state, None
        if state is None or self._asked != _asked(scheduler):
            return None
        return state if all(worker.state is WorkerState.READY for worker, _ in self._asked) else None


def _asked(scheduler: RequestScheduler) -> list[tuple[Worker, tuple[int, int]]]:
    return [(member.worker, member.worker.next_request) for member in scheduler.worker_pool.members]


class WorkerRolloutBackend:
    """See `RolloutBackend`.

    Args:
        scheduler: sends the requests and waits for the replies.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._scheduler = scheduler
        self._asked: list[tuple[Worker, tuple[int, int]]] = []
        self._stepped = scheduler.table.active  # the slots that were split

    def split(self, groups: int, *, whole_workers: bool) -> list[WorkerGroup]:
        """Split the slots of every worker evenly into so many groups, or as many as its smallest worker has slots.

        So every group keeps every worker busy, and a worker that has finished one group finds the next one's request.
        Paused slots are in no group.

        Args:
            groups: the number of groups.
            whole_workers: split the workers instead, into at most as many groups. So it is always where a worker has
                one vector env, which steps all its slots at once.
        """
        scheduler = self._scheduler
        self._stepped = live = scheduler.table.active
        shares = [mine for _, mine in scheduler.worker_pool.shares(live)]
        if whole_workers or scheduler.worker_pool.vectorized:
            spans = spread(len(shares), min(groups, len(shares)))
            return [WorkerGroup(scheduler, np.concatenate(shares[start:stop])) for start, stop in spans]
        groups = min([groups, *map(len, shares)])
        runs: list[list[Slots]] = [[] for _ in range(groups if shares else 0)]
        for slots in shares:
            for mine, (start, stop) in zip(runs, spread(len(slots), groups), strict=True):
                mine.append(slots[start:stop])
        return [WorkerGroup(scheduler, np.concatenate(mine)) for mine in runs]

    async def look(self, *, pending_reset: bool) -> InitialState:
        """Ask the workers of all groups, and those of the others that can answer now (see `RolloutBackend.look`).

        Other tasks may pause and resume slots while this drains: the groups keep the slots that were split.
        """
        scheduler, table = self._scheduler, self._scheduler.table
        if (state := scheduler.remembered.recall(scheduler)) is not None:
            return state
        await scheduler.drain()
        await scheduler.wait_for_observations()
        stepped = {member for member, _ in scheduler.worker_pool.shares(self._stepped)}

        def can_answer(member: WorkerSlots) -> bool:
            mine = range(member.start, member.stop)
            idle = all(table.state(slot) is SlotState.IDLE for slot in mine)
            return idle and member.worker.state in ACCEPTS_REQUESTS and not member.worker.busy

        asked = [member for member in scheduler.worker_pool.members if member in stepped or can_answer(member)]
        slots = np.concatenate([np.arange(member.start, member.stop) for member in asked])
        everyone = WorkerGroup(scheduler, slots)
        everyone.send_look()
        outcome = await everyone.recv()
        if outcome.error is not None:
            raise outcome.error
        resets: Any = np.zeros(len(slots), np.bool_)
        if pending_reset:
            resets = np.array(await self._pending_resets(slots), np.bool_)
            if (spares := scheduler.spares) is not None:
                resets |= np.isin(slots, list(spares.ended))
        return InitialState(slots, outcome.obs, outcome.objects, resets)

    async def _pending_resets(self, slots: Slots) -> tuple[bool, ...]:
        """Ask which slots' next step is a reset; again, if a worker dies meanwhile that is restarted."""
        scheduler = self._scheduler
        while True:
            workers = [(m.worker, m.worker.generation) for m, _ in scheduler.worker_pool.shares(slots)]
            try:
                return await scheduler.call_service(slots, "rollout", "pending_resets", lambda _: ())
            except WorkerDied:
                restarter = scheduler.restarter
                if restarter is None or not any(
                    restarter.is_restarting(worker) or worker.generation != generation for worker, generation in workers
                ):
                    raise

    def sent(self) -> None:
        """Note the requests of all workers: of later ones, which others send, the rollout does not know."""
        self._asked = _asked(self._scheduler)

    def ended(self, state: InitialState | None) -> None:
        """Remember the state after the rollout."""
        self._scheduler.remembered.note(state, self._asked)

    def merge(self, infos: Sequence[Any], *, by_slot: bool = False) -> dict[str, Any]:
        """Merge the infos of all groups (see `RolloutBackend.merge`)."""
        columns = [piece if isinstance(piece, Columns) else _at_slots(*piece) for piece in infos]
        merge = merge_infos_or_rows if by_slot else merge_infos
        return merge(sorted(columns, key=_first_position), self._scheduler.num_envs)


def _at_slots(columns: Columns, slots: Slots) -> Columns:
    """Return columns of a batch with slots for positions: a slice where they are successive, which merges faster."""
    mine = slots[columns.positions]
    first, last = int(mine[0]), int(mine[-1])
    return columns._replace(positions=slice(first, last + 1) if last - first + 1 == len(mine) else mine)


def _first_position(columns: Columns) -> int:
    positions = columns.positions
    return int(positions.start if isinstance(positions, slice) else positions[0])


class ActiveSlots:
    """Steps and resets the slots that are not paused. It is valid until slots are resumed.

    Args:
        scheduler: sends the requests and waits for the replies.

    Attributes:
        resumes: how often slots had been resumed when this was made.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self.resumes = scheduler.table.resumes
        self._scheduler = scheduler
        self._layout = scheduler.observations
        self._paused: Bools | None = None  # the slots that the group is without
        self._group: WorkerGroup | None = None
        self._known = np.zeros(scheduler.num_envs, np.bool_)  # whose last observations are here
        self._obs = self._layout.zeros(scheduler.num_envs)
        self._objects = self._layout.no_objects(scheduler.num_envs)
        self._images: dict[int, Any] = {}  # the last images of paused slots, if images are drawn
        self._asked: BatchRequest | None = None  # asks for last observations, which were not taken yet

    async def step(self, actions: Any, timeout_s: float | None) -> StepResult:
        """Step the slots that are not paused (see `AsyncVectorEnv.step`)."""
        scheduler = self._scheduler
        arrays, objects = scheduler.actions.take_apart(actions, scheduler.num_envs, scheduler.table.active)
        group = await self._prepare(timeout_s)
        if group is None:
            return self._all_paused()
        slots = group.slots
        chosen = [[column[slot] for slot in slots.tolist()] for column in objects]
        with self._on_thread(timeout_s):
            request = group.step([array[slots] for array in arrays], chosen, "step")
        whole: StepResult = await self._outcome(request, timeout_s)
        return whole

    async def reset(
        self,
        seed: int | Sequence[int | None] | None,
        mask: Bools | None,
        options: dict[str, Any] | None,
        timeout_s: float | None,
    ) -> ResetResult:
        """Reset the slots that are not paused, or those of a mask (see `AsyncVectorEnv.reset`)."""
        scheduler = self._scheduler
        seeds = scheduler.worker_pool.seeds(seed, np.arange(scheduler.num_envs))
        group = await self._prepare(timeout_s)
        if group is None:
            return _as_reset(self._all_paused())
        slots = group.slots if mask is None else group.slots[mask[group.slots]]
        with self._on_thread(timeout_s):
            request = group.reset(
                slots, dict(enumerate(seeds)), options, "reset", each=is_seed_list(seed), every_slot=mask is None
            )
        whole: ResetResult = await self._outcome(request, timeout_s)
        return whole

    def _on_thread(self, timeout_s: float | None) -> contextlib.AbstractContextManager[object]:
        """Return a block in which no request with a limit of its own runs on the caller's thread."""
        return contextlib.nullcontext() if timeout_s is None else self._scheduler.dispatcher.off_this_thread()

    async def _outcome(self, request: BatchRequest, timeout_s: float | None) -> Any:
        """Wait for a request to the active slots; a cancellation or timeout leaves it to `recv`."""
        # the steps of other tasks, though they are refused, may change `self._paused` meanwhile
        paused = np.ones(self._scheduler.num_envs, np.bool_)
        paused[request.slots] = False

        def whole() -> StepResult | ResetResult:
            result = self._spread(request, paused)
            return result if request.stepped else _as_reset(result)

        def result(_: BatchRequest) -> StepResult | ResetResult:
            self._show_images(paused)
            return whole()

        try:
            return await self._scheduler.outcome(request, result, timeout_s)
        except StepTimeout as error:
            error.partial = whole()
            raise

    # ------------------------------------------------------------ before a request is sent

    async def _prepare(self, timeout_s: float | None) -> WorkerGroup | None:
        """Get the last observations of paused slots, and return the group of the others; None if all are paused."""
        scheduler, table = self._scheduler, self._scheduler.table
        await scheduler.drain(timeout_s)
        while True:
            paused = np.zeros(scheduler.num_envs, np.bool_) if table.paused is None else table.paused
            before = table.paused
            await self._observe(paused, timeout_s)
            if table.paused is before:  # no slot was paused or resumed meanwhile
                break
        if self._paused is not before or self._group is None:
            self._paused = before
            if self._group is not None:
                self._group.close()
            self._group = WorkerGroup(scheduler, np.flatnonzero(~paused)) if not paused.all() else None
        if self._group is None:
            await asyncio.sleep(0)  # a loop of steps must let other tasks run
        return self._group

    async def _observe(self, paused: Bools, timeout_s: float | None) -> None:
        """Ask for the last observations of paused slots: once for each, and not yet while its worker is busy."""
        await self._take_observations(timeout_s)
        wanted = paused & ~self._known
        if wanted.any():
            self._asked = self._scheduler.ask_observations(np.flatnonzero(wanted))
            await self._take_observations(timeout_s)

    async def _take_observations(self, timeout_s: float | None) -> None:
        """Wait for observations that were asked for; the call that asked may have been cancelled."""
        request, images = self._asked, self._scheduler.images
        if request is None:
            return
        await self._scheduler.timeouts.wait_for(request, timeout_s, shielded=True)
        self._scheduler.check_open()
        self._asked = None
        for part in request.parts:
            if not part.errors:
                _put_part(self._obs, self._objects, request, part)
                self._known[part.slots] = True
                if images is not None:
                    self._images.update(images.newest_requests(part.slots))

    # ------------------------------------------------------------ after the replies are in

    def _all_paused(self) -> StepResult:
        all_slots = np.ones(self._scheduler.num_envs, np.bool_)
        self._show_images(all_slots)
        if (images := self._scheduler.images) is not None and images.draws:
            images.end_result()
        return self._spread(None, all_slots)

    def _show_images(self, paused: Bools) -> None:
        """Show the last images of paused slots again: the results that they belong to may have been dropped."""
        if self._scheduler.images is not None:
            self._scheduler.images.set_current_of_each(
                {slot: one for slot, one in self._images.items() if paused[slot]}
            )

    def _spread(self, request: BatchRequest | None, paused: Bools) -> StepResult:
        """Put the results of a request into a whole batch; the rows of slots without a reply are zero."""
        n, layout = self._scheduler.num_envs, self._layout
        obs, objects = layout.zeros(n), [list(column) for column in self._objects]
        for mine, known in zip(obs, self._obs, strict=True):
            mine[paused] = known[paused]
        reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        columns: list[Columns] = []
        slots = np.flatnonzero(~paused)
        for part in request.parts if request is not None else ():
            assert request is not None
            if not part.arrived:
                continue
            batch, rows = request.batch, slice(part.start, part.stop)
            _put_part(obs, objects, request, part)
            reward[part.slots], terminated[part.slots] = batch.reward[rows], batch.terminated[rows]
            truncated[part.slots] = batch.truncated[rows]
            columns += [c._replace(positions=slots[c.positions]) for c in part.columns]
        info = merge_infos(columns, n)
        if paused.any():
            info["_active"] = ~paused & info.get("_active", True)
        return StepResult(layout.assemble(obs, objects), reward, terminated, truncated, info)


def _as_reset(result: StepResult) -> ResetResult:
    return ResetResult(result.obs, result.info)


def _put_part(obs: Arrays, objects: list[list[Any]], request: BatchRequest, part: WorkerRequest) -> None:
    """Put the observations of a worker request into the rows of its slots."""
    for mine, theirs in zip(obs, request.batch.obs, strict=True):
        mine[part.slots] = theirs[part.start : part.stop]
    for column, items in zip(objects, part.objects, strict=False):
        for slot, item in zip(part.slots.tolist(), items, strict=True):
            column[slot] = item
