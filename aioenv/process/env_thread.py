"""Run an env's work: `EnvThread` runs jobs on a thread of its own, `RunTimes` moves short jobs to the loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from time import perf_counter
from typing import Any

from aioenv.errors import ClosedError
from aioenv.ipc.messages import reason_of

__all__ = ["BLOCKING_LIMIT_S", "INLINE_LIMIT_S", "YIELD_AFTER_S", "EnvThread", "JobThread", "RunTimes", "yield_to_loop"]

# How long the thread may still run after its last job, in seconds.
_JOIN_S = 1.0
# How many wake-up bytes are read at once.
_READ_SIZE = 4096
# The CPU that the caller runs on, on platforms where a thread's CPUs can be set (Linux). A PyDLL keeps the GIL.
_current_cpu: Callable[[], int] | None = None
if hasattr(os, "sched_setaffinity"):
    _current_cpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
# A job after one that took less than this is woken on the CPU of the loop, in seconds. Longer ones need warm caches.
_SHORT_S = 100e-6

# Work below the first limit moves to the loop, and leaves it above twice the limit. It is less than the half
# millisecond for which anything may block the loop, and after which the loop runs its other tasks. In seconds.
INLINE_LIMIT_S = 200e-6
YIELD_AFTER_S = 500e-6
# Work that blocking code waits for moves to its thread below this limit: no loop is blocked, but signals are held back.
BLOCKING_LIMIT_S = 8e-3
# One run of this length moves the work to the thread at once, in seconds.
_LONG_S = 10e-3
# The moving mean: the weight of the newest run, the most that it may count (in means), and the initial value (in
# limits). A run that was preempted says nothing about the others.
_WEIGHT = 1 / 8
_CLIP = 2.0
_INITIAL = 4.0

_OnDone = Callable[[Any, BaseException | None], None]
# the work, its callback, and the CPUs it runs on (None: those the thread has)
_Job = tuple[Callable[[], Any], _OnDone, set[int] | None]
# the callback, the result and the exception, and how long the job took, in seconds (None: it goes on)
_Result = tuple[_OnDone, Any, BaseException | None, float | None]


class RunTimes:
    """Measure how long one kind of work takes, and decide whether it runs on the loop.

    Work starts on the thread. It moves to the loop when its moving mean is below a limit, and back when the mean is
    above another.

    Args:
        limit_s: the limit below which it moves to the loop, in seconds.
        inline: where the work always runs; None to choose.
        upper_s: the limit above which it moves back, in seconds; None: twice the first one.

    Attributes:
        inline: whether the work runs on the loop.
        mean_s: the moving mean, in seconds.
    """

    __slots__ = ("_adaptive", "_upper_s", "inline", "limit_s", "mean_s")

    def __init__(self, limit_s: float, inline: bool | None, upper_s: float | None = None) -> None:
        self._adaptive = inline is None
        self._upper_s = 2 * limit_s if upper_s is None else upper_s
        self.inline = bool(inline)
        self.limit_s = limit_s
        self.mean_s = _INITIAL * limit_s

    def record(self, seconds: float) -> None:
        """Record how long the work took this time."""
        mean_s = self.mean_s
        if seconds < _LONG_S:
            self.mean_s = mean_s = mean_s + (min(seconds, _CLIP * mean_s) - mean_s) * _WEIGHT
        else:
            self.mean_s = mean_s = max(seconds, _INITIAL * self.limit_s)
        if self._adaptive:
            self.inline = mean_s < (self._upper_s if self.inline else self.limit_s)

    def inline_for(self, limit_s: float) -> bool:
        """Return whether the work runs on the loop, or may run on the thread of a caller with this limit."""
        return self.inline or (self._adaptive and self.mean_s < limit_s)


@types.coroutine
def yield_to_loop() -> Generator[None, None, None]:
    """Let the loop run its other tasks once, as `asyncio.sleep(0)` does, but faster."""
    yield


class JobThread(threading.Thread):
    """The thread of an `EnvThread`.

    Attributes:
        loop: the loop that waits for its jobs.
    """

    loop: asyncio.AbstractEventLoop


class EnvThread:
    """Run jobs on one thread, in order, and deliver their results on the loop.

    The loop and the thread wake each other through pipes. For short jobs the thread is woken on the CPU of the loop:
    waking an idle CPU takes the kernel longer, 60 µs on a virtual machine. But then both change places each time, as
    the thread's CPU is busy when it wakes the loop. It is a daemon thread, so a job that hangs doesn't keep the program
    from ending.

    Args:
        name: the name of the thread.

    Attributes:
        jobs: the number of jobs whose results the loop has not seen yet.
        ended: whether the last job is done.
    """

    def __init__(self, name: str = "aioenv-env") -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Job | None] = deque()
        self._results: deque[_Result] = deque()
        job_reader, self._job_writer, self._result_reader, result_writer = _pipes()
        self._close_pipes = weakref.finalize(self, _close, self._job_writer, self._result_reader)
        self._close_pipes.atexit = False  # exit hooks may still wait for a result
        self.jobs = 0
        self._last_s = 0.0  # how long the last job took
        self.ended = self._has_last = False
        self._futures: set[asyncio.Future[Any]] = set()
        self._end: asyncio.Future[None] = self._loop.create_future()
        unclaimed = [(job_reader, result_writer)]  # the side that pops them closes them: `start` may raise afterwards
        try:
            wake_loop: Callable[[], object] = partial(os.write, result_writer, b"\0")
            try:
                if sys.platform == "win32":  # Windows loops watch only sockets, and one of them notices pipes too late
                    raise NotImplementedError
                self._loop.add_reader(self._result_reader, self._on_readable)
            except NotImplementedError:
                wake_loop = partial(_deliver_soon, weakref.ref(self), self._loop)
            self._wake_loop = wake_loop
            args = (self._queue, self._results, unclaimed, wake_loop)
            self._thread = JobThread(target=_run_jobs, args=args, name=name, daemon=True)
            self._thread.loop = self._loop
            self._thread.start()
        except BaseException:
            self._disconnect()
            with contextlib.suppress(IndexError):
                _close(*unclaimed.pop())
            raise

    def submit(self, work: Callable[[], Any], on_done: _OnDone) -> None:
        """Run a job after those submitted before.

        Args:
            work: the job.
            on_done: called on the loop with the job's result and the exception that it raised (None if it raised
                none). The exception is a ClosedError if `finish` was called earlier.
        """
        if self._has_last:
            self._loop.call_soon(on_done, None, _closed())
            return
        cpus = None if self.jobs or self._last_s >= _SHORT_S else self._pin_to_current_cpu()
        self.jobs += 1
        self._queue.append((work, on_done, cpus))
        self._wake_thread()

    def publish(self, on_value: Callable[[Any], None], value: Any) -> None:
        """Deliver a value on the loop before the job has ended; called by the job."""
        self._results.append((lambda value, _: on_value(value), value, None, None))
        with contextlib.suppress(OSError, RuntimeError):  # the pipe is full or closed, or the loop is closed
            self._wake_loop()

    @property
    def result_fd(self) -> int | None:
        """The descriptor that is readable when results wait for `poll`; None if there is none any more."""
        return self._result_reader if self._result_reader >= 0 and sys.platform != "win32" else None

    def poll(self) -> None:
        """Deliver results that are there, on the loop or in place of it."""
        if self._result_reader >= 0:
            self._on_readable()

    def _pin_to_current_cpu(self) -> set[int] | None:
        """Let the thread wake up on this CPU, which the loop is about to leave; return the CPUs that it had."""
        if _current_cpu is None or (thread := self._thread.native_id) is None:
            return None
        try:
            cpus = os.sched_getaffinity(thread)
            if len(cpus) > 1:
                os.sched_setaffinity(thread, (_current_cpu(),))
                return cpus
        except OSError:  # not permitted, or the thread has ended
            pass
        return None

    def _wake_thread(self) -> None:
        """Wake the thread. A full pipe needs no further byte, since the thread has not read the earlier ones."""
        try:
            os.write(self._job_writer, b"\0")
        except OSError:  # full, or the thread has ended
            pass

    def run(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a job; the future gets its result or exception, or a ClosedError if the thread is left before."""
        done: asyncio.Future[Any] = self._loop.create_future()
        self._futures.add(done)

        def on_done(value: Any, error: BaseException | None) -> None:
            self._futures.discard(done)
            if done.done():  # cancelled
                return
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(_as_exception(error))

        self.submit(work, on_done)
        return done

    def finish(self, last: Callable[[], None]) -> None:
        """Run one last job, then end the thread; doesn't wait."""

        def job() -> None:
            try:
                last()
            finally:
                self.ended = True

        self._has_last = True
        self.jobs += 1
        self._queue += ((job, self._on_end, None), None)
        self._wake_thread()

    def _on_end(self, value: Any, error: BaseException | None) -> None:
        """Note on the loop that the last job is done, even if it raised."""
        _resolve(self._end)
        if error is not None:
            raise _as_exception(error)

    async def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, then disconnect from it; return whether it has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._end
        if self.ended:
            self._thread.join(_JOIN_S)
        self._disconnect()
        return self.ended

    def detach(self) -> None:
        """Stop waiting for the thread to end; may be called on any thread."""
        if self._loop.is_closed():
            self._disconnect()
        elif self._loop.is_running() and asyncio._get_running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._detach_on_loop)
        else:
            self._detach_on_loop()

    def _detach_on_loop(self) -> None:
        _resolve(self._end)
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the pipes to the thread, and fail the futures that wait for it."""
        if self._result_reader < 0:
            return
        if not self._loop.is_closed():
            with contextlib.suppress(NotImplementedError):
                self._loop.remove_reader(self._result_reader)
        self._job_writer = self._result_reader = -1  # the numbers may be reused soon
        self._close_pipes()
        if not self._loop.is_closed():
            for done in self._futures:
                if not done.done():
                    done.set_exception(_closed())
                    done.exception()  # so that asyncio doesn't log it as never retrieved
        self._futures.clear()

    def _on_readable(self) -> None:
        """Deliver results on the loop: the thread has written to its pipe, or closed it."""
        ended = False
        try:
            try:
                ended = not os.read(self._result_reader, _READ_SIZE)
            except BlockingIOError:  # read before
                pass
            except OSError:  # the pipe is broken
                ended = True
            finally:  # a signal handler may raise, and no byte is written twice
                self._deliver()
        finally:
            if ended and not self._results:
                self._disconnect()

    def _deliver(self) -> None:
        """Call the callbacks of finished jobs, on the loop."""
        results = self._results
        try:
            while results:
                on_done, value, error, seconds = results.popleft()
                if seconds is not None:
                    self.jobs, self._last_s = self.jobs - 1, seconds
                on_done(value, error)
        finally:
            if results:  # a callback has raised, which must not delay the others
                self._loop.call_soon(self._deliver)


def _pipes() -> tuple[int, int, int, int]:
    """Make two pipes: reader and writer for jobs, reader and writer for results. Only the first end blocks.

    A socket pair would be slower: the kernel wakes its reader also when the peer has read.
    """
    job_reader, job_writer = os.pipe()
    try:
        result_reader, result_writer = os.pipe()
    except BaseException:
        _close(job_reader, job_writer)
        raise
    for descriptor in (job_writer, result_reader, result_writer):
        with contextlib.suppress(AttributeError, OSError):  # Windows
            os.set_blocking(descriptor, False)
    return job_reader, job_writer, result_reader, result_writer


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _restore_cpus(cpus: set[int]) -> None:
    """Let this thread run on these CPUs again. It fails if one was taken away; the kernel has chosen others then."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        pass


