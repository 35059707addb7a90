"""One `gymnasium.vector.VectorEnv` in this process, behind the engine's interface: no worker, no frames.

It lives on a thread of its own. Steps (and resets) that are shorter than what the loop may be kept for anyway are
made on the loop itself: no task, no future, no hop. The env is used by one thread at a time, never by two at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from aioenv.batching.layout import Layout
from aioenv.engine.flights import Flight, Flights
from aioenv.engine.pieces import own
from aioenv.engine.results import Ready, ResetResult, StepResult
from aioenv.engine.slots import SlotState, SlotTable
from aioenv.engine.solo_calls import SoloCalls
from aioenv.engine.threads import SHORT_S, TURN_S, EnvThread, Pace, yield_to_loop
from aioenv.errors import ClosedError, EnvError, NoAsyncCallError, StepTimeout, WorkerStartError
from aioenv.host.vector_access import make_vector_env, reset_vector_env

__all__ = ["RUN_IN", "Solo"]

Result = TypeVar("Result", StepResult, ResetResult)

_log = logging.getLogger("aioenv")

RUN_IN = ("auto", "inline", "thread")
_ALL = slice(None)
_FLOAT64, _BOOL = np.dtype(np.float64), np.dtype(np.bool_)
# The loop does nothing itself that takes longer, however long a hop takes, in seconds.
_MOST_S = 1e-3
# How long a thread with nothing to do may take to end, in seconds.
_END_S = 1.0


class Solo(SoloCalls):
    """A vector env, started, stepped and closed; its session, its fleet and its schedule in one.

    Args:
        factory: called with `num_envs`.
        run_in: "inline", "thread", or "auto" to choose while it runs.
        copy: whether results must be the caller's own.
        timeout_s: how long any wait may last, in seconds; None for ever.
        start_timeout_s: how long the factory may take, in seconds.

    Attributes:
        table: the states of the slots.
        hop_s: how long it takes to have something done on the thread, in seconds; None if it was not measured.
        steps, resets: how long they take, and so where they are made.
    """

    images = None
    members: Sequence[Any] = ()  # there are no worker processes
    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
    metadata: dict[str, Any]
    spec: Any
    render_mode: str | None

    def __init__(
        self,
        factory: Callable[..., Any],
        num_envs: int,
        *,
        run_in: str,
        copy: bool,
        timeout_s: float | None,
        start_timeout_s: float,
    ) -> None:
        self.num_envs = num_envs
        self._factory = factory
        self._run_in = run_in
        self._copy = copy
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._pid = os.getpid()
        self._env: Any = None
        self._thread: EnvThread | None = None
        self._last = 0.0  # when the last step was made, by `perf_counter`
        self._last_turn = 0.0  # when the loop could last do something else, likewise
        self._all = np.arange(num_envs)
        self.table = SlotTable(num_envs, must_reset=False)
        self._flights = Flights(self.table, num_envs)
        self._closing = False
        self.hop_s: float | None = None
        self.schedule: Solo | None = None  # itself, once it is started

    @property
    def fleet(self) -> Solo:
        """What knows the spaces."""
        return self

    @property
    def is_mine(self) -> bool:
        """Whether this process has started it."""
        return self._pid == os.getpid()

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Make the env, where it is going to live. If that fails, or is cancelled, nothing is left.

        Raises:
            WorkerStartError: if the factory raised, took too long, or made something else.
        """
        try:
            if self._run_in == "inline":
                self._make()
            else:
                self._thread = EnvThread()
                async with asyncio.timeout(self._start_timeout_s):
                    await self._thread.ask(self._make)
                if self._run_in == "auto" and self._env.render_mode is None and self._timeout_s is None:
                    self.hop_s = await self._thread.measure_hop()
        except BaseException as exc:
            self._finish()
            if isinstance(exc, TimeoutError):  # the thread goes on, and ends when the factory does
                message = f"the vector env was not made within start_timeout_s={self._start_timeout_s}"
                raise self._not_made(message) from exc
            if isinstance(exc, Exception):
                if self._thread is not None:
                    await self._thread.gone(_END_S)
                text = "".join(traceback.format_exception(exc))
                message = f"the vector env could not be made: {type(exc).__name__}: {exc}\n{text}"
                raise self._not_made(message, text) from exc
            raise
        env = self._env
        self.single_observation_space, self.observation_space = env.single_observation_space, env.observation_space
        self.single_action_space, self.action_space = env.single_action_space, env.action_space
        self.metadata, self.spec, self.render_mode = dict(env.metadata), env.spec, env.render_mode
        self._actions = Layout(self.single_action_space)
        plain = isinstance(self.single_action_space, (Box, Discrete, MultiBinary, MultiDiscrete))
        self._dtype = self._actions.leaves[0].dtype if plain else None
        self._shape = (self.num_envs, *self._actions.leaves[0].shape) if plain else None
        # what draws is tied to its thread, and only a thread can be waited for with a timeout
        inline = None if self.hop_s is not None else self._run_in == "inline"
        limit_s = min(max(self.hop_s or 0.0, SHORT_S), _MOST_S)
        self.steps, self.resets = Pace(limit_s, inline), Pace(limit_s, inline)
        self.schedule = self

    def _make(self) -> None:
        self._env = make_vector_env(self._factory, self.num_envs)

    def _not_made(self, message: str, text: str = "") -> WorkerStartError:
        return WorkerStartError(message, slots=tuple(self._all.tolist()), pid=self._pid, traceback=text)

    async def close(self, grace_s: float) -> None:
        """Close the env, and end its thread; whoever waits for a result gets a ClosedError.

        Args:
            grace_s: how long the env may take for what it is doing and for its close, in seconds. What takes longer
                can't be ended: the thread is left to itself, and closes the env when it comes to that.
        """
        self._flights.close()
        self._finish()
        if self._thread is not None and not await self._thread.gone(grace_s):
            _log.warning(
                "the vector env has not ended within grace_s=%s: a thread can't be killed, so it is left to itself "
                "(it is a daemon, and does not keep the program from ending); with num_workers=1 the env lives in a "
                "process, which can be killed",
                grace_s,
            )

    def abandon(self) -> None:
        """Have the env closed without waiting for it."""
        self._finish()
        if self._thread is not None:
            self._thread.leave()

    def _finish(self) -> None:
        """Close the env after whatever it is doing, once."""
        if self._closing:
            return
        self._closing = True
        if self._thread is None:
            self._close_env()
        else:
            self._thread.finish(self._close_env)

    def _close_env(self) -> None:
        env, self._env = self._env, None
        try:
            if env is not None:
                env.close()
        except Exception:
            _log.warning("the vector env raised when it was closed", exc_info=True)

    # ------------------------------------------------------------ whole batches

    def step_now(self, actions: Any) -> StepResult | None:
        """Step all slots as plainly as can be (then `turn` if it `is_due`); None: nothing was done, `step` has to."""
        thread = self._thread
        if not self.steps.inline or (thread is not None and thread.jobs) or self._flights.abandoned:
            return None
        batch = self._fit(actions)
        self.table.check_send(_ALL, "step", reset=False)
        return self._good(self._step(batch, self._copy))

    def _fit(self, actions: Any) -> Any:
        """A checked copy of a batch of actions."""
        if type(actions) is np.ndarray and actions.shape == self._shape and actions.dtype == self._dtype:
            return actions.copy()
        return self._actions.assemble(*self._actions.take_apart(actions, self.num_envs))

    async def step(self, actions: Any, *, timeout_s: float | None = None) -> StepResult:
        """Step all slots (see `AsyncVectorEnv.step`)."""
        batch = self._fit(actions)
        if self._flights.abandoned:
            await self._drain(timeout_s)
        self.table.check_send(_ALL, "step", reset=False)
        if self._is_here(self.steps, timeout_s):
            value = self._step(batch, self._copy)
            if self.is_due():
                await self.turn(value)
            return self._good(value)
        flight = self._flights.begin(self._all, waiting=True)
        self._submit(flight, partial(self._step, batch, True))
        return await self._outcome(flight, timeout_s)  # type: ignore[no-any-return]

    async def reset(
        self, seed: Any, mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None, timeout_s: float | None
    ) -> ResetResult:
        """Reset all slots, or those of a mask, in the env's own way; seed and options are passed on as they are."""
        if self._flights.abandoned:
            await self._drain(timeout_s)
        self.table.check_send(_ALL, "reset", reset=True)
        self.table.note_reset(self._all if mask is None else np.flatnonzero(mask))
        if self._is_here(self.resets, timeout_s):
            value = self._reset(seed, mask, options, self._copy)
            if perf_counter() - self._last_turn > TURN_S:
                await self.turn(value)
            return self._good(value)
        flight = self._flights.begin(self._all, waiting=True)
        self._submit(flight, partial(self._reset, seed, mask, options, True))
        return await self._outcome(flight, timeout_s)  # type: ignore[no-any-return]

    def _is_here(self, pace: Pace, timeout_s: float | None) -> bool:
        """Whether the next piece of work is done on the loop itself."""
        thread = self._thread
        if thread is not None:
            return pace.inline and timeout_s is None and not thread.jobs
        if timeout_s is not None:
            raise ValueError('timeout_s: with run_in="inline" nobody can stop waiting for the env; use run_in="thread"')
        return True

    def _step(self, actions: Any, copy: bool) -> StepResult | EnvError:
        began = perf_counter()
        try:
            obs, reward, terminated, truncated, info = self._env.step(actions)
            self._last = ended = perf_counter()
            self.steps.note(ended - began)
            return StepResult(
                own(obs) if copy else obs,
                np.array(reward, _FLOAT64),
                np.array(terminated, _BOOL),
                np.array(truncated, _BOOL),
                own(info) if info else {},
            )
        except BaseException as exc:
            return self._failure(exc)

    def _reset(
        self, seed: Any, mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None, copy: bool
    ) -> ResetResult | EnvError:
        began = perf_counter()
        try:
            obs, info = reset_vector_env(self._env, seed, mask, options)
            self.resets.note(perf_counter() - began)
            return ResetResult(own(obs) if copy else obs, own(info) if info else {})
        except BaseException as exc:
            return self._failure(exc)

    def _failure(self, exc: BaseException) -> EnvError:
        """What an env has raised, as an error; Ctrl-C and the like go on, and leave failed slots."""
        error = self._error(exc)
        if not isinstance(exc, Exception):
            self.table.fail(error)
            raise exc
        return error

    def _error(self, exc: BaseException) -> EnvError:
        text = "".join(traceback.format_exception(exc))
        where = f"slots 0 to {self.num_envs - 1}" if self.num_envs > 1 else "slot 0"
        error = EnvError(
            f"{where} (the vector env in this process, pid {self._pid}): {type(exc).__name__}: {exc}\n{text}",
            slots=tuple(self._all.tolist()),
            pid=self._pid,
            traceback=text,
        )
        error.__cause__ = exc
        return error

    def is_due(self) -> bool:
        """Whether the loop has been kept for long enough, now that a step is made."""
        return self._last - self._last_turn > TURN_S

    async def turn(self, value: Any) -> None:
        """Let the loop do something else, with a result in hand; a cancellation leaves it to `recv`."""
        self.table.move(_ALL, SlotState.IN_FLIGHT)
        try:
            await yield_to_loop()
        except BaseException:
            flight = self._flights.begin(self._all, waiting=False)
            if not self._copy:  # the next step may be made before this is taken
                value = value if isinstance(value, EnvError) else type(value)(*map(own, value))
            self._flights.abandon(flight)
            self._flights.arrive(flight, value)
            raise
        finally:
            self._last_turn = perf_counter()
        self._check_open()
        self._flights.release(_ALL)

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("the vector env was closed while this was in flight")

    async def _outcome(self, flight: Flight, timeout_s: float | None) -> Any:
        """Wait for the thread; a cancellation or timeout leaves the result to `recv`."""
        try:
            await self._patiently(asyncio.shield(flight.done), timeout_s, _LOST_NOTHING)
        except BaseException:
            self._flights.abandon(flight)
            raise
        self._last_turn = perf_counter()
        self._check_open()
        self._flights.settle(flight)
        return self._good(flight.value)  # type: ignore[type-var]

    def _good(self, value: Result | EnvError) -> Result:
        if isinstance(value, EnvError):
            self.table.fail(value)
            raise value
        return value

    async def _drain(self, timeout_s: float | None) -> None:
        for flight in list(self._flights.abandoned):
            await self._patiently(asyncio.shield(flight.done), timeout_s, _LOST_NOTHING)
        self._check_open()
        if ended := self._flights.drop_abandoned():
            _log.warning(
                "the result of a cancelled or timed-out step was dropped, and with it the ends of the episodes in "
                "slots %s; recv() would have taken it",
                ended,
            )

    async def _patiently(self, wait: Any, timeout_s: float | None, meaning: str) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await wait
        except TimeoutError:
            slots = tuple(self._all.tolist())
            message = f"no result from the vector env within timeout_s={timeout_s}; {meaning}"
            raise StepTimeout(message, slots=slots, running=slots) from None

    # ------------------------------------------------------------ some slots

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to all slots; never blocks for longer than the loop may be kept."""
        numbers = self.table.named(slots)
        arrays, objects = self._actions.take_apart(actions, len(numbers))
        if len(numbers) < self.num_envs:
            raise ValueError(
                f"send: one vector env steps all of its {self.num_envs} slots at once, got slots {numbers.tolist()}; "
                'send to all of them, split them with num_workers=, or use backend="workers", which steps slots alone'
            )
        self.table.check_send(_ALL, "send", reset=False)
        order = np.argsort(numbers)
        picked = [[column[i] for i in order.tolist()] for column in objects]
        batch = self._actions.assemble([array[order] for array in arrays], picked)
        flight = self._flights.begin(self._all, waiting=False)
        self._launch(flight, self.steps, partial(self._step, batch, True))

    def send_reset(
        self, slots: Iterable[int] | None, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> None:
        """Begin episodes in some slots; never blocks for longer than the loop may be kept."""
        numbers = self.table.named(slots)
        if seed is not None and not isinstance(seed, (int, np.integer)):
            if len(seed) != len(numbers):
                raise ValueError(f"send_reset: got {len(seed)} seeds for {len(numbers)} slots")
            by_slot = dict(zip(numbers.tolist(), seed, strict=True))
            seed = [by_slot.get(slot) for slot in range(self.num_envs)]
        self.table.check_send(numbers, "send_reset", reset=True)
        mask = None
        if len(numbers) < self.num_envs:
            mask = np.zeros(self.num_envs, np.bool_)
            mask[numbers] = True
        self.table.note_reset(numbers)
        flight = self._flights.begin(np.sort(numbers), waiting=False)
        self._launch(flight, self.resets, partial(self._reset, seed, mask, options, True))

    def _launch(self, flight: Flight, pace: Pace, work: Callable[[], Any]) -> None:
        if self._is_here(pace, None):
            self._flights.arrive(flight, work())
        else:
            self._submit(flight, work)

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
        for error in errors:
            self.table.fail(error)
        if errors:
            raise EnvError.join(list(errors), ready)
        return ready

    @property
    def outstanding(self) -> bool:
        """Whether anything is in flight or ready."""
        return self._flights.outstanding

    def _submit(self, flight: Flight, work: Callable[[], Any]) -> None:
        """Do the work of a flight on the thread."""
        assert self._thread is not None

        def on_done(value: Any, error: BaseException | None) -> None:
            self._flights.arrive(flight, value if error is None else self._error(error))

        self._thread.submit(work, on_done)


_LOST_NOTHING = (
    "nothing is lost: recv() takes it when it is there, and a later step() or reset() waits for it and drops it"
)
