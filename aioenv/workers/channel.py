"""Channels: how frames get to a worker and back. One interface; the streams channel is the portable reference."""

from __future__ import annotations

from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Sequence
from typing import Protocol

from aioenv.wire.decoder import Decoder
from aioenv.wire.frames import Buffer, Frame, Header

__all__ = ["Channel", "StreamsChannel"]

# One read takes what has come, up to this: asyncio itself reads a pipe in pieces of 256 KiB.
_READ_BYTES = 1 << 20

Place = Callable[[Header], "Sequence[memoryview] | None"]


class Channel(Protocol):
    """Frames to and from one worker."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Write a frame's buffers; never blocks, what the kernel does not take is kept and sent later.

        The buffers must not change before the worker has replied.
        """

    async def receive(self, on_frame: Callable[[Frame], None]) -> None:
        """Read frames until the stream ends; `on_frame` is called with each.

        Raises:
            WireError: if the stream is broken, or ends inside a frame.
        """

    def close(self) -> None:
        """Close the parent's sending end: the worker sees the end of its stream."""


class StreamsChannel:
    """Frames over asyncio's subprocess streams.

    Args:
        writer: the worker's stdin.
        reader: the worker's stdout.
        place: where the fixed parts of replies shall be read into (see `wire.Decoder`).
    """

    def __init__(self, writer: StreamWriter, reader: StreamReader, place: Place) -> None:
        self._writer = writer
        self._reader = reader
        self._decoder = Decoder(place)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Write a frame's buffers (see `Channel`)."""
        self._writer.writelines(buffers)

    async def receive(self, on_frame: Callable[[Frame], None]) -> None:
        """Read frames until the stream ends (see `Channel`)."""
        reader, decoder = self._reader, self._decoder
        while data := await reader.read(_READ_BYTES):
            decoder.feed(data)
            while (frame := decoder.next_frame()) is not None:
                on_frame(frame)
        decoder.finish()

    def close(self) -> None:
        """Close the worker's stdin."""
        self._writer.close()
