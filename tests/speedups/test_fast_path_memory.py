"""A plain step's C in the parent leaves nothing behind, however often it runs; and whole runs with and without it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv import speedups
from aioenv.ipc.frames import Kind
from tests.speedups.growth_kit import check_nothing_grows
from tests.speedups.parent_kit import (
    GENERATION,
    SPACE,
    Fake,
    World,
    compiled,
    fill_up,
    in_python,
    outcomes,
    reply,
    split,
)

pytestmark = pytest.mark.usefixtures("no_wakeup_coalescing")


def raising(payload: Any) -> None:
    raise LookupError("in the reader")


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "way", ["counted", "with a tail", "a reader that raises", "a future that raises", "always", "always, and it raises"]
)
async def test_a_step_there_and_back_leaves_nothing_behind(way):
    async with World(1) as world:
        (peer,) = world.peers
        batch_request = world.batch_requests[0]
        part = batch_request.parts[0]
        payload = b"tail" if way in ("with a tail", "a reader that raises") else b""
        reader = raising if way in ("a reader that raises", "always, and it raises") else len
        part.fast_reply = part.fast_reply._replace(fast_path=(part, batch_request, reader, way.startswith("always")))
        if way == "a future that raises":
            batch_request.done = Fake(done=bool, set_result=raising)
        views, cuts, payloads = split(batch_request, [np.arange(2.0).reshape(1, 2)])
        send, take, parts = speedups.send_steps, speedups.take_replies, batch_request.parts
        fixed = [bytes(view) for view in part.into[0]]

        def there_and_back() -> None:
            batch_request.open = 2 if way == "counted" else 1
            assert send(parts, views, cuts, payloads) == 1
            peer.socket.recv(100)
            peer.socket.sendall(b"".join(peer.encoder.encode(Kind.RESULT, part.request_id, GENERATION, fixed, payload)))
            if "raises" in way:
                with pytest.raises(LookupError):
                    take(peer.channel)
                peer.requests.pending.clear()
            else:
                assert take(peer.channel) == -1

        channel = peer.channel
        objects = [
            part, batch_request, part.fast_reply, peer, peer.requests, peer.requests.pending, channel, channel.encoder,
            channel.decoder, channel.decoder._head, channel.decoder._spill, channel.unsent, parts, views, cuts, *views,
            *cuts, *cuts[0], *part.into[0], batch_request.done, raising,
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
        channel, batch_request = peer.channel, world.send()
        (pending,) = peer.requests.pending.values()
        take: Any = speedups.take_replies
        expected: Any = {"nothing": -1, "something else": 40, "the end": 0}.get(way)
        match way:
            case "the end":
                peer.got()
                peer.socket.close()
            case "not to be counted":
                batch_request.waiting = False
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

            broken = reply(peer, batch_request, payload=b"tail")[:-1] + b"L"
        objects = (
            channel,
            channel.decoder,
            channel.decoder._spill,
            batch_request,
            pending,
            *pending.into,
            *batch_request.parts,
        )
        check_nothing_grows(look, *objects)


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["closed", "full", "odd views", "in part", "no part"])
async def test_a_request_that_can_t_be_sent_leaves_nothing_behind(way):
    async with World(1) as world:
        (peer,) = world.peers
        batch_request, channel, requests = world.batch_requests[0], peer.channel, peer.requests
        parts, (views, cuts, payloads) = batch_request.parts, split(batch_request, [np.arange(2.0).reshape(1, 2)])
        send: Any = speedups.send_steps
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
                channel.send_later = lambda buffers, count: kept.append((len(buffers[0]), buffers[1], count))
                views, cuts, payloads = split(batch_request, [np.zeros((1, 1 << 16))])
                times = 500
            case "no part":
                parts = [None]  # type: ignore[list-item]

        def try_it() -> None:
            if way in ("odd views", "no part"):
                with pytest.raises((TypeError, AttributeError)):
                    send(parts, views, cuts, payloads)
                return
            assert send(parts, views, cuts, payloads) == (way == "in part")
            if way == "in part":
                ((head, piece, count),) = kept
                assert head == 28 and piece.obj is views[0].obj and 0 < count < len(views[0])
                kept.clear()
                requests.pending.clear()
                while count > 0:
                    count -= len(peer.socket.recv(1 << 20))

        objects = [
            channel, channel.encoder, requests, requests.pending, batch_request, *batch_request.parts, views, cuts,
            *views, *cuts[0], batch_request.parts[0].fast_reply,
        ]  # fmt: skip
        check_nothing_grows(try_it, *objects, times=times)
        if way == "closed":
            channel.fd = fd


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
    sent, taken = outcomes(monkeypatch, "send_steps"), outcomes(monkeypatch, "take_replies")
    in_c = await a_run()
    assert sent.count(2) == 60 and taken.count(-1) >= 100
    in_python(monkeypatch)
    np.testing.assert_equal(in_c, await a_run())
