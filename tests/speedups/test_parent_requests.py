"""Plain steps are written in C as Python writes them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aioenv import speedups
from aioenv.core.requests import WorkerRequest
from aioenv.ipc.frames import Encoder, Kind
from tests.speedups.parent_kit import GENERATION, Peer, World, compiled, fill_up, in_python, outcomes, reply, ways

pytestmark = pytest.mark.usefixtures("no_wakeup_coalescing")


def encoded(steps: Sequence[Sequence[np.ndarray[Any, Any]]], part: WorkerRequest, first: int = 0) -> bytes:
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
    given = outcomes(monkeypatch, "send_steps")
    rng = np.random.default_rng(0)
    async with World(2, 1, 3) as world:
        steps = [some_actions(rng, 6, name) for _ in range(4)]
        for arrays in steps:
            world.send(arrays)
        for peer, part in zip(world.peers, world.batch_requests[1].parts, strict=True):
            assert peer.socket.recv(1 << 20) == encoded(steps, part)
            assert list(peer.requests.pending) == [0, 1, 2, 3] and peer.requests.next_id == 4 and part.request_id == 3
            assert [pending[0] for pending in peer.requests.pending.values()] == [
                batch_request.parts[world.peers.index(peer)].into[0] for batch_request in world.batch_requests * 2
            ]
            assert not peer.channel.unsent
        assert given == [3] * 4 * c


def leave_something_unsent(peer: Peer, parts: list[WorkerRequest]) -> None:
    peer.submit(Kind.CALL, (), bytes(1 << 20), None, lambda outcome: None)
    assert peer.channel.unsent


def abandon(peer: Peer, parts: list[WorkerRequest]) -> None:
    peer.requests.abandoned = True


def close(peer: Peer, parts: list[WorkerRequest]) -> None:
    peer.channel.close()


def be_gone(peer: Peer, parts: list[WorkerRequest]) -> None:
    peer.socket.close()


def be_traced(peer: Peer, parts: list[WorkerRequest]) -> None:
    peer.fast_channel = None  # type: ignore[assignment]


def have_more_to_do(peer: Peer, parts: list[WorkerRequest]) -> None:
    for part in parts:
        part.fast_reply = None


def have_a_number_too_large(peer: Peer, parts: list[WorkerRequest]) -> None:
    peer.requests.next_id = 1 << 32  # after which 1 comes


def have_lived_too_often(peer: Peer, parts: list[WorkerRequest]) -> None:
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
        stop(victim, [batch_request.parts[1] for batch_request in world.batch_requests])
        began = victim.requests.next_id
        with monkeypatch.context() as patch:
            if (send := speedups.send_steps) is not None:

                def checked(parts: list[WorkerRequest], *args: Any) -> int:
                    sent = send(parts, *args)
                    if sent == 1 and parts is world.batch_requests[0].parts:
                        assert [peer.requests.next_id for peer in world.peers] == [1, began, 0]
                        assert [part.request_id for part in parts] == [0, None, None], "the others were not touched"
                    return sent

                patch.setattr(speedups, "send_steps", checked)
            for number in range(2):
                world.send([np.arange(4) + number])
        frames: list[Any] = [[] for _ in world.peers]
        for _ in range(20):
            await asyncio.sleep(0)  # what is unsent goes out
            for peer, so_far in zip(world.peers, frames, strict=True):
                so_far += [(f.kind, f.request, b"".join(f.fixed), len(f.payload)) for f in peer.got()]
        assert not any(peer.channel.unsent for peer in world.peers)
        return frames, world.state(), [await peer.ending() for peer in world.peers]


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.__name__)
async def test_c_stops_at_a_worker_that_it_can_t_write_to_just_like_that(monkeypatch, stop):
    given = outcomes(monkeypatch, "send_steps")
    in_c = await stopped_by(stop, monkeypatch)
    monkeypatch.setattr(speedups, "send_steps", None)
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
    given = outcomes(monkeypatch, "send_steps")
    rng = np.random.default_rng(1)
    async with World(2, 1) as world:
        steps = [[np.frombuffer(rng.bytes(3 * size), np.uint8).reshape(3, size)] for size in (1 << 20, 1, 100)]
        world.send(steps[0])
        assert all(peer.channel.unsent for peer in world.peers)
        assert [part.request_id for part in world.batch_requests[0].parts] == [0, 0]
        world.send(steps[1])  # behind it
        loop = asyncio.get_running_loop()
        for peer, part in zip(world.peers, world.batch_requests[0].parts, strict=True):
            expected = encoded(steps[:2], part)
            peer.socket.setblocking(False)
            data = b""
            while len(data) < len(expected):
                data += await loop.sock_recv(peer.socket, 1 << 20)
            assert data == expected and not peer.channel.unsent
        world.send(steps[2])
        for peer, part in zip(world.peers, world.batch_requests[0].parts, strict=True):
            assert peer.socket.recv(1000) == encoded(steps, part)[len(encoded(steps[:2], part)) :]
        assert given == [2, 0, 2] * c


@ways
@pytest.mark.asyncio
async def test_after_the_last_number_of_a_request_comes_the_first(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "send_steps"), outcomes(monkeypatch, "take_replies")
    async with World(2) as world:
        (peer,) = world.peers
        peer.requests.next_id = (1 << 32) - 1
        for request, following in (((1 << 32) - 1, 0), (0, 1)):
            batch_request = world.send()
            assert batch_request.parts[0].request_id == request and peer.requests.next_id == following
            assert [frame.request for frame in peer.got()] == [request] == list(peer.requests.pending)
            peer.socket.sendall(reply(peer, batch_request))
            peer.poll()
            assert batch_request.done.done() and not peer.requests.pending
        assert given == ([1, 1] * c, [-1, -1] * c)
