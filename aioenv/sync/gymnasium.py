"""The drop-ins: vector envs with the arguments, methods, messages and exceptions of Gymnasium's classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import gymnasium
import numpy as np
from gymnasium import Env, Space, logger, spaces
from gymnasium.core import ActType, ObsType
from gymnasium.error import CustomSpaceError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import create_shared_memory, iterate

from aioenv import vector_env
from aioenv.core import env_calls
from aioenv.core.arguments import check_grace, check_num_workers, is_seconds
from aioenv.core.results import ResetResult, StepResult
from aioenv.errors import (
    ActionError,
    ClosedError,
    NoAsyncCallError,
    PendingCallError,
    SlotError,
    SpaceMismatchError,
    StepTimeout,
    WorkerStartError,
)
from aioenv.process.launch import START_METHODS
from aioenv.sync.blocking import BlockingStep, BlockingVectorEnv
from aioenv.sync.portal import PortalCall

if TYPE_CHECKING:
    from aioenv.process.remote import Cluster

__all__ = ["AsyncVectorEnv", "SyncVectorEnv"]

T = TypeVar("T")

# Limits of waits for envs that are made, and for envs that are closed. Gymnasium has none.
_START_TIMEOUT_S = 600.0
_CLOSE_TIMEOUT_S = 60.0

# Methods that `call` refuses: called that way they would bypass the record of episodes.
_NOT_CALLABLE = ("reset", "step", "close", "_setattr", "_check_spaces")

# Gymnasium's two classes word these messages differently.
_WORDS_OF_SYNC = (
    ("AsyncVectorEnv(", "SyncVectorEnv("),
    ("some of the sub-environments observation", "the sub-environments observation"),
    ("the sub-environment's observation", "the sub-environments observation"),
)


class DropIn(BlockingVectorEnv):
    """Base of the drop-ins: starts envs and calls them, and raises their exceptions as Gymnasium does."""

    def _start_envs(self, envs: vector_env.AsyncVectorEnv, *, cast: bool) -> None:
        """Start the vector env, with all actions and numbers that Gymnasium accepts.

        Args:
            envs: the vector env.
            cast: whether to cast observations to their space's dtype and shape.

        Raises:
            Exception: see the subclasses.
        """
        envs._config = envs._config._replace(cast=cast, lenient=True)
        failure: Exception | None = None
        try:
            self._start(envs)
        except WorkerStartError as error:
            failure = original_exception(error)
        if failure is not None:
            raise failure

    def render(self) -> tuple[Any, ...]:
        """Call each env's `render`."""
        return self.call("render")

    def _prepare_actions(self, actions: Any) -> tuple[Any, bool]:
        """Return actions, and whether they are a list that is sent element by element, pickled.

        They are such a list unless they are exactly the arrays of the action space. With Gymnasium, envs get actions as
        they were given, of any shape and dtype.
        """
        if fits_space(self.action_space, actions):
            return actions, False
        given = list(iterate(self.action_space, actions))
        if len(given) != self.num_envs:
            raise ActionError(f"actions: expected one for each of {self.num_envs} envs, got {len(given)}")
        return given, True

    def _assert_is_running(self) -> None:
        if self.closed:
            raise ClosedError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _run_on_loop(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
        """Run a coroutine function on the loop, and wait for its result: one round trip to the loop's thread."""
        return self._translate_errors(lambda: self._portal.call(function, *args, **kwargs))

    def _translate_errors(self, function: Callable[[], T]) -> T:
        """Return the function's result; raise exceptions of envs as Gymnasium does."""
        try:
            return function()
        except SlotError as exc:
            error = exc
        if error.partial is None:  # not from an env: the call was refused
            raise error
        raise self._choose_exception(error.errors)

    def _choose_exception(self, errors: Sequence[SlotError]) -> Exception:
        """Return the exception to raise, if one or more envs have failed."""
        raise NotImplementedError


class AsyncVectorEnv(DropIn, gymnasium.vector.VectorEnv[Any, Any, Any], Generic[ObsType, ActType]):  # as `VectorEnv`
    """A drop-in for `gymnasium.vector.AsyncVectorEnv`: the same arguments, methods, messages and exceptions.

    Some defects of Gymnasium's are mended. After a timeout or Ctrl-C the next result is that of the next call. A worker
    that dies, and an exception that does not pickle, raise an error that says so. A slot whose env has raised works
    again after a `reset`, and no other slot is affected. No env is built in this process.

    Every method that waits may be interrupted (Ctrl-C): the envs go on, and the next call first waits for them and
    drops their results.

    Args:
        env_fns: a factory for each slot.
        shared_memory: makes no difference to how observations are sent. With True, as in Gymnasium, they are cast to
            their space's dtype and shape, and spaces that can't lie in shared memory are refused.
        copy: whether observations are arrays of your own; with False they are views into two batches used in turn.
        context: "fork", "spawn", "forkserver" or None: how workers are started. "fork" is not used: it gives what
            "forkserver" gives, and a warning.
        daemon: makes no difference: workers end with this process, and may have children of their own.
        worker: refused.
        observation_mode: "same", "different", or a tuple `(batched space, single space)`.
        autoreset_mode: an `AutoresetMode`, or its value.
        max_concurrency: the most envs that run at a time: an upper limit of `num_workers`.
        num_workers: the number of processes; slots are spread over them evenly, and those of one worker take turns.
            Default: as many as this process may use CPUs, at most one a slot. Envs that sleep (on a network, on a
            simulator of their own), or that allow only one a process, need `num_workers=len(env_fns)`, as Gymnasium
            has it. A warning says so if the workers are idle in the first second of steps.
        cluster: the machines on which the workers are placed, `num_workers` of them (see `aioenv.AsyncVectorEnv`);
            None: this one.

    Raises:
        ValueError: if an argument has a wrong value, if `worker` is given, or if an observation space is of a kind of
            your own and `shared_memory` is True.
        TypeError: if an element of `env_fns` is not callable or can't be pickled; if an observation space has no
            fixed size and `shared_memory` is True.
        SpaceMismatchError: if the envs' spaces can't be batched (it is a RuntimeError).
        Exception: the exception of a factory; WorkerStartError, if that does not pickle, or if a worker ended or was
            not ready within ten minutes.
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
        num_workers: int | Sequence[int] | None = None,
        cluster: Cluster | Sequence[Cluster | None] | None = None,
    ) -> None:
        if worker is not None:
            raise ValueError(
                "worker: a worker function of your own can't be used, the workers here speak another protocol. Move "
                "its work into a wrapper of each env, or stay with gymnasium.vector.AsyncVectorEnv"
            )
        check_max_concurrency(max_concurrency)
        if cluster is not None and max_concurrency is not None:
            raise ValueError("max_concurrency: not with cluster=, where num_workers says how many envs run at a time")
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
        if cluster is None:
            workers = check_num_workers(cast("int | None", num_workers), max(len(env_fns), 1))
            num_workers = workers if max_concurrency is None else min(workers, int(max_concurrency))
        # typed as any str, like Gymnasium's arguments
        words: dict[str, Any] = {"start": start_method(context), "observation_mode": observation_mode}
        words["autoreset_mode"] = autoreset_mode
        envs = vector_env.AsyncVectorEnv(
            env_fns,
            num_workers=num_workers,
            cluster=cluster,
            copy=copy,
            start_timeout_s=_START_TIMEOUT_S,
            **words,
        )
        envs._must_reset = False
        self._start_envs(envs, cast=shared_memory)
        pids = [worker.pid for worker in self.workers if worker.pid is not None and not worker.node]
        self._sleep_detector = (
            SleepDetector(pids, self.num_envs) if cluster is None and len(pids) < self.num_envs else None
        )
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
            Exception: the exception of an env (see `step`).
        """
        self._check_free("reset_async")
        return self._run_on_loop(self._envs.reset, seed=seed, options=options)

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
        self._start_call(AsyncState.WAITING_RESET, self._envs.reset, seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None) -> ResetResult:
        """Wait for the result of `reset_async`; arguments and errors as for `step_wait`."""
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
            Exception: the exception of the last slot whose env raised, after a log line for each; an EnvError, if it
                does not pickle. Slots that failed must be reset.
            EnvError: if a slot has failed before and was not reset. Nothing was sent.
            WorkerDied: if the worker of the last slot that failed has ended.
        """
        self._check_free("step_async")
        actions, listed = self._prepare_actions(actions)
        if self._sleep_detector is None:
            return self._translate_errors(lambda: self._stepper.step(actions, listed=listed))
        began = perf_counter()
        result = self._translate_errors(lambda: self._stepper.step(actions, listed=listed))
        if not self._sleep_detector.record(perf_counter() - began):
            self._sleep_detector = None
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
        actions, listed = self._prepare_actions(actions)
        self._pending = self._translate_errors(lambda: self._stepper.begin(actions, listed=listed))
        self._state = AsyncState.WAITING_STEP

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Wait for the result of `step_async`.

        Args:
            timeout: how long to wait, in seconds; None for no limit.

        Raises:
            NoAsyncCallError: if there was no `step_async`.
            ValueError: if `timeout` is no number. The step can still be waited for.
            StepTimeout: if `timeout` passed. The envs go on; the next call waits for them and drops their results
                (with a log record, if an episode ended there). It is a `multiprocessing.TimeoutError`.
            Exception: as `step`.
        """
        result: StepResult = self._wait(AsyncState.WAITING_STEP, timeout)
        return result

    # ------------------------------------------------------------ calls

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute.

        Returns:
            One result a slot.

        Raises:
            ClosedError, PendingCallError, ValueError: as `call_async`.
            Exception: the exception of an env (see `step`); its slot need not be reset.
        """
        self._check_free("call_async")
        return self._run_on_loop(_call_envs, self._envs, name, args, kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a `call`, whose result `call_wait` gives.

        Raises:
            ClosedError: if this is closed.
            PendingCallError: if a `_wait` is owed to another call.
            ValueError: if `name` is "reset", "step" or "close".
        """
        self._check_free("call_async")
        self._start_call(AsyncState.WAITING_CALL, _call_envs, self._envs, name, args, kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the result of `call_async`; arguments and errors as for `step_wait`."""
        result: tuple[Any, ...] = self._wait(AsyncState.WAITING_CALL, timeout)
        return result

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env: to its element of a list or tuple, else all to the same value.

        Raises:
            ClosedError: if this is closed.
            PendingCallError: if a `_wait` is owed to another call.
            ValueError: if a list has another length than there are slots.
            Exception: the exception of an env (see `step`); its slot need not be reset.
        """
        self._check_free("set_attr")
        self._run_on_loop(_set_attr, self._envs, name, values)

    # ------------------------------------------------------------ the end

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers and the loop thread; called by `close`, with its arguments.

        A call in flight is waited for, with a warning; its result or exception is dropped.

        Args:
            timeout: how long a call in flight, and then the envs' own `close`, may take, in seconds; None for a
                minute. Workers that take longer get SIGTERM, a second later SIGKILL.
            terminate: don't wait: send SIGTERM at once.

        Raises:
            ValueError: if `timeout` is no number. Nothing has been closed then.
        """
        timeout = 0.0 if terminate else _CLOSE_TIMEOUT_S if timeout is None else check_grace("timeout", timeout)
        if self._pending is not None and not self._portal.is_copy:
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete.")
            if not self._pending.wait(timeout):
                timeout = 0.0
            self._pending.cancel()
            self._pending = None
        self._end(grace_s=timeout)

    # ------------------------------------------------------------ one call at a time

    def _check_free(self, name: str) -> None:
        self._assert_is_running()
        if self._pending is not None:
            state = self._state.value
            raise PendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{state}` to complete.", state
            )

    def _start_call(
        self, state: AsyncState, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any
    ) -> None:
        self._pending = self._translate_errors(lambda: self._portal.start(function, *args, **kwargs))
        self._state = state

    def _wait(self, state: AsyncState, timeout: float | None) -> Any:
        self._assert_is_running()
        call, name = self._pending, state.value
        if call is None or self._state is not state:
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        if timeout is not None and not is_seconds(timeout):  # checked first: the call can still be waited for
            raise ValueError(f"{name}_wait: timeout: expected a number of seconds or None, got {timeout!r}")
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
        return self._translate_errors(call.result)

    def _choose_exception(self, errors: Sequence[SlotError]) -> Exception:
        for each in errors:
            logger.error(f"Received the following error from Worker-{each.slot} - Shutting it down")
            logger.error("%s", each.traceback or each)
        logger.error("Raising the last exception back to the main process.")
        return original_exception(errors[-1])


class SyncVectorEnv(DropIn, gymnasium.vector.VectorEnv[Any, Any, Any], Generic[ObsType, ActType]):  # as `VectorEnv`
    """A drop-in for `gymnasium.vector.SyncVectorEnv`: the same arguments, methods, messages and exceptions.

    The envs live in this process, and are stepped one after the other, as by `aioenv.AsyncVectorEnv` with
    `num_workers=0`. They are made, called, drawn and closed on a thread of their own; short steps and resets of envs
    without a `render_mode` run on the caller's thread. Calls and attributes give the very objects, as Gymnasium's do.
    Objects in infos and observations that are no numbers or arrays are copies, by pickle; a slot whose objects don't
    pickle fails.

    A slot whose env has raised works again after a `reset`, and the others have made their step. SystemExit of an
    env is a `WorkerDied`, and errors of its `close` are logged. After Ctrl-C the next result is that of the next call.

    Args:
        env_fns: a factory for each slot.
        copy: whether observations are arrays of your own; with False they may be used again in the second next step.
        observation_mode: "same", "different", or a tuple `(batched space, single space)`.
        autoreset_mode: an `AutoresetMode`, or its value. With `AutoresetMode.DISABLED` a `ResetNeededError` is raised
            if a slot is stepped after the end of its episode.

    Attributes:
        envs: the env objects, a tuple. An env can't be replaced.

    Raises:
        ValueError: if there are no factories, or an argument has a wrong value.
        TypeError: if an element of `env_fns` is not callable.
        SpaceMismatchError: if the envs' spaces can't be batched (it is a RuntimeError).
        Exception: the exception of a factory; WorkerStartError, if two slots have the same env, or if making the envs
            takes more than ten minutes.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        copy: bool = True,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        self.env_fns = env_fns
        self.copy = copy
        self.observation_mode = observation_mode
        words: dict[str, Any] = {"observation_mode": observation_mode, "autoreset_mode": autoreset_mode}
        envs = vector_env.AsyncVectorEnv(env_fns, num_workers=0, copy=copy, start_timeout_s=_START_TIMEOUT_S, **words)
        made: list[Env[Any, Any]] = []
        try:
            self._start_envs(envs, cast=False)
        except SpaceMismatchError as error:
            text = str(error)
            for theirs, ours in _WORDS_OF_SYNC:
                text = text.replace(theirs, ours)
            raise SpaceMismatchError(text) from None
        try:
            self._run_on_loop(_apply, self._envs, lambda env: made.append(env))
        except BaseException:
            self.close()
            raise
        self._single_envs = tuple(made)

    @property
    def envs(self) -> tuple[Env[Any, Any], ...]:
        """The envs, one a slot: the very objects."""
        return self._single_envs

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult:
        """Begin an episode in every slot, or in those of `options["reset_mask"]` (see `AsyncVectorEnv.reset`).

        Raises:
            ClosedError: if this is closed.
            ValueError, TypeError: if seeds or the mask are not of the right length, shape or dtype.
            Exception: the exception of an env (see `step`).
        """
        self._assert_is_running()
        return self._run_on_loop(self._envs.reset, seed=seed, options=options)

    def step(self, actions: Any) -> StepResult:
        """Step every slot (see `AsyncVectorEnv.step`).

        Raises:
            ClosedError: if this is closed.
            ActionError: if there are not as many actions as slots (it is a ValueError).
            TypeError: if `actions` is no batch.
            Exception: the exception of the first slot whose env raised; an EnvError, if it does not pickle. Slots that
                failed must be reset.
            EnvError: if a slot has failed before and was not reset.
            ResetNeededError: if an episode is over and `autoreset_mode` is `AutoresetMode.DISABLED`.
        """
        self._assert_is_running()
        actions, listed = self._prepare_actions(actions)
        return self._translate_errors(lambda: self._stepper.step(actions, listed=listed))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute.

        Returns:
            One result a slot; nothing is copied.

        Raises:
            ClosedError: if this is closed.
            Exception: the exception of the first env that raises; the envs after it are not called.
        """

        def call(slot: int, env: Env[Any, Any]) -> Any:
            value = env.get_wrapper_attr(name)
            return value(*args, **kwargs) if callable(value) else value

        return self._for_each_env(call)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env: to its element of a list or tuple, else all to the same value.

        Raises:
            ClosedError: if this is closed.
            ValueError: if a list has another length than there are slots.
            Exception: the exception of the first env that raises; the attributes after it are not set.
        """
        each = env_calls.spread_values(values, self.num_envs)
        self._for_each_env(lambda slot, env: env.set_wrapper_attr(name, each[slot]))

    def _for_each_env(self, function: Callable[[int, Env[Any, Any]], T]) -> tuple[T, ...]:
        """Call a function with the slot and env of each slot, on the thread that would step them now.

        Raises:
            BaseException: the first exception of the function, which is not called again then.
        """
        self._assert_is_running()
        results: list[T] = []
        errors: list[BaseException] = []

        def call(env: Env[Any, Any]) -> None:
            if errors:
                return
            try:
                results.append(function(len(results), env))
            except BaseException as exc:
                errors.append(exc)

        def call_all() -> None:
            for env in self._single_envs:
                call(env)

        if not self._stepper.use_envs_inline(call_all):
            self._run_on_loop(_apply, self._envs, call)
        if errors:
            raise errors.pop()
        return tuple(results)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the envs, and end their thread and the loop's; called by `close`, with its arguments."""
        self._end(grace_s=_CLOSE_TIMEOUT_S)

    def _choose_exception(self, errors: Sequence[SlotError]) -> Exception:
        return original_exception(errors[0])


# The functions below run on the loop. They hold no reference to a drop-in, so that one that the program drops is
# collected even with a call in flight.


async def _call_envs(
    envs: vector_env.AsyncVectorEnv, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    if name in _NOT_CALLABLE:
        raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
    scheduler = envs._check_running()
    await scheduler.drain()  # results that a timeout or an interrupt has left
    return await env_calls.call_envs(scheduler, None, name, args, kwargs)


async def _set_attr(envs: vector_env.AsyncVectorEnv, name: str, values: Any) -> None:
    scheduler = envs._check_running()
    await scheduler.drain()
    await env_calls.set_attr(scheduler, name, values)


async def _apply(envs: vector_env.AsyncVectorEnv, function: Callable[[Env[Any, Any]], None]) -> None:
    """Call a function of this process with each env; the envs must live here, too."""
    backend = envs._check_running()
    await backend.drain()
    await backend.call_service(None, "call", "apply", lambda _: (function, ()))


# ---------------------------------------------------------------- Gymnasium's checks and errors


def original_exception(error: SlotError | WorkerStartError) -> Exception:
    """Return the exception that was raised by an env or factory, with a note of its traceback.

    If that exception could not be sent, or none of them raised, return the error itself.
    """
    original = error.__cause__
    if not isinstance(original, Exception) or not error.traceback:  # without one, the cause is of this process
        return error
    where = "" if error.pid == os.getpid() else f", in worker process {error.pid}"
    original.add_note(f"in the env of slot {error.slots[0]}{where}:\n{error.traceback}")
    return original


def fits_space(space: Space[Any], batch: Any) -> bool:
    """Return whether all arrays of a batch have the shapes and dtypes of its space; other elements are not checked.

    Arrays of subclasses don't fit, since their rows may be other things: of `numpy.ma`, they may be masked.
    """
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return type(batch) is np.ndarray and batch.dtype == space.dtype and batch.shape == space.shape
    if isinstance(space, spaces.Dict):
        return (
            isinstance(batch, dict)
            and batch.keys() == space.spaces.keys()
            and all(fits_space(child, batch[key]) for key, child in space.spaces.items())
        )
    if isinstance(space, spaces.Tuple):
        return (
            isinstance(batch, (tuple, list))
            and len(batch) == len(space.spaces)
            and all(map(fits_space, space.spaces, batch))
        )
    return True


def check_max_concurrency(value: int | None) -> None:
    """Check `max_concurrency` as Gymnasium does, with its messages."""
    if value is None:
        return
    if not isinstance(value, (int, np.integer)):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(value)}.")
    if value < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {value}.")


def start_method(context: str | None) -> str | None:
    """Return the launch policy for one of multiprocessing's start methods."""
    if context is None:
        return None
    if context not in ("fork", "forkserver", "spawn"):
        raise ValueError(f"cannot find context for {context!r}")
    start = "spawn" if context == "spawn" or "forkserver" not in START_METHODS else "forkserver"
    if context == "fork":
        logger.warn(
            'context="fork" is not used: a forked copy of a process with threads, an event loop or OpenGL contexts can '
            f"hang. Workers are started by {start!r}; they need no `if __name__ == '__main__'` guard."
        )
    return start


def check_shareable(space: Space[Any]) -> None:
    """Refuse the spaces that Gymnasium refuses with `shared_memory=True`, with its messages.

    Raises:
        ValueError: if Gymnasium does not know the class of a space, and no function is registered for it.
        TypeError: if a space's elements have no fixed size.
    """
    create = create_shared_memory.dispatch(type(space))
    if create in (create_shared_memory.dispatch(object), create_shared_memory.dispatch(spaces.Graph)):
        try:
            create(space)  # it only raises
        except CustomSpaceError as exc:
            raise ValueError(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature with "
                "`shared_memory=False` however this is slower."
            ) from exc
    if isinstance(space, (spaces.Dict, spaces.Tuple, spaces.OneOf)):
        children = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for child in children:
            check_shareable(child)


# ---------------------------------------------------------------- envs that sleep

_MIN_WAIT_S = 1.0  # the total wait from which on the CPU times say something
_LONG_STEP_S = 2e-3  # shorter steps may consist of the exchange's own waits
_BUSY = 0.3  # CPUs that all workers together use or wait for during a wait; with less they sleep


class SleepDetector:
    """Watch the first steps, and warn once if envs that share workers sleep rather than compute.

    Args:
        pids: the workers' processes.
        num_envs: the number of envs that share them.
    """

    def __init__(self, pids: Sequence[int], num_envs: int) -> None:
        self._pids = pids
        self._num_envs = num_envs
        self._steps = 0
        self._waited_s = 0.0
        self._before_s = _cpu_seconds(pids)

    def record(self, seconds: float) -> bool:
        """Record how long a step took; return whether the next one should be recorded, too."""
        self._steps += 1
        self._waited_s += seconds
        if self._before_s is None:
            return False
        if self._waited_s < _MIN_WAIT_S:
            return True
        now_s = _cpu_seconds(self._pids)
        if now_s is not None and self._waited_s / self._steps > _LONG_STEP_S:
            busy = (now_s - self._before_s) / self._waited_s
            if busy < _BUSY:
                logger.warn(
                    f"{self._num_envs} envs share {len(self._pids)} workers and take turns, but while steps were "
                    f"waited for, the workers used {busy:.2f} CPUs: these envs sleep rather than compute. Give "
                    f"num_workers={self._num_envs}, so that they sleep side by side."
                )
        return False


def _cpu_seconds(pids: Sequence[int]) -> float | None:
    """Return the CPU time that processes have used or, on a busy machine, waited for, in seconds.

    None where there is no /proc, or if a process has ended.
    """
    ticks = delay_ns = 0
    try:
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            delay_ns += _delay_ns(pid)
    except OSError:
        return None
    return ticks / os.sysconf("SC_CLK_TCK") + delay_ns / 1e9


def _delay_ns(pid: int) -> int:
    """Return how long a process was ready to run without a CPU; 0 where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1])
    except (FileNotFoundError, IndexError):
        return 0
