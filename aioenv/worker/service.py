"""What a worker runs: the interface between the loop in `worker.py` and the service that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from aioenv.ipc.frames import Buffer, Frame, Header, Kind

__all__ = ["PartialStep", "Plan", "Reply", "Service", "SlotService"]

# What `speedups.serve_express` takes.
Plan: TypeAlias = "tuple[Any, ...]"


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

    def express(self) -> Plan | None:
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

    def express(self) -> Plan | None:
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
