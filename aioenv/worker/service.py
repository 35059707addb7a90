"""The interface between the worker's loop and the service that it runs, and what services have in common.

A service holds the envs (`env_service.py`, `vector_service.py`) or draws images (`rendering/`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from aioenv.ipc.exceptions import dump_exception
from aioenv.ipc.frames import Buffer, Frame, Header, Kind
from aioenv.ipc.messages import Failure, message_of, reason_of, traceback_of, try_call
from aioenv.tracing.track import DRAW, REPLY, Ring
from aioenv.worker import worker_context
from aioenv.worker.mujoco_gl import note_missing_opengl

__all__ = [
    "FastPath",
    "PartialStep",
    "Reply",
    "Service",
    "SlotService",
    "StartFailed",
    "TracedService",
    "close_envs",
    "describe_failure",
]


class FastPath(NamedTuple):
    """The objects that C needs to answer plain steps (see `speedups.serve_steps`).

    Attributes:
        views: where a request's fixed part is read into: the number of the shared batch, if there are several, and the
            actions.
        actions: the array of all actions.
        steps, resets: the envs' methods.
        pending_reset: the kind of each row's next step (see `speedups.step_rows`).
        seeds: for the next resets, by row.
        at_end: the value of `pending_reset` after the end of an episode.
        current_row: the word of shared memory that says which row runs.
        into: where results go, for each shared batch.
        fixed_of: gives the arrays that travel for some successive rows.
        schemas: the `NumericSchema`s.
        fixed: the arrays that travel for all rows.
        write_extras: writes the states and checkpoints of successive rows, and returns False if Python must reply;
            None: there are none.
    """

    views: Any
    actions: Any
    steps: list[Any]
    resets: list[Any]
    pending_reset: list[int]
    seeds: dict[int, int]
    at_end: int
    current_row: Any
    into: list[Any]
    fixed_of: Callable[[int, int], Any]
    schemas: list[Any]
    fixed: Any
    write_extras: Callable[[int, int], bool] | None


# An exception's message may hold a whole array. It is sent twice, as the traceback ends with it, and may be logged.
_MAX_TEXT = 16 << 10


class Reply(NamedTuple):
    """A RESULT: raw buffers in the order that both sides agreed on, and a payload of variable length."""

    fixed: Sequence[Buffer] = ()
    payload: Buffer = b""


class PartialStep(NamedTuple):
    """A STEP that C has started and Python must finish (see `speedups.step_rows`).

    Attributes:
        batch: the index of the shared batch that observations go to; 0 without shared memory.
        rows: the rows to step.
        actions: one action a row.
        infos: (row, info) of the rows that C has stepped.
        row: the first row that C has not stepped; -1 if the step can't go on because of something that the envs did.
        outcome: the result or exception of that row's `step` or `reset`; with row -1 the exception to raise.
        nonstandard: whether further steps will probably be nonstandard in the same way.
        last_step: the result of that row's `step`, if it ended an episode and the outcome is that of the reset after
            it; else None.
    """

    kind: Kind
    request: int
    generation: int
    batch: int
    rows: range
    actions: list[Any]
    infos: list[tuple[int, dict[str, Any]]]
    row: int
    outcome: Any
    nonstandard: bool
    last_step: Any

    @classmethod
    def from_tuple(cls, got: tuple[Any, ...]) -> PartialStep:
        """Make it of the tuple that `speedups.serve_steps` returns."""
        request, generation, batch, first, count, *rest = got
        return cls(Kind.STEP, request, generation, batch, range(first, first + count), *rest)


class Service(Protocol):
    """An object in a worker process that answers one request at a time.

    The parent sends a pickled callable, which makes the service when it is called in the worker without arguments. An
    exception from `handle` becomes a FAILURE, and the worker lives on. A CALL goes to a public method by its name.
    """

    def describe(self) -> Any:
        """Return the description that the parent gets once the service is up; it must pickle."""

    def request_buffers(self, header: Header) -> Sequence[memoryview] | None:
        """Return the buffers to read the fixed part of a request into; None means any memory."""

    def expected_buffers(self) -> Sequence[memoryview] | None:
        """Return the object that `request_buffers` will probably return for the next request."""

    def fast_path(self) -> FastPath | None:
        """Return what C needs to answer plain steps without Python, or None; the loop asks before each request."""

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """Answer a RESET, STEP or RENDER."""

    def after_reply(self) -> Reply | None:
        """Do the work that could wait until the reply was sent; a result is sent as IMAGES."""

    def close(self) -> None:
        """Release everything; the loop calls it once, at the end."""


class SlotService:
    """Base of the services that are stepped: where requests are read into, and which method answers which request."""

    _action_views: list[memoryview] | None = None  # the actions of all rows; None until `configure`

    def request_buffers(self, header: Header) -> Sequence[memoryview] | None:
        """Read the actions of a step of all rows straight into the action arrays."""
        return self._action_views if header.kind is Kind.STEP else None

    def expected_buffers(self) -> Sequence[memoryview] | None:
        """Expect a step of all rows."""
        return self._action_views

    def fast_path(self) -> FastPath | None:
        """Return None: Python answers."""
        return None

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """Answer a STEP or a RESET."""
        if isinstance(frame, PartialStep):
            return self._finish_step(frame)
        if frame.kind is Kind.STEP:
            return self._step(frame)
        if frame.kind is Kind.RESET:
            return self._reset(frame)
        raise ValueError(f"{type(self).__name__} has no answer to {frame.kind.name}")

    def _step(self, frame: Frame) -> Reply:
        raise NotImplementedError

    def _finish_step(self, partial: PartialStep) -> Reply:
        raise NotImplementedError

    def _reset(self, frame: Frame) -> Reply:
        raise NotImplementedError


class TracedService:
    """Wraps a service while it is traced, and records when it does what; an untraced service is not wrapped.

    Args:
        service: the service that does the work.
        ring: gets one row for each piece of work.
    """

    def __init__(self, service: Service, ring: Ring) -> None:
        self.service = service
        self.ring = ring
        self._current = (0, -1)  # generation and request
        self._handled_at: float | None = None  # when the service had handled that request

    def request_buffers(self, header: Header) -> Sequence[memoryview] | None:
        """Ask the service."""
        return self.service.request_buffers(header)

    def expected_buffers(self) -> Sequence[memoryview] | None:
        """Ask the service."""
        return self.service.expected_buffers()

    def fast_path(self) -> None:
        """Return None: steps that C answers can't be timed."""

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """Let the service answer, and record how long it took."""
        self._current = frame.generation, frame.request
        reply: Reply = self._timed(frame.kind.name.lower(), lambda: self.service.handle(frame))
        return reply

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.service, name)
        self._current = 0, -1
        return lambda *args, **kwargs: self._timed("call", lambda: method(*args, **kwargs))

    def _timed(self, kind: str, work: Callable[[], Any]) -> Any:
        start = perf_counter()
        try:
            return work()
        finally:
            self._handled_at = end = perf_counter()
            self.ring.append(kind, *self._current, start, end)

    def after_reply(self) -> Reply | None:
        """Record that the reply was written, and how long the service works after it."""
        start = perf_counter()
        if self._handled_at is not None:  # None after the reply to the request that has started the trace
            self.ring.append(REPLY, *self._current, self._handled_at, start)
        late = self.service.after_reply()
        if late is not None:
            self.ring.append(DRAW, *self._current, start, perf_counter())
        return late

    def close(self) -> None:
        """Close the service."""
        self.service.close()


