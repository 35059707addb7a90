"""Pausing slots: they keep their process and their state, and are left out of whole batches, whose shape stays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.core.payloads import reset_tail
from aioenv.core.requests import BatchRequest, SentRequest, WorkerRequest
from aioenv.core.results import ResetResult, StepResult
from aioenv.errors import SlotError, StepTimeout
from aioenv.ipc.frames import Kind
from aioenv.process.supervisor import LIVING
from aioenv.rollout.groups import Group
from aioenv.spaces.infos import Columns, merge
from aioenv.spaces.layout import Arrays
from aioenv.spaces.seeding import is_listed

if TYPE_CHECKING:
    from aioenv.core.images.image_requests import ImageRequest
    from aioenv.core.scheduler import RequestScheduler

__all__ = ["ActiveSlots", "Pausing", "put_part", "several"]

Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Pausing:
    """The part of a vector env that leaves slots out of whole batches."""

    _live: ActiveSlots | None = None

    if TYPE_CHECKING:

        @property
        def _running(self) -> RequestScheduler: ...

    def pause(self, slots: int | Iterable[int]) -> None:
        """Leave slots out of whole batches, until they are resumed. Never blocks, and tells the workers nothing.

        They keep their process and their state, in the middle of an episode, say. Batches keep their shape: `step` and
        `reset` take and give as many rows as before. The rows of paused slots in actions, seeds and reset masks are
        ignored. In results they repeat the slot's last observation (zeros, if it had none, if its worker is gone, or
        while that is busy: a reply of the slot's own is in flight, say, or a call that was cancelled goes on), with
        reward 0 and flags False, and `info["_active"]`, a bool array that is there while anything is paused, is False.
        `send` and `send_reset` without slots leave them out, too; to name one there, in `step_at` or in `reset_at` is a
        `PausedError`. Calls, attributes, states and images are as before. A worker whose slots are all paused gets no
        frames.

        A reply that is in flight is not lost: `recv` takes it. A slot that has failed, or whose worker is gone, may be
        paused, too: the others go on.

        Args:
            slots: a slot number, or some; `numpy.flatnonzero(…)` of nothing pauses none. One that is paused already
                stays so.

        Raises:
            IndexError, ValueError: if they are no slot numbers. Nothing is paused.
        """
        table = self._running.table
        table.pause(table.slot_numbers(several(slots), maybe_none=True))

    def resume(self, slots: int | Iterable[int] | None = None) -> None:
        """Take slots into whole batches again, where they are. One that is not paused stays as it is.

        Args:
            slots: a slot number, or some; None for all. A slot that is `exhausted` tries another reset with its next
                step.

        Raises:
            IndexError, ValueError: if they are no slot numbers.
        """
        table = self._running.table
        table.resume(table.slot_numbers(None if slots is None else several(slots), maybe_none=True))
        self._live = None  # what it knows of their observations is out of date

    def resume_all(self) -> None:
        """Take all slots into whole batches again."""
        self.resume()

    @property
    def active_slots(self) -> Slots:
        """The slots that are not paused, int64, ascending."""
        return self._running.table.active

    @property
    def exhausted(self) -> tuple[int, ...]:
        """The slots that were paused because their envs have no further episode, ascending.

        An env says so by raising `EpisodesDone` in `reset`. Where it has an attribute `finite_episodes` that is true,
        a StopIteration means the same; `construct_envs` gives it to envs that were dealt episodes. It is no error,
        whoever resets: the slot is paused. In the result `info["_active"]` is False for it, unless its last episode
        ended in that very step (under SAME_STEP).
        """
        return tuple(sorted(self._running.table.exhausted))

    def _live_of(self, schedule: RequestScheduler) -> ActiveSlots:
        if self._live is None:
            self._live = ActiveSlots(schedule)
        return self._live


def several(slots: int | Iterable[int]) -> Iterable[int]:
    """A slot number, or some, as some; ValueError for None, which would stand for all."""
    if slots is None:
        raise ValueError("slots: expected a slot number, or some, got None")
    return [int(slots)] if isinstance(slots, (int, np.integer)) and not isinstance(slots, bool) else slots  # type: ignore[return-value]


class ActiveSlots:
    """Whole batches of which some slots are paused: the others are asked as a group, and put into their rows.

    Args:
        schedule: what sends and waits.
    """

    def __init__(self, schedule: RequestScheduler) -> None:
        self._schedule = schedule
        self._layout = schedule.observations
        self._paused: Bools | None = None  # those that the group is without
        self._group: Group | None = None
        self._known = np.zeros(schedule.num_envs, np.bool_)  # whose last observations are here
        self._obs = self._layout.zeros(schedule.num_envs)
        self._objects = self._layout.no_objects(schedule.num_envs)
        self._shots: dict[int, ImageRequest] = {}  # their images, if images are drawn
        self._looking: BatchRequest | None = None  # what was asked for and has not been taken in yet

    async def step(self, actions: Any, timeout_s: float | None) -> StepResult:
        """Step the slots that are not paused (see `AsyncVectorEnv.step`)."""
        schedule = self._schedule
        arrays, objects = schedule.actions.take_apart(actions, schedule.num_envs, schedule.table.active)
        group = await self._prepare(timeout_s)
        if group is None:
            return self._all_paused()
        slots = group.slots
        chosen = [[column[slot] for slot in slots.tolist()] for column in objects]
        group.send_arrays([array[slots] for array in arrays], chosen, "step")
        return await self._outcome(group, timeout_s)

    async def reset(
        self,
        seed: int | Sequence[int | None] | None,
        mask: Bools | None,
        options: dict[str, Any] | None,
        timeout_s: float | None,
    ) -> ResetResult:
        """Reset the slots that are not paused, or those of a mask (see `AsyncVectorEnv.reset`)."""
        seeds = self._schedule.worker_pool.seeds(seed, np.arange(self._schedule.num_envs), restarts_plan=mask is None)
        group = await self._prepare(timeout_s)
        if group is None:
            whole = self._all_paused()
        else:
            slots = group.slots if mask is None else group.slots[mask[group.slots]]
            group.send_whole_reset(slots, dict(enumerate(seeds)), options, "reset", each=is_listed(seed))
            whole = await self._outcome(group, timeout_s)
        return ResetResult(whole.obs, whole.info)

    async def _outcome(self, group: Group, timeout_s: float | None) -> StepResult:
        """Wait for what a group was sent; a cancellation or timeout leaves it to `recv`."""
        exchange = group.take()
        # another task's step, though it is refused, may look at what is paused then
        paused = np.ones(self._schedule.num_envs, np.bool_)
        paused[group.slots] = False

        def result(exchange: BatchRequest) -> StepResult:
            self._show(paused)
            group.settle(exchange)
            return self._spread(exchange, paused)

        try:
            return await self._schedule.outcome(exchange, result, timeout_s)
        except SlotError as error:
            if not exchange.stepped:
                for one in error.errors:
                    one.partial = ResetResult(one.partial.obs, one.partial.info)
                error.partial = error.errors[0].partial
            raise
        except StepTimeout as error:
            whole = self._spread(exchange, paused)
            error.partial = whole if exchange.stepped else ResetResult(whole.obs, whole.info)
            raise

    # ------------------------------------------------------------ before it is sent

    async def _prepare(self, timeout_s: float | None) -> Group | None:
        """The group of the slots that are not paused, now that it is known what the others look like; None: no slot."""
        schedule, table = self._schedule, self._schedule.table
        await schedule.drain(timeout_s)
        while True:
            paused = np.zeros(schedule.num_envs, np.bool_) if table.paused is None else table.paused
            before = table.paused
            await self._look(paused, timeout_s)
            if table.paused is before:  # nobody paused or resumed any meanwhile
                break
        if self._paused is not before or self._group is None:
            self._paused = before
            if self._group is not None:
                self._group.close()
            self._group = Group(schedule, np.flatnonzero(~paused)) if not paused.all() else None
        if self._group is None:
            await asyncio.sleep(0)  # whoever steps in a loop lets others run
        return self._group

    async def _look(self, paused: Bools, timeout_s: float | None) -> None:
        """Ask for the last observations of paused slots: once for each, or not yet if its worker is not free."""
        schedule = self._schedule
        await self.take_in(timeout_s)
        wanted = paused & ~self._known
        if not wanted.any():
            return
        numbers = np.flatnonzero(wanted)
        shares = [(member, numbers[order]) for member, order in schedule.worker_pool.shares(numbers)]
        shares = [(m, mine) for m, mine in shares if m.worker.state in LIVING and not m.worker.busy]
        if not shares:
            return
        exchange = schedule.dispatcher.some(shares, stepped=False)
        exchange.waiting = True
        for part in exchange.parts:
            rows = (part.slots - part.member.start).tolist()
            tail = reset_tail(part.member, [], [], None, whole=True, shown=rows)
            schedule.dispatcher.submit(exchange, part, SentRequest(Kind.RESET, (), tail, part.slots[:0]))
        self._looking = exchange
        await self.take_in(timeout_s)

    async def take_in(self, timeout_s: float | None) -> None:
        """Wait for observations that were asked for, if any were: whoever asked may have been cancelled."""
        exchange = self._looking
        if exchange is None:
            return
        await self._schedule.timeouts.wait_for(exchange, timeout_s, shielded=True)
        self._schedule.check_open()
        self._looking = None
        for part in exchange.parts:
            if not part.errors:
                put_part(self._obs, self._objects, exchange, part)
                self._known[part.slots] = True
                if self._schedule.images is not None:
                    self._shots.update(self._schedule.images.newest(part.slots))

    # ------------------------------------------------------------ after it is back

    def _all_paused(self) -> StepResult:
        everyone = np.ones(self._schedule.num_envs, np.bool_)
        self._show(everyone)
        return self._spread(None, everyone)

    def _show(self, resting: Bools) -> None:
        """The images of slots that are handed out as they are: their last results may have been dropped."""
        if self._schedule.images is not None:
            self._schedule.images.show_again({slot: shot for slot, shot in self._shots.items() if resting[slot]})

    def _spread(self, exchange: BatchRequest | None, resting: Bools) -> StepResult:
        """Results of the group in their rows of a whole batch; the rows of slots without a reply are zero."""
        n, layout = self._schedule.num_envs, self._layout
        obs, objects = layout.zeros(n), [list(column) for column in self._objects]
        for mine, known in zip(obs, self._obs, strict=True):
            mine[resting] = known[resting]
        reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        columns: list[Columns] = []
        slots = np.flatnonzero(~resting)
        for part in exchange.parts if exchange is not None else ():
            assert exchange is not None
            if not part.arrived:
                continue
            batch, rows = exchange.batch, slice(part.start, part.stop)
            put_part(obs, objects, exchange, part)
            reward[part.slots], terminated[part.slots] = batch.reward[rows], batch.terminated[rows]
            truncated[part.slots] = batch.truncated[rows]
            columns += [c._replace(positions=slots[c.positions]) for c in part.columns]
        info = merge(columns, n)
        if resting.any():
            info["_active"] = ~resting & info.get("_active", True)
        return StepResult(layout.assemble(obs, objects), reward, terminated, truncated, info)


def put_part(obs: Arrays, objects: list[list[Any]], exchange: BatchRequest, part: WorkerRequest) -> None:
    """Put the observations of a part into their slots' rows."""
    for mine, theirs in zip(obs, exchange.batch.obs, strict=True):
        mine[part.slots] = theirs[part.start : part.stop]
    for column, items in zip(objects, part.objects, strict=False):
        for slot, item in zip(part.slots.tolist(), items, strict=True):
            column[slot] = item
