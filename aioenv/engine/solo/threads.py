"""A thread for one env, and the choice between it and the loop's own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from aioenv.wire.messages import reason_of

__all__ = ["SHORT_S", "TURN_S", "EnvThread", "Pace", "yield_to_loop"]

# What takes less comes to the loop itself, and leaves it when it takes twice as long: less than the half millisecond
# for which anything may keep the loop, and after which it turns to its other tasks. In seconds.
SHORT_S = 200e-6
TURN_S = 500e-6
# What takes so long is moved to the thread at once, in seconds.
_LONG_S = 10e-3
# The moving mean: what the newest weighs, how many times the mean it may count (one that was preempted says nothing
# about the rest), and where it begins, in limits.
_WEIGHT = 1 / 8
_MOST = 3.0
_BEGIN = 4.0
# How long the thread may still take to end after its last job, in seconds.
_JOIN_S = 1.0
# How many rings are heard at once; and what a ring does not do, which a socket of the loop's does not do anyway.
_RINGS = 4096
_DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
# Which CPU the caller is on, where threads can be told theirs (Linux). Not a CDLL, which would give the GIL away.
_this_cpu: Callable[[], int] | None = None
if hasattr(os, "sched_setaffinity"):
    _this_cpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None)


class EnvThread:
    """One thread, which does one job after the other until it is told to end, and tells the loop what came of it.

    Each wakes the other through a socket, and the thread is woken where the loop runs: on a CPU that idles it would
    take the kernel longer, 60 µs of a virtual machine's. It is a daemon: what hangs in it can't keep the program from
    ending.

    Attributes:
        jobs: how many are being done, wait, or have been done without the loop knowing it yet.
        ended: whether the last job is done.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._todo: deque[Callable[[], object] | None] = deque()
        self._told: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._bell, bell = socket.socketpair()
        self._hang_up = weakref.finalize(self, self._bell.close)
        self._hang_up.atexit = False  # exit hooks may yet want its answer
        self._bell.setblocking(False)
        self._wake_loop: Callable[[], object] = partial(_ring, bell)
        try:
            self._loop.add_reader(self._bell.fileno(), self._hear)
        except NotImplementedError:  # asyncio's own loop on Windows
            self._wake_loop = partial(self._loop.call_soon_threadsafe, self._hear)
        self._thread = threading.Thread(target=_work, args=(self._todo, bell), name="aioenv-env", daemon=True)
        self.jobs = 0
        self.ended = False
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()

    def submit(self, work: Callable[[], Any], on_done: Callable[[Any, BaseException | None], None]) -> None:
        """Have something done after what was submitted before.

        Args:
            work: what to do.
            on_done: called on the loop, with what `work` returned, or what it raised.
        """
        cpus = None if self.jobs else self._beckon()
        self.jobs += 1

        def job() -> None:
            value, error = None, None
            try:
                if cpus is not None:  # before it starts threads of its own, which have what it has
                    _run_on(cpus)
                value = work()
            except BaseException as exc:  # SystemExit, say: it must not end the thread
                error = exc
            self._tell(self._report, on_done, value, error)

        self._todo.append(job)
        _ring(self._bell)

    def _beckon(self) -> set[int] | None:
        """Have the thread woken on this CPU, to which the loop comes back, too; gives the CPUs that it has else."""
        if _this_cpu is None or (thread := self._thread.native_id) is None:
            return None
        try:
            cpus = os.sched_getaffinity(thread)
            if len(cpus) > 1:
                os.sched_setaffinity(thread, (_this_cpu(),))
                return cpus
        except OSError:  # not allowed, or it has ended
            pass
        return None

    def _report(self, on_done: Callable[..., None], value: Any, error: BaseException | None) -> None:
        self.jobs -= 1
        on_done(value, error)

    def ask(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Have something done; the future gets its result, or what it raised."""
        done: asyncio.Future[Any] = self._loop.create_future()

        def on_done(value: Any, error: BaseException | None) -> None:
            if done.done():  # nobody waits any more
                return
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(_as_told(error))

        self.submit(work, on_done)
        return done

    def finish(self, last: Callable[[], None]) -> None:
        """Do this last, and end; doesn't wait."""

        def job() -> None:
            try:
                last()
            finally:  # whatever it raises: who waits hears that it is over
                self.ended = True
                self._tell(_resolve, self._gone)

        self._todo += (job, None)
        _ring(self._bell)

    async def gone(self, timeout_s: float) -> bool:
        """Wait for the end; whether it has come. Afterwards nothing is heard of the thread any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gone
        if self.ended:
            self._thread.join(_JOIN_S)
        self._stop_hearing()
        return self.ended

    def leave(self) -> None:
        """Don't wait for the end any longer; on any thread."""
        if self._loop.is_closed():
            self._hang_up()
        elif self._loop.is_running() and asyncio._get_running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._left)
        else:
            self._left()

    def _left(self) -> None:
        _resolve(self._gone)
        self._stop_hearing()

    def _stop_hearing(self) -> None:
        if self._bell.fileno() >= 0:
            with contextlib.suppress(NotImplementedError):
                self._loop.remove_reader(self._bell.fileno())
            self._hang_up()

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """From the thread: call something on the loop, if there still is one."""
        self._told.append((function, args))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._wake_loop()

    def _hear(self) -> None:
        """On the loop: call what the thread has told."""
        heard = b""
        try:
            heard = self._bell.recv(_RINGS)
        except BlockingIOError:
            heard = b"before"
        except OSError:  # it has ended, and did not listen to all that it was sent
            pass
        try:
            while self._told:
                function, args = self._told.popleft()
                function(*args)
        finally:
            if self._told:  # what one raises, the next don't suffer for
                self._loop.call_soon(self._hear)
            elif not heard:  # it has ended
                self._stop_hearing()


