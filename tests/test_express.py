"""A plain step's way through the parent, in C and in Python: the same bytes go out, and replies are counted alike."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import mutated, sizes

import aioenv
from aioenv import speedups
from aioenv.batching.gather import Gatherer
from aioenv.batching.layout import Layout, byte_view
from aioenv.batching.merge import SchemaTable
from aioenv.engine import dispatch
from aioenv.engine.batch import Exchange, Part
from aioenv.engine.dispatch import Dispatch
from aioenv.engine.fleet import Member
from aioenv.errors import SlotError, WireError
from aioenv.wire.decoder import SPILL_BYTES, Decoder
from aioenv.wire.frames import Encoder, Frame, Kind
from aioenv.wire.messages import Failure, StepReply, dump, dump_columns
from aioenv.workers import faults
from aioenv.workers.channel import ScatterChannel
from aioenv.workers.connection import Connection
from aioenv.workers.requests import Pending, Requests

compiled = pytest.mark.skipif(not speedups.compiled, reason=f"not compiled: {speedups.why_not}")
ways = pytest.mark.parametrize("c", [pytest.param(True, marks=compiled), False], ids=["c", "python"])

SPACE = spaces.Box(-9, 9, (3,), np.float32)
GENERATION = 3


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("send_express", "take_express", "read_frame", "write_frame"):
        monkeypatch.setattr(speedups, name, None)


@pytest.fixture(autouse=True)
def no_bell(monkeypatch):
    """The loop looks at all channels, however many CPUs there are."""
    monkeypatch.setattr(dispatch, "usable_cpus", lambda: 1)


class Peer:
    """A worker as the engine sees it: what its process would do at the other end of the socket, tests do."""

    submit, poll, _on_frame = Connection.submit, Connection.poll, Connection._on_frame

    def __init__(self, slots: tuple[int, ...]) -> None:
        ours, self.socket = socket.socketpair()
        self.requests = Requests(GENERATION)
        self.channel = self.express = ScatterChannel(ours, self.requests)
        self.images: list[Any] = []
        self.on_images = lambda frame: self.images.append((frame.request, bytes(frame.tail)))
        self.on_death: Any = None
        self.encoder, self.decoder = Encoder(), Decoder()
        self.skip = 0  # bytes that come before the first request
        self._identity = faults.Identity("peer", None, slots, "")
        self.receiving = asyncio.create_task(self.channel.receive(self._on_frame))

    def failure(self, failure: Failure) -> SlotError:
        return faults.env_error(self._identity, failure)

    def failure_here(self, message: str, slots: Sequence[int]) -> SlotError:
        return faults.env_error_here(self._identity, message, slots)

    def readable(self) -> bool:
        poll = select.poll()
        poll.register(self.channel.fd, select.POLLIN)
        return bool(poll.poll(0))

    def drain(self) -> None:
        """Have the channel take all that is there."""
        while self.channel.waitable is not None and self.readable():
            self.poll()

    def got(self) -> list[Frame]:
        """The requests that have come."""
        frames: list[Frame] = []
        with contextlib.suppress(OSError):  # there is no more, or it is closed
            self.socket.setblocking(False)
            while data := self.socket.recv(1 << 20):
                skipped = min(self.skip, len(data))
                self.skip -= skipped
                self.decoder.feed(data[skipped:])
        while (frame := self.decoder.next_frame()) is not None:
            frames.append(frame)
        return frames

    async def ending(self) -> str:
        """How the stream has ended."""
        for _ in range(3):
            await asyncio.sleep(0)
        if not self.receiving.done():
            return "it goes on"
        exc = self.receiving.exception()
        return "it ended" if exc is None else f"{type(exc).__name__}: {exc}"


class World:
    """Workers with so many slots each, what sends to them, and exchanges with all of them."""

    def __init__(self, *counts: int) -> None:
        self.offered: list[Part] = []
        stops = list(itertools.accumulate(counts))
        rows = [tuple(range(stop - count, stop)) for stop, count in zip(stops, counts, strict=True)]
        self.peers = [Peer(slots) for slots in rows]
        members: Any = [
            Member(peer, slots[0], slots[-1] + 1, SchemaTable({}))  # type: ignore[arg-type]
            for peer, slots in zip(self.peers, rows, strict=True)
        ]
        fleet: Any = SimpleNamespace(
            members=members,
            lanes=(),
            episodes=None,
            stats=(),
            observations=Layout(SPACE),
            checkpoint_size=0,
            instead={},
        )
        self.over: list[int] = []
        table: Any = SimpleNamespace(exhaust=self.over.extend)
        self.dispatch = Dispatch(
            fleet,
            None,
            table,
            state_size=0,
            mode=AutoresetMode.NEXT_STEP,
            restart=None,
            painter=None,
            offer=lambda _, part: self.offered.append(part),
        )
        self.exchanges = [self.dispatch.whole(lane) for lane in (1, 2)]
        self.turn = 0
        for exchange in self.exchanges:
            exchange.begin(stepped=True, waiting=True)
            for array in (*exchange.batch.obs, exchange.batch.reward):
                array.fill(-7)
            exchange.batch.clear(0, sum(counts))

    async def __aenter__(self) -> World:
        await asyncio.sleep(0)  # channels are listened to from here on
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for peer in self.peers:
            peer.receiving.cancel()
        await asyncio.gather(*(peer.receiving for peer in self.peers), return_exceptions=True)
        for peer in self.peers:
            peer.channel.close()
            peer.socket.close()

    def send(self, actions: Sequence[np.ndarray[Any, Any]] = ()) -> Exchange:
        """Step all slots; gives one exchange, then the other."""
        exchange = self.exchanges[self.turn]
        self.turn = 1 - self.turn
        exchange.begin(stepped=True, waiting=True)
        self.dispatch.submit_steps(exchange, *split(exchange, actions))
        return exchange

    def state(self) -> Any:
        """All that replies and requests change, but for how the stream ended."""
        peers = [
            (
                peer.channel.encoder.chain,
                peer.channel.decoder.chain,
                peer.channel.decoder.idle,
                str(peer.channel.decoder.error),
                list(peer.requests.pending),
                peer.requests.next,
                peer.requests.abandoned,
                peer.images,
            )
            for peer in self.peers
        ]
        exchanges = [
            (
                exchange.open,
                exchange.done.done(),
                list(map(bytes, map(byte_view, exchange.batch._arrays))),
                [
                    (part.arrived, part.request, told(part.errors), seen(part.columns), part.over)
                    for part in exchange.parts
                ],
            )
            for exchange in self.exchanges
        ]
        return peers, exchanges, len(self.offered), self.over


def split(
    exchange: Exchange, actions: Sequence[np.ndarray[Any, Any]]
) -> tuple[list[memoryview], list[list[slice]], list[bytes]]:
    """Actions as `Dispatch` hands them on."""
    bytes_each = [array.nbytes // len(array) for array in actions]
    cuts = [[slice(part.start * size, part.stop * size) for size in bytes_each] for part in exchange.parts]
    return list(map(byte_view, actions)), cuts, [b""] * len(cuts)


def told(errors: Sequence[BaseException]) -> list[str]:
    return [f"{type(error).__name__}: {error}" for error in errors]


def seen(columns: Sequence[Any]) -> list[Any]:
    return [(str(c.positions), c.schema, np.asarray(c.values).tolist()) for c in columns]


def reply(
    peer: Peer,
    exchange: Exchange,
    *,
    kind: Kind = Kind.RESULT,
    request: int | None = None,
    generation: int = GENERATION,
    fixed: Sequence[bytes] | None = None,
    tail: bytes = b"",
    fill: int = 1,
) -> bytes:
    """The bytes of a reply; flags are 1, since bools are."""
    part = next(part for part in exchange.parts if part.member.worker is peer)
    if fixed is None:
        fixed = [bytes([fill]) * len(view) for view in part.into[0]]
    if request is None:
        request = part.request
    assert request is not None
    return b"".join(peer.encoder.encode(kind, request, generation, fixed, tail))


def outcomes(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What a function in C gives from now on."""
    given: list[Any] = []
    inner = getattr(speedups, name)

    def noted(*args: Any) -> Any:
        given.append(inner(*args))
        return given[-1]

    if inner is not None:
        monkeypatch.setattr(speedups, name, noted)
    return given


