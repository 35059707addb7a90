"""A service that writes down what it does when, for the timeline of a run (see `trace.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from aioenv.ipc.frames import Frame, Header
from aioenv.tracing.ring import DRAW, REPLY, Ring
from aioenv.worker.service import PartialStep, Reply, Service

__all__ = ["TracedService"]


class TracedService:
    """Stands in for a service while it is traced; nothing is in the way of one that is not.

    Args:
        service: does the work.
        ring: gets a row for each thing done.
    """

    def __init__(self, service: Service, ring: Ring) -> None:
        self.service = service
        self.ring = ring
        self._now = (0, -1)  # generation and request
        self._done: float | None = None  # when the service was done with it

    def place(self, header: Header) -> Sequence[memoryview] | None:
        """As the service."""
        return self.service.place(header)

    def expect(self) -> Sequence[memoryview] | None:
        """As the service."""
        return self.service.expect()

    def express(self) -> None:
        """None: what C answers by itself nobody can time."""

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """As the service, and note how long it took."""
        self._now = frame.generation, frame.request
        reply: Reply = self._timed(frame.kind.name.lower(), lambda: self.service.handle(frame))
        return reply

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.service, name)
        self._now = 0, -1
        return lambda *args, **kwargs: self._timed("call", lambda: method(*args, **kwargs))

    def _timed(self, kind: str, work: Callable[[], Any]) -> Any:
        begin = perf_counter()
        try:
            return work()
        finally:
            self._done = done = perf_counter()
            self.ring.append(kind, *self._now, begin, done)

    def afterwards(self) -> Reply | None:
        """As the service; the reply has just been written."""
        begin = perf_counter()
        if self._done is not None:  # else this is the reply to whoever wants it traced
            self.ring.append(REPLY, *self._now, self._done, begin)
        late = self.service.afterwards()
        if late is not None:
            self.ring.append(DRAW, *self._now, begin, perf_counter())
        return late

    def close(self) -> None:
        """As the service."""
        self.service.close()
