"""C does what Python does: the same envs, frames and waits, with and without it."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import zlib
from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from aioenv import speedups
from aioenv.errors import EpisodesDone, WireError
from aioenv.ipc import frame_io
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Encoder, Kind
from aioenv.spaces import autoreset
from aioenv.spaces.autoreset import Autoreset
from aioenv.spaces.layout import Layout
from aioenv.speedups import read_by_c
from aioenv.worker import row_buffers
from aioenv.worker.row_buffers import ResultRows
from tests.speedups.growth_kit import check_nothing_grows
from tests.tools import speedups_header

compiled = pytest.mark.skipif(not speedups.compiled, reason=f"not compiled: {speedups.why_not}")
N = 5


@pytest.mark.skipif(speedups.crc32 is None, reason="zlib's is as fast here")
def test_the_crc_is_zlibs():
    data = np.random.default_rng(0).bytes(1 << 19)
    sizes = [*range(300), *range(500, 530), *range(760, 850), *range(4080, 4112)]
    sizes += [(1 << 18) - 1, 1 << 18, (1 << 18) + 7]  # the last two let other threads run
    for size in sizes:
        for start in (0, 1, 8):  # aligned and not
            for before in (0, 1, 2**32 - 1):
                piece = memoryview(data)[start : start + size]
                assert speedups.crc32(piece, before) == zlib.crc32(piece, before), (size, start, before)
    halves = speedups.crc32(data[:1001], 0)
    assert speedups.crc32(data[1001:], halves) == zlib.crc32(data)
    with pytest.raises(TypeError, match="expected a buffer and a CRC"):
        speedups.crc32(b"", -1)
    with pytest.raises(TypeError, match="bytes-like"):
        speedups.crc32("text", 0)
    with pytest.raises((BufferError, ValueError)):
        speedups.crc32(np.zeros((4, 4))[:, ::2], 0)


class Odd(gym.Env[Any, Any]):
    """An env of which a test says what its n-th step gives: five values, an exception, or something else."""

    action_space = spaces.Discrete(3)

    def __init__(self, space: spaces.Space[Any], script: dict[int, Any], resets: dict[int, Any]) -> None:
        self.observation_space = space
        self._script, self._resets = script, resets
        self._steps = self._episodes = 0
        self.seen: list[Any] = []

    def _observation(self) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Discrete):
            return self._steps
        return np.full(space.shape, self._steps, space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._episodes += 1
        outcome = self._resets.get(self._episodes, (self._observation(), {}))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def step(self, action: Any) -> Any:
        self._steps += 1
        self.seen.append(action)
        outcome = self._script.get(self._steps, {})
        if isinstance(outcome, BaseException):
            raise outcome
        if not isinstance(outcome, dict):
            return outcome
        five = {"obs": self._observation(), "reward": 1.5 * self._steps, "ends": False, "cut": False, "info": {}}
        return tuple({**five, **outcome}.values())


BOX = spaces.Box(-9, 9, (3,), np.float32)
ENDS, CUT = {"ends": True}, {"cut": True}
_ONES = np.ones(3, np.float32)
_NEVER_RESETS, _SAME_STEP = (AutoresetMode.DISABLED,), (AutoresetMode.SAME_STEP,)
# by name: the space, what steps give (by their number), what resets do, and whether C goes on all the way, or in which
# modes alone it does
STORIES: dict[str, tuple[spaces.Space[Any], dict[int, Any], dict[int, Any], bool | tuple[AutoresetMode, ...]]] = {
    "usual": (BOX, {3: ENDS, 5: CUT, 6: {"info": {"a": 1, "b": np.ones(2)}}}, {}, True),
    "infos at both ends": (BOX, {3: {**ENDS, "info": {"last": 1}}}, {2: (np.ones(3, np.float32), {"new": 2})}, True),
    "numpy flags and rewards": (BOX, {2: {"reward": np.float32(0.1), "ends": np.True_}, 4: {"reward": 3}}, {}, True),
    "raises": (BOX, {2: LookupError("lost"), 4: ENDS}, {}, True),
    "raises in a reset": (BOX, {2: ENDS}, {2: LookupError("lost")}, True),
    "no further episode": (BOX, {2: ENDS}, {2: EpisodesDone("that was all")}, True),
    "four values": (BOX, {2: (np.zeros(3, np.float32), 0.0, False, {})}, {}, True),
    "reset: another dtype": (BOX, {2: ENDS}, {2: (np.arange(3.0), {})}, _NEVER_RESETS),
    "reset: no dict": (BOX, {2: ENDS}, {2: (_ONES, OrderedDict(a=1))}, _NEVER_RESETS),
    "reset: final_obs": (BOX, {2: ENDS}, {2: (_ONES, {"final_obs": 1})}, True),
    "reset: final_info": (
        BOX,
        {2: {**CUT, "info": {"a": {"b": 1}}}, 4: CUT},
        {2: (_ONES, {"final_info": {"a": {"c": 1}}}), 3: (_ONES, {"a": 1})},
        True,
    ),
    "reset: an error like Python's": (BOX, {2: ENDS}, {2: ValueError("not enough values to unpack")}, True),
    "a last observation that fits nothing": (BOX, {2: {"obs": {"a": [np.ones(2)]}, **ENDS}}, {}, _SAME_STEP),
    "no info at an end": (BOX, {2: {**ENDS, "info": None}, 4: {"info": None}}, {}, False),
    "no pair": (BOX, {2: ENDS}, {2: np.zeros(3, np.float32)}, True),
    "None": (BOX, {2: None}, {}, True),
    "another dtype": (BOX, {2: {"obs": np.arange(3.0)}}, {}, False),
    "another shape": (BOX, {2: {"obs": np.zeros(4, np.float32)}}, {}, False),
    "a list": (BOX, {2: {"obs": [1, 2, 3]}}, {}, False),
    "bytes": (spaces.Box(0, 255, (3,), np.uint8), {2: {"obs": b"abc"}}, {}, False),
    "reward of no number": (BOX, {2: {"reward": "much"}, 3: {"reward": np.ones(1)}}, {}, False),
    "reward complex": (BOX, {2: {"reward": 1j}}, {}, False),
    "flags that are numbers": (BOX, {2: {"ends": 1}, 4: {"cut": np.int64(1)}}, {}, False),
    "an info of another sort": (BOX, {2: {"info": None}}, {}, False),
    "scalars": (spaces.Discrete(99), {3: ENDS, 4: {"obs": np.int64(7)}}, {}, True),
    "too large a scalar": (spaces.Discrete(99), {2: {"obs": 1 << 70}}, {}, False),
    "images": (spaces.Box(0, 255, (4, 4, 3), np.uint8), {3: ENDS}, {}, True),
    "nothing to see": (spaces.Box(0, 1, (0,), np.float32), {3: ENDS}, {}, True),
}


def told(exc: BaseException) -> tuple[str, str, list[str]]:
    return type(exc).__name__, str(exc), getattr(exc, "__notes__", [])


def run(name: str, mode: AutoresetMode) -> tuple[list[Any], bool]:
    """All that comes of some steps of envs of which the middle ones have this story; whether C may still go on."""
    space, script, resets, _ = STORIES[name]
    envs = [Odd(space, script if row in (1, 3) else {}, resets if row in (1, 3) else {}) for row in range(N)]
    mark = memoryview(bytearray(4)).cast("I")
    stepper, rows = Autoreset(envs, mode, mark), ResultRows(Layout(space), N, [{}], [])
    for row in range(N):
        rows.write_observation(0, row, stepper.reset(row, None, None)[0])
    outcome: list[Any] = []
    for step in range(8):
        actions = [np.int64((step + row) % 3) for row in range(N)]
        try:
            out = stepper.step(range(N), actions, rows.direct_into(0))
            if out.rows:
                rows.store(0, out)
        except BaseException as exc:
            outcome.append(told(exc))
            break
        arrays = [bytes(view) for view in rows.buffers(range(N), stepped=True)]
        failures = [(row, told(exc)) for row, exc in out.failures]
        outcome.append(
            (arrays, repr(out.infos), failures, out.exhausted, out.lost, list(stepper.pending_reset), mark[0])
        )
    outcome += [env.seen for env in envs]
    return outcome, rows.direct_into(0) is not None


@compiled
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", STORIES)
def test_steps_in_c_are_those_in_python(monkeypatch, name, mode):
    in_c, goes_on = run(name, mode)
    expected = STORIES[name][3]
    assert goes_on == (expected if isinstance(expected, bool) else mode in expected)
    monkeypatch.setattr(row_buffers, "compiled", False)
    monkeypatch.setattr(autoreset, "step_rows", None)
    in_python, never = run(name, mode)
    assert not never and in_c == in_python


@compiled
def test_the_traceback_of_an_env_that_raises_names_its_line():
    envs = [Odd(BOX, {1: LookupError("lost")}, {})]
    stepper, rows = (
        Autoreset(envs, AutoresetMode.NEXT_STEP, memoryview(bytearray(4)).cast("I")),
        ResultRows(Layout(BOX), 1, [{}], []),
    )
    rows.write_observation(0, 0, stepper.reset(0, None, None)[0])
    ((_, exc),) = stepper.step(range(1), [0], rows.direct_into(0)).failures
    frames, tb = [], exc.__traceback__
    while tb is not None:
        frames.append((tb.tb_frame.f_code.co_name, tb.tb_frame.f_code.co_filename))
        tb = tb.tb_next
    assert frames[-1] == ("step", __file__)


@compiled
def test_an_env_that_ends_the_process_is_not_held_back():
    stepper = Autoreset([Odd(BOX, {1: SystemExit(3)}, {})], AutoresetMode.NEXT_STEP, memoryview(bytearray(4)).cast("I"))
    rows = ResultRows(Layout(BOX), 1, [{}], [])
    stepper.reset(0, None, None)
    with pytest.raises(SystemExit):
        stepper.step(range(1), [0], rows.direct_into(0))
    assert stepper._current_row[0] == 1, "the parent reads there who it was"


@compiled
def test_an_env_that_takes_its_worker_apart_is_an_error_and_no_crash():
    class Vandal(Odd):
        def step(self, action: Any) -> Any:
            stepper.pending_reset.clear()
            rows._last.clear()
            return super().step(action)

    stepper = Autoreset([Vandal(BOX, {}, {})], AutoresetMode.NEXT_STEP, memoryview(bytearray(4)).cast("I"))
    rows = ResultRows(Layout(BOX), 1, [{}], [])
    stepper.reset(0, None, None)
    with pytest.raises(ValueError, match="one entry per row in each list"):
        stepper.step(range(1), [0], rows.direct_into(0))


@compiled
@pytest.mark.parametrize("when", ["step", "reset"])
def test_an_env_that_takes_lists_apart_at_the_end_of_its_episode_is_an_error_and_no_crash(when):
    class Vandal(Odd):
        def reset(self, **how: Any) -> Any:
            if self._episodes and when == "reset":
                rows._last.clear()
            return super().reset(**how)

        def step(self, action: Any) -> Any:
            if when == "step":
                stepper._resets.clear()
            return super().step(action)

    stepper = Autoreset([Vandal(BOX, {1: ENDS}, {})], AutoresetMode.SAME_STEP, memoryview(bytearray(4)).cast("I"))
    rows = ResultRows(Layout(BOX), 1, [{}], [])
    stepper.reset(0, None, None)
    with pytest.raises(ValueError, match="one entry per row in each list"):
        stepper.step(range(1), [0], rows.direct_into(0))


@compiled
def test_a_reset_that_writes_into_the_last_observation_and_info_does_not_change_them():
    class Reusing(Odd):
        obs, info = np.zeros(3, np.float32), {"a": np.zeros(2), "b": [1]}

        def reset(self, **how: Any) -> Any:
            self.obs += 10
            self.info["a"] += 10
            self.info["b"].append(2)
            return self.obs, self.info

    both: list[Any] = []
    for odd in (False, True):  # Python finishes what C has started after an odd reset
        env = Reusing(BOX, {1: {**ENDS, "obs": Reusing.obs, "info": Reusing.info}}, {})
        Reusing.obs[:], Reusing.info["a"][:], Reusing.info["b"][:] = 5, 5, [1]
        stepper = Autoreset([env], AutoresetMode.SAME_STEP, memoryview(bytearray(4)).cast("I"))
        if odd:
            stepper._resets[0] = lambda env=env: [*env.reset()]
        rows = ResultRows(Layout(BOX), 1, [{}], [])
        both.append(stepper.step(range(1), [0], rows.direct_into(0)).infos)
    assert repr(both[0]) == repr(both[1])
    (_, final), (_, first) = both[0]
    assert (final["final_obs"] == 5).all() and (final["final_info"]["a"] == 5).all() and final["final_info"]["b"] == [1]
    assert (first["a"] == 15).all() and first["b"] == [1, 2]


# ------------------------------------------------------------ frames


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read_frame", "write_frame"):
        monkeypatch.setattr(speedups, name, None)


def converse(frames: list[tuple[Any, ...]], sizes: list[int]) -> list[tuple[Any, ...]]:
    """Write frames to a socket and read them again; every second one is promised buffers of these sizes."""
    ours, theirs = socket.socketpair()
    promised = {request: [memoryview(bytearray(size)) for size in sizes] for request in range(1, len(frames), 2)}
    got: list[tuple[Any, ...]] = []
    encoder, decoder = Encoder(), Decoder(lambda header: promised.get(header.request), lambda: promised.get(len(got)))

    def write() -> None:
        for frame in frames:
            rest = frame_io.write(ours.fileno(), encoder, *frame)
            while rest:
                rest = frame_io.write_remaining(ours.fileno(), rest)
        ours.close()

    writer = threading.Thread(target=write)
    writer.start()
    with theirs:
        while frame_io.read(theirs.fileno(), decoder):
            while (frame := decoder.next_frame()) is not None:
                got.append((frame.kind, frame.request, frame.generation, b"".join(frame.fixed), bytes(frame.payload)))
    writer.join()
    decoder.finish()
    assert decoder.chain == encoder.chain
    return got


_IMPORTED_AGAIN = """
import sys
import numpy as np
from aioenv import speedups

