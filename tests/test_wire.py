"""The wire: any frames survive any chunking, and any mutation gives a prefix of them and then WireError."""

from __future__ import annotations

import pickle
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioenv.errors import WireError
from aioenv.wire import frames
from aioenv.wire.frames import HEADER_BYTES, MAX_FIXED_BYTES, Decoder, Kind, decode_header, encode
from aioenv.wire.messages import dump, dump_code, load

settings.register_profile("wire", max_examples=300, deadline=None)
settings.load_profile("wire")

uint32 = st.integers(0, 2**32 - 1)
chunk = st.binary(max_size=60)
# (kind, request, generation, fixed parts, tail)
frame = st.tuples(st.sampled_from(Kind), uint32, uint32, st.lists(chunk, max_size=4), chunk)
messages = st.lists(frame, max_size=6)
cuts = st.lists(st.integers(1, 80), max_size=60)


def to_bytes(sent) -> bytes:
    return b"".join(bytes(b) for item in sent for b in encode(*item))


def plain(item) -> tuple:
    kind, request, generation, fixed, tail = item
    return kind, request, generation, b"".join(map(bytes, fixed)), bytes(tail)


def drain(decoder: Decoder) -> list[tuple]:
    got = []
    while (item := decoder.next_frame()) is not None:
        got.append(plain(item))
    return got


def chunks(data: bytes, sizes: list[int]):
    for size in sizes:
        yield data[:size]
        data = data[size:]
    yield data


def by_feeding(data: bytes, sizes: list[int], decoder: Decoder) -> list[tuple]:
    got = []
    for piece in chunks(data, sizes):
        decoder.feed(piece)
        got += drain(decoder)
    return got


def by_filling(data: bytes, sizes: list[int], decoder: Decoder) -> list[tuple]:
    """As a scatter read does: fill as much of the wanted buffers as there is, across their bounds."""
    got = []
    sizes = [*sizes]
    while data:
        room = sizes.pop(0) if sizes else len(data)
        count = 0
        for buffer in decoder.buffers():
            part = data[count : min(count + len(buffer), room)]
            buffer[: len(part)] = part
            count += len(part)
        decoder.advance(count)
        data = data[count:]
        got += drain(decoder)
    return got


def owner(wrong: bool):
    """A `place` that owns buffers, in several pieces; or of a length that does not fit."""

    def place(header):
        size = header.fixed + (1 if wrong else 0)
        half = size // 3
        return [memoryview(bytearray(half)), memoryview(bytearray(size - half)), memoryview(bytearray(0))]

    return place


PLACES = {"scratch": None, "owned": owner(False), "misfit": owner(True)}
READERS = {"feed": by_feeding, "fill": by_filling}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@given(sent=messages, sizes=cuts)
def test_any_frames_survive_any_chunking(read, place, sent, sizes):
    decoder = Decoder(place)
    assert read(to_bytes(sent), sizes, decoder) == [plain(item) for item in sent]
    assert decoder.idle
    decoder.finish()


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@given(sent=messages)
def test_byte_by_byte(read, sent):
    data = to_bytes(sent)
    assert read(data, [1] * len(data), Decoder()) == [plain(item) for item in sent]


def read_to_the_end(data: bytes, sizes: list[int], read, place) -> tuple[list[tuple], bool]:
    """The frames before the fault, and whether there was one."""
    decoder = Decoder(place)
    got: list[tuple] = []
    try:
        for piece in chunks(data, sizes):
            if read is by_feeding:
                decoder.feed(piece)
                while (item := decoder.next_frame()) is not None:
                    got.append(plain(item))
            else:
                while piece:
                    buffer = decoder.buffers()[0]
                    part, piece = piece[: len(buffer)], piece[len(buffer) :]
                    buffer[: len(part)] = part
                    decoder.advance(len(part))
                    while (item := decoder.next_frame()) is not None:
                        got.append(plain(item))
        decoder.finish()
    except WireError as error:
        for _ in range(2):  # a broken decoder stays broken
            with pytest.raises(WireError, match=str(error)[:10].replace("(", ".")):
                decoder.next_frame()
        return got, True
    return got, False


