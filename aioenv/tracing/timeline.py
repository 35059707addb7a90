"""A timeline: spans of the parent's loop and of its workers, collected until `stop` writes them to a file."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from aioenv.tracing.track import COLLECT_EVERY, RingMemory, Spans, Track

__all__ = [
    "VARIABLE",
    "Trace",
    "Traced",
    "atomic_write",
    "free_path",
    "is_device",
    "path_from_environment",
    "raise_or_log",
]


def is_device(path: Path) -> bool:
    """Return whether a path exists and can't be replaced: `/dev/null`, `/dev/stdout`, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces `path` at the end of the block; until then readers find the old file.

    A link is kept, and its target replaced; a device is written to directly.

    Raises:
        OSError: if the file can't be written; the old file is unchanged then.
    """
    if is_device(path):
        # without waiting for a reader, in case it is a pipe
        fd = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        os.set_blocking(fd, True)
        with open(fd, "w", encoding="utf-8") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            yield file
        os.replace(draft, target)
    except BaseException as exc:
        if isinstance(exc, OSError) and str(exc.filename) == str(draft):  # the caller does not know the draft
            exc.filename = os.fspath(path)
            if exc.filename2 is not None:
                del exc.filename2
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


_log = logging.getLogger("aioenv")

VARIABLE = "AIOENV_TRACE"
WAIT = "wait for "  # the prefix of the names of the parent's waits
# A trace stops by itself at this size, before it fills the memory: these spans take 32 MB, and 130 MB on disk.
MAX_SPANS = 1_000_000
# The timelines of this process, by the path that they are written to.
_written: weakref.WeakValueDictionary[str, Trace] = weakref.WeakValueDictionary()


class Trace:
    """A timeline that is collected until `stop`; a context manager that stops at its end.

    The file can be opened at https://ui.perfetto.dev, and summed up by `aioenv trace`.

    Args:
        path: where it is written. An existing file is overwritten, with an empty timeline at first.
        workers: the name of each worker.
        on_stop: called once, when it is stopped.

    Attributes:
        path: as given.
        tracks: one for each worker.
        step: the step of the requests that are being sent; None: they belong to no step.
        stopped: whether `stop` has been called.

    Raises:
        RuntimeError: if another timeline of this process is written there.
        OSError: if the file can't be written.
    """

    def __init__(self, path: str | os.PathLike[str], workers: Sequence[str], on_stop: Callable[[], None]) -> None:
        self.path = Path(path)
        self._file = self.path.absolute()  # the working directory may have changed at the end
        self.step: int | None = None
        self.stopped = False
        self._on_stop = on_stop
        self._began = self._ended = perf_counter()
        self._loop: dict[str, Spans] = {}
        self._steps: dict[int, int] = {}  # the number of steps sent to each slot
        target = os.path.realpath(self._file)
        if not is_device(self._file):
            if (other := _written.get(target)) is not None and not other.stopped:
                raise RuntimeError(f"trace: another timeline is written to {self.path}: give each its own file")
            _create_file(self._file)
            _written[target] = self
        self._rings = RingMemory(len(workers))
        self.tracks = [Track(self, name, *self._rings.ring(index)) for index, name in enumerate(workers)]

    # ------------------------------------------------------------ collecting

    def note_sent(self, slots: Sequence[int], *, stepped: bool, again: bool = False) -> int | None:
        """Note that a step or reset of these slots is about to be sent; return the number of the step.

        Step n leads to state n, from which images are drawn. A reset has the number of the last step.

        Args:
            slots: the slots.
            stepped: whether it is a step.
            again: whether it was sent before, to a process that died.
        """
        steps = self._steps
        if stepped and not again:
            for slot in slots:
                steps[slot] = steps.get(slot, 0) + 1
        return self.set_step(slots)

    def set_step(self, slots: Sequence[int]) -> int | None:
        """Let `step`, of the next requests, be the step that these slots are at; return it."""
        self.step = self._steps.get(slots[0], 0) if len(slots) else None
        return self.step

    def add_loop_span(self, name: str, begin: float, end: float, step: int | None = None) -> None:
        """Add a span of the parent's loop, cut at the beginning of this timeline."""
        begin = max(begin, self._began)
        spans = self._loop.get(name)
        if spans is None:
            spans = self._loop[name] = Spans()
        spans.add(begin, end, step)

    def wait_recorder(self, name: str) -> Callable[[float, float], None]:
        """Return a function that adds a wait for `name`, given its begin and end."""
        name, count = WAIT + name, 0

        def record(begin: float, end: float) -> None:
            nonlocal count
            self.add_loop_span(name, begin, end, max(self._steps.values(), default=0))
            count += 1
            if not self.tracks and count % COLLECT_EVERY == 0:  # no track does it
                self.stop_if_full()

        return record

    def stop_if_full(self) -> None:
        """Stop if there are too many spans."""
        spans = sum(map(len, self._loop.values()))
        spans += sum(len(each) for track in self.tracks for each in track.spans.values())
        if spans > MAX_SPANS:
            try:
                self.stop()
            except OSError:  # the caller is just sending a step: it must not fail
                _log.exception("the timeline could not be written")

    # ------------------------------------------------------------ the end

    def stop(self) -> None:
        """Write the file, and collect no more. Idempotent; closing the traced object stops too."""
        if self.stopped:
            return
        self.stopped, self._ended = True, perf_counter()
        try:
            self._on_stop()
        finally:
            for track in self.tracks:
                track.collect()
                if track.ring is not None:
                    track.ring.close()
            self._rings.close()
            _write(self._file, self._events())

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with raise_or_log(error):
            self.stop()

    def __repr__(self) -> str:
        return f"<Trace {'in' if self.stopped else 'to'} {self.path}>"

    def _events(self) -> Iterator[dict[str, Any]]:
        pid = os.getpid()
        lines: list[tuple[str, Iterable[tuple[str, float, float, int]]]] = [("loop", self._loop_events())]
        # waits for envs and for images may overlap, which the spans of one line must not
        lines += [(name, sorted(self._named(name))) for name in sorted(self._loop) if name.startswith(WAIT)]
        lines += [(track.name, track.events(self._ended)) for track in self.tracks]
        yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": "aioenv"}}
        for tid, (line, events) in enumerate(lines):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": line}}
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            for name, begin, end, number in events:
                event = {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "name": name,
                    "ts": round((begin - self._began) * 1e6, 3),
                    "dur": round((end - begin) * 1e6, 3),
                }
                yield {**event, "args": {"step": number}} if number >= 0 else event

    def _loop_events(self) -> Iterator[tuple[str, float, float, int]]:
        """Yield the parent's spans; the time between its waits is the policy's, and the caller's other code."""
        rows = sorted((b, e, name, n) for name in self._loop for _, b, e, n in self._named(name))
        waited: float | None = None
        for begin, end, name, number in rows:
            if not name.startswith(WAIT):
                yield name, begin, end, number
                continue
            if waited is not None and begin > waited:
                yield "policy", waited, begin, -1
            waited = end if waited is None else max(waited, end)

    def _named(self, name: str) -> Iterator[tuple[str, float, float, int]]:
        return ((name, *span) for span in self._loop[name])


