"""Channels: how frames reach a worker and come back. One interface, two kinds.

*Streams* is the portable reference: asyncio's streams over the worker's stdin and stdout. *Scatter* is the fast kind: a
socketpair whose readiness the loop reports, one scatter read into the arrays where the reply belongs, one gathered
write.

`open_channel_ends` makes both ends of a new channel. A launch method passes the worker's descriptors on, and knows
nothing else about the channel. A worker on another machine has a scatter channel over TCP (`remote.py`), which is not
opened here. To add a kind of channel, write a class with
the methods of `Channel`. Then add a name to `CHANNELS`, and a branch to `open_channel_ends`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aioenv import speedups
from aioenv.errors import WireError
from aioenv.ipc import frame_io
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Buffer, Encoder, Frame, Kind
from aioenv.speedups import read_by_c

if TYPE_CHECKING:
    from aioenv.process.connection import OutstandingRequests

__all__ = [
    "CHANNELS",
    "Channel",
    "ChannelEnds",
    "PipeReader",
    "PipeWriter",
    "ScatterChannel",
    "StreamsChannel",
    "check_channel",
    "open_channel_ends",
    "stream_socketpair",
]

CHANNELS = ("streams", "scatter") if sys.platform != "win32" else ("streams",)

# One read of a stream takes at most this: asyncio itself reads a pipe in pieces of 256 KiB.
_READ_BYTES = 1 << 20
# One read of a pipe takes at most this.
_PIPE_READ_BYTES = 1 << 18
# The stream reader stops reading when it holds this much; one step's reply should fit.
_STREAM_LIMIT = 4 << 20
# The buffers of both ends of a socket: as for pipes, one step's frame of images should fit. The kernel may allow less.
_SOCKET_BYTES = 1 << 20
# The layout determines the length of a reply's fixed part, and its request has named the buffers. A fixed part of any
# other length is a fault of the worker, and allocates no memory here. (Payloads have the frames' own limit: infos may
# be large.)
_MAX_SCRATCH = 0
# The error of a worker whose reply was half read when an exception such as KeyboardInterrupt was raised.
_INTERRUPTED = "this process was interrupted while it took in a reply"


def check_channel(channel: str) -> str:
    """Return the kind of channel to use: for "auto" the fastest that the platform has.

    Raises:
        ValueError: if it is unknown, or the platform does not have it.
    """
    if channel == "auto":
        return CHANNELS[-1]
    if channel not in CHANNELS:
        known = ", ".join(repr(name) for name in ("auto", *CHANNELS))
        raise ValueError(f"channel: expected one of {known}, got {channel!r}")
    return channel


class Channel(Protocol):
    """Frames to and from one worker, on the loop on which it was made."""

    def send(self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer], payload: Buffer) -> None:
        """Write a frame (see `Encoder.encode`). It never blocks: bytes that the kernel refuses are sent later.

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
        """Read without the loop, and without waiting; `on_frame` may be called before this returns."""

    @property
    def poll_fd(self) -> int | None:
        """The descriptor that is readable when `poll` can read; None if the loop has to act first."""

    @property
    def reader_disabled(self) -> bool:
        """Whether the loop does not watch the channel at the moment."""

    def enable_reader(self) -> None:
        """Let the loop watch the channel. Idempotent."""

    def close(self) -> None:
        """Close the parent's end: the worker sees the end of its stream."""


class ChannelEnds(NamedTuple):
    """Both ends of a new channel, for a launch method.

    Attributes:
        connect: makes the parent's `Channel`; called once, with the requests whose replies it reads.
        close: closes the parent's end, even if the loop is closed. Idempotent.
        worker_fds: the worker's descriptors: one for both directions, or the one that it reads and the one that it
            writes. The caller closes them once the worker has copies.
        as_stdio: whether a worker that is a program of its own gets them as its stdin and stdout.
    """

    connect: Callable[[OutstandingRequests], Channel]
    close: Callable[[], None]
    worker_fds: tuple[int, ...]
    as_stdio: bool


def open_channel_ends(kind: str) -> ChannelEnds:
    """Make both ends of a new channel.

    Args:
        kind: one of `CHANNELS`.

    Raises:
        OSError: if there are no descriptors left; nothing is open then.
    """
    return _open_scatter() if kind == "scatter" else _open_streams()


def _open_scatter() -> ChannelEnds:
    ours, theirs = stream_socketpair()
    return ChannelEnds(partial(ScatterChannel, ours), ours.close, (theirs.detach(),), as_stdio=False)


