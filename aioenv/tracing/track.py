"""One worker's line of a timeline: its own actions, and the requests that the parent sent to it.

The worker writes a row for each action to a ring buffer in shared memory (`Ring`), and its parent reads the rows.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import struct
from array import array
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from aioenv.tracing.timeline import Trace

__all__ = [
    "CAPACITY",
    "COLLECT_EVERY",
    "DRAW",
    "KINDS",
    "REPLY",
    "RING_BYTES",
    "TRACE",
    "UNANSWERED",
    "Handle",
    "Ring",
    "RingMemory",
    "Spans",
    "Track",
]


TRACE = "trace"  # a CALL that the worker itself handles, not its service

# The actions of workers: the kinds of requests, the start, and what follows them.
KINDS = ("start", "call", "reset", "step", "render", "reply", "draw")
REPLY, DRAW = "reply", "draw"
_NUMBER = {name: number for number, name in enumerate(KINDS)}

_ROW = struct.Struct("<iiqdd")  # kind, generation, request, begin, end
_HEAD = struct.Struct("<16sq")  # the key of the ring, the number of rows written
RING_BYTES = 2 << 20
CAPACITY = RING_BYTES // _ROW.size - 1  # in rows; the head takes the place of the first


class Handle(NamedTuple):
    """The place where a worker finds its ring."""

    path: str
    offset: int
    key: bytes


class Ring:
    """Rows in memory that a worker writes and its parent reads; the oldest are overwritten.

    Args:
        memory: a buffer of `RING_BYTES`.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._counter = self._view[16:24].cast("q")
        self._read = 0

    @staticmethod
    def open(handle: Handle) -> Ring:
        """Open the ring of a handle, in a worker.

        Raises:
            OSError, ValueError: if the parent has stopped tracing meanwhile.
        """
        fd = os.open(handle.path, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, RING_BYTES, offset=handle.offset)
        finally:
            os.close(fd)
        if _HEAD.unpack_from(memory)[0] != handle.key:
            memory.close()
            raise ValueError("this is another trace's memory")
        return Ring(memory)

    def append(self, kind: str, generation: int, request: int, begin: float, end: float) -> None:
        """Add a row; this takes 1 µs. The parent can read it even if the process dies right afterwards."""
        count = self._counter[0]
        _ROW.pack_into(self._view, _ROW.size * (1 + count % CAPACITY), _NUMBER[kind], generation, request, begin, end)
        self._counter[0] = count + 1

    def read_new(self) -> Iterator[tuple[int, int, int, float, float]]:
        """Yield the rows added since the last call, in the parent; overwritten ones are missing."""
        count = self._counter[0]
        first = max(self._read, count - CAPACITY)
        self._read = count
        for row in range(first, count):
            yield _ROW.unpack_from(self._view, _ROW.size * (1 + row % CAPACITY))

    def close(self) -> None:
        """Release the memory."""
        self._counter.release()
        self._view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
        else:
            self._memory.release()


class RingMemory:
    """The parent's memory for the rings of its workers; empty where the platform has no such memory.

    Args:
        count: the number of rings.
    """

    def __init__(self, count: int) -> None:
        self._memory, self._fd = _allocate(count)

    def ring(self, index: int) -> tuple[Handle, Ring] | tuple[None, None]:
        """Make the ring with this index; return its handle for the worker, and the ring, or None for both."""
        if self._memory is None:
            return None, None
        offset = index * RING_BYTES
        key = secrets.token_bytes(16)
        _HEAD.pack_into(self._memory, offset, key, 0)
        ring = Ring(memoryview(self._memory)[offset : offset + RING_BYTES])
        return Handle(f"/proc/{os.getpid()}/fd/{self._fd}", offset, key), ring

    def close(self) -> None:
        """Release the memory; all rings must be closed before."""
        if self._memory is not None:
            self._memory.close()
            os.close(self._fd)


def _allocate(rings: int) -> tuple[mmap.mmap | None, int]:
    if not rings or not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return None, -1
    fd = os.memfd_create("aioenv-trace", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, rings * RING_BYTES)  # pages are allocated as they are written
        return mmap.mmap(fd, rings * RING_BYTES), fd
    except BaseException:
        os.close(fd)
        raise


