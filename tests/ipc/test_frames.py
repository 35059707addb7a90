"""The wire: any frames survive any chunking, and any mutation gives a prefix of them and then `WireError`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioenv.errors import WireError
from aioenv.ipc import frames
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import HEADER_BYTES, Encoder, Header, Kind
from tests.kits.wire_kit import (
    EXAMPLE,
    FrameFields,
    Guesser,
    Owner,
    Reader,
    by_feed,
    by_fill,
    decode_until_error,
    encode_all,
    guesses,
    mutated,
    no_more_memory_than,
    one_byte,
    places,
    plain,
    raw_header,
    readers,
    sent_frame,
    sizes,
    streams,
)

FEW = settings(max_examples=100, deadline=None)
MANY = settings(max_examples=400, deadline=None)


# ---------------------------------------------------------------- any chunking


@readers
@MANY
@given(sent=streams, reads=sizes, place=places)
def test_any_frames_survive_any_chunking(read: Reader, sent, reads, place):
    decoder = Decoder(place)
    got = list(read(decoder, b"".join(encode_all(sent)), reads))
    assert [plain(frame) for frame in got] == [item.plain() for item in sent]
    assert decoder.idle and decoder.next_frame() is None
    if isinstance(place, Owner):
        assert [header[:3] for header in place.headers] == [item[:3] for item in sent], "asked once a frame, in order"
        for frame, buffers, item in zip(got, place.given, sent, strict=True):
            size = len(b"".join(item.fixed))
            if sum(map(len, buffers)) == size:
                assert frame.fixed is buffers, "the very buffers that it gave"
            else:
                assert all(set(bytes(buffer)) <= {0xEE} for buffer in buffers), "buffers that don't fit stay untouched"
                assert len(frame.fixed) == bool(size)


@readers
@MANY
@given(sent=streams, reads=sizes, kinds=guesses)
def test_a_guess_right_or_wrong_changes_no_frame(read: Reader, sent, reads, kinds):
    guesser = Guesser(sent, kinds)
    decoder = Decoder(guesser.place, guesser.expect)
    got = list(read(decoder, b"".join(encode_all(sent)), reads))
    assert [plain(frame) for frame in got] == [item.plain() for item in sent]
    assert decoder.idle and decoder.next_frame() is None
    assert all(frame.fixed is buffers for frame, buffers in zip(got, guesser.buffers, strict=True))


def test_a_right_guess_brings_a_frame_in_one_read():
    sent = [
        FrameFields(Kind.RESULT, 1, 0, [b"abc", b"", b"defg"], b"tail"),
        FrameFields(Kind.RESULT, 2, 0, [], b"next"),
    ]
    data = b"".join(encode_all(sent))
    guesser = Guesser(sent, ["right"])
    decoder = Decoder(guesser.place, guesser.expect)
    for buffer in decoder.buffers():
        buffer[: len(data)], data = data[: len(buffer)], data[len(buffer) :]
    assert not data
    decoder.advance(sum(len(b"".join(encode_all([item]))) for item in sent))
    assert [plain(decoder.next_frame()) for _ in sent] == [item.plain() for item in sent]


@readers
@FEW
@given(sent=streams)
def test_a_stream_of_single_bytes(read: Reader, sent):
    got = read(Decoder(), b"".join(encode_all(sent)), [1])
    assert [plain(frame) for frame in got] == [item.plain() for item in sent]


@FEW
@given(sent=st.lists(sent_frame, min_size=1, max_size=4))
def test_idle_only_between_frames(sent):
    coded = encode_all(sent)
    ends = {0, *accumulate(map(len, coded))}
    decoder = Decoder()
    for position, byte in enumerate(b"".join(coded)):
        assert decoder.idle is (position in ends)
        decoder.feed(bytes([byte]))
    assert decoder.idle


def test_frames_of_numpy_arrays_go_from_memory_to_memory():
    actions = np.arange(12.0).reshape(4, 3)
    flags = np.array([True, False])
    buffers = Encoder().encode(Kind.STEP, 1, 0, [memoryview(a).cast("B") for a in (actions, flags)])
    into = np.zeros_like(actions), np.zeros_like(flags)
    decoder = Decoder(lambda header: [memoryview(a).cast("B") for a in into])
    for buffer in buffers:
        decoder.feed(buffer)
    assert decoder.next_frame() is not None
    np.testing.assert_array_equal(into[0], actions)
    np.testing.assert_array_equal(into[1], flags)


# ---------------------------------------------------------------- any mutation


def check_mutated(
    read: Reader, place, reads: list[int], coded: list[bytes], sent: list[FrameFields], bad: bytes, expect=None
) -> None:
    """What a mutated stream gives: exactly the frames before the first byte that differs, then WireError."""
    data = b"".join(coded)
    same = next((at for at, (a, b) in enumerate(zip(data, bad, strict=False)) if a != b), min(len(data), len(bad)))
    ends = [0, *accumulate(map(len, coded))]
    whole = sum(end <= same for end in ends[1:])
    decoder = Decoder(place, expect)
    got, error = decode_until_error(read, decoder, bad, reads)
    assert got == [item.plain() for item in sent[:whole]]
    cut_between_frames = len(bad) == same and same in ends
    assert (error is None) is cut_between_frames
    assert decoder.idle is cut_between_frames


@readers
@MANY
@given(data=st.data(), sent=streams, reads=sizes, place=places)
def test_any_mutation_gives_a_prefix_and_then_wire_error(read: Reader, data, sent, reads, place):
    coded = encode_all(sent)
    check_mutated(read, place, reads, coded, sent, data.draw(mutated(coded)))


@readers
@MANY
@given(data=st.data(), sent=streams, reads=sizes, kinds=guesses)
def test_any_mutation_under_guesses(read: Reader, data, sent, reads, kinds):
    coded = encode_all(sent)
    guesser = Guesser(sent, kinds)
    bad = data.draw(mutated(coded))
    check_mutated(read, guesser.place, reads, coded, sent, bad, guesser.expect)


@pytest.mark.parametrize("reads", [[1 << 20], [5]], ids=["at once", "in pieces"])
@readers
def test_every_bit_and_every_end(read: Reader, reads):
    coded = encode_all(EXAMPLE)
    data = b"".join(coded)
    for at in range(len(data)):
        for bit in range(8):
            check_mutated(read, None, reads, coded, EXAMPLE, one_byte(data, at, data[at] ^ 1 << bit))
        check_mutated(read, None, reads, coded, EXAMPLE, data[:at])
        check_mutated(read, None, reads, coded, EXAMPLE, data[:at] + data[at + 1 :])


@pytest.mark.parametrize(
    "order",
    [(1,), (1, 2, 3), (0, 3), (0, 2, 3), (0, 0), (0, 1, 1), (1, 0), (0, 1, 3, 2), (3, 2, 1, 0), (0, 1, 2, 3, 0)],
    ids=str,
)
@readers
def test_whole_frames_lost_repeated_or_moved(read: Reader, order):
    """Each frame is a good one. (Frames 1 and 2 say the same: a lost one shows in what follows.)"""
    coded = encode_all(EXAMPLE)
    check_mutated(read, None, [1 << 20], coded, EXAMPLE, b"".join(coded[index] for index in order))


@readers
def test_a_frame_of_another_stream(read: Reader):
    """Say, of the worker that held these slots before."""
    coded = encode_all(EXAMPLE)
    stray = encode_all([FrameFields(Kind.RESULT, 100, 0, [b"old"], b"")])
    check_mutated(read, None, [64], coded, EXAMPLE, b"".join([*coded[:2], *stray, *coded[2:]]))


@readers
@FEW
@given(garbage=st.binary(min_size=1, max_size=300), reads=sizes, magic=st.booleans())
def test_garbage_alone(read: Reader, garbage, reads, magic):
    got, error = decode_until_error(read, Decoder(), frames.MAGIC * magic + garbage, reads)
    assert got == [] and error is not None


# ---------------------------------------------------------------- broken stays broken


def broken_decoders() -> Iterator[Decoder]:
    """Broken in every place that breaks one, with nothing left to take."""
    good = encode_all(EXAMPLE)[0]
    for bad in (b"\x00" * HEADER_BYTES, one_byte(good, len(good) - 1, 0)):
        for read in (by_feed, by_fill):
            for reads in ([1 << 20], [7]):
                decoder = Decoder()
                _, error = decode_until_error(read, decoder, bad, reads)
                assert error is not None
                yield decoder
    decoder = Decoder()
    decoder.feed(good[:-1])
    with pytest.raises(WireError, match="ended inside a frame"):
        decoder.finish()
    yield decoder


@FEW
@given(actions=st.lists(st.sampled_from(["feed", "empty", "buffers", "advance", "next_frame", "finish"]), max_size=10))
def test_a_broken_decoder_stays_broken(actions):
    good = encode_all(EXAMPLE)[0]
    for decoder in broken_decoders():
        with pytest.raises(WireError) as first:
            decoder.next_frame()
        for action in actions:
            match action:
                case "feed":
                    decoder.feed(good)
                case "empty":
                    decoder.feed(b"")
                case "advance":
                    with pytest.raises(WireError) as again:
                        decoder.advance(1)
                    assert again.value is first.value
                case _:
                    with pytest.raises(WireError) as again:
                        getattr(decoder, action)()
                    assert again.value is first.value
            assert not decoder.idle


def test_frames_before_the_fault_come_first_even_after_the_end():
    decoder = Decoder()
    coded = encode_all(EXAMPLE)
    decoder.feed(coded[0] + coded[1] + b"rubbish")
    decoder.finish()  # it has more to tell than that
    assert [plain(decoder.next_frame()), plain(decoder.next_frame())] == [item.plain() for item in EXAMPLE[:2]]
    with pytest.raises(WireError, match="ended inside a frame"):
        decoder.next_frame()


def test_an_error_keeps_nothing_alive_and_does_not_grow():
    decoder = Decoder()
    data = bytearray(b"no frame" * 10)
    decoder.feed(data)
    data.append(0)  # BufferError, if anything still looked at it
    depths = []
    for _ in range(3):
        with pytest.raises(WireError) as caught:
            decoder.next_frame()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


@readers
def test_a_place_that_raises_breaks_the_stream(read: Reader):
    def place(header: Header):
        if header.request == 9:
            raise LookupError("no such request")

    decoder = Decoder(place)
    got = []
    with pytest.raises(LookupError):
        for frame in read(decoder, b"".join(encode_all(EXAMPLE)), [HEADER_BYTES]):
            got.append(plain(frame))  # noqa: PERF401
    assert got == [item.plain() for item in EXAMPLE[:3]]
    decoder.feed(encode_all(EXAMPLE)[0])
    with pytest.raises(WireError, match="no memory was given for the fixed part of a RESULT"):
        decoder.next_frame()


# ---------------------------------------------------------------- memory


@readers
@FEW
@given(data=st.data(), sent=streams)
def test_a_mutated_stream_takes_no_more_memory_than_its_frames(read: Reader, data, sent):
    coded = encode_all(sent)
    bad = data.draw(mutated(coded))
    with no_more_memory_than(100_000 + 40 * (len(bad) + max(map(len, coded), default=0))):
        decode_until_error(read, Decoder(), bad, [64])


@readers
def test_a_flipped_length_takes_no_memory(read: Reader):
    """A bit high in a length makes a gigabyte of it: the header's CRC is looked at before memory is."""
    asked: list[Header] = []
    head = encode_all([FrameFields(Kind.STEP, 0, 0, [], b"")])[0]
    for bit in range(8 * HEADER_BYTES):
        bad = one_byte(head, bit // 8, head[bit // 8] ^ 1 << bit % 8)
        with no_more_memory_than(20_000):
            got, error = decode_until_error(read, Decoder(asked.append), bad + bytes(64), [HEADER_BYTES])
        assert got == [] and error is not None
    assert asked == []


def test_a_broken_decoder_keeps_nothing_of_what_follows():
    chunk = bytes(1 << 20)
    decoder = Decoder()
    decoder.feed(chunk)
    with no_more_memory_than(10_000):
        for _ in range(200):
            decoder.feed(chunk)


def test_encode_copies_nothing():
    big = bytearray(8 << 20)
    parts = [memoryview(big), b"", memoryview(bytearray(b"abc")), bytearray(b"x")]
    payload = bytes(1 << 20)
    encoder = Encoder()
    with no_more_memory_than(10_000):
        buffers = encoder.encode(Kind.STEP, 1, 2, parts, payload)
    assert [type(buffers[0]), len(buffers[0])] == [bytes, HEADER_BYTES]
    assert [id(buffer) for buffer in buffers[1:]] == [id(part) for part in (parts[0], parts[2], parts[3], payload)]


@FEW
@given(item=sent_frame)
def test_encode_gives_the_parts_themselves_and_no_empty_buffer(item):
    head, *rest = Encoder().encode(*item)
    assert len(head) == HEADER_BYTES
    assert [id(buffer) for buffer in rest] == [id(part) for part in (*item.fixed, item.payload) if part]


def test_the_caller_may_use_its_chunk_again():
    """A frame's payload is its own: the reader's buffer is overwritten by what comes next."""
    data = bytearray(encode_all([FrameFields(Kind.RESULT, 1, 0, [b"fixed"], b"tail")])[0])
    decoder = Decoder()
    decoder.feed(data)
    data[:] = bytes(len(data))
    frame = decoder.next_frame()
    assert frame is not None
    assert (bytes(frame.fixed[0]), bytes(frame.payload)) == (b"fixed", b"tail")


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"GE"}, "expected a frame to begin with"),
        ({"version": frames.VERSION + 1}, "two versions of aioenv"),
        ({"kind": 0}, "unknown kind of frame: 0"),
        ({"kind": 255}, "unknown kind of frame: 255"),
        ({"fixed": frames.MAX_FIXED_BYTES + 1}, "announces"),
        ({"payload": frames.MAX_PAYLOAD_BYTES + 1}, "announces"),
        ({"fixed": 2**32 - 1, "payload": 2**32 - 1}, "announces"),
    ],
    ids=str,
)
@readers
def test_a_header_that_is_refused_asks_for_no_memory(read: Reader, changes, message):
    asked: list[Header] = []
    with no_more_memory_than(100_000):
        _, error = decode_until_error(read, Decoder(asked.append), raw_header(**changes), [HEADER_BYTES])
    assert error is not None and message in str(error)
    assert asked == []


