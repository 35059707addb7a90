"""Envs with scripted steps, and a worker on a thread or driven by hand, for tests of how workers answer plain steps."""

from __future__ import annotations

import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from aioenv import speedups
from aioenv.errors import EpisodesDone
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import HEADER_BYTES, Encoder, Frame, Kind
from aioenv.ipc.messages import (
    CallRequest,
    Failure,
    ResetRequest,
    Start,
    StepReply,
    StepRequest,
    dump,
    dump_code,
    dump_step,
    load,
    load_code,
    load_columns,
)
from aioenv.spaces import autoreset
from aioenv.spaces.layout import Layout
from aioenv.worker import row_buffers, worker_context
from aioenv.worker.env_service import EnvService
from aioenv.worker.loop import serve_channel
from aioenv.worker.service import PartialStep
from aioenv.worker.worker_end import WorkerEnd

compiled = pytest.mark.skipif(not speedups.compiled, reason=f"not compiled: {speedups.why_not}")


GENERATION = 5


STEPS = 30


def python_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "serve_steps", None)


def all_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serve_steps", "read_frame", "write_frame", "spin"):
        monkeypatch.setattr(speedups, name, None)
    monkeypatch.setattr(row_buffers, "compiled", False)
    monkeypatch.setattr(autoreset, "step_rows", None)


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
        obs = given["obs"] if "obs" in given else self._observation()
        five = {"obs": obs, "reward": reward, "ends": ends, "cut": False, "info": {}}
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


class Shifting(dict[Any, Any]):
    """A dict of a class of its own, which gives something else than it has."""

    def __getitem__(self, key: Any) -> Any:
        return np.zeros(3, np.float32) if key == "a" else super().__getitem__(key)


class Name(str):
    """A text of a class of its own."""


class Unpicklable:
    def __reduce__(self) -> Any:
        raise LookupError("it stays here")


GOALS = spaces.Dict(a=BOX, b=spaces.Tuple((spaces.Discrete(999), spaces.Box(-9, 9, (2, 2), np.float64))))


def goal(row: int, n: int) -> dict[str, Any]:
    """A dict and a tuple of arrays, as an env of goals observes."""
    return {"a": np.full(3, n % 99, np.float32), "b": (n % 9 * row, np.full((2, 2), n / 9))}


