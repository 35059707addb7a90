"""Steps of blocking code: made as visitors of the loop where that is possible, else over its thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import perf_counter
from typing import Any

from aioenv.core.arguments import check_recv, check_timeout
from aioenv.core.reply_poller import ReplyPoller
from aioenv.core.requests import BatchRequest
from aioenv.core.results import Ready, StepResult
from aioenv.core.scheduler import RequestScheduler
from aioenv.errors import NoAsyncCallError
from aioenv.sync.loop_handoff import PARK_S
from aioenv.sync.portal import Portal, PortalCall
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["BlockingStep", "BlockingStepper"]

# So many turns of the loop read what is in, whichever loop it is, before a wait that had no time is over.
_TURNS = 3


class BlockingStepper:
    """Steps a started vector env.

    Args:
        portal: where its loop is. It waits for visitors from now on, if steps can be made so.
        envs: the vector env.
    """

    def __init__(self, portal: Portal, envs: AsyncVectorEnv) -> None:
        self.portal = portal
        self.envs = envs
        schedule = envs._scheduler
        visits = isinstance(schedule, RequestScheduler) and schedule.needs_replies_only
        self.here = ReplyPoller(schedule.fleet.members if schedule is not None and visits else ())
        portal.may_park = self.here.suffices if visits else None

    def step(self, actions: Any, *, given: bool = False, timeout_s: float | None = None) -> StepResult:
        """Step all slots, and wait (see `AsyncVectorEnv.step`, and `RequestScheduler.step` for `given`)."""
        step = BlockingStep(self, given, check_timeout(timeout_s))
        try:
            step.begin(actions, go_on=True)
            step.wait()
        except BaseException:
            step.cancel()
            raise
        return step.result()

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to some slots (see `AsyncVectorEnv.send`)."""
        self.portal.run_soon(self._send, actions, slots)

    def _send(self, actions: Any, slots: Iterable[int] | None) -> None:
        self.envs.send(actions, slots)
        if not self.here.suffices():
            self.portal.hurry()

    def recv(self, min_slots: int = 1, max_slots: int | None = None, deadline_s: float | None = None) -> Ready:
        """Take results as they come (see `AsyncVectorEnv.recv`)."""
        ready: list[Ready] = []
        if deadline_s is None:
            check_recv(min_slots, max_slots, None)
            self.portal.visit(self._recv_here, ready, min_slots, max_slots)
        return ready[0] if ready else self.portal.call(self.envs.recv, min_slots, max_slots, deadline_s=deadline_s)

    def _recv_here(self, signals: list[Any], ready: list[Ready], min_slots: int, max_slots: int | None) -> None:
        schedule, clock = self.envs._scheduler, self.envs._clock
        if schedule is None or schedule.closing or not schedule.outstanding:
            return
        wanted = min_slots if max_slots is None else min(min_slots, max_slots)
        wait = clock.envs.begin()
        try:
            enough = self.here.wait(lambda: schedule.has_ready(wanted), _limit(schedule, None))
            if enough and not signals:
                ready.append(schedule.take(max_slots))
        finally:
            wait.end()

    def begin(self, actions: Any, *, given: bool = False) -> BlockingStep:
        """Send a step of all slots.

        Raises:
            Exception: as `step`, if it could not be sent; `BlockingStep.result` raises what else goes wrong.
        """
        step = BlockingStep(self, given, None)
        try:
            step.begin(actions, go_on=False)
        except BaseException:
            step.cancel()
            raise
        return step


