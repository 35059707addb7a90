"""Blocking steps, Ctrl-C in them, and the base classes of `aioenv.sync`, whose objects have loop threads.

`BlockingStepper` runs steps inline in place of the loop's thread where that is possible; else it sends them there.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import gymnasium
from gymnasium import Space

from aioenv.core.arguments import check_recv, check_timeout
from aioenv.core.requests import BatchRequest
from aioenv.core.results import Ready, StepResult, WorkerInfo
from aioenv.core.scheduler import RequestScheduler
from aioenv.core.waits import Stats
from aioenv.core.wakeups import ReplyPoller
from aioenv.errors import ClosedError, NoAsyncCallError
from aioenv.inprocess.backend import InProcessBackend
from aioenv.platform import INTERRUPTING, HeldSignals
from aioenv.process.async_resource import AsyncResource
from aioenv.process.env_thread import BLOCKING_LIMIT_S
from aioenv.sync.portal import MAX_PAUSE_S, Portal, PortalCall
from aioenv.tracing.timeline import Trace, raise_or_log
from aioenv.vector_env import AsyncVectorEnv
from aioenv.watching.viewer import Viewer

__all__ = [
    "BlockingResource",
    "BlockingStep",
    "BlockingStepper",
    "BlockingTrace",
    "BlockingVectorEnv",
    "BlockingViewer",
    "like_function",
    "like_method",
    "signed",
]


# How many turns of the loop, any loop, it takes to read replies that have arrived. A wait without time lasts as long.
_TURNS = 3


class BlockingStepper:
    """Step a started vector env, and send and receive.

    Args:
        portal: the portal of its loop, which pauses after calls from now on, if steps can run inline.
        envs: the vector env.
    """

    def __init__(self, portal: Portal, envs: AsyncVectorEnv) -> None:
        self.portal = portal
        self.envs = envs
        backend = envs._backend
        self.scheduler = scheduler = backend if isinstance(backend, RequestScheduler) else None
        inline = scheduler is not None and scheduler.needs_replies_only
        self.inline = scheduler.inline if scheduler is not None else None
        self.poller = ReplyPoller(scheduler.worker_pool.members if scheduler is not None and inline else ())
        portal.may_pause = self.poller.suffices if inline else None

    def step(self, actions: Any, *, listed: bool = False, timeout_s: float | None = None) -> StepResult:
        """Step all slots, and wait (see `AsyncVectorEnv.step`, and `RequestScheduler.step` for `listed`)."""
        if self.inline is not None and timeout_s is None:
            done: list[StepResult | BatchRequest] = []
            try:
                self.step_inline(actions, done, listed=listed)
                if done and isinstance(done[0], StepResult):
                    return done[0]
            except BaseException:
                self.leave(done)
                raise
            step = BlockingStep(self, listed, None, *done)
        else:
            step = BlockingStep(self, listed, check_timeout(timeout_s))
        try:
            step.send(actions, finish=True)
            step.wait()
            return step.result()
        except BaseException:
            step.leave()
            raise

    def begin(self, actions: Any, *, listed: bool = False) -> BlockingStep:
        """Send a step of all slots, and don't wait.

        Raises:
            Exception: as `step`, if the step could not be sent; `BlockingStep.result` raises other errors.
        """
        done: list[StepResult | BatchRequest] = []
        if self.inline is not None:
            try:
                self.step_inline(actions, done, listed=listed)
            except BaseException:
                self.leave(done)
                raise
        step = BlockingStep(self, listed, None, *done)
        try:
            step.send(actions, finish=False)
        except BaseException:
            step.leave()
            raise
        return step

    def step_inline(self, actions: Any, done: list[StepResult | BatchRequest], *, listed: bool = False) -> None:
        """Step on the caller's thread, if the envs live in this process and their steps are short.

        Ctrl-C and other signals are held back until the step is over. If a handler raises then, call `leave`.

        Args:
            actions: as for `step`.
            done: gets the result, or the request that it has become, which was left to `recv`. It stays empty if
                nothing was done.
            listed: as for `step`.
        """
        self.portal.run_while_idle(self._step_inline, actions, done, listed)

    def _step_inline(self, actions: Any, done: list[StepResult | BatchRequest], listed: bool) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        wait = self.envs._clock.envs.begin()
        try:
            with HeldSignals(*INTERRUPTING, twice=False):
                stepped = scheduler.step_inline(actions, listed=listed, limit_s=BLOCKING_LIMIT_S)
                if stepped is not None:
                    done.append(stepped)
                if isinstance(stepped, BatchRequest):
                    scheduler.leave(stepped)
        finally:
            wait.end()

    def leave(self, done: Sequence[StepResult | BatchRequest]) -> None:
        """Leave the result of an inline step to `recv`, if there is one: a handler has raised on its way back."""
        if done and isinstance(done[0], StepResult):
            with contextlib.suppress(ClosedError):
                self.portal.run(_take_back, self.envs, None, done[0])

    def use_envs_inline(self, function: Callable[[], None]) -> bool:
        """Call a function that uses envs of this process, if steps run on the caller's thread, or the caller is an env.

        Returns:
            Whether the function was called.
        """
        if self.portal.is_own_thread:
            function()
            return True
        return self.inline is not None and bool(self.portal.run_while_idle(self._use_envs_inline, function))

    def _use_envs_inline(self, function: Callable[[], None]) -> bool:
        if self.scheduler is None or not self.scheduler.can_use_envs:
            return False
        function()
        return True

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to some slots (see `AsyncVectorEnv.send`)."""
        self.portal.run(self._send, actions, slots)

    def _send(self, actions: Any, slots: Iterable[int] | None) -> None:
        self.envs.send(actions, slots)
        if not self.poller.suffices():
            self.portal.request_turn()

    def recv(self, min_slots: int = 1, max_slots: int | None = None, deadline_s: float | None = None) -> Ready:
        """Take results as they arrive (see `AsyncVectorEnv.recv`)."""
        ready: list[Ready] = []
        if deadline_s is None:
            check_recv(min_slots, max_slots, None)
            self.portal.run_inline(self._recv_inline, ready, min_slots, max_slots)
        return ready[0] if ready else self.portal.call(self.envs.recv, min_slots, max_slots, deadline_s=deadline_s)

    def _recv_inline(self, signals: list[Any], ready: list[Ready], min_slots: int, max_slots: int | None) -> None:
        """Take results into `ready`, if they arrive soon."""
        scheduler, clock = self.scheduler, self.envs._clock
        if scheduler is None or scheduler.closing or not scheduler.outstanding:
            return
        wanted = min_slots if max_slots is None else min(min_slots, max_slots)
        wait = clock.envs.begin()
        try:
            enough = self.poller.wait(lambda: scheduler.has_ready(wanted), _inline_limit(scheduler, None))
            if enough and not signals:
                ready.append(scheduler.take_ready(max_slots))
        finally:
            wait.end()