@st.composite
def mutated(draw):
    """Frames, their bytes after a mutation, and the offset of the first byte that differs."""
    sent = draw(st.lists(frame, min_size=1, max_size=5))
    data = to_bytes(sent)
    at = draw(st.integers(0, len(data) - 1))
    match draw(st.sampled_from(["flip", "replace", "insert", "delete", "truncate", "swap", "append"])):
        case "flip":
            bad = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        case "replace":
            new = draw(st.binary(min_size=1, max_size=20))
            bad = data[:at] + new + data[at + len(new) :]
        case "insert":
            bad = data[:at] + draw(st.binary(min_size=1, max_size=20)) + data[at:]
        case "delete":
            bad = data[:at] + data[at + draw(st.integers(1, 20)) :]
        case "truncate":
            bad = data[:at]
        case "swap":
            middle = draw(st.integers(at, len(data)))
            end = draw(st.integers(middle, len(data)))
            bad = data[:at] + data[middle:end] + data[at:middle] + data[end:]
        case "append":
            bad = data + draw(st.binary(min_size=1, max_size=60))
    return sent, data, bad


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@given(case=mutated(), sizes=cuts)
def test_any_mutation_gives_a_prefix_and_then_wire_error(read, place, case, sizes):
    sent, data, bad = case
    got, broken = read_to_the_end(bad, sizes, read, place)
    expected = [plain(item) for item in sent]
    if bad == data:
        assert got == expected and not broken
        return
    if not broken:
        # whole frames were cut off the end, moved, or left out: what is left is frames that were sent
        starts = [len(to_bytes(sent[:i])) for i in range(len(sent) + 1)]
        whole = {plain(item) for item in sent}
        assert set(got) <= whole
        assert data.startswith(bad) is (got == expected[: len(got)] and len(bad) in starts) or len(got) >= 1
        return
    same = next((i for i, (a, b) in enumerate(zip(data, bad, strict=False)) if a != b), min(len(data), len(bad)))
    complete = sum(len(to_bytes(sent[: i + 1])) <= same for i in range(len(sent)))
    # every frame before the fault came out; after it come only frames that were sent, none that was made up
    assert got[:complete] == expected[:complete]
    assert set(got) <= set(expected)


@given(st.binary(max_size=400), cuts)
def test_garbage_gives_wire_error_or_nothing(data, sizes):
    got, broken = read_to_the_end(data, sizes, by_feeding, None)
    assert got == []
    assert broken is (len(data) > 0)


def header(**changes) -> bytes:
    fields = {"magic": frames.MAGIC, "version": frames.VERSION, "kind": 1, "request": 0, "generation": 0}
    fields |= {"fixed": 0, "tail": 0, "crc": 0} | changes
    head = struct.pack("<2sBBIIIII", *fields.values())
    return head + struct.pack("<I", zlib.crc32(head))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"GE"}, "expected a frame to begin with"),
        ({"version": 99}, "two versions of aioenv"),
        ({"kind": 250}, "unknown kind"),
        ({"fixed": MAX_FIXED_BYTES + 1}, "announces"),
        ({"tail": frames.MAX_TAIL_BYTES + 1}, "announces"),
    ],
)
def test_bad_headers_are_refused_before_anything_is_allocated(changes, message):
    def place(header):
        raise AssertionError("asked for memory")

    decoder = Decoder(place)
    decoder.feed(header(**changes) + b"rest")
    with pytest.raises(WireError, match=message):
        decoder.next_frame()


def test_a_header_is_as_long_as_it_says():
    assert len(header()) == HEADER_BYTES
    assert decode_header(memoryview(header(request=7))).request == 7


def test_encode_copies_nothing():
    parts = [memoryview(bytearray(b"abc")), b"", memoryview(bytearray(10))]
    tail = b"tail"
    buffers = encode(Kind.STEP, 1, 2, parts, tail)
    assert buffers[1] is parts[0] and buffers[2] is parts[2] and buffers[3] is tail
    assert len(buffers) == 4


def test_encode_refuses_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FIXED_BYTES", 10)
    monkeypatch.setattr(frames, "MAX_TAIL_BYTES", 10)
    with pytest.raises(WireError, match="fixed part of 12 bytes is over the maximum of 10"):
        encode(Kind.STEP, 0, 0, [b"123456", b"789012"])
    with pytest.raises(WireError, match="tail of 11 bytes"):
        encode(Kind.STEP, 0, 0, (), b"x" * 11)
    with pytest.raises(WireError, match="32 bits"):
        encode(Kind.STEP, 2**32, 0)


def test_the_fixed_part_goes_straight_into_the_callers_buffers():
    mine = [memoryview(bytearray(3)), memoryview(bytearray(2))]
    decoder = Decoder(lambda header: mine)
    decoder.feed(to_bytes([(Kind.RESULT, 1, 0, [b"ab", b"cde"], b"t")]))
    got = decoder.next_frame()
    assert got is not None and got.fixed is mine
    assert bytes(mine[0]) == b"abc" and bytes(mine[1]) == b"de"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"rubbish",
        dump([1, 2])[:-1],
        b"\x80\x05.",
        b"cno_such_module\nname\n.",
        b"\x80\x04K\x01R.",
        b"\x80\xff.",
    ],
)
def test_what_does_not_unpickle_gives_wire_error_alone(data):
    with pytest.raises(WireError, match="does not unpickle"):
        load(data)


def test_functions_travel_by_value():
    offset = 3
    assert load(dump_code(lambda x: x + offset))(4) == 7
    assert load(dump(lambda: 1))() == 1
    assert pickle.loads(dump([1])) == [1]