def goals(odd: Callable[[dict[str, Any]], Any] | None = None, space: spaces.Space[Any] = GOALS) -> Story:
    """Goals; in one step of one row something odd in their place."""

    def step(env: Told, n: int) -> Any:
        seen = goal(env.row, n)
        return {"obs": odd(seen) if odd is not None and (env.row, n) == (2, 9) else seen, "info": {"x": n / 3}}

    return Story(step, reset=lambda row, episode: (goal(row, episode), {}), space=space)


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
    "numbers of Python": infos(lambda row, n: {"lives": n - row, "over": n % 3 == row, "x": n / 3, "z": 0}),
    "numbers of numpy": infos(
        lambda row, n: {kind.__name__: kind(n + row) for kind in (np.int64, np.uint8, np.float32, np.complex64)}
    ),
    "large ints": infos(lambda row, n: {"seed": (1 << 62 if n % 4 else 1 << 63) + row, "x": 1.0}),
    "arrays": infos(lambda row, n: {"v": np.arange(2.0) * n, "m": np.full((2, 2), n % 2 == 0), "x": n / 3, "i": row}),
    "arrays alone": infos(lambda row, n: {"v": np.float32([n, row])}),
    "arrays that are views": infos(lambda row, n: {"v": np.arange(8.0)[n % 2 :: 2] * n, "w": VIEW[row]}),
    "shapes by turns": infos(lambda row, n: {"v": np.full(1 + n % 3, row / 9)}),
    "shapes by rows": infos(lambda row, n: {"v": np.full(1 + row, n / 9), "n": n}),
    "shapes without end": infos(lambda row, n: {"v": np.full(n + row, 0.5)}),
    "dtypes by rows": infos(lambda row, n: {"v": np.full(2, n, ["f8", "f4", "i8", ">f8"][row])}),
    "arrays of other things": infos(lambda row, n: {"t": np.full(2, np.datetime64(n, "D")), "s": np.array(["bc"])}),
    "arrays of objects": infos(lambda row, n: {"o": np.array([None, n]), "v": np.ones(2)}),
    "arrays of nothing": infos(lambda row, n: {"v": np.ones((2, 0)), "x": 1.0 * n}),
    "arrays of a class of their own": infos(lambda row, n: {"v": np.ma.masked_array([1.0, n])}),
    "some rows tell arrays": infos(lambda row, n: {"x": 0.5 * n, "v": np.full(2, row)} if (row + n) % 3 else {"x": 1}),
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
    "goals": goals(),
    "goals with a key more": goals(lambda seen: {"z": 1, **seen}),
    "goals in another order": goals(lambda seen: {"b": seen["b"], "a": seen["a"]}),
    "goals without a key": goals(lambda seen: {"a": seen["a"]}),
    "goals in an OrderedDict": goals(lambda seen: OrderedDict(seen)),
    "goals of another class": goals(lambda seen: Shifting(seen)),
    "goals that are no dict": goals(lambda seen: list(seen)),
    "goals with a list for a tuple": goals(lambda seen: {**seen, "b": list(seen["b"])}),
    "goals with a tuple too short": goals(lambda seen: {**seen, "b": seen["b"][:1]}),
    "goals with a tuple too long": goals(lambda seen: {**seen, "b": (*seen["b"], 1)}),
    "goals of another shape": goals(lambda seen: {**seen, "b": (1, np.zeros(4))}),
    "goals of another dtype": goals(lambda seen: {**seen, "b": (1, np.zeros((2, 2), np.int32))}),
    "goals with a number of numpy": goals(lambda seen: {**seen, "b": (np.int64(7), seen["b"][1])}),
    "goals with None": goals(lambda seen: {**seen, "a": None}),
    "goals of many": Story(
        lambda env, n: {"obs": tuple(np.full(i, n % 9 + i, np.int8) for i in range(16))},
        reset=lambda row, episode: (tuple(np.zeros(i, np.int8) for i in range(16)), {"x": 1.0 * episode}),
        space=spaces.Tuple([spaces.Box(-99, 99, (i,), np.int8) for i in range(16)]),
    ),
    "goals of too many": Story(
        lambda env, n: {"obs": (np.float32([n % 9]),) * 17},
        reset=lambda row, episode: ((np.float32([0]),) * 17, {}),
        space=spaces.Tuple([spaces.Box(-99, 99, (1,), np.float32)] * 17),
    ),
    "goals with a text": Story(
        lambda env, n: {"obs": {"a": n % 3, "t": "x" * (n % 3)}},
        reset=lambda row, episode: ({"a": 0, "t": ""}, {}),
        space=spaces.Dict(a=spaces.Discrete(3), t=spaces.Text(9, min_length=0)),
    ),
    "goals with nothing": Story(
        lambda env, n: {"obs": {"a": n % 3, "e": {}}},
        reset=lambda row, episode: ({"a": 0, "e": {}}, {}),
        space=spaces.Dict(a=spaces.Discrete(3), e=spaces.Dict()),
    ),
    "observations that are dicts": Story(
        lambda env, n: {"obs": {"a": n % 3}, "info": {"x": 1.0}},
        reset=lambda row, episode: ({"a": 0}, {}),
        space=spaces.Dict(a=spaces.Discrete(3)),
    ),
}  # fmt: skip


SAME = [{"x": row / 3} for row in range(4)]
VIEW = np.arange(24.0).reshape(4, 6)[:, ::2]


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