def _run_on(cpus: set[int]) -> None:
    """Give this thread these CPUs. If that fails, one was taken away meanwhile, and the kernel has chosen others."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


def _ring(bell: socket.socket) -> None:
    """Wake who waits at the other end. If it takes no more, it has not listened yet to what it was sent."""
    with contextlib.suppress(OSError):  # or nobody is there any more
        bell.send(b"\0", _DONT_WAIT)


def _work(todo: deque[Callable[[], object] | None], bell: socket.socket) -> None:
    heard = b"the first"
    with bell:
        while heard:  # until the loop is gone
            heard = bell.recv(_RINGS)
            while todo:
                if (job := todo.popleft()) is None:
                    return
                job()
                del job  # what it refers to must not live until the next one comes


def _as_told(error: BaseException) -> Exception:
    """An error as a future can have it; one that would end a generator, or the loop, becomes the cause of another."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"it raised {reason_of(error)}")
    told.__cause__ = error
    return told


def _resolve(done: asyncio.Future[Any]) -> None:
    if not done.done():
        done.set_result(None)


class Pace:
    """How long one sort of work takes, and so whether the loop does it itself.

    It begins on the thread, comes to the loop once the moving mean is below the limit, and goes back when it is above
    twice the limit.

    Args:
        limit_s: in seconds.
        inline: where it is done for ever; None to choose.

    Attributes:
        inline: whether the loop does it.
        mean_s: the moving mean, in seconds.
    """

    __slots__ = ("_chooses", "inline", "limit_s", "mean_s")

    def __init__(self, limit_s: float, inline: bool | None) -> None:
        self._chooses = inline is None
        self.inline = bool(inline)
        self.limit_s = limit_s
        self.mean_s = _BEGIN * limit_s

    def note(self, seconds: float) -> None:
        """It took so long this time."""
        mean_s = self.mean_s
        if seconds < _LONG_S:
            self.mean_s = mean_s = mean_s + (min(seconds, _MOST * mean_s) - mean_s) * _WEIGHT
        else:
            self.mean_s = mean_s = max(seconds, _BEGIN * self.limit_s)
        if self._chooses:
            self.inline = mean_s < (2 * self.limit_s if self.inline else self.limit_s)


@types.coroutine
def yield_to_loop() -> Generator[None, None, None]:
    """Let the loop do something else: what `asyncio.sleep(0)` does, and no more."""
    yield
