"""One `gymnasium.vector.VectorEnv` in this process, behind the engine's interface: no worker, no frames.

It lives on a thread of its own. Steps (and resets) that are shorter than what the loop may be kept for anyway are
made on the loop itself: no task, no future, no hop. The env is used by one thread at a time, never by two at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from signal import SIGINT
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aioenv.core.held_signals import HeldSignals
from aioenv.core.images.image_requests import ImageRequest
from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.core.slots import SlotState
from aioenv.errors import EnvError, NoAsyncCallError, StepTimeout
from aioenv.inprocess.calls import SoloCalls
from aioenv.inprocess.durations import TURN_S, RunTimes, yield_to_loop
from aioenv.inprocess.life import ends_program
from aioenv.inprocess.pieces import only, own, own_info
from aioenv.inprocess.requests import InProcessRequest
from aioenv.spaces.seeding import checked_seed
from aioenv.speedups import within
from aioenv.worker.vector_access import check_numbers, refuse_some, reset_vector_env, step_result, take_observations

__all__ = ["RUN_IN", "Solo"]

Result = TypeVar("Result", StepResult, ResetResult)

_log = logging.getLogger("aioenv")

RUN_IN = ("auto", "inline", "thread")
_ALL = slice(None)
_FLOAT64, _BOOL = np.dtype(np.float64), np.dtype(np.bool_)


class Solo(SoloCalls):
    """A vector env, started, stepped and closed; its session, its fleet and its schedule in one."""

    # ------------------------------------------------------------ whole batches

    def fit(self, actions: Any) -> Any:
        """A checked copy of a batch of actions.

        Raises:
            ActionError: if they don't fit.
        """
        if type(actions) is np.ndarray and actions.shape == self._shape and actions.dtype == self._dtype:
            layout, batch = self.actions, actions.copy()
            if layout.ranges and not (layout.quick and within(batch, *layout.quick)):  # type: ignore[misc]
                layout.check_ranges([batch])
            return batch
        return self.actions.assemble(*self.actions.take_apart(actions, self.num_envs))

    async def step(self, actions: Any, *, timeout_s: float | None = None) -> StepResult:
        """Step all slots (see `AsyncVectorEnv.step`).

        A step that is made on the loop can't be cancelled while it is made; one that is cancelled in the loop's turn
        after it waits for `recv`, as any other.
        """
        batch = self.fit(actions)
        if self._flights.abandoned:
            await self._drain(timeout_s)
        self.table.check_send(_ALL, "step", reset=False)
        here = self._is_here(self.steps, timeout_s)
        if here and not self.draws:
            value = self._step(batch, self._copy, None)
            if self.episodes is not None:
                self.episodes.note(self._all, None, value)
            if self._last - self._last_turn > TURN_S:
                await self._turn(value)
            return self._good(value)
        flight = self._flights.begin(self._all, waiting=True)
        self._launch(flight, here, partial(self._step, batch, True, flight.shot))
        return await self._outcome(flight, timeout_s)  # type: ignore[no-any-return]

    @property
    def steps_anywhere(self) -> bool:
        """Whether `step_here` may be called now."""
        thread = self._thread
        return self.any_thread and not self._flights.abandoned and (thread is None or not thread.jobs)

    def step_here(self, actions: Any) -> StepResult:
        """Step all slots on the caller's thread, while the loop does nothing and can do nothing.

        Ctrl-C is held back until the step is over; the result waits for `recv` then.
        """
        batch = self.fit(actions)
        self.table.check_send(_ALL, "step", reset=False)
        value = None
        try:
            with HeldSignals(SIGINT, twice=False):
                value = self._step(batch, self._copy, None)
                if self.episodes is not None:
                    self.episodes.note(self._all, None, value)
        except BaseException:
            if value is not None:
                self._leave(value)
            raise
        return self._good(value)

    async def reset(
        self,
        seed: Any,
        mask: npt.NDArray[np.bool_] | None,
        options: dict[str, Any] | None,
        timeout_s: float | None = None,
    ) -> ResetResult:
        """Reset all slots, or those of a mask, in the env's own way; seed and options are passed on as they are."""
        seed = checked_seed(seed, self.num_envs, self.num_envs)
        if self._flights.abandoned:
            await self._drain(timeout_s)
        self.table.check_send(_ALL, "reset", reset=True)
        resets = self._all if mask is None else np.flatnonzero(mask)
        self.table.note_reset(resets)
        flight = self._flights.begin(self._all, waiting=True, resets=resets)
        here = self._is_here(self.resets, timeout_s)
        self._launch(flight, here, partial(self._reset, seed, mask, options, True, flight.shot))
        return await self._outcome(flight, timeout_s)  # type: ignore[no-any-return]

    def _is_here(self, pace: RunTimes, timeout_s: float | None) -> bool:
        """Whether the next piece of work is done on the loop itself."""
        thread = self._thread
        if thread is not None:
            return pace.inline and timeout_s is None and not thread.jobs
        if timeout_s is not None:
            raise ValueError('timeout_s: with run_in="inline" nobody can stop waiting for the env; use run_in="thread"')
        return True

    def _step(
        self, actions: Any, copy: bool, shot: ImageRequest | None, some: npt.NDArray[np.int64] | None = None
    ) -> StepResult | EnvError:
        began = perf_counter()
        try:
            obs, reward, terminated, truncated, info = (  # a name for all of it would keep its arrays from being ours
                step_result(self._env.step(actions) if some is None else self._env.step_some(actions, some))
            )
            self._last = ended = perf_counter()
            self.steps.note(ended - began)
            if shot is not None:
                self._read_states(shot)
            if not self._fits(obs):
                obs = self._fitted(obs)
            result = StepResult(
                own(obs) if copy else obs,
                self._column("reward", reward, _FLOAT64),
                self._column("terminated", terminated, _BOOL),
                self._column("truncated", truncated, _BOOL),
                own_info(info) if info else {},
            )
            self.last.stepped(obs, terminated, truncated, some)
            return result if some is None else only(result, some)
        except BaseException as exc:
            return self._failure(exc, some)

    def _reset(
        self,
        seed: Any,
        mask: npt.NDArray[np.bool_] | None,
        options: dict[str, Any] | None,
        copy: bool,
        shot: ImageRequest | None,
    ) -> ResetResult | EnvError:
        began = perf_counter()
        try:
            obs, info = reset_vector_env(self._env, seed, mask, options)
            self.resets.note(perf_counter() - began)
            self.last.reset(obs, mask)
            if shot is not None:
                self._read_states(shot)
            if not self._fits(obs):
                obs = self._fitted(obs)
            return ResetResult(own(obs) if copy else obs, own_info(info) if info else {})
        except BaseException as exc:
            return self._failure(exc)

    def _fits(self, obs: Any) -> bool:
        """Whether observations are as the space has them; of spaces of several arrays that is taken for granted."""
        space = self._obs_space
        return space is None or (type(obs) is np.ndarray and obs.shape == space.shape and obs.dtype == space.dtype)

    def _fitted(self, obs: Any) -> Any:
        """Observations in the array that the space has, if they can be had as such."""
        return self._received.assemble(*take_observations(self._received, obs, self.num_envs))

    def _column(self, name: str, values: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if type(values) is not np.ndarray or values.dtype.kind not in "biuf":
            check_numbers(name, values)
        array = np.array(values, dtype)
        if array.shape != self._one_each:
            raise ValueError(f"{name}: expected shape {self._one_each}, got {array.shape}")
        return array

    def _failure(self, exc: BaseException, some: npt.NDArray[np.int64] | None = None) -> EnvError:
        """What an env has raised, as an error; Ctrl-C and the like go on, and leave failed slots."""
        error = self._error(exc)
        if some is not None and len(some):
            error.concern(tuple(some.tolist()))
        if ends_program(exc):
            self.table.fail(error)
            raise exc
        return error

    async def _turn(self, value: Any) -> None:
        """Let the loop do something else, with a result in hand; a cancellation leaves it to `recv`."""
        self.table.move(_ALL, SlotState.IN_FLIGHT)
        try:
            await yield_to_loop()
        except BaseException:
            self._leave(value)
            raise
        finally:
            self._last_turn = perf_counter()
        self._check_open()
        self._flights.release(_ALL)

    def _leave(self, value: StepResult | EnvError) -> None:
        """Nobody has taken this: `recv` may."""
        flight = self._flights.begin(self._all, waiting=False)
        if not self._copy and not isinstance(value, EnvError):  # the next step may be made before this is taken
            value = StepResult(*map(own, value))
        flight.counted = True
        self._flights.abandon(flight)
        self._flights.arrive(flight, value)

    async def _outcome(self, flight: InProcessRequest, timeout_s: float | None) -> Any:
        """Wait for the thread; a cancellation or timeout leaves the result to `recv`."""
        try:
            if not flight.done.done():
                # not shielded, which would take one more turn of the loop: `abandon` replaces what is cancelled
                if timeout_s is None and self._timeout_s is None:
                    await flight.done
                else:
                    await self._patiently(flight.done, timeout_s, _LOST_NOTHING)
                self._last_turn = perf_counter()
            elif perf_counter() - self._last_turn > TURN_S:  # made on the loop
                await yield_to_loop()
                self._last_turn = perf_counter()
        except BaseException:
            self._flights.abandon(flight)
            raise
        self._check_open()
        self._flights.settle(flight)
        return self._good(flight.value)  # type: ignore[type-var]

    def _good(self, value: Result | EnvError) -> Result:
        if isinstance(value, EnvError):
            self.table.fail(value)
            raise value
        if self.table.must_reset and isinstance(value, StepResult):
            self.table.note_ends(_ALL, value.terminated | value.truncated)
        return value

    async def drain(self, timeout_s: float | None = None) -> None:
        """Wait for what was abandoned, then drop what nobody took of it."""
        if self._flights.abandoned:
            await self._drain(timeout_s)

    async def _drain(self, timeout_s: float | None) -> None:
        # looked up anew each time: other tasks take and abandon some meanwhile
        while (flight := next((one for one in self._flights.abandoned if not one.done.done()), None)) is not None:
            await self._patiently(asyncio.shield(flight.done), timeout_s, _LOST_NOTHING)
        self._check_open()
        if ended := self._flights.drop_abandoned():
            _log.warning(
                "the result of a cancelled or timed-out step was dropped, and with it the ends of the episodes in "
                "slots %s; recv() would have taken it",
                ended,
            )

    # ------------------------------------------------------------ some slots

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to all slots; never blocks for longer than the loop may be kept."""
        numbers = self.table.slot_numbers(slots)
        arrays, objects = self.actions.take_apart(actions, len(numbers))
        if len(numbers) < self.num_envs:
            raise refuse_some(f"send: slots {numbers.tolist()}", self.kind)
        self.table.check_send(_ALL, "send", reset=False)
        order = np.argsort(numbers)
        picked = [[column[i] for i in order.tolist()] for column in objects]
        batch = self.actions.assemble([array[order] for array in arrays], picked)
        flight = self._flights.begin(self._all, waiting=False)
        self._launch(flight, self._is_here(self.steps, None), partial(self._step, batch, True, flight.shot))

    def send_reset(
        self, slots: Iterable[int] | None, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> None:
        """Begin episodes in some slots; never blocks for longer than the loop may be kept."""
        numbers = self.table.slot_numbers(slots)
        seed = checked_seed(seed, len(numbers), self.num_envs)
        if isinstance(seed, list):
            by_slot = dict(zip(numbers.tolist(), seed, strict=True))
            seed = [by_slot.get(slot) for slot in range(self.num_envs)]
        self.table.check_send(numbers, "send_reset", reset=True)
        mask = None
        if len(numbers) < self.num_envs:
            mask = np.zeros(self.num_envs, np.bool_)
            mask[numbers] = True
        self.table.note_reset(numbers)
        flight = self._flights.begin(np.sort(numbers), waiting=False, resets=numbers)
        here = self._is_here(self.resets, None)
        self._launch(flight, here, partial(self._reset, seed, mask, options, True, flight.shot))

    def _launch(self, flight: InProcessRequest, here: bool, work: Callable[[], Any]) -> None:
        """Do the work of a flight, here or on the thread."""
        if not here:
            self._submit(flight, work)
            return
        try:
            value = work()
        except BaseException as exc:  # Ctrl-C, say: the slots have failed
            self._flights.arrive(flight, self._error(exc))
            if flight.waiting:
                self._flights.settle(flight)
            raise
        self._flights.arrive(flight, value)

    async def recv(self, min_slots: int, max_slots: int | None, deadline_s: float | None) -> Ready:
        """Take results as they come (see `AsyncVectorEnv.recv`)."""
        if not self.outstanding:
            raise NoAsyncCallError("recv: nothing is in flight and nothing is ready; send() or send_reset() first")
        wanted = min_slots if max_slots is None else min(min_slots, max_slots)
        if perf_counter() - self._last_turn > TURN_S:
            self._last_turn = perf_counter()
            await yield_to_loop()
        if not self._flights.has(wanted):
            enough = partial(self._flights.wait, wanted)
            if deadline_s is None:
                await self._patiently(enough(), None, _LOST_NOTHING)
            else:
                try:
                    async with asyncio.timeout(deadline_s):
                        await self._patiently(enough(), None, _LOST_NOTHING)
                except TimeoutError as exc:
                    if isinstance(exc, StepTimeout):
                        raise
            self._last_turn = perf_counter()
        self._check_open()
        ready, errors = self._flights.take(max_slots, self.single_observation_space, self.observation_space)
        self.table.note_ends(ready.slots, ready.terminated | ready.truncated)
        for error in errors:
            self.table.fail(error)
            self.table.note_taken(np.array(error.slots))
        self.table.note_taken(ready.slots)
        if errors:
            raise EnvError.join(list(errors), ready)
        return ready

    @property
    def outstanding(self) -> bool:
        """Whether anything is in flight or ready."""
        return self._flights.outstanding

    def _submit(self, flight: InProcessRequest, work: Callable[[], Any]) -> None:
        """Do the work of a flight on the thread."""
        assert self._thread is not None
        self._thread.submit(work, partial(self._arrived, flight))

    def _arrived(self, flight: InProcessRequest, value: Any, error: BaseException | None) -> None:
        """The thread has done it."""
        self._flights.arrive(flight, value if error is None else self._error(error))


_LOST_NOTHING = (
    "nothing is lost: recv() takes it when it is there, and a later step() or reset() waits for it and drops it"
)
