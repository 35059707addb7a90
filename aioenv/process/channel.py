"""Channels: how frames get to a worker and back. One interface, two ways.

*Streams*, the portable reference: asyncio's streams over the worker's stdin and stdout. *Scatter*, the fast one: a
socketpair whose readiness the loop reports, one scatter read from it into the arrays where the reply belongs, one
gathered write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from aioenv import speedups
from aioenv.errors import WireError
from aioenv.ipc import frame_io
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Buffer, Encoder, Frame, Kind
from aioenv.speedups.attributes import read_by_c

if TYPE_CHECKING:
    from aioenv.process.connection import Requests

__all__ = ["CHANNELS", "Channel", "PipeReader", "PipeWriter", "ScatterChannel", "StreamsChannel", "check_channel"]

CHANNELS = ("streams", "scatter") if sys.platform != "win32" else ("streams",)

# One read takes what has come, up to this: asyncio itself reads a pipe in pieces of 256 KiB.
_READ_BYTES = 1 << 20
# The fixed part of a reply is as long as the layout says, and goes where its request has promised. One of any other
# length is a fault of the worker, and takes no memory here. (Tails have the wire's own limit: infos may be large.)
_MAX_SCRATCH = 0
# What becomes of a worker whose reply was half read when something like Ctrl-C was raised.
_INTERRUPTED = "this process was interrupted while it took in a reply"


def check_channel(channel: str) -> str:
    """The channel to use: for "auto" the fastest that the platform has.

    Raises:
        ValueError: if it is not known here.
    """
    if channel == "auto":
        return CHANNELS[-1]
    if channel not in CHANNELS:
        known = ", ".join(repr(name) for name in ("auto", *CHANNELS))
        raise ValueError(f"channel: expected one of {known}, got {channel!r}")
    return channel


class Channel(Protocol):
    """Frames to and from one worker."""

    def send(self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer], tail: Buffer) -> None:
        """Write a frame (see `Encoder.encode`); never blocks, what the kernel does not take is kept and sent later.

        The buffers must not change before the worker has replied.

        Raises:
            WireError: if it is too large; nothing was written.
        """

    async def receive(self, on_frame: Callable[[Frame], None]) -> None:
        """Read frames until the stream ends; `on_frame` is called with each.

        Raises:
            WireError: if the stream is broken, or ends inside a frame.
        """

    def poll(self) -> None:
        """Take what has come already, without the loop; `on_frame` may be called before this returns."""

    @property
    def waitable(self) -> int | None:
        """A descriptor to wait on for what `poll` takes; None if the loop has to do something first."""

    @property
    def rests(self) -> bool:
        """Whether the loop does not look at it, for now."""

    def listen(self) -> None:
        """Have the loop look at it, if it did not."""

    def close(self) -> None:
        """Close the parent's end: the worker sees the end of its stream."""


class StreamsChannel:
    """Frames over asyncio's streams of two pipes.

    Args:
        writer: the worker's stdin.
        reader: its stdout.
        requests: know where the fixed parts of replies shall be read into.
    """

    def __init__(self, writer: StreamWriter, reader: StreamReader, requests: Requests) -> None:
        self._writer = writer
        self._reader = reader
        self._encoder = Encoder()
        self._decoder = Decoder(requests.place, max_scratch=_MAX_SCRATCH)

    def send(self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer], tail: Buffer) -> None:
        """Write a frame (see `Channel`)."""
        buffers = self._encoder.encode(kind, request, generation, fixed, tail)
        self._writer.writelines(buffers)

    async def receive(self, on_frame: Callable[[Frame], None]) -> None:
        """Read frames until the stream ends (see `Channel`)."""
        reader, decoder = self._reader, self._decoder
        while data := await reader.read(_READ_BYTES):
            decoder.feed(data)
            while (frame := decoder.next_frame()) is not None:
                on_frame(frame)
        decoder.finish()

    def poll(self) -> None:
        """Nothing: streams belong to the loop."""

    @property
    def waitable(self) -> int | None:
        """None: streams belong to the loop."""
        return None

    @property
    def rests(self) -> bool:
        """Never."""
        return False

    def listen(self) -> None:
        """Nothing: the loop always does."""

    def close(self) -> None:
        """Close the worker's stdin."""
        self._writer.close()


