"""What is asked of a worker, and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioenv.definitions.table import DefinitionTable
from aioenv.errors import EnvError, SlotError, WireError, WorkerDied
from aioenv.ipc.frames import Buffer, Frame, Kind
from aioenv.ipc.messages import CallRequest, Failure, dump, load
from aioenv.process.channel import ScatterChannel
from aioenv.process.connection import Connection
from aioenv.process.life import WorkerState
from aioenv.process.requests import OnReply
from aioenv.tracing.ring import TRACE
from aioenv.tracing.track import Track

__all__ = ["Talk", "into_future"]


class Talk:
    """The part of a worker that talks with its latest process."""

    express: ScatterChannel | None
    generation: int
    definitions: DefinitionTable | None
    _state: WorkerState
    _connection: Connection | None
    _track: Track | None

    if TYPE_CHECKING:

        def failure(self, failure: Failure) -> EnvError: ...  # noqa: D102

        def death(self) -> WorkerDied: ...  # noqa: D102

    def submit(
        self,
        kind: Kind,
        fixed: Sequence[Buffer] = (),
        tail: Buffer = b"",
        *,
        into: Sequence[memoryview] | None = None,
        on_reply: OnReply,
    ) -> int:
        """Send a request; never blocks.

        Args:
            kind: what is asked.
            fixed: raw buffers; they must stay as they are until the reply.
            tail: what varies in length.
            into: where the fixed part of the reply shall be read into, if its length is the same.
            on_reply: called once, on the loop: with the RESULT or READY or FAILURE frame, or with a WorkerDied.

        Returns:
            The request's id.

        Raises:
            WorkerDied: if the worker is not there any more; `on_reply` is not called then.
            WireError: if the request is too large.
        """
        if self._state is not WorkerState.READY:
            raise self.death()
        assert self._connection is not None
        if self._track is not None:
            submit = self._connection.submit
            return self._track.follow(
                self.generation, kind.name.lower(), submit, kind, fixed, tail, into, on_reply=on_reply
            )
        return self._connection.submit(kind, fixed, tail, into, on_reply)

    def trace(self, track: Track | None) -> None:
        """Have all that its processes do written to this line, from now on; None: no longer. Never blocks."""
        self._track = track
        self._note_express()
        if self._state is WorkerState.READY:
            self._tell_of(track)

    def _tell_of(self, track: Track | None) -> None:
        call = CallRequest(TRACE, (track.handle if track is not None else None,), {})
        with contextlib.suppress(WorkerDied, WireError, RuntimeError):  # it ends, or its loop has
            self.submit(Kind.CALL, (), dump(call, self.definitions), on_reply=lambda _: None)

    def awaits(self, into: Sequence[memoryview]) -> bool:
        """Whether a request was sent whose reply is to be read into this very list of buffers, and has not come."""
        connection = self._connection
        return connection is not None and any(one.into is into for one in connection.requests.pending.values())

    def abandon_requests(self) -> None:
        """Nobody waits for the replies to what is in flight any more."""
        if self._connection is not None:
            self._connection.requests.abandoned = True

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the service.

        If this is cancelled, the worker still runs the method; the result is dropped.

        Raises:
            WorkerDied: if the worker ended before it answered.
            EnvError: if the method raised.
        """
        reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.submit(
            Kind.CALL, (), dump(CallRequest(method, args, kwargs), self.definitions), on_reply=into_future(reply)
        )
        frame = await reply
        if frame.kind is Kind.FAILURE:
            raise self.failure(load(frame.tail))
        return load(frame.tail)

    def poll(self) -> None:
        """Take replies that have come already, without waiting for the loop."""
        if self._connection is not None:
            self._connection.poll()

    @property
    def waitable(self) -> int | None:
        """A descriptor to wait on for replies; None if the loop has to do something first."""
        return self._connection.waitable if self._connection is not None else None

    @property
    def rests(self) -> bool:
        """Whether the loop does not look for replies, until `listen`: those of others are enough."""
        return self._connection is not None and self._connection.channel.rests

    def listen(self) -> None:
        """Have the loop look for replies, if it did not."""
        if self._connection is not None:
            self._connection.listen()

    async def where(self) -> str:
        """The Python frames that its process is in, the innermost first; "" if it does not say within a moment."""
        connection = self._connection
        return await connection.where() if self._state is WorkerState.READY and connection is not None else ""

    @property
    def busy(self) -> bool:
        """Whether any request has not been answered yet."""
        return self._connection is not None and bool(self._connection.requests.pending)

    def _note_express(self) -> None:
        self.express = None
        if self._state is WorkerState.READY and self._track is None and self._connection is not None:
            channel = self._connection.channel
            self.express = channel if isinstance(channel, ScatterChannel) else None


def into_future(future: asyncio.Future[Frame]) -> OnReply:
    """Puts what comes of a request into a future, unless it is done already."""

    def on_reply(outcome: Frame | SlotError) -> None:
        if future.done():
            return
        if isinstance(outcome, Frame):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    return on_reply
