"""Kit for tests of the wire: streams of frames, ways to read them, and ways to corrupt them."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from itertools import accumulate, cycle
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from aioenv.errors import WireError
from aioenv.ipc import frames
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import HEADER_BYTES, Encoder, Frame, Header, Kind


class FrameFields(NamedTuple):
    """What is given to the encoder."""

    kind: Kind
    request: int
    generation: int
    fixed: list[bytes]
    payload: bytes

    def plain(self) -> tuple[Any, ...]:
        return self.kind, self.request, self.generation, b"".join(self.fixed), self.payload


def plain(frame: Frame) -> tuple[Any, ...]:
    kind, request, generation, fixed, payload = frame
    assert type(kind) is Kind
    return kind, request, generation, b"".join(map(bytes, fixed)), bytes(payload)


def encode_all(sent: list[FrameFields]) -> list[bytes]:
    """The bytes of each frame of a stream."""
    encoder = Encoder()
    return [b"".join(map(bytes, encoder.encode(*item))) for item in sent]


uint32 = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**32 - 1])
# long enough for more than one read, and empty often enough
body = st.binary(max_size=90) | st.just(b"") | st.integers(0, 700).map(lambda n: b"\xa1\x0e\x01\x05" * n)
sent_frame = st.builds(FrameFields, st.sampled_from(Kind), uint32, uint32, st.lists(body, max_size=4), body)
# frames that differ in little or nothing are the ones that could be taken for each other
twin = st.builds(
    FrameFields, st.just(Kind.STEP), st.integers(0, 1), st.just(0), st.just([]), st.sampled_from([b"", b"x"])
)
streams = st.lists(sent_frame, max_size=6) | st.lists(twin, max_size=6)
# sizes of reads, over and over; small ones cut headers, large ones take several frames at once
sizes = st.lists(st.integers(1, 100) | st.sampled_from([1, HEADER_BYTES, 1 << 20]), min_size=1, max_size=12)

Reader = Callable[[Decoder, bytes, list[int]], Iterator[Frame]]


def by_feed(decoder: Decoder, data: bytes, reads: list[int]) -> Iterator[Frame]:
    """As a stream reader does: feed what has come, then take all frames."""
    for size in cycle(reads):
        if not data:
            break
        decoder.feed(data[:size])
        data = data[size:]
        while (frame := decoder.next_frame()) is not None:
            yield frame
    decoder.finish()


def by_fill(decoder: Decoder, data: bytes, reads: list[int]) -> Iterator[Frame]:
    """As a scatter read does: fill the wanted buffers across their bounds, but seldom all of them."""
    for size in cycle(reads):
        while (frame := decoder.next_frame()) is not None:
            yield frame
        if not data:
            break
        filled = 0
        for buffer in decoder.buffers():
            part = data[filled : min(filled + len(buffer), size)]
            buffer[: len(part)] = part
            filled += len(part)
        assert filled, "it must always want something"
        decoder.advance(filled)
        data = data[filled:]
    decoder.finish()


def by_both(decoder: Decoder, data: bytes, reads: list[int]) -> Iterator[Frame]:
    """The two ways by turns, on one decoder."""
    for index, size in enumerate(cycle(reads)):
        while (frame := decoder.next_frame()) is not None:
            yield frame
        if not data:
            break
        if index % 2:
            filled = min(size, len(data))
            decoder.feed(data[:filled])
        else:
            buffer = decoder.buffers()[0]
            filled = min(size, len(data), len(buffer))
            buffer[:filled] = data[:filled]
            decoder.advance(filled)
        data = data[filled:]
    decoder.finish()


class Owner:
    """A `place` that owns buffers.

    Args:
        pieces: their sizes, over and over, as far as the fixed part goes.
        off_by: how many bytes too many (or too few) it gives.
    """

    def __init__(self, pieces: list[int], off_by: int = 0) -> None:
        self.pieces = pieces
        self.off_by = off_by
        self.headers: list[Header] = []
        self.given: list[list[memoryview]] = []

    def __call__(self, header: Header) -> list[memoryview]:
        left = max(0, header.fixed + self.off_by)
        buffers = [memoryview(bytearray(0))]
        for size in cycle(self.pieces):
            if not left:
                break
            buffers.append(memoryview(bytearray(b"\xee" * min(size, left))))
            left -= min(size, left)
        self.headers.append(header)
        self.given.append(buffers)
        return buffers


class Guesser:
    """A `place` and an `expect` for a stream: guesses are right, wrong or missing, by turns.

    Args:
        sent: the frames to come.
        guesses: what kind each guess is, over and over.
    """

    def __init__(self, sent: list[FrameFields], guesses: list[str]) -> None:
        self.buffers = [[memoryview(bytearray(len(part))) for part in item.fixed] for item in sent]
        self.guesses = cycle(guesses)
        self.begun = 0

    def place(self, header: Header) -> list[memoryview] | None:
        self.begun += 1
        return self.buffers[self.begun - 1] if self.begun <= len(self.buffers) else None

    def expect(self) -> list[memoryview] | None:
        guess = next(self.guesses)
        if guess == "none" or self.begun >= len(self.buffers):
            return None
        return self.buffers[self.begun] if guess == "right" else [memoryview(bytearray(size)) for size in (7, 0, 40)]


guesses = st.lists(st.sampled_from(["right", "wrong", "none"]), min_size=1, max_size=5)

pieces = st.lists(st.integers(1, 50), min_size=1, max_size=4)
places = (
    st.none()
    | st.just(lambda header: None)
    | st.builds(Owner, pieces)
    | st.builds(Owner, pieces, st.sampled_from([-3, -1, 1, 1000]))
)
readers = pytest.mark.parametrize("read", [by_feed, by_fill, by_both], ids=lambda read: read.__name__)


def decode_until_error(read: Reader, decoder: Decoder, data: bytes, reads: list[int]):
    """The frames before the fault, and the fault: any other exception fails the test."""
    got = []
    try:
        for frame in read(decoder, data, reads):
            got.append(plain(frame))  # noqa: PERF401  # those before the error count
    except WireError as error:
        return got, error
    return got, None


def one_byte(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


@st.composite
def mutated(draw, coded: list[bytes]) -> bytes:
    """A stream's bytes after some mutations; cuts fall anywhere, and between frames more often than by chance."""
    data = b"".join(coded)
    for _ in range(draw(st.integers(1, 3))):
        ends = [end for end in (0, *accumulate(map(len, coded))) if end <= len(data)]
        where = st.sampled_from(ends) | st.integers(0, len(data))
        a, b, c = sorted(draw(st.tuples(where, where, where)))
        match draw(st.sampled_from(["flip", "insert", "delete", "truncate", "swap", "repeat", "garbage"])):
            case "flip" if data:
                at = draw(st.integers(0, len(data) - 1))
                data = one_byte(data, at, data[at] ^ draw(st.integers(1, 255)))
            case "insert":
                data = data[:a] + draw(st.binary(min_size=1, max_size=50)) + data[a:]
            case "delete":
                data = data[:a] + data[b:]
            case "truncate":
                data = data[:a]
            case "swap":
                data = data[:a] + data[b:c] + data[a:b] + data[c:]
            case "repeat":
                data = data[:b] + data[a:]
            case "garbage":
                data += draw(st.binary(min_size=1, max_size=200))
    return data


EXAMPLE = [
    FrameFields(Kind.STEP, 7, 1, [b"\x00" * 9, b"abc"], b"tail"),
    FrameFields(Kind.CLOSE, 8, 1, [], b""),
    FrameFields(Kind.CLOSE, 8, 1, [], b""),
    FrameFields(Kind.RESULT, 9, 1, [b"\xff" * 5], b""),
]


@contextlib.contextmanager
def no_more_memory_than(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        yield
        used = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert used <= limit, f"{used} bytes, at most {limit} expected"


def raw_header(magic=frames.MAGIC, version=frames.VERSION, kind=int(Kind.STEP), fixed=0, payload=0) -> bytes:
    """A header with a good CRC, whatever it says. Written from the table in the module's docstring."""
    head = struct.pack("<2sBBIIIII", magic, version, kind, 1, 0, fixed, payload, 0)
    return head + struct.pack("<I", zlib.crc32(head))