class BlockingStep:
    """One step of all slots, with the methods of a `PortalCall`. A signal handler may raise between any two lines.

    Between two inline runs the step is left to `recv`, so nothing is lost if the caller is interrupted or drops it.
    It holds no reference to the blocking vector env, which may be dropped, too.
    """

    def __init__(
        self,
        stepper: BlockingStepper,
        listed: bool,
        timeout_s: float | None,
        done: StepResult | BatchRequest | None = None,
    ) -> None:
        self._portal, self._envs, self._poller = stepper.portal, stepper.envs, stepper.poller
        self._scheduler = stepper.scheduler
        self._listed = listed
        self._timeout_s = timeout_s
        self._request: BatchRequest | None = None  # sent, and left to `recv`
        self._sent: list[tuple[BatchRequest, asyncio.Future[None]]] = []  # what the loop has sent and awaits
        self._call: PortalCall | None = None  # runs on the loop: the whole step, or the wait for the request
        self._waited_inline = self._ended_inline = False
        self._value: StepResult | None = None
        self._error: Exception | None = None
        if isinstance(done, StepResult):
            self._end_inline(done, None)
        elif done is not None:
            self._request, self._future = done, done.done

    def send(self, actions: Any, *, finish: bool) -> None:
        """Send the step; with `finish`, also take its result if it arrives soon."""
        if self._request is None and not self._ended_inline:
            self._portal.run_inline(self._send_inline, actions, finish)
        if self._request is not None or self._ended_inline:
            return
        # an env that runs on the loop's thread can't be interrupted: its step must be left to `recv` before it ends
        here = self._scheduler is not None and self._scheduler.dispatcher.here is not None
        if not finish or (here and self._timeout_s is None):
            sent = self._portal.call(_send_step, self._envs, actions, self._listed)
            if sent is not None:
                self._request, self._future = sent
                return
        self._call = self._portal.prepare(_step, self._envs, actions, self._listed, self._timeout_s, self._sent)
        self._call.post()
        if not finish:  # the caller may change the actions only after they were sent
            self._call.wait_started()

    def _send_inline(self, signals: list[Any], actions: Any, finish: bool) -> None:
        scheduler = self._scheduler
        if scheduler is None or not scheduler.can_submit_step or self._envs.closed:
            return
        request = scheduler.submit_step(actions, listed=self._listed)
        self._request, self._future = request, request.done
        if not finish or not self._finish_inline(scheduler, request, signals):
            scheduler.leave(request)
            if not self._poller.suffices():
                self._portal.request_turn()

    def _wait_inline(self, signals: list[Any], timeout_s: float | None) -> None:
        scheduler, request = self._scheduler, self._request
        if scheduler is None or request is None or scheduler.closing:
            return
        try:
            scheduler.take_up(request, self._future)
        except NoAsyncCallError as exc:
            self._end_inline(None, exc)
            return
        if not self._finish_inline(scheduler, request, signals, timeout_s):
            scheduler.leave(request)

    def _finish_inline(
        self, scheduler: RequestScheduler, request: BatchRequest, signals: list[Any], timeout_s: float | None = None
    ) -> bool:
        """Wait for the replies and take the result; return whether they arrived soon, and no signal arrived."""
        self._waited_inline = True
        wait = self._envs._clock.envs.begin()
        try:
            scheduler.dispatcher.poll(request)
            limit = _inline_limit(scheduler, self._timeout_s)
            limit = limit if timeout_s is None else min(limit, timeout_s)
            arrived = self._poller.wait(lambda: not request.open, limit)
        finally:
            wait.end()
        if not arrived or signals:  # their handlers may raise
            return False
        try:
            result = scheduler.step_result(request)
        except Exception as exc:
            self._end_inline(None, exc)
        else:
            self._end_inline(result, None)
        return True

    def _end_inline(self, value: StepResult | None, error: Exception | None) -> None:
        self._value, self._error = value, error
        self._ended_inline = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`; return whether the step has ended.

        With a limit of 0 seconds, replies that have arrived are still read.
        """
        if self._call is None and not self._ended_inline:
            start_s = perf_counter()
            if not self._waited_inline:
                self._portal.run_inline(self._wait_inline, timeout_s)
            if not self._ended_inline:
                self._call = self._portal.prepare(_result, self._envs, self._request, self._future, self._timeout_s)
                self._call.post()
                if timeout_s is not None:
                    self._call.wait_started(_TURNS)
                    timeout_s -= perf_counter() - start_s
        return self._ended_inline or self._call is None or self._call.wait(timeout_s)

    def cancel(self) -> None:
        """Leave the step to `recv`, if it has not ended."""
        if self._call is not None:
            self._call.cancel()

    def leave(self) -> None:
        """Leave the step to `recv`, also if it has ended, just before the caller was interrupted."""
        self.cancel()
        result = self._value if self._call is None else self._call.untaken
        if result is not None:
            sent = (self._request, self._future) if self._request is not None else next(iter(self._sent), None)
            with contextlib.suppress(ClosedError):
                self._portal.run(_take_back, self._envs, sent, result)

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` has ended the wait."""
        return self._call is not None and self._call.cancelled

    def result(self) -> StepResult:
        """Return or raise the step's result; only once."""
        if self._call is not None:
            return self._call.result()  # type: ignore[no-any-return]
        value, error = self._value, self._error
        self._value = self._error = None
        try:
            if error is not None:
                raise error
            assert value is not None
            return value
        finally:
            del error  # its traceback has this frame


