"""A worker that answers plain steps in C says, byte for byte, what it says in Python, infos of floats among it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

import aioenv
from aioenv import frame_io, speedups
from aioenv.batching import autoreset
from aioenv.batching.infos import MAX_SCHEMAS, Group
from aioenv.batching.layout import Layout
from aioenv.batching.merge import SchemaTable, merge
from aioenv.errors import EpisodesDone
from aioenv.host import running
from aioenv.host.service import Begun
from aioenv.host.single import rows as rows_of_worker
from aioenv.host.single.service import EnvService
from aioenv.host.worker import _Loop
from aioenv.wire.decoder import Decoder
from aioenv.wire.frames import HEADER_BYTES, Encoder, Frame, Kind
from aioenv.wire.messages import (
    Call,
    Failure,
    ResetRequest,
    Start,
    StepReply,
    StepRequest,
    dump,
    dump_code,
    dump_step,
    load,
    load_columns,
)

compiled = pytest.mark.skipif(not speedups.compiled, reason=f"not compiled: {speedups.why_not}")

GENERATION = 5
STEPS = 30


@pytest.fixture(autouse=True)
def a_worker_within(monkeypatch):
    """This process is not a worker's own: nothing in it is settled or frozen."""
    monkeypatch.setattr(running, "_worker", running._Worker())
    running.share_here(memoryview(bytearray(4)).cast("I"))


def python_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "serve_express", None)


def all_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serve_express", "read_frame", "write_frame", "spin"):
        monkeypatch.setattr(speedups, name, None)
    monkeypatch.setattr(rows_of_worker, "compiled", False)
    monkeypatch.setattr(autoreset, "step_rows", None)


# ------------------------------------------------------------ envs