class BlockingStep:
    """A step that was begun, with the methods of a `PortalCall`. A signal handler may raise between any two lines.

    Between two visits it belongs to nobody: who is interrupted, or forgets it, has left it to `recv`. It does not know
    the blocking vector env, which may be forgotten, too.
    """

    def __init__(self, by: BlockingStepper, given: bool, timeout_s: float | None) -> None:
        self._portal, self._envs, self._here = by.portal, by.envs, by.here
        self._given = given
        self._timeout_s = timeout_s
        self._exchange: BatchRequest | None = None  # what was sent by a visitor
        self._call: PortalCall | None = None  # what was asked of the loop: all of it, or to wait for the exchange
        self._late = self._over = False  # a visitor has waited for it; it has ended there
        self._value: StepResult | None = None
        self._error: Exception | None = None

    def begin(self, actions: Any, *, go_on: bool) -> None:
        """Send it; with `go_on`, wait for its end as well if that is not far."""
        self._portal.visit(self._begin_here, actions, go_on)
        if self._exchange is not None or self._over:
            return
        if not go_on:
            begun = self._portal.call(_begin, self._envs, actions, self._given)
            if begun is not None:
                self._exchange, self._done = begun
                return
        self._call = self._portal.prepare(_step, self._envs, actions, self._given, self._timeout_s)
        self._call.post()
        if not go_on:  # until it is sent, whoever has the actions must not change them
            self._call.wait_begun()

    def _begin_here(self, signals: list[Any], actions: Any, go_on: bool) -> None:
        schedule = self._envs._scheduler
        if schedule is None or not schedule.steps_here or self._envs.closed:
            return
        exchange = schedule.begin_step(actions, given=self._given)
        self._exchange, self._done = exchange, exchange.done
        if not go_on or not self._finish_here(schedule, exchange, signals):
            schedule.leave(exchange)
            if not self._here.suffices():
                self._portal.hurry()

    def _wait_here(self, signals: list[Any], timeout_s: float | None) -> None:
        schedule, exchange = self._envs._scheduler, self._exchange
        if schedule is None or exchange is None or schedule.closing:
            return
        try:
            schedule.take_up(exchange, self._done)
        except NoAsyncCallError as exc:
            self._end(None, exc)
            return
        if not self._finish_here(schedule, exchange, signals, timeout_s):
            schedule.leave(exchange)

    def _finish_here(
        self, schedule: RequestScheduler, exchange: BatchRequest, signals: list[Any], timeout_s: float | None = None
    ) -> bool:
        """Wait for the replies and take the result; whether that was so soon, and no signal has come."""
        self._late = True
        wait = self._envs._clock.envs.begin()
        try:
            schedule.dispatch.poll(exchange)
            limit = _limit(schedule, self._timeout_s)
            limit = limit if timeout_s is None else min(limit, timeout_s)
            all_in = self._here.wait(lambda: not exchange.open, limit)
        finally:
            wait.end()
        if not all_in or signals:  # whose handlers may raise
            return False
        try:
            result = schedule.step_result(exchange)
        except Exception as exc:
            self._end(None, exc)
        else:
            self._end(result, None)
        return True

    def _end(self, value: StepResult | None, error: Exception | None) -> None:
        self._value, self._error = value, error
        self._over = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`; whether it has come: if all is in, with 0, too."""
        if self._call is None and not self._over:
            began = perf_counter()
            if not self._late:
                self._portal.visit(self._wait_here, timeout_s)
            if not self._over:
                self._call = self._portal.prepare(_outcome, self._envs, self._exchange, self._done, self._timeout_s)
                self._call.post()
                if timeout_s is not None:
                    self._call.wait_begun(_TURNS)
                    timeout_s -= perf_counter() - began
        return self._over or self._call is None or self._call.wait(timeout_s)

    def cancel(self) -> None:
        """Leave it to `recv`, if it has not ended."""
        if self._call is not None:
            self._call.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether it has ended by being cancelled."""
        return self._call is not None and self._call.cancelled

    def result(self) -> StepResult:
        """What came of it; raises what went wrong. To be asked once."""
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


def _limit(schedule: RequestScheduler, timeout_s: float | None) -> float:
    """How long a visitor waits, in seconds, if that was said of the wait."""
    whole = schedule.patience.limit(timeout_s)
    return PARK_S if whole is None else min(PARK_S, whole)


async def _step(envs: AsyncVectorEnv, actions: Any, given: bool, timeout_s: float | None) -> StepResult:
    if given:
        return await envs._check_running().step(actions, given=True, timeout_s=timeout_s)
    return await envs.step(actions, timeout_s=timeout_s)


async def _begin(envs: AsyncVectorEnv, actions: Any, given: bool) -> tuple[BatchRequest, asyncio.Future[None]] | None:
    """Send a step, and leave it; None, and nothing was sent, if there are slots that don't take part."""
    schedule = envs._check_running()
    if schedule.table.paused is not None:
        return None
    exchange = await schedule.send_step(actions, given=given)
    schedule.leave(exchange)
    return exchange, exchange.done


async def _outcome(
    envs: AsyncVectorEnv, exchange: BatchRequest, done: asyncio.Future[None], timeout_s: float | None
) -> StepResult:
    schedule, wait = envs._check_running(), envs._clock.envs.begin()
    try:
        schedule.take_up(exchange, done)
        return await schedule.step_outcome(exchange, timeout_s)
    finally:
        wait.end()
