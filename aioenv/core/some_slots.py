"""Requests to some slots, and results of whoever is first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.core.collect import Merge, harvest
from aioenv.core.dispatcher import Dispatcher
from aioenv.core.history import SlotHistory
from aioenv.core.payloads import compact, reset_tail, step_tail
from aioenv.core.requests import BatchRequest, SentRequest, WorkerRequest
from aioenv.core.results import Ready
from aioenv.core.slots import SlotState, SlotTable
from aioenv.core.stats_merger import StatsMerger
from aioenv.core.timeouts import ReplyTimeouts
from aioenv.core.worker_pool import WorkerPool, WorkerSlots
from aioenv.errors import ClosedError, NoAsyncCallError, SlotError, StepTimeout
from aioenv.ipc.frames import Kind
from aioenv.process.supervisor import LIVING
from aioenv.rendering.step_images import StepImages
from aioenv.spaces.layout import byte_view
from aioenv.spaces.seeding import is_seed_list

__all__ = ["Seeds", "Slots", "SomeSlots"]

Seeds = Sequence[int | None]
Slots = npt.NDArray[np.int64]


class SomeSlots:
    """The part of the schedule that asks some slots, and hands out what is ready."""

    fleet: WorkerPool
    images: StepImages | None
    table: SlotTable
    dispatch: Dispatcher
    history: SlotHistory | None
    merger: StatsMerger | None
    patience: ReplyTimeouts
    merge_infos: Merge
    closing: bool
    _abandoned: list[BatchRequest]  # cancelled or timed out: their results wait for `recv`
    _ready: list[tuple[BatchRequest, WorkerRequest]]
    _arrival: asyncio.Event
    _wanted: list[int]  # how many ready slots whoever waits for arrivals is content with

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to some slots; never blocks (see `AsyncVectorEnv.send`)."""
        numbers = self.table.named(slots)
        paused = self.table.paused
        used = None if paused is None else np.flatnonzero(~paused[numbers])
        arrays, objects = self.fleet.actions.take_apart(actions, len(numbers), used)
        if paused is not None:
            keep = self.table.leave_out_paused(numbers, "send", by_name=slots is not None)
            numbers, arrays = numbers[keep], [array[keep] for array in arrays]
            objects = [[column[i] for i in keep.tolist()] for column in objects]
            if not len(numbers):
                return
        self.table.check_send(numbers, "send", reset=False)
        shares = self.fleet.shares(numbers)
        tails = []
        for member, order in shares:
            rows = compact((numbers[order] - member.start).tolist())
            whole = len(rows) == member.stop - member.start
            picked = [[column[i] for i in order.tolist()] for column in objects]
            tails.append(step_tail(None if whole else rows, picked, table=self.fleet.definitions))
        shared = self.dispatch.shared_actions
        parts = self._begin(shares, numbers, stepped=True)
        try:
            for (exchange, part), (_, order), tail in zip(parts, shares, tails, strict=True):
                chosen = [array[order] for array in arrays]
                fixed = [byte_view(array) for i, array in enumerate(chosen) if i not in shared]
                placed = {i: chosen[i] for i in shared}
                self.dispatch.submit(exchange, part, SentRequest(Kind.STEP, fixed, tail, part.slots, placed))
        except BaseException:
            self._free_all_unasked(parts)
            raise

    def send_reset(self, slots: Iterable[int] | None, seed: int | Seeds | None, options: dict[str, Any] | None) -> None:
        """Begin episodes in some slots; never blocks (see `AsyncVectorEnv.send_reset`)."""
        numbers = self.table.named(slots)
        seeds = self.fleet.seeds(seed, numbers, anew=slots is None)
        by_slot = dict(zip(numbers.tolist(), seeds, strict=True))
        numbers = numbers[self.table.leave_out_paused(numbers, "send_reset", by_name=slots is not None)]
        if not len(numbers):
            return
        self.table.check_send(numbers, "send_reset", reset=True)
        shares = self.fleet.shares(numbers)
        tails = []
        for member, order in shares:
            chosen = numbers[order].tolist()
            own = [by_slot[slot] for slot in chosen]
            tails.append(reset_tail(member, chosen, own, options, whole=False, each=is_seed_list(seed)))
        self.note_reset(numbers, {slot: by_slot[slot] for slot in numbers.tolist()})
        parts = self._begin(shares, numbers, stepped=False)
        try:
            for (exchange, part), tail in zip(parts, tails, strict=True):
                self.dispatch.submit(exchange, part, SentRequest(Kind.RESET, (), tail, part.slots))
        except BaseException:
            self._free_all_unasked(parts)
            raise

    def _begin(
        self, shares: Sequence[tuple[WorkerSlots, Slots]], numbers: Slots, *, stepped: bool
    ) -> list[tuple[BatchRequest, WorkerRequest]]:
        """Parts for requests to some workers, each with its exchange, which it may have in common with others."""
        mine = [(member, numbers[order]) for member, order in shares]
        parts: list[tuple[BatchRequest, WorkerRequest]] = []
        # with images each has its own: those of an exchange are shown when all are drawn
        for together in [mine] if self.images is None else [[share] for share in mine]:
            exchange = self.dispatch.some(together, stepped=stepped)
            if self.images is not None:
                exchange.images = self.images.new_request(together[0][1])
            parts += [(exchange, part) for part in exchange.parts]
        self.table.move(numbers, SlotState.IN_FLIGHT)
        return parts

    def _free_unasked(self, exchange: BatchRequest) -> None:
        """Something was raised while this was being sent, Ctrl-C most of all: who was not asked is free again."""
        for part in exchange.parts:
            held = part.sent is not None and part.member.worker.state not in LIVING  # until that is started again
            if held or part.arrived or part.member.worker.awaits(part.into[0 if exchange.stepped else 1]):
                continue
            part.arrived = True
            exchange.open -= 1
            if exchange.images is not None and self.images is not None:
                error = part.member.worker.failure_here("it was interrupted before it was asked", part.slots.tolist())
                self.images.fail(None, None, exchange.images, part.slots, error)
            self.free_slots(part.slots)
        if not exchange.open and not exchange.done.done():
            exchange.done.set_result(None)

    def _free_all_unasked(self, parts: Sequence[tuple[BatchRequest, WorkerRequest]]) -> None:
        for exchange in dict.fromkeys(exchange for exchange, _ in parts):
            self._free_unasked(exchange)

    async def recv(self, min_slots: int, max_slots: int | None, deadline_s: float | None) -> Ready:
        """Take results as they come (see `AsyncVectorEnv.recv`)."""
        if not self.outstanding:
            raise NoAsyncCallError("recv: nothing is in flight and nothing is ready; send() or send_reset() first")
        if max_slots is not None:
            min_slots = min(min_slots, max_slots)

        async def enough() -> None:
            while not self.has_ready(min_slots):
                self._arrival.clear()
                self._wanted.append(wanted := min(min_slots, self._reachable()))
                try:
                    await self._arrival.wait()
                finally:
                    self._wanted.remove(wanted)
                if self.closing:
                    raise ClosedError("the vector env was closed while recv() waited")

        if deadline_s is None:
            await self.patience.wait(enough)
        else:
            try:
                async with asyncio.timeout(deadline_s):
                    await self.patience.wait(enough)
            except TimeoutError as exc:
                if isinstance(exc, StepTimeout):
                    raise
        if self.merger is not None:
            await self._merge(self.merger, 0)
        self.check_open()
        return self.take(max_slots)

    def has_ready(self, min_slots: int) -> bool:
        """Whether so many results are in, or all that is in flight; which may become less meanwhile."""
        return self.table.count(SlotState.READY) >= min(min_slots, self._reachable())

    def check_open(self) -> None:
        """Raise a ClosedError if the vector env was closed while somebody waited."""
        if self.closing:
            raise ClosedError("the vector env was closed while this was in flight")

    @property
    def outstanding(self) -> bool:
        """Whether anything is in flight or ready."""
        return bool(self._ready) or self.table.count(SlotState.IN_FLIGHT) > 0

    def _reachable(self) -> int:
        return self.table.count(SlotState.READY) + self.table.count(SlotState.IN_FLIGHT)

    def take(self, max_slots: int | None) -> Ready:
        """What `recv` gives of what is in: results of up to `max_slots` slots, oldest first, in the order of slots."""
        ready, taken, errors, rest = harvest(self.fleet.observations, self._ready, max_slots, self.merge_infos)
        self._ready = rest
        self.table.move(ready.slots, SlotState.IDLE)
        self._arrival.set()  # another may wait for more than there will be
        for exchange, slots in taken:
            if exchange.images is not None and self.images is not None:
                self.images.set_current(exchange.images, slots)
        if self.images is not None and taken:
            self.images.end_result()
        for exchange in self._abandoned:
            exchange.idle = not exchange.open and not any(exchange is other for other, _ in self._ready)
        self._abandoned = [exchange for exchange in self._abandoned if not exchange.idle]
        self.table.note_ends(ready.slots, ready.terminated | ready.truncated)
        for error, slots in errors:
            self.table.fail(error, slots)
        self.table.note_taken(ready.slots)
        if errors:
            raise SlotError.join([error for error, _ in errors], ready)
        return ready

    def _offer(self, exchange: BatchRequest, part: WorkerRequest) -> None:
        if exchange.looks:
            self.free_slots(part.slots)
            return
        part.untaken = list(range(len(part.slots)))
        self._ready.append((exchange, part))
        self.table.move(part.slots, SlotState.READY)
        if self._wanted and self.table.count(SlotState.READY) >= min(self._wanted):
            self._arrival.set()

    def free_slots(self, slots: Slots | slice) -> None:
        """Whoever waited for these slots has their results."""
        self.table.move(slots, SlotState.IDLE)
        if self._wanted:
            self._arrival.set()  # a `recv` may have nothing left to wait for

    async def _merge(self, merger: StatsMerger, slots: int) -> None:
        """Merge what the envs have seen, if nothing else is in flight than so many slots, whose replies are in."""
        if self.table.count(SlotState.IN_FLIGHT) <= slots and not self.closing:
            await merger.merge()

    def note_reset(self, slots: Slots, seeds: Mapping[int, int | None]) -> None:
        """A reset of these slots is being sent, with these seeds."""
        self.table.note_reset(slots)
        if self.history is not None:
            self.history.note_seeds(seeds)