class Session:
    """The loop of a worker, on a thread, with envs of a story; and its parent's end.

    Attributes:
        ended: what the loop raised; None if nothing.
        raw: the bytes of all replies since the envs were configured, without the CRCs of their headers: what the
            worker told of itself before (the `id`s of its envs) differs from one to the next.
    """

    current: Session

    def __init__(self, story: str, mode: AutoresetMode, poll_s: float = 0.0) -> None:
        Session.current = self
        self.rows = rows_of(story)
        self.mine, self.theirs = socket.socketpair()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.current_row = memoryview(bytearray(4)).cast("I")
        self.ended: BaseException | None = None
        self.raw: list[bytes] = []
        self._requests = 0
        self._poll_s = poll_s
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        envs = [
            load_code(dump_code(partial(make_env, story, row))) for row in range(self.rows)
        ]  # each desk has its own
        service = dump_code(partial(EnvService, envs, mode, False))
        start = Start([], None, (), service, None, None, None, 0.0, None)
        assert self.ask(Kind.START, payload=dump_code(start)).kind is Kind.READY
        self.call("configure", None, None, 0, False)
        self.raw.clear()

    def _serve(self) -> None:
        worker_context.use_current_row_of_parent(self.current_row)
        try:
            channel = WorkerEnd(self.theirs.fileno(), self.theirs.fileno())
            channel.poll(self._poll_s)
            serve_channel(channel, {})
        except BaseException as exc:
            self.ended = exc
        finally:
            self.theirs.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.mine.close()
        self.thread.join()

    def encode(self, kind: Kind, fixed: Sequence[bytes] = (), payload: bytes = b"") -> bytes:
        self._requests += 1
        return b"".join(self.encoder.encode(kind, self._requests, GENERATION, fixed, payload))

    def take(self) -> Frame:
        """The next reply."""
        head = self._receive(HEADER_BYTES)
        fixed, payload = struct.unpack_from("<II", head, 12)
        body = self._receive(fixed + payload)
        self.decoder.feed(head + body)  # it checks the header's CRC, which depends on all frames before
        self.raw.append(head[:-4] + body)
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

    def ask(self, kind: Kind, fixed: Sequence[bytes] = (), payload: bytes = b"") -> Frame:
        self.mine.sendall(self.encode(kind, fixed, payload))
        frame = self.take()
        assert (frame.request, frame.generation) == (self._requests, GENERATION)
        return frame

    def ask_at_once(self, actions: list[bytes], runs: Sequence[range]) -> list[Frame]:
        """Steps of some rows each, asked for with one write, as a rollout's groups may be; one reply each."""
        requests = [self.encode(Kind.STEP, *run_of(actions, rows, self.rows)) for rows in runs]
        self.mine.sendall(b"".join(requests))
        return [self.take() for _ in requests]

    def call(self, method: str, *args: Any) -> Frame:
        return self.ask(Kind.CALL, payload=dump_code(CallRequest(method, args, {})))

    def reset(self, *rows: int) -> Frame:
        rows = rows or tuple(range(self.rows))
        return self.ask(Kind.RESET, payload=dump(ResetRequest(rows, rows, None, len(rows) == self.rows)))

    def end(self) -> BaseException | None:
        """Close the stream as a parent does, and wait; what the loop raised."""
        self.mine.shutdown(socket.SHUT_WR)
        self.thread.join()
        return self.ended


def plain(frame: Frame) -> Any:
    """A reply without what depends on how Python's frames lay: the outer lines of tracebacks."""
    payload: Any = bytes(frame.payload)
    if len(payload) and (frame.kind is Kind.FAILURE or load_columns(frame.payload) is None):
        said = load(payload)
        if isinstance(said, StepReply):
            payload = str(said._replace(failures=[without_lines(failure) for failure in said.failures]))
        elif isinstance(said, Failure):
            payload = without_lines(said)
    return frame.kind, frame.request, b"".join(map(bytes, frame.fixed)), payload


def without_lines(failure: Failure) -> Any:
    here = [line for line in failure.traceback.splitlines() if __file__ in line]
    return failure.row, failure.type_name, failure.message, here


# rows that follow one another, of four and more; None: all
RUNS = (range(2), range(2, 4), None, range(1, 3), range(3), range(3, 4), range(1), None, range(1, 4))


