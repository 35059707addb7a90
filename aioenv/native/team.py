"""A few threads that share out pieces of work, the caller's own among them."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NoReturn, TypeAlias

__all__ = ["AT_WORK", "Team"]

EXIT_S = 10.0  # how long the end of the program waits for a call

Job: TypeAlias = "tuple[Callable[[int], Any], Iterator[int]] | None"


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


class Team:
    """Threads that pull pieces of work from one iterator, so that none waits while another has more to do.

    Worth it only for work that releases the GIL. Its threads end with `close`, or when nobody refers to it any more.

    Args:
        num_threads: how many work at once; the caller is one of them.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs, self._done), name=f"aioenv-sim-{i}", daemon=True)
            for i in range(num_threads - 1)
        ]
        for thread in self._threads:
            thread.start()
        self._stop = weakref.finalize(self, _stop, self._jobs, len(self._threads))

    def run(self, work: Callable[[int], Any], items: Sequence[int]) -> None:
        """Do `work(item)` for all items, in no particular order; ends when all are done.

        Raises:
            BaseException: the first that a piece of work raised, once every thread has stopped; the others go on with
                the items that are left.
        """
        pending = iter(items)
        helpers = min(len(self._threads), len(items) - 1)
        for _ in range(helpers):
            self._jobs.put((work, pending))
        errors = [_drain(work, pending)]
        errors += [self._done.get() for _ in range(helpers)]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads; returns when they have ended."""
        self._stop()
        for thread in self._threads:
            thread.join()
        self._threads = []


def _stop(jobs: SimpleQueue[Job], count: int) -> None:
    for _ in range(count):
        jobs.put(None)


def _serve(jobs: SimpleQueue[Job], done: SimpleQueue[BaseException | None]) -> None:
    while (job := jobs.get()) is not None:
        done.put(_drain(*job))
        job = None


def _drain(work: Callable[[int], Any], pending: Iterator[int]) -> BaseException | None:
    """Do what is left; what was raised, if anything."""
    try:
        with AT_WORK:
            return _do_all(work, pending)
    except RuntimeError as exc:  # the program is ending
        return exc


def _do_all(work: Callable[[int], Any], pending: Iterator[int]) -> BaseException | None:
    failed: BaseException | None = None
    while True:
        try:
            for item in pending:
                if AT_WORK.is_over:
                    AT_WORK.refuse()
                work(item)
            return failed
        except BaseException as exc:
            failed = failed or exc
            if not isinstance(exc, Exception):
                return failed
