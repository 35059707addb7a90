"""A few threads that share out pieces of work, the caller's own among them."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NoReturn

__all__ = ["AT_WORK", "ThreadPool"]

EXIT_S = 10.0  # how long the end of the program waits for a call


class _AtWork:
    """Around calls of MuJoCo without the GIL: a thread that comes back from one while Python ends would crash it.

    Attributes:
        is_over: whether the program is ending, so that there shall be no other call.
    """

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self.is_over = False
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._threads.clear)

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())
        if self.is_over:
            self._threads.discard(threading.get_ident())
            self.refuse()

    def __exit__(self, *exc: object) -> None:
        self._threads.discard(threading.get_ident())

    def refuse(self) -> NoReturn:
        """Raise the RuntimeError of a call that shall not be."""
        raise RuntimeError("the program is ending: no simulation is stepped any more")

    def _end(self) -> None:
        self.is_over = True
        deadline = time.monotonic() + EXIT_S
        while self._threads - {threading.get_ident()} and time.monotonic() < deadline:
            time.sleep(0.001)


AT_WORK = _AtWork()


class _Job:
    """Work that threads share out.

    Attributes:
        begun, ended: an element for each helper that looks for pieces, and for each that has found the last one.
        errors: what pieces have raised.
        is_awaited: whether the caller is to be woken by helpers that end.
    """

    __slots__ = ("_pending", "_work", "begun", "ended", "errors", "is_awaited")

    def __init__(self, work: Callable[[int], Any], items: Sequence[int]) -> None:
        self._work = work
        self._pending = iter(items)
        self.begun: list[None] = []  # lists, since nothing comes between their `append` and another thread
        self.ended: list[None] = []
        self.errors: list[BaseException] = []
        self.is_awaited = False

    def do(self) -> None:
        """Do what is left."""
        try:
            with AT_WORK:
                self._do_all()
        except RuntimeError as exc:  # the program is ending
            self.errors.append(exc)

    def _do_all(self) -> None:
        while True:
            try:
                for item in self._pending:
                    if AT_WORK.is_over:
                        AT_WORK.refuse()
                    self._work(item)
                return
            except BaseException as exc:
                self.errors.append(exc)
                if not isinstance(exc, Exception):
                    return

    def stop(self) -> None:
        """Begin nothing more."""
        for _ in self._pending:
            pass


class ThreadPool:
    """Threads that pull pieces of work from one iterator, so that none waits while another has more to do.

    Worth it only for work that releases the GIL. Its threads end with `close`, or when nobody refers to it any more.

    Args:
        num_threads: how many work at once; the caller is one of them.
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
        """Do `work(item)` for all items, in no particular order; ends when nobody does anything any more.

        Raises:
            BaseException: the first that a piece of work raised, once every thread has stopped; the others go on with
                the items that are left. What interrupts the caller (Ctrl-C), once every thread has done the piece that
                it was at; the others are not begun.
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
        """Wait until nobody is at a piece of a job; a helper that has not woken up yet will find none."""
        interrupt: BaseException | None = None
        while True:
            try:
                job.stop()
                job.is_awaited = True
                while len(job.begun) > len(job.ended):
                    self._woken.get()
                job.is_awaited = False
                break
            except BaseException as exc:  # Ctrl-C: who returned now would leave threads that go on
                interrupt = exc
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """End the threads; returns when they have ended."""
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