def _open_streams() -> ChannelEnds:
    with contextlib.ExitStack() as worker_fds, contextlib.ExitStack() as ours:
        worker_reads, fd = os.pipe()
        worker_fds.callback(os.close, worker_reads)
        writer = PipeWriter(fd)
        ours.callback(writer.close)
        fd, worker_writes = os.pipe()
        worker_fds.callback(os.close, worker_writes)
        reader = PipeReader(fd, _STREAM_LIMIT)
        ours.callback(reader.close)
        worker_fds.pop_all()
        connect = partial(StreamsChannel, writer.stream, reader.stream)
        return ChannelEnds(connect, ours.pop_all().close, (worker_reads, worker_writes), as_stdio=True)


def stream_socketpair() -> tuple[socket.socket, socket.socket]:
    """Make a blocking socketpair with buffers for one step's frames.

    Raises:
        OSError: if there are no descriptors left.
    """
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(True)  # under a default timeout (`socket.setdefaulttimeout`) neither end would block
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
    return pair


# ------------------------------------------------------------ streams


class StreamsChannel:
    """Frames over asyncio's streams of two pipes.

    Args:
        writer: writes to the worker's stdin.
        reader: reads the worker's stdout.
        requests: the outstanding requests, which name the buffers for the fixed parts of replies.
    """

    def __init__(self, writer: StreamWriter, reader: StreamReader, requests: OutstandingRequests) -> None:
        self._writer = writer
        self._reader = reader
        self._encoder = Encoder()
        self._decoder = Decoder(requests.buffers_for, max_scratch=_MAX_SCRATCH)

    def send(self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer], payload: Buffer) -> None:
        """Write a frame (see `Channel`)."""
        buffers = self._encoder.encode(kind, request, generation, fixed, payload)
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
        """Do nothing: only the loop can read streams."""

    @property
    def poll_fd(self) -> int | None:
        """None: only the loop can read streams."""
        return None

    @property
    def reader_disabled(self) -> bool:
        """False: the loop always watches streams."""
        return False

    def enable_reader(self) -> None:
        """Do nothing: the loop always watches streams."""

    def close(self) -> None:
        """Close the worker's stdin."""
        self._writer.close()


