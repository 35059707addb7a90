"""A mutation fuzzer for the wire, fast enough for a million cases: streams are spoiled, and decoded in every way.

Two sorts of cases. *Spoiled* streams (bytes flipped, lost, repeated, moved) must give the frames before the damage
and then `WireError`. *Forged* ones have headers with good CRCs that announce whatever they like, as only a worker
that has gone mad would write them: there only `WireError` may come out, and memory stays what really arrived.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate

from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import HEADER_BYTES, MAGIC, VERSION, Kind
from tests.kits.wire_kit import FrameFields, Guesser, Owner, by_both, by_feed, by_fill, decode_until_error, encode_all

READERS = (by_feed, by_fill, by_both)
SIZES = (1, 3, 7, 31, HEADER_BYTES, 33, 64, 100, 1 << 20)
# what a forged header announces: nothing, little, just over what is sent, and as much as can be said
LENGTHS = (0, 1, 5, 64, 1 << 16, 1 << 20, (1 << 30) - 1, 1 << 30, (1 << 31) - 1, 1 << 31, 2**32 - 1)


def _bytes(rng: random.Random, longest: int) -> bytes:
    return rng.randbytes(rng.randrange(longest + 1))


def stream(rng: random.Random) -> list[FrameFields]:
    """A few frames; those that differ in nothing are the ones that could be taken for each other."""
    if rng.random() < 0.3:
        return [
            FrameFields(Kind.STEP, rng.randrange(2), 0, [], rng.choice([b"", b"x"])) for _ in range(rng.randrange(1, 6))
        ]
    return [
        FrameFields(
            rng.choice(list(Kind)),
            rng.choice([0, 1, 2**32 - 1, rng.randrange(2**32)]),
            rng.randrange(3),
            [_bytes(rng, 60) for _ in range(rng.randrange(4))],
            rng.choice([b"", _bytes(rng, 80)]),
        )
        for _ in range(rng.randrange(1, 6))
    ]


def spoil(rng: random.Random, coded: list[bytes]) -> bytes:
    """A stream's bytes after some mutations; cuts fall between frames more often than by chance."""
    data = b"".join(coded)
    for _ in range(rng.randrange(1, 4)):
        ends = [end for end in (0, *accumulate(map(len, coded))) if end <= len(data)]
        a, b, c = sorted(rng.choice(ends) if rng.random() < 0.4 else rng.randrange(len(data) + 1) for _ in range(3))
        match rng.randrange(7):
            case 0 if data:
                at = rng.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :]
            case 1:
                data = data[:a] + _bytes(rng, 50) + data[a:]
            case 2:
                data = data[:a] + data[b:]
            case 3:
                data = data[:a]
            case 4:
                data = data[:a] + data[b:c] + data[a:b] + data[c:]
            case 5:
                data = data[:b] + data[a:]
            case _:
                data += _bytes(rng, 200)
    return data


def forge(rng: random.Random) -> bytes:
    """Frames with good headers, whose lengths and bodies are another matter."""
    data, chain = b"", 0
    for _ in range(rng.randrange(1, 4)):
        body = _bytes(rng, 100)
        honest = rng.randrange(len(body) + 1)
        fixed, payload = (
            (honest, len(body) - honest) if rng.random() < 0.5 else (rng.choice(LENGTHS), rng.choice(LENGTHS))
        )
        kind = rng.choice([int(rng.choice(list(Kind))), rng.randrange(256)])
        crc = rng.choice([zlib.crc32(body), rng.randrange(2**32)])
        head = struct.pack("<2sBBIIIII", MAGIC, VERSION, kind, rng.randrange(4), rng.randrange(2), fixed, payload, crc)
        chain = zlib.crc32(head, chain)
        data += head + struct.pack("<I", chain) + body
    return data


class Fuzzer:
    """Cases without end, the same ones for the same seed.

    Args:
        seed: where they begin.

    Attributes:
        spoiled, forged: how many cases there were of each sort.
        errors: how many of them ended in a `WireError`.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._streams: list[tuple[list[FrameFields], list[bytes]]] = []
        self.spoiled = self.forged = self.errors = 0

    def run(self, cases: int) -> None:
        """Try so many cases.

        Raises:
            AssertionError: if a stream gave other frames than it should, or did not end as it should.
            Exception: if anything but `WireError` came out of a decoder.
        """
        for number in range(cases):
            if number % 200 == 0:
                self._streams = [(sent, encode_all(sent)) for sent in (stream(self._rng) for _ in range(20))]
            if self._rng.random() < 0.3:
                self._forged()
            else:
                self._spoiled(*self._rng.choice(self._streams))

    def _reads(self) -> tuple[object, list[int]]:
        return self._rng.choice(READERS), [self._rng.choice(SIZES) for _ in range(self._rng.randrange(1, 5))]

    def _spoiled(self, sent: list[FrameFields], coded: list[bytes]) -> None:
        rng = self._rng
        self.spoiled += 1
        decoder = Decoder()
        match rng.randrange(3):
            case 0:
                decoder = Decoder(Owner([7, 50], rng.choice([0, 0, -1, 1])))
            case 1:
                guesser = Guesser(sent, rng.choices(["right", "wrong", "none"], k=3))
                decoder = Decoder(guesser.place, guesser.expect)
        read, reads = self._reads()
        self.errors += check_spoiled(read, decoder, reads, sent, coded, spoil(rng, coded))

    def _forged(self) -> None:
        """A decoder as the parent has it: two replies of known lengths are expected."""
        rng = self._rng
        self.forged += 1
        expected = {request: [memoryview(bytearray(size)) for size in (30, 0, 34)] for request in range(2)}
        decoder = Decoder(
            lambda header: expected.get(header.request),
            (lambda: expected[0]) if rng.random() < 0.5 else None,
            max_scratch=0,
        )
        read, reads = self._reads()
        _, error = decode_until_error(read, decoder, forge(rng), reads)
        self.errors += error is not None


def check_spoiled(
    read, decoder: Decoder, reads: list[int], sent: Sequence[FrameFields], coded: Sequence[bytes], bad: bytes
) -> bool:
    """Exactly the frames before the first byte that differs, then WireError; says whether it came to that."""
    data = b"".join(coded)
    same = next((at for at, (a, b) in enumerate(zip(data, bad, strict=False)) if a != b), min(len(data), len(bad)))
    ends = [0, *accumulate(map(len, coded))]
    got, error = decode_until_error(read, decoder, bad, reads)
    assert got == [item.plain() for item in sent[: sum(end <= same for end in ends[1:])]]
    cut_between_frames = len(bad) == same and same in ends
    assert (error is None) is cut_between_frames
    assert decoder.idle is cut_between_frames
    return error is not None