def floats_tail(member: Member, values: Sequence[float], rows: Sequence[int] | None = None) -> bytes:
    """A tail of columns of a sort that the parent knows: {"x": float}."""
    gatherer = Gatherer()
    count = len(values)
    groups = gatherer.gather(
        [(row, {"x": x}) for row, x in zip(rows or range(count), values, strict=True)], range(count)
    )
    member.schemas.learn(gatherer.take_news())
    return dump_columns(groups)


# ------------------------------------------------------------ replies


@ways
@pytest.mark.asyncio
async def test_a_whole_reply_is_counted_and_the_last_one_resolves_the_step(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "take_express")
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
        assert [bytes(frame.tail) for frame in called] == [b"answer"]
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
    given = outcomes(monkeypatch, "take_express")
    async with World(2) as world:
        (peer,) = world.peers
        first, second = world.send(), world.send()
        data = reply(peer, first, fill=1) + reply(peer, second, fill=0)
        peer.socket.sendall(data)
        peer.poll()
        assert first.done.done() and second.done.done() and not peer.requests.pending
        assert first.batch.terminated.all() and not second.batch.terminated.any()
        assert given == [len(data)] * c
        # a third one and a half
        first, second = world.send(), world.send()
        one, half = reply(peer, first), reply(peer, second)
        peer.socket.sendall(one + half[:30])
        peer.poll()
        assert first.done.done() and not second.done.done()
        peer.socket.sendall(half[30:])
        peer.drain()
        assert second.done.done()
        assert given[1:] == [len(one) + 30, None] * c


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


