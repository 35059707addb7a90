"""Steps and resets of a subset of the slots: of those that are not paused, or of one slot by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.core.payloads import reset_tail
from aioenv.core.requests import BatchRequest, SentRequest, WorkerRequest
from aioenv.core.results import ResetResult, SlotStep, StepResult
from aioenv.errors import ActionError, SlotError, StepTimeout
from aioenv.ipc.frames import Kind
from aioenv.process.supervisor import LIVING
from aioenv.rollout.groups import Group, objects_of
from aioenv.spaces.infos import Columns, RowDicts, merge_infos
from aioenv.spaces.layout import Arrays, Layout
from aioenv.spaces.seeding import is_seed_list, normalize_slot_seed
from aioenv.worker.vector_access import refuse_some

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.rendering.step_images import ImageRequest

__all__ = ["ActiveSlots", "Pausing", "SingleSlot", "check_steps_some", "info_of", "infos_of", "one_action", "put_part"]

Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def check_steps_some(scheduler: RequestScheduler, name: str, slots: Iterable[int]) -> None:
    """Raise if slots can't be stepped without the others of their vector env; single envs always can.

    Args:
        scheduler: knows the vector envs.
        name: the user's call, for errors.
        slots: those that would be stepped, or left out.

    Raises:
        ValueError: if some slots of a vector env without `step_some` are among them, but not all.
    """
    fleet: Any = scheduler.fleet
    if fleet.steps_some:
        return
    numbers = scheduler.table.named(slots, maybe_none=True)
    if len(numbers) and not fleet.members:  # one vector env in this process
        raise refuse_some(name, fleet.kind)
    for member, order in fleet.shares(numbers) if len(numbers) else ():
        if len(order) < member.stop - member.start:
            raise refuse_some(
                f"{name}: slots {np.sort(numbers[order]).tolist()}",
                f"the vector env of slots {member.start} to {member.stop - 1}",
            )


# ------------------------------------------------------------ paused slots


class Pausing:
    """Pauses and resumes slots, and keeps what steps the others.

    Args:
        scheduler: has the slot table.
        make_active: makes what steps the slots that are not paused.
    """

    def __init__(self, scheduler: RequestScheduler, make_active: Callable[[], ActiveSlots]) -> None:
        self._scheduler = scheduler
        self._make_active = make_active
        self._active: ActiveSlots | None = None

    def pause(self, slots: int | Iterable[int]) -> None:
        """Leave slots out of whole batches (see `AsyncVectorEnv.pause`)."""
        table = self._scheduler.table
        numbers = table.named(_several(slots), maybe_none=True)
        self._check_rest("pause", np.setdiff1d(table.live, numbers))
        table.pause(numbers)

    def resume(self, slots: int | Iterable[int] | None) -> None:
        """Take slots into whole batches again (see `AsyncVectorEnv.resume`)."""
        table = self._scheduler.table
        numbers = table.named(None if slots is None else _several(slots), maybe_none=True)
        self._check_rest("resume", np.union1d(table.live, numbers))
        table.resume(numbers)
        self.forget()

    def _check_rest(self, name: str, active: Slots) -> None:
        """Raise if the active slots can't be stepped without the others."""
        check_steps_some(self._scheduler, name, np.setdiff1d(np.arange(self._scheduler.num_envs), active))

    def active(self) -> ActiveSlots:
        """Return what steps the slots that are not paused."""
        if self._active is None:
            self._active = self._make_active()
        return self._active

    @property
    def current(self) -> ActiveSlots | None:
        """What steps the slots that are not paused, if anything did since the last resume."""
        return self._active

    def forget(self) -> None:
        """Forget the last observations of paused slots: they may be stepped from now on."""
        self._active = None


def _several(slots: int | Iterable[int]) -> Iterable[int]:
    """Return a slot number, or some, as some; raise a ValueError for None, which would stand for all."""
    if slots is None:
        raise ValueError("slots: expected a slot number, or some, got None")
    return [int(slots)] if isinstance(slots, (int, np.integer)) and not isinstance(slots, bool) else slots  # type: ignore[return-value]


