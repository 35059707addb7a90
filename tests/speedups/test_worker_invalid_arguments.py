"""A plain step's C in a worker answers invalid arguments with an error, and leaks nothing."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv import speedups
from aioenv.ipc.decoder import Decoder
from aioenv.ipc.frames import Encoder, Kind
from aioenv.worker import worker_context
from aioenv.worker.service import PartialStep
from tests.kits.process_kit import run_alone
from tests.kits.worker_kit import BOX, GENERATION, STEPS, Desk, compiled, make_env, telling
from tests.speedups.growth_kit import check_nothing_grows

pytestmark = pytest.mark.usefixtures("a_worker_within")

ODD: list[Any] = [
    None, 7, -1, 1 << 70, 0.5, "text", b"bytes", [], (), {}, [None], [7], ["text"], [()], [[]], (None,) * 5, object(),
    memoryview(b"1234"), [memoryview(b"1234")], [memoryview(bytearray(32))] * 200, np.zeros(3), np.zeros((4, 3)),
]  # fmt: skip


XY, FLOAT = ["x", "y"], [float, float]  # what the envs tell
LIKE, MAKE = [np.empty(()), np.empty(())], dict  # of nothing


ODD_SORTS: list[Any] = [
    (0, XY, [int, float], LIKE, MAKE), (0, XY, [None, None], LIKE, MAKE), (0, XY, [float], LIKE, MAKE),
    (0, XY, [], LIKE, MAKE), (0, [], [], [], MAKE), ("0", XY, FLOAT, LIKE, MAKE), (0, XY, FLOAT),
    (0, tuple(XY), tuple(FLOAT), tuple(LIKE), MAKE), (0, [None, "y"], FLOAT, LIKE, MAKE), [0, XY, FLOAT, LIKE, MAKE],
    (0, XY, FLOAT, LIKE, MAKE, 1), (0, XY * 40, FLOAT * 40, LIKE * 40, MAKE), (0, [b"x", b"y"], FLOAT, LIKE, MAKE),
    (True, XY, FLOAT, LIKE, MAKE), (0, "xy", FLOAT, LIKE, MAKE), None, (None,) * 5, (-1, XY, FLOAT, LIKE, MAKE),
    (1 << 64, XY, FLOAT, LIKE, MAKE), (0, {"x": 1, "y": 2}, FLOAT, LIKE, MAKE), (0, XY, FLOAT, LIKE, None),
    (0, XY, FLOAT, [], MAKE), (0, XY, FLOAT, LIKE[:1], MAKE), (0, XY, FLOAT, None, MAKE), (0, XY, FLOAT, XY, MAKE),
    (0, XY, FLOAT, [0.5, 0.5], MAKE), (0, XY, FLOAT, [np.float64(1), np.empty(())], MAKE),
    (0, XY, FLOAT, [np.empty(()), np.empty(2)], MAKE), (0, XY, FLOAT, [np.empty((), np.float32)] * 2, MAKE),
    (0, XY, FLOAT, [np.empty((), np.int64)] * 2, MAKE), (0, XY, FLOAT, [np.empty((), object)] * 2, MAKE),
    (0, XY, FLOAT, [np.empty((), "M8[s]")] * 2, MAKE), (0, XY, FLOAT, [np.empty((), "f8,f8")] * 2, MAKE),
    (0, XY, FLOAT, [np.empty((4, 4)).T[::2]] * 2, MAKE), (0, XY, FLOAT, [np.empty(1 << 24)] * 2, MAKE),
]  # fmt: skip


def arguments(desk: Desk, place: int, odd: Any) -> tuple[Any, ...]:
    """Those of `serve_steps`, one of which is odd."""
    fd = desk.theirs.fileno()
    of = [fd, fd, desk.its_decoder, desk.its_encoder, desk.service.fast_path(), 0.0]
    of[place] = odd
    return tuple(of)


def odd_calls() -> Iterator[tuple[str, Callable[[Desk], tuple[Any, ...]]]]:
    """What is odd, and what makes arguments of which one is."""

    def with_plan(desk: Desk, part: int, odd: Any) -> tuple[Any, ...]:
        plan = list(desk.service.fast_path() or ())
        plan[part] = odd
        return arguments(desk, 4, tuple(plan))

    for count in (0, 1, 5, 7):
        yield f"{count} arguments", lambda desk, count=count: (None,) * count
    for place in range(1, 6):  # a descriptor to read from that is another's would be waited for
        for odd in ODD:
            yield f"argument {place}: {odd!r:.40}".replace("\n", ""), partial(arguments, place=place, odd=odd)
    for odd in ("0", None, 0.5, -1, 1 << 30, 1 << 70):
        yield f"argument 0: {odd!r:.40}", partial(arguments, place=0, odd=odd)
    for part in range(13):
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
    worker_context.use_current_row_of_parent(memoryview(bytearray(4)).cast("I"))
    with telling("floats") as desk:
        desk.step()
        for name, make in calls():
            desk.mine.close()
            desk.theirs.close()
            desk.mine, desk.theirs = socket.socketpair()
            desk.encoder, desk.its_decoder = (
                Encoder(),
                Decoder(desk.service.request_buffers, desk.service.expected_buffers),
            )
            desk.mine.sendall(desk.encode())
            desk.mine.shutdown(socket.SHUT_WR)  # it reads no more
            of = make(desk)
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                signal.alarm(20)
                try:
                    speedups.serve_steps(*of)  # type: ignore[misc]
                    said = "no exception"
                except Exception as exc:
                    said = type(exc).__name__
                os.write(1, f"{name} → {said}\n".encode())
                os._exit(0)
            if status := os.waitpid(pid, 0)[1]:
                os.write(1, f"{name} → signal {status & 127}\n".encode())


def outcomes_of(calls: Callable[[], Iterator[Any]]) -> dict[str, str]:
    code = "from tests.speedups import test_worker_invalid_arguments as tests; "
    lines = run_alone(f"{code}tests.print_what_comes_of(tests.{calls.__name__})").stdout.splitlines()
    assert len(lines) == len(list(calls()))
    return dict(line.split(" → ") for line in lines)


HARMLESS = {"no exception", "TypeError", "ValueError", "AttributeError", "BufferError", "OverflowError", "OSError"}


@compiled
def test_serve_steps_survives_invalid_arguments():
    said = outcomes_of(odd_calls)
    assert {name: outcome for name, outcome in said.items() if outcome not in HARMLESS} == {}
    expected = {"0 arguments": "TypeError", "argument 4: None": "TypeError", "plan 5: None": "TypeError"}
    assert expected.items() <= said.items()


@compiled
def test_a_decoder_that_lacks_an_attribute_is_an_error_and_no_crash():
    said = outcomes_of(lacking_calls)
    assert {name: outcome for name, outcome in said.items() if outcome != "AttributeError"} == {}


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


MANY = {"v": np.arange(2.0), "n": 3, "b": True, "i": np.int16(7), "s": np.array(["a", "bc"])}
LONGER = {**MANY, "v": np.arange(3.0)}


# what two rows give, by what that is
ALWAYS: dict[str, list[Any]] = {
    "nothing told": [(OBS, 1.0, False, False, {})] * 2,
    "floats": [(OBS, 1.0, False, False, TOLD)] * 2,
    "two sorts": [(OBS, 1.0, False, False, TOLD), (OBS, 1.0, False, False, OTHER)],
    "arrays": [(OBS, 1.0, False, False, MANY), (OBS, 1.0, False, False, MANY)],
    "floats and arrays": [(OBS, 1.0, False, False, TOLD), (OBS, 1.0, False, False, MANY)],
    "an array of another shape": [(OBS, 1.0, False, False, MANY), (OBS, 1.0, False, False, LONGER)],
    "a text beside arrays": [(OBS, 1.0, False, False, MANY), (OBS, 1.0, False, False, {"x": "text"})],
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
        desk.step()
        Same.given = [(OBS, 1.0, False, False, TOLD), (OBS, 1.0, False, False, MANY)]
        desk.step()  # sorts are known from here on
        Same.given = ALWAYS[name]
        plan = desk.service.fast_path()
        assert plan is not None and len(plan[10]) == 3
        serve: Any = speedups.serve_steps
        fd, fixed, due = desk.theirs.fileno(), [bytes(2 * 8)], desk.service._stepper.pending_reset
        usual = name in ("nothing told", "floats", "two sorts", "arrays", "floats and arrays")
        usual = usual or (name, mode) == ("ends at once", "NextStep")

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
            *(part for part in plan if not isinstance(part, int)), *plan[0], *plan[8], *plan[8][0], plan[9], *plan[10],
            *(item for sort in plan[10] for item in (*sort[1:], *sort[1], *sort[3])),
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
        plan: Any = desk.service.fast_path()
        serve: Any = speedups.serve_steps
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
                with_odd = [*plan[11], odd]
                plan = (*plan[:9], lambda *rows, old=plan[9]: [*old(*rows), odd], plan[10], with_odd, *plan[12:])

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
                assert PartialStep.from_tuple(got).row == -1 and type(PartialStep.from_tuple(got).outcome) is ValueError
            else:
                assert got == expected

        objects = [
            desk.its_decoder, desk.its_decoder._head, desk.its_decoder._spill, desk.its_encoder, plan, *TOLD.values(),
            *(part for part in plan if not isinstance(part, int)), *plan[0], *plan[8], *plan[8][0], plan[9], *plan[10],
        ]  # fmt: skip
        check_nothing_grows(act, *objects)


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
