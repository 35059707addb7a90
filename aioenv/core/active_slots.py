"""Whole batches of which some slots are paused: the others are asked as a group, and put into their rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.core.groups import WorkerGroup
from aioenv.core.requests import BatchRequest, WorkerRequest
from aioenv.core.results import ResetResult, StepResult
from aioenv.errors import StepTimeout
from aioenv.spaces.infos import Columns, merge_infos
from aioenv.spaces.layout import Arrays
from aioenv.spaces.seeding import is_seed_list

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler

__all__ = ["ActiveSlots"]

Bools = npt.NDArray[np.bool_]


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
        seeds = scheduler.worker_pool.seeds(seed, np.arange(scheduler.num_envs), restarts_plan=mask is None)
        group = await self._prepare(timeout_s)
        if group is None:
            return _as_reset(self._all_paused())
        slots = group.slots if mask is None else group.slots[mask[group.slots]]
        request = group.reset(slots, dict(enumerate(seeds)), options, "reset", each=is_seed_list(seed))
        whole: ResetResult = await self._outcome(request, timeout_s)
        return whole

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