class ActiveSlots:
    """Whole batches of which some slots are paused: the others are asked as a group, and put into their rows.

    Args:
        scheduler: what sends and waits.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._scheduler = scheduler
        self._layout = scheduler.fleet.observations
        self._paused: Bools | None = None  # those that the group is without
        self._group: Group | None = None
        self._known = np.zeros(scheduler.num_envs, np.bool_)  # whose last observations are here
        self._obs = self._layout.zeros(scheduler.num_envs)
        self._objects = self._layout.no_objects(scheduler.num_envs)
        self._shots: dict[int, ImageRequest] = {}  # their images, if images are drawn
        self._looking: BatchRequest | None = None  # what was asked for and has not been taken in yet

    async def step(self, actions: Any, timeout_s: float | None) -> StepResult:
        """Step the slots that are not paused (see `AsyncVectorEnv.step`)."""
        scheduler = self._scheduler
        arrays, objects = scheduler.fleet.actions.take_apart(actions, scheduler.num_envs, scheduler.table.live)
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
        seeds = self._scheduler.fleet.seeds(seed, np.arange(self._scheduler.num_envs), anew=mask is None)
        group = await self._prepare(timeout_s)
        if group is None:
            whole = self._all_paused()
        else:
            slots = group.slots if mask is None else group.slots[mask[group.slots]]
            group.send_whole_reset(slots, dict(enumerate(seeds)), options, "reset", each=is_seed_list(seed))
            whole = await self._outcome(group, timeout_s)
        return ResetResult(whole.obs, whole.info)

    async def _outcome(self, group: Group, timeout_s: float | None) -> StepResult:
        """Wait for what a group was sent; a cancellation or timeout leaves it to `recv`."""
        exchange = group.take()
        # another task's step, though it is refused, may look at what is paused then
        paused = np.ones(self._scheduler.num_envs, np.bool_)
        paused[group.slots] = False

        def result(exchange: BatchRequest) -> StepResult:
            self._show(paused)
            group.settle(exchange)
            return self._spread(exchange, paused)

        try:
            return await self._scheduler.outcome(exchange, result, timeout_s)
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
        scheduler, table = self._scheduler, self._scheduler.table
        await scheduler.drain(timeout_s)
        while True:
            paused = np.zeros(scheduler.num_envs, np.bool_) if table.paused is None else table.paused
            before = table.paused
            await self._look(paused, timeout_s)
            if table.paused is before:  # nobody paused or resumed any meanwhile
                break
        if self._paused is not before or self._group is None:
            self._paused = before
            if self._group is not None:
                self._group.close()
            self._group = Group(scheduler, np.flatnonzero(~paused)) if not paused.all() else None
        if self._group is None:
            await asyncio.sleep(0)  # whoever steps in a loop lets others run
        return self._group

    async def _look(self, paused: Bools, timeout_s: float | None) -> None:
        """Ask for the last observations of paused slots: once for each, or not yet if its worker is not free."""
        scheduler = self._scheduler
        await self.take_in(timeout_s)
        wanted = paused & ~self._known
        if not wanted.any():
            return
        numbers = np.flatnonzero(wanted)
        shares = [(member, numbers[order]) for member, order in scheduler.fleet.shares(numbers)]
        shares = [(m, mine) for m, mine in shares if m.worker.state in LIVING and not m.worker.busy]
        if not shares:
            return
        exchange = scheduler.dispatch.some(shares, stepped=False)
        exchange.waiting = True
        for part in exchange.parts:
            rows = (part.slots - part.member.start).tolist()
            tail = reset_tail(part.member, [], [], None, whole=True, shown=rows)
            scheduler.dispatch.submit(exchange, part, SentRequest(Kind.RESET, (), tail, part.slots[:0]))
        self._looking = exchange
        await self.take_in(timeout_s)

    async def take_in(self, timeout_s: float | None) -> None:
        """Wait for observations that were asked for, if any were: whoever asked may have been cancelled."""
        exchange = self._looking
        if exchange is None:
            return
        await self._scheduler.patience.wait_for(exchange, timeout_s, shielded=True)
        self._scheduler.check_open()
        self._looking = None
        for part in exchange.parts:
            if not part.errors:
                put_part(self._obs, self._objects, exchange, part)
                self._known[part.slots] = True
                if self._scheduler.images is not None:
                    self._shots.update(self._scheduler.images.newest_requests(part.slots))

    # ------------------------------------------------------------ after it is back

    def _all_paused(self) -> StepResult:
        everyone = np.ones(self._scheduler.num_envs, np.bool_)
        self._show(everyone)
        return self._spread(None, everyone)

    def _show(self, resting: Bools) -> None:
        """The images of slots that are handed out as they are: their last results may have been dropped."""
        if self._scheduler.images is not None:
            self._scheduler.images.set_current_of_each(
                {slot: shot for slot, shot in self._shots.items() if resting[slot]}
            )

    def _spread(self, exchange: BatchRequest | None, resting: Bools) -> StepResult:
        """Results of the group in their rows of a whole batch; the rows of slots without a reply are zero."""
        n, layout = self._scheduler.num_envs, self._layout
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
        info = merge_infos(columns, n)
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


# ------------------------------------------------------------ one slot


class SingleSlot:
    """Steps and resets one slot at a time, with results that are no batches.

    Args:
        scheduler: what sends and waits.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._scheduler = scheduler

    async def step_at(self, slot: int, action: Any) -> SlotStep:
        """Step one slot (see `AsyncVectorEnv.step_at`)."""
        scheduler = self._scheduler
        group = self._group(slot, "step_at")
        taken = one_action(scheduler.fleet.actions, action)
        await scheduler.drain()
        group.send_arrays(*taken, "step_at")
        return await scheduler.outcome(group.take(), lambda exchange: self._result(group, exchange), None)

    async def reset_at(self, slot: int, seed: int | None, options: dict[str, Any] | None) -> ResetResult:
        """Begin an episode in one slot (see `AsyncVectorEnv.reset_at`)."""
        scheduler = self._scheduler
        group = self._group(slot, "reset_at")
        own = normalize_slot_seed(seed)

        def result(exchange: BatchRequest) -> ResetResult:
            step = self._result(group, exchange)
            return ResetResult(step.obs, step.info)

        await scheduler.drain()
        group.send_whole_reset(group.slots, {int(group.slots[0]): own}, options, "reset_at")
        return await scheduler.outcome(group.take(), result, None)

    def _group(self, slot: int, name: str) -> Group:
        table = self._scheduler.table
        numbers = table.named([slot])
        table.leave_out_paused(numbers, name, by_name=True)
        return Group(self._scheduler, numbers)

    def _result(self, group: Group, exchange: BatchRequest) -> SlotStep:
        group.settle(exchange)
        batch = exchange.batch
        layout = self._scheduler.fleet.observations
        (obs,) = layout.rows(batch.obs, objects_of(layout, exchange))
        columns = [c for part in exchange.parts for c in part.columns]
        info = info_of(merge_infos(columns, 1), 0)
        return SlotStep(obs, float(batch.reward[0]), bool(batch.terminated[0]), bool(batch.truncated[0]), info)


