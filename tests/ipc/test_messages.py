"""Messages: what `dump` makes comes back, and bytes that don't unpickle give `WireError` alone."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioenv.errors import WireError
from aioenv.ipc.messages import (
    Failure,
    StepReply,
    StepRequest,
    dump,
    dump_code,
    dump_step,
    load,
    load_step,
)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Garbage may ask the unpickler for a table of 2**32 entries: here it is refused."""
    resource = pytest.importorskip("resource")
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


MESSAGES = [
    StepRequest((0, 2), [[1, "two"], None]),
    StepReply([(0, ("a", "b"))], [{"x": np.arange(3)}], [["text"]], [Failure(1, "E", "m", "tb", None)]),
    {"nested": [{1: (2.5, None, b"bytes")}, {frozenset([1])}.pop()]},
]


def only_wire_error(data: bytes) -> None:
    with little_memory(), contextlib.suppress(WireError):
        load(data)  # chance may have made a good pickle of it


@settings(max_examples=400, deadline=None)
@given(data=st.binary(max_size=200))
def test_unpickling_garbage_gives_wire_error_alone(data):
    only_wire_error(data)
    only_wire_error(b"\x80\x05" + data)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_unpickling_a_mutated_message_gives_wire_error_alone(message):
    data = dump(message)
    for at in range(len(data)):
        only_wire_error(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        only_wire_error(data[:at] + b"r" + data[at + 1 :])  # LONG_BINPUT
        with pytest.raises(WireError, match="does not unpickle"):
            load(data[:at])


class AtLoad:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raise_it(error: type[BaseException]) -> None:
    raise error()


@pytest.mark.parametrize("error", [OSError, RecursionError, MemoryError, SystemExit, MuteError, pickle.PickleError])
def test_whatever_unpickling_raises_is_a_wire_error(error):
    with pytest.raises(WireError, match=f"does not unpickle: {error.__name__}") as caught:
        load(dump(AtLoad(raise_it, error)))
    assert type(caught.value.__cause__) is error


def test_ctrl_c_is_not_a_wire_error():
    with pytest.raises(KeyboardInterrupt):
        load(dump(AtLoad(raise_it, KeyboardInterrupt)))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_messages_come_back(wrap):
    request, reply, data = (load(wrap(dump(message))) for message in MESSAGES)
    assert request == MESSAGES[0] and type(request) is StepRequest
    assert data == MESSAGES[2]
    assert reply.failures == MESSAGES[1].failures and reply.infos[0]["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "request_",
    [
        StepRequest(range(16, 32), None),
        StepRequest(range(3, 4), []),
        StepRequest(range(4), [["a", "b", "c", "d"]]),
        StepRequest(range(2), None, [1, "two"]),
        StepRequest((0, 2, 7), None),
        StepRequest(None, [["a"]]),
        StepRequest(None, None, [None]),
    ],
)
@pytest.mark.parametrize("wrap", [bytes, memoryview])
def test_steps_come_back(request_, wrap):
    back = load_step(wrap(dump_step(request_)))
    assert type(back) is StepRequest
    assert back._replace(objects=back.objects or None) == request_._replace(objects=request_.objects or None)


def test_steps_of_all_rows_and_of_runs_are_no_pickles():
    assert load_step(b"") == StepRequest(None, None)
    run = dump_step(StepRequest(range(5, 9), None))
    assert len(run) < 10
    for cut in range(1, len(run)):
        with pytest.raises(WireError, match="does not unpickle"):
            load_step(run[:cut])
    with pytest.raises(WireError, match="does not unpickle"):
        load_step(run + b"x")


def in_another_process(data: bytes) -> str:
    code = "import sys; from aioenv.ipc.messages import load; print(load(sys.stdin.buffer.read())())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=60, env=env)
    return done.stdout.decode().strip() or done.stderr.decode()


class Answer:
    def __call__(self) -> int:
        return 42


@pytest.mark.parametrize("pack", [dump, dump_code])
def test_what_is_defined_in_main_travels_by_value(pack, monkeypatch):
    offset = 40
    assert in_another_process(pack(lambda: offset + 2)) == "42"
    monkeypatch.setattr(Answer, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Answer", Answer, raising=False)
    assert in_another_process(pack(Answer())) == "42"
