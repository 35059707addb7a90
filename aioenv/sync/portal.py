"""`Portal`: an event loop on a thread of its own, and how blocking code runs work on it.

A call goes to the loop's thread and back (`PortalCall`). Or the loop's thread pauses, and the caller runs a function on
the loop in its place (`LoopHandoff`). The second way saves two thread switches a step.
"""

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
from aioenv.platform import HeldSignals
from aioenv.process.env_thread import JobThread

__all__ = ["MAX_PAUSE_S", "SIGNAL_CHECK_S", "DeferredCall", "LoopHandoff", "Portal", "PortalCall"]

T = TypeVar("T")

# How long the loop's thread stands still at most, in seconds: longer than most steps take. Its other work waits as
# long: output of envs, a worker that has died between two steps.
MAX_PAUSE_S = 10e-3
# How often a waiting thread checks for signals, in seconds: one that arrives just before the thread blocks is not seen
# until it wakes up.
SIGNAL_CHECK_S = 0.5


class LoopHandoff:
    """Hand a loop over to another thread while the loop's own thread stands still.

    Waking a thread takes 50 µs and more, so a call to the loop's thread and back costs 100 µs before it does anything.
    Instead, the thread pauses in a callback of its loop. Nothing else runs on the loop then, and another thread may
    run a function there that otherwise only the loop's thread may run.

    Args:
        loop: the loop.

    Attributes:
        borrower: the identifier of the thread that uses the loop; None if there is none.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ownership = threading.Lock()  # held by the thread that may use the loop
        self._ownership.acquire()  # the loop's thread, unless it pauses
        self._paused = False
        self._turn_requested = False
        # the pause ends when this is released; an Event would stay locked if a signal handler raised inside it
        self._wakeup = threading.Lock()
        self.borrower: int | None = None

    def pause(self) -> bool:
        """Stand still on the loop's thread until it is needed, for `MAX_PAUSE_S` at most, and until a borrower ends.

        Returns:
            Whether it stood still. False if a turn was requested before: work on the loop comes first.
        """
        self._wakeup.acquire(blocking=False)  # released by an earlier request
        if self._turn_requested:
            self._turn_requested = False
            return False
        self._ownership.release()
        self._paused = True
        self._wakeup.acquire(timeout=MAX_PAUSE_S)
        self._paused = False  # no further borrower may overtake the thread while it waits for one
        self._ownership.acquire()
        return True

    def request_turn(self) -> None:
        """End the pause: another thread has put work on the loop."""
        self._turn_requested = True
        if self._wakeup.locked():
            with contextlib.suppress(RuntimeError):  # another thread has released it
                self._wakeup.release()

    def run_inline(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a plain function on this thread, in place of the loop's thread, if that pauses.

        Signal handlers don't interrupt the function: they run afterwards, and may raise then.

        Args:
            function: called with the list of signals that wait (see `HeldSignals`), and with `args`.
            *args: for the function.

        Returns:
            Whether the function was called.
        """
        if not self._paused or self._turn_requested:  # work that was put on the loop before comes first
            return False
        with HeldSignals() as signals:
            if not self._ownership.acquire(blocking=False):
                return False
            own_loop = asyncio._get_running_loop()  # in a notebook
            self.borrower = threading.get_ident()
            asyncio._set_running_loop(self._loop)
            try:
                function(signals, *args)
            finally:
                asyncio._set_running_loop(own_loop)
                self.borrower = None
                self._ownership.release()
        return True