def _inline_limit(scheduler: RequestScheduler, timeout_s: float | None) -> float:
    """Return how long an inline wait may last, in seconds, given the wait's own limit."""
    limit = scheduler.timeouts.limit(timeout_s)
    return MAX_PAUSE_S if limit is None else min(MAX_PAUSE_S, limit)


def _scheduler_of(envs: AsyncVectorEnv) -> RequestScheduler:
    """Return the scheduler of a vector env over workers, if it may be used now."""
    backend = envs._check_running()
    assert isinstance(backend, RequestScheduler)
    return backend


async def _step(
    envs: AsyncVectorEnv,
    actions: Any,
    listed: bool,
    timeout_s: float | None,
    sent: list[tuple[BatchRequest, asyncio.Future[None]]],
) -> StepResult:
    backend = envs._check_running()
    if not isinstance(backend, RequestScheduler) or (backend.table.paused is not None and not listed):
        return await envs.step(actions, timeout_s=timeout_s)
    wait = envs._clock.envs.begin()
    try:
        request = await backend.send_step(actions, listed=listed, timeout_s=timeout_s)
        sent.append((request, request.done))
        return await backend.step_outcome(request, timeout_s)
    finally:
        wait.end()


async def _send_step(
    envs: AsyncVectorEnv, actions: Any, listed: bool
) -> tuple[BatchRequest, asyncio.Future[None]] | None:
    """Send a step, and leave it to `recv`. If slots are paused, send nothing, and return None."""
    scheduler = _scheduler_of(envs)
    if scheduler.table.paused is not None:
        return None
    request = await scheduler.send_step(actions, listed=listed)
    scheduler.leave(request)
    return request, request.done