@read_by_c
class ScatterChannel:
    """Frames over a socket: each arrives in one scatter read, straight where it belongs.

    Args:
        sock: this side's end of a socketpair; it is closed with the channel.
        requests: know where the fixed parts of replies shall be read into.

    Attributes (C looks at them, too, see `speedups`):
        fd: the socket's descriptor; -1 once it is closed.
        requests: as given.
        encoder, decoder: what goes out and comes in.
        unsent: what the kernel has not taken yet.
        on_read: is called with this after each look at what has come.
    """

    def __init__(self, sock: socket.socket, requests: Requests) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self.requests = requests
        self.encoder = Encoder()
        self.decoder = Decoder(requests.place, requests.expect, max_scratch=_MAX_SCRATCH)
        self._on_frame: Callable[[Frame], None] = lambda frame: None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.unsent: list[memoryview] = []
        self.on_read: Callable[[ScatterChannel], None] | None = None
        self._handling = False
        self._receiving = False
        self._listening = False

    def send(self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer], tail: Buffer) -> None:
        """Write a frame (see `Channel`)."""
        self.listen()
        if self.unsent:
            self.unsent += map(memoryview, self.encoder.encode(kind, request, generation, fixed, tail))
            return
        try:
            rest = frame_io.write(self.fd, self.encoder, kind, request, generation, fixed, tail)
        except OSError as exc:
            self._unsendable(exc)
        else:
            if rest:
                self.keep(rest, 0)

    def keep(self, buffers: Sequence[Buffer], count: int) -> None:
        """Send what follows the first `count` bytes of a frame when the kernel takes it."""
        self.unsent = frame_io.after(buffers, count)
        self._loop.add_writer(self.fd, self._send_more)

    def _send_more(self) -> None:
        try:
            self.unsent = frame_io.write_rest(self.fd, self.unsent)
        except OSError as exc:
            self.unsent = []
            self._unsendable(exc)
        if not self.unsent:
            self._loop.remove_writer(self.fd)

    def _unsendable(self, exc: OSError) -> None:
        # if the worker has ended, who reads finds out how; else nobody would ever answer
        if self.fd >= 0 and not isinstance(exc, ConnectionError):
            self._end(WireError(f"a request could not be sent: {exc}"))

    async def receive(self, on_frame: Callable[[Frame], None]) -> None:
        """Read frames until the stream ends (see `Channel`)."""
        self._on_frame = on_frame
        self._receiving = True
        self.listen()
        try:
            await self._ended
        finally:
            self._receiving = False
            self.rest()
        self.decoder.finish()

    @property
    def rests(self) -> bool:
        """Whether the loop does not look at it, for now (see `Channel`)."""
        return self._receiving and not self._listening

    def listen(self) -> None:
        """Have the loop look at it, if it did not."""
        if self._receiving and not self._listening and self.fd >= 0 and not self._ended.done():
            self._listening = True
            self._loop.add_reader(self.fd, self.poll)

    def rest(self) -> None:
        """Have the loop not look at it, until `listen` is called, or something is sent."""
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self.fd)

    def poll(self) -> None:
        """Take what has come already (see `Channel`)."""
        # whoever handles a frame may poll: frames that came with it would be overtaken, and read over
        if self.fd < 0 or self._handling:
            return
        self._handling = True
        try:
            count = speedups.take_express(self) if speedups.take_express is not None else None
            if count == -1:
                return
            decoder = self.decoder
            if count is None:
                count = frame_io.read(self.fd, decoder)
            elif count > 0:
                frame_io.look(decoder, count)
            if count:
                frames = decoder.frames
                while frames:
                    self._on_frame(frames.popleft())
                if decoder.error is not None:
                    decoder.next_frame()  # raises it
            else:
                self._end(None)
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionError:
            self._end(None)
        except BaseException as exc:
            self._end(exc if isinstance(exc, Exception) else WireError(_INTERRUPTED))
            if not isinstance(exc, Exception):
                raise
        finally:
            self._handling = False
            if self.on_read is not None:
                self.on_read(self)

    @property
    def waitable(self) -> int | None:
        """The socket, while it is open and has taken all that was sent (see `Channel`)."""
        return None if self.fd < 0 or self.unsent or self._ended.done() else self.fd

    def _end(self, exc: Exception | None) -> None:
        self.rest()
        if self._ended.done():
            return
        if exc is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(exc)

    def close(self) -> None:
        """Close the socket."""
        if self.fd < 0:
            return
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self.rest()
            self._loop.remove_writer(self.fd)
        self.fd = -1
        self.unsent = []
        self.on_read = None
        self._sock.close()