class Portal:
    """An event loop on a thread of its own, which lives until `close`.

    Worker processes are started from that thread, and the kernel ends them when it ends. So a portal must outlive the
    objects that run on it. It is a daemon thread: a program that forgets to close a portal still ends.

    Args:
        what: runs there, for errors.

    Attributes:
        may_pause: called on the loop after each call: whether the loop may be handed over (see `run_inline`). None:
            never.
    """

    def __init__(self, what: str = "the portal") -> None:
        self._what = what
        self.may_pause: Callable[[], bool] | None = None
        self._pause_scheduled = False
        self._closed = False
        self._pid = os.getpid()
        self._calls: set[PortalCall] = set()  # posted and not ended; calls are added under the lock
        self._calls_lock = threading.RLock()  # reentrant: a finalizer may call from within a call
        self._idle_user: int | None = None  # the thread that is in `run_while_idle`
        started = False
        try:
            with HeldSignals():  # a thread whose start was interrupted can't be joined
                self._loop = new_event_loop()
                self._handoff = LoopHandoff(self._loop)
                self._stop = asyncio.Event()
                self._thread = threading.Thread(target=self._run, name="aioenv-portal", daemon=True)
                self._thread.start()
                started = True
        except BaseException:
            if started:
                self.close()
            raise

    def _run(self) -> None:
        """Run the loop: the body of the thread."""
        try:
            # the runner also cancels the tasks that are left, and closes the loop, on this thread
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self._closed = True  # without the lock, which a closing thread may hold while it joins this one
            for call in [*self._calls]:  # they came too late: other threads must not wait for them
                call.fail_closed()

    async def _serve(self) -> None:
        await self._stop.wait()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the portal's thread, has borrowed its loop, or is an env: none may wait for it."""
        thread = threading.current_thread()
        if thread is self._thread or threading.get_ident() in (self._handoff.borrower, self._idle_user):
            return True
        return isinstance(thread, JobThread) and thread.loop is self._loop

    @property
    def is_copy(self) -> bool:
        """Whether this is a forked copy, whose thread has stayed in the other process."""
        return os.getpid() != self._pid

    def refuse_copy(self) -> None:
        """Raise a LoopError if this is a forked copy."""
        if self.is_copy:
            raise LoopError(
                f"this was made in process {self._pid}, and its loop thread has stayed there: process {os.getpid()} is "
                "a forked copy. Make another one here"
            )

    # ------------------------------------------------------------ calls

    def call(self, function: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any) -> T:
        """Run a coroutine function on the loop, and wait for its result.

        If the wait is interrupted (Ctrl-C), the coroutine is cancelled, and its end is waited for first.

        Raises:
            LoopError: if this is called on the portal's own thread or by an env that runs on it (which would be a
                deadlock), or in a forked copy of the process, where the loop doesn't run.
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
        """Make a call that the caller posts, waits for and, if it is interrupted, cancels.

        Raises:
            LoopError, ClosedError: as `call`.
        """
        if self._closed:  # checked first: a new thread may have the identifier of one that has ended
            raise self.closed_error()
        if self.is_own_thread:
            raise LoopError(
                "a blocking call was made on the loop thread that should serve it, or by an env of this vector env: it "
                "would wait for itself for ever. On a loop, use the async API (aioenv.AsyncVectorEnv)"
            )
        self.refuse_copy()
        return PortalCall(self, self._loop, function, args, kwargs)

    def start(self, function: Callable[..., Coroutine[Any, Any, Any]], /, *args: Any, **kwargs: Any) -> PortalCall:
        """Run a coroutine function on the loop, and wait until it first awaits something.

        Raises:
            LoopError, ClosedError: as `call`.
            BaseException: errors of the coroutine before that.
        """
        call = self.prepare(function, *args, **kwargs)
        try:
            call.post()
            call.wait_started()
            if call.failed:
                call.result()
        except BaseException:
            call.cancel()
            raise
        return call

    def closed_error(self) -> ClosedError:
        """Return the error of calls after `close`."""
        return ClosedError.of(self._what)

    def register(self, call: PortalCall) -> bool:
        """Note a call that is about to be sent; return whether the loop still takes calls."""
        with self._calls_lock:
            if not self._closed:
                self._calls.add(call)
            return not self._closed

    def is_pending(self, call: PortalCall) -> bool:
        """Return whether a call was posted and has not ended."""
        return call in self._calls

    def unregister(self, call: PortalCall) -> None:
        """Note that a call has ended, and let the loop pause for the next one."""
        self._calls.discard(call)
        if self.may_pause is not None and not self._closed:
            self._schedule_pause()

    def send(self, function: Callable[..., object], *args: Any) -> None:
        """Run a plain function on the loop's thread, without waiting for it; RuntimeError if the loop is closed."""
        self._loop.call_soon_threadsafe(function, *args)
        self._handoff.request_turn()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run a plain function on the loop's thread, without waiting for it.

        Raises:
            ClosedError: if the portal is closed.
        """
        try:
            self.send(function, *args)
        except RuntimeError:
            raise self.closed_error() from None

    # ------------------------------------------------------------ the loop, handed over

    def _schedule_pause(self) -> None:
        if not self._pause_scheduled:  # two in a row would delay the work between them twice
            self._pause_scheduled = True
            self._loop.call_soon(self._pause)

    def _pause(self) -> None:
        self._pause_scheduled = False
        if self._calls or self._closed or self.may_pause is None or not self.may_pause():
            return
        # a loop in debug mode checks which thread uses it
        if not (self._loop.get_debug() or self._handoff.pause()):
            self._schedule_pause()

    def run_inline(self, function: Callable[..., object], *args: Any) -> bool:
        """Run a short, plain function on the caller's thread as if on the loop, while the loop pauses.

        Args:
            function: called as `LoopHandoff.run_inline` does.
            *args: for the function.

        Returns:
            Whether the function was called: False if the loop does not pause, or the caller is in `run_while_idle`.
        """
        if self._closed or self.is_copy or self._idle_user == threading.get_ident():
            return False
        return self._handoff.run_inline(function, *args)

    def request_turn(self) -> None:
        """Let the loop run as soon as an inline function is over, for work that can't wait until the pause ends."""
        self._handoff.request_turn()

    def run_while_idle(self, function: Callable[..., T], *args: Any) -> T | None:
        """Call a plain function on the caller's thread while no call runs on the loop, and none can start.

        Returns:
            The function's result. None, without a call, if the loop is not idle or not there.
        """
        if self._closed or self.is_copy or self.is_own_thread:
            return None
        with self._calls_lock:
            if self._calls:
                return None
            try:
                self._idle_user = threading.get_ident()
                return function(*args)
            finally:
                self._idle_user = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a plain function on the loop, inline if it pauses, and wait for its result."""
        result: list[Any] = []
        if self.run_inline(lambda _: result.append(function(*args))):
            return result[0]

        async def on_loop() -> Any:
            return function(*args)

        return self.call(on_loop)

    def close(self) -> None:
        """Stop the loop and end the thread, or wait until another thread has. Idempotent."""
        if self.is_copy:
            self._closed = True
            return
        with self._calls_lock:
            self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.send(self._stop.set)  # each time: an earlier caller may have been interrupted here
        if not self.is_own_thread:
            self._thread.join()


class PortalCall:
    """One call on its way to the loop and back. A signal handler may raise between any two lines of its methods.

    Bare locks wake the caller sooner than a condition would. The task is dropped on the loop's thread: dropping it may
    run Python code, and a signal handler's exception would be lost there.

    Attributes:
        cancelled: whether `cancel` has ended the coroutine.
    """

    __slots__ = (
        "_args",
        "_cancel_requested",
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
        self.cancelled = self._cancel_requested = False
        self._finished = threading.Lock()
        self._finished.acquire()
        self._ended = False

    def post(self) -> None:
        """Send the call to the loop."""
        if self._portal.register(self):
            self._send(self._start)
        else:
            self.fail_closed()

    def _send(self, function: Callable[[], object]) -> None:
        try:
            self._portal.send(function)
        except RuntimeError:
            if not self._loop.is_closed():  # if it is, the ending thread fails this call, too
                raise

    def fail_closed(self) -> None:
        """End the call with a ClosedError: the loop has ended without running it."""
        if not self._ended:
            self._error = self._portal.closed_error()
            self._end()

    def _start(self) -> None:
        try:
            coroutine = self._function(*self._args, **self._kwargs)
        except BaseException as exc:  # wrong arguments, for example: the caller must not wait
            self._error = exc
            self._end()
            return
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        self.cancelled = task.cancelled() and self._cancel_requested
        if task.cancelled():
            # (without a request a task is cancelled only with its loop)
            self._error = asyncio.CancelledError() if self.cancelled else self._portal.closed_error()
        else:
            self._error = task.exception()
            self._value = None if self._error is not None else task.result()
        self._end()

    def _end(self) -> None:
        self._portal.unregister(self)
        self._ended = True
        self._finished.release()

    def wait_started(self, turns: int = 1) -> None:
        """Wait until the coroutine awaits something or has ended, and for `turns` - 1 more turns of the loop."""
        started = threading.Lock()
        started.acquire()

        def turn(left: int) -> None:
            if left:
                self._loop.call_soon(turn, left - 1)
            else:
                started.release()

        # callbacks run in order: `_start` first, then the task's first step, then this
        self._send(lambda: turn(turns))
        while not started.acquire(timeout=SIGNAL_CHECK_S) and not self._ended:
            pass

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`; return whether the call has ended.

        Raises:
            LoopError: if this is a forked copy of a call that had not ended.
        """
        if not self._ended:
            self._portal.refuse_copy()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = SIGNAL_CHECK_S
        while not self._ended:  # checked again, since an interrupted wait may have kept the lock
            if deadline is not None:
                pause_s = max(0.0, min(SIGNAL_CHECK_S, deadline - time.monotonic()))
            if self._finished.acquire(timeout=pause_s):
                self._finished.release()  # for a later wait
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def cancel(self) -> None:
        """Cancel the coroutine if it has not ended, and wait for its end."""
        if self._portal.is_pending(self) and not self._portal.is_copy:
            self._send(self._cancel)
            self.wait()

    def _cancel(self) -> None:
        self._cancel_requested = True
        if self._task is not None:
            self._task.cancel()
        elif not self._ended:  # `_start` would have run before this, had it been posted
            self._end()

    @property
    def failed(self) -> bool:
        """Whether the coroutine has ended with an exception."""
        return self._error is not None and not self.cancelled

    @property
    def untaken(self) -> Any:
        """The result that `result` would return; None if there is none, or it was returned."""
        return self._value

    def result(self) -> Any:
        """Return or raise the coroutine's result; only once."""
        value, error = self._value, self._error
        self._value = self._error = None
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error  # its traceback has this frame


class DeferredCall:
    """A call that is made on the waiting thread, when it is waited for; has the methods of a `PortalCall`.

    Args:
        work: the call.
    """

    __slots__ = ("_value", "_work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def wait(self) -> bool:
        """Make the call; raises its exceptions."""
        self._value = self._work()
        return True

    def cancel(self) -> None:
        """Do nothing: the call has not started, or is over."""

    def result(self) -> Any:
        """Return the result."""
        return self._value