async def _result(
    envs: AsyncVectorEnv, request: BatchRequest, future: asyncio.Future[None], timeout_s: float | None
) -> StepResult:
    scheduler, wait = _scheduler_of(envs), envs._clock.envs.begin()
    try:
        scheduler.take_up(request, future)
        return await scheduler.step_outcome(request, timeout_s)
    finally:
        wait.end()


def _take_back(
    envs: AsyncVectorEnv, sent: tuple[BatchRequest, asyncio.Future[None]] | None, result: StepResult
) -> None:
    """Leave a result to `recv` that was handed out and has not reached the caller."""
    backend = envs._check_running()
    if isinstance(backend, InProcessBackend):
        backend.take_back(result)
    elif isinstance(backend, RequestScheduler):
        if sent is not None:
            backend.take_back(*sent)
        else:
            backend.take_back_inline(result)


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class BlockingResource:
    """Run an async resource on a loop thread of its own.

    Subclasses have a `close`, which calls `_end`. An object that the program drops is closed when it is collected, or
    at the end of the program.

    Attributes:
        closed: whether `close` has been called.
    """

    closed = True  # until there is something to close
    _inner: AsyncResource
    _portal: Portal

    def _start_on_thread(self, inner: AsyncResource) -> None:
        """Start the resource on a new thread; if that fails, end the thread, and raise the error."""
        self._inner = inner
        self._portal = Portal(f"the {inner._noun}")
        try:
            self._portal.call(inner._ensure_started)
        except BaseException:
            self._portal.close()
            raise
        self.closed = False
        inner._owned = True  # if both are collected as part of a cycle, either may come first
        _open.add(self)

    def _end(self, **how: Any) -> None:
        """End the workers and the loop thread. In a forked copy, which has neither, this does nothing.

        Args:
            **how: passed to the `close` of the resource.
        """
        if not self._portal.is_copy:
            with contextlib.suppress(ClosedError):  # another thread has closed it meanwhile
                self._portal.call(self._inner.close, **how)
        self._portal.close()

    def _close_dropped(self) -> None:
        """Close an object that the program has dropped without closing it."""
        if self.closed or self._inner._pid != os.getpid():  # a forked copy has no such thread
            return
        self.closed = True
        if sys.is_finalizing():  # the loop's thread runs no more, and the workers end with this process
            return
        if self._portal.is_own_thread:  # collected there, where waiting would be a deadlock
            self._inner.closed = True
            self._inner._abandon()
            self._portal.close()
        else:
            self._end()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can't be copied or pickled: it owns processes and a thread. Pickle what makes it, a function"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()  # type: ignore[attr-defined]  # its arguments differ between subclasses

    def __del__(self) -> None:
        self._close_dropped()


_open: weakref.WeakSet[BlockingResource] = weakref.WeakSet()


@atexit.register
def _close_all_dropped() -> None:
    """Close open objects at the end of the program, while threads and modules still work."""
    for each in list(_open):
        each._close_dropped()