TAILS: dict[str, Callable[[Member], bytes]] = {
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
    given = outcomes(monkeypatch, "take_express")
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
            into, on_reply, _ = exchange.parts[0].express
            exchange.parts[0].express = Pending(into, on_reply, (exchange.parts[0], exchange, tails.append))
            exchange.parts[0].on_reply = lambda frame, part=exchange.parts[0]: (
                tails.append(frame.tail),
                setattr(part, "arrived", True),
            )
        for exchange, tail in ((world.send(), b"the first"), (world.send(), b"the second")):
            peer.socket.sendall(reply(peer, exchange, tail=tail))
            peer.poll()
            assert exchange.parts[0].arrived
        assert list(map(bytes, tails)) == [b"the first", b"the second"]
        assert all(type(tail) is memoryview and tail.format == "B" and tail.ndim == 1 for tail in tails)


# what a worker may say in place of a plain reply to the oldest of two requests: it, and whether that breaks the stream
REPLIES: dict[str, tuple[Callable[[Peer, Exchange], bytes], bool]] = {
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


async def with_reply(name: str) -> Any:
    make, _ = REPLIES[name]
    async with World(2) as world:
        (peer,) = world.peers
        first, second = world.send(), world.send()
        peer.socket.sendall(make(peer, first))
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
    given = outcomes(monkeypatch, "take_express")
    in_c = await with_reply(name)
    assert (given[0] == -1) == (name == "in other pieces")
    in_python(monkeypatch)
    assert in_c == await with_reply(name)
    _, ending, (_, (_, second), *_), _ = in_c
    breaks = REPLIES[name][1]
    assert ending.startswith("WireError: ") if breaks else ending == "it goes on"
    assert second[0] == (1 if breaks else 0), "the second reply counts unless the stream is broken"


async def flipped(byte: int) -> list[Any]:
    """What comes of a reply with each bit of this byte flipped, one at a time."""
    found = []
    for bit in range(8):
        async with World(1) as world:
            (peer,) = world.peers
            exchange = world.send()
            data = bytearray(reply(peer, exchange, fill=0, tail=b"tail"))
            data[byte] ^= 1 << bit
            peer.socket.sendall(data)
            peer.drain()
            assert exchange.open == 1 and not exchange.parts[0].arrived and list(peer.requests.pending) == [0]
            found.append((world.state(), await peer.ending()))
    return found


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("byte", range(28 + 22 + 4))
async def test_a_flipped_bit_breaks_the_stream_as_in_python(monkeypatch, byte):
    given = outcomes(monkeypatch, "take_express")
    in_c = await flipped(byte)
    assert given == [28 + 22 + 4] * 8, "it is all there, and no reply"
    in_python(monkeypatch)
    assert in_c == await flipped(byte)
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
        made = [world.dispatch.whole(1) for _ in range(steps)]
        tails: list[Any] = []
        for exchange in made:
            exchange.begin(stepped=True, waiting=True)
            part = exchange.parts[0]
            for array in exchange.batch._arrays:
                array.fill(0)

            def on_reply(frame: Any, exchange: Exchange = exchange, part: Part = part) -> None:
                if len(frame.tail):
                    tails.append((part.request, bytes(frame.tail)))
                part.arrived = True
                exchange.open -= 1
                exchange.done.set_result(None)

            def read(tail: memoryview, part: Part = part) -> None:
                tails.append((part.request, bytes(tail)))

            part.on_reply, part.express = on_reply, Pending(part.into[0], on_reply, (part, exchange, read))
            world.dispatch.submit_steps(exchange, [], [[]])
        seen_so_far = []
        for size in itertools.cycle(pieces):
            if not data:
                break
            peer.socket.sendall(data[:size])
            data = data[size:]
            peer.drain()
            seen_so_far.append([exchange.open for exchange in made])
            if peer.channel.waitable is None:
                break
        if peer.channel.waitable is not None:
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
        assert speedups.take_express(peer.channel) is None, "nobody waits for anything"
        exchange = world.send()
        before = world.state()
        assert speedups.take_express(peer.channel) == -1
        peer.poll()
        assert world.state() == before and await peer.ending() == "it goes on"
        peer.socket.sendall(reply(peer, exchange))
        assert speedups.take_express(peer.channel) == -1 and exchange.done.done()


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
    given = outcomes(monkeypatch, "take_express")
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
    given = outcomes(monkeypatch, "take_express")
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
        part.on_reply, part.express = boom, Pending(part.into[0], boom, (part, exchange, boom))
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
    given = outcomes(monkeypatch, "take_express")
    async with World(1) as world:
        (peer,) = world.peers
        exchange = world.exchanges[0]
        part = exchange.parts[0]
        into = [memoryview(bytearray(index % 3)) for index in range(number)]
        part.into = into, into
        part.express = part.express._replace(into=into)
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
            pending._replace(counted=None),
            pending._replace(into=None),
            pending._replace(into=tuple(pending.into)),
            pending._replace(counted=list(pending.counted)),
            pending._replace(counted=pending.counted[:2]),
            pending[:2],
            list(pending),
            None,
        ]
        for other in odd:
            peer.requests.pending = {0: other}
            assert speedups.take_express(channel) is None
        for waiting in (False, None, 1):
            peer.requests.pending, exchange.waiting = {0: pending}, waiting
            assert speedups.take_express(channel) is None
        exchange.waiting = True
        for generation in (-1, 1 << 32, None):
            peer.requests.generation = generation
            assert speedups.take_express(channel) is None
        peer.requests.generation = GENERATION
        channel.decoder.error = WireError("broken before")
        assert speedups.take_express(channel) is None
        channel.decoder.error = None
        channel.fd, fd = -1, channel.fd
        assert speedups.take_express(channel) is None, "it is closed"
        channel.fd = fd
        assert speedups.take_express(channel) == -1 and exchange.done.done(), "nothing was read until here"


# ------------------------------------------------------------ requests


def encoded(steps: Sequence[Sequence[np.ndarray[Any, Any]]], part: Part, first: int = 0) -> bytes:
    """What a worker gets of some steps."""
    encoder = Encoder()
    frames = [
        encoder.encode(
            Kind.STEP, (first + number) & 0xFFFFFFFF, GENERATION, [a[part.start : part.stop].tobytes() for a in arrays]
        )
        for number, arrays in enumerate(steps)
    ]
    return b"".join(itertools.chain.from_iterable(frames))


SHAPES: dict[str, list[tuple[tuple[int, ...], str]]] = {
    "one number": [((), "int64")],
    "a box": [((6,), "float32")],
    "several": [((), "int8"), ((2, 3), "float64"), ((5,), "uint16"), ((1,), "bool")],
    "of no bytes": [((0,), "float32"), ((), "int64"), ((3, 0), "float32")],
    "none": [],
    "large": [((2000,), "float64")],
}


def some_actions(rng: np.random.Generator, rows: int, name: str) -> list[np.ndarray[Any, Any]]:
    drawn = [(rng.integers(0, 2, (rows, *shape), np.uint8), dtype) for shape, dtype in SHAPES[name]]
    return [bits.astype(dtype) if dtype == "bool" else (bits * rng.normal()).astype(dtype) for bits, dtype in drawn]


@ways
@pytest.mark.asyncio
@pytest.mark.parametrize("name", SHAPES)
async def test_requests_are_on_the_wire_as_the_encoder_makes_them(monkeypatch, c, name):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "send_express")
    rng = np.random.default_rng(0)
    async with World(2, 1, 3) as world:
        steps = [some_actions(rng, 6, name) for _ in range(4)]
        for arrays in steps:
            world.send(arrays)
        for peer, part in zip(world.peers, world.exchanges[1].parts, strict=True):
            assert peer.socket.recv(1 << 20) == encoded(steps, part)
            assert list(peer.requests.pending) == [0, 1, 2, 3] and peer.requests.next == 4 and part.request == 3
            assert [pending[0] for pending in peer.requests.pending.values()] == [
                exchange.parts[world.peers.index(peer)].into[0] for exchange in world.exchanges * 2
            ]
            assert not peer.channel.unsent
        assert given == [3] * 4 * c


