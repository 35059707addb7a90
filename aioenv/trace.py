"""The timeline of who worked when: collected while a run goes on, written as JSON that Perfetto and Chrome open.

Times are those of `time.perf_counter`. On Linux (CLOCK_MONOTONIC), macOS and Windows that is one clock for all
processes of a machine, so what a worker says and what the parent says can be laid side by side as they are.

A worker writes a row for each thing that it does into a *ring* of shared memory, which it opens by name
(`/proc/PID/fd/N`): nothing more travels with its replies. The parent keeps what it does itself, and which step each
request was of. Without such memory (not Linux) a trace has the parent's side alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import secrets
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

__all__ = ["DRAW", "REPLY", "TRACE", "VARIABLE", "Handle", "Ring", "Trace", "Traced", "Track", "free_path", "wanted"]

_log = logging.getLogger("aioenv")

VARIABLE = "AIOENV_TRACE"
TRACE = "trace"  # a CALL that the worker itself answers, rather than its service

# What workers do, beside the kinds of requests ("step", "reset", "render", "call"), whose names come first.
KINDS = ("start", "call", "reset", "step", "render", "reply", "draw")
REPLY, DRAW = "reply", "draw"
WAIT = "wait for "  # what the parent waits for has names that begin so
_NUMBER = {name: number for number, name in enumerate(KINDS)}

_ROW = struct.Struct("<iiqdd")  # kind, generation, request, begin, end
_HEAD = struct.Struct("<16sq")  # which ring this is, how many rows were written
_RING_BYTES = 2 << 20
_CAPACITY = _RING_BYTES // _ROW.size - 1  # the first row's place is the head's
# A worker writes up to three rows a request: the parent looks in before a ring can be full.
_LOOK_EVERY = _CAPACITY // 8
# A trace that nobody stops ends by itself before it fills the memory: so many spans take 32 MB, and 130 MB on disk.
MAX_SPANS = 1_000_000


class Handle(NamedTuple):
    """How a worker finds its ring."""

    path: str
    offset: int
    key: bytes


class Ring:
    """Rows in memory that a worker writes and its parent reads; the oldest are overwritten.

    Args:
        memory: `_RING_BYTES` of it.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._counter = self._view[16:24].cast("q")
        self._taken = 0

    @staticmethod
    def open(handle: Handle) -> Ring:
        """In a worker: the ring of a handle.

        Raises:
            OSError, ValueError: if the parent has stopped tracing meanwhile.
        """
        fd = os.open(handle.path, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, _RING_BYTES, offset=handle.offset)
        finally:
            os.close(fd)
        if _HEAD.unpack_from(memory)[0] != handle.key:
            memory.close()
            raise ValueError("this is another trace's memory")
        return Ring(memory)

    def append(self, kind: str, generation: int, request: int, begin: float, end: float) -> None:
        """Add a row; 1 µs. It is there for the parent even if the process dies the moment after."""
        count = self._counter[0]
        _ROW.pack_into(self._view, _ROW.size * (1 + count % _CAPACITY), _NUMBER[kind], generation, request, begin, end)
        self._counter[0] = count + 1

    def take(self) -> Iterator[tuple[int, int, int, float, float]]:
        """In the parent: the rows that were not taken yet, as far as they are still there."""
        count = self._counter[0]
        first = max(self._taken, count - _CAPACITY)
        self._taken = count
        for row in range(first, count):
            yield _ROW.unpack_from(self._view, _ROW.size * (1 + row % _CAPACITY))

    def close(self) -> None:
        """Let go of the memory."""
        self._counter.release()
        self._view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        else:
            self._memory.release()


class _Spans:
    """Times from and to of things with a number, in 24 bytes each."""

    def __init__(self) -> None:
        self.times = array("d")
        self.numbers = array("q")

    def add(self, begin: float, end: float, number: int | None) -> None:
        self.times.append(begin)
        self.times.append(end)
        self.numbers.append(-1 if number is None else number)

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        return zip(self.times[::2], self.times[1::2], self.numbers, strict=True)

    def __len__(self) -> int:
        return len(self.numbers)


