"""`AsyncVectorEnv`: what old code gets when it imports from here what it used to import from `gymnasium.vector`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any, Generic, TypeVar

import gymnasium
from gymnasium import Env, Space, logger
from gymnasium.core import ActType, ObsType
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import iterate

from aioenv import vector_env
from aioenv.core import env_calls
from aioenv.core.arguments import check_num_workers
from aioenv.core.results import ResetResult, StepResult
from aioenv.errors import (
    ActionError,
    ClosedError,
    NoAsyncCallError,
    PendingCallError,
    SlotError,
    StepTimeout,
    WorkerStartError,
)
from aioenv.sync.compat import check_max_concurrency, check_shareable, fits, original, start_method
from aioenv.sync.facade import Facade
from aioenv.sync.portal import PortalCall
from aioenv.sync.sleep_detector import SleepDetector
from aioenv.sync.stepping import BlockingStep

__all__ = ["AsyncVectorEnv"]

T = TypeVar("T")

# Gymnasium waits for ever where these end a wait: for envs that are made, and for envs that are closed.
_START_TIMEOUT_S = 600.0
_CLOSE_TIMEOUT_S = 60.0

# Methods that have a door of their own: through `call` they would pass by what is known of the episodes.
_NOT_BY_CALL = ("reset", "step", "close", "_setattr", "_check_spaces")


class AsyncVectorEnv(Facade, gymnasium.vector.VectorEnv[Any, Any, Any], Generic[ObsType, ActType]):  # as `VectorEnv`
    """A drop-in for `gymnasium.vector.AsyncVectorEnv`: the same arguments, methods, messages and exceptions.

    What Gymnasium gets wrong is right here: after a timeout or Ctrl-C the next result is that of the next call; a
    worker that dies, and an exception that does not pickle, raise an error that says so; a slot whose env has raised
    is well again after a `reset`, and no other slot is touched. No env is built in this process.

    Every method that waits may be interrupted (Ctrl-C): the envs go on, and the next call first waits for them and
    drops what they return.

    Args:
        env_fns: a factory for each slot.
        shared_memory: observations travel the same way whatever it says; but with True, as in Gymnasium, they are cast
            to their space's dtype and shape, and spaces that can't lie in shared memory are refused.
        copy: whether observations are arrays of your own; with False they are views into two batches used in turn.
        context: "fork", "spawn", "forkserver" or None: how workers are started. "fork" is not used: it gives what
            "forkserver" gives, and a warning.
        daemon: makes no difference: workers end with this process, and may have children of their own.
        worker: refused.
        observation_mode: "same", "different", or a tuple `(batched space, single space)`.
        autoreset_mode: an `AutoresetMode`, or its value.
        max_concurrency: at most so many envs run at a time: an upper limit of `num_workers`.
        num_workers: how many processes; slots are spread over them evenly, and those of one worker take turns.
            Default: as many as this process may use CPUs, at most one a slot. Envs that sleep (on a network, on a
            simulator of their own), or of which a process may hold only one, want `num_workers=len(env_fns)`, which is
            what Gymnasium has; a warning says so if the workers turn out to be idle in the first second of steps.

    Raises:
        ValueError: if an argument is none of the values it may have; if `worker` is given; if an observation space is
            of a kind of your own and `shared_memory` is True.
        TypeError: if an element of `env_fns` is not callable or can't be pickled; if an observation space has no
            fixed size and `shared_memory` is True.
        SpaceMismatchError: if the envs' spaces can't be batched (it is a RuntimeError).
        Exception: what a factory raised; WorkerStartError, if that does not pickle, or if a worker ended or was not
            ready within ten minutes.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | None = None,
    ) -> None:
        if worker is not None:
            raise ValueError(
                "worker: a worker function of your own can't be used, the workers here speak another protocol. Do in a "
                "wrapper of each env what it does, or stay with gymnasium.vector.AsyncVectorEnv"
            )
        check_max_concurrency(max_concurrency)
        self.env_fns = env_fns
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.observation_mode = observation_mode
        self.max_concurrency = max_concurrency
        self._state = AsyncState.DEFAULT
        self._pending: PortalCall | BlockingStep | None = None
        num_workers = check_num_workers(num_workers, max(len(env_fns), 1))
        # any str, as the types of Gymnasium's arguments have it
        words: dict[str, Any] = {"start": start_method(context), "observation_mode": observation_mode}
        words["autoreset_mode"] = autoreset_mode
        envs = vector_env.AsyncVectorEnv(
            env_fns,
            num_workers=num_workers if max_concurrency is None else min(num_workers, int(max_concurrency)),
            copy=copy,
            start_timeout_s=_START_TIMEOUT_S,
            **words,
        )
        envs._must_reset = False
        envs._config = envs._config._replace(cast=shared_memory, lenient=True)
        failure: Exception | None = None
        try:
            self._start(envs)
        except WorkerStartError as error:
            failure = original(error)
        if failure is not None:
            raise failure
        pids = [worker.pid for worker in self.workers if worker.pid is not None]
        self._sleepers = SleepDetector(pids, self.num_envs) if len(pids) < self.num_envs else None
        if shared_memory:
            try:
                check_shareable(self.single_observation_space)
            except BaseException:
                self.close(terminate=True)
                raise

    # ------------------------------------------------------------ reset and step

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult:
        """Begin an episode in every slot, or in those that `options["reset_mask"]` names.

        Args:
            seed: an int seeds slot i with `seed + i`; a list gives each slot its own (None: no seed).
            options: passed to each env's `reset`, but for "reset_mask", a bool array of shape `(num_envs,)`.

        Returns:
            `(obs, info)`: a batch of `observation_space`, and infos as arrays by key.

        Raises:
            ClosedError, PendingCallError: as `reset_async`.
            ValueError, TypeError: if seeds or the mask are not of the right length, shape or dtype.
            Exception: what an env raised (see `step`).
        """
        self._check_free("reset_async")
        return self._ask(self._envs.reset, seed=seed, options=options)

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Begin a `reset`, whose result `reset_wait` gives.

        Raises:
            ClosedError: if this is closed.
            PendingCallError: if a `_wait` is owed to another call.
            ValueError, TypeError: as `reset`.
        """
        self._check_free("reset_async")
        self._begin(AsyncState.WAITING_RESET, self._envs.reset, seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None) -> ResetResult:
        """The result of `reset_async`; arguments and errors as for `step_wait`."""
        result: ResetResult = self._wait(AsyncState.WAITING_RESET, timeout)
        return result

    def step(self, actions: Any) -> StepResult:
        """Step every slot.

        Args:
            actions: a batch of `action_space`. Arrays of its shape and dtype travel fastest; each env gets its action
                as it was given.

        Returns:
            `(obs, reward, terminated, truncated, info)`: observations as a batch of `observation_space`, reward
            float64 and flags bool of shape `(num_envs,)`, infos as arrays by key.

        Raises:
            ClosedError, PendingCallError, ActionError, TypeError: as `step_async`.
            Exception: what the env of the last slot that failed raised, after a log line for each; an EnvError, if it
                does not pickle. Slots that failed must be reset.
            EnvError: if a slot has failed before and was not reset. Nothing was sent.
            WorkerDied: if the worker of the last slot that failed has ended.
        """
        self._check_free("step_async")
        actions, given = self._choose_way(actions)
        if self._sleepers is None:
            return self._plainly(lambda: self._stepper.step(actions, given=given))
        began = perf_counter()
        result = self._plainly(lambda: self._stepper.step(actions, given=given))
        if not self._sleepers.note(perf_counter() - began):
            self._sleepers = None
        return result

    def step_async(self, actions: Any) -> None:
        """Begin a `step`, whose result `step_wait` gives. The actions are yours again when this returns.

        Raises:
            ClosedError: if this is closed.
            PendingCallError: if a `_wait` is owed to another call.
            ActionError: if there are not as many actions as slots, or one does not pickle (it is a ValueError).
            TypeError: if `actions` is no batch.
        """
        self._check_free("step_async")
        actions, given = self._choose_way(actions)
        self._pending = self._plainly(lambda: self._stepper.begin(actions, given=given))
        self._state = AsyncState.WAITING_STEP

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """The result of `step_async`.

        Args:
            timeout: how long to wait, in seconds; None for ever.

        Raises:
            NoAsyncCallError: if there was no `step_async`.
            StepTimeout: if `timeout` passed. The envs go on; the next call waits for them and drops their results
                (with a log record, if an episode ended there). It is a `multiprocessing.TimeoutError`.
            Exception: as `step`.
        """
        result: StepResult = self._wait(AsyncState.WAITING_STEP, timeout)
        return result

    def _choose_way(self, actions: Any) -> tuple[Any, bool]:
        """Actions, and whether they go one by one: by pickle, if they are not just the arrays of the action space.

        Gymnasium's envs get their actions as they were given, whatever their shape and dtype.
        """
        if fits(self.action_space, actions):
            return actions, False
        given = list(iterate(self.action_space, actions))
        if len(given) != self.num_envs:
            raise ActionError(f"actions: expected one for each of {self.num_envs} envs, got {len(given)}")
        return given, True

    # ------------------------------------------------------------ calls

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute.

        Returns:
            One result a slot.

        Raises:
            ClosedError, PendingCallError, ValueError: as `call_async`.
            Exception: what an env raised (see `step`); its slot need not be reset.
        """
        self._check_free("call_async")
        return self._ask(_call, self._envs, name, args, kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a `call`, whose result `call_wait` gives.

        Raises:
            ClosedError: if this is closed.
            PendingCallError: if a `_wait` is owed to another call.
            ValueError: if `name` is "reset", "step" or "close".
        """
        self._check_free("call_async")
        self._begin(AsyncState.WAITING_CALL, _call, self._envs, name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The result of `call_async`; arguments and errors as for `step_wait`."""
        result: tuple[Any, ...] = self._wait(AsyncState.WAITING_CALL, timeout)
        return result

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env: to its element of a list or tuple, else all to the same value.

        Raises:
            ClosedError: if this is closed.
            PendingCallError: if a `_wait` is owed to another call.
            ValueError: if a list has another length than there are slots.
            Exception: what an env raised (see `step`); its slot need not be reset.
        """
        self._check_free("set_attr")
        self._ask(_set_attr, self._envs, name, values)

    def render(self) -> tuple[Any, ...]:
        """What each env's `render` gives."""
        return self.call("render")

    # ------------------------------------------------------------ the end

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers and the loop thread; called by `close`, with its arguments.

        A call in flight is waited for, with a warning; its result, or what it raises, is dropped.

        Args:
            timeout: how long a call in flight, and then the envs' own `close`, may take, in seconds; None for a
                minute. Workers that take longer get SIGTERM, a second later SIGKILL.
            terminate: don't wait: send SIGTERM at once.
        """
        timeout = 0.0 if terminate else _CLOSE_TIMEOUT_S if timeout is None else timeout
        if self._pending is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete.")
            if not self._pending.wait(timeout):
                timeout = 0.0
            self._pending.cancel()
            self._pending = None
        self._end(grace_s=timeout)

    # ------------------------------------------------------------ one call at a time

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _check_free(self, name: str) -> None:
        self._assert_is_running()
        if self._pending is not None:
            state = self._state.value
            raise PendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{state}` to complete.", state
            )

    def _ask(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
        """Begin and wait in one: the way to the loop's thread and back is made once."""
        return self._plainly(lambda: self._portal.call(function, *args, **kwargs))

    def _begin(
        self, state: AsyncState, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any
    ) -> None:
        self._pending = self._plainly(lambda: self._portal.begin(function, *args, **kwargs))
        self._state = state

    def _wait(self, state: AsyncState, timeout: float | None) -> Any:
        self._assert_is_running()
        call, name = self._pending, state.value
        if call is None or self._state is not state:
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        self._pending = None
        self._state = AsyncState.DEFAULT
        in_time = False
        try:
            in_time = call.wait(timeout)
        finally:
            if not in_time:
                call.cancel()
        if call.cancelled:
            raise StepTimeout(f"The call to `{name}_wait` has timed out after {timeout} second(s).")
        return self._plainly(call.result)

    def _plainly(self, function: Callable[[], T]) -> T:
        """What `function` returns; what envs raise comes out as Gymnasium raises it."""
        try:
            return function()
        except SlotError as exc:
            error = exc
        if error.partial is None:  # not from an env: the call was refused
            raise error
        for each in error.errors:
            logger.error(f"Received the following error from Worker-{each.slot} - Shutting it down")
            logger.error("%s", each.traceback or each)
        logger.error("Raising the last exception back to the main process.")
        raise original(error.errors[-1])


# On the loop. None of these knows the facade: one that is forgotten is collected, even with a call in flight.


async def _call(
    envs: vector_env.AsyncVectorEnv, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    if name in _NOT_BY_CALL:
        raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
    schedule = envs._check_running()
    await schedule.drain()  # what a timeout or an interrupt has left
    return await env_calls.call_envs(schedule, None, name, args, kwargs)


async def _set_attr(envs: vector_env.AsyncVectorEnv, name: str, values: Any) -> None:
    schedule = envs._check_running()
    await schedule.drain()
    await env_calls.set_attr(schedule, name, values)