UNANSWERED = "no reply yet"  # the name of the span of a request that is unanswered when the timeline ends

# Requests between two reads of a ring: a worker writes up to three rows per request, and no ring may overflow.
COLLECT_EVERY = CAPACITY // 8


class Spans:
    """Spans of time, each with a number: 24 bytes per span."""

    def __init__(self) -> None:
        self.times = array("d")
        self.numbers = array("q")

    def add(self, begin: float, end: float, number: int | None) -> None:
        """Add a span; its number may be None."""
        self.times.append(begin)
        self.times.append(end)
        self.numbers.append(-1 if number is None else number)

    def __iter__(self) -> Iterator[tuple[float, float, int]]:
        return zip(self.times[::2], self.times[1::2], self.numbers, strict=True)

    def __len__(self) -> int:
        return len(self.numbers)


class Track:
    """One worker's line: its own actions, and the requests that the parent sent to it.

    Args:
        trace: the timeline.
        name, handle, ring: see the attributes.

    Attributes:
        name: the name of the line.
        handle: where the worker finds its ring; None if there is none.
        ring: the worker's ring; None if there is none.
        spans: the worker's actions so far, by name.
    """

    def __init__(self, trace: Trace, name: str, handle: Handle | None, ring: Ring | None) -> None:
        self.name = name
        self.handle = handle
        self.ring = ring
        self.spans: dict[str, Spans] = {}
        self._trace = trace
        self._steps: dict[tuple[int, int], int] = {}  # the step of each outstanding request, by generation and id
        self._unanswered: dict[object, tuple[float, int | None]] = {}  # send time and step, the oldest first
        self._last: tuple[int, int] | None = None  # the latest request in the ring, which may get more rows
        self._sent = 0

    def submit(
        self, generation: int, kind: str, submit: Callable[..., int], *request: Any, on_reply: Callable[[Any], None]
    ) -> int:
        """Send a request; record how long this, and later the handling of its reply, occupy the loop.

        Args:
            generation: the generation of the worker's process.
            kind: the kind of the request.
            submit: called with `request` and a callback for the reply; returns the request's id.
            request: the arguments of `submit`.
            on_reply: called with the reply.

        Returns:
            The request's id.
        """
        trace = self._trace
        step = trace.step if kind != "call" else None

        key = object()

        def on_traced_reply(outcome: Any) -> None:
            self._unanswered.pop(key, None)
            begin = perf_counter()
            try:
                on_reply(outcome)
            finally:
                trace.add_loop_span("handle", begin, perf_counter(), step)

        begin = perf_counter()
        self._unanswered[key] = begin, step
        try:
            number = submit(*request, on_traced_reply)
        except BaseException:
            self._unanswered.pop(key, None)
            raise
        trace.add_loop_span("send", begin, perf_counter(), step)
        if step is not None and self.ring is not None:
            self._steps[generation, number] = step
        self._sent += 1
        if self._sent % COLLECT_EVERY == 0:
            self.collect()
            trace.stop_if_full()
        return number

    def collect(self) -> None:
        """Read the rows that the worker has written."""
        if self.ring is None:
            return
        for kind, generation, request, begin, end in self.ring.read_new():
            name = KINDS[kind]
            key = generation, request
            step = self._steps.get(key)
            if key != self._last and self._last is not None:
                self._steps.pop(self._last, None)  # replies come in order: it gets no more rows
            self._last = key
            spans = self.spans.get(name)
            if spans is None:
                spans = self.spans[name] = Spans()
            spans.add(begin, end, step)

    def events(self, now: float) -> Iterator[tuple[str, float, float, int]]:
        """Yield the worker's actions in order, its waits between them, and its unanswered request, if there is one."""
        rows = sorted((b, e, name, n) for name, spans in self.spans.items() for b, e, n in spans)
        last: float | None = None
        done = rows[-1][1] if rows else 0.0
        for sent, step in itertools.islice(self._unanswered.values(), 1):  # later requests wait for the first
            if (begin := max(sent, done)) < now:
                rows.append((begin, now, UNANSWERED, -1 if step is None else step))
        for begin, end, name, number in rows:
            if last is not None and begin > last:
                yield "wait", last, begin, -1
            yield name, begin, end, number
            last = end
