"""A plain step's C in the parent answers invalid arguments with an error, never with a crash."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aioenv import speedups
from aioenv.ipc.frames import Encoder, Kind
from tests.kits.process_kit import run_alone
from tests.speedups.parent_kit import Fake, World, compiled, split

pytestmark = pytest.mark.usefixtures("no_wakeup_coalescing")


def a_part(**other: Any) -> Fake:
    """A part to which a request without arrays can be written, but for some attributes of its channel or its own."""
    encoder, requests = Fake(chain=0), Fake(abandoned=False, generation=0, next_id=0, pending={})
    channel = Fake(fd=other.pop("fd", 1 << 30), unsent=[], encoder=encoder, requests=requests)
    for holder in (channel, encoder, requests):
        for name in list(other):
            if hasattr(holder, name):
                setattr(holder, name, other.pop(name))
    return Fake(
        **{"fast_reply": "pending", "member": Fake(worker=Fake(fast_channel=channel)), "request_id": None, **other}
    )


VIEW = memoryview(bytes(8))


# arguments of `send_steps`, and what comes of them: an exception, or how many are sent
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
    "no member": (([Fake(fast_reply=1)], [], [[]], [b""]), AttributeError),
    "no worker": (([Fake(fast_reply=1, member=Fake())], [], [[]], [b""]), AttributeError),
    "a channel that is none": (
        ([Fake(fast_reply=1, member=Fake(worker=Fake(fast_channel=1)))], [], [[]], [b""]),
        AttributeError,
    ),
    "a descriptor that is none": (([a_part(fd="1")], [], [[]], [b""]), TypeError),
    "a closed descriptor": (([a_part(fd=-1)], [], [[]], [b""]), 0),
    "a descriptor of nothing": (([a_part()], [], [[]], [b""]), 0),
    "unsent is no list": (([a_part(unsent=())], [], [[]], [b""]), 0),
    "abandoned is no bool": (([a_part(abandoned=0)], [], [[]], [b""]), 0),
    "a chain that is no number": (([a_part(chain="")], [], [[]], [b""]), 0),
    "a chain that is negative": (([a_part(chain=-1)], [], [[]], [b""]), 0),
    "a number that is none": (([a_part(next_id=1.0)], [], [[]], [b""]), 0),
    "a huge number": (([a_part(next_id=1 << 99)], [], [[]], [b""]), 0),
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
def test_send_steps_survives_invalid_arguments(name):
    arguments, expected = SENDS[name]
    assert speedups.send_steps
    if isinstance(expected, int):
        assert speedups.send_steps(*arguments) == expected
        return
    with pytest.raises(expected):
        speedups.send_steps(*arguments)


def a_channel(**other: Any) -> Fake:
    """A channel of which nothing can be read, with one request to count, but for some attributes."""
    head = memoryview(bytearray(28))
    decoder = Fake(error=None, _header=None, _wanted=[head], frames=[], _head=head, _spill=memoryview(bytearray(9)))
    decoder.chain = 0
    whole = Fake(waiting=True, open=1, done=Fake(done=lambda: True))
    requests = Fake(generation=0, pending={0: ([], print, (Fake(), whole, print, False))})
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
    "pending without a request": ({"pending": {0: ([], print, None)}}, None),
    "counted is short": ({"pending": {0: ([], print, (1,))}}, None),
    "into is none": ({"pending": {0: (None, print, (1, 2, 3, False))}}, None),
    "a whole that is none": ({"pending": {0: ([], print, (1, 2, 3, False))}}, AttributeError),
    "into numbers": ({"pending": {0: ([7], print, (1, Fake(waiting=True), 3, False))}}, TypeError),
    "into bytes": ({"pending": {0: ([b"1"], print, (1, Fake(waiting=True), 3, False))}}, BufferError),
}


@compiled
@pytest.mark.parametrize("name", CHANNELS)
def test_take_replies_survives_invalid_channels(name):
    odd, expected = CHANNELS[name]
    assert speedups.take_replies
    channel = a_channel(**odd)
    if expected is None:
        assert speedups.take_replies(channel) is None
        return
    with pytest.raises(expected):
        speedups.take_replies(channel)


@compiled
def test_take_replies_takes_one_argument():
    assert speedups.take_replies
    for arguments in ((), (None, None)):
        with pytest.raises(TypeError):
            speedups.take_replies(*arguments)


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
def test_take_replies_takes_no_harm_from_what_can_t_be_counted(name):
    part, whole, expected = COUNTS[name]
    assert speedups.take_replies
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(Encoder().encode(Kind.RESULT, 0, 0, [b"1234"])))
        into = [bytearray(4)]
        channel = a_channel(fd=ours.fileno(), pending={0: (into, print, (part, whole, print, False))})
        with pytest.raises(expected):
            speedups.take_replies(channel)
        assert into == [b"1234"]


def lacking() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Calls with objects that lack one attribute at which C looks: what it is, the function, and the arguments."""
    take, send = speedups.take_replies, speedups.send_steps
    yield "take_replies: everything", take, (object(),)
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
        yield f"take_replies: {name}", take, (a_channel(**{name: Fake}),)
    for name in ("_spill", "chain", "waiting"):
        yield f"take_replies: {name}", take, (a_channel(**{name: Fake}),)
    for name in (
        "fast_reply",
        "member",
        "fd",
        "unsent",
        "encoder",
        "requests",
        "chain",
        "abandoned",
        "generation",
        "next_id",
    ):
        part = a_part()
        channel = part.member.worker.fast_channel
        holders = part, channel, channel.encoder, channel.requests
        delattr(next(holder for holder in holders if hasattr(holder, name)), name)
        yield f"send_steps: {name}", send, ([part], [], [[]], [b""])
    part = a_part()
    del part.fast_reply
    part.member.worker.fast_channel = None
    yield "send_steps: fast_reply, of a part whose worker has no channel", send, ([part], [], [[]], [b""])
    yield "take_replies: open", take_reply, (Fake(waiting=True),)


def take_reply(whole: Any) -> Any:
    """Take a reply that is there and in order, for this whole."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(Encoder().encode(Kind.RESULT, 0, 0)))
        pending = {0: ([], print, (Fake(), whole, print, False))}
        return speedups.take_replies(a_channel(fd=ours.fileno(), pending=pending))  # type: ignore[misc]


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
    code = "from tests.speedups import test_parent_invalid_arguments as tests; tests.print_what_comes_of_lacking()"
    said = run_alone(code).stdout.splitlines()
    assert len(said) == len(list(lacking()))
    assert [line for line in said if not line.endswith(": AttributeError")] == []


@compiled
@pytest.mark.asyncio
async def test_an_exception_where_the_rest_is_kept_comes_out():
    async with World(1) as world:
        (peer,) = world.peers
        peer.channel.send_later = lambda buffers, count: 1 / 0
        batch_request = world.batch_requests[0]
        with pytest.raises(ZeroDivisionError):
            speedups.send_steps(batch_request.parts, *split(batch_request, [np.zeros((1, 1 << 20))]))
