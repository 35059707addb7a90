"""Large replies: they come in pieces, whose CRCs are computed as they come."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioenv.errors import WireError
from aioenv.ipc.frames import HEADER_BYTES, Encoder, Frame, Kind
from aioenv.process.channel import ScatterChannel, stream_socketpair
from aioenv.process.connection import FastReply, OutstandingRequests, PendingReply
from tests.speedups.parent_kit import GENERATION, in_python, ways

PIECE = 1 << 18  # of one read in C
SIZES = (10, 3 * PIECE, 0, 5, PIECE + 1)
WHOLE = HEADER_BYTES + sum(SIZES)
# How the bytes of a stream are divided: into a first chunk, and others of equal size.
CHUNKS = {
    "at once": (1 << 30, 1 << 30),
    "in pieces": (HEADER_BYTES + PIECE, PIECE),
    "in segments": (65483, 65483),
    "the header first": (HEADER_BYTES, 1 << 30),
    "half a header first": (9, 100_000),
    "all but a byte": (WHOLE - 1, 1 << 30),
    "a byte too many": (WHOLE + 1, 1 << 30),
}


class Conversation:
    """A channel, and requests for large replies: what has come of them."""

    def __init__(self, count: int) -> None:
        ours, self.theirs = stream_socketpair()
        self.theirs.setblocking(False)
        self.requests = OutstandingRequests(GENERATION)
        self.channel = ScatterChannel(ours, self.requests)
        self.arrays = [[np.zeros(size, np.uint8) for size in SIZES] for _ in range(count)]
        self.payloads: list[bytes] = []
        for request, arrays in enumerate(self.arrays):
            whole = SimpleNamespace(waiting=True, open=1, done=asyncio.get_running_loop().create_future())
            fast = FastReply(SimpleNamespace(arrived=False), whole, self._read, True)
            self.requests.add(request, PendingReply([array.data for array in arrays], self._on_reply, fast))
        self.receiving = asyncio.create_task(self.channel.receive(self._on_frame))

    def _read(self, payload: memoryview) -> None:
        self.payloads.append(bytes(payload))

    def _on_frame(self, frame: Frame) -> None:
        self.requests.pending.pop(frame.request)
        self._read(frame.payload)

    def _on_reply(self, reply: Any) -> None:
        raise AssertionError("no reply is passed on here")

    async def take(self, data: bytes, chunks: tuple[int, int]) -> None:
        """Read the stream as it comes in these chunks."""
        await asyncio.sleep(0)  # the task begins to receive
        size, later = chunks
        sent = 0
        while sent < len(data) and self.channel.poll_fd is not None:  # it is None once the stream is broken
            end, size = min(len(data), sent + size), later
            while sent < end and self.channel.poll_fd is not None:
                try:
                    sent += self.theirs.send(data[sent:end])
                except BlockingIOError:
                    self.channel.poll()
            self.channel.poll()

    async def end(self) -> None:
        """Read what is left, and the end of the stream.

        Raises:
            WireError: if the stream is broken.
        """
        self.theirs.shutdown(socket.SHUT_WR)
        await self.receiving

    def close(self) -> None:
        self.receiving.cancel()
        self.channel.close()
        self.theirs.close()


@pytest.fixture
def replies() -> Iterator[tuple[list[list[np.ndarray[Any, Any]]], bytes]]:
    rng, encoder = np.random.default_rng(0), Encoder()
    sent = [[rng.integers(0, 256, size, np.uint8) for size in SIZES] for _ in range(3)]
    frames = (
        encoder.encode(Kind.RESULT, request, GENERATION, [array.data for array in arrays], b"payload" * request)
        for request, arrays in enumerate(sent)
    )
    yield sent, b"".join(itertools.chain(*frames))


@ways
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.asyncio
async def test_they_arrive_however_they_are_divided(monkeypatch, replies, c, chunks):
    if not c:
        in_python(monkeypatch)
    sent, data = replies
    conversation = Conversation(len(sent))
    try:
        await conversation.take(data, chunks)
        await conversation.end()
        assert not conversation.requests.pending
        assert conversation.payloads == [b"", b"payload", b"payload" * 2]
        for arrays, expected in zip(conversation.arrays, sent, strict=True):
            assert all(np.array_equal(array, other) for array, other in zip(arrays, expected, strict=True))
    finally:
        conversation.close()


PLACES = [3, HEADER_BYTES, HEADER_BYTES + 11, HEADER_BYTES + PIECE, WHOLE - 1, WHOLE + 3, WHOLE + HEADER_BYTES + PIECE]


@ways
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.asyncio
async def test_a_flipped_bit_is_found_in_every_piece(monkeypatch, replies, c, chunks, place):
    if not c:
        in_python(monkeypatch)
    _, data = replies
    spoilt = bytearray(data)
    spoilt[place] ^= 1
    conversation = Conversation(3)
    try:
        await conversation.take(bytes(spoilt), chunks)
        with pytest.raises(WireError):
            await conversation.end()
        assert len(conversation.payloads) == (place >= WHOLE)
    finally:
        conversation.close()
