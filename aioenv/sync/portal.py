"""A thread with an event loop, and the way for blocking code to have coroutines run on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aioenv.errors import ClosedError, LoopError
from aioenv.make import new_event_loop
from aioenv.sync.loop_handoff import LoopHandoff

__all__ = ["LOOK_S", "Portal", "PortalCall", "PostponedCall"]

T = TypeVar("T")


class Portal:
    """An event loop on a thread of its own, which lives until `close`.

    Worker processes are started from that thread, and the kernel ends them with it; so a portal must outlive what
    runs on it. The thread is a daemon: a program that forgets to close one still ends.

    Args:
        what: runs there, for errors.

    Attributes:
        may_park: asked after each call, on the loop, whether it may wait for visitors (see `visit`); None: never.
    """

    def __init__(self, what: str = "the portal") -> None:
        self._what = what
        self.may_park: Callable[[], bool] | None = None
        self._parks_soon = False
        self._loop = new_event_loop()
        self._parking = LoopHandoff(self._loop)
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="aioenv-portal", daemon=True)
        self._closed = False
        self._pid = os.getpid()
        self._calls: set[PortalCall] = set()  # that were posted and have not ended; whoever has the lock adds
        self._idle = threading.RLock()  # a finalizer may call from within a call
        self._thread.start()

    def _run(self) -> None:
        try:
            # the runner also ends what is left on the loop, and closes it, on this thread
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self._closed = True  # since when nobody adds any; who closes it may hold the lock, and wait for this thread
            for call in [*self._calls]:  # what other threads have sent came too late: they must not wait for it
                call.end_unheard()

    async def _serve(self) -> None:
        await self._stop.wait()

    @property
    def is_here(self) -> bool:
        """Whether this is the portal's own thread, or a visitor in its stead: neither may wait for it."""
        return threading.get_ident() in (self._thread.ident, self._parking.visitor)

    @property
    def is_copy(self) -> bool:
        """Whether this is a forked copy: the thread has stayed in the other process."""
        return os.getpid() != self._pid

    def call(self, function: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any) -> T:
        """Run a coroutine function on the loop, and wait for its result.

        If the wait is interrupted (Ctrl-C), the coroutine is cancelled, and its end is waited for first.

        Raises:
            LoopError: if this is called on the portal's own thread, where it would wait for itself for ever, or in a
                forked copy of the process, where nobody would answer.
            ClosedError: if the portal is closed.
        """
        call = self.prepare(function, *args, **kwargs)
        try:
            call.post()
            call.wait()
        except BaseException:
            call.cancel()
            raise
        return call.result()  # type: ignore[no-any-return]

    def prepare(self, function: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, **kwargs: Any) -> PortalCall:
        """As `call`, but to be posted, waited for and, if that is interrupted, cancelled by the caller.

        Raises:
            LoopError, ClosedError: as `call`.
        """
        if self._closed:  # first: a thread of today may have the number of one that has ended
            raise self.closed_error()
        if self.is_here:
            raise LoopError(
                "a blocking call was made on the loop thread that should serve it: it would wait for itself for "
                "ever. On a loop, use the async API (aioenv.AsyncVectorEnv)"
            )
        if self.is_copy:
            raise LoopError(
                f"this was made in process {self._pid}, and its loop thread has stayed there: process {os.getpid()} is "
                "a forked copy. Make another one here"
            )
        return PortalCall(self, self._loop, function, args, kwargs)

    def begin(self, function: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, **kwargs: Any) -> PortalCall:
        """Run a coroutine function on the loop, and wait only until it waits for something itself.

        Raises:
            LoopError, ClosedError: as `call`.
            BaseException: what the coroutine raises before it first waits.
        """
        call = self.prepare(function, *args, **kwargs)
        try:
            call.post()
            call.wait_begun()
            if call.failed:
                call.result()
        except BaseException:
            call.cancel()
            raise
        return call

    def closed_error(self) -> ClosedError:
        """What is raised once it is closed."""
        return ClosedError.of(self._what)

    def enlist(self, call: PortalCall) -> bool:
        """Note a call that is about to be sent; whether it still can be."""
        with self._idle:
            if not self._closed:
                self._calls.add(call)
            return not self._closed

    def has(self, call: PortalCall) -> bool:
        """Whether a call was posted and has not ended."""
        return call in self._calls

    def send(self, function: Callable[..., object], *args: Any) -> None:
        """As `post`, but raises RuntimeError if the loop is closed."""
        self._loop.call_soon_threadsafe(function, *args)
        self._parking.wake()

    def note_end(self, call: PortalCall) -> None:
        """A call has ended."""
        self._calls.discard(call)
        if self.may_park is not None and not self._closed:
            self._park_soon()

    def _park_soon(self) -> None:
        if not self._parks_soon:  # twice in a row, what comes between would wait for as long again
            self._parks_soon = True
            self._loop.call_soon(self._park)

    def _park(self) -> None:
        self._parks_soon = False
        if self._calls or self._closed or self.may_park is None or not self.may_park():
            return
        # in debug mode a loop looks which thread uses it
        if not (self._loop.get_debug() or self._parking.park()):
            self._park_soon()

    def visit(self, function: Callable[..., object], *args: Any) -> bool:
        """Do on the caller's thread what may be done on the loop only: while the loop stands still for it.

        Args:
            function: a plain function that is over soon, called as `LoopHandoff.visit` does.
            *args: what it is called with besides.

        Returns:
            Whether it was called: False if the loop does not stand still.
        """
        return not self._closed and not self.is_copy and self._parking.visit(function, *args)

    def hurry(self) -> None:
        """For visitors: have the loop's thread come back when they leave, since something can't wait until it does."""
        self._parking.wake()

    def here(self, function: Callable[..., T], *args: Any) -> T | None:
        """Call a plain function on the caller's thread while nothing that was called runs on the loop, nor can begin.

        Returns:
            What the function does; None, without a call, if the loop is not idle, or not there.
        """
        if self._closed or self.is_here or self.is_copy:
            return None
        with self._idle:
            return None if self._calls else function(*args)

    def run_soon(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a plain function on the loop's thread, or as a visitor of it, and wait for its result."""
        result: list[Any] = []
        if self.visit(lambda _: result.append(function(*args))):
            return result[0]

        async def run() -> Any:
            return function(*args)

        return self.call(run)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have a plain function run on the loop's thread, without waiting for it.

        Raises:
            ClosedError: if the portal is closed.
        """
        try:
            self.send(function, *args)
        except RuntimeError:
            raise self.closed_error() from None

    def close(self) -> None:
        """Stop the loop and end the thread, or wait until another has. Idempotent."""
        if self.is_copy:
            self._closed = True
            return
        with self._idle:
            self._closed = True
        with contextlib.suppress(RuntimeError):  # its loop is closed already
            self.send(self._stop.set)  # each time: whoever came first may have been interrupted here
        if not self.is_here:
            self._thread.join()


# How often a thread that waits looks for signals: one that comes just before it blocks is not seen until it wakes.
LOOK_S = 0.5


class PortalCall:
    """One call on its way to the loop and back. A signal handler may raise between any two lines of its methods.

    Bare locks wake the caller sooner than a condition would. The task ends with the loop's thread: where one is
    forgotten Python code runs, and a signal's exception would be lost in it.

    Attributes:
        cancelled: whether the coroutine has ended by being cancelled.
    """

    __slots__ = (
        "_args",
        "_asked_to_end",
        "_ended",
        "_error",
        "_finished",
        "_function",
        "_kwargs",
        "_loop",
        "_portal",
        "_task",
        "_value",
        "cancelled",
    )

    def __init__(
        self,
        portal: Portal,
        loop: asyncio.AbstractEventLoop,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._portal = portal
        self._loop = loop
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._task: asyncio.Task[Any] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self.cancelled = self._asked_to_end = False
        self._finished = threading.Lock()
        self._finished.acquire()
        self._ended = False

    def post(self) -> None:
        """Send it to the loop."""
        if self._portal.enlist(self):
            self._send(self._start)
        else:
            self.end_unheard()

    def _send(self, function: Callable[[], object]) -> None:
        try:
            self._portal.send(function)
        except RuntimeError:
            if not self._loop.is_closed():  # else the thread ends this call, too
                raise

    def end_unheard(self) -> None:
        """The loop has ended: nothing that was sent to it will be done."""
        if not self._ended:
            self._error = self._portal.closed_error()
            self._end()

    def _start(self) -> None:
        try:
            coroutine = self._function(*self._args, **self._kwargs)
        except BaseException as exc:  # arguments that it does not have: nobody may wait for ever
            self._error = exc
            self._end()
            return
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        self.cancelled = task.cancelled() and self._asked_to_end
        if task.cancelled():
            # (by itself it is cancelled with its loop alone)
            self._error = asyncio.CancelledError() if self.cancelled else self._portal.closed_error()
        else:
            self._error = task.exception()
            self._value = None if self._error is not None else task.result()
        self._end()

    def _end(self) -> None:
        self._portal.note_end(self)
        self._ended = True
        self._finished.release()

    def wait_begun(self, turns: int = 1) -> None:
        """Wait until the coroutine waits for something itself, or has ended; more `turns` of the loop: a bit longer."""
        begun = threading.Lock()
        begun.acquire()

        def turn(left: int) -> None:
            if left:
                self._loop.call_soon(turn, left - 1)
            else:
                begun.release()

        # callbacks run in turn: `_start` first, then the task's first step, then this
        self._send(lambda: turn(turns))
        while not begun.acquire(timeout=LOOK_S) and not self._ended:
            pass

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`; whether it has come."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        patience = LOOK_S
        while not self._ended:  # an interrupted wait may have kept the lock
            if deadline is not None:
                patience = max(0.0, min(LOOK_S, deadline - time.monotonic()))
            if self._finished.acquire(timeout=patience):
                self._finished.release()  # for whoever waits again
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def cancel(self) -> None:
        """Cancel the coroutine if it has begun and not ended, and wait for its end."""
        if self._portal.has(self):
            self._send(self._cancel)
            self.wait()

    def _cancel(self) -> None:
        self._asked_to_end = True
        if self._task is not None:
            self._task.cancel()
        elif not self._ended:  # `_start` would have come before this, had it been posted
            self._end()

    @property
    def failed(self) -> bool:
        """Whether the coroutine has ended with an exception."""
        return self._error is not None and not self.cancelled

    def result(self) -> Any:
        """What the coroutine returned, or raised; to be asked once."""
        value, error = self._value, self._error
        self._value = self._error = None
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # its traceback has this frame


class PostponedCall:
    """What stands for a call that is made when it is waited for, on the thread that waits.

    Args:
        work: the call.
    """

    __slots__ = ("_value", "_work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def wait(self) -> bool:
        """Make it; raises what it raises."""
        self._value = self._work()
        return True

    def cancel(self) -> None:
        """It has not begun, or is over."""

    def result(self) -> Any:
        """What it returned."""
        return self._value
