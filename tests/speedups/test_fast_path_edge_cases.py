"""Edge cases of the fast path: each pins a change of the C code that no other test noticed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from aioenv import speedups
from aioenv.core.requests import BatchRequest
from aioenv.ipc.frames import HEADER_BYTES, Kind
from aioenv.worker import worker_context
from tests.kits.process_kit import environment
from tests.kits.worker_kit import (
    STORIES,
    Desk,
    Session,
    Story,
    Told,
    all_in_python,
    plain,
    play,
    python_answers,
    telling,
)
from tests.speedups.growth_kit import check_nothing_grows
from tests.speedups.parent_kit import (
    GENERATION,
    Fake,
    World,
    compiled,
    in_python,
    outcomes,
    reply,
    split,
    ways,
)

pytestmark = pytest.mark.usefixtures("no_wakeup_coalescing", "a_worker_within")

# the payload of a request for successive rows
RUN = struct.Struct("<cII")


def sound(data: bytes, place: int, byte: int) -> bytes:
    """The first frame of a stream with another byte in its header, whose CRC fits that."""
    head = data[:place] + bytes([byte]) + data[place + 1 : 24]
    return head + zlib.crc32(head).to_bytes(4, "little") + data[HEADER_BYTES:]


# ------------------------------------------------------------ in the parent


@ways
@pytest.mark.asyncio
async def test_a_step_never_overtakes_unsent_bytes_though_the_socket_is_writable_again(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    given = outcomes(monkeypatch, "send_steps")
    async with World(1) as world:
        (peer,) = world.peers
        peer.submit(Kind.CALL, (), bytes(1 << 20), None, lambda outcome: None)
        peer.decoder.feed(peer.socket.recv(1 << 20))  # the kernel would take more now
        world.send([np.arange(1)])
        assert given == [0] * c
        frames: list[Any] = []
        while len(frames) < 2:
            await asyncio.sleep(0)  # what is unsent goes out
            frames += peer.got()
        assert [frame.kind for frame in frames] == [Kind.CALL, Kind.STEP]


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize(("place", "byte"), [(1, 0x0F), (2, 2)])
async def test_a_reply_of_another_wire_is_none_though_its_crc_is_sound(monkeypatch, place, byte):
    async def outcome() -> Any:
        async with World(2) as world:
            (peer,) = world.peers
            batch_request = world.send()
            peer.socket.sendall(sound(reply(peer, batch_request), place, byte))
            peer.drain()
            return world.state(), await peer.ending()

    in_c = await outcome()
    in_python(monkeypatch)
    assert in_c == await outcome()
    (_, (first, _), *_), ending = in_c
    assert first[:2] == (1, False) and ending.startswith("WireError: expected ")


@compiled
@pytest.mark.asyncio
async def test_the_last_reply_of_a_step_leaves_nothing_behind():
    async with World(1) as world:
        (peer,) = world.peers
        batch_request: BatchRequest = world.batch_requests[0]
        token, part = object(), batch_request.parts[0]
        batch_request.done = Fake(done=bool, set_result=lambda _: token)  # type: ignore[assignment]
        views, cuts, payloads = split(batch_request, [np.arange(2.0).reshape(1, 2)])
        send: Any = speedups.send_steps
        take: Any = speedups.take_replies
        fixed = [bytes(view) for view in part.into[0]]

        def there_and_back() -> None:
            batch_request.open = 1
            assert send(batch_request.parts, views, cuts, payloads) == 1
            peer.socket.recv(100)
            assert part.request_id is not None
            peer.socket.sendall(b"".join(peer.encoder.encode(Kind.RESULT, part.request_id, GENERATION, fixed)))
            assert take(peer.channel) == -1

        check_nothing_grows(
            there_and_back, token, batch_request.done, part, batch_request, peer.channel, peer.requests.pending
        )


# ------------------------------------------------------------ in a worker

# what is no plain step, though some of it is as long as one
OTHERS: dict[str, Callable[[Desk], bytes]] = {
    "a tail": lambda desk: desk.encode(payload=b"tail"),
    "a tail as long as that of a run": lambda desk: desk.encode(payload=b"123456789"),
    "short": lambda desk: desk.encode(fixed=[b"short"]),
    "long": lambda desk: desk.encode(fixed=[bytes(99)]),
    "nothing": lambda desk: desk.encode(fixed=[]),
    "a reset": lambda desk: desk.encode(Kind.RESET),
    "a result": lambda desk: desk.encode(Kind.RESULT),
    "a reset of a run": lambda desk: desk.encode(Kind.RESET, [bytes(16)], RUN.pack(b"R", 0, 2)),
    "a run of another tag": lambda desk: desk.encode(Kind.STEP, [bytes(16)], RUN.pack(b"S", 0, 2)),
    "a byte": lambda desk: b"x",
    "nonsense": lambda desk: b"nonsense" * 50,
    "one that is lost before": lambda desk: (desk.encode(), desk.encode())[1],
    "another magic": lambda desk: sound(desk.encode(), 1, 0x0F),
    "another version": lambda desk: sound(desk.encode(), 2, 2),
    "a run of another magic": lambda desk: sound(desk.encode(fixed=[bytes(8)], payload=RUN.pack(b"R", 1, 1)), 1, 0x0F),
    "a run of another version": lambda desk: sound(desk.encode(fixed=[bytes(8)], payload=RUN.pack(b"R", 1, 1)), 2, 2),
}


@compiled
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_plain_step_is_left_in_the_buffers(name):
    with telling("floats") as desk:
        data = OTHERS[name](desk)
        desk.mine.sendall(data)
        assert desk.serve() == len(data) and desk.its_decoder.chain == desk.its_encoder.chain == 0
        envs: Any = desk.service._envs
        assert [env.unwrapped.n for env in envs] == [0] * 4, "no env was stepped"
        assert b"".join(desk.its_decoder.buffers()).startswith(data)


class Asking(Told):
    """As long as there are requests, its step sends the next one."""

    requests: ClassVar[list[Callable[[], None]]] = []

    def step(self, action: Any) -> Any:
        if self.row == 0 and Asking.requests:
            Asking.requests.pop()()
        return super().step(action)


@compiled
@pytest.mark.parametrize(("seconds", "given"), [(1e-9, [-5]), (0.0, [-1] * 5)])
def test_c_says_how_many_steps_it_has_answered(seconds, given):
    with Desk(partial(Asking, "floats"), 4) as desk:
        desk.step()

        def ask() -> None:
            desk.mine.sendall(desk.encode())

        Asking.requests = [ask] * 4
        ask()
        assert [desk.serve(seconds) for _ in given] == given
        assert [len(desk.take().payload) > 0 for _ in range(5)] == [True] * 5


@compiled
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "odd", [np.arange(3.0), [1, 2, 3], np.arange(3, dtype=">f4"), np.ones((3, 2), np.float32)[:, 0]]
)
def test_the_infos_of_an_invalid_observation_are_told_once(monkeypatch, mode, odd):
    def step(env: Told, n: int) -> dict[str, Any]:
        told = {"info": {"x": n + env.row / 9}}
        return {"obs": odd, **told} if (env.row, n) == (2, 4) else told

    monkeypatch.setitem(STORIES, "odd", Story(step))
    raw, said = play("odd", mode)
    python_answers(monkeypatch)
    assert play("odd", mode)[0] == raw
    all_in_python(monkeypatch)
    assert play("odd", mode)[1] == said


@compiled
def test_signals_are_handled_while_a_reply_waits_for_the_socket():
    with telling("floats") as desk:
        desk.step()
        desk.theirs.setblocking(False)
        filled = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                filled += desk.theirs.send(b"x" * 100)
        before = signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
        try:
            desk.mine.sendall(desk.encode())
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(ZeroDivisionError):
                desk.serve()
            signal.signal(signal.SIGALRM, lambda *_: desk.mine.recv(filled, socket.MSG_WAITALL))
            desk.mine.sendall(desk.encode())
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            assert desk.serve() == -1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert len(desk.mine.recv(1000)) > HEADER_BYTES


@compiled
def test_a_descriptor_of_nothing_is_left_to_python():
    with telling("floats") as desk:
        fd = desk.theirs.fileno()
        desk.theirs.close()
        plan: Any = desk.service.fast_path()
        assert speedups.serve_steps is not None
        assert speedups.serve_steps(fd, fd, desk.its_decoder, desk.its_encoder, plan, 0.0) is None


@contextlib.contextmanager
def in_this_way(monkeypatch: pytest.MonkeyPatch, way: Callable[[pytest.MonkeyPatch], None] | None) -> Iterator[None]:
    with monkeypatch.context() as patch:
        if way is not None:
            way(patch)
        yield


def asked(actions: bytes, payload: bytes) -> tuple[list[bytes], Any]:
    """What a worker says to a request to step some rows, and to one for all before and after that."""
    with Session("floats", AutoresetMode.NEXT_STEP) as session:
        frames = [session.reset(), session.ask(Kind.STEP, [bytes(4 * 8)])]
        frames.append(session.ask(Kind.STEP, [actions], payload))
        frames.append(session.ask(Kind.STEP, [bytes(4 * 8)]))
        assert session.end() is None
        return session.raw, list(map(plain, frames))


@compiled
@pytest.mark.parametrize("size", range(6))
@pytest.mark.parametrize("first", [0, 1, 3, 4, (1 << 32) - 1])
def test_rows_that_follow_one_another_or_are_said_to_are_stepped_as_in_python(monkeypatch, first, size):
    actions = np.arange(size, dtype=np.int64).tobytes()
    for count in range(6):  # a huge one would have Python list as many rows
        payload = RUN.pack(b"R", first, count)
        raw, said = asked(actions, payload)
        with in_this_way(monkeypatch, python_answers):
            assert asked(actions, payload)[0] == raw
        assert said[3][0] is Kind.RESULT, "it goes on"
        if 0 < count == size <= 4 - first and size < 4:  # all rows are never a run
            assert said[2][0] is Kind.RESULT and len(said[2][2]) == count * (12 + 8 + 2)
            with in_this_way(monkeypatch, all_in_python):  # which finds out amid a step what can't be
                assert asked(actions, payload)[1] == said


@compiled
@pytest.mark.parametrize("place", range(HEADER_BYTES + 2 * 8 + RUN.size))
def test_a_spoilt_request_for_a_run_ends_the_worker_as_in_python(monkeypatch, place):
    endings = []
    for way in (None, python_answers, all_in_python):
        with in_this_way(monkeypatch, way), Session("floats", AutoresetMode.NEXT_STEP) as session:
            session.reset()
            session.ask(Kind.STEP, [bytes(2 * 8)], RUN.pack(b"R", 1, 2))
            data = bytearray(session.encode(Kind.STEP, [bytes(2 * 8)], RUN.pack(b"R", 1, 2)))
            data[place] ^= 1 << place % 8
            session.mine.sendall(data)
            with pytest.raises(EOFError):
                session.take()
            session.thread.join()
            endings.append(f"{type(session.ended).__name__}: {session.ended}")
    assert endings[0].startswith("WireError: ") and len(set(endings)) == 1


def serve_no_envs() -> None:
    """Answer a request for a run with a plan of no envs."""
    worker_context.use_current_row_of_parent(memoryview(bytearray(4)).cast("I"))
    with telling("floats") as desk:
        plan = list(desk.service.fast_path() or ())
        plan[2] = []
        desk.mine.sendall(desk.encode(fixed=[bytes(16)], payload=RUN.pack(b"R", 0, 2)))
        fd = desk.theirs.fileno()
        speedups.serve_steps(fd, fd, desk.its_decoder, desk.its_encoder, tuple(plan), 0.0)  # type: ignore[misc]


@compiled
def test_a_fast_path_of_no_envs_is_no_crash():
    code = "from tests.speedups import test_fast_path_edge_cases as tests; tests.serve_no_envs()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert ended.returncode >= 0, f"signal {-ended.returncode}"