# what keeps C from writing to a worker


def fill_up(peer: Peer, parts: list[Part]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            peer.skip += peer.channel._sock.send(b"x")


def leave_something_unsent(peer: Peer, parts: list[Part]) -> None:
    peer.submit(Kind.CALL, (), bytes(1 << 20), None, lambda outcome: None)
    assert peer.channel.unsent


def abandon(peer: Peer, parts: list[Part]) -> None:
    peer.requests.abandoned = True


def close(peer: Peer, parts: list[Part]) -> None:
    peer.channel.close()


def be_gone(peer: Peer, parts: list[Part]) -> None:
    peer.socket.close()


def be_traced(peer: Peer, parts: list[Part]) -> None:
    peer.express = None  # type: ignore[assignment]


def have_more_to_do(peer: Peer, parts: list[Part]) -> None:
    for part in parts:
        part.express = None


def have_a_number_too_large(peer: Peer, parts: list[Part]) -> None:
    peer.requests.next = 1 << 32  # after which 1 comes


def have_lived_too_often(peer: Peer, parts: list[Part]) -> None:
    peer.requests.generation = 1 << 32


# what C sends of two steps, and how many requests the worker gets
STOPS: dict[Any, tuple[list[int], int]] = {
    fill_up: ([1, 1], 2),
    leave_something_unsent: ([1, 1], 3),
    abandon: ([1, 3], 2),  # which it is no more once something is sent
    close: ([1, 1], 0),
    be_gone: ([1, 1], 0),
    be_traced: ([1, 1], 2),
    have_more_to_do: ([1, 1], 2),
    have_a_number_too_large: ([1, 3], 1),
    have_lived_too_often: ([1, 1], 0),
}


async def stopped_by(stop: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What comes of two steps of three workers, the second of which can't be written to just like that."""
    async with World(1, 2, 1) as world:
        victim = world.peers[1]
        stop(victim, [exchange.parts[1] for exchange in world.exchanges])
        began = victim.requests.next
        with monkeypatch.context() as patch:
            if (send := speedups.send_express) is not None:

                def checked(parts: list[Part], *args: Any) -> int:
                    sent = send(parts, *args)
                    if sent == 1 and parts is world.exchanges[0].parts:
                        assert [peer.requests.next for peer in world.peers] == [1, began, 0]
                        assert [part.request for part in parts] == [0, None, None], "the others were not touched"
                    return sent

                patch.setattr(speedups, "send_express", checked)
            for number in range(2):
                world.send([np.arange(4) + number])
        frames: list[Any] = [[] for _ in world.peers]
        for _ in range(20):
            await asyncio.sleep(0)  # what is unsent goes out
            for peer, so_far in zip(world.peers, frames, strict=True):
                so_far += [(f.kind, f.request, b"".join(f.fixed), len(f.tail)) for f in peer.got()]
        assert not any(peer.channel.unsent for peer in world.peers)
        return frames, world.state(), [await peer.ending() for peer in world.peers]


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.__name__)
async def test_c_stops_at_a_worker_that_it_can_t_write_to_just_like_that(monkeypatch, stop):
    given = outcomes(monkeypatch, "send_express")
    in_c = await stopped_by(stop, monkeypatch)
    monkeypatch.setattr(speedups, "send_express", None)
    assert in_c == await stopped_by(stop, monkeypatch)
    frames, _, endings = in_c
    assert (given, len(frames[1])) == STOPS[stop]
    assert len(frames[0]) == len(frames[2]) == 2, "the others get theirs"
    assert endings == ["it goes on", "it ended" if stop is be_gone else "it goes on", "it goes on"]


@ways
@pytest.mark.asyncio
async def test_what_the_kernel_takes_in_part_arrives_whole(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "send_express")
    rng = np.random.default_rng(1)
    async with World(2, 1) as world:
        steps = [[np.frombuffer(rng.bytes(3 * size), np.uint8).reshape(3, size)] for size in (1 << 20, 1, 100)]
        world.send(steps[0])
        assert all(peer.channel.unsent for peer in world.peers)
        assert [part.request for part in world.exchanges[0].parts] == [0, 0]
        world.send(steps[1])  # behind it
        loop = asyncio.get_running_loop()
        for peer, part in zip(world.peers, world.exchanges[0].parts, strict=True):
            expected = encoded(steps[:2], part)
            peer.socket.setblocking(False)
            data = b""
            while len(data) < len(expected):
                data += await loop.sock_recv(peer.socket, 1 << 20)
            assert data == expected and not peer.channel.unsent
        world.send(steps[2])
        for peer, part in zip(world.peers, world.exchanges[0].parts, strict=True):
            assert peer.socket.recv(1000) == encoded(steps, part)[len(encoded(steps[:2], part)) :]
        assert given == [2, 0, 2] * c


@ways
@pytest.mark.asyncio
async def test_after_the_last_number_of_a_request_comes_the_first(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "send_express"), outcomes(monkeypatch, "take_express")
    async with World(2) as world:
        (peer,) = world.peers
        peer.requests.next = (1 << 32) - 1
        for request, following in (((1 << 32) - 1, 0), (0, 1)):
            exchange = world.send()
            assert exchange.parts[0].request == request and peer.requests.next == following
            assert [frame.request for frame in peer.got()] == [request] == list(peer.requests.pending)
            peer.socket.sendall(reply(peer, exchange))
            peer.poll()
            assert exchange.done.done() and not peer.requests.pending
        assert given == ([1, 1] * c, [-1, -1] * c)


# ------------------------------------------------------------ arguments of any sort


class Fake(SimpleNamespace):
    """Has what a test says, and can be told apart from nothing else."""


def a_part(**other: Any) -> Fake:
    """A part to which a request without arrays can be written, but for some attributes of its channel or its own."""
    encoder, requests = Fake(chain=0), Fake(abandoned=False, generation=0, next=0, pending={})
    channel = Fake(fd=other.pop("fd", 1 << 30), unsent=[], encoder=encoder, requests=requests)
    for holder in (channel, encoder, requests):
        for name in list(other):
            if hasattr(holder, name):
                setattr(holder, name, other.pop(name))
    return Fake(**{"express": "pending", "member": Fake(worker=Fake(express=channel)), "request": None, **other})


VIEW = memoryview(bytes(8))
# arguments of `send_express`, and what comes of them: an exception, or how many are sent
SENDS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "none": ((), TypeError),
    "two": (([], []), TypeError),
    "three": (([], [], []), TypeError),
    "tuples": (((), (), (), ()), TypeError),
    "None": ((None, None, None, None), TypeError),
    "too few cuts": (([a_part()], [], [], [b""]), TypeError),
    "too few tails": (([a_part()], [], [[]], []), TypeError),
    "a tail that is none": (([a_part()], [], [[]], [7]), TypeError),
    "a cut too few": (([a_part()], [VIEW], [[]], [b""]), TypeError),
    "a cut too many": (([a_part()], [], [[slice(1)]], [b""]), TypeError),
    "cuts that are no list": (([a_part()], [], [()], [b""]), TypeError),
    "too many views": (([a_part()], [VIEW] * 128, [[slice(1)] * 128], [b""]), TypeError),
    "nothing to do": (([], [], [], []), 0),
    "a part that is none": (([None], [], [[]], [b""]), AttributeError),
    "no member": (([Fake(express=1)], [], [[]], [b""]), AttributeError),
    "no worker": (([Fake(express=1, member=Fake())], [], [[]], [b""]), AttributeError),
    "a channel that is none": (
        ([Fake(express=1, member=Fake(worker=Fake(express=1)))], [], [[]], [b""]),
        AttributeError,
    ),
    "a descriptor that is none": (([a_part(fd="1")], [], [[]], [b""]), TypeError),
    "a closed descriptor": (([a_part(fd=-1)], [], [[]], [b""]), 0),
    "a descriptor of nothing": (([a_part()], [], [[]], [b""]), 0),
    "unsent is no list": (([a_part(unsent=())], [], [[]], [b""]), 0),
    "abandoned is no bool": (([a_part(abandoned=0)], [], [[]], [b""]), 0),
    "a chain that is no number": (([a_part(chain="")], [], [[]], [b""]), 0),
    "a chain that is negative": (([a_part(chain=-1)], [], [[]], [b""]), 0),
    "a number that is none": (([a_part(next=1.0)], [], [[]], [b""]), 0),
    "a huge number": (([a_part(next=1 << 99)], [], [[]], [b""]), 0),
    "pending is no dict": (([a_part(pending=[])], [], [[]], [b""]), 0),
    "a view that is none": (([a_part()], [7], [[slice(1)]], [b""]), TypeError),
    "a cut that is none": (([a_part()], [VIEW], [["x"]], [b""]), TypeError),
    "a cut that is no slice": (([a_part()], [VIEW], [[3]], [b""]), TypeError),
    "a text to cut": (([a_part()], ["text"], [[slice(2)]], [b""]), TypeError),
    "a cut with steps": (([a_part()], [VIEW], [[slice(None, None, 2)]], [b""]), BufferError),
    "a view that is released": (([a_part()], [memoryview(b"")], [[slice(1)]], [b""]), 0),
}