def one_action(layout: Layout, action: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
    """A single action, taken apart.

    Raises:
        ActionError: if it does not fit.
    """
    try:
        return layout.take_apart(layout.batch_of_one(action), 1)
    except ActionError as exc:
        raise ActionError(f"step_at, the action as a batch of one: {exc}") from exc


def info_of(info: dict[str, Any], row: int) -> dict[str, Any]:
    """The info dict of one row of a batch: what has its mask set there."""
    own: dict[str, Any] = {}
    for key, value in info.items():
        mask = _mask_of(info, key)
        if mask is not None and mask[row]:
            own[key] = _own(key, value, row)
    return own


def infos_of(info: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """The info dicts of all n rows of a batch; most have next to nothing, in steps that end the episodes of a few."""
    if isinstance(info, RowDicts):
        return [_copied(info.get(row, {})) for row in range(n)]
    owns: list[dict[str, Any]] = [{} for _ in range(n)]
    for key, value in info.items():
        mask = _mask_of(info, key)
        if mask is not None:
            for row in np.flatnonzero(mask).tolist():
                owns[row][key] = _own(key, value, row)
    return owns


def _copied(info: dict[str, Any]) -> dict[str, Any]:
    """An info dict with arrays of its own, not those of a whole reply."""
    return {key: _copied(value) if type(value) is dict else _copy(value) for key, value in info.items()}


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _mask_of(info: dict[str, Any], key: str) -> Any:
    """Which rows have a key: bool `(n,)`; None if it is itself a mask."""
    if key == "_active":
        return np.ones(len(info[key]), np.bool_)
    mask = info.get(f"_{key}")
    return mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else None


def _own(key: str, value: Any, row: int) -> Any:
    if key == "_active":
        return bool(value[row])
    item = info_of(value, row) if isinstance(value, dict) else value[row]
    if type(item) is np.int64 or type(item) is np.bool_:  # mostly Python's own (a float64 is a float)
        return item.item()
    return _copy(item)
