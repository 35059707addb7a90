"""Some slots of a vector env in this process: while others are paused, one by itself, or for numbered episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.core.images.image_requests import ImageRequest
from aioenv.core.results import ResetResult, SlotStep, StepResult
from aioenv.errors import EnvError
from aioenv.inprocess.inline import Solo
from aioenv.inprocess.pieces import own
from aioenv.inprocess.requests import InProcessRequest
from aioenv.rollout.episode_stepper import SteppedSlots
from aioenv.rollout.subset import info_of, one_action
from aioenv.spaces.layout import Arrays
from aioenv.spaces.seeding import checked_seed, one_seed
from aioenv.worker.vector_access import refuse_some, take_observations, with_rows

__all__ = ["InProcessActiveSlots", "InProcessEpisodeStepper", "SomeSolo"]

Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Objects = list[list[Any]]


class SomeSolo(Solo):
    """A vector env of which some slots can be asked by themselves, if it has `step_some`."""

    def check_steps_some(self, name: str) -> None:
        """Raise if it can't step some of its slots.

        Raises:
            ValueError: then.
        """
        if not self.steps_some:
            raise refuse_some(name, self.kind)

    def begin_step(
        self,
        actions: Any,
        slots: Slots,
        name: str,
        *,
        waiting: bool = True,
        shows_all: bool = False,
        timeout_s: float | None = None,
    ) -> InProcessRequest:
        """Step some slots, ascending, given actions of all; never blocks for longer than the loop may be kept.

        With a `timeout_s` it is done on the thread, for which alone one can stop waiting. With `shows_all` the
        observations of the others are seen, too.
        """
        some = None if len(slots) == self.num_envs else slots
        if some is not None:
            self.check_steps_some(name)
        self.table.check_send(slots, name, reset=False)
        here = self._is_here(self.steps, timeout_s)
        flight = self._flights.begin(slots, waiting=waiting, shows_all=shows_all)
        self._launch(flight, here, partial(self._step, actions, True, flight.shot, some))
        return flight

    def begin_reset(
        self,
        slots: Slots,
        seed: Any,
        options: dict[str, Any] | None,
        name: str,
        *,
        shown: Slots | None = None,
        shows_all: bool = False,
        timeout_s: float | None = None,
    ) -> InProcessRequest:
        """Reset some slots, ascending; `shown` are those whose results it gives (None: these)."""
        shown = slots if shown is None else shown
        self.table.check_send(shown, name, reset=True)
        here = self._is_here(self.resets, timeout_s)
        self.table.note_reset(slots)
        mask = None
        if len(slots) < self.num_envs:
            mask = np.zeros(self.num_envs, np.bool_)
            mask[slots] = True
        flight = self._flights.begin(shown, waiting=True, resets=slots, shows_all=shows_all)
        self._launch(flight, here, partial(self._reset, seed, mask, options, True, flight.shot))
        return flight

    def begin_look(self, name: str) -> InProcessRequest:
        """Find out the latest observations of all slots; nothing is stepped."""
        self.table.check_send(self._all, name, reset=True)
        flight = self._flights.begin(self._all, waiting=True, resets=self._all[:0])
        self._launch(flight, self._is_here(self.steps, None), partial(self._look, flight.shot))
        return flight

    def _look(self, shot: ImageRequest | None) -> ResetResult | EnvError:
        try:
            obs = self.last.obs
            if self.steps_some:
                nothing = self.actions.zeros(self.num_envs), self.actions.no_objects(self.num_envs)
                obs = self._env.step_some(self.actions.assemble(*nothing), self._all[:0])[0]
            if shot is not None:
                self._read_states(shot)
            return ResetResult(own(obs if self._fits(obs) else self._fitted(obs)), {})
        except BaseException as exc:
            return self._failure(exc)

    async def outcome(self, flight: InProcessRequest, timeout_s: float | None = None) -> Any:
        """Wait for a flight; a cancellation or timeout leaves the result to `recv`."""
        return await self._outcome(flight, timeout_s)

    def abandon_flight(self, flight: InProcessRequest) -> None:
        """Nobody waits for it any more."""
        self._flights.abandon(flight)

    # ------------------------------------------------------------ whoever is first

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to some slots; never blocks for longer than the loop may be kept."""
        if (slots is None and self.table.paused is None) or not self.steps_some:
            super().send(actions, slots)
            return
        numbers = self.table.slot_numbers(slots)
        paused = self.table.paused
        used = None if paused is None else np.flatnonzero(~paused[numbers])
        arrays, objects = self.actions.take_apart(actions, len(numbers), used)
        keep = self.table.leave_out_paused(numbers, "send", by_name=slots is not None)
        keep = keep[np.argsort(numbers[keep])]
        if len(keep):
            chosen = [[column[i] for i in keep.tolist()] for column in objects]
            rows = numbers[keep]
            batch = with_rows(self.actions, self.num_envs, rows.tolist(), [array[keep] for array in arrays], chosen)
            self.begin_step(batch, rows, "send", waiting=False)

    def send_reset(
        self, slots: Iterable[int] | None, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> None:
        """Begin episodes in some slots; never blocks for longer than the loop may be kept."""
        if self.table.paused is None:
            super().send_reset(slots, seed, options)
            return
        numbers = self.table.slot_numbers(slots)
        keep = self.table.leave_out_paused(numbers, "send_reset", by_name=slots is not None)
        seed = checked_seed(seed, len(numbers), self.num_envs)
        if isinstance(seed, list):
            seed = [seed[i] for i in keep.tolist()]
        if len(keep):
            super().send_reset(numbers[keep], seed, options)

    # ------------------------------------------------------------ one slot

    async def step_at(self, slot: int, action: Any) -> SlotStep:
        """Step one slot (see `AsyncVectorEnv.step_at`)."""
        number = self._one(slot, "step_at")
        arrays, objects = one_action(self.actions, action)
        await self.drain()
        batch = with_rows(self.actions, self.num_envs, number.tolist(), arrays, objects)
        value = await self.outcome(self.begin_step(batch, number, "step_at"))
        row = int(number[0])
        return SlotStep(
            self._obs_of(value.obs, row),
            float(value.reward[row]),
            bool(value.terminated[row]),
            bool(value.truncated[row]),
            info_of(value.info, row),
        )

    async def reset_at(self, slot: int, seed: int | None, options: dict[str, Any] | None) -> ResetResult:
        """Begin an episode in one slot (see `AsyncVectorEnv.reset_at`)."""
        number = self._one(slot, "reset_at")
        own = one_seed(seed)
        await self.drain()
        seeds = None if own is None else self.seeds_of({int(number[0]): own})
        value = await self.outcome(self.begin_reset(number, seeds, options, "reset_at"))
        row = int(number[0])
        return ResetResult(self._obs_of(value.obs, row), info_of(value.info, row))

    def _one(self, slot: int, name: str) -> Slots:
        number = self.table.slot_numbers([slot])
        self.table.leave_out_paused(number, name, by_name=True)
        return number

    def _obs_of(self, obs: Any, row: int) -> Any:
        arrays, objects = self.take_apart(obs)
        rows = slice(row, row + 1)
        return self.observations.rows([array[rows] for array in arrays], [column[rows] for column in objects])[0]

    def take_apart(self, obs: Any) -> tuple[Arrays, Any]:
        """The arrays and objects of a batch of observations."""
        arrays, objects = take_observations(self.observations, obs, self.num_envs)
        return arrays, [list(column) for column in objects]

    def seeds_of(self, seeds: Mapping[int, int | None]) -> list[int | None] | None:
        """Seeds of some slots, as `reset` of the vector env takes them."""
        if all(seed is None for seed in seeds.values()):
            return None
        return [seeds.get(slot) for slot in range(self.num_envs)]


class InProcessActiveSlots:
    """Whole batches of which some slots are paused (see `Live`): the env gives the rows of those as they were.

    Args:
        solo: the vector env, which has `step_some`.
    """

    def __init__(self, solo: SomeSolo) -> None:
        self._solo = solo

    async def step(self, actions: Any, timeout_s: float | None) -> StepResult:
        """Step the slots that are not paused (see `AsyncVectorEnv.step`)."""
        solo = self._solo
        batch = solo.actions.assemble(*solo.actions.take_apart(actions, solo.num_envs, solo.table.active))
        await solo.drain(timeout_s)
        if not len(solo.table.active):
            await asyncio.sleep(0)  # whoever steps in a loop lets others run; not later, when images are shown already
        paused, live = self._paused, solo.table.active
        flight = solo.begin_step(batch, live, "step", shows_all=True, timeout_s=timeout_s)
        value: StepResult = await solo.outcome(flight, timeout_s)
        return value._replace(info={**value.info, "_active": ~paused}) if paused.any() else value

    async def reset(
        self, seed: Any, mask: Bools | None, options: dict[str, Any] | None, timeout_s: float | None
    ) -> ResetResult:
        """Reset the slots that are not paused, or those of a mask (see `AsyncVectorEnv.reset`)."""
        solo = self._solo
        seed = checked_seed(seed, solo.num_envs, solo.num_envs)
        await solo.drain(timeout_s)
        paused, live = self._paused, solo.table.active
        slots = live if mask is None else live[mask[live]]
        if len(slots):
            flight = solo.begin_reset(slots, seed, options, "reset", shown=live, shows_all=True, timeout_s=timeout_s)
        else:
            solo.table.check_send(live, "reset", reset=True)
            nothing = solo.actions.assemble(solo.actions.zeros(solo.num_envs), solo.actions.no_objects(solo.num_envs))
            flight = solo.begin_step(nothing, slots, "reset", shows_all=True, timeout_s=timeout_s)
        value = await solo.outcome(flight, timeout_s)
        return ResetResult(value.obs, {**value.info, "_active": ~paused} if paused.any() else value.info)

    @property
    def _paused(self) -> Bools:
        paused = self._solo.table.paused
        return np.zeros(self._solo.num_envs, np.bool_) if paused is None else paused


class InProcessEpisodeStepper:
    """A step of some slots and a reset of others (see `Walk`), in this process.

    Args:
        solo: the vector env.
    """

    def __init__(self, solo: SomeSolo) -> None:
        self._solo = solo
        self.obs = solo.observations.zeros(solo.num_envs)
        self.objects = solo.observations.no_objects(solo.num_envs)

    async def move(
        self, stepped: Sequence[int], arrays: Arrays, objects: Objects, seeds: Mapping[int, int | None]
    ) -> SteppedSlots | None:
        """See `Walk.move`."""
        solo = self._solo
        flights: list[tuple[InProcessRequest, Slots]] = []
        values = []
        try:
            if stepped:
                slots = np.array(stepped)
                flights.append((solo.begin_step(solo.actions.assemble(arrays, objects), slots, "episodes"), slots))
            if seeds:
                slots = np.array(sorted(seeds))
                flights.append((solo.begin_reset(slots, solo.seeds_of(seeds), None, "episodes"), slots))
            while flights:
                flight, slots = flights.pop(0)
                value = await solo.outcome(flight)
                self._put(value.obs, slots)
                values.append(value)
        except BaseException:
            for flight, _ in flights:
                solo.abandon_flight(flight)
            raise
        if not stepped:
            return None
        step, rows = values[0], list(stepped)
        return SteppedSlots(
            step.reward[rows], step.terminated[rows], step.truncated[rows], lambda row: info_of(step.info, rows[row])
        )

    def _put(self, obs: Any, slots: Slots) -> None:
        arrays, objects = self._solo.take_apart(obs)
        for mine, theirs in zip(self.obs, arrays, strict=True):
            mine[slots] = theirs[slots]
        for column, items in zip(self.objects, objects, strict=True):
            for slot in slots.tolist():
                column[slot] = items[slot]
