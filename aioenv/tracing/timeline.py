"""The timeline that is being collected: what the loop did, what its workers did, and its file."""

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

from aioenv.tracing.ring import Rings
from aioenv.tracing.track import LOOK_EVERY, Spans, Track

__all__ = ["VARIABLE", "Trace", "Traced", "free_path", "is_device", "logged_beside", "replacing", "wanted"]


def is_device(path: Path) -> bool:
    """Whether this is there, and nothing that could be replaced: `/dev/null`, `/dev/stdout`, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` at the end of the block: whoever reads it meanwhile finds the old one.

    A link stays one, to what is new; a device is written to as it is.

    Raises:
        OSError: if it can't be written; what was there is there, then.
    """
    if is_device(path):
        # without waiting for somebody who reads, should it be a pipe
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
        if isinstance(exc, OSError) and str(exc.filename) == str(draft):  # nobody asked for a draft
            exc.filename = os.fspath(path)
            if exc.filename2 is not None:
                del exc.filename2
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


_log = logging.getLogger("aioenv")

VARIABLE = "AIOENV_TRACE"
WAIT = "wait for "  # what the parent waits for has names that begin so
# A trace that nobody stops ends by itself before it fills the memory: so many spans take 32 MB, and 130 MB on disk.
MAX_SPANS = 1_000_000
# Where timelines of this process are written.
_written: weakref.WeakValueDictionary[str, Trace] = weakref.WeakValueDictionary()


class Trace:
    """A timeline that is being collected, from now until `stop`; a context manager that does that.

    What is written can be opened at https://ui.perfetto.dev, and drawn by `aioenv trace`.

    Args:
        path: where it is written; a file that is there is overwritten, with an empty timeline for now.
        workers: what each worker is called.
        on_stop: called once, when it is stopped.

    Attributes:
        path: as given.
        tracks: one for each worker.
        step: of which step what is being sent now is; None: of none.
        stopped: whether `stop` has been called.

    Raises:
        RuntimeError: if another timeline of this process is written there.
        OSError: if the file can't be written.
    """

    def __init__(self, path: str | os.PathLike[str], workers: Sequence[str], on_stop: Callable[[], None]) -> None:
        self.path = Path(path)
        self._file = self.path.absolute()  # whatever the working directory is when it ends
        self.step: int | None = None
        self.stopped = False
        self._on_stop = on_stop
        self._began = self._ended = perf_counter()
        self._loop: dict[str, Spans] = {}
        self._steps: dict[int, int] = {}  # how many steps each slot was sent
        target = os.path.realpath(self._file)
        if not is_device(self._file):
            if (other := _written.get(target)) is not None and not other.stopped:
                raise RuntimeError(f"trace: another timeline is written to {self.path}: give each its own file")
            _begin_file(self._file)
            _written[target] = self
        self._rings = Rings(len(workers))
        self.tracks = [Track(self, name, *self._rings.ring(index)) for index, name in enumerate(workers)]

    # ------------------------------------------------------------ what is going on

    def sending(self, slots: Sequence[int], *, stepped: bool, again: bool = False) -> int | None:
        """A step or reset of these slots is about to be sent; which step of theirs it is.

        Step n leads to state n, of which images are then drawn; a reset has the number of the last step.

        Args:
            slots: whose.
            stepped: whether it is a step.
            again: whether it was sent before, to a process that died.
        """
        steps = self._steps
        if stepped and not again:
            for slot in slots:
                steps[slot] = steps.get(slot, 0) + 1
        return self.at(slots)

    def at(self, slots: Sequence[int]) -> int | None:
        """What is sent next is of the step that these slots are at; which that is."""
        self.step = self._steps.get(slots[0], 0) if len(slots) else None
        return self.step

    def loop(self, name: str, begin: float, end: float, step: int | None = None) -> None:
        """The parent did this, or waited for it: from when this began, if that was later."""
        begin = max(begin, self._began)
        spans = self._loop.get(name)
        if spans is None:
            spans = self._loop[name] = Spans()
        spans.add(begin, end, step)

    def waited(self, name: str) -> Callable[[float, float], None]:
        """What is to be told of each wait for `name`."""
        name, count = WAIT + name, 0

        def note(begin: float, end: float) -> None:
            nonlocal count
            self.loop(name, begin, end, max(self._steps.values(), default=0))
            count += 1
            if not self.tracks and count % LOOK_EVERY == 0:  # nobody else looks
                self.look()

        return note

    def look(self) -> None:
        """Stop if this has become too long."""
        spans = sum(map(len, self._loop.values()))
        spans += sum(len(each) for track in self.tracks for each in track.spans.values())
        if spans > MAX_SPANS:
            try:
                self.stop()
            except OSError:  # whoever is sending a step just now can't help it
                _log.exception("the timeline could not be written")

    # ------------------------------------------------------------ the end

    def stop(self) -> None:
        """Write the file, and collect no more. Idempotent; closing what is traced does it too."""
        if self.stopped:
            return
        self.stopped, self._ended = True, perf_counter()
        try:
            self._on_stop()
        finally:
            for track in self.tracks:
                track.look()
                if track.ring is not None:
                    track.ring.close()
            self._rings.close()
            _write(self._file, self._events())

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with logged_beside(error):
            self.stop()

    def __repr__(self) -> str:
        return f"<Trace {'in' if self.stopped else 'to'} {self.path}>"

    def _events(self) -> Iterator[dict[str, Any]]:
        pid = os.getpid()
        lines: list[tuple[str, Iterable[tuple[str, float, float, int]]]] = [("loop", self._loop_events())]
        # waits for envs and for images may overlap, which spans of one line may not
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
        """What the parent did; between its waits it was the policy's, and what else its caller does."""
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
def logged_beside(error: BaseException | None) -> Iterator[None]:
    """Around the end of a timeline: what goes through its block goes on, even if the file can't be written."""
    try:
        yield
    except OSError as exc:
        if error is None:
            raise
        _log.error("the timeline could not be written: %s", exc)


