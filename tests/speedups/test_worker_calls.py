"""Calls of what answers plain steps in C, one by one: where it stops, and what it gives back."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from aioenv.errors import WireError
from aioenv.ipc import frame_io
from aioenv.ipc.frames import HEADER_BYTES, Kind
from aioenv.ipc.messages import (
    StepReply,
    load,
    load_columns,
    load_step,
)
from aioenv.spaces.infos import MAX_SCHEMAS, ColumnGroup, SchemaTable, merge_infos
from aioenv.worker import env_service
from aioenv.worker.env_service import EnvService
from aioenv.worker.service import PartialStep
from tests.kits.worker_kit import BOX, FLOATS, STEPS, Desk, Sub, Told, all_in_python, compiled, run_of, telling

pytestmark = pytest.mark.usefixtures("a_worker_within")


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
            assert len(desk.take().payload)
            desk.mine.sendall(desk.encode() if number < STEPS - 1 else desk.encode(Kind.CALL, (), b"call"))
        worker.join()
        assert outcome == [HEADER_BYTES + 4], "what is no step is left in the buffers"
        frame_io.decode_external_read(desk.its_decoder, outcome[0])
        frame = desk.its_decoder.next_frame()
        assert frame is not None and (frame.kind, bytes(frame.payload)) == (Kind.CALL, b"call")
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
            frame_io.decode_external_read(desk.its_decoder, cut)
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
            desk.encode(payload=b"tail"),
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
@pytest.mark.parametrize("behind", [0, 1, 5, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9, None])
def test_what_comes_in_the_same_read_is_answered_next(behind):
    """Another step, or the beginning of one; here and behind an env that raises, where C gives it to Python."""

    def halves(desk: Desk) -> list[bytes]:
        actions = [bytes(len(view)) for view in desk.service.expected_buffers() or ()]
        return [desk.encode(Kind.STEP, *run_of(actions, rows, 4)) for rows in (range(2), range(2, 4))]

    for story, raises in (("floats", False), ("raises in the first row", True)):
        with telling(story) as desk:
            if not raises:
                desk.step()  # the sort is known from here on
            first, second = halves(desk)
            cut = len(second) if behind is None else behind
            desk.mine.sendall(first + second[:cut])
            got = desk.serve()
            if raises:
                assert isinstance(got, tuple) and PartialStep.from_tuple(got).rows == range(2)
                assert len(desk.its_decoder.frames) == (behind is None)
                desk.service.handle(PartialStep.from_tuple(got))
            elif behind is None:
                assert got == -1 and [desk.take().kind, desk.take().kind] == [Kind.RESULT, Kind.RESULT]
                continue
            else:
                assert got == (behind or -1) and desk.take().kind is Kind.RESULT
                if behind:
                    frame_io.decode_external_read(desk.its_decoder, got)
            desk.mine.sendall(second[cut:])
            if behind == 0 and not raises:
                assert desk.serve() == -1 and desk.take().kind is Kind.RESULT, "all of it came now"
            elif behind == 0:
                assert isinstance(desk.serve(), tuple | int)
            else:
                while not desk.its_decoder.frames:
                    assert desk.serve() is None, "it is amid a frame"
                    frame_io.read(desk.theirs.fileno(), desk.its_decoder)
                frame = desk.its_decoder.next_frame()
                assert frame is not None and frame.kind is Kind.STEP
                assert load_step(frame.payload)[0] == range(2, 4)
            first, _ = halves(desk)
            desk.mine.sendall(first)
            assert desk.serve() == -1, "it goes on with whole ones"


@compiled
def test_steps_of_all_rows_in_one_read_have_actions_of_their_own():
    with telling("floats") as desk:
        desk.step()
        pieces = [desk.encode(fixed=[np.full(4, action).tobytes()]) for action in (1, 2, 4)]
        desk.mine.sendall(b"".join(pieces))
        assert desk.serve() == -1
        for number, action in ((2, 1), (3, 2), (4, 4)):
            reward = np.frombuffer(b"".join(map(bytes, desk.take().fixed)), np.float64, 4, 4 * 3 * 4)
            assert reward.tolist() == [action + number / 3] * 4


@compiled
@pytest.mark.parametrize("kind", [Kind.CALL, Kind.RESET, Kind.RENDER, Kind.CLOSE])
def test_what_is_no_step_is_left_though_it_came_behind_one(kind):
    with telling("floats") as desk:
        desk.step()
        desk.mine.sendall(desk.encode() + desk.encode(kind, (), b"tail"))
        assert desk.serve() == HEADER_BYTES + 4 and desk.take().kind is Kind.RESULT
        frame_io.decode_external_read(desk.its_decoder, HEADER_BYTES + 4)
        frame = desk.its_decoder.next_frame()
        assert frame is not None and (frame.kind, bytes(frame.payload)) == (kind, b"tail")
        desk.mine.sendall(desk.encode())
        assert desk.serve() == -1 and desk.take().kind is Kind.RESULT


@compiled
def test_what_is_broken_or_ends_behind_a_step_is_found_by_the_decoder():
    with telling("floats") as desk:
        desk.step()
        first, second = desk.encode(), bytearray(desk.encode())
        second[-1] ^= 1
        desk.mine.sendall(first + second)
        assert desk.serve() == len(second) and desk.take().kind is Kind.RESULT
        frame_io.decode_external_read(desk.its_decoder, len(second))
        with pytest.raises(WireError, match="does not match its CRC"):
            desk.its_decoder.next_frame()
    with telling("floats") as desk:
        desk.step()
        desk.mine.sendall(desk.encode() + desk.encode()[:33])
        desk.mine.shutdown(socket.SHUT_WR)
        assert desk.serve() == 33 and desk.take().kind is Kind.RESULT
        frame_io.decode_external_read(desk.its_decoder, 33)
        assert desk.serve() is None and frame_io.read(desk.theirs.fileno(), desk.its_decoder) == 0
        with pytest.raises(WireError, match="ended inside a frame"):
            desk.its_decoder.finish()


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
def test_a_reply_that_would_be_over_the_limit_is_python_s(monkeypatch):
    with telling("floats") as desk:
        most = sum(len(view) for view in desk.service.fast_path()[11])
    for limit, answers in ((most, True), (most - 1, False)):
        monkeypatch.setattr(env_service, "MAX_FIXED_BYTES", limit)
        with telling("floats") as desk:
            assert (desk.service.fast_path() is not None) == answers


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
    "due": lambda service: service._stepper.pending_reset.clear(),
    "steps": lambda service: service._stepper._steps.clear(),
    "more steps": lambda service: service._stepper._steps.append(print),
    "resets": lambda service: service._stepper._resets.clear(),
    "last": lambda service: service._rows._last.clear(),
    "more of last": lambda service: service._rows._last.append(1),
    "sorts": lambda service: service._gatherer.c_schemas.clear(),
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
        begun = PartialStep.from_tuple(desk.serve())
        infos_of_rows = [(row, {"x": row / 9 + 3, "y": -3 / 7}) for row in range(4)]
        assert begun.infos == infos_of_rows[: len(begun.infos)]
        assert begun.row == -1 and type(begun.outcome) is ValueError
        with pytest.raises(ValueError, match="one entry per row in each list"):
            desk.service.handle(begun)


@compiled
def test_a_due_that_is_no_number_is_not_usual():
    with Desk(Vandal, 4) as desk:
        Vandal.act = staticmethod(lambda: desk.service._stepper.pending_reset.__setitem__(2, "x"))  # type: ignore[method-assign]
        desk.step()
        desk.step()
        desk.mine.sendall(desk.encode())
        try:
            begun = PartialStep.from_tuple(desk.serve())
        except SystemError as exc:
            pytest.fail(f"{exc}")
        assert begun.row == 2


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
            infos = begun.infos if begun is not None else ()
            for row, info in [each for each in infos if "final_obs" not in each[1]]:
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


def merged_by(table: SchemaTable, payload: memoryview) -> dict[str, Any]:
    """What a parent makes of a payload."""
    columns = load_columns(payload)
    reply = load(payload) if columns is None else StepReply([], [ColumnGroup(*each, []) for each in columns], [], [])
    table.update(reply.schemas)
    rows = [np.arange(4) if group.rows is None else np.array(group.rows) for group in reply.infos]
    return merge_infos([table.unpack(group, of, len(of)) for group, of in zip(reply.infos, rows, strict=True)], 4)


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
                    reply = desk.take() if got == -1 else desk.service.handle(PartialStep.from_tuple(got))
                    alone += got == -1
                else:
                    reply = desk.service.handle(desk.frame())
                seen.append(merged_by(table, memoryview(reply.payload)))
            desk.__exit__()
            assert not in_c or 50 < alone < steps
        merged.append(seen)
    np.testing.assert_equal(*merged)
