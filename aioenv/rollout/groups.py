"""Groups: some slots of every worker, stepped by one exchange while the exchanges of other groups are in flight.

A group is the schedule's other half for rollouts, and while slots are paused: it makes exchanges of its own slots and
hands them to the schedule, which sends them, waits for them and, if nobody does any more, abandons them as it does a
cancelled step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.core.backend import StepOutcome
from aioenv.core.payloads import compact, reset_tail, step_tail
from aioenv.core.requests import BatchRequest, BatchRequestPool, SentRequest, WorkerRequest
from aioenv.core.results import StepResult
from aioenv.core.scheduler import RequestScheduler
from aioenv.core.slots import SlotState
from aioenv.core.worker_pool import WorkerSlots
from aioenv.errors import SlotError
from aioenv.ipc.frames import Kind
from aioenv.spaces.infos import Columns
from aioenv.spaces.layout import Arrays, Layout, byte_view
from aioenv.spaces.shared_layout import COPIED

__all__ = ["Group", "objects_of", "of_slots"]

Slots = npt.NDArray[np.int64]

_NONE = np.zeros(0, np.bool_)
_ITS_OWN = StepResult(None, np.zeros(0), _NONE, _NONE, {})


class Group:
    """Some slots, one request in flight at a time.

    Args:
        schedule: what sends and waits.
        slots: ascending; those of one worker next to each other.

    Attributes:
        slots: int64 `(k,)`, not to be written to.
    """

    def __init__(self, schedule: RequestScheduler, slots: Slots) -> None:
        self.slots = slots
        self.slots.flags.writeable = False
        # as the slot table is asked for them: a slice is faster
        first, stop = int(slots[0]), int(slots[-1]) + 1
        self._at = slice(first, stop) if stop - first == len(slots) else slots
        self._schedule = schedule
        self._exchange: BatchRequest | None = None
        self._exchanges = BatchRequestPool(self._make, in_turn=False)
        shares = [(member, slots[order]) for member, order in schedule.fleet.shares(slots)]
        self._shares = shares
        # the same for every step, unless actions are objects
        self._rows = [None if _whole(m, mine) else compact((mine - m.start).tolist()) for m, mine in shares]
        self._tails = [step_tail(rows, ()) for rows in self._rows]
        sizes = [leaf.dtype.itemsize * prod(leaf.shape) for leaf in schedule.fleet.actions.leaves]
        stops = np.cumsum([len(mine) for _, mine in shares]).tolist()
        runs = list(zip([0, *stops], stops, strict=False))
        self._cuts = [[slice(start * size, stop * size) for size in sizes] for start, stop in runs]

    def send(self, actions: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
        """Step all slots; gives the actions as the layout takes them apart.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied: as `AsyncVectorEnv.send`.
        """
        arrays, objects = self._schedule.fleet.actions.take_apart(actions, len(self.slots))
        self.send_arrays(arrays, objects, "rollout")
        return arrays, objects

    def send_arrays(self, arrays: Arrays, objects: Sequence[Sequence[Any]], name: str) -> None:
        """Step all slots, with actions taken apart; otherwise as `send`."""
        schedule, n = self._schedule, len(self.slots)
        schedule.table.check_send(self._at, name, reset=False)
        exchange = self._exchanges.take()
        parts, tails = exchange.parts, self._tails
        if not objects and not schedule.dispatch.shared_actions:
            views = [byte_view(array) for array in arrays]
            try:
                self._hold(exchange, stepped=True)
                schedule.dispatch.submit_steps(exchange, views, self._cuts, tails)
            except BaseException:
                self._take_back(exchange)
                raise
            return
        if objects:
            columns = [[column[part.start : part.stop] for column in objects] for part in parts]
            tails = [
                step_tail(rows, mine, table=schedule.fleet.definitions)
                for rows, mine in zip(self._rows, columns, strict=True)
            ]
        shared = schedule.dispatch.shared_actions
        sized = [(byte_view(array), array.nbytes // n) for i, array in enumerate(arrays) if i not in shared]
        requests = []
        for part, tail in zip(parts, tails, strict=True):
            fixed = [view[part.start * size : part.stop * size] for view, size in sized]
            placed = {i: arrays[i][part.start : part.stop] for i in shared}
            requests.append(SentRequest(Kind.STEP, fixed, tail, part.slots, placed))
        self._begin(exchange, requests, stepped=True)

    def send_whole_reset(
        self,
        slots: Slots,
        seeds: Mapping[int, int | None],
        options: dict[str, Any] | None,
        name: str,
        *,
        each: bool = True,
    ) -> None:
        """Reset some of the slots; the others' latest observations come too.

        Args:
            slots: which.
            seeds: by slot.
            options: for all of them.
            name: what this is called in errors.
            each: whether each slot has a seed of its own, rather than a batch one that was spread.
        """
        schedule, requests = self._schedule, []
        schedule.table.check_send(self.slots, name, reset=True)
        for (member, mine), shown in zip(self._shares, self._rows, strict=True):
            chosen = mine[np.isin(mine, slots)]
            own = [seeds[slot] for slot in chosen.tolist()]
            tail = reset_tail(member, chosen.tolist(), own, options, whole=True, shown=shown, each=each)
            requests.append(SentRequest(Kind.RESET, (), tail, chosen))
        schedule.note_reset(slots, {slot: seeds[slot] for slot in slots.tolist()})
        self._begin(self._make(COPIED), requests, stepped=False)

    def send_reset(
        self,
        slots: Slots,
        seeds: Mapping[int, int | None] | None = None,
        options: dict[str, Any] | None = None,
        name: str = "rollout",
    ) -> None:
        """Reset some of the slots (see `SlotGroup.send_reset`)."""
        schedule, seeds = self._schedule, seeds or {}
        shares = [(member, slots[order]) for member, order in schedule.fleet.shares(slots)]
        tails = [
            reset_tail(m, mine.tolist(), [seeds.get(slot) for slot in mine.tolist()], options, whole=False, each=True)
            for m, mine in shares
        ]
        schedule.table.check_send(slots, name, reset=True)
        schedule.note_reset(slots, seeds)
        exchange = self._make(COPIED, shares)
        sent = [SentRequest(Kind.RESET, (), tail, part.slots) for part, tail in zip(exchange.parts, tails, strict=True)]
        self._begin(exchange, sent, stepped=False)

    def send_look(self) -> None:
        """Ask for the observations as they are: a reset of nothing. The group must be of all slots of its workers.

        Raises:
            PendingCallError: if a slot has a request in flight, or a result that nobody took.
            WorkerDied: if a worker is gone.
        """
        none = self.slots[:0]
        self._schedule.table.check_send(self.slots, "rollout", reset=True)
        tails = [reset_tail(member, [], [], None, whole=True) for member, _ in self._shares]
        self._begin(self._make(COPIED), [SentRequest(Kind.RESET, (), tail, none) for tail in tails], stepped=False)
        assert self._exchange is not None
        self._exchange.looks = True

    def _make(self, lane: int, shares: list[tuple[WorkerSlots, Slots]] | None = None) -> BatchRequest:
        """An exchange of all slots, or of some, with a row for each; what is shared it takes from `COPIED`."""
        shares = self._shares if shares is None else shares
        dispatch = self._schedule.dispatch
        batch = dispatch.new_batch(sum(len(slots) for _, slots in shares), COPIED)
        parts: list[WorkerRequest] = []
        for member, slots in shares:
            parts.append(WorkerRequest(member, slots, parts[-1].stop if parts else 0, batch))
        exchange = BatchRequest(batch, parts, self._schedule.loop)
        if lane != COPIED:
            dispatch.keep(exchange)
        return exchange

    def _hold(self, exchange: BatchRequest, *, stepped: bool) -> None:
        """This is about to be sent."""
        schedule = self._schedule
        exchange.begin(stepped=stepped, waiting=True)
        schedule.table.move(self._at if stepped else exchange.slots, SlotState.IN_FLIGHT)
        if schedule.images is not None:
            exchange.images = schedule.images.new_request(exchange.slots)
        self._exchange = exchange

    def _begin(self, exchange: BatchRequest, requests: list[SentRequest], *, stepped: bool) -> None:
        try:
            self._hold(exchange, stepped=stepped)
            for part, sent in zip(exchange.parts, requests, strict=True):
                self._schedule.dispatch.submit(exchange, part, sent)
        except BaseException:
            self._take_back(exchange)
            raise

    def _take_back(self, exchange: BatchRequest) -> None:
        """Something was raised while this was being sent."""
        self._exchange = None
        if not exchange.idle:
            self._schedule.take_back(exchange)

    def close(self) -> None:
        """Nothing more will be sent: let go of the memory of results, but for what is in flight."""
        self._exchanges.clear()

    async def recv(self) -> StepOutcome:
        """Wait for what was sent; its results, and what went wrong in some slots.

        If this is cancelled, or times out, the exchange is abandoned.

        Raises:
            StepTimeout: if `timeout_s` passed.
            ClosedError: if the vector env was closed.
        """
        exchange, error = self.take(), None
        try:
            await self._schedule.outcome(exchange, self.settle, None)
        except SlotError as exc:
            error = exc
        batch, slots, layout = exchange.batch, exchange.slots, self._schedule.fleet.observations
        # which slots they are of is found out when somebody looks at them (`of_slots`)
        infos = [(columns, slots) for part in exchange.parts for columns in part.columns]
        counts = None
        if error is not None or self._schedule.restarter is not None:
            counts = self._counts(exchange)
        objects = objects_of(layout, exchange) if layout.num_objects else []
        return StepOutcome(
            list(batch.obs), objects, batch.reward, batch.terminated, batch.truncated, counts, infos, error
        )

    @staticmethod
    def _counts(exchange: BatchRequest) -> npt.NDArray[np.bool_]:
        """See `StepOutcome.valid`."""
        slots = exchange.slots
        counts: npt.NDArray[np.bool_] = ~np.isin(slots, [slot for one in exchange.errors() for slot in one.slots])
        for columns in (c for part in exchange.parts for c in part.columns):
            if any(column.path == ("restarted",) for column in columns.schema.columns):
                counts[columns.positions] = False
        return counts

    def take(self) -> BatchRequest:
        """What is in flight, for somebody else to wait for."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        return exchange

    @property
    def in_flight(self) -> bool:
        """Whether something was sent that nobody has waited for."""
        return self._exchange is not None

    def abandon(self) -> None:
        """Nobody will wait for what is in flight: the next step, reset or rollout drops it, unless `recv` takes it."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._schedule.abandon(exchange)

    def settle(self, exchange: BatchRequest) -> StepResult:
        """All replies are in and about to be handed out: the slots are free again, or failed.

        Returns:
            Nothing of use: who waits looks at the exchange.
        """
        schedule, batch, slots = self._schedule, exchange.batch, exchange.slots
        schedule.free_slots(self._at if exchange.stepped else slots)
        if exchange.stepped and schedule.table.must_reset:
            schedule.table.note_ends(slots, batch.terminated | batch.truncated)
        for part in exchange.parts:
            for error in part.errors:
                schedule.table.fail(error)
        if exchange.images is not None and schedule.images is not None:
            schedule.images.set_current(exchange.images, slots)
            schedule.images.end_result()
        return _ITS_OWN


def _whole(member: WorkerSlots, slots: Slots) -> bool:
    return len(slots) == member.stop - member.start


def objects_of(layout: Layout, exchange: BatchRequest) -> list[list[Any]]:
    """The object leaves of all rows of an exchange."""
    objects: list[list[Any]] = layout.no_objects(len(exchange.batch.reward))
    for part in exchange.parts:
        for column, items in zip(objects, part.objects, strict=False):
            column[part.start : part.stop] = items
    return objects


def of_slots(columns: Columns, slots: Slots) -> Columns:
    """Info columns of a batch, with slots for positions: a slice where they are in a row, which merges faster."""
    mine = slots[columns.positions]
    first, last = int(mine[0]), int(mine[-1])
    return columns._replace(positions=slice(first, last + 1) if last - first + 1 == len(mine) else mine)