into = np.zeros((1, 3), np.float32), np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), [None]

def step():  # a reward that is looked at as a numpy scalar
    step = lambda action: (np.zeros(3, np.float32), np.float32(2), False, False, {})
    return speedups.step_rows(0, 0, [1], [step], [lambda: None], [0], {}, 0, memoryview(bytearray(4)), [], into)

before = step()
for name in [name for name in sys.modules if name.partition(".")[0] in ("numpy", "aioenv")]:
    del sys.modules[name]
try:
    from aioenv import speedups as again
except ImportError:
    pass
assert step() == before and into[1][0] == 2, (step(), before)
"""


@compiled
def test_a_second_import_that_fails_leaves_the_first_as_it_is():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _IMPORTED_AGAIN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("c", [pytest.param(True, marks=compiled), False])
def test_frames_arrive_as_they_were_written(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    rng = np.random.default_rng(0)
    frames = []
    for request in range(300):
        sizes = [[40, 8], [8, 40, 0], [48], [1] * 48, [], [300_000], [1] * 300][rng.integers(7)]
        fixed = [rng.bytes(size) for size in sizes]
        payload = rng.bytes(int(rng.choice([0, 0, 3, 100_000])))
        frames.append((Kind.RESULT if request % 3 else Kind.STEP, request, request << 20, fixed, payload))
    got = converse(frames, [40, 0, 8])
    assert got == [(kind, r, g, b"".join(fixed), payload) for kind, r, g, fixed, payload in frames]


@compiled
@pytest.mark.parametrize("place", range(28 + 12))
def test_a_flipped_bit_is_found(place):
    encoder = Encoder()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not frame_io.write(ours.fileno(), encoder, Kind.STEP, 1, 2, [b"12345678", b"abcd"])
        data = bytearray(theirs.recv(100))
        data[place] ^= 4
        ours.sendall(data)
        promised = [memoryview(bytearray(12))]
        decoder = Decoder(lambda header: promised, lambda: promised)
        with pytest.raises(WireError):
            frame_io.read(theirs.fileno(), decoder)
            decoder.finish()


@compiled
def test_a_frame_that_is_repeated_is_found():
    encoder = Encoder()
    ours, theirs = socket.socketpair()
    promised = [memoryview(bytearray(4))]
    decoder = Decoder(lambda header: promised, lambda: promised)
    with ours, theirs:
        frame_io.write(ours.fileno(), encoder, Kind.STEP, 1, 2, [b"abcd"])
        data = theirs.recv(100, socket.MSG_PEEK)
        frame_io.read(theirs.fileno(), decoder)
        assert decoder.next_frame() is not None
        ours.sendall(data)
        frame_io.read(theirs.fileno(), decoder)
        with pytest.raises(WireError, match="does not follow"):
            decoder.next_frame()


@pytest.mark.parametrize("c", [pytest.param(True, marks=compiled), False])
def test_what_a_full_socket_does_not_take_is_left(monkeypatch, c):
    if not c:
        in_python(monkeypatch)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        encoder, body = Encoder(), os.urandom(4 << 20)
        rest = frame_io.write(ours.fileno(), encoder, Kind.STEP, 1, 0, [body], b"tail")
        left = sum(map(len, rest))
        assert 0 < left < len(body)
        assert sum(map(len, frame_io.write(ours.fileno(), Encoder(), Kind.STEP, 1, 0, [b"x"]))) == 29, "all of it"
        data = theirs.recv(28 + len(body) + 4 - left, socket.MSG_WAITALL) + b"".join(rest)
        assert data[28:] == body + b"tail"
        theirs.close()
        with pytest.raises(ConnectionError):
            frame_io.write(ours.fileno(), encoder, Kind.STEP, 2, 0)
        with pytest.raises(WireError, match="must fit 32 bits"):
            frame_io.write(ours.fileno(), encoder, Kind.STEP, 1 << 32, 0)


@compiled
def test_arguments_that_do_not_fit_are_errors():
    assert speedups.step_rows and speedups.read_frame and speedups.write_frame and speedups.spin
    for function in (speedups.step_rows, speedups.read_frame, speedups.write_frame, speedups.spin):
        with pytest.raises(TypeError):
            function()
    with pytest.raises(TypeError):
        speedups.read_frame(0, 0, (bytearray(28),))
    with pytest.raises(OSError, match="Bad file descriptor"):
        speedups.read_frame(-1, 0, [bytearray(28)])
    arrays = np.zeros((2, 3)), np.zeros(2), np.zeros(2, bool), np.zeros(3, bool), [None, None]
    with pytest.raises(ValueError, match="the same number of rows in each array"):
        speedups.step_rows(0, 0, [], [], [], [], {}, 0, memoryview(bytearray(4)), [], arrays)


def put(tree: Any, observation: Any) -> Any:
    """What a step of one env comes to whose observation goes there."""
    assert speedups.step_rows
    flags = np.zeros(1), np.zeros(1, bool), np.zeros(1, bool)
    step, due, mark = [lambda action: (observation, 0.0, False, False, {})], [0], memoryview(bytearray(4))
    return speedups.step_rows(0, 0, [1], step, [lambda: None], due, {}, 0, mark, [], (tree, *flags, [None]))


@compiled
def test_trees_of_arrays_that_do_not_fit_are_errors():
    one, loop = np.zeros((1, 3)), {}
    loop["a"] = {"b": loop}
    trees: list[tuple[Any, type[Exception]]] = [
        (None, TypeError), ([one], TypeError), ({"a": None}, TypeError), ((one, "text"), TypeError),
        ({"a": (one, {"b": 7})}, TypeError), ((one,) * 17, ValueError), ({str(i): one for i in range(17)}, ValueError),
        (np.zeros((2, 3)), ValueError), ({"a": one, "b": np.zeros((0, 3))}, ValueError), (np.zeros(()), ValueError),
        ((one, np.zeros((1, 4)).T.T[:, ::2]), ValueError), (loop, RecursionError), ({"a": b"1"}, BufferError),
    ]  # fmt: skip
    for tree, error in trees:
        with pytest.raises(error):
            put(tree, one[0])
    assert put((one,) * 16, (one[0],) * 16)[0] == 1
    assert put({}, {})[0] == put((), ())[0] == 1, "nothing goes nowhere"


@compiled
def test_observations_that_do_not_fit_a_tree_are_for_python():
    tree = {"a": np.zeros((1, 3)), "b": (np.zeros((1, 2), np.int64), {"c": np.zeros(1, np.int64)})}
    a, b, c = np.ones(3), np.full(2, 2), 3
    assert put(tree, {"b": (b, {"c": c}), "a": a})[0] == 1
    assert (tree["a"] == 1).all() and (tree["b"][0] == 2).all() and tree["b"][1]["c"] == 3
    for odd in (
        None, a, (), [a, (b, {"c": c})], {}, {"a": a}, {"a": a, "b": b}, {"a": a, "b": [b, {"c": c}]},
        {"a": a, "b": (b,)}, {"a": a, "b": (b, {"c": c}, 1)}, {"a": a, "b": (b, {})}, {"a": a, "b": (b, {"c": 0.5})},
        {"a": a[:2], "b": (b, {"c": c})}, {"a": a, "b": (b, {"c": 1 << 70})}, {"a": a, "b": (b, {"c": {}})},
    ):  # fmt: skip
        row, outcome, is_odd, last_step = put(tree, odd)
        assert (row, is_odd, last_step) == (0, True, None) and outcome[0] is odd


@compiled
@pytest.mark.parametrize("fits", [True, False])
def test_trees_leave_nothing_behind(fits):
    tree = {"a": np.zeros((1, 3)), "b": (np.zeros((1, 2), np.int64), {"c": np.zeros(1, np.int64)})}
    seen: Any = {"a": np.ones(3), "b": (np.ones(2, np.int64), {"c": 3 if fits else 0.5})}
    objects = [
        tree,
        *tree.values(),
        *tree["b"],
        seen,
        *seen.values(),
        *seen["b"],
        *tree["b"][1].values(),
        "a",
        "b",
        "c",
    ]
    check_nothing_grows(lambda: put(tree, seen), *objects)


@compiled
def test_spinning_ends_when_there_is_something_and_when_the_time_is_over():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not speedups.spin(ours.fileno(), 1e-4)
        assert not speedups.spin(ours.fileno(), math.nan)
        theirs.send(b"x")
        assert speedups.spin(ours.fileno(), 60.0)


# ------------------------------------------------------------ with and without


def test_a_variable_turns_it_off():
    say = "from aioenv import speedups; print(speedups.compiled, speedups.step_rows, speedups.why_not)"
    environ = {**os.environ, speedups.VARIABLE: "1"}
    said = subprocess.run([sys.executable, "-c", say], env=environ, capture_output=True, text=True, check=True).stdout
    assert said == f"False None {speedups.VARIABLE} is set\n"


@pytest.mark.skipif(os.environ.get(speedups.VARIABLE, "0") not in ("", "0"), reason=f"{speedups.VARIABLE} is set")
@pytest.mark.skipif(not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="C needs the GIL")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_extension_was_compiled_where_there_is_a_compiler():
    """An error in C does not fail the installation: the tests of C would be skipped, and nothing would say so."""
    assert speedups.compiled, speedups.why_not


def test_the_header_that_c_shares_with_python_is_up_to_date():
    assert speedups_header.HEADER.read_text(encoding="utf-8") == speedups_header.text(), (
        "run: python tests/tools/speedups_header.py"
    )


def test_a_class_without_an_attribute_that_c_looks_up_is_an_error_when_it_is_defined():
    with pytest.raises(TypeError, match="C looks up attributes that Encoder does not have: chain"):

        @read_by_c
        class Encoder:
            def __init__(self):
                self.crc = 0