@contextlib.contextmanager
def raise_or_log(error: BaseException | None) -> Iterator[None]:
    """Stop a timeline in the block: its OSError is raised if `error` is None, else logged, since `error` propagates."""
    try:
        yield
    except OSError as exc:
        if error is None:
            raise
        _log.error("the timeline could not be written: %s", exc)


def _create_file(path: Path) -> None:
    """Write an empty timeline, to find out early whether the file can be written."""
    if not is_device(path):
        _write(path, ())


def _write(path: Path, events: Iterable[dict[str, Any]]) -> None:
    with atomic_write(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write(",\n" if number else "\n")
            file.write(json.dumps(event))
        file.write("\n]}\n")


class Traced:
    """An object whose timeline can be collected, one timeline at a time."""

    _trace: Trace | None = None

    def _start_trace(
        self, path: str | os.PathLike[str], workers: Sequence[str], attach: Callable[[Trace | None], None]
    ) -> Trace:
        """Start to collect a timeline.

        Args:
            path, workers: see `Trace`.
            attach: passes the trace to the objects that write to it; called with the trace now, and with None when it
                is stopped.

        Raises:
            RuntimeError: if one is being collected already.
            OSError: if the file can't be written.
        """
        if self._trace is not None:
            raise RuntimeError(f"trace: {self._trace!r} is being collected; stop() it first")

        def set_trace(trace: Trace | None) -> None:
            self._trace = trace
            attach(trace)

        trace = Trace(path, workers, lambda: set_trace(None))
        set_trace(trace)
        return trace

    def _stop_trace(self) -> None:
        """Stop the timeline, if there is one; an OSError is logged, since the traced object is being closed."""
        if self._trace is not None:
            try:
                self._trace.stop()
            except OSError:
                _log.exception("the timeline could not be written")


# ---------------------------------------------------------------- AIOENV_TRACE

_used: dict[str, int] = {}


def path_from_environment() -> Path | None:
    """Return the path for a timeline that the user asks for by `AIOENV_TRACE`; None: none is wanted.

    Raises:
        OSError: if the file can't be written: better now than when there are workers to end.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = free_path(named)
    try:
        _create_file(path)
    except OSError as exc:
        exc.add_note(f"a timeline is wanted there: {VARIABLE}={named}")
        raise
    return path


def free_path(path: str) -> Path:
    """Return the path, with a number if this process has used it before: run.json, run-2.json, run-3.json, …"""
    count = _used[path] = _used.get(path, 0) + 1
    first = Path(path)
    return first if count == 1 else first.with_name(f"{first.stem}-{count}{first.suffix}")
