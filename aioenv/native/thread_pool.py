"""`ThreadPool`: threads that share the items of a job with the caller's own thread."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NoReturn

__all__ = ["CALLS_IN_PROGRESS", "ThreadPool"]

EXIT_TIMEOUT_S = 10.0  # how long the exit of the program waits for calls in progress


class _CallsInProgress:
    """A context for MuJoCo calls that release the GIL: a thread that returns from one while Python exits would crash.

    Attributes:
        is_exiting: whether the program is exiting, so that no further call may begin.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self.is_exiting = False
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._threads.clear)

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())
        if self.is_exiting:
            self._threads.discard(threading.get_ident())
            self.raise_ending()

    def __exit__(self, *exc: object) -> None:
        self._threads.discard(threading.get_ident())

    def raise_ending(self) -> NoReturn:
        """Raise the RuntimeError of a call that may not begin."""
        raise RuntimeError("the program is ending: no simulation is stepped any more")

    def _end(self) -> None:
        self.is_exiting = True
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while self._threads - {threading.get_ident()} and time.monotonic() < deadline:
            time.sleep(0.001)


CALLS_IN_PROGRESS = _CallsInProgress()


class _Job:
    """Items of work that threads share.

    Attributes:
        begun, ended: an element for each helper thread that has begun, and for each that has ended.
        errors: the exceptions that items raised.
        is_awaited: whether helpers that end wake the caller.
    """

    __slots__ = ("_pending", "_work", "begun", "ended", "errors", "is_awaited")

    def __init__(self, work: Callable[[int], Any], items: Sequence[int]) -> None:
        self._work = work
        self._pending = iter(items)
        self.begun: list[None] = []  # lists, since `append` is atomic
        self.ended: list[None] = []
        self.errors: list[BaseException] = []
        self.is_awaited = False

    def do(self) -> None:
        """Work on the items that are left."""
        try:
            with CALLS_IN_PROGRESS:
                self._do_all()
        except RuntimeError as exc:  # the program is exiting
            self.errors.append(exc)

    def _do_all(self) -> None:
        while True:
            try:
                for item in self._pending:
                    if CALLS_IN_PROGRESS.is_exiting:
                        CALLS_IN_PROGRESS.raise_ending()
                    self._work(item)
                return
            except BaseException as exc:
                self.errors.append(exc)
                if not isinstance(exc, Exception):
                    return

    def stop(self) -> None:
        """Drop the items that are left."""
        for _ in self._pending:
            pass


class ThreadPool:
    """Threads that pull items from one iterator, so that none is idle while there are more.

    It pays only for work that releases the GIL. Its threads end with `close`, or with the last reference to it.

    Args:
        num_threads: how many threads work at once, the caller's among them.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs, self._woken), name=f"aioenv-sim-{i}", daemon=True)
            for i in range(num_threads - 1)
        ]
        for thread in self._threads:
            thread.start()
        self._stop = weakref.finalize(self, _stop, self._jobs, len(self._threads))

    def run(self, work: Callable[[int], Any], items: Sequence[int]) -> None:
        """Call `work(item)` for all items, in no particular order; return when every thread has finished.

        Raises:
            BaseException: the first that an item raised, after all items are done. An interrupt of the caller (Ctrl-C)
                is raised after each thread has finished its current item; further items are not begun.
        """
        job = _Job(work, items)
        try:
            for _ in range(min(len(self._threads), len(items) - 1)):
                self._jobs.put(job)
            job.do()
        finally:
            self._await(job)
        if job.errors:
            raise job.errors[0]

    def _await(self, job: _Job) -> None:
        """Wait until no thread works on a job; a helper that wakes up later finds no items."""
        interrupt: BaseException | None = None
        while True:
            try:
                job.stop()
                job.is_awaited = True
                while len(job.begun) > len(job.ended):
                    self._woken.get()
                job.is_awaited = False
                break
            except BaseException as exc:  # Ctrl-C: returning now would leave threads at work
                interrupt = exc
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """Stop the threads, and wait until they have ended."""
        self._stop()
        for thread in self._threads:
            thread.join()
        self._threads = []


def _stop(jobs: SimpleQueue[_Job | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)


def _serve(jobs: SimpleQueue[_Job | None], woken: SimpleQueue[None]) -> None:
    while (job := jobs.get()) is not None:
        job.begun.append(None)
        job.do()
        job.ended.append(None)
        if job.is_awaited:
            woken.put(None)
        job = None
