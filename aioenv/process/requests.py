"""What was asked of one process and has not been answered yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from aioenv.errors import SlotError
from aioenv.ipc.frames import Frame, Header, Kind

__all__ = ["OnReply", "PendingReply", "Requests"]

OnReply: TypeAlias = "Callable[[Frame | SlotError], None]"


class PendingReply(NamedTuple):
    """A request whose reply has not come.

    Attributes:
        into: where the fixed part of the reply goes; None: into memory of its own.
        on_reply: is called with the reply.
        counted: a part, its whole, what takes the tail, and whether that is called where there is none, too. If the
            reply is a RESULT, and the whole is `waiting`, all that `on_reply` would do beside that is that the part has
            `arrived`, that one less of the whole is `open`, and that its `done` is resolved when none is. None: it
            would do more.
    """

    into: Sequence[memoryview] | None
    on_reply: OnReply
    counted: tuple[Any, Any, Callable[[memoryview], None], bool] | None = None


class Requests:
    """The requests of one process.

    C (`speedups.send_express`, `take_express`) adds to them and takes from them, too.

    Args:
        generation: how often its worker has been started; all frames carry it.

    Attributes:
        generation: as given.
        next: the id of the next one.
        pending: those that have not been answered, by id.
        abandoned: whether nobody waits for the replies any more.
    """

    __slots__ = ("abandoned", "generation", "next", "pending")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.next = 0
        self.pending: dict[int, PendingReply] = {}
        self.abandoned = False

    def number(self) -> int:
        """An id for the next request."""
        request = self.next
        self.next = (request + 1) & 0xFFFFFFFF
        return request

    def add(self, request: int, pending: PendingReply) -> None:
        """This has been sent."""
        self.pending[request] = pending
        self.abandoned = False

    def place(self, header: Header) -> Sequence[memoryview] | None:
        """Where the fixed part of a frame goes (see `Decoder`)."""
        pending = self.pending.get(header.request)
        if pending is None or header.kind is not Kind.RESULT or header.generation != self.generation:
            return None
        return pending.into

    def expect(self) -> Sequence[memoryview] | None:
        """Where that of the next one probably goes."""
        for pending in self.pending.values():
            return pending.into
        return None