def test_the_layout_that_the_docstring_draws():
    assert bytes(Encoder().encode(Kind.STEP, 1, 0)[0]) == raw_header()
    assert {int(kind) for kind in Kind} <= set(range(1, 256))


def test_encode_and_decode_have_the_same_limits(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FIXED_BYTES", 10)
    monkeypatch.setattr(frames, "MAX_PAYLOAD_BYTES", 6)
    encoder, decoder = Encoder(), Decoder()
    with pytest.raises(WireError, match="a fixed part of 11 bytes is over the maximum of 10"):
        encoder.encode(Kind.STEP, 0, 0, [b"123456", b"78901"])
    with pytest.raises(WireError, match="a payload of 7 bytes is over the maximum of 6"):
        encoder.encode(Kind.STEP, 0, 0, (), b"1234567")
    # what was refused leaves no mark on the stream
    for buffer in encoder.encode(Kind.STEP, 3, 4, [b"12345", b"67890"], b"123456"):
        decoder.feed(buffer)
    assert plain(decoder.next_frame()) == (Kind.STEP, 3, 4, b"1234567890", b"123456")


@pytest.mark.parametrize(("request_id", "generation"), [(2**32, 0), (-1, 0), (0, 2**32), (0, -1)])
def test_numbers_that_do_not_fit_their_field(request_id, generation):
    with pytest.raises(WireError, match="must fit 32 bits"):
        Encoder().encode(Kind.STEP, request_id, generation)