@compiled
@pytest.mark.parametrize("name", SENDS)
def test_send_express_takes_no_harm_from_odd_arguments(name):
    arguments, expected = SENDS[name]
    assert speedups.send_express
    if isinstance(expected, int):
        assert speedups.send_express(*arguments) == expected
        return
    with pytest.raises(expected):
        speedups.send_express(*arguments)


def a_channel(**other: Any) -> Fake:
    """A channel of which nothing can be read, with one request to count, but for some attributes."""
    head = memoryview(bytearray(28))
    decoder = Fake(error=None, _header=None, _wanted=[head], frames=[], _head=head, _spill=memoryview(bytearray(9)))
    decoder.chain = 0
    whole = Fake(waiting=True, open=1, done=Fake(done=lambda: True))
    requests = Fake(generation=0, pending={0: ([], print, (Fake(), whole, print))})
    channel = Fake(fd=1 << 30, decoder=decoder, requests=requests)
    for holder in (channel, decoder, requests, whole):
        for name in list(other):
            if hasattr(holder, name):
                value = other.pop(name)
                if value is Fake:
                    delattr(holder, name)
                else:
                    setattr(holder, name, value)
    assert not other
    return channel


HEAD = memoryview(bytearray(28))
# channels, by what is odd about them, and what comes of it
CHANNELS: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, None),
    "a descriptor that is none": ({"fd": "1"}, TypeError),
    "a closed descriptor": ({"fd": -1}, None),
    "a decoder that is none": ({"decoder": 1}, AttributeError),
    "nothing wanted": ({"_wanted": []}, None),
    "wanted is no list": ({"_wanted": ()}, None),
    "wanted is another": ({"_wanted": [HEAD]}, None),
    "frames is none": ({"frames": None}, TypeError),
    "there are frames": ({"frames": [1]}, None),
    "a chain that is no number": ({"chain": ""}, None),
    "a chain that is too large": ({"chain": 1 << 32}, None),
    "a spill that is none": ({"_spill": 7}, TypeError),
    "a spill that can't be written": ({"_spill": b"bytes"}, BufferError),
    "a head that is short": ({"_head": HEAD[:9], "_wanted": [HEAD]}, None),
    "a generation that is none": ({"generation": ""}, None),
    "pending is no dict": ({"pending": []}, None),
    "nothing pending": ({"pending": {}}, None),
    "pending for a number": ({"pending": {0: 7}}, None),
    "pending for nobody": ({"pending": {0: ([], print, None)}}, None),
    "counted is short": ({"pending": {0: ([], print, (1,))}}, None),
    "into is none": ({"pending": {0: (None, print, (1, 2, 3))}}, None),
    "a whole that is none": ({"pending": {0: ([], print, (1, 2, 3))}}, AttributeError),
    "into numbers": ({"pending": {0: ([7], print, (1, Fake(waiting=True), 3))}}, TypeError),
    "into bytes": ({"pending": {0: ([b"1"], print, (1, Fake(waiting=True), 3))}}, BufferError),
}