def _begin_file(path: Path) -> None:
    """Write an empty timeline for now."""
    if not is_device(path):
        _write(path, ())


def _write(path: Path, events: Iterable[dict[str, Any]]) -> None:
    with replacing(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for number, event in enumerate(events):
            file.write(",\n" if number else "\n")
            file.write(json.dumps(event))
        file.write("\n]}\n")


class Traced:
    """Something whose timeline can be collected, one at a time."""

    _trace: Trace | None = None

    def _begin_trace(
        self, path: str | os.PathLike[str], workers: Sequence[str], attach: Callable[[Trace | None], None]
    ) -> Trace:
        """Collect a timeline from now on.

        Args:
            path, workers: as of `Trace`.
            attach: tells everybody who writes to it; called with the trace now, and with None when it is stopped.

        Raises:
            RuntimeError: if one is being collected already.
            OSError: if the file can't be written.
        """
        if self._trace is not None:
            raise RuntimeError(f"trace: {self._trace!r} is being collected; stop() it first")

        def turn_to(trace: Trace | None) -> None:
            self._trace = trace
            attach(trace)

        trace = Trace(path, workers, lambda: turn_to(None))
        turn_to(trace)
        return trace

    def _end_trace(self) -> None:
        """What is traced has ended: write the file; if that fails, the end goes on."""
        if self._trace is not None:
            try:
                self._trace.stop()
            except OSError:
                _log.exception("the timeline could not be written")


# ---------------------------------------------------------------- AIOENV_TRACE

_used: dict[str, int] = {}


def wanted() -> Path | None:
    """Where the user wants what is about to be started to be traced to, by `AIOENV_TRACE`; None: nowhere.

    Raises:
        OSError: if that can't be written, which is better known before there are workers to end.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = free_path(named)
    try:
        _begin_file(path)
    except OSError as exc:
        exc.add_note(f"a timeline is wanted there: {VARIABLE}={named}")
        raise
    return path


def free_path(path: str) -> Path:
    """The path, or, if this process has taken it already, one with a number: run.json, run-2.json, run-3.json, …"""
    count = _used[path] = _used.get(path, 0) + 1
    first = Path(path)
    return first if count == 1 else first.with_name(f"{first.stem}-{count}{first.suffix}")
