"""What a worker runs: the interface between the loop in `worker.py` and the service that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from aioenv.wire.frames import Buffer, Frame, Header

__all__ = ["Reply", "Service"]


class Reply(NamedTuple):
    """A RESULT: raw buffers in the order that both sides agreed on, and a tail."""

    fixed: Sequence[Buffer] = ()
    tail: Buffer = b""


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

    def handle(self, frame: Frame) -> Reply:
        """Answer a RESET, STEP or RENDER. CALLs go to the service's public methods by name."""

    def afterwards(self) -> Reply | None:
        """What could wait until the reply had gone out; its outcome, if any, is sent as IMAGES."""

    def close(self) -> None:
        """Let go of everything; called once, at the end."""