@compiled
@pytest.mark.parametrize("name", CHANNELS)
def test_take_express_takes_no_harm_from_odd_channels(name):
    odd, expected = CHANNELS[name]
    assert speedups.take_express
    channel = a_channel(**odd)
    if expected is None:
        assert speedups.take_express(channel) is None
        return
    with pytest.raises(expected):
        speedups.take_express(channel)


@compiled
def test_take_express_takes_one_argument():
    assert speedups.take_express
    for arguments in ((), (None, None)):
        with pytest.raises(TypeError):
            speedups.take_express(*arguments)


# parts and wholes of a reply that is there and in order, and what comes of that
COUNTS: dict[str, tuple[Any, Any, Any]] = {
    "a part that takes nothing": (object(), Fake(waiting=True, open=1, done=None), AttributeError),
    "a whole that takes nothing": (
        Fake(),
        type("Whole", (), {"__slots__": (), "waiting": True, "open": 2})(),
        AttributeError,
    ),
    "open is no number": (Fake(), Fake(waiting=True, open="1"), TypeError),
    "open is huge": (Fake(), Fake(waiting=True, open=1 << 99), OverflowError),
    "nothing to resolve": (Fake(), Fake(waiting=True, open=1), AttributeError),
    "what is to be resolved is no future": (Fake(), Fake(waiting=True, open=1, done=7), AttributeError),
    "a future that can't say": (Fake(), Fake(waiting=True, open=1, done=Fake(done=lambda: 1 / 0)), ZeroDivisionError),
    "a future without a truth": (Fake(), Fake(waiting=True, open=1, done=Fake(done=lambda: np.zeros(2))), ValueError),
    "a future that is not to be resolved": (Fake(), Fake(waiting=True, open=1, done=Fake(done=bool)), AttributeError),
}


