"""A thread for one env, and the choice between it and the loop's own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections.abc import Callable, Generator
from queue import SimpleQueue
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


class EnvThread:
    """One thread, which does one job after the other until it is told to end, and tells the loop what came of it.

    It is a daemon: what hangs in it can't keep the program from ending.

    Attributes:
        jobs: how many are being done, wait, or have been done without the loop knowing it yet.
        ended: whether the last job is done.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name="aioenv-env", daemon=True)
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
        self.jobs += 1

        def job() -> None:
            value, error = None, None
            try:
                value = work()
            except BaseException as exc:  # SystemExit, say: it must not end the thread
                error = exc
            self._tell(self._report, on_done, value, error)

        self._queue.put(job)

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

        self._queue.put(job)
        self._queue.put(None)

    async def gone(self, timeout_s: float) -> bool:
        """Wait for the end; whether it has come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gone
        if self.ended:
            self._thread.join(_JOIN_S)
        return self.ended

    def leave(self) -> None:
        """Don't wait for the end any longer."""
        if not self._loop.is_closed():
            _resolve(self._gone)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """From the thread: call something on the loop, if there still is one."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


def _work(queue: SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := queue.get()) is not None:
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
