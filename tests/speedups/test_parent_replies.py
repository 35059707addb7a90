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
    floats_tail,
    in_python,
    outcomes,
    reply,
    seen,
    ways,
)

pytestmark = pytest.mark.usefixtures("no_bell")


@ways
@pytest.mark.asyncio
async def test_a_whole_reply_is_counted_and_the_last_one_resolves_the_step(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(2, 3) as world:
        first, second = world.peers
        exchange = world.send()
        first.socket.sendall(reply(first, exchange, fill=1))
        first.poll()
        assert exchange.open == 1 and not exchange.done.done()
        assert [part.arrived for part in exchange.parts] == [True, False]
        assert not first.requests.pending and list(second.requests.pending) == [0]
        second.socket.sendall(reply(second, exchange, fill=1))
        second.poll()
        assert exchange.open == 0 and exchange.done.result() is None
        assert all(part.arrived for part in exchange.parts)
        assert exchange.batch.terminated.all() and set(bytes(byte_view(exchange.batch.obs[0]))) == {1}
        assert given == [-1, -1] * c
        # and Python's decoder understands what comes next
        called: list[Any] = []
        request = first.submit(Kind.CALL, (), b"call", None, called.append)
        first.socket.sendall(reply(first, exchange, request=request, fixed=(), tail=b"answer"))
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
            exchange = world.send()
            data = reply(peer, exchange, tail=floats_tail(exchange.parts[0].member, [0.5]))
            if cut == len(data):
                break
            peer.socket.sendall(data[:cut])
            peer.drain()
            assert exchange.open == 1 and not exchange.parts[0].arrived
            peer.socket.sendall(data[cut:])
            peer.drain()
            assert exchange.done.done() and exchange.parts[0].arrived and not peer.requests.pending
            assert seen(exchange.parts[0].columns)[0][2] == [[0.5]]
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
        for exchange in made:
            exchange.reset(stepped=True, waiting=True)
            let_tell(exchange, told)
            world.dispatcher.submit_steps(exchange, [], [[]], [b""])
        called: list[Any] = []
        request = peer.submit(Kind.CALL, (), b"call", None, called.append) if behind == "an answer to a call" else None
        tails = [b"", b"one", b"x" * 900, b""]
        data = [reply(peer, e, fill=n % 2, tail=tails[n]) for n, e in enumerate(made)]
        if request is not None:
            data.append(reply(peer, made[0], request=request, fixed=(), tail=b"answer"))
        cut = len(data[-1]) // 2 if behind == "half a reply" else 0
        stream = b"".join(data)
        peer.socket.sendall(stream[: len(stream) - cut])
        peer.poll()
        assert [exchange.open for exchange in made] == [0, 0, 0, int(cut > 0)]
        peer.socket.sendall(stream[len(stream) - cut :])
        peer.drain()
        assert not any(exchange.open for exchange in made) and not peer.requests.pending
        assert told == [(1, b"one"), (2, b"x" * 900)]
        for number, exchange in enumerate(made):
            assert set(bytes(byte_view(exchange.batch.obs[0]))) == {number % 2}, "to each its own"
        assert [bytes(frame.payload) for frame in called] == [b"answer"] * (request is not None)
        assert given[:1] == [-1 if behind == "nothing" else -2] * c
        assert await peer.ending() == "it goes on"


def let_tell(exchange: BatchRequest, told: list[Any]) -> None:
    """Have an exchange of one part do no more with its reply than to count it, and to note the request and the tail."""
    part = exchange.parts[0]

    def read(tail: memoryview) -> None:
        told.append((part.request_id, bytes(tail)))

    def on_reply(frame: Any) -> None:
        if len(frame.payload):
            read(frame.payload)
        part.arrived = True
        exchange.open -= 1
        exchange.done.set_result(None)

    part.on_reply, part.fast_reply = on_reply, PendingReply(part.into[0], on_reply, (part, exchange, read, False))


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


TAILS: dict[str, Callable[[WorkerSlots], bytes]] = {
    "columns": lambda member: floats_tail(member, [1.5, -2.5]),
    "columns of a row": lambda member: floats_tail(member, [3.5], [1]),
    "columns of no known sort": lambda member: dump_columns([(77, None, b"12345678" * 2, [])]),
    "columns cut short": lambda member: floats_tail(member, [1.5, -2.5])[:-3],
    "a failure": lambda member: dump(StepReply([], [], [], [Failure(1, "LookupError", "lost", "tb", None)])),
    "no further episode": lambda member: dump(StepReply([], [], [], [], [0])),
    "no pickle": lambda member: b"nonsense",
    "as much as is read at once": lambda member: b"x" * SPILL_BYTES,
    "more than is read at once": lambda member: b"x" * (SPILL_BYTES + 1),
}


async def with_tail(name: str) -> Any:
    async with World(2, 2) as world:
        first, second = world.peers
        exchange = world.send()
        for peer, part in zip((first, second), exchange.parts, strict=True):
            peer.socket.sendall(reply(peer, exchange, fill=0, tail=TAILS[name](part.member)))
            peer.drain()
        return world.state(), [await peer.ending() for peer in world.peers]


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("name", TAILS)
async def test_the_tail_of_a_reply_is_read_as_python_reads_it(monkeypatch, name):
    given = outcomes(monkeypatch, "take_replies")
    in_c = await with_tail(name)
    assert (given == [-1, -1]) == (name != "more than is read at once")
    in_python(monkeypatch)
    state, endings = await with_tail(name)
    assert in_c == (state, endings) and endings == ["it goes on"] * 2
    assert all(exchange[:2] == (0, True) for exchange in state[1][:1]), "whatever the tail is: it is a reply"


@ways
@pytest.mark.asyncio
async def test_whoever_reads_a_tail_gets_memory_of_his_own(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    async with World(1) as world:
        (peer,) = world.peers
        tails: list[memoryview] = []
        for exchange in world.exchanges:
            into, on_reply, _ = exchange.parts[0].fast_reply
            exchange.parts[0].fast_reply = PendingReply(
                into, on_reply, (exchange.parts[0], exchange, tails.append, False)
            )
            exchange.parts[0].on_reply = lambda frame, part=exchange.parts[0]: (
                tails.append(frame.payload),
                setattr(part, "arrived", True),
            )
        for exchange, tail in ((world.send(), b"the first"), (world.send(), b"the second")):
            peer.socket.sendall(reply(peer, exchange, tail=tail))
            peer.poll()
            assert exchange.parts[0].arrived
        assert list(map(bytes, tails)) == [b"the first", b"the second"]
        assert all(type(tail) is memoryview and tail.format == "B" and tail.ndim == 1 for tail in tails)


# what a worker may say in place of a plain reply to the oldest of two requests: it, and whether that breaks the stream
REPLIES: dict[str, tuple[Callable[[Peer, BatchRequest], bytes], bool]] = {
    "a failure": (
        lambda peer, e: reply(
            peer, e, kind=Kind.FAILURE, fixed=(), tail=dump(Failure(0, "LookupError", "lost", "tb", None))
        ),
        False,
    ),
    "a failure that is as long": (
        lambda peer, e: reply(peer, e, kind=Kind.FAILURE, tail=dump(Failure(0, "LookupError", "lost", "tb", None))),
        True,
    ),
    "images": (lambda peer, e: reply(peer, e, kind=Kind.IMAGES, fixed=(), tail=b"images"), False),
    "images that are as long": (lambda peer, e: reply(peer, e, kind=Kind.IMAGES), True),
    "to nobody": (lambda peer, e: reply(peer, e, request=99, fixed=()), False),
    "to nobody, as long": (lambda peer, e: reply(peer, e, request=99), True),
    "of an earlier life": (lambda peer, e: reply(peer, e, generation=GENERATION - 1, fixed=()), False),
    "of an earlier life, as long": (lambda peer, e: reply(peer, e, generation=GENERATION - 1), True),
    "of a later life, as long": (lambda peer, e: reply(peer, e, generation=GENERATION + 1), True),
    "a byte too short": (lambda peer, e: reply(peer, e, fixed=[b"\1" * (2 * 22 - 1)]), True),
    "a byte too long": (lambda peer, e: reply(peer, e, fixed=[b"\1" * (2 * 22 + 1)]), True),
    "nothing": (lambda peer, e: reply(peer, e, fixed=()), False),
    "in other pieces": (lambda peer, e: reply(peer, e, fixed=[b"\1" * 2 * 22]), False),
    "a request": (lambda peer, e: reply(peer, e, kind=Kind.STEP), True),
    "ready": (lambda peer, e: reply(peer, e, kind=Kind.READY, fixed=(), tail=b"ready"), False),
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
            exchange = world.send()
            data = bytearray(reply(peer, exchange, fill=0, tail=b"tail"))
            data[byte] ^= 1 << bit
            peer.socket.sendall(before + data)
            peer.drain()
            assert not behind or first.open == 0
            assert exchange.open == 1 and not exchange.parts[0].arrived and list(peer.requests.pending) == [int(behind)]
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
    """Replies to up to six steps, each with what its bytes are and a tail; and the stream, which may be broken."""
    plan = draw(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([b"", b"", b"tail", b"x" * 700])), max_size=6))
    encoder, coded = Encoder(), []
    for request, (fill, tail) in enumerate(plan):
        fixed = [bytes([fill]) * size for size in (2 * 12, 2 * 8, 2, 2)]
        coded.append(b"".join(encoder.encode(Kind.RESULT, request, GENERATION, fixed, tail)))
    return plan, draw(mutated(coded)) if draw(st.booleans()) else b"".join(coded)


async def conversation(steps: int, data: bytes, pieces: list[int]) -> Any:
    """All that is seen of steps that are answered by a stream in pieces of these sizes."""
    async with World(2) as world:
        (peer,) = world.peers
        made = [world.make_request(1) for _ in range(steps)]
        tails: list[Any] = []
        for exchange in made:
            exchange.reset(stepped=True, waiting=True)
            for array in exchange.batch._arrays:
                array.fill(0)
            let_tell(exchange, tails)
            world.dispatcher.submit_steps(exchange, [], [[]], [b""])
        seen_so_far = []
        for size in itertools.cycle(pieces):
            if not data:
                break
            peer.socket.sendall(data[:size])
            data = data[size:]
            peer.drain()
            seen_so_far.append([exchange.open for exchange in made])
            if peer.channel.poll_fd is None:
                break
        if peer.channel.poll_fd is not None:
            peer.socket.shutdown(socket.SHUT_WR)
            peer.drain()
        arrived = [list(map(bytes, exchange.parts[0].into[0])) for exchange in made if exchange.parts[0].arrived]
        return seen_so_far, arrived, tails, list(peer.requests.pending), await peer.ending(), peer.channel.decoder.chain


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
        assert speedups.take_replies(peer.channel) is None, "nobody waits for anything"
        exchange = world.send()
        before = world.state()
        assert speedups.take_replies(peer.channel) == -1
        peer.poll()
        assert world.state() == before and await peer.ending() == "it goes on"
        peer.socket.sendall(reply(peer, exchange))
        assert speedups.take_replies(peer.channel) == -1 and exchange.done.done()


@ways
@pytest.mark.asyncio
@pytest.mark.parametrize("said", ["nothing", "a reply", "part of a header", "part of a reply"])
async def test_the_end_of_the_stream_is_noticed(monkeypatch, c, said):
    if not c:
        in_python(monkeypatch)
    async with World(1) as world:
        (peer,) = world.peers
        exchange = world.send()
        data = reply(peer, exchange)
        peer.socket.sendall({"nothing": b"", "a reply": data, "part of a header": data[:9]}.get(said, data[:30]))
        peer.socket.close()
        peer.drain()
        cut = "WireError: the stream ended inside a frame"
        assert await peer.ending() == (cut if said.startswith("part") else "it ended")
        assert exchange.done.done() == (said == "a reply") and bool(peer.requests.pending) == (said != "a reply")


@ways
@pytest.mark.asyncio
@pytest.mark.parametrize("before", ["cancelled", "resolved"])
async def test_a_step_that_nobody_awaits_any_more_is_counted_all_the_same(monkeypatch, c, before):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(1) as world:
        (peer,) = world.peers
        exchange = world.send()
        if before == "cancelled":
            exchange.done.cancel()
        else:
            exchange.done.set_result(None)
        peer.socket.sendall(reply(peer, exchange))
        peer.poll()
        assert exchange.open == 0 and exchange.parts[0].arrived and not peer.requests.pending
        assert exchange.done.cancelled() == (before == "cancelled") and await peer.ending() == "it goes on"
        assert given[:1] == [-1] * c


@ways
@pytest.mark.asyncio
async def test_a_reply_of_a_step_that_nobody_waits_for_is_offered(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_replies")
    async with World(1) as world:
        (peer,) = world.peers
        exchange = world.send()
        exchange.waiting = False
        peer.socket.sendall(reply(peer, exchange))
        peer.poll()
        assert world.offered == exchange.parts and exchange.open == 0 and exchange.parts[0].arrived
        assert given == [None] * c


@ways
@pytest.mark.asyncio
async def test_a_reply_that_can_t_be_handled_ends_the_stream_and_its_request_stays_open(monkeypatch, c):
    if not c:
        in_python(monkeypatch)

    def boom(tail: Any) -> None:
        peer.poll()  # which is of no use here, and does no harm
        raise LookupError("in the reader")

    async with World(1) as world:
        (peer,) = world.peers
        exchange = world.exchanges[0]
        part = exchange.parts[0]
        part.on_reply, part.fast_reply = boom, PendingReply(part.into[0], boom, (part, exchange, boom, False))
        world.send()
        peer.socket.sendall(reply(peer, exchange, tail=b"tail"))
        peer.poll()
        assert exchange.open == 1 and not exchange.done.done()
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
        exchange = world.exchanges[0]
        part = exchange.parts[0]
        into = [memoryview(bytearray(index % 3)) for index in range(number)]
        part.into = into, into
        part.fast_reply = part.fast_reply._replace(into=into)
        world.send()
        fixed = [bytes([index % 251]) * (index % 3) for index in range(number)]
        peer.socket.sendall(reply(peer, exchange, fixed=fixed))
        peer.drain()
        assert exchange.done.done() and list(map(bytes, into)) == fixed
        assert set(given) == ({-1 if number <= 126 else None} if c else set())


@compiled
@pytest.mark.asyncio
async def test_what_is_not_to_be_counted_is_left_to_python():
    async with World(1) as world:
        (peer,) = world.peers
        channel, exchange = peer.channel, world.send()
        (pending,) = peer.requests.pending.values()
        peer.socket.sendall(reply(peer, exchange))
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
            peer.requests.pending, exchange.waiting = {0: pending}, waiting
            assert speedups.take_replies(channel) is None
        exchange.waiting = True
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
        assert speedups.take_replies(channel) == -1 and exchange.done.done(), "nothing was read until here"