def _run_jobs(
    queue: deque[_Job | None],
    results: deque[_Result],
    unclaimed: list[tuple[int, int]],
    wake_loop: Callable[[], object],
) -> None:
    """Run jobs until the queue gives None, or the loop's end of the pipe is closed: the body of the thread."""
    try:
        job_reader, result_writer = unclaimed.pop()
    except IndexError:  # the constructor was interrupted, and has closed them
        return
    received = b"first"
    try:
        while received:  # until the loop's end is closed
            received = os.read(job_reader, _READ_SIZE)
            while queue:
                if (job := queue.popleft()) is None:
                    return
                work, on_done, cpus = job
                value, error = None, None
                start_s = perf_counter()
                try:
                    if cpus is not None:  # before the job starts threads, which inherit them
                        _restore_cpus(cpus)
                    value = work()
                except BaseException as exc:  # not even SystemExit may end the thread
                    error = exc
                results.append((on_done, value, error, perf_counter() - start_s))
                del job, work, on_done, value, error  # or they would live until the next job
                try:
                    wake_loop()
                except (OSError, RuntimeError):  # the pipe is full or closed, or the loop is closed
                    pass
    finally:
        _close(job_reader, result_writer)


def _as_exception(error: BaseException) -> Exception:
    """Return an exception that a future accepts and the loop survives; others become the cause of a RuntimeError."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"it raised {reason_of(error)}")
    wrapped.__cause__ = error
    return wrapped


def _closed() -> ClosedError:
    return ClosedError("the vector env was closed before this was done")


def _deliver_soon(thread: weakref.ref[EnvThread], loop: asyncio.AbstractEventLoop) -> None:
    """Wake a loop that can't watch pipes. A bound method would keep alive a thread object that nothing else holds."""
    if (alive := thread()) is not None:
        loop.call_soon_threadsafe(alive._deliver)


def _resolve(done: asyncio.Future[Any]) -> None:
    if not done.done():
        done.set_result(None)
