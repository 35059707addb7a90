"""Reads and writes on descriptors, at either end of a channel: frames, and descriptors passed over a socket.

A frame is written with one gathered write, and read with one scatter read into the decoder's buffers. Frames have a
fast path in C.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence

from aioenv import speedups
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Buffer, Encoder, Kind

__all__ = ["decode_external_read", "read", "receive_fds", "skip_bytes", "write", "write_remaining"]

_IOV_MAX = 1024  # the most buffers that one readv or writev takes, on Linux


def read(fd: int, decoder: Decoder) -> int:
    """Read into the decoder's buffers, once, and decode.

    Returns:
        The number of bytes; 0 at the end of the stream.

    Raises:
        WireError: if the stream was broken before.
        OSError: if the read failed; BlockingIOError if the descriptor doesn't block and has no bytes.
    """
    buffers = decoder.buffers()
    if speedups.read_frame is None or not decoder.has_prediction:
        count = os.readv(fd, buffers[:_IOV_MAX])
        if count:
            decoder.advance(count)
        return count
    read = speedups.read_frame(fd, decoder.chain, buffers)
    if type(read) is tuple:
        return decoder.advance_whole_frame(read)
    if read:
        decoder.advance(read)
    return read


def decode_external_read(decoder: Decoder, count: int) -> None:
    """Decode `count` bytes that C has read into the decoder's buffers.

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
    payload: Buffer = b"",
) -> list[memoryview]:
    """Write a frame, with one write.

    Args:
        fd: the descriptor to write to.
        encoder: the encoder of this stream.
        kind, request, generation, fixed, payload: see `Encoder.encode`.

    Returns:
        The buffers that remain to be written; empty if the kernel took everything.

    Raises:
        WireError: if the frame is too large; nothing was written.
        OSError: if the write failed. A write that would block is no failure: everything remains then.
    """
    if speedups.write_frame is not None:
        written = speedups.write_frame(fd, encoder.chain, kind, request, generation, fixed, payload)
        if type(written) is int:
            encoder.chain = written
            return []
        if written is not None:
            encoder.chain, head, count = written
            return skip_bytes([head, *fixed, payload], count)
    buffers: list[Buffer] = encoder.encode(kind, request, generation, fixed, payload)
    try:
        count = os.writev(fd, buffers[:_IOV_MAX])
    except (BlockingIOError, InterruptedError):
        count = 0
    return [] if count == sum(map(len, buffers)) else skip_bytes(buffers, count)


def write_remaining(fd: int, remaining: list[memoryview]) -> list[memoryview]:
    """Write the buffers that an earlier write left; return and raise as `write`."""
    try:
        count = os.writev(fd, remaining[:_IOV_MAX])
    except (BlockingIOError, InterruptedError):
        return remaining
    return skip_bytes(remaining, count)


def skip_bytes(buffers: Sequence[Buffer], count: int) -> list[memoryview]:
    """Return the buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *(memoryview(later) for later in buffers[index + 1 :])]
        count -= len(buffer)
    return []


def receive_fds(sock: socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int], bool]:
    """Read once from a socket, with the descriptors passed along; they are close-on-exec from the start.

    Args:
        sock: the socket.
        size: the maximum number of bytes.
        max_fds: the maximum number of descriptors.

    Returns:
        The bytes, the descriptors, and whether all descriptors that were sent have arrived.
    """
    fds = array.array("i")
    # not `socket.recv_fds`, which passes no flags on: another thread may start a process at any moment
    data, ancillary, flags, _ = sock.recvmsg(size, socket.CMSG_LEN(max_fds * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, sent in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(sent[: len(sent) - len(sent) % fds.itemsize])
    return data, list(fds), not flags & socket.MSG_CTRUNC
