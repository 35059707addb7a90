"""Framing: how buffers become bytes on the wire, and bytes become buffers again.

A frame is a fixed header, a fixed part and a tail::

    0      2  3  4        8           12      16      20         24           28
    +------+--+--+--------+-----------+-------+-------+----------+------------+--------+------+
    |magic |v |k |request |generation | fixed | tail  | body CRC | header CRC | fixed… | tail…|
    +------+--+--+--------+-----------+-------+-------+----------+------------+--------+------+

All integers are little-endian. The *fixed part* is raw numpy memory, in the order that both sides agreed on at
start-up; it goes straight from one side's arrays into the other's. The *tail* holds what varies in size. Both
CRC-32s are always there: they cost less than 0.1 ns a byte (zlib's 0.4), less than the copy through the kernel. A
header's CRC begins from that of the header before it (the first from 0), so it covers the whole stream so far: a frame
that is missing, repeated or out of place is found as surely as a flipped bit. In return any mutation of a stream gives
a prefix of its frames and then a `WireError`, never a wrong frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from aioenv import speedups
from aioenv.errors import WireError
from aioenv.speedups.attributes import read_by_c

__all__ = [
    "HEADER_BYTES",
    "KINDS",
    "MAX_FIXED_BYTES",
    "MAX_TAIL_BYTES",
    "VERSION",
    "Buffer",
    "Encoder",
    "Frame",
    "Header",
    "Kind",
    "crc32",
    "decode_header",
    "new_tuple",
]

# Any C-contiguous object with the buffer protocol (typing has no name for it before 3.12).
Buffer: TypeAlias = "bytes | bytearray | memoryview"

MAGIC = b"\xa1\x0e"  # not ASCII: what an env prints can't be taken for a frame
VERSION = 1

# 64 worker slots of 4K RGB images are 1.6 GB; no fixed part that fits in memory as one batch is larger.
MAX_FIXED_BYTES = 2 << 30
# A tail holds pickles: infos, factories, call arguments. Past this it is a mistake, or should be an array.
MAX_TAIL_BYTES = 1 << 30

crc32: Callable[[Any, int], int] = speedups.crc32 or zlib.crc32
_HEADER = struct.Struct("<2sBBIIIII")
_CRC = struct.Struct("<I")
_WHOLE = struct.Struct("<2sBBIIIIII")
HEADER_BYTES = _WHOLE.size


class Kind(IntEnum):
    """What a frame is."""

    START = 1  # parent: the service to run
    READY = 2  # worker: the service runs, here is its description
    CALL = 3  # parent: a method of the service, by name
    RESET = 4  # parent
    STEP = 5  # parent
    RENDER = 6  # parent: states to draw
    CLOSE = 7  # parent: finish, then exit
    RESULT = 8  # worker: the answer to a request
    FAILURE = 9  # worker: the request as a whole failed
    IMAGES = 10  # worker: what a step's states look like, after its RESULT


KINDS = {int(kind): kind for kind in Kind}

# What a named tuple's own `__new__` calls: on the path of every step a call less.
new_tuple = tuple.__new__


class Header(NamedTuple):
    """What a frame says about itself before its body arrives."""

    kind: Kind
    request: int
    generation: int
    fixed: int  # bytes
    tail: int  # bytes
    body_crc: int
    crc: int  # its own, and that of all headers before it


class Frame(NamedTuple):
    """A complete, checked frame. `fixed` holds the very buffers that `place` gave, filled."""

    kind: Kind
    request: int
    generation: int
    fixed: Sequence[memoryview]
    tail: memoryview


@read_by_c
class Encoder:
    """Turns the frames of one stream into bytes. Frames must be written in the order in which they were encoded.

    Attributes:
        chain: the CRC of the last header.
    """

    def __init__(self) -> None:
        self.chain = 0

    def encode(
        self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer] = (), tail: Buffer = b""
    ) -> list[Buffer]:
        """Turn a frame into a list of buffers to write, in order, without joining or copying any.

        Args:
            kind: what the frame is.
            request: the id of the exchange, 0 … 2**32-1.
            generation: how often this worker has been started, 0 … 2**32-1.
            fixed: C-contiguous byte buffers (`memoryview`s of format "B", or bytes).
            tail: one more, of variable length.

        Raises:
            WireError: if a part is longer than its maximum, or a number does not fit its field. Nothing must be
                written then, and the next frame can be encoded as if this one had never been tried.
        """
        size = 0
        crc = 0
        buffers: list[Buffer] = [b""]
        for part in fixed:
            if part_size := len(part):
                size += part_size
                crc = crc32(part, crc)
                buffers.append(part)
        tail_size = len(tail)
        if tail_size:
            crc = crc32(tail, crc)
        if size > MAX_FIXED_BYTES:
            raise WireError(f"a fixed part of {size} bytes is over the maximum of {MAX_FIXED_BYTES}")
        if tail_size > MAX_TAIL_BYTES:
            raise WireError(f"a tail of {tail_size} bytes is over the maximum of {MAX_TAIL_BYTES}")
        try:
            head = _HEADER.pack(MAGIC, VERSION, kind, request, generation, size, tail_size, crc)
        except struct.error as exc:
            raise WireError(f"request {request} and generation {generation} must fit 32 bits") from exc
        self.chain = crc32(head, self.chain)
        buffers[0] = head + _CRC.pack(self.chain)
        if tail_size:
            buffers.append(tail)
        return buffers


def decode_header(data: memoryview, offset: int = 0, chain: int = 0, max_tail: int = MAX_TAIL_BYTES) -> Header:
    """Read one header, the `HEADER_BYTES` bytes from `offset`, after one whose `crc` was `chain`.

    Raises:
        WireError: if it is not one: wrong magic, version, CRC, kind, or a length over its maximum; or announces a
            tail of more than `max_tail` bytes.
    """
    magic, version, kind, request, generation, fixed, tail, body_crc, crc = _WHOLE.unpack_from(data, offset)
    if magic != MAGIC:
        raise WireError(f"expected a frame to begin with {MAGIC!r}, got {bytes(magic)!r}")
    if version != VERSION:
        raise WireError(f"expected wire version {VERSION}, got {version}: two versions of aioenv are talking")
    if crc32(data[offset : offset + _HEADER.size], chain) != crc:
        raise WireError("a frame's header does not match its CRC, or does not follow the frame before it")
    known = KINDS.get(kind)
    if known is None:
        raise WireError(f"unknown kind of frame: {kind}")
    if fixed > MAX_FIXED_BYTES or tail > MAX_TAIL_BYTES:
        raise WireError(f"a frame announces {fixed} + {tail} bytes, over {MAX_FIXED_BYTES} + {MAX_TAIL_BYTES}")
    if tail > max_tail:
        raise WireError(f"a {known.name} frame announces a tail of {tail} bytes, over {max_tail}")
    return new_tuple(Header, (known, request, generation, fixed, tail, body_crc, crc))