class BlockingVectorEnv(BlockingResource, gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A `gymnasium.vector.VectorEnv` over an `AsyncVectorEnv` that runs on a thread of its own."""

    # as Gymnasium has them, but with types that strict checkers know
    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]

    def _start(self, envs: AsyncVectorEnv) -> None:
        """Start the workers, and take over the attributes of the vector env.

        Raises:
            WorkerStartError, SpaceMismatchError, RenderError: as the start of `AsyncVectorEnv`.
        """
        self._envs = envs
        self._start_on_thread(envs)
        self._stepper = BlockingStepper(self._portal, envs)
        self.num_envs = envs.num_envs
        self.single_observation_space = envs.single_observation_space
        self.observation_space = envs.observation_space
        self.single_action_space = envs.single_action_space
        self.action_space = envs.action_space
        self.metadata = envs.metadata
        self.render_mode = envs.render_mode
        self.autoreset_mode = envs.autoreset_mode

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes: pid, state and slots."""
        return self._envs.workers

    @property
    def backend(self) -> str:
        """Where the envs step (see `AsyncVectorEnv.backend`)."""
        return self._envs.backend

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute."""
        raise NotImplementedError

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every env; otherwise as `call`."""
        return self.call(name)

    @property
    def np_random_seed(self) -> Any:
        """The seed of every env's generator, fetched from the workers."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """A copy of every env's generator, fetched from the workers."""
        return self.get_attr("np_random")

    def stats(self, *, reset: bool = False) -> Stats:
        """Return how long the run waited for envs, for images and for the policy (see `AsyncVectorEnv.stats`)."""
        return self._envs.stats(reset=reset)

    def trace(self, path: str | os.PathLike[str]) -> BlockingTrace:
        """Collect a timeline until the end of a `with` block over it (see `AsyncVectorEnv.trace`)."""
        return BlockingTrace(self._portal, self._envs.trace, path)


class BlockingTrace:
    """A timeline that is collected until `stop` or the end of a `with` block.

    Args:
        portal: the loop thread of the traced object.
        begin: starts the collection, on the loop.
        path: the file's.

    Attributes:
        path: the file's.
    """

    def __init__(
        self, portal: Portal, begin: Callable[[str | os.PathLike[str]], Trace], path: str | os.PathLike[str]
    ) -> None:
        self._portal = portal
        self._trace: Trace = portal.run(begin, path)
        self.path: Path = self._trace.path

    @property
    def stopped(self) -> bool:
        """Whether the collection has ended, by `stop` or with the traced object."""
        return self._trace.stopped

    def stop(self) -> None:
        """Stop the collection, and write the file. Idempotent.

        Raises:
            OSError: if the file can't be written.
        """
        if not self.stopped:
            self._portal.run(self._trace.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with raise_or_log(error):
            self.stop()

    def __repr__(self) -> str:
        return repr(self._trace)


class BlockingViewer:
    """The page of a run (see `Viewer`), for blocking code; a context manager.

    Args:
        portal: the portal of the loop.
        watch: the page.
    """

    def __init__(self, portal: Portal, watch: Viewer) -> None:
        self._portal = portal
        self._watch = watch

    @property
    def url(self) -> str:
        """The address of the page, on this machine."""
        return self._watch.url

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that it shows, ascending."""
        return self._watch.slots

    @property
    def visitors(self) -> int:
        """How many browsers show the page."""
        return self._watch.visitors

    @property
    def dropped(self) -> int:
        """How many updates were dropped since the page was still busy with an earlier one."""
        return self._watch.dropped

    @property
    def closed(self) -> bool:
        """Whether it was closed, by itself or with the vector env."""
        return self._watch.closed

    def close(self) -> None:
        """End the page and its process. Idempotent."""
        with contextlib.suppress(ClosedError):  # with the vector env
            self._portal.call(self._watch.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._watch)

    def _repr_html_(self) -> str:
        return self._watch._repr_html_()


# ---------------------------------------------------------------- signatures


def signed(theirs: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a function that passes all of its arguments on, so that `help` and notebooks show their signature."""

    def decorate(ours: F) -> F:
        own = inspect.signature(ours)
        signature = inspect.signature(theirs).replace(return_annotation=own.return_annotation)
        ours.__signature__ = signature  # type: ignore[attr-defined]
        return ours

    return decorate


def like_function(theirs: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that passes all of its arguments to another one; type checkers see the other's signature."""
    return signed(theirs)


def like_method(
    theirs: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a method that passes all of its arguments to one of another class; otherwise as `like_function`."""
    return signed(theirs)