# ------------------------------------------------------------ failures


class StartFailed(Exception):
    """A service could not be made; it knows more than the exception that was raised (which row it was, say)."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def describe_failure(exc: BaseException, row: int | None = None) -> Failure:
    """Describe an exception in a form that always travels, with the exception itself if it pickles."""
    note_missing_opengl(exc)
    _note_running_loop(exc)
    message, text = _shortened(message_of(exc)), _shortened(traceback_of(exc))
    pickled, why = try_call(dump_exception, exc)
    return Failure(row, type(exc).__qualname__, message, text, pickled, "" if why is None else reason_of(why))


def _note_running_loop(exc: BaseException) -> None:
    """Add advice to the errors of asyncio about a second event loop on the thread of a running one."""
    asyncio = sys.modules.get("asyncio")  # which worker processes need not have imported
    if asyncio is None or asyncio._get_running_loop() is None:
        return
    if isinstance(exc, RuntimeError) and "event loop" in str(exc):
        exc.add_note(
            "With num_workers=0 short steps run on the thread of the caller, and so of its event loop. An env that "
            "runs an event loop needs a worker (num_workers=1 or more), or a thread of its own (debug=True)"
        )


def _shortened(text: str) -> str:
    """Leave out the middle of a very long text."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def close_envs(envs: Iterable[Any], what: str) -> None:
    """Close every env; log an exception as a warning of "aioenv.workers", and go on with the next env.

    Args:
        envs: objects with a `close` method, row by row.
        what: a name for one of them, for the log.
    """
    logged = set()
    for row, env in enumerate(envs):
        with worker_context.running_row(row):
            try:
                env.close()
            except Exception as exc:
                if (text := repr(exc)) in logged:  # the same bug in many envs is logged once
                    continue
                logged.add(text)
                # the parent logs records of the root logger of a worker process under "aioenv.workers"
                log = logging.getLogger(None if worker_context.owns_process() else "aioenv.workers")
                log.warning("%s raised when it was closed", what, exc_info=True)
            except BaseException:  # an env that ends its program (sys.exit): the worker is ending anyway
                pass