@compiled
@pytest.mark.parametrize("name", COUNTS)
def test_take_express_takes_no_harm_from_what_can_t_be_counted(name):
    part, whole, expected = COUNTS[name]
    assert speedups.take_express
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(Encoder().encode(Kind.RESULT, 0, 0, [b"1234"])))
        into = [bytearray(4)]
        channel = a_channel(fd=ours.fileno(), pending={0: (into, print, (part, whole, print))})
        with pytest.raises(expected):
            speedups.take_express(channel)
        assert into == [b"1234"]


def lacking() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Calls with objects that lack one attribute at which C looks: what it is, the function, and the arguments."""
    take, send = speedups.take_express, speedups.send_express
    yield "take_express: everything", take, (object(),)
    for name in (
        "decoder",
        "requests",
        "fd",
        "pending",
        "generation",
        "error",
        "_header",
        "_wanted",
        "frames",
        "_head",
    ):
        yield f"take_express: {name}", take, (a_channel(**{name: Fake}),)
    for name in ("_spill", "chain", "waiting"):
        yield f"take_express: {name}", take, (a_channel(**{name: Fake}),)
    for name in (
        "express",
        "member",
        "fd",
        "unsent",
        "encoder",
        "requests",
        "chain",
        "abandoned",
        "generation",
        "next",
    ):
        part = a_part()
        channel = part.member.worker.express
        holders = part, channel, channel.encoder, channel.requests
        delattr(next(holder for holder in holders if hasattr(holder, name)), name)
        yield f"send_express: {name}", send, ([part], [], [[]], [b""])
    part = a_part()
    del part.express
    part.member.worker.express = None
    yield "send_express: express, of a part whose worker has none", send, ([part], [], [[]], [b""])
    yield "take_express: open", take_reply, (Fake(waiting=True),)


def take_reply(whole: Any) -> Any:
    """Take a reply that is there and in order, for this whole."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(Encoder().encode(Kind.RESULT, 0, 0)))
        return speedups.take_express(a_channel(fd=ours.fileno(), pending={0: ([], print, (Fake(), whole, print))}))  # type: ignore[misc]


def print_what_comes_of_lacking() -> None:
    """A line for each: the exception, or the signal that the process ended by. Each has a process of its own."""
    for name, function, arguments in lacking():
        if (pid := os.fork()) == 0:
            try:
                said = repr(function(*arguments))
            except Exception as exc:
                said = type(exc).__name__
            os.write(1, f"{name}: {said}\n".encode())
            os._exit(0)
        if status := os.waitpid(pid, 0)[1]:
            os.write(1, f"{name}: signal {status & 127}\n".encode())


@compiled
def test_what_lacks_an_attribute_is_an_error_and_no_crash():
    say = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_express; "
    run = [sys.executable, "-c", say + "test_express.print_what_comes_of_lacking()"]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == len(list(lacking()))
    assert [line for line in said if not line.endswith(": AttributeError")] == []


@compiled
@pytest.mark.asyncio
async def test_an_exception_where_the_rest_is_kept_comes_out():
    async with World(1) as world:
        (peer,) = world.peers
        peer.channel.keep = lambda buffers, count: 1 / 0
        exchange = world.exchanges[0]
        with pytest.raises(ZeroDivisionError):
            speedups.send_express(exchange.parts, *split(exchange, [np.zeros((1, 1 << 20))]))


# ------------------------------------------------------------ nothing grows


def held(*objects: Any) -> Any:
    gc.collect()
    return list(map(sys.getrefcount, objects)), len(gc.get_objects()), sys.getallocatedblocks()


def check_nothing_grows(act: Callable[[], Any], *objects: Any, times: int = 10_000) -> None:
    """Do something very often; afterwards no object has more references, and there are no more objects or blocks."""
    for _ in range(100):
        act()
    counts, number, blocks = held(*objects)
    for _ in range(times):
        act()
    counts_after, number_after, blocks_after = held(*objects)
    assert counts_after == counts
    # a leak would be one each time; numbers and dicts take and give a few of their own
    assert number_after - number < times // 20 and blocks_after - blocks < times // 20


