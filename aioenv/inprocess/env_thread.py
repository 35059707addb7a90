"""A thread for one env."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from aioenv.errors import ClosedError
from aioenv.ipc.messages import reason_of

__all__ = ["EnvThread"]

# How long the thread may still take to end after its last job, in seconds.
_JOIN_S = 1.0
# How many rings are heard at once.
_RINGS = 4096
# Which CPU the caller is on, where threads can be told theirs (Linux). Not a CDLL, which would give the GIL away.
_this_cpu: Callable[[], int] | None = None
if hasattr(os, "sched_setaffinity"):
    _this_cpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None)

_OnDone = Callable[[Any, BaseException | None], None]
# what to do, whom to tell, and which CPUs it is done on (None: where the thread is)
_Job = tuple[Callable[[], Any], _OnDone, set[int] | None]


class EnvThread:
    """One thread, which does one job after the other until it is told to end, and tells the loop what came of it.

    Each wakes the other through a pipe, and the thread is woken where the loop runs: on a CPU that idles it would
    take the kernel longer, 60 µs of a virtual machine's. It is a daemon: what hangs in it can't keep the program from
    ending.

    Attributes:
        jobs: how many are being done, wait, or have been done without the loop knowing it yet.
        ended: whether the last job is done.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._todo: deque[_Job | None] = deque()
        self._told: deque[tuple[_OnDone, Any, BaseException | None]] = deque()
        listens, self._rings, self._hears, tells = _pipes()
        self._hang_up = weakref.finalize(self, _close, self._rings, self._hears)
        self._hang_up.atexit = False  # exit hooks may yet want its answer
        self.jobs = 0
        self.ended = self._has_last = False
        self._asked: set[asyncio.Future[Any]] = set()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        unclaimed = [(listens, tells)]  # whoever takes them out closes them: `start` may raise once the thread runs
        try:
            wake_loop: Callable[[], object] = partial(os.write, tells, b"\0")
            try:
                if sys.platform == "win32":  # there loops can watch sockets alone, and one of them notices too late
                    raise NotImplementedError
                self._loop.add_reader(self._hears, self._hear)
            except NotImplementedError:
                wake_loop = partial(_have_told, weakref.ref(self), self._loop)
            work = (self._todo, self._told, unclaimed, wake_loop)
            self._thread = threading.Thread(target=_work, args=work, name="aioenv-env", daemon=True)
            self._thread.start()
        except BaseException:
            self._stop_hearing()
            with contextlib.suppress(IndexError):
                _close(*unclaimed.pop())
            raise

    def submit(self, work: Callable[[], Any], on_done: _OnDone) -> None:
        """Have something done after what was submitted before.

        Args:
            work: what to do.
            on_done: called on the loop, with what `work` returned, or what it raised; with a ClosedError if the thread
                has been told what it does last.
        """
        if self._has_last:
            self._loop.call_soon(on_done, None, _closed())
            return
        cpus = None if self.jobs else self._beckon()
        self.jobs += 1
        self._todo.append((work, on_done, cpus))
        self._ring()

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

    def _ring(self) -> None:
        """Wake the thread. If it takes no more, it has not listened yet to what it was sent."""
        try:
            os.write(self._rings, b"\0")
        except OSError:  # or it is not there any more
            pass

    def ask(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Have something done; the future gets its result, what it raised, or a ClosedError if neither is heard."""
        done: asyncio.Future[Any] = self._loop.create_future()
        self._asked.add(done)

        def on_done(value: Any, error: BaseException | None) -> None:
            self._asked.discard(done)
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
            finally:
                self.ended = True

        self._has_last = True
        self.jobs += 1
        self._todo += ((job, self._has_ended, None), None)
        self._ring()

    def _has_ended(self, value: Any, error: BaseException | None) -> None:
        """On the loop: whatever the last job raised, who waits hears that it is over."""
        _resolve(self._gone)
        if error is not None:
            raise _as_told(error)

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
            self._stop_hearing()
        elif self._loop.is_running() and asyncio._get_running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._left)
        else:
            self._left()

    def _left(self) -> None:
        _resolve(self._gone)
        self._stop_hearing()

    def _stop_hearing(self) -> None:
        if self._hears < 0:
            return
        if not self._loop.is_closed():
            with contextlib.suppress(NotImplementedError):
                self._loop.remove_reader(self._hears)
        self._rings = self._hears = -1  # their numbers may soon be somebody else's
        self._hang_up()
        if not self._loop.is_closed():
            for done in self._asked:
                if not done.done():
                    done.set_exception(_closed())
                    done.exception()  # nobody need ask for it
        self._asked.clear()

    def _hear(self) -> None:
        """On the loop: the thread has rung, or it has ended."""
        ended = False
        try:
            try:
                ended = not os.read(self._hears, _RINGS)
            except BlockingIOError:  # heard before
                pass
            except OSError:  # nothing is heard of it any more
                ended = True
            finally:  # a signal handler may raise, and nothing rings twice
                self._tell()
        finally:
            if ended and not self._told:
                self._stop_hearing()

    def _tell(self) -> None:
        """On the loop: tell whose jobs are done."""
        told = self._told
        try:
            while told:
                on_done, value, error = told.popleft()
                self.jobs -= 1
                on_done(value, error)
        finally:
            if told:  # what one raises, the next don't suffer for
                self._loop.call_soon(self._tell)


def _pipes() -> tuple[int, int, int, int]:
    """Two pipes, of which no end is kept waiting but the first: where jobs are read and written, then answers likewise.

    Not a pair of sockets: there the kernel wakes who listens whenever the other one has read something, too.
    """
    listens, rings = os.pipe()
    try:
        hears, tells = os.pipe()
    except BaseException:
        _close(listens, rings)
        raise
    for descriptor in (rings, hears, tells):
        with contextlib.suppress(AttributeError, OSError):  # Windows
            os.set_blocking(descriptor, False)
    return listens, rings, hears, tells


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _run_on(cpus: set[int]) -> None:
    """Give this thread these CPUs. If that fails, one was taken away meanwhile, and the kernel has chosen others."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        pass


def _work(
    todo: deque[_Job | None],
    told: deque[tuple[_OnDone, Any, BaseException | None]],
    unclaimed: list[tuple[int, int]],
    wake_loop: Callable[[], object],
) -> None:
    try:
        listens, tells = unclaimed.pop()
    except IndexError:  # who has started this was interrupted then
        return
    heard = b"the first"
    try:
        while heard:  # until the loop is gone
            heard = os.read(listens, _RINGS)
            while todo:
                if (job := todo.popleft()) is None:
                    return
                work, on_done, cpus = job
                value, error = None, None
                try:
                    if cpus is not None:  # before it starts threads of its own, which have what it has
                        _run_on(cpus)
                    value = work()
                except BaseException as exc:  # SystemExit, say: it must not end the thread
                    error = exc
                told.append((on_done, value, error))
                del job, work, on_done, value, error  # what they refer to must not live until the next one comes
                try:
                    wake_loop()
                except (OSError, RuntimeError):  # it has not listened yet, is not there any more, or is closed
                    pass
    finally:
        _close(listens, tells)


def _as_told(error: BaseException) -> Exception:
    """An error as a future can have it; one that would end a generator, or the loop, becomes the cause of another."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"it raised {reason_of(error)}")
    told.__cause__ = error
    return told


def _closed() -> ClosedError:
    return ClosedError("the vector env was closed before this was done")


def _have_told(thread: weakref.ref[EnvThread], loop: asyncio.AbstractEventLoop) -> None:
    """Wake a loop that can't watch pipes; not by a method, which would keep a thread alive that is forgotten."""
    if (alive := thread()) is not None:
        loop.call_soon_threadsafe(alive._tell)


def _resolve(done: asyncio.Future[Any]) -> None:
    if not done.done():
        done.set_result(None)
