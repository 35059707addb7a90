"""The parent's ends of a worker's pipes, under asyncio's streams.

Loops have transports of their own for pipes. Those take turns of the loop to connect, and whose the descriptor is when
the loop is closed meanwhile differs from loop to loop; these are there at once, and whoever owns them closes them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from aioenv.ipc import frame_io
from aioenv.ipc.frames import Buffer

__all__ = ["PipeReader", "PipeWriter"]

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
