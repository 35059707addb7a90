"""What a worker runs: the interface between the loop in `worker.py` and the service that it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from aioenv.ipc.exceptions import dump_exception
from aioenv.ipc.frames import Buffer, Frame, Header, Kind
from aioenv.ipc.messages import Failure, message_of, reason_of, traceback_of, tried
from aioenv.tracing.ring import DRAW, REPLY, Ring
from aioenv.worker import worker_context
from aioenv.worker.mujoco_gl import note_missing_opengl

__all__ = ["FastPath", "PartialStep", "Reply", "Service", "SlotService", "TracedService", "close_envs"]


class FastPath(NamedTuple):
    """The objects that `speedups.serve_express` needs to answer plain steps.

    Attributes:
        views: where a request's fixed part is read into: the number of the shared batch, if there are several, and the
            actions.
        actions: the array of all actions.
        steps, resets: the envs' methods.
        due: what each row's next step is (see `speedups.step_rows`).
        seeds: for the next resets, by row.
        at_end: what is due after the end of an episode.
        mark: the word of shared memory that holds the current row.
        into: where results go, for each shared batch.
        fixed_of: gives the arrays that travel for some successive rows.
        schemas: `NumericSchema`s, the kinds of infos that C turns into columns.
        fixed: the arrays that travel for all rows.
        write_extra: writes what rides on the reply besides, for some successive rows, and returns whether that is all
            there is to tell; None: there is nothing.
    """

    views: Any  # a list of memoryviews
    actions: Any
    steps: list[Any]
    resets: list[Any]
    due: list[int]
    seeds: dict[int, int]
    at_end: int
    mark: Any
    into: list[Any]
    fixed_of: Callable[[int, int], Any]
    schemas: list[Any]
    fixed: Any
    write_extra: Callable[[int, int], bool] | None


class Reply(NamedTuple):
    """A RESULT: raw buffers in the order that both sides agreed on, and a tail."""

    fixed: Sequence[Buffer] = ()
    tail: Buffer = b""


class PartialStep(NamedTuple):
    """A STEP that C has begun (see `speedups.step_rows`).

    Attributes:
        lane: of shared memory, where observations go; 0 if there is none.
        rows: those that are stepped.
        actions: one a row.
        infos: of those that were stepped.
        row: the first that was not; -1: what the envs did keeps this from going on.
        outcome: what the `step` or `reset` of that gave, or raised; with -1 what is wrong.
        odd: whether what is not usual of it is probably so each time.
    """

    kind: Kind
    request: int
    generation: int
    lane: int
    rows: range
    actions: list[Any]
    infos: list[tuple[int, dict[str, Any]]]
    row: int
    outcome: Any
    odd: bool

    @classmethod
    def of(cls, got: tuple[Any, ...]) -> PartialStep:
        """What `speedups.serve_express` has given."""
        request, generation, lane, first, count, *rest = got
        return cls(Kind.STEP, request, generation, lane, range(first, first + count), *rest)


class Service(Protocol):
    """Lives in a worker process; gets one request at a time.

    The parent sends a pickled callable; called without arguments in the worker, it gives the service. An
    exception from `handle` becomes a FAILURE and the worker lives on.
    """

    def describe(self) -> Any:
        """What the parent is told once the service is up; anything that pickles."""

    def place(self, header: Header) -> Sequence[memoryview] | None:
        """Where the fixed part of a coming request shall be read into; None: nowhere in particular."""

    def expect(self) -> Sequence[memoryview] | None:
        """What `place` will probably give for the next request: the very same object."""

    def express(self) -> FastPath | None:
        """What C needs to answer plain steps by itself; None if there is more to a step. Asked for again and again."""

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """Answer a RESET, STEP or RENDER. CALLs go to the service's public methods by name."""

    def afterwards(self) -> Reply | None:
        """What could wait until the reply had gone out; its outcome, if any, is sent as IMAGES."""

    def close(self) -> None:
        """Let go of everything; called once, at the end."""


class SlotService:
    """What services that are stepped have in common: where requests are read into, and who answers which."""

    _action_views: list[memoryview] | None = None  # where the actions of all rows are read into, once that is known

    def place(self, header: Header) -> Sequence[memoryview] | None:
        """Actions of all rows go straight into the action arrays."""
        return self._action_views if header.kind is Kind.STEP else None

    def expect(self) -> Sequence[memoryview] | None:
        """A step of all rows."""
        return self._action_views

    def express(self) -> FastPath | None:
        """None: Python answers."""
        return None

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """Answer a STEP or a RESET."""
        if isinstance(frame, PartialStep):
            return self._go_on(frame)
        if frame.kind is Kind.STEP:
            return self._step(frame)
        if frame.kind is Kind.RESET:
            return self._reset(frame)
        raise ValueError(f"{type(self).__name__} has no answer to {frame.kind.name}")

    def _step(self, frame: Frame) -> Reply:
        raise NotImplementedError

    def _go_on(self, begun: PartialStep) -> Reply:
        raise NotImplementedError

    def _reset(self, frame: Frame) -> Reply:
        raise NotImplementedError


# ------------------------------------------------------------ closing envs


def close_envs(envs: Iterable[Any], what: str) -> None:
    """Close envs. An exception of one is a warning in the log "aioenv.workers", and does not keep the others open.

    Args:
        envs: row by row; they have a `close`.
        what: each is, for the log.
    """
    said = set()
    for row, env in enumerate(envs):
        with worker_context.running_row(row):
            try:
                env.close()
            except Exception as exc:
                if (text := repr(exc)) in said:  # of many envs that have one bug the first
                    continue
                said.add(text)
                # in a process of its own the root's records come out as that log's
                log = logging.getLogger(None if worker_context.owns_process() else "aioenv.workers")
                log.warning("%s raised when it was closed", what, exc_info=True)
            except BaseException:  # it ends its program, as some do there: that is just what happens
                pass


# ------------------------------------------------------------ a traced service


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


# ------------------------------------------------------------ failures


class StartFailed(Exception):
    """A service could not be made, and knows more about it than the exception tells (which row, say)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


# An exception may have a whole array in its message. It is told twice, in the traceback too, and logged perhaps.
_MAX_TEXT = 16 << 10


def describe_failure(exc: BaseException, row: int | None = None) -> Failure:
    """An exception in a form that always travels, with the exception itself if that can be sent."""
    note_missing_opengl(exc)
    message, text = _shortened(message_of(exc)), _shortened(traceback_of(exc))
    pickled, why = tried(dump_exception, exc)
    return Failure(row, type(exc).__qualname__, message, text, pickled, "" if why is None else reason_of(why))


def _shortened(text: str) -> str:
    """A text with its middle left out, if it is very long."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