class Told(gym.Env[Any, Any]):
    """An env of which a story says what its steps and resets give."""

    def __init__(self, story: str, row: int) -> None:
        self.story, self.row = STORIES[story], row
        self.observation_space, self.action_space = self.story.space, self.story.actions
        self.n = self.episode = 0
        self.kept: Any = None  # an action

    def _observation(self) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Discrete):
            return self.n % 99
        return np.full(space.shape, (10 * self.n + self.row) % 200, space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode += 1
        given = self.story.reset(self.row, self.episode)
        if isinstance(given, BaseException):
            raise copy(given)
        return (self._observation(), given) if isinstance(given, dict) else given

    def step(self, action: Any) -> Any:
        self.n += 1
        if self.kept is None:
            self.kept = action
        given = self.story.step(self, self.n)
        if isinstance(given, BaseException):
            raise copy(given)  # which has no traceback yet
        if not isinstance(given, dict):
            return given
        ends = (self.n + self.row) % 7 == 0
        reward = float(np.sum(action)) + self.n / 3
        five = {"obs": self._observation(), "reward": reward, "ends": ends, "cut": False, "info": {}}
        assert five.keys() >= given.keys()
        return tuple({**five, **given}.values())


BOX = spaces.Box(-9, 9, (3,), np.float32)


class Story(NamedTuple):
    """What a step of an env gives: what is other than usual, an exception, or something else; likewise a reset."""

    step: Callable[[Told, int], Any]
    reset: Callable[[int, int], Any] = lambda row, episode: {}
    space: spaces.Space[Any] = BOX
    actions: spaces.Space[Any] = spaces.Discrete(5)
    rows: int = 4


def infos(make: Callable[[int, int], Any], **more: Any) -> Story:
    """Infos alone, by row and number of the step."""
    return Story(lambda env, n: {"info": make(env.row, n)}, **more)


def among(odd: Callable[[], Any]) -> Story:
    """Floats, and now and then, in one row, something odd among them, or in the place of the dict."""

    def make(row: int, n: int) -> Any:
        usual = {"x": n / 7, "y": np.float32(row) / np.float32(3)}
        if row != 2 or n % 5:
            return usual
        value = odd()
        return value if type(value) is not tuple else {**usual, **dict([value])}

    return infos(make)


def at(where: dict[tuple[int, int], Any], **more: Any) -> Story:
    """Floats; at some rows and steps something else is given."""
    return Story(lambda env, n: where.get((env.row, n), {"info": {"x": n + env.row / 9}}), **more)


class Sub(float):
    """A float of a class of its own."""


class Name(str):
    """A text of a class of its own."""


class Unpicklable:
    def __reduce__(self) -> Any:
        raise LookupError("it stays here")


NUMBERS = [0.1, -0.0, float("nan"), float("inf"), -1.0, 5e-324, 1e308]
FLOATS = [float, np.float64, np.float32, np.float16]
STORIES: dict[str, Story] = {
    "nothing": Story(lambda env, n: {}),
    "floats": infos(lambda row, n: {"x": n + row / 9, "y": -n / 7}),
    "float64": infos(lambda row, n: {"x": np.float64(n + row / 9), "y": np.float64(row)}),
    "float32": infos(lambda row, n: {"x": np.float32(n + row / 9)}),
    "float16": infos(lambda row, n: {"x": np.float16(n + row / 9), "y": 2.0}),
    "one of each": infos(lambda row, n: {kind.__name__: kind(n + row / 9) for kind in FLOATS}),
    "numbers of all sorts": infos(lambda row, n: {kind.__name__: kind(NUMBERS[(n + row) % 5]) for kind in FLOATS}),
    "large and small": infos(lambda row, n: {"x": NUMBERS[(n + row) % 7], "y": np.float64(NUMBERS[n % 7])}),
    "each row its own type": infos(lambda row, n: {"x": FLOATS[row](n)}),
    "each row its own key": infos(lambda row, n: {"abcd"[row]: n / 3}),
    "each step its own type": infos(lambda row, n: {"x": FLOATS[n % 4](row)}),
    "rows and steps by turns": infos(lambda row, n: {"x": FLOATS[(n + row) % 3](row), "k" * (1 + n % 2): 1.0}),
    "some rows": infos(lambda row, n: {"x": n / 3} if (row + n) % 3 else {}),
    "one row": infos(lambda row, n: {"x": n / 3} if row == n % 4 else {}),
    "the order of keys": infos(lambda row, n: dict(sorted({"x": 1.0, "y": n / 9}.items(), reverse=bool(n & row & 1)))),
    "many keys": infos(lambda row, n: {f"k{i}": n + i / 9 for i in range(64)}),
    "a key too many": infos(lambda row, n: {f"k{i}": n + i / 9 for i in range(65)}),
    "eight sorts": infos(lambda row, n: {f"k{row % 8}": n / 3}, rows=11),
    "nine sorts": infos(lambda row, n: {f"k{row % 9}": n / 3}, rows=20),
    "a sort more each step": infos(lambda row, n: {f"k{row % 2 * n}": n / 3}),
    "no sort is known twice": infos(lambda row, n: {f"k{n} of {row}": 1.0}),
    "the very same dict": infos(lambda row, n: SAME[row]),
    "keys of surrogates": infos(lambda row, n: {"\ud800x": 1.0 * n, "\U0001f600": 2.0}),
    "keys that are no texts": infos(lambda row, n: {1: 1.0, (2, "x"): 2.0 * n, None: 3.0}),
    "keys that are equal": infos(lambda row, n: {[1, True, 1.0, np.int64(1)][row]: 1.0 * n}),
    "keys of a class of text": infos(lambda row, n: {Name("x") if row == n % 4 else "x": 1.0 * n, np.str_("y"): 2.0}),
    "an empty key": infos(lambda row, n: {"": 1.0 * n}),
    "a key that is long": infos(lambda row, n: {"key" * 999: 1.0 * n}),
    "an int among floats": among(lambda: ("x", 3)),
    "a huge int among floats": among(lambda: ("x", 1 << 70)),
    "a bool among floats": among(lambda: ("x", True)),
    "a dict among floats": among(lambda: ("x", {"deep": 0.5})),
    "an empty dict among floats": among(lambda: ("x", {})),
    "an array among floats": among(lambda: ("y", np.arange(3.0))),
    "an array of one among floats": among(lambda: ("y", np.ones(1))),
    "an array of no axes among floats": among(lambda: ("y", np.array(2.5))),
    "None among floats": among(lambda: ("y", None)),
    "a text among floats": among(lambda: ("y", "text")),
    "a complex number among floats": among(lambda: ("y", 1j)),
    "a float of another class": among(lambda: ("y", Sub(0.5))),
    "another type of float": among(lambda: ("y", 0.5)),
    "a key more": among(lambda: ("z", 0.5)),
    "a key less": among(lambda: {"y": np.float32(0.5)}),
    "no key": among(lambda: {}),
    "a mask": among(lambda: ("_x", 0.5)),
    "a last observation": among(lambda: ("final_obs", 0.5)),
    "another order": among(lambda: {"y": np.float32(0.5), "x": 0.5}),
    "a key that is a number": among(lambda: (7, 0.5)),
    "what can't be pickled": among(lambda: ("z", Unpicklable())),
    "a dict of another class": among(lambda: OrderedDict(x=0.5, y=np.float32(1))),
    "no dict": among(lambda: None),
    "a list": among(lambda: [("x", 0.5)]),
    "raises": at({(1, 4): LookupError("lost"), (0, 9): LookupError("lost"), (3, 9): KeyError(7)}),
    "raises what is no Exception": at({(1, 4): KeyboardInterrupt(), (2, 6): GeneratorExit()}),
    "raises in the first row": at({(0, n): ValueError(n) for n in range(1, STEPS, 3)}),
    "raises in the last row": at({(3, n): ValueError(n) for n in range(1, STEPS, 3)}),
    "four values": at({(2, 5): (np.zeros(3, np.float32), 0.0, False, {})}),
    "None": at({(2, 5): None}),
    "a dtype": at({(2, 9): {"obs": np.arange(3.0)}}),
    "a dtype that can't be cast": at({(2, 9): {"obs": np.array(["x"] * 3)}}),
    "a shape": at({(2, 9): {"obs": np.zeros(4, np.float32), "info": {"x": 1.0}}}),
    "a list to see": at({(2, 9): {"obs": [1, 2, 3]}}),
    "rewards": at({(1, 4): {"reward": np.float32(0.1)}, (2, 4): {"reward": 7}, (3, 4): {"reward": np.int8(-1)}}),
    "a reward that is none": at({(1, 9): {"reward": "much"}}),
    "flags": at({(1, 4): {"ends": np.True_}, (2, 5): {"cut": True}, (3, 6): {"ends": True, "cut": np.True_}}),
    "flags that are numbers": at({(1, 9): {"ends": 1}}),
    "resets that tell floats": infos(lambda row, n: {"x": n / 3}, reset=lambda row, episode: {"x": 0.5 + episode}),
    "resets that tell more": infos(lambda row, n: {"x": n / 3}, reset=lambda row, episode: {"x": 0.5, "new": episode}),
    "resets alone tell": Story(lambda env, n: {}, reset=lambda row, episode: {"x": 0.5 * episode + row}),
    "a reset that raises": at({}, reset=lambda row, episode: LookupError("lost") if (row, episode) == (2, 3) else {}),
    "no further episode": at({}, reset=lambda row, episode: EpisodesDone("all") if (row, episode) == (2, 3) else {}),
    "a reset that gives no pair": at({}, reset=lambda row, episode: 7 if (row, episode) == (2, 3) else {"x": 1.0}),
    "numbers to see": infos(lambda row, n: {"x": n / 3}, space=spaces.Discrete(99)),
    "images": infos(lambda row, n: {"x": n / 3}, space=spaces.Box(0, 255, (8, 8, 3), np.uint8)),
    "nothing to see": infos(lambda row, n: {"x": n / 3}, space=spaces.Box(0, 1, (0,), np.float32)),
    "actions that are arrays": infos(lambda row, n: {"x": n / 3}, actions=spaces.Box(-1, 1, (2, 3), np.float32)),
    "actions of no bytes": infos(lambda row, n: {"x": n / 3}, actions=spaces.Box(-1, 1, (0,), np.float32)),
    "actions that are kept": Story(
        lambda env, n: {"info": {"x": float(np.sum(env.kept))}}, actions=spaces.Box(-1, 1, (2,), np.float64)
    ),
    "actions that are told": Story(lambda env, n: {"info": {"x": str(type(env.kept)), "y": env.kept}}),
    "one row alone": infos(lambda row, n: {"x": n / 3}, rows=1),
    "actions that are dicts": infos(lambda row, n: {"x": n / 3}, actions=spaces.Dict(a=spaces.Discrete(3))),
    "observations that are dicts": Story(
        lambda env, n: {"obs": {"a": n % 3}, "info": {"x": 1.0}},
        reset=lambda row, episode: ({"a": 0}, {}),
        space=spaces.Dict(a=spaces.Discrete(3)),
    ),
}  # fmt: skip
SAME = [{"x": row / 3} for row in range(4)]


def make_env(story: str, row: int) -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1") if story == "CartPole" else Told(story, row)


def rows_of(story: str) -> int:
    return 4 if story == "CartPole" else STORIES[story].rows


def actions_of(story: str) -> list[list[bytes]]:
    """For each step, the arrays of actions of all rows."""
    rng = np.random.default_rng(0)
    space = spaces.Discrete(2) if story == "CartPole" else STORIES[story].actions
    layout, n = Layout(space), rows_of(story)
    bits = [[rng.integers(0, 2, (n, *leaf.shape)) for leaf in layout.leaves] for _ in range(2 * STEPS)]
    return [[array.astype(leaf.dtype).tobytes() for array, leaf in zip(of, layout.leaves, strict=True)] for of in bits]


# ------------------------------------------------------------ a worker on a thread


class Session:
    """The loop of a worker, on a thread, with envs of a story; and its parent's end.

    Attributes:
        ended: what the loop raised; None if nothing.
        raw: the bytes of all replies since the envs were configured.
    """

    current: Session

    def __init__(self, story: str, mode: AutoresetMode, poll_s: float = 0.0) -> None:
        Session.current = self
        self.rows = rows_of(story)
        self.mine, self.theirs = socket.socketpair()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.mark = memoryview(bytearray(4)).cast("I")
        self.ended: BaseException | None = None
        self.raw: list[bytes] = []
        self._requests = 0
        self._poll_s = poll_s
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        envs = [dump_code(partial(make_env, story, row)) for row in range(self.rows)]
        service = dump_code(partial(EnvService, envs, mode, False))
        start = Start([], None, (), service, None, None, 0.0, None)
        assert self.ask(Kind.START, tail=dump_code(start)).kind is Kind.READY
        self.call("configure", None, None, 0, False)
        self.raw.clear()

    def _serve(self) -> None:
        running.share_here(self.mark)
        try:
            loop = _Loop(self.theirs.fileno(), self.theirs.fileno(), {})
            loop._link.poll(self._poll_s)
            loop.run()
        except BaseException as exc:
            self.ended = exc
        finally:
            self.theirs.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.mine.close()
        self.thread.join()

    def encode(self, kind: Kind, fixed: Sequence[bytes] = (), tail: bytes = b"") -> bytes:
        self._requests += 1
        return b"".join(self.encoder.encode(kind, self._requests, GENERATION, fixed, tail))

    def take(self) -> Frame:
        """The next reply."""
        head = self._receive(HEADER_BYTES)
        fixed, tail = struct.unpack_from("<II", head, 12)
        self.raw.append(head + self._receive(fixed + tail))
        self.decoder.feed(self.raw[-1])
        frame = self.decoder.next_frame()
        assert frame is not None
        return frame

    def _receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.mine.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def ask(self, kind: Kind, fixed: Sequence[bytes] = (), tail: bytes = b"") -> Frame:
        self.mine.sendall(self.encode(kind, fixed, tail))
        frame = self.take()
        assert (frame.request, frame.generation) == (self._requests, GENERATION)
        return frame

    def call(self, method: str, *args: Any) -> Frame:
        return self.ask(Kind.CALL, tail=dump_code(Call(method, args, {})))

    def reset(self, *rows: int) -> Frame:
        rows = rows or tuple(range(self.rows))
        return self.ask(Kind.RESET, tail=dump(ResetRequest(rows, rows, None, len(rows) == self.rows)))

    def end(self) -> BaseException | None:
        """Close the stream as a parent does, and wait; what the loop raised."""
        self.mine.shutdown(socket.SHUT_WR)
        self.thread.join()
        return self.ended


def plain(frame: Frame) -> Any:
    """A reply without what depends on how Python's frames lay: the outer lines of tracebacks."""
    tail: Any = bytes(frame.tail)
    if len(tail) and (frame.kind is Kind.FAILURE or load_columns(frame.tail) is None):
        said = load(tail)
        if isinstance(said, StepReply):
            tail = str(said._replace(failures=[without_lines(failure) for failure in said.failures]))
        elif isinstance(said, Failure):
            tail = without_lines(said)
    return frame.kind, frame.request, b"".join(map(bytes, frame.fixed)), tail


def without_lines(failure: Failure) -> Any:
    here = [line for line in failure.traceback.splitlines() if __file__ in line]
    return failure.row, failure.type_name, failure.message, here


# rows that follow one another, of four and more; None: all
RUNS = (range(2), range(2, 4), None, range(1, 3), range(4), range(3, 4), range(1), None, range(1, 4))


def run_of(actions: list[bytes], rows: range, n: int) -> tuple[list[bytes], bytes]:
    """Actions of some of n rows, and the tail of a request for these."""
    each = [len(data) // n for data in actions]
    some = [data[rows.start * size : rows.stop * size] for data, size in zip(actions, each, strict=True)]
    return some, dump_step(StepRequest(rows, None))


def play(
    story: str, mode: AutoresetMode, poll_s: float = 0.0, *, interludes: bool = False, runs: bool = False
) -> tuple[list[bytes], Any]:
    """The bytes of all replies, and what they say."""
    frames = []
    steps = iter(actions_of(story))
    with Session(story, mode, poll_s) as session:
        frames.append(session.reset())
        for number in range(STEPS):
            rows = RUNS[number % len(RUNS)] if runs else None
            asked = (next(steps),) if rows is None else run_of(next(steps), rows, session.rows)
            frames.append(session.ask(Kind.STEP, *asked))
            if not interludes:
                continue
            match number:
                case 5 | 13:
                    frames.append(session.call("call_envs", [0, 2], "render_mode", (), {}))
                case 8 | 21:
                    frames.append(session.reset(1, 3))
                case 11:
                    tail = dump_step(StepRequest(range(1, 3), None))
                    some = [data[len(data) // 4 : -len(data) // 4] for data in next(steps)]
                    frames.append(session.ask(Kind.STEP, some, tail))
                case 16:
                    tail = dump_step(StepRequest(None, None, [np.int64(1)] * 4))
                    frames.append(session.ask(Kind.STEP, next(steps), tail))
                case 18 | 24:
                    requests = [session.encode(Kind.STEP, next(steps)) for _ in range(3)]
                    session.mine.sendall(b"".join(requests))
                    frames += [session.take() for _ in requests]
                case 20:
                    frames.append(session.call("no_such_method"))
                case 26:
                    frames.append(session.ask(Kind.STEP, [b"too short"]))
                case 27:
                    session.call("configure", None, None, 0, False)  # arrays of its own, all anew
                    frames.append(session.reset())
        assert session.end() is None
        assert session.mark[0] == 0, "no row runs any more"
        return session.raw, list(map(plain, frames))


def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve_express` gives from now on."""
    given: list[Any] = []
    inner: Any = speedups.serve_express

    def noted(*args: Any) -> Any:
        given.append(inner(*args))
        return given[-1]

    monkeypatch.setattr(speedups, "serve_express", noted)
    return given


# stories of which C has no part
NOT_EXPRESS = ("actions that are dicts", "observations that are dicts")


@compiled
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("story", ["CartPole", *STORIES])
def test_replies_are_the_same_in_c_and_in_python(monkeypatch, story, mode):
    given = served(monkeypatch)
    raw, said = play(story, mode)
    assert bool(given) == (story not in NOT_EXPRESS)
    python_answers(monkeypatch)
    assert play(story, mode)[0] == raw
    all_in_python(monkeypatch)
    assert play(story, mode)[1] == said


@compiled
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("story", ["CartPole", *STORIES])
def test_steps_of_successive_rows_are_the_same_in_c_and_in_python(monkeypatch, story, mode):
    given = served(monkeypatch)
    raw, said = play(story, mode, runs=True)
    if story in ("CartPole", "nothing", "floats"):
        assert given.count(-1) > STEPS // 3, "C answers these, too"
    python_answers(monkeypatch)
    assert play(story, mode, runs=True)[0] == raw
    all_in_python(monkeypatch)
    assert play(story, mode, runs=True)[1] == said


# how many of the 30 steps of a story C answers all by itself, under NEXT_STEP; with the first, sorts become known
ALONE = {
    "CartPole": 30,
    "nothing": 30,
    "floats": 29,
    "one of each": 29,
    "many keys": 29,
    "a key too many": 0,
    "eight sorts": 29,
    "nine sorts": 0,
    "each row its own type": 29,
    "some rows": 29,
    "keys of surrogates": 29,
    "an int among floats": 24,
    "another order": 28,  # which is a sort of its own
    "no dict": 3,  # until there is none
    "raises": 27,
    "resets that tell floats": 30,  # with the first reset
    "numbers to see": 29,
    "images": 29,
    "nothing to see": 29,
    "actions that are arrays": 29,
    "actions of no bytes": 29,
}


@compiled
@pytest.mark.parametrize("story", ALONE)
def test_c_answers_whatever_is_usual(monkeypatch, story):
    given = served(monkeypatch)
    play(story, AutoresetMode.NEXT_STEP)
    assert given.count(-1) == ALONE[story]


class Sharing(Told):
    """Its infos are one dict of all envs, as if it were an attribute of the class."""

    told: ClassVar[dict[str, Any]] = {}

    def step(self, action: Any) -> Any:
        obs, reward, ends, cut, info = super().step(action)
        Sharing.told.update(info)
        return obs, reward, ends, cut, Sharing.told


@compiled
def test_a_dict_that_envs_share_is_read_at_the_same_time(monkeypatch):
    monkeypatch.setitem(globals(), "make_env", lambda story, row: Sharing(story, row))
    said = play("floats", AutoresetMode.NEXT_STEP)
    python_answers(monkeypatch)
    assert play("floats", AutoresetMode.NEXT_STEP) == said


@compiled
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "story",
    [
        "CartPole",
        "floats",
        "each row its own type",
        "an int among floats",
        "actions that are arrays",
        "raises",
        "images",
    ],
)
def test_whatever_comes_between_steps_the_replies_are_the_same(monkeypatch, story, mode):
    raw, said = play(story, mode, interludes=True)
    with monkeypatch.context() as patch:
        python_answers(patch)
        assert play(story, mode, interludes=True)[0] == raw
        all_in_python(patch)
        assert play(story, mode, interludes=True)[1] == said


@compiled
@pytest.mark.parametrize("story", ["CartPole", "floats", "an int among floats", "raises"])
def test_a_worker_that_polls_says_the_same(monkeypatch, story):
    raw, said = play(story, AutoresetMode.NEXT_STEP, interludes=True)
    assert play(story, AutoresetMode.NEXT_STEP, 1.0, interludes=True) == (raw, said)
    python_answers(monkeypatch)
    assert play(story, AutoresetMode.NEXT_STEP, 1.0, interludes=True)[0] == raw


def both(monkeypatch: pytest.MonkeyPatch, outcome: Callable[[], Any]) -> Any:
    """What comes of something in C; in Python it must be the same."""
    in_c = outcome()
    with monkeypatch.context() as patch:
        python_answers(patch)
        assert outcome() == in_c
        all_in_python(patch)
        assert outcome() == in_c
    return in_c


def told(exc: BaseException | None) -> str:
    return "" if exc is None else f"{type(exc).__name__}: {exc}"


@compiled
@pytest.mark.parametrize("place", range(HEADER_BYTES + 4 * 8))
def test_a_spoilt_request_ends_the_worker_as_in_python(monkeypatch, place):
    def outcome() -> str:
        with Session("floats", AutoresetMode.NEXT_STEP) as session:
            session.reset()
            for _ in range(2):
                session.ask(Kind.STEP, [bytes(4 * 8)])
            data = bytearray(session.encode(Kind.STEP, [bytes(4 * 8)]))
            data[place] ^= 1 << place % 8
            session.mine.sendall(data)
            with pytest.raises(EOFError):
                session.take()
            session.thread.join()
            return told(session.ended)

    assert both(monkeypatch, outcome).startswith("WireError: ")


@compiled
@pytest.mark.parametrize("sent", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 4 * 8 - 1])
def test_when_the_parent_closes_the_stream_the_worker_ends(monkeypatch, sent):
    def outcome() -> str:
        with Session("floats", AutoresetMode.NEXT_STEP) as session:
            session.reset()
            session.ask(Kind.STEP, [bytes(4 * 8)])
            session.mine.sendall(session.encode(Kind.STEP, [bytes(4 * 8)])[:sent])
            ended = session.end()
            assert len(session.raw) == 2 and not session.mine.recv(1), "there is no reply to part of a request"
            return told(ended)

    assert not both(monkeypatch, outcome)


class Closing(Told):
    """In its third step the parent is gone."""

    def step(self, action: Any) -> Any:
        if self.n == 2:
            Session.current.mine.shutdown(socket.SHUT_RDWR)
        return super().step(action)


class Leaving(Told):
    """In its third step it ends the process, if it is not in the first row."""

    def step(self, action: Any) -> Any:
        if self.n == 2 and self.row:
            raise SystemExit(3)
        return super().step(action)


@compiled
@pytest.mark.parametrize("kind", [Closing, Leaving])
def test_what_ends_a_worker_amid_a_step_ends_it_as_in_python(monkeypatch, kind):
    monkeypatch.setitem(globals(), "make_env", lambda story, row: kind(story, row))

    def outcome() -> Any:
        with Session("floats", AutoresetMode.NEXT_STEP) as session:
            session.reset()
            for _ in range(2):
                session.ask(Kind.STEP, [bytes(4 * 8)])
            session.mine.sendall(session.encode(Kind.STEP, [bytes(4 * 8)]))
            with pytest.raises(EOFError):
                session.take()
            session.thread.join()
            return type(session.ended), str(session.ended), session.mark[0]

    ended, text, mark = both(monkeypatch, outcome)
    assert (ended, text, mark) == ((BrokenPipeError, str(BrokenPipeError(32, "Broken pipe")), 0), (SystemExit, "3", 2))[
        kind is Leaving
    ]


# ------------------------------------------------------------ in turn, without a thread


class Desk:
    """A service, and both ends of its channel; plain steps are answered when a test says so."""

    def __init__(self, make: Callable[[int], gym.Env[Any, Any]], rows: int, mode: str = "NextStep") -> None:
        Desk.make = staticmethod(make)  # type: ignore[method-assign]
        envs = [dump_code(partial(made_at_desk, row)) for row in range(rows)]
        self.service = EnvService(envs, AutoresetMode(mode), False)
        self.service.describe()
        self.service.configure(None, None, 0, False)
        self.rows = rows
        self.mine, self.theirs = socket.socketpair()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.its_encoder = Encoder()
        self.its_decoder = Decoder(self.service.place, self.service.expect)
        reset = dump(ResetRequest(tuple(range(rows)), (None,) * rows, None, True))
        self.service.handle(Frame(Kind.RESET, 0, GENERATION, (), memoryview(reset)))

    make: Callable[[int], gym.Env[Any, Any]]

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.mine.close()
        self.theirs.close()

    def encode(self, kind: Kind = Kind.STEP, fixed: Sequence[bytes] | None = None, tail: bytes = b"") -> bytes:
        if fixed is None:
            fixed = [bytes(len(view)) for view in self.service.expect() or ()]
        return b"".join(self.encoder.encode(kind, 7, GENERATION, fixed, tail))

    def serve(self, seconds: float = 0.0, write_fd: int | None = None) -> Any:
        fd = self.theirs.fileno()
        plan = self.service.express()
        assert plan is not None and speedups.serve_express is not None
        write_fd = fd if write_fd is None else write_fd
        return speedups.serve_express(fd, write_fd, self.its_decoder, self.its_encoder, plan, seconds)

    def take(self) -> Frame:
        frame = None
        while (frame := self.decoder.next_frame()) is None:
            self.decoder.feed(self.mine.recv(1 << 20))
        return frame

    def step(self) -> tuple[Any, Begun | None]:
        """A step in C: fixed part and tail of the reply, and where C stopped, if it did."""
        self.mine.sendall(self.encode())
        got = self.serve()
        if isinstance(got, tuple):
            begun = Begun.of(got)
            assert begun[1:3] == (7, GENERATION)
            infos_so_far = list(begun.infos)
            reply = self.service.handle(begun)
            frame = Frame(Kind.RESULT, 7, GENERATION, reply.fixed, memoryview(reply.tail))
            return plain(frame), begun._replace(infos=infos_so_far)
        assert got == -1
        return plain(self.take()), None

    def frame(self) -> Frame:
        """A request for a step, read already."""
        return Frame(Kind.STEP, 7, GENERATION, self.service.expect() or (), memoryview(b""))

    def step_in_python(self) -> Any:
        reply = self.service.handle(self.frame())
        return plain(Frame(Kind.RESULT, 7, GENERATION, reply.fixed, memoryview(reply.tail)))


def made_at_desk(row: int) -> gym.Env[Any, Any]:
    return Desk.make(row)


def telling(story: str) -> Desk:
    return Desk(lambda row: Told(story, row), rows_of(story))


@compiled
def test_one_call_answers_steps_as_long_as_they_come():
    outcome: list[Any] = []
    with telling("floats") as desk:
        desk.step()  # the sort is known from here on
        worker = threading.Thread(target=lambda: outcome.append(desk.serve(60.0)))
        data = desk.encode()
        desk.mine.sendall(data)
        worker.start()
        for number in range(STEPS):
            assert len(desk.take().tail)
            desk.mine.sendall(desk.encode() if number < STEPS - 1 else desk.encode(Kind.CALL, (), b"call"))
        worker.join()
        assert outcome == [HEADER_BYTES + 4], "what is no step is left in the buffers"
        frame_io.look(desk.its_decoder, outcome[0])
        frame = desk.its_decoder.next_frame()
        assert frame is not None and (frame.kind, bytes(frame.tail)) == (Kind.CALL, b"call")
        desk.mine.sendall(desk.encode())
        assert desk.serve(1e-6) == -1, "and nothing came in time"


@compiled
def test_a_request_may_come_in_pieces():
    with telling("floats") as desk:
        desk.step()
        for cut in range(1, HEADER_BYTES + 4 * 8):
            data = desk.encode()
            desk.mine.sendall(data[:cut])
            assert desk.serve() == cut
            frame_io.look(desk.its_decoder, cut)
            desk.mine.sendall(data[cut:])
            while not desk.its_decoder.frames:
                assert desk.serve() is None, "it is amid a frame"
                frame_io.read(desk.theirs.fileno(), desk.its_decoder)
            assert desk.its_decoder.next_frame().kind is Kind.STEP  # type: ignore[union-attr]
            desk.mine.sendall(desk.encode())
            assert desk.serve() == -1, "it goes on with whole ones"
            desk.take()


@compiled
def test_where_there_is_no_step_to_answer_c_says_so():
    with telling("floats") as desk:
        desk.theirs.setblocking(False)
        assert desk.serve() is None, "there is nothing"
        for data in (
            desk.encode() + desk.encode(),
            desk.encode(tail=b"tail"),
            desk.encode(fixed=[b"short"]),
            desk.encode(Kind.RESET),
            b"x",
            b"nonsense" * 50,
        ):
            chain = desk.its_decoder.chain
            desk.mine.sendall(data)
            assert desk.serve() == len(data) and desk.its_decoder.chain == chain
        desk.mine.close()
        assert desk.serve() == 0
        desk.theirs.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            desk.its_decoder.error = None
            frame_io.read(-1, desk.its_decoder)


@compiled
def test_a_reply_that_is_larger_than_the_socket_is_written_whole():
    space = spaces.Box(0, 255, (1 << 20,), np.uint8)

    class Large(Told):
        def __init__(self, row: int) -> None:
            super().__init__("floats", row)
            self.observation_space = space

        def _observation(self) -> Any:
            return np.full(space.shape, self.n + 2 * self.row, np.uint8)

    for blocking in (True, False):
        with Desk(Large, 2) as desk:
            desk.step()
            desk.theirs.setblocking(blocking)  # if it does not wait, it tries again
            outcome: list[Any] = []
            desk.mine.sendall(desk.encode())
            worker = threading.Thread(target=lambda desk=desk, outcome=outcome: outcome.append(desk.serve()))
            worker.start()
            frame = desk.take()
            worker.join()
            assert outcome == [-1]
            observations = b"".join(map(bytes, frame.fixed))[: 2 << 20]
            assert observations == b"\2" * (1 << 20) + b"\4" * (1 << 20)


@compiled
def test_two_descriptors_do_as_well_as_one():
    with telling("floats") as desk:
        desk.step()
        ours, theirs = os.pipe()
        desk.mine.sendall(desk.encode())
        assert desk.serve(write_fd=theirs) == -1
        desk.decoder.feed(os.read(ours, 1 << 16))
        assert desk.decoder.next_frame() is not None
        os.close(ours)
        desk.mine.sendall(desk.encode())
        with pytest.raises(BrokenPipeError):
            desk.serve(write_fd=theirs)
        os.close(theirs)
        desk.mine.sendall(desk.encode())
        with pytest.raises(OSError, match="Bad file descriptor"):
            desk.serve(write_fd=theirs)


class Vandal(Told):
    """In its third step it takes its worker apart."""

    def __init__(self, row: int) -> None:
        super().__init__("floats", row)

    def step(self, action: Any) -> Any:
        if self.n == 2 and self.row == 1:
            Vandal.act()
        return super().step(action)

    act: Callable[[], Any]


VANDALISM: dict[str, Callable[[EnvService], Any]] = {
    "due": lambda service: service._stepper.due.clear(),
    "steps": lambda service: service._stepper._steps.clear(),
    "more steps": lambda service: service._stepper._steps.append(print),
    "resets": lambda service: service._stepper._resets.clear(),
    "last": lambda service: service._rows._last.clear(),
    "more of last": lambda service: service._rows._last.append(1),
    "sorts": lambda service: service._gatherer.sorts.clear(),
    "seeds": lambda service: service._stepper._seeds.update({1: 2}),
    "garbage": lambda service: gc.collect(),
}


@compiled
@pytest.mark.parametrize("name", VANDALISM)
def test_an_env_that_takes_its_worker_apart_does_c_no_harm(name):
    with Desk(Vandal, 4) as desk:
        Vandal.act = staticmethod(partial(VANDALISM[name], desk.service))  # type: ignore[method-assign]
        desk.step()
        desk.step()
        breaks = name not in ("sorts", "seeds", "garbage")
        if not breaks:
            desk.step()
            desk.step()
            return
        desk.mine.sendall(desk.encode())
        begun = Begun.of(desk.serve())
        infos_of_rows = [(row, {"x": row / 9 + 3, "y": -3 / 7}) for row in range(4)]
        assert begun.infos == infos_of_rows[: len(begun.infos)]
        assert begun.row == -1 and type(begun.outcome) is ValueError
        with pytest.raises(ValueError, match="one of everything a row"):
            desk.service.handle(begun)


@compiled
def test_a_due_that_is_no_number_is_not_usual():
    with Desk(Vandal, 4) as desk:
        Vandal.act = staticmethod(lambda: desk.service._stepper.due.__setitem__(2, "x"))  # type: ignore[method-assign]
        desk.step()
        desk.step()
        desk.mine.sendall(desk.encode())
        try:
            begun = Begun.of(desk.serve())
        except SystemError as exc:
            pytest.fail(f"{exc}")
        assert begun.row == 2


# ------------------------------------------------------------ infos that are taken back


class Scripted(gym.Env[Any, Any]):
    """Gives the info dicts, or raises the exceptions, that a test has put down for its row."""

    observation_space = BOX
    action_space = spaces.Discrete(2)
    script: Sequence[Sequence[Any]] = ()
    given: dict[int, Any]  # by row, in this step

    def __init__(self, row: int) -> None:
        self.row = row
        self.n = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        given = Scripted.script[self.n][self.row]
        self.n += 1
        Scripted.given[self.row] = given
        if isinstance(given, BaseException):
            raise copy(given)
        ends = self.row == 1 and self.n == 3
        return np.full(3, self.n, np.float32), 0.5, ends, False, given


def float_of(kind: Any, bits: int) -> Any:
    """A number of this type that has these bits."""
    if kind is float:
        return struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    size = np.dtype(kind).itemsize
    return np.frombuffer((bits & (1 << 8 * size) - 1).to_bytes(size, "little"), kind)[0]


bits = st.integers(0, (1 << 64) - 1) | st.sampled_from([0x7FF8 << 48, 0x7FF0 << 48, 0x8000 << 48, 0x7E00, 0x7FC00000])
number = st.builds(float_of, st.sampled_from(FLOATS), bits)
some_floats = st.dictionaries(st.sampled_from("xyz"), number, max_size=3)
odd_value = st.sampled_from([1, True, None, "text", 1 << 70, [1.5], np.ones(2), {"deep": 1.0}, Sub(1)])
some_odd = st.builds(lambda info, value: {**info, "w": value}, some_floats, odd_value)
# dicts of few sorts, so that they come again
sort = st.sampled_from([("x",), ("x", "y"), ("y", "x"), ("z",)])
kinds = st.sampled_from([(float, float), (np.float64, float), (np.float32, np.float16)])
again = st.builds(
    lambda keys, kinds, bits: {key: float_of(kind, bits) for key, kind in zip(keys, kinds, strict=False)},
    sort, kinds, bits,
)  # fmt: skip
given_by_row = again | again | again | some_floats | st.just({}) | some_odd | st.just(LookupError("lost"))
scripts = st.lists(st.lists(given_by_row, min_size=4, max_size=4), min_size=1, max_size=6)


def exactly(info: dict[str, Any]) -> list[Any]:
    """Keys, types and values in order, NaN included; float64 since narrower ones come out of one."""
    return [
        (key, type(value), np.float64(value).tobytes() if isinstance(value, (float, np.floating)) else str(value))
        for key, value in info.items()
    ]


@compiled
@settings(max_examples=150, deadline=None)
@given(script=scripts, mode=st.sampled_from([mode.value for mode in AutoresetMode]))
def test_infos_that_turn_out_unusual_are_given_back_as_they_were(script, mode):
    Scripted.script = script
    in_c = []
    with Desk(Scripted, 4, mode) as desk:
        for _ in script:
            Scripted.given = {}
            said, begun = desk.step()
            in_c.append(said)
            for row, info in begun.infos if begun is not None else ():
                assert exactly(info) == exactly(Scripted.given[row])
    with pytest.MonkeyPatch.context() as patch:
        all_in_python(patch)
        with Desk(Scripted, 4, mode) as desk:
            assert in_c == [desk.step_in_python() for _ in script]


@compiled
def test_what_is_given_back_is_of_the_very_types_and_in_order():
    usual = {"x": 0.1, "y": np.float64(0.2), "z": np.float32(0.3), "w": np.float16(0.4)}
    other = {"w": 1.0, "x": -0.0}
    odd = {"x": "text"}
    Scripted.given = {}
    for last, row in ((odd, 3), (LookupError("lost"), 3), (odd, 1), (odd, 0)):
        rows: list[Any] = [usual, other, {}, usual]
        rows[row] = last
        Scripted.script = [[usual, other, usual, other], rows]
        with Desk(Scripted, 4) as desk:
            desk.step()
            _, begun = desk.step()
            assert begun is not None
            expected = [(i, info) for i, info in enumerate(rows) if info and isinstance(info, dict)]
            assert begun.infos == expected
            assert [exactly(info) for _, info in begun.infos] == [exactly(info) for _, info in expected]
            assert begun.row == (3 if last is not odd else 4)
            assert begun.outcome is NotImplemented if last is odd else type(begun.outcome) is LookupError


def merged_by(table: SchemaTable, tail: memoryview) -> dict[str, Any]:
    """What a parent makes of a tail."""
    columns = load_columns(tail)
    reply = load(tail) if columns is None else StepReply([], [Group(*each, []) for each in columns], [], [])
    table.learn(reply.schemas)
    rows = [np.arange(4) if group.rows is None else np.array(group.rows) for group in reply.infos]
    return merge([table.unpack(group, of, len(of)) for group, of in zip(reply.infos, rows, strict=True)], 4)


@compiled
def test_sorts_without_end_come_out_as_they_went_in():
    # the numbers of sorts begin anew at some time; whether C has answered shows in when, and in nothing else
    steps = MAX_SCHEMAS
    Scripted.script = [[{f"k{n // 2}": n / 3}, {"x": 1.0 * n}, {f"k{n % 50}": 1.0}, {"x": 2.0}] for n in range(steps)]
    Scripted.given = {}
    merged: list[list[Any]] = []
    for in_c in (True, False):
        table, seen, alone = SchemaTable({}), [], 0
        with pytest.MonkeyPatch.context() as patch:
            if not in_c:
                all_in_python(patch)
            desk = Desk(Scripted, 4)
            for _ in range(steps):
                if in_c:
                    desk.mine.sendall(desk.encode())
                    got = desk.serve()
                    reply = desk.take() if got == -1 else desk.service.handle(Begun.of(got))
                    alone += got == -1
                else:
                    reply = desk.service.handle(desk.frame())
                seen.append(merged_by(table, memoryview(reply.tail)))
            desk.__exit__()
            assert not in_c or 50 < alone < steps
        merged.append(seen)
    np.testing.assert_equal(*merged)


# ------------------------------------------------------------ arguments of any sort

ODD: list[Any] = [
    None, 7, -1, 1 << 70, 0.5, "text", b"bytes", [], (), {}, [None], [7], ["text"], [()], [[]], (None,) * 5, object(),
    memoryview(b"1234"), [memoryview(b"1234")], [memoryview(bytearray(32))] * 200, np.zeros(3), np.zeros((4, 3)),
]  # fmt: skip
XY, FLOAT = ["x", "y"], [float, float]  # what the envs tell
ODD_SORTS: list[Any] = [
    (0, XY, [int, float]), (0, XY, [None, None]), (0, XY, [float]), (0, XY, []), (0, [], []), ("0", XY, FLOAT),
    (0, tuple(XY), tuple(FLOAT)), (0, [None, "y"], FLOAT), [0, XY, FLOAT], (0, XY, FLOAT, 1), (0, XY * 40, FLOAT * 40),
    (0, [b"x", b"y"], FLOAT), (True, XY, FLOAT), (0, "xy", FLOAT), None, (None, None, None), (-1, XY, FLOAT),
    (1 << 64, XY, FLOAT), (0, {"x": 1, "y": 2}, FLOAT),
]  # fmt: skip


def arguments(desk: Desk, place: int, odd: Any) -> tuple[Any, ...]:
    """Those of `serve_express`, one of which is odd."""
    fd = desk.theirs.fileno()
    of = [fd, fd, desk.its_decoder, desk.its_encoder, desk.service.express(), 0.0]
    of[place] = odd
    return tuple(of)


def odd_calls() -> Iterator[tuple[str, Callable[[Desk], tuple[Any, ...]]]]:
    """What is odd, and what makes arguments of which one is."""

    def with_plan(desk: Desk, part: int, odd: Any) -> tuple[Any, ...]:
        plan = list(desk.service.express() or ())
        plan[part] = odd
        return arguments(desk, 4, tuple(plan))

    for count in (0, 1, 5, 7):
        yield f"{count} arguments", lambda desk, count=count: (None,) * count
    for place in range(1, 6):  # a descriptor to read from that is another's would be waited for
        for odd in ODD:
            yield f"argument {place}: {odd!r:.40}".replace("\n", ""), partial(arguments, place=place, odd=odd)
    for odd in ("0", None, 0.5, -1, 1 << 30, 1 << 70):
        yield f"argument 0: {odd!r:.40}", partial(arguments, place=0, odd=odd)
    for part in range(11):
        for odd in ODD:
            yield f"plan {part}: {odd!r:.40}".replace("\n", ""), partial(with_plan, part=part, odd=odd)
    for odd in ODD_SORTS:
        yield f"sort: {odd!r:.60}", partial(with_plan, part=10, odd=[odd])


def lacking_calls() -> Iterator[tuple[str, Callable[[Desk], tuple[Any, ...]]]]:
    """Likewise, with decoders that lack one attribute at which C looks."""
    for name in ("error", "_header", "_wanted", "frames", "_head", "_spill", "chain"):

        def lacking(desk: Desk, name: str = name) -> tuple[Any, ...]:
            decoder = SimpleNamespace(**vars(desk.its_decoder))
            delattr(decoder, name)
            return arguments(desk, 2, decoder)

        yield f"decoder lacks {name}", lacking


def print_what_comes_of(calls: Callable[[], Any]) -> None:
    """A line for each: what was given or raised, or the signal that the process ended by. Each has its own."""
    running.share_here(memoryview(bytearray(4)).cast("I"))
    with telling("floats") as desk:
        desk.step()
        for name, make in calls():
            desk.mine.close()
            desk.theirs.close()
            desk.mine, desk.theirs = socket.socketpair()
            desk.encoder, desk.its_decoder = Encoder(), Decoder(desk.service.place, desk.service.expect)
            desk.mine.sendall(desk.encode())
            desk.mine.shutdown(socket.SHUT_WR)  # nobody waits for more
            of = make(desk)
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                signal.alarm(20)
                try:
                    speedups.serve_express(*of)  # type: ignore[misc]
                    said = "no exception"
                except Exception as exc:
                    said = type(exc).__name__
                os.write(1, f"{name} → {said}\n".encode())
                os._exit(0)
            if status := os.waitpid(pid, 0)[1]:
                os.write(1, f"{name} → signal {status & 127}\n".encode())


def outcomes_of(calls: Callable[[], Iterator[Any]]) -> dict[str, str]:
    say = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_serve_express as tests; "
    run = [sys.executable, "-c", say + f"tests.print_what_comes_of(tests.{calls.__name__})"]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(list(calls()))
    return dict(line.split(" → ") for line in lines)


HARMLESS = {"no exception", "TypeError", "ValueError", "AttributeError", "BufferError", "OverflowError", "OSError"}


@compiled
def test_serve_express_takes_no_harm_from_odd_arguments():
    said = outcomes_of(odd_calls)
    assert {name: outcome for name, outcome in said.items() if outcome not in HARMLESS} == {}
    expected = {"0 arguments": "TypeError", "argument 4: None": "TypeError", "plan 5: None": "TypeError"}
    assert expected.items() <= said.items()


@compiled
def test_a_decoder_that_lacks_an_attribute_is_an_error_and_no_crash():
    said = outcomes_of(lacking_calls)
    assert {name: outcome for name, outcome in said.items() if outcome != "AttributeError"} == {}


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


class Same(gym.Env[Any, Any]):
    """An env whose steps all give the same."""

    observation_space = BOX
    action_space = spaces.Discrete(2)

    def __init__(self, row: int) -> None:
        self.row = row

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        given = Same.given[self.row]
        if isinstance(given, BaseException):
            raise given.with_traceback(None)  # else it would grow
        return given

    given: ClassVar[list[Any]] = []


OBS = np.ones(3, np.float32)
TOLD = {"x": 0.25, "y": np.float64(0.5), "z": np.float32(0.75)}
OTHER = {"y": 1.5}
# what two rows give, by what that is
ALWAYS: dict[str, list[Any]] = {
    "nothing told": [(OBS, 1.0, False, False, {})] * 2,
    "floats": [(OBS, 1.0, False, False, TOLD)] * 2,
    "two sorts": [(OBS, 1.0, False, False, TOLD), (OBS, 1.0, False, False, OTHER)],
    "a text beside floats": [(OBS, 1.0, False, False, TOLD), (OBS, 1.0, False, False, {"x": "text"})],
    "a text": [(OBS, 1.0, False, False, {"x": "text"})] * 2,
    "raises after floats": [(OBS, 1.0, False, False, TOLD), LookupError("lost")],
    "raises": [LookupError("lost"), (OBS, 1.0, False, False, TOLD)],
    "ends at once": [(OBS, 1.0, True, False, TOLD), (OBS, 1.0, False, False, TOLD)],
    "a shape": [(OBS, 1.0, False, False, TOLD), (np.ones(4, np.float32), 1.0, False, False, TOLD)],
    "no tuple": [(OBS, 1.0, False, False, TOLD), None],
    "a reward that is none": [(OBS, "much", False, False, TOLD), (OBS, 1.0, False, False, TOLD)],
}


def parts_of(given: Any) -> list[Any]:
    return [given, *given, *given[4], *given[4].values()] if isinstance(given, tuple) else [given]


@compiled
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("name", ALWAYS)
def test_steps_leave_nothing_behind(name, mode):
    Same.given = [(OBS, 1.0, False, False, TOLD), (OBS, 1.0, False, False, OTHER)]
    with Desk(Same, 2, mode) as desk:
        desk.step()  # sorts are known from here on
        Same.given = ALWAYS[name]
        plan = desk.service.express()
        assert plan is not None and len(plan[-1]) == 2
        serve: Any = speedups.serve_express
        fd, fixed, due = desk.theirs.fileno(), [bytes(2 * 8)], desk.service._stepper.due
        usual = name in ("nothing told", "floats", "two sorts") or (name, mode) == ("ends at once", "NextStep")

        def step() -> None:
            due[:] = [0, 0]
            desk.mine.sendall(b"".join(desk.encoder.encode(Kind.STEP, 7, GENERATION, fixed)))
            got = serve(fd, fd, desk.its_decoder, desk.its_encoder, plan, 0.0)
            if usual:
                assert got == -1
                desk.mine.recv(1000)
            else:
                assert type(got) is tuple

        objects = [
            desk.its_decoder, desk.its_decoder._head, desk.its_decoder._spill, desk.its_encoder, plan, due, serve,
            *(part for part in plan if not isinstance(part, int)), *plan[0], *plan[8], plan[9], *plan[10],
            *(item for sort in plan[10] for item in (*sort[1:], *sort[1])),
        ]  # fmt: skip
        for given_by_row in Same.given:
            objects += [part for part in parts_of(given_by_row) if not isinstance(part, (bool, int, type(None)))]
        check_nothing_grows(step, *objects)


@compiled
@pytest.mark.parametrize(
    "way", ["something else", "the end", "amid a frame", "no reply", "taken apart", "no copy", "odd"]
)
def test_what_is_no_step_leaves_nothing_behind(way):
    Same.given = [(OBS, 1.0, False, False, TOLD)] * 2
    with Desk(Same, 2) as desk:
        desk.step()
        plan: Any = desk.service.express()
        serve: Any = speedups.serve_express
        fd = write_fd = desk.theirs.fileno()
        fixed = [bytes(2 * 8)]
        expected: Any = {"something else": 40, "the end": 0, "amid a frame": None}.get(way)
        raised: Any = {"no reply": OSError, "no copy": AttributeError, "odd": BufferError}.get(way)
        match way:
            case "the end":
                desk.mine.close()
            case "amid a frame":
                desk.its_decoder.feed(b"123")
            case "no reply":
                write_fd = -1
            case "taken apart":
                plan = (*plan[:4], [0], *plan[5:])
            case "no copy":
                plan = (plan[0], (0,) * 4, *plan[2:])
            case "odd":
                odd = memoryview(b"12345678")[::2]
                plan = (*plan[:9], lambda *rows, old=plan[9]: [*old(*rows), odd], plan[10])

        def act() -> None:
            if way == "something else":
                desk.mine.send(bytes(40))
            elif way not in ("the end", "amid a frame"):
                desk.mine.sendall(b"".join(desk.encoder.encode(Kind.STEP, 7, GENERATION, fixed)))
            if raised is not None:
                with pytest.raises(raised):
                    serve(fd, write_fd, desk.its_decoder, desk.its_encoder, plan, 0.0)
                return
            got = serve(fd, write_fd, desk.its_decoder, desk.its_encoder, plan, 0.0)
            if way == "taken apart":
                assert Begun.of(got).row == -1 and type(Begun.of(got).outcome) is ValueError
            else:
                assert got == expected

        objects = [
            desk.its_decoder, desk.its_decoder._head, desk.its_decoder._spill, desk.its_encoder, plan, *TOLD.values(),
            *(part for part in plan if not isinstance(part, int)), *plan[0], *plan[8], plan[9], *plan[10],
        ]  # fmt: skip
        check_nothing_grows(act, *objects)


# ------------------------------------------------------------ whole workers


async def a_run(worker_env: dict[str, str] | None, story: str) -> list[Any]:
    log: list[Any] = []
    envs = [partial(make_env, story, row) for row in range(4)]
    async with aioenv.AsyncVectorEnv(envs, num_workers=2, worker_env=worker_env) as vector:
        log.append(deepcopy(await vector.reset(seed=0)))
        for number in range(STEPS):
            result = await vector.step(np.arange(4) % 2 if number % 3 else np.ones(4, np.int64))
            log.append(deepcopy(result))
    return log


@compiled
@pytest.mark.asyncio
async def test_workers_say_the_same_in_c_and_in_python():
    for story in ("CartPole", "rows and steps by turns"):
        in_python = await a_run({speedups.VARIABLE: "1"}, story)
        np.testing.assert_equal(await a_run(None, story), in_python)
