"""A worker that answers plain steps in C says, byte for byte, what it says in Python, infos among it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from gymnasium.vector import AutoresetMode

from aioenv.ipc.frames import HEADER_BYTES, Kind
from tests.kits import worker_kit as serve_kit
from tests.kits.worker_kit import (
    STEPS,
    STORIES,
    Session,
    Told,
    actions_of,
    all_in_python,
    compiled,
    play,
    python_answers,
    run_of,
    served,
)

pytestmark = pytest.mark.usefixtures("a_worker_within")

# stories of which C has no part
NOT_FAST = ("actions that are dicts", "goals of too many", "goals with a text", "goals with nothing")


@compiled
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("story", ["CartPole", *STORIES])
def test_replies_are_the_same_in_c_and_in_python(monkeypatch, story, mode):
    given = served(monkeypatch)
    raw, said = play(story, mode)
    assert bool(given) == (story not in NOT_FAST)
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


@compiled
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("story", ["CartPole", *(story for story in STORIES if STORIES[story].rows > 1)])
def test_steps_that_come_in_one_read_are_the_same_in_c_and_in_python(monkeypatch, story, mode):
    given = served(monkeypatch)
    raw, said = play(story, mode, at_once=True)
    if story in ("CartPole", "nothing", "floats") and mode is AutoresetMode.NEXT_STEP:
        assert given.count(-1) > STEPS * 2 // 3, "C answers both of them"
    python_answers(monkeypatch)
    assert play(story, mode, at_once=True)[0] == raw
    all_in_python(monkeypatch)
    assert play(story, mode, at_once=True)[1] == said


@compiled
def test_more_steps_than_one_read_brings(monkeypatch):
    def outcome() -> list[bytes]:
        with Session("floats", AutoresetMode.NEXT_STEP) as session:
            session.reset()
            actions = actions_of("floats")[0]
            rows = [range(n % 4, n % 4 + 1) for n in range(4000)]
            requests = [session.encode(Kind.STEP, *run_of(actions, mine, 4)) for mine in rows]
            sender = threading.Thread(target=session.mine.sendall, args=(b"".join(requests),))
            sender.start()
            for _ in requests:
                session.take()
            sender.join()
            assert session.end() is None
            return session.raw

    raw = outcome()
    python_answers(monkeypatch)
    assert outcome() == raw


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
    "numbers of Python": 29,
    "numbers of numpy": 29,
    "arrays": 29,
    "arrays alone": 29,
    "shapes by turns": 27,
    "shapes by rows": 29,
    "shapes without end": 0,
    "dtypes by rows": 29,
    "arrays of other things": 0,
    "arrays of objects": 0,
    "arrays of a class of their own": 0,
    "some rows tell arrays": 29,
    "an int among floats": 28,  # which is a sort of its own
    "another order": 28,  # which is a sort of its own
    "no dict": 3,  # until there is none
    "raises": 27,
    "resets that tell floats": 30,  # with the first reset
    "numbers to see": 29,
    "images": 29,
    "nothing to see": 29,
    "goals": 29,
    "goals with a key more": 29,
    "goals in another order": 29,
    "goals without a key": 8,  # until one lacks it
    "goals in an OrderedDict": 29,
    "goals of another class": 8,
    "goals with a tuple too long": 8,
    "goals with a number of numpy": 29,
    "goals of many": 30,
    "observations that are dicts": 29,
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
    monkeypatch.setattr(serve_kit, "make_env", lambda story, row: Sharing(story, row))
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
    monkeypatch.setattr(serve_kit, "make_env", lambda story, row: kind(story, row))

    def outcome() -> Any:
        with Session("floats", AutoresetMode.NEXT_STEP) as session:
            session.reset()
            for _ in range(2):
                session.ask(Kind.STEP, [bytes(4 * 8)])
            session.mine.sendall(session.encode(Kind.STEP, [bytes(4 * 8)]))
            with pytest.raises(EOFError):
                session.take()
            session.thread.join()
            return type(session.ended), str(session.ended), session.current_row[0]

    ended, text, mark = both(monkeypatch, outcome)
    assert (ended, text, mark) == ((BrokenPipeError, str(BrokenPipeError(32, "Broken pipe")), 0), (SystemExit, "3", 2))[
        kind is Leaving
    ]
