"""One worker's line of a timeline: what it did, and what the parent did for it."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from aioenv.tracing.ring import CAPACITY, KINDS, Handle, Ring

if TYPE_CHECKING:
    from aioenv.tracing.timeline import Trace

__all__ = ["LOOK_EVERY", "UNANSWERED", "Spans", "Track"]

UNANSWERED = "no reply yet"  # what a worker is at when the timeline ends

# A worker writes up to three rows a request: the parent looks in before a ring can be full.
LOOK_EVERY = CAPACITY // 8


class Spans:
    """Times from and to of things with a number, in 24 bytes each."""

    def __init__(self) -> None:
        self.times = array("d")
        self.numbers = array("q")

    def add(self, begin: float, end: float, number: int | None) -> None:
        """Add one; its number is None if it has none."""
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
        self.spans: dict[str, Spans] = {}
        self._trace = trace
        self._steps: dict[tuple[int, int], int] = {}  # by generation and request: of those that are under way
        self._open: dict[object, tuple[float, int | None]] = {}  # when what has no reply yet was sent, of which step
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

        this = object()

        def heard(outcome: Any) -> None:
            self._open.pop(this, None)
            begin = perf_counter()
            try:
                on_reply(outcome)
            finally:
                trace.loop("handle", begin, perf_counter(), step)

        begin = perf_counter()
        self._open[this] = begin, step
        try:
            number = submit(*request, heard)
        except BaseException:
            self._open.pop(this, None)
            raise
        trace.loop("send", begin, perf_counter(), step)
        if step is not None and self.ring is not None:
            self._steps[generation, number] = step
        self._sent += 1
        if self._sent % LOOK_EVERY == 0:
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
                spans = self.spans[name] = Spans()
            spans.add(begin, end, step)

    def events(self, now: float) -> Iterator[tuple[str, float, float, int]]:
        """What the worker did, in order; between that, its waits; and what it is at now, if it has not replied."""
        rows = sorted((b, e, name, n) for name, spans in self.spans.items() for b, e, n in spans)
        last: float | None = None
        done = rows[-1][1] if rows else 0.0
        for sent, step in itertools.islice(self._open.values(), 1):  # the others wait for this one
            if (begin := max(sent, done)) < now:
                rows.append((begin, now, UNANSWERED, -1 if step is None else step))
        for begin, end, name, number in rows:
            if last is not None and begin > last:
                yield "wait", last, begin, -1
            yield name, begin, end, number
            last = end