def run_of(actions: list[bytes], rows: range, n: int) -> tuple[list[bytes], bytes]:
    """Actions of some of n rows, and the payload of a request for these."""
    each = [len(data) // n for data in actions]
    some = [data[rows.start * size : rows.stop * size] for data, size in zip(actions, each, strict=True)]
    return some, dump_step(StepRequest(rows, None))


def play(
    story: str,
    mode: AutoresetMode,
    poll_s: float = 0.0,
    *,
    interludes: bool = False,
    runs: bool = False,
    at_once: bool = False,
) -> tuple[list[bytes], Any]:
    """The bytes of all replies, and what they say."""
    frames = []
    steps = iter(actions_of(story))
    with Session(story, mode, poll_s) as session:
        frames.append(session.reset())
        for number in range(STEPS):
            if at_once:
                half = 1 + number % (session.rows - 1)
                frames += session.ask_at_once(next(steps), (range(half), range(half, session.rows)))
                continue
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
                    payload = dump_step(StepRequest(range(1, 3), None))
                    some = [data[len(data) // 4 : -len(data) // 4] for data in next(steps)]
                    frames.append(session.ask(Kind.STEP, some, payload))
                case 16:
                    payload = dump_step(StepRequest(None, None, [np.int64(1)] * 4))
                    frames.append(session.ask(Kind.STEP, next(steps), payload))
                case 18 | 24:
                    frames += session.ask_at_once(next(steps), (range(2), range(2, 4), range(1)))
                case 20:
                    frames.append(session.call("no_such_method"))
                case 26:
                    frames.append(session.ask(Kind.STEP, [b"too short"]))
                case 27:
                    session.call("configure", None, None, 0, False)  # arrays of its own, all anew
                    frames.append(session.reset())
        assert session.end() is None
        assert session.current_row[0] == 0, "no row runs any more"
        return session.raw, list(map(plain, frames))


def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve_steps` gives from now on."""
    given: list[Any] = []
    inner: Any = speedups.serve_steps

    def noted(*args: Any) -> Any:
        given.append(inner(*args))
        return given[-1]

    monkeypatch.setattr(speedups, "serve_steps", noted)
    return given


class Desk:
    """A service, and both ends of its channel; plain steps are answered when a test says so."""

    def __init__(
        self, make: Callable[[int], gym.Env[Any, Any]], rows: int, mode: str = "NextStep", *, rides: bool = False
    ) -> None:
        """With `rides` states of physics and checkpoints come with each reply."""
        Desk.make = staticmethod(make)  # type: ignore[method-assign]
        envs = [load_code(dump_code(partial(made_at_desk, row))) for row in range(rows)]
        self.service = EnvService(envs, AutoresetMode(mode), rides, rides)
        told = self.service.describe()
        state_size = max(0 if env.source is None else env.source.state_size for env in told)
        self.service.configure(None, None, state_size, False, max(env.checkpoint_size for env in told))
        self.rows = rows
        self.mine, self.theirs = socket.socketpair()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.its_encoder = Encoder()
        self.its_decoder = Decoder(self.service.request_buffers, self.service.expected_buffers)
        self.service.handle(Frame(Kind.RESET, 0, GENERATION, (), memoryview(self.reset())))

    make: Callable[[int], gym.Env[Any, Any]]

    def reset(self) -> bytes:
        """The payload of a request to reset all rows."""
        rows = tuple(range(self.rows))
        return dump(ResetRequest(rows, rows, None, True))

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.mine.close()
        self.theirs.close()

    def encode(self, kind: Kind = Kind.STEP, fixed: Sequence[bytes] | None = None, payload: bytes = b"") -> bytes:
        if fixed is None:
            fixed = [bytes(len(view)) for view in self.service.expected_buffers() or ()]
        return b"".join(self.encoder.encode(kind, 7, GENERATION, fixed, payload))

    def serve(self, seconds: float = 0.0, write_fd: int | None = None) -> Any:
        fd = self.theirs.fileno()
        plan = self.service.fast_path()
        assert plan is not None and speedups.serve_steps is not None
        write_fd = fd if write_fd is None else write_fd
        return speedups.serve_steps(fd, write_fd, self.its_decoder, self.its_encoder, plan, seconds)

    def take(self) -> Frame:
        frame = None
        while (frame := self.decoder.next_frame()) is None:
            self.decoder.feed(self.mine.recv(1 << 20))
        return frame

    def step(self) -> tuple[Any, PartialStep | None]:
        """A step in C: fixed part and payload of the reply, and where C stopped, if it did."""
        self.mine.sendall(self.encode())
        got = self.serve()
        if isinstance(got, tuple):
            begun = PartialStep.from_tuple(got)
            assert begun[1:3] == (7, GENERATION)
            infos_so_far = list(begun.infos)
            reply = self.service.handle(begun)
            frame = Frame(Kind.RESULT, 7, GENERATION, reply.fixed, memoryview(reply.payload))
            return plain(frame), begun._replace(infos=infos_so_far)
        assert got == -1
        return plain(self.take()), None

    def frame(self) -> Frame:
        """A request for a step, read already."""
        return Frame(Kind.STEP, 7, GENERATION, self.service.expected_buffers() or (), memoryview(b""))

    def step_in_python(self) -> Any:
        reply = self.service.handle(self.frame())
        return plain(Frame(Kind.RESULT, 7, GENERATION, reply.fixed, memoryview(reply.payload)))


def made_at_desk(row: int) -> gym.Env[Any, Any]:
    return Desk.make(row)


def telling(story: str) -> Desk:
    return Desk(lambda row: Told(story, row), rows_of(story))
