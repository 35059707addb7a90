"""Workers without processes, for tests of a plain step in the parent."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from aioenv import speedups
from aioenv.core.dispatcher import Dispatcher
from aioenv.core.requests import BatchRequest, WorkerRequest
from aioenv.core.worker_pool import WorkerSlots
from aioenv.errors import SlotError
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Encoder, Frame, Kind
from aioenv.ipc.messages import Failure, dump_columns
from aioenv.process import failures
from aioenv.process.channel import ScatterChannel
from aioenv.process.connection import Connection, OutstandingRequests
from aioenv.spaces.infos import Gatherer, SchemaTable
from aioenv.spaces.layout import Layout, byte_view

compiled = pytest.mark.skipif(not speedups.compiled, reason=f"not compiled: {speedups.why_not}")


ways = pytest.mark.parametrize("c", [pytest.param(True, marks=compiled), False], ids=["c", "python"])


SPACE = spaces.Box(-9, 9, (3,), np.float32)


GENERATION = 3


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("send_steps", "take_replies", "read_frame", "write_frame", "read_columns", "merge_columns"):
        monkeypatch.setattr(speedups, name, None)


class Peer:
    """A worker as the engine sees it: what its process would do at the other end of the socket, tests do."""

    submit, _on_frame = Connection.submit, Connection._on_frame

    def __init__(self, slots: tuple[int, ...]) -> None:
        ours, self.socket = socket.socketpair()
        self.requests = OutstandingRequests(GENERATION)
        self.channel = self.fast_channel = ScatterChannel(ours, self.requests)
        self.thread_channel = None
        self.images: list[Any] = []
        self.on_images = lambda frame: self.images.append((frame.request, bytes(frame.payload)))
        self.on_death: Any = None
        self.encoder, self.decoder = Encoder(), Decoder()
        self.skip = 0  # bytes that come before the first request
        self._identity = failures.WorkerIdentity("peer", None, slots, "")
        self.receiving = asyncio.create_task(self.channel.receive(self._on_frame))

    def env_error(self, failure: Failure) -> SlotError:
        return failures.env_error(self._identity, failure)

    def parent_env_error(self, message: str, slots: Sequence[int]) -> SlotError:
        return failures.parent_env_error(self._identity, message, slots)

    def poll(self) -> None:
        self.channel.poll()

    def readable(self) -> bool:
        poll = select.poll()
        poll.register(self.channel.fd, select.POLLIN)
        return bool(poll.poll(0))

    def drain(self) -> None:
        """Have the channel take all that is there."""
        while self.channel.poll_fd is not None and self.readable():
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
    """Workers with so many slots each, what sends to them, and batch_requests with all of them."""

    def __init__(self, *counts: int) -> None:
        self.offered: list[WorkerRequest] = []
        stops = list(itertools.accumulate(counts))
        rows = [tuple(range(stop - count, stop)) for stop, count in zip(stops, counts, strict=True)]
        self.peers = [Peer(slots) for slots in rows]
        self.members: Any = [
            WorkerSlots(peer, slots[0], slots[-1] + 1, SchemaTable({}))  # type: ignore[arg-type]
            for peer, slots in zip(self.peers, rows, strict=True)
        ]
        worker_pool: Any = SimpleNamespace(
            spares=[],
            workers=[],
            members=self.members,
            shared_batches=(),
            episodes=None,
            stats=(),
            observations=Layout(SPACE),
            checkpoint_size=0,
            replaced={},
        )
        self.over: list[int] = []
        table: Any = SimpleNamespace(exhaust=self.over.extend)
        self.dispatcher = Dispatcher(
            worker_pool,
            None,
            table,
            state_size=0,
            mode=AutoresetMode.NEXT_STEP,
            restart=None,
            pixel_renderer=None,
            on_ready=lambda _, part: self.offered.append(part),
        )
        self.batch_requests = [self.make_request(number) for number in (1, 2)]
        self.turn = 0
        for batch_request in self.batch_requests:
            batch_request.reset(stepped=True, waiting=True)
            for array in (*batch_request.batch.obs, batch_request.batch.reward):
                array.fill(-7)
            batch_request.batch.clear(0, sum(counts))

    def make_request(self, shared_batch: int) -> BatchRequest:
        """A request to all workers, about all of their slots."""
        shares = [(m, np.arange(m.start, m.stop)) for m in self.members]
        return self.dispatcher.make_request(shares, shared_batch, reused=True)

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

    def send(self, actions: Sequence[np.ndarray[Any, Any]] = ()) -> BatchRequest:
        """Step all slots; gives one batch_request, then the other."""
        batch_request = self.batch_requests[self.turn]
        self.turn = 1 - self.turn
        batch_request.reset(stepped=True, waiting=True)
        self.dispatcher.submit_steps(batch_request, *split(batch_request, actions))
        return batch_request

    def state(self) -> Any:
        """All that replies and requests change, but for how the stream ended."""
        peers = [
            (
                peer.channel.encoder.chain,
                peer.channel.decoder.chain,
                peer.channel.decoder.idle,
                str(peer.channel.decoder.error),
                list(peer.requests.pending),
                peer.requests.next_id,
                peer.requests.abandoned,
                peer.images,
            )
            for peer in self.peers
        ]
        batch_requests = [
            (
                batch_request.open,
                batch_request.done.done(),
                list(map(bytes, map(byte_view, batch_request.batch._arrays))),
                [
                    (part.arrived, part.request_id, told(part.errors), seen(part.columns), part.exhausted)
                    for part in batch_request.parts
                ],
            )
            for batch_request in self.batch_requests
        ]
        return peers, batch_requests, len(self.offered), self.over


def split(
    batch_request: BatchRequest, actions: Sequence[np.ndarray[Any, Any]]
) -> tuple[list[memoryview], list[list[slice]], list[bytes]]:
    """Actions as `Dispatcher` hands them on."""
    bytes_each = [array.nbytes // len(array) for array in actions]
    cuts = [[slice(part.start * size, part.stop * size) for size in bytes_each] for part in batch_request.parts]
    return list(map(byte_view, actions)), cuts, [b""] * len(cuts)


def told(errors: Sequence[BaseException]) -> list[str]:
    return [f"{type(error).__name__}: {error}" for error in errors]


def seen(columns: Sequence[Any]) -> list[Any]:
    return [(str(c.positions), c.schema, np.asarray(c.values).tolist()) for c in columns]


def reply(
    peer: Peer,
    batch_request: BatchRequest,
    *,
    kind: Kind = Kind.RESULT,
    request: int | None = None,
    generation: int = GENERATION,
    fixed: Sequence[bytes] | None = None,
    payload: bytes = b"",
    fill: int = 1,
) -> bytes:
    """The bytes of a reply; flags are 1, since bools are."""
    part = next(part for part in batch_request.parts if part.member.worker is peer)
    if fixed is None:
        fixed = [bytes([fill]) * len(view) for view in part.into[0]]
    if request is None:
        request = part.request_id
    assert request is not None
    return b"".join(peer.encoder.encode(kind, request, generation, fixed, payload))


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


def floats_payload(member: WorkerSlots, values: Sequence[float], rows: Sequence[int] | None = None) -> bytes:
    """A payload of columns of a sort that the parent knows: {"x": float}."""
    gatherer = Gatherer()
    count = len(values)
    groups = gatherer.gather(
        [(row, {"x": x}) for row, x in zip(rows or range(count), values, strict=True)], range(count)
    )
    member.schemas.update(gatherer.take_new_schemas())
    return dump_columns(groups)


def fill_up(peer: Peer, parts: list[WorkerRequest]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            peer.skip += peer.channel._sock.send(b"x")


class Fake(SimpleNamespace):
    """Has what a test says, and can be told apart from nothing else."""
