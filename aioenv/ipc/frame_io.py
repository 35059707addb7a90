"""Frames over a descriptor, at either end of a channel: one gathered write, one scatter read."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

from aioenv import speedups
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Buffer, Encoder, Kind

__all__ = ["after", "look", "read", "receive", "write", "write_rest"]

_IOV_MAX = 1024  # buffers that one readv or writev takes, on Linux


def read(fd: int, decoder: Decoder) -> int:
    """Read what has come, up to what the decoder has room for, and let it look.

    Returns:
        How many bytes; 0 at the end of the stream.

    Raises:
        WireError: if the stream was broken before.
        OSError: if the read failed, or there is nothing and it does not wait.
    """
    buffers = decoder.buffers()
    if speedups.read_frame is None or not decoder.guesses:
        count = os.readv(fd, buffers[:_IOV_MAX])
        if count:
            decoder.advance(count)
        return count
    read = speedups.read_frame(fd, decoder.chain, buffers)
    if type(read) is tuple:
        return decoder.advance_by_frame(read)
    if read:
        decoder.advance(read)
    return read


def look(decoder: Decoder, count: int) -> None:
    """Let a decoder look at what was read into its `buffers` elsewhere, so many bytes.

    Raises:
        WireError: if the stream was broken before.
    """
    decoder.buffers()
    decoder.advance(count)


def write(
    fd: int,
    encoder: Encoder,
    kind: Kind,
    request: int,
    generation: int,
    fixed: Sequence[Buffer] = (),
    tail: Buffer = b"",
) -> list[memoryview]:
    """Write a frame, with one write.

    Args:
        fd: where to.
        encoder: of this stream.
        kind, request, generation, fixed, tail: see `Encoder.encode`.

    Returns:
        What is left to write: nothing, if all was taken.

    Raises:
        WireError: if the frame is too large; nothing was written.
        OSError: if the write failed. That it would have had to wait is none: all is left then.
    """
    if speedups.write_frame is not None:
        written = speedups.write_frame(fd, encoder.chain, kind, request, generation, fixed, tail)
        if type(written) is int:
            encoder.chain = written
            return []
        if written is not None:
            encoder.chain, head, count = written
            return after([head, *fixed, tail], count)
    buffers: list[Buffer] = encoder.encode(kind, request, generation, fixed, tail)
    try:
        count = os.writev(fd, buffers[:_IOV_MAX])
    except (BlockingIOError, InterruptedError):
        count = 0
    return [] if count == sum(map(len, buffers)) else after(buffers, count)


def write_rest(fd: int, rest: list[memoryview]) -> list[memoryview]:
    """Write what a write has left; gives what this one has left, and raises, as `write`."""
    try:
        count = os.writev(fd, rest[:_IOV_MAX])
    except (BlockingIOError, InterruptedError):
        return rest
    return after(rest, count)


def after(buffers: Sequence[Buffer], count: int) -> list[memoryview]:
    """What follows the first `count` bytes of these buffers."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *(memoryview(later) for later in buffers[index + 1 :])]
        count -= len(buffer)
    return []


def receive(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int], bool]:
    """Read once, with the descriptors that come along: processes that others start here don't inherit these.

    Args:
        sock: where from.
        size: how many bytes at most.
        most: how many descriptors at most.

    Returns:
        The bytes, the descriptors, and whether those are all that were sent.
    """
    fds = array.array("i")
    # not `socket.recv_fds`, which passes no flags on: another thread may start a process at any moment
    data, beside, flags, _ = sock.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, sent in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(sent[: len(sent) - len(sent) % fds.itemsize])
    return data, list(fds), not flags & socket.MSG_CTRUNC
