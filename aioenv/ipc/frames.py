"""The frame format: headers, CRCs and the encoder, which turns buffers into frames.

A frame is a header, a fixed part and a payload::

    0      2  3  4        8           12      16      20         24           28
    +------+--+--+--------+-----------+-------+-------+----------+------------+--------+----------+
    |magic |v |k |request |generation | fixed |payload| body CRC | header CRC | fixed… | payload… |
    +------+--+--+--------+-----------+-------+-------+----------+------------+--------+----------+

All integers are little-endian. The *fixed part* is raw numpy memory, in the order that both sides agreed on at
start-up. It is copied straight from one side's arrays into the other's. The *payload* has a variable length. Both
CRC-32s are mandatory: they cost less than 0.1 ns per byte (0.02 ns with AVX-512; zlib's 0.4 ns), which is less than the
copy through the kernel. A header's CRC continues from the CRC of the header before it (the first starts from 0), so it
covers the whole stream so far. A missing, repeated or misplaced frame is therefore detected like a flipped bit. Any
mutation of a stream yields a prefix of its frames and then a `WireError`, never a wrong frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from aioenv import speedups
from aioenv.errors import WireError
from aioenv.speedups import read_by_c

__all__ = [
    "HEADER_BYTES",
    "KINDS",
    "MAX_FIXED_BYTES",
    "MAX_PAYLOAD_BYTES",
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

MAGIC = b"\xa1\x0e"  # not ASCII, so printed text is never mistaken for a frame
VERSION = 1

# 64 slots of 4K RGB images are 1.6 GB; a larger fixed part would not fit in memory as one batch.
MAX_FIXED_BYTES = 2 << 30
# A payload holds pickles: infos, factories, call arguments. A larger one is a mistake, or should be an array.
MAX_PAYLOAD_BYTES = 1 << 30

crc32: Callable[[Any, int], int] = speedups.crc32 or zlib.crc32
_HEADER = struct.Struct("<2sBBIIIII")
_CRC = struct.Struct("<I")
_WHOLE = struct.Struct("<2sBBIIIIII")
HEADER_BYTES = _WHOLE.size


class Kind(IntEnum):
    """The kind of a frame, and which side sends it."""

    START = 1  # parent: the service to run
    READY = 2  # worker: the service runs; carries its description
    CALL = 3  # parent: call a method of the service by name
    RESET = 4  # parent
    STEP = 5  # parent
    RENDER = 6  # parent: states to draw
    CLOSE = 7  # parent: finish, then exit
    RESULT = 8  # worker: the reply to a request
    FAILURE = 9  # worker: the request as a whole failed
    IMAGES = 10  # worker: images of a step's states, sent after its RESULT
    COLLECT = 11  # parent: collect a rollout


KINDS = {int(kind): kind for kind in Kind}

# Called directly instead of a named tuple's own `__new__`: one call less on the path of every step.
new_tuple = tuple.__new__


class Header(NamedTuple):
    """A decoded frame header: it arrives before the frame's body."""

    kind: Kind
    request: int
    generation: int
    fixed: int  # bytes
    payload: int  # bytes
    body_crc: int
    crc: int  # of this header and all headers before it


class Frame(NamedTuple):
    """A complete, checked frame. `fixed` holds the buffer objects that the decoder's `buffers_for` returned."""

    kind: Kind
    request: int
    generation: int
    fixed: Sequence[memoryview]
    payload: memoryview


@read_by_c
class Encoder:
    """Encode the frames of one stream. Frames must be written in the order in which they were encoded.

    Attributes:
        chain: the CRC of the last header.
    """

    def __init__(self) -> None:
        self.chain = 0

    def encode(
        self, kind: Kind, request: int, generation: int, fixed: Sequence[Buffer] = (), payload: Buffer = b""
    ) -> list[Buffer]:
        """Return the buffers of a frame, to be written in order, without joining or copying them.

        Args:
            kind: the kind of the frame.
            request: the id of the request, 0 … 2**32-1.
            generation: how often this worker has been restarted, 0 … 2**32-1.
            fixed: C-contiguous byte buffers (`memoryview`s of format "B", or bytes).
            payload: one more such buffer, of variable length.

        Raises:
            WireError: if a part is longer than its maximum, or a number does not fit its field. Nothing must be
                written then, and the encoder's state is unchanged.
        """
        size = 0
        crc = 0
        buffers: list[Buffer] = [b""]
        for part in fixed:
            if part_size := len(part):
                size += part_size
                crc = crc32(part, crc)
                buffers.append(part)
        payload_size = len(payload)
        if payload_size:
            crc = crc32(payload, crc)
        if size > MAX_FIXED_BYTES:
            raise WireError(f"a fixed part of {size} bytes is over the maximum of {MAX_FIXED_BYTES}")
        if payload_size > MAX_PAYLOAD_BYTES:
            raise WireError(f"a payload of {payload_size} bytes is over the maximum of {MAX_PAYLOAD_BYTES}")
        try:
            head = _HEADER.pack(MAGIC, VERSION, kind, request, generation, size, payload_size, crc)
        except struct.error as exc:
            raise WireError(f"request {request} and generation {generation} must fit 32 bits") from exc
        self.chain = crc32(head, self.chain)
        buffers[0] = head + _CRC.pack(self.chain)
        if payload_size:
            buffers.append(payload)
        return buffers


def decode_header(data: memoryview, offset: int = 0, chain: int = 0, max_payload: int = MAX_PAYLOAD_BYTES) -> Header:
    """Decode the header in the `HEADER_BYTES` bytes from `offset`; the header before it had the CRC `chain`.

    Raises:
        WireError: if the bytes are no header (wrong magic, version, CRC or kind, or a length over its maximum), or
            announce a payload of more than `max_payload` bytes.
    """
    magic, version, kind, request, generation, fixed, payload, body_crc, crc = _WHOLE.unpack_from(data, offset)
    if magic != MAGIC:
        raise WireError(f"expected a frame to begin with {MAGIC!r}, got {bytes(magic)!r}")
    if version != VERSION:
        raise WireError(f"expected wire version {VERSION}, got {version}: two versions of aioenv are talking")
    if crc32(data[offset : offset + _HEADER.size], chain) != crc:
        raise WireError("a frame's header does not match its CRC, or does not follow the frame before it")
    known = KINDS.get(kind)
    if known is None:
        raise WireError(f"unknown kind of frame: {kind}")
    if fixed > MAX_FIXED_BYTES or payload > MAX_PAYLOAD_BYTES:
        raise WireError(f"a frame announces {fixed} + {payload} bytes, over {MAX_FIXED_BYTES} + {MAX_PAYLOAD_BYTES}")
    if payload > max_payload:
        raise WireError(f"a {known.name} frame announces a payload of {payload} bytes, over {max_payload}")
    return new_tuple(Header, (known, request, generation, fixed, payload, body_crc, crc))
