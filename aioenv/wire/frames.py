"""Framing: how buffers become bytes on the wire, and bytes become buffers again.

A frame is a fixed header, a fixed part and a tail::

    0      2  3  4        8           12      16      20         24           28
    +------+--+--+--------+-----------+-------+-------+----------+------------+--------+------+
    |magic |v |k |request |generation | fixed | tail  | body CRC | header CRC | fixed… | tail…|
    +------+--+--+--------+-----------+-------+-------+----------+------------+--------+------+

All integers are little-endian. The *fixed part* is raw numpy memory, in the order that both sides agreed on at
start-up; it goes straight from one side's arrays into the other's. The *tail* holds what varies in size. Both
CRC-32s are always there: they cost 0.3 ns a byte, less than the copy through the kernel. A header's CRC begins
from that of the header before it (the first from 0), so it covers the whole stream so far: a frame that is
missing, repeated or out of place is found as surely as a flipped bit. In return any mutation of a stream gives a
prefix of its frames and then a `WireError`, never a wrong frame.

The decoder does no input or output. It says which buffers it wants filled (`buffers`), is told how many bytes
went into them (`advance`), and hands out finished frames (`next_frame`); `feed` is the same for bytes that are
already there. So one decoder serves a stream reader, a blocking `readv` and a scatter read alike.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from aioenv.errors import WireError

__all__ = [
    "HEADER_BYTES",
    "MAX_FIXED_BYTES",
    "MAX_TAIL_BYTES",
    "VERSION",
    "Buffer",
    "Decoder",
    "Encoder",
    "Frame",
    "Header",
    "Kind",
]

# Any C-contiguous object with the buffer protocol (typing has no name for it before 3.12).
Buffer: TypeAlias = "bytes | bytearray | memoryview"

MAGIC = b"\xa1\x0e"  # not ASCII: what an env prints can't be taken for a frame
VERSION = 1

# 64 worker slots of 4K RGB images are 1.6 GB; no fixed part that fits in memory as one batch is larger.
MAX_FIXED_BYTES = 2 << 30
# A tail holds pickles: infos, factories, call arguments. Past this it is a mistake, or should be an array.
MAX_TAIL_BYTES = 1 << 30

_HEADER = struct.Struct("<2sBBIIIII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


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


_KINDS = {int(kind): kind for kind in Kind}


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


class Encoder:
    """Turns the frames of one stream into bytes. Frames must be written in the order in which they were encoded."""

    def __init__(self) -> None:
        self._chain = 0

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
        for part in fixed:
            size += len(part)
            crc = zlib.crc32(part, crc)
        tail_size = len(tail)
        if tail_size:
            crc = zlib.crc32(tail, crc)
        if size > MAX_FIXED_BYTES:
            raise WireError(f"a fixed part of {size} bytes is over the maximum of {MAX_FIXED_BYTES}")
        if tail_size > MAX_TAIL_BYTES:
            raise WireError(f"a tail of {tail_size} bytes is over the maximum of {MAX_TAIL_BYTES}")
        try:
            head = _HEADER.pack(MAGIC, VERSION, kind, request, generation, size, tail_size, crc)
        except struct.error as exc:
            raise WireError(f"request {request} and generation {generation} must fit 32 bits") from exc
        self._chain = zlib.crc32(head, self._chain)
        buffers: list[Buffer] = [head + _CRC.pack(self._chain)]
        buffers.extend(part for part in fixed if len(part))
        if tail_size:
            buffers.append(tail)
        return buffers


def decode_header(data: memoryview, offset: int = 0, chain: int = 0) -> Header:
    """Read one header, the `HEADER_BYTES` bytes from `offset`, after one whose `crc` was `chain`.

    Raises:
        WireError: if it is not one: wrong magic, version, CRC, kind, or a length over its maximum.
    """
    magic, version, kind, request, generation, fixed, tail, body_crc = _HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        raise WireError(f"expected a frame to begin with {MAGIC!r}, got {bytes(magic)!r}")
    if version != VERSION:
        raise WireError(f"expected wire version {VERSION}, got {version}: two versions of aioenv are talking")
    end = offset + _HEADER.size
    crc = zlib.crc32(data[offset:end], chain)
    if _CRC.unpack_from(data, end)[0] != crc:
        raise WireError("a frame's header does not match its CRC, or does not follow the frame before it")
    if kind not in _KINDS:
        raise WireError(f"unknown kind of frame: {kind}")
    if fixed > MAX_FIXED_BYTES or tail > MAX_TAIL_BYTES:
        raise WireError(f"a frame announces {fixed} + {tail} bytes, over {MAX_FIXED_BYTES} + {MAX_TAIL_BYTES}")
    return Header(_KINDS[kind], request, generation, fixed, tail, body_crc, crc)


def allocate(size: int) -> Sequence[memoryview]:
    """Scratch memory for a fixed part that nobody claims."""
    return (memoryview(bytearray(size)),) if size else ()


class Decoder:
    """Turns bytes into frames, whatever chunks the bytes come in.

    Args:
        place: called once a header is complete and checked; gives the buffers (writable, of format "B") that
            the fixed part shall be read into, or None for scratch memory. Buffers whose lengths don't add up
            to `header.fixed` are passed over for scratch memory too, so that a reply that has grown can be
            looked at instead of being cut. It may be asked for a frame before the frames that came with it have
            been taken, so two frames that are both under way need buffers of their own.

    If any method raises anything but `WireError`, that is a bug, or `place` raised (which breaks the stream). A
    broken stream stays broken: `next_frame` first gives the frames before the fault, then raises the same error
    for ever.
    """

    def __init__(self, place: Callable[[Header], Sequence[memoryview] | None] | None = None) -> None:
        self._place = place
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._frames: deque[Frame] = deque()
        self._error: WireError | None = None
        self._chain = 0
        self._begin()

    def _begin(self) -> None:
        self._header: Header | None = None
        self._fixed: Sequence[memoryview] = ()
        self._tail = memoryview(b"")
        self._wanted: list[memoryview] = [self._head]

    @property
    def idle(self) -> bool:
        """Whether the last byte so far ended a frame: a stream may end here."""
        return self._error is None and self._header is None and len(self._wanted[0]) == HEADER_BYTES

    def buffers(self) -> list[memoryview]:
        """The buffers to fill next, in order: a scatter read may fill them all at once.

        Raises:
            WireError: if the stream is broken; nothing after this point can be understood.
        """
        if self._error:
            raise self._error.with_traceback(None)
        return self._wanted

    def advance(self, count: int) -> None:
        """Say that the next `count` bytes of `buffers()` have been filled; what they were, `next_frame` tells.

        Raises:
            WireError: if the stream was broken before.
        """
        if self._error:
            raise self._error.with_traceback(None)
        wanted = self._wanted
        while count:
            size = len(wanted[0])
            if count < size:
                wanted[0] = wanted[0][count:]
                return
            count -= size
            del wanted[0]
        if not wanted:
            self._complete()

    def feed(self, data: Buffer) -> None:
        """Take bytes that were read elsewhere: copies them to where they belong.

        Raises nothing of its own: what is wrong with the bytes comes out of `next_frame`, after the frames before it.
        """
        view = memoryview(data)
        offset, end = 0, len(view)
        while offset < end and not self._error:
            if end - offset >= HEADER_BYTES and self.idle:
                taken = self._take_whole(view, offset)
                if taken:
                    offset += taken
                    continue
            target = self._wanted[0]
            count = min(len(target), end - offset)
            target[:count] = view[offset : offset + count]
            offset += count
            self.advance(count)

    def _take_whole(self, view: memoryview, offset: int) -> int:
        """Take a frame that lies in `view` as a whole; gives its length, or 0 if that is not so.

        The usual case, at a fifth of the cost; and nothing is written into anybody's arrays before the check.
        """
        try:
            header = decode_header(view, offset, self._chain)
        except WireError as error:
            self._break(error)
            return len(view) - offset
        body = offset + HEADER_BYTES
        end = body + header.fixed + header.tail
        if end > len(view):
            return 0
        if zlib.crc32(view[body:end]) != header.body_crc:
            self._break(WireError(f"the body of a {header.kind.name} frame does not match its CRC"))
            return len(view) - offset
        fixed = self._claim(header)
        for part in fixed:
            size = len(part)
            part[:] = view[body : body + size]
            body += size
        tail = memoryview(bytes(view[body:end]))
        self._chain = header.crc
        self._frames.append(Frame(header.kind, header.request, header.generation, fixed, tail))
        return end - offset

    def next_frame(self) -> Frame | None:
        """The next complete frame; None if more bytes are needed.

        Raises:
            WireError: if the bytes after the last complete frame are not a frame.
        """
        if self._frames:
            return self._frames.popleft()
        if self._error:
            raise self._error.with_traceback(None)
        return None

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            WireError: if it ended inside a frame.
        """
        if not self._error and not self.idle:
            self._error = WireError("the stream ended inside a frame")
        if self._error and not self._frames:
            raise self._error.with_traceback(None)

    def _complete(self) -> None:
        """The wanted buffers are full: go from header to body, or from body to a frame."""
        header = self._header
        if header is None:
            try:
                header = self._header = decode_header(self._head, 0, self._chain)
            except WireError as error:
                self._break(error)
                return
            self._fixed = self._claim(header)
            self._tail = memoryview(bytearray(header.tail))
            self._wanted = [part for part in (*self._fixed, self._tail) if len(part)]
            if self._wanted:
                return
        crc = 0
        for part in self._fixed:
            crc = zlib.crc32(part, crc)
        if zlib.crc32(self._tail, crc) != header.body_crc:
            self._break(WireError(f"the body of a {header.kind.name} frame does not match its CRC"))
            return
        self._chain = header.crc
        self._frames.append(Frame(header.kind, header.request, header.generation, self._fixed, self._tail))
        self._begin()

    def _claim(self, header: Header) -> Sequence[memoryview]:
        """The buffers for a frame's fixed part: the caller's, if they fit, else scratch."""
        try:
            fixed = self._place(header) if self._place else None
        except BaseException:
            # the frame has no home, and whoever catches this must not find the next one half read
            self._break(WireError(f"no memory was given for the fixed part of a {header.kind.name} frame"))
            raise
        if fixed is None or sum(map(len, fixed)) != header.fixed:
            return allocate(header.fixed)
        return fixed

    def _break(self, error: WireError) -> None:
        """Remember the error; it is raised once the frames before it have been taken.

        Without its traceback, here and wherever it is raised: that would keep the caller's buffers, and would
        grow with every raise.
        """
        self._error = error.with_traceback(None)