def raising(tail: Any) -> None:
    raise LookupError("in the reader")


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["counted", "with a tail", "a reader that raises", "a future that raises"])
async def test_a_step_there_and_back_leaves_nothing_behind(way):
    async with World(1) as world:
        (peer,) = world.peers
        exchange = world.exchanges[0]
        part = exchange.parts[0]
        tail = b"" if way in ("counted", "a future that raises") else b"tail"
        part.express = part.express._replace(
            counted=(part, exchange, raising if way == "a reader that raises" else len)
        )
        if way == "a future that raises":
            exchange.done = Fake(done=bool, set_result=raising)
        views, cuts, tails = split(exchange, [np.arange(2.0).reshape(1, 2)])
        send, take, parts = speedups.send_express, speedups.take_express, exchange.parts
        fixed = [bytes(view) for view in part.into[0]]

        def there_and_back() -> None:
            exchange.open = 2 if way == "counted" else 1
            assert send(parts, views, cuts, tails) == 1
            peer.socket.recv(100)
            peer.socket.sendall(b"".join(peer.encoder.encode(Kind.RESULT, part.request, GENERATION, fixed, tail)))
            if way == "a reader that raises" or way == "a future that raises":
                with pytest.raises(LookupError):
                    take(peer.channel)
                peer.requests.pending.clear()
            else:
                assert take(peer.channel) == -1

        channel = peer.channel
        objects = [
            part, exchange, part.express, peer, peer.requests, peer.requests.pending, channel, channel.encoder,
            channel.decoder, channel.decoder._head, channel.decoder._spill, channel.unsent, parts, views, cuts, *views,
            *cuts, *cuts[0], *part.into[0], exchange.done, raising,
        ]  # fmt: skip
        check_nothing_grows(there_and_back, *objects)


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "way", ["nothing", "something else", "the end", "not to be counted", "an error", "no memory for it", "no tail"]
)
async def test_looking_in_vain_leaves_nothing_behind(way):
    async with World(1) as world:
        (peer,) = world.peers
        channel, exchange = peer.channel, world.send()
        (pending,) = peer.requests.pending.values()
        take: Any = speedups.take_express
        expected: Any = {"nothing": -1, "something else": 40, "the end": 0}.get(way)
        match way:
            case "the end":
                peer.got()
                peer.socket.close()
            case "not to be counted":
                exchange.waiting = False
            case "an error":
                del channel.decoder.chain
            case "no memory for it":
                peer.requests.pending[0] = pending._replace(into=[*pending.into, b"not to be written"])

        def look() -> None:
            if way == "something else":
                peer.socket.send(bytes(40))
            if way in ("an error", "no memory for it"):
                with pytest.raises((AttributeError, BufferError)):
                    take(channel)
            else:
                assert take(channel) == expected

        if way == "no tail":  # whose CRC is wrong

            def look() -> None:
                peer.socket.send(broken)
                assert take(channel) == len(broken)

            broken = reply(peer, exchange, tail=b"tail")[:-1] + b"L"
        objects = channel, channel.decoder, channel.decoder._spill, exchange, pending, *pending.into, *exchange.parts
        check_nothing_grows(look, *objects)


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["closed", "full", "odd views", "in part", "no part"])
async def test_a_request_that_can_t_be_sent_leaves_nothing_behind(way):
    async with World(1) as world:
        (peer,) = world.peers
        exchange, channel, requests = world.exchanges[0], peer.channel, peer.requests
        parts, (views, cuts, tails) = exchange.parts, split(exchange, [np.arange(2.0).reshape(1, 2)])
        send: Any = speedups.send_express
        kept: list[Any] = []
        times = 10_000
        match way:
            case "closed":
                channel.fd, fd = -1, channel.fd
            case "full":
                fill_up(peer, [])
            case "odd views":
                views.append(object())  # type: ignore[arg-type]
                cuts[0].append(slice(1))
            case "in part":
                channel.keep = lambda buffers, count: kept.append((len(buffers[0]), buffers[1], count))
                views, cuts, tails = split(exchange, [np.zeros((1, 1 << 16))])
                times = 500
            case "no part":
                parts = [None]  # type: ignore[list-item]

        def try_it() -> None:
            if way in ("odd views", "no part"):
                with pytest.raises((TypeError, AttributeError)):
                    send(parts, views, cuts, tails)
                return
            assert send(parts, views, cuts, tails) == (way == "in part")
            if way == "in part":
                ((head, piece, count),) = kept
                assert head == 28 and piece.obj is views[0].obj and 0 < count < len(views[0])
                kept.clear()
                requests.pending.clear()
                while count > 0:
                    count -= len(peer.socket.recv(1 << 20))

        objects = [
            channel, channel.encoder, requests, requests.pending, exchange, *exchange.parts, views, cuts, *views,
            *cuts[0], exchange.parts[0].express,
        ]  # fmt: skip
        check_nothing_grows(try_it, *objects, times=times)
        if way == "closed":
            channel.fd = fd


# ------------------------------------------------------------ a whole run


class Telling(gym.Env[Any, Any]):
    """Tells floats of every step, something else now and then, and raises once."""

    observation_space = SPACE
    action_space = spaces.Discrete(9)

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.full(3, self.slot, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        info: dict[str, Any] = {"x": self.count / 7, "y": np.float32(action)}
        if self.count % 9 == self.slot:
            info = {"said": f"{self.count}"}
        if (self.count, self.slot) == (20, 3):
            raise LookupError("as it was told")
        ends = self.count % 11 == self.slot
        return np.full(3, self.count, np.float32), float(action), ends, False, info


async def a_run() -> list[Any]:
    rng = np.random.default_rng(0)
    log: list[Any] = []  # of copies: whose results are kept gets others, which C leaves alone
    async with aioenv.AsyncVectorEnv([lambda slot=slot: Telling(slot) for slot in range(5)], num_workers=2) as envs:
        log.append(deepcopy(await envs.reset(seed=0)))
        for number in range(60):
            try:
                log.append(deepcopy(await envs.step(rng.integers(0, 9, 5))))
            except aioenv.EnvError as exc:
                log.append((exc.slots, str(exc.__cause__), exc.partial))
                await envs.reset(options={"reset_mask": np.arange(5) == 3})
            if number == 30:
                log.append(await envs.call("slot"))
    return log


@compiled
@pytest.mark.asyncio
async def test_a_run_is_the_same_in_c_and_in_python(monkeypatch):
    sent, taken = outcomes(monkeypatch, "send_express"), outcomes(monkeypatch, "take_express")
    in_c = await a_run()
    assert sent.count(2) == 60 and taken.count(-1) >= 100
    in_python(monkeypatch)
    np.testing.assert_equal(in_c, await a_run())