class Track:
    """One worker's line: what it did, and what the parent did for it.

    Attributes:
        name: of the line.
        handle: what the worker is to be told; None if there is no memory for it.
    """

    def __init__(self, trace: Trace, name: str, handle: Handle | None, ring: Ring | None) -> None:
        self.name = name
        self.handle = handle
        self.ring = ring
        self.spans: dict[str, _Spans] = {}
        self._trace = trace
        self._steps: dict[tuple[int, int], int] = {}  # by generation and request: of those that are under way
        self._last: tuple[int, int] | None = None  # whose reply may still have a row to come
        self._sent = 0

    def follow(
        self, generation: int, kind: str, submit: Callable[..., int], *request: Any, on_reply: Callable[[Any], None]
    ) -> int:
        """Send a request, and note how long it and, later, what its reply sets off keep the loop.

        Args:
            generation: of the worker's process.
            kind: of the request.
            submit: is called with `request` and what is to be called with the reply.
            on_reply: what wants the reply.
        """
        trace = self._trace
        step = trace.step if kind != "call" else None

        def heard(outcome: Any) -> None:
            begin = perf_counter()
            try:
                on_reply(outcome)
            finally:
                trace.loop("handle", begin, perf_counter(), step)

        begin = perf_counter()
        number = submit(*request, heard)
        trace.loop("send", begin, perf_counter(), step)
        if step is not None and self.ring is not None:
            self._steps[generation, number] = step
        self._sent += 1
        if self._sent % _LOOK_EVERY == 0:
            self.look()
            trace.look()
        return number

    def look(self) -> None:
        """Take what the worker has written."""
        if self.ring is None:
            return
        for kind, generation, request, begin, end in self.ring.take():
            name = KINDS[kind]
            key = generation, request
            step = self._steps.get(key)
            if key != self._last and self._last is not None:
                self._steps.pop(self._last, None)  # replies come in order: nothing more is said of that one
            self._last = key
            spans = self.spans.get(name)
            if spans is None:
                spans = self.spans[name] = _Spans()
            spans.add(begin, end, step)

    def events(self) -> Iterator[tuple[str, float, float, int]]:
        """What the worker did, in order; between that, its waits."""
        rows = sorted((b, e, name, n) for name, spans in self.spans.items() for b, e, n in spans)
        last: float | None = None
        for begin, end, name, number in rows:
            if last is not None and begin > last:
                yield "wait", last, begin, -1
            yield name, begin, end, number
            last = end


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
        OSError: if the file can't be written.
    """

    def __init__(self, path: str | os.PathLike[str], workers: Sequence[str], on_stop: Callable[[], None]) -> None:
        self.path = Path(path)
        self.step: int | None = None
        self.stopped = False
        self._on_stop = on_stop
        self._began = perf_counter()
        self._loop: dict[str, _Spans] = {}
        self._steps: dict[int, int] = {}  # how many steps each slot was sent
        self._write([])
        self._memory, self._fd = _allocate(len(workers))
        self.tracks = [self._track(index, name) for index, name in enumerate(workers)]

    def _track(self, index: int, name: str) -> Track:
        if self._memory is None:
            return Track(self, name, None, None)
        offset = index * _RING_BYTES
        key = secrets.token_bytes(16)
        _HEAD.pack_into(self._memory, offset, key, 0)
        ring = Ring(memoryview(self._memory)[offset : offset + _RING_BYTES])
        return Track(self, name, Handle(f"/proc/{os.getpid()}/fd/{self._fd}", offset, key), ring)

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
        """The parent did this, or waited for it."""
        spans = self._loop.get(name)
        if spans is None:
            spans = self._loop[name] = _Spans()
        spans.add(begin, end, step)

    def waited(self, name: str) -> Callable[[float, float], None]:
        """What is to be told of each wait for `name`."""
        name = WAIT + name
        return lambda begin, end: self.loop(name, begin, end, max(self._steps.values(), default=0))

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
        self.stopped = True
        try:
            self._on_stop()
        finally:
            for track in self.tracks:
                track.look()
                if track.ring is not None:
                    track.ring.close()
            if self._memory is not None:
                self._memory.close()
                os.close(self._fd)
            self._write(self._events())

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Trace {'in' if self.stopped else 'to'} {self.path}>"

    def _events(self) -> Iterator[dict[str, Any]]:
        pid = os.getpid()
        lines: list[tuple[str, Iterable[tuple[str, float, float, int]]]] = [("loop", self._loop_events())]
        # waits for envs and for images may overlap, which spans of one line may not
        lines += [(name, sorted(self._named(name))) for name in sorted(self._loop) if name.startswith(WAIT)]
        lines += [(track.name, track.events()) for track in self.tracks]
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

    def _write(self, events: Any) -> None:
        """Write the file as a whole: whoever reads it meanwhile finds the one before."""
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(draft, "w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [')
                for number, event in enumerate(events):
                    file.write(",\n" if number else "\n")
                    file.write(json.dumps(event))
                file.write("\n]}\n")
            os.replace(draft, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


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


def _allocate(rings: int) -> tuple[mmap.mmap | None, int]:
    if not rings or not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return None, -1
    fd = os.memfd_create("aioenv-trace", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, rings * _RING_BYTES)  # pages are taken as they are written
        return mmap.mmap(fd, rings * _RING_BYTES), fd
    except BaseException:
        os.close(fd)
        raise


# ---------------------------------------------------------------- AIOENV_TRACE

_used: dict[str, int] = {}


def wanted() -> Path | None:
    """Where the user wants what is started now to be traced to, by `AIOENV_TRACE`; None: nowhere."""
    path = os.environ.get(VARIABLE)
    return free_path(path) if path else None


def free_path(path: str) -> Path:
    """The path, or, if this process has taken it already, one with a number: run.json, run-2.json, run-3.json, …"""
    count = _used[path] = _used.get(path, 0) + 1
    first = Path(path)
    return first if count == 1 else first.with_name(f"{first.stem}-{count}{first.suffix}")
