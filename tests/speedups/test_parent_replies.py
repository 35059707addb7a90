"""Replies to plain steps are counted in C as Python takes them in."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioenv import speedups
from aioenv.core.requests import BatchRequest
from aioenv.core.worker_pool import WorkerSlots
from aioenv.errors import WireError
from aioenv.ipc.decoder import SPILL_BYTES
from aioenv.ipc.frames import Encoder, Kind
from aioenv.ipc.messages import Failure, StepReply, dump, dump_columns
from aioenv.process.connection import PendingReply
from aioenv.spaces.layout import byte_view
from tests.kits.wire_kit import mutated, sizes
from tests.speedups.parent_kit import (
    GENERATION,
    Peer,
    World,
    compiled,
    floats_payload,
    in_python,
    outcomes,
    reply,
    seen,
    ways,
)

pytestmark = pytest.mark.usefixtures("no_wakeup_coalescing")


@ways
@pytest.mark.asyncio
async def test_a_whole_reply_is_counted_and_the_last_one_resolves_the_step(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(2, 3) as world:
        first, second = world.peers
        batch_request = world.send()
        first.socket.sendall(reply(first, batch_request, fill=1))
        first.poll()
        assert batch_request.open == 1 and not batch_request.done.done()
        assert [part.arrived for part in batch_request.parts] == [True, False]
        assert not first.requests.pending and list(second.requests.pending) == [0]
        second.socket.sendall(reply(second, batch_request, fill=1))
        second.poll()
        assert batch_request.open == 0 and batch_request.done.result() is None
        assert all(part.arrived for part in batch_request.parts)
        assert batch_request.batch.terminated.all() and set(bytes(byte_view(batch_request.batch.obs[0]))) == {1}
        assert given == [-1, -1] * c
        # and Python's decoder understands what comes next
        called: list[Any] = []
        request = first.submit(Kind.CALL, (), b"call", None, called.append)
        first.socket.sendall(reply(first, batch_request, request=request, fixed=(), payload=b"answer"))
        first.poll()
        assert [bytes(frame.payload) for frame in called] == [b"answer"]
        again = world.send()
        first.socket.sendall(reply(first, again))
        first.poll()
        assert again.parts[0].arrived and first.channel.decoder.chain == first.encoder.chain
        assert given == [-1, -1, None, -1] * c


@ways
@pytest.mark.asyncio
async def test_a_reply_may_come_in_two_pieces_cut_anywhere(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    async with World(1) as world:
        (peer,) = world.peers
        whole = 0
        for cut in itertools.count(1):
            batch_request = world.send()
            data = reply(peer, batch_request, payload=floats_payload(batch_request.parts[0].member, [0.5]))
            if cut == len(data):
                break
            peer.socket.sendall(data[:cut])
            peer.drain()
            assert batch_request.open == 1 and not batch_request.parts[0].arrived
            peer.socket.sendall(data[cut:])
            peer.drain()
            assert batch_request.done.done() and batch_request.parts[0].arrived and not peer.requests.pending
            assert seen(batch_request.parts[0].columns)[0][2] == [[0.5]]
            whole += 1
        assert whole > 60


@ways
@pytest.mark.asyncio
async def test_two_replies_in_one_read_are_both_counted(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(2) as world:
        (peer,) = world.peers
        first, second = world.send(), world.send()
        data = reply(peer, first, fill=1) + reply(peer, second, fill=0)
        peer.socket.sendall(data)
        peer.poll()
        assert first.done.done() and second.done.done() and not peer.requests.pending
        assert first.batch.terminated.all() and not second.batch.terminated.any()
        assert given == [-1] * c
        # a third one and a half
        first, second = world.send(), world.send()
        one, half = reply(peer, first), reply(peer, second)
        peer.socket.sendall(one + half[:30])
        peer.poll()
        assert first.done.done() and not second.done.done()
        peer.socket.sendall(half[30:])
        peer.drain()
        assert second.done.done()
        assert given[1:] == [-2, None] * c


@ways
@pytest.mark.asyncio
@pytest.mark.parametrize("behind", ["nothing", "half a reply", "an answer to a call"])
async def test_as_many_replies_as_come_in_one_read_are_counted_in_order(monkeypatch, c, behind):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(2) as world:
        (peer,) = world.peers
        told: list[Any] = []
        made = [world.make_request(1) for _ in range(4)]
        for batch_request in made:
            batch_request.reset(stepped=True, waiting=True)
            let_tell(batch_request, told)
            world.dispatcher.submit_steps(batch_request, [], [[]], [b""])
        called: list[Any] = []
        request = peer.submit(Kind.CALL, (), b"call", None, called.append) if behind == "an answer to a call" else None
        payloads = [b"", b"one", b"x" * 900, b""]
        data = [reply(peer, e, fill=n % 2, payload=payloads[n]) for n, e in enumerate(made)]
        if request is not None:
            data.append(reply(peer, made[0], request=request, fixed=(), payload=b"answer"))
        cut = len(data[-1]) // 2 if behind == "half a reply" else 0
        stream = b"".join(data)
        peer.socket.sendall(stream[: len(stream) - cut])
        peer.poll()
        assert [batch_request.open for batch_request in made] == [0, 0, 0, int(cut > 0)]
        peer.socket.sendall(stream[len(stream) - cut :])
        peer.drain()
        assert not any(batch_request.open for batch_request in made) and not peer.requests.pending
        assert told == [(1, b"one"), (2, b"x" * 900)]
        for number, batch_request in enumerate(made):
            assert set(bytes(byte_view(batch_request.batch.obs[0]))) == {number % 2}, "to each its own"
        assert [bytes(frame.payload) for frame in called] == [b"answer"] * (request is not None)
        assert given[:1] == [-1 if behind == "nothing" else -2] * c
        assert await peer.ending() == "it goes on"


def let_tell(batch_request: BatchRequest, told: list[Any]) -> None:
    """Have a request to one worker count its reply, and note the id and the payload, and nothing else."""
    part = batch_request.parts[0]

    def read(payload: memoryview) -> None:
        told.append((part.request_id, bytes(payload)))

    def on_reply(frame: Any) -> None:
        if len(frame.payload):
            read(frame.payload)
        part.arrived = True
        batch_request.open -= 1
        batch_request.done.set_result(None)

    part.on_reply, part.fast_reply = on_reply, PendingReply(part.into[0], on_reply, (part, batch_request, read, False))


@ways
@pytest.mark.asyncio
async def test_the_reply_to_the_second_request_may_come_first(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    async with World(2) as world:
        (peer,) = world.peers
        first, second = world.send(), world.send()
        peer.socket.sendall(reply(peer, second, fill=1))
        peer.poll()
        assert second.done.done() and not first.done.done() and list(peer.requests.pending) == [0]
        assert second.batch.terminated.all()
        peer.socket.sendall(reply(peer, first, fill=0))
        peer.poll()
        assert first.done.done() and not first.batch.terminated.any() and second.batch.terminated.all()


PAYLOADS: dict[str, Callable[[WorkerSlots], bytes]] = {
    "columns": lambda member: floats_payload(member, [1.5, -2.5]),
    "columns of a row": lambda member: floats_payload(member, [3.5], [1]),
    "columns of no known sort": lambda member: dump_columns([(77, None, b"12345678" * 2, [])]),
    "columns cut short": lambda member: floats_payload(member, [1.5, -2.5])[:-3],
    "a failure": lambda member: dump(StepReply([], [], [], [Failure(1, "LookupError", "lost", "tb", None)])),
    "no further episode": lambda member: dump(StepReply([], [], [], [], [0])),
    "no pickle": lambda member: b"nonsense",
    "as much as is read at once": lambda member: b"x" * SPILL_BYTES,
    "more than is read at once": lambda member: b"x" * (SPILL_BYTES + 1),
}


async def with_tail(name: str) -> Any:
    async with World(2, 2) as world:
        first, second = world.peers
        batch_request = world.send()
        for peer, part in zip((first, second), batch_request.parts, strict=True):
            peer.socket.sendall(reply(peer, batch_request, fill=0, payload=PAYLOADS[name](part.member)))
            peer.drain()
        return world.state(), [await peer.ending() for peer in world.peers]


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("name", PAYLOADS)
async def test_the_payload_of_a_reply_is_read_as_python_reads_it(monkeypatch, name):
    given = outcomes(monkeypatch, "take_replies")
    in_c = await with_tail(name)
    assert (given == [-1, -1]) == (name != "more than is read at once")
    in_python(monkeypatch)
    state, endings = await with_tail(name)
    assert in_c == (state, endings) and endings == ["it goes on"] * 2
    assert all(batch_request[:2] == (0, True) for batch_request in state[1][:1]), "whatever the tail is: it is a reply"


@ways
@pytest.mark.asyncio
async def test_a_reader_of_a_payload_gets_memory_of_its_own(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    async with World(1) as world:
        (peer,) = world.peers
        payloads: list[memoryview] = []
        for batch_request in world.batch_requests:
            into, on_reply, _ = batch_request.parts[0].fast_reply
            batch_request.parts[0].fast_reply = PendingReply(
                into, on_reply, (batch_request.parts[0], batch_request, payloads.append, False)
            )
            batch_request.parts[0].on_reply = lambda frame, part=batch_request.parts[0]: (
                payloads.append(frame.payload),
                setattr(part, "arrived", True),
            )
        for batch_request, payload in ((world.send(), b"the first"), (world.send(), b"the second")):
            peer.socket.sendall(reply(peer, batch_request, payload=payload))
            peer.poll()
            assert batch_request.parts[0].arrived
        assert list(map(bytes, payloads)) == [b"the first", b"the second"]
        assert all(type(payload) is memoryview and payload.format == "B" and payload.ndim == 1 for payload in payloads)


# what a worker may say in place of a plain reply to the oldest of two requests: it, and whether that breaks the stream
REPLIES: dict[str, tuple[Callable[[Peer, BatchRequest], bytes], bool]] = {
    "a failure": (
        lambda peer, e: reply(
            peer, e, kind=Kind.FAILURE, fixed=(), payload=dump(Failure(0, "LookupError", "lost", "tb", None))
        ),
        False,
    ),
    "a failure that is as long": (
        lambda peer, e: reply(peer, e, kind=Kind.FAILURE, payload=dump(Failure(0, "LookupError", "lost", "tb", None))),
        True,
    ),
    "images": (lambda peer, e: reply(peer, e, kind=Kind.IMAGES, fixed=(), payload=b"images"), False),
    "images that are as long": (lambda peer, e: reply(peer, e, kind=Kind.IMAGES), True),
    "to no request": (lambda peer, e: reply(peer, e, request=99, fixed=()), False),
    "to no request, as long": (lambda peer, e: reply(peer, e, request=99), True),
    "of an earlier life": (lambda peer, e: reply(peer, e, generation=GENERATION - 1, fixed=()), False),
    "of an earlier life, as long": (lambda peer, e: reply(peer, e, generation=GENERATION - 1), True),
    "of a later life, as long": (lambda peer, e: reply(peer, e, generation=GENERATION + 1), True),
    "a byte too short": (lambda peer, e: reply(peer, e, fixed=[b"\1" * (2 * 22 - 1)]), True),
    "a byte too long": (lambda peer, e: reply(peer, e, fixed=[b"\1" * (2 * 22 + 1)]), True),
    "nothing": (lambda peer, e: reply(peer, e, fixed=()), False),
    "in other pieces": (lambda peer, e: reply(peer, e, fixed=[b"\1" * 2 * 22]), False),
    "a request": (lambda peer, e: reply(peer, e, kind=Kind.STEP), True),
    "ready": (lambda peer, e: reply(peer, e, kind=Kind.READY, fixed=(), payload=b"ready"), False),
    "nonsense": (lambda peer, e: b"Segmentation fault (core dumped)\n" * 9, True),
    "another version": (lambda peer, e: reply(peer, e)[:2] + b"\2" + reply(peer, e)[3:], True),
    "a frame before it is missing": (lambda peer, e: reply(peer, e) and reply(peer, e), True),
}


async def with_reply(name: str, behind: bool = False) -> Any:
    """What comes of a reply; with `behind` one that is plain comes in the same read, before it."""
    make, _ = REPLIES[name]
    async with World(2) as world:
        (peer,) = world.peers
        before_it = b""
        if behind:
            plain = world.make_request(1)
            plain.reset(stepped=True, waiting=True)
            world.dispatcher.submit_steps(plain, [], [[]], [b""])
            before_it = reply(peer, plain)
        first, second = world.send(), world.send()
        peer.socket.sendall(before_it + make(peer, first))
        peer.drain()
        before = world.state()
        ending = await peer.ending()
        # what is sound goes on
        peer.socket.sendall(reply(peer, second, fill=0))
        peer.drain()
        return before, ending, world.state(), await peer.ending()


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("name", REPLIES)
async def test_any_other_reply_is_python_s(monkeypatch, name):
    given = outcomes(monkeypatch, "take_replies")
    in_c = await with_reply(name)
    assert (given[0] == -1) == (name == "in other pieces")
    in_python(monkeypatch)
    assert in_c == await with_reply(name)
    _, ending, (_, (_, second), *_), _ = in_c
    breaks = REPLIES[name][1]
    assert ending.startswith("WireError: ") if breaks else ending == "it goes on"
    assert second[0] == (1 if breaks else 0), "the second reply counts unless the stream is broken"


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("name", REPLIES)
async def test_any_other_reply_behind_a_plain_one_is_python_s(monkeypatch, name):
    given = outcomes(monkeypatch, "take_replies")
    in_c = await with_reply(name, behind=True)
    assert given[0] == (-1 if name == "in other pieces" else -2)
    in_python(monkeypatch)
    assert in_c == await with_reply(name, behind=True)
    _, ending, (_, (_, second), *_), _ = in_c
    breaks = REPLIES[name][1]
    assert ending.startswith("WireError: ") if breaks else ending == "it goes on"
    assert second[0] == (1 if breaks else 0), "the second reply counts unless the stream is broken"


async def flipped(byte: int, behind: bool = False) -> list[Any]:
    """What comes of a reply with each bit of this byte flipped, one at a time; with `behind` behind a sound one."""
    found = []
    for bit in range(8):
        async with World(1) as world:
            (peer,) = world.peers
            before = b""
            if behind:
                first = world.send()
                before = reply(peer, first)
            batch_request = world.send()
            data = bytearray(reply(peer, batch_request, fill=0, payload=b"tail"))
            data[byte] ^= 1 << bit
            peer.socket.sendall(before + data)
            peer.drain()
            assert not behind or first.open == 0
            assert (
                batch_request.open == 1
                and not batch_request.parts[0].arrived
                and list(peer.requests.pending) == [int(behind)]
            )
            found.append((world.state(), await peer.ending()))
    return found


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("byte", range(28 + 22 + 4))
async def test_a_flipped_bit_breaks_the_stream_as_in_python(monkeypatch, byte):
    given = outcomes(monkeypatch, "take_replies")
    in_c = await flipped(byte)
    assert given == [28 + 22 + 4] * 8, "it is all there, and no reply"
    in_python(monkeypatch)
    assert in_c == await flipped(byte)
    assert all(ending.startswith("WireError: ") for _, ending in in_c)


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("byte", range(28 + 22 + 4))
async def test_a_flipped_bit_behind_a_sound_reply_breaks_the_stream_as_in_python(monkeypatch, byte):
    given = outcomes(monkeypatch, "take_replies")
    in_c = await flipped(byte, behind=True)
    assert given == [-2] * 8
    in_python(monkeypatch)
    assert in_c == await flipped(byte, behind=True)
    assert all(ending.startswith("WireError: ") for _, ending in in_c)


@st.composite
def spoiled(draw: Any) -> tuple[list[tuple[int, bytes]], bytes]:
    """Replies to up to six steps, each with what its bytes are and a payload; and the stream, which may be broken."""
    plan = draw(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([b"", b"", b"tail", b"x" * 700])), max_size=6))
    encoder, coded = Encoder(), []
    for request, (fill, payload) in enumerate(plan):
        fixed = [bytes([fill]) * size for size in (2 * 12, 2 * 8, 2, 2)]
        coded.append(b"".join(encoder.encode(Kind.RESULT, request, GENERATION, fixed, payload)))
    return plan, draw(mutated(coded)) if draw(st.booleans()) else b"".join(coded)


async def conversation(steps: int, data: bytes, pieces: list[int]) -> Any:
    """All that is seen of steps that are answered by a stream in pieces of these sizes."""
    async with World(2) as world:
        (peer,) = world.peers
        made = [world.make_request(1) for _ in range(steps)]
        payloads: list[Any] = []
        for batch_request in made:
            batch_request.reset(stepped=True, waiting=True)
            for array in batch_request.batch._arrays:
                array.fill(0)
            let_tell(batch_request, payloads)
            world.dispatcher.submit_steps(batch_request, [], [[]], [b""])
        seen_so_far = []
        for size in itertools.cycle(pieces):
            if not data:
                break
            peer.socket.sendall(data[:size])
            data = data[size:]
            peer.drain()
            seen_so_far.append([batch_request.open for batch_request in made])
            if peer.channel.poll_fd is None:
                break
        if peer.channel.poll_fd is not None:
            peer.socket.shutdown(socket.SHUT_WR)
            peer.drain()
        arrived = [
            list(map(bytes, batch_request.parts[0].into[0])) for batch_request in made if batch_request.parts[0].arrived
        ]
        return (
            seen_so_far,
            arrived,
            payloads,
            list(peer.requests.pending),
            await peer.ending(),
            peer.channel.decoder.chain,
        )


@compiled
@settings(max_examples=200, deadline=None)
@given(planned=spoiled(), pieces=sizes)
def test_whatever_comes_in_whatever_pieces_is_counted_as_in_python(planned, pieces):
    plan, data = planned
    in_c = asyncio.run(conversation(len(plan), data, pieces))
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_python(monkeypatch)
        assert asyncio.run(conversation(len(plan), data, pieces)) == in_c


@compiled
@pytest.mark.asyncio
async def test_where_there_is_nothing_to_read_nothing_is_done():
    async with World(1) as world:
        (peer,) = world.peers
        assert speedups.take_replies(peer.channel) is None, "no reply is due"
        batch_request = world.send()
        before = world.state()
        assert speedups.take_replies(peer.channel) == -1
        peer.poll()
        assert world.state() == before and await peer.ending() == "it goes on"
        peer.socket.sendall(reply(peer, batch_request))
        assert speedups.take_replies(peer.channel) == -1 and batch_request.done.done()


@ways
@pytest.mark.asyncio
@pytest.mark.parametrize("said", ["nothing", "a reply", "part of a header", "part of a reply"])
async def test_the_end_of_the_stream_is_noticed(monkeypatch, c, said):
    if not c:
        in_python(monkeypatch)
    async with World(1) as world:
        (peer,) = world.peers
        batch_request = world.send()
        data = reply(peer, batch_request)
        peer.socket.sendall({"nothing": b"", "a reply": data, "part of a header": data[:9]}.get(said, data[:30]))
        peer.socket.close()
        peer.drain()
        cut = "WireError: the stream ended inside a frame"
        assert await peer.ending() == (cut if said.startswith("part") else "it ended")
        assert batch_request.done.done() == (said == "a reply") and bool(peer.requests.pending) == (said != "a reply")


@ways
@pytest.mark.asyncio
@pytest.mark.parametrize("before", ["cancelled", "resolved"])
async def test_a_step_that_is_no_longer_awaited_is_counted(monkeypatch, c, before):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(1) as world:
        (peer,) = world.peers
        batch_request = world.send()
        if before == "cancelled":
            batch_request.done.cancel()
        else:
            batch_request.done.set_result(None)
        peer.socket.sendall(reply(peer, batch_request))
        peer.poll()
        assert batch_request.open == 0 and batch_request.parts[0].arrived and not peer.requests.pending
        assert batch_request.done.cancelled() == (before == "cancelled") and await peer.ending() == "it goes on"
        assert given[:1] == [-1] * c


@ways
@pytest.mark.asyncio
async def test_a_reply_to_a_step_without_a_waiter_is_offered(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(1) as world:
        (peer,) = world.peers
        batch_request = world.send()
        batch_request.waiting = False
        peer.socket.sendall(reply(peer, batch_request))
        peer.poll()
        assert world.offered == batch_request.parts and batch_request.open == 0 and batch_request.parts[0].arrived
        assert given == [None] * c


@ways
@pytest.mark.asyncio
async def test_a_reply_that_can_t_be_handled_ends_the_stream_and_its_request_stays_open(monkeypatch, c):
    if not c:
        in_python(monkeypatch)

    def boom(payload: Any) -> None:
        peer.poll()  # which is of no use here, and does no harm
        raise LookupError("in the reader")

    async with World(1) as world:
        (peer,) = world.peers
        batch_request = world.batch_requests[0]
        part = batch_request.parts[0]
        part.on_reply, part.fast_reply = boom, PendingReply(part.into[0], boom, (part, batch_request, boom, False))
        world.send()
        peer.socket.sendall(reply(peer, batch_request, payload=b"tail"))
        peer.poll()
        assert batch_request.open == 1 and not batch_request.done.done()
        assert list(peer.requests.pending) == [0], "it hears of the end that this brings"
        assert peer.channel.decoder.chain == peer.encoder.chain
        assert await peer.ending() == "LookupError: in the reader"


@ways
@pytest.mark.asyncio
@pytest.mark.parametrize("number", [120, 126, 127, 300])
async def test_a_reply_may_go_into_any_number_of_arrays(monkeypatch, c, number):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(1) as world:
        (peer,) = world.peers
        batch_request = world.batch_requests[0]
        part = batch_request.parts[0]
        into = [memoryview(bytearray(index % 3)) for index in range(number)]
        part.into = into, into
        part.fast_reply = part.fast_reply._replace(into=into)
        world.send()
        fixed = [bytes([index % 251]) * (index % 3) for index in range(number)]
        peer.socket.sendall(reply(peer, batch_request, fixed=fixed))
        peer.drain()
        assert batch_request.done.done() and list(map(bytes, into)) == fixed
        assert set(given) == ({-1 if number <= 126 else None} if c else set())


@compiled
@pytest.mark.asyncio
async def test_what_is_not_to_be_counted_is_left_to_python():
    async with World(1) as world:
        (peer,) = world.peers
        channel, batch_request = peer.channel, world.send()
        (pending,) = peer.requests.pending.values()
        peer.socket.sendall(reply(peer, batch_request))
        odd: list[Any] = [
            pending._replace(fast_path=None),
            pending._replace(into=None),
            pending._replace(into=tuple(pending.into)),
            pending._replace(fast_path=list(pending.fast_path)),
            pending._replace(fast_path=pending.fast_path[:2]),
            pending[:2],
            list(pending),
            None,
        ]
        for other in odd:
            peer.requests.pending = {0: other}
            assert speedups.take_replies(channel) is None
        for waiting in (False, None, 1):
            peer.requests.pending, batch_request.waiting = {0: pending}, waiting
            assert speedups.take_replies(channel) is None
        batch_request.waiting = True
        for generation in (-1, 1 << 32, None):
            peer.requests.generation = generation
            assert speedups.take_replies(channel) is None
        peer.requests.generation = GENERATION
        channel.decoder.error = WireError("broken before")
        assert speedups.take_replies(channel) is None
        channel.decoder.error = None
        channel.fd, fd = -1, channel.fd
        assert speedups.take_replies(channel) is None, "it is closed"
        channel.fd = fd
        assert speedups.take_replies(channel) == -1 and batch_request.done.done(), "nothing was read until here"