_PIECE = 1 << 18


class PipeReader(asyncio.ReadTransport):
    """The end of a pipe that is read.

    Args:
        fd: a descriptor; it is closed with this.
        limit: how much `stream` holds before this stops reading, in bytes.

    Attributes:
        stream: what has come.
    """

    def __init__(self, fd: int, limit: int) -> None:
        super().__init__()
        os.set_blocking(fd, False)
        self._pipe = os.fdopen(fd, "rb", 0)
        self._loop = asyncio.get_running_loop()
        self._reading = False
        self.stream = asyncio.StreamReader(limit)
        self.stream.set_transport(self)
        self.resume_reading()

    def _read(self) -> None:
        data = self._pipe.read(_PIECE)
        if data:
            self.stream.feed_data(data)
        elif data is not None:  # None: there is nothing yet
            self.close()
            self.stream.feed_eof()

    def is_reading(self) -> bool:
        """Whether the loop looks for what comes."""
        return self._reading

    def pause_reading(self) -> None:
        """Let it wait: the stream holds enough."""
        if self._reading:
            self._reading = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pipe.fileno())

    def resume_reading(self) -> None:
        """Read on."""
        if not self._reading and not self._pipe.closed:
            self._reading = True
            self._loop.add_reader(self._pipe.fileno(), self._read)

    def close(self) -> None:
        """Close the pipe, also when the loop is closed. Idempotent."""
        self.pause_reading()
        self._pipe.close()


class PipeWriter(asyncio.WriteTransport):
    """The end of a pipe that is written to. What the pipe does not take at once is kept, and follows.

    Args:
        fd: a descriptor; it is closed with this.

    Attributes:
        stream: what writes to it.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        os.set_blocking(fd, False)
        self._pipe = os.fdopen(fd, "wb", 0)
        self._loop = asyncio.get_running_loop()
        self._unsent: list[memoryview] = []
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        self.stream = asyncio.StreamWriter(self, protocol, None, self._loop)

    def is_closing(self) -> bool:
        """Whether it is closed."""
        return self._pipe.closed

    def write(self, data: Buffer) -> None:
        """Write this; otherwise as `writelines`."""
        self.writelines([data])

    def writelines(self, buffers: Iterable[Buffer]) -> None:
        """Write these, which must not change until they have been read. Once it is closed they are lost."""
        if self._pipe.closed:
            return
        waiting = bool(self._unsent)
        self._unsent += map(memoryview, buffers)
        if not waiting:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._pipe.fileno(), self._write_more)

    def _write(self) -> None:
        try:
            self._unsent = frame_io.write_rest(self._pipe.fileno(), self._unsent)
        except OSError:  # the reader has ended; who reads from that finds out how
            self._unsent = []

    def _write_more(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._pipe.fileno())

    def close(self) -> None:
        """Close the pipe, also when the loop is closed. Idempotent."""
        if self._unsent and not self._loop.is_closed():
            self._loop.remove_writer(self._pipe.fileno())
        self._unsent = []
        self._pipe.close()