class PipeReader(asyncio.ReadTransport):
    """The transport of a pipe's read end, under an asyncio stream.

    Loops have pipe transports of their own. Those take turns of the loop to connect, and the owner of the descriptor,
    when the loop is closed meanwhile, differs from loop to loop. This transport and `PipeWriter` are connected at once,
    and their creator closes them.

    Args:
        fd: the descriptor; it is closed with the transport.
        limit: the number of bytes in `stream` from which on this stops reading.

    Attributes:
        stream: the stream of the bytes read.
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
        data = self._pipe.read(_PIPE_READ_BYTES)
        if data:
            self.stream.feed_data(data)
        elif data is not None:  # None: the pipe is empty
            self.close()
            self.stream.feed_eof()

    def is_reading(self) -> bool:
        """Return whether the loop watches the pipe."""
        return self._reading

    def pause_reading(self) -> None:
        """Stop reading: the stream holds enough."""
        if self._reading:
            self._reading = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pipe.fileno())

    def resume_reading(self) -> None:
        """Continue reading."""
        if not self._reading and not self._pipe.closed:
            self._reading = True
            self._loop.add_reader(self._pipe.fileno(), self._read)

    def close(self) -> None:
        """Close the pipe, even if the loop is closed. Idempotent."""
        self.pause_reading()
        self._pipe.close()


class PipeWriter(asyncio.WriteTransport):
    """The transport of a pipe's write end, under an asyncio stream; see `PipeReader`.

    Bytes that the pipe does not take at once are kept, and written later.

    Args:
        fd: the descriptor; it is closed with the transport.

    Attributes:
        stream: the stream that writes to the pipe.
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
        """Return whether the pipe is closed."""
        return self._pipe.closed

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the pipe has not taken yet."""
        return sum(map(len, self._unsent))

    def write(self, data: Buffer) -> None:
        """Write one buffer; see `writelines`."""
        self.writelines([data])

    def writelines(self, buffers: Iterable[Buffer]) -> None:
        """Write buffers, which must not change until they were read. Once the pipe is closed, this is a no-op."""
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
            self._unsent = frame_io.write_remaining(self._pipe.fileno(), self._unsent)
        except OSError:  # the reader has ended; its own output tells how
            self._unsent = []

    def _write_more(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._pipe.fileno())

    def close(self) -> None:
        """Close the pipe, even if the loop is closed. Idempotent."""
        if self._unsent and not self._loop.is_closed():
            self._loop.remove_writer(self._pipe.fileno())
        self._unsent = []
        self._pipe.close()


# ------------------------------------------------------------ scatter


@read_by_c
class ScatterChannel:
    """Frames over a socket: each arrives in one scatter read, straight in the arrays where it belongs.

    Args:
        sock: this side's end of a socketpair; it is closed with the channel.
        requests: the outstanding requests, which name the buffers for the fixed parts of replies.

    Attributes (C reads them too, see `speedups`):
        fd: the socket's descriptor; -1 once it is closed.
        requests: as given.
        encoder, decoder: of the frames sent and received.
        unsent: the buffers that the kernel has not taken yet.
        on_read: called with this channel after each read; None: not called.
    """

    def __init__(self, sock: socket.socket, requests: OutstandingRequests) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self.requests = requests
        self.encoder = Encoder()
        self.decoder = Decoder(requests.buffers_for, requests.predict_buffers, max_scratch=_MAX_SCRATCH)
        self._on_frame: Callable[[Frame], None] = lambda frame: None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.unsent: list[memoryview] = []
        self.on_read: Callable[[ScatterChannel], None] | None = None
        self._handling = False
        self._receiving = False
        self._reader_enabled = False

    def send(self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer], payload: Buffer) -> None:
        """Write a frame (see `Channel`)."""
        self.enable_reader()
        if self.unsent:
            self.unsent += map(memoryview, self.encoder.encode(kind, request, generation, fixed, payload))
            return
        try:
            remaining = frame_io.write(self.fd, self.encoder, kind, request, generation, fixed, payload)
        except OSError as exc:
            self._on_send_error(exc)
        else:
            if remaining:
                self.send_later(remaining, 0)

    def send_later(self, buffers: Sequence[Buffer], count: int) -> None:
        """Send a frame without its first `count` bytes when the kernel takes more; C calls this too."""
        self.unsent = frame_io.skip_bytes(buffers, count)
        self._loop.add_writer(self.fd, self._send_more)

    def _send_more(self) -> None:
        try:
            self.unsent = frame_io.write_remaining(self.fd, self.unsent)
        except OSError as exc:
            self.unsent = []
            self._on_send_error(exc)
        if not self.unsent:
            self._loop.remove_writer(self.fd)

    def _on_send_error(self, exc: OSError) -> None:
        # if the worker has ended, reading finds out how; otherwise the request would never be answered
        if self.fd >= 0 and not isinstance(exc, ConnectionError):
            self._end(WireError(f"a request could not be sent: {exc}"))

    async def receive(self, on_frame: Callable[[Frame], None]) -> None:
        """Read frames until the stream ends (see `Channel`)."""
        self._on_frame = on_frame
        self._receiving = True
        self.enable_reader()
        try:
            await self._ended
        finally:
            self._receiving = False
            self.disable_reader()
        self.decoder.finish()

    @property
    def reader_disabled(self) -> bool:
        """Whether the loop does not watch the channel at the moment (see `Channel`)."""
        return self._receiving and not self._reader_enabled

    def enable_reader(self) -> None:
        """Let the loop watch the channel. Idempotent."""
        if self._receiving and not self._reader_enabled and self.fd >= 0 and not self._ended.done():
            self._reader_enabled = True
            self._loop.add_reader(self.fd, self.poll)

    def disable_reader(self) -> None:
        """Stop watching the channel until `enable_reader` or `send` is called. Idempotent."""
        if self._reader_enabled:
            self._reader_enabled = False
            self._loop.remove_reader(self.fd)

    def poll(self) -> None:
        """Read without waiting (see `Channel`)."""
        # a frame's handler may call this: it would overtake, and overwrite, frames of the same read
        if self.fd < 0 or self._handling:
            return
        self._handling = True
        try:
            count = speedups.take_replies(self) if speedups.take_replies is not None else None
            if count == -1:
                return
            decoder = self.decoder
            if count is None:
                count = frame_io.read(self.fd, decoder)
            elif count > 0:
                frame_io.decode_external_read(decoder, count)
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
    def poll_fd(self) -> int | None:
        """The socket, while it is open and everything has been sent (see `Channel`)."""
        return None if self.fd < 0 or self.unsent or self._ended.done() else self.fd

    def _end(self, exc: Exception | None) -> None:
        """Let `receive` return, or raise this."""
        self.disable_reader()
        if self._ended.done():
            return
        if exc is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(exc)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self.fd < 0:
            return
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self.disable_reader()
            self._loop.remove_writer(self.fd)
        self.fd = -1
        self.unsent = []
        self.on_read = None
        self._sock.close()
