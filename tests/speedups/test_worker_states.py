"""Checkpoints and states of physics ride on plain steps' replies, which C gives all the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tests.kits.worker_kit import Desk, compiled

pytestmark = [compiled, pytest.mark.usefixtures("a_worker_within")]


class Diary(gym.Env[Any, Any]):
    """It remembers what it was told, as many characters of it a step as `page` says, and may fail to say so."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,))
    action_space = spaces.Discrete(4)

    def __init__(self, page: int = 1) -> None:
        self.text, self.page = "", page
        self.tears = False
        self.told = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.text = (self.text + "x" * self.page)[-5000:]
        return self._observe(), float(self.np_random.random()), False, len(self.text) % 7 == 0, {"pages": 1.5}

    def _observe(self) -> Any:
        return np.array([len(self.text), self.np_random.random()], np.float32)

    def get_state(self) -> Any:
        self.told += 1
        if self.tears:
            raise RuntimeError("it is torn")
        return self.text

    def set_state(self, state: Any) -> None:
        self.text = state


def cheetah(row: int) -> gym.Env[Any, Any]:
    return gym.make("HalfCheetah-v5", max_episode_steps=4 + row, reset_noise_scale=0.5)


def of_both(one: Desk, other: Desk, steps: int, meanwhile: Any = lambda desk, number: None) -> list[bool]:
    """Step one in C and the other in Python, and compare; whether C has answered."""
    answered = []
    for number in range(steps):
        meanwhile(one, number)
        meanwhile(other, number)
        reply, begun = one.step() if one.service.fast_path() is not None else (one.step_in_python(), True)
        assert reply == other.step_in_python(), number
        answered.append(begun is None)
    return answered


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("make", [cheetah, lambda row: Diary()], ids=["physics", "a state of its own"])
def test_what_rides_is_the_same_in_c_and_in_python(make, mode):
    with Desk(make, 3, mode, rides=True) as one, Desk(make, 3, mode, rides=True) as other:
        answered = of_both(one, other, 24)
        before = one.service._checkpoints.array.copy()
    assert sum(answered) >= (20 if mode == "NextStep" else 6)  # ends of episodes are Python's under SAME_STEP
    assert len(np.unique(before.view(np.uint64), axis=0)) == 3


def test_of_some_rows_it_is_the_same_too():
    with Desk(cheetah, 3, rides=True) as desk:
        desk.step()
        before = desk.service._checkpoints.array.copy(), desk.service._state.copy()
        rows = slice(1, 3)
        for env in desk.service._envs[rows]:
            env.step(np.zeros(6, np.float32))
        assert desk.service.fast_path().write_extras(1, 2)
        for array, was in zip((desk.service._checkpoints.array, desk.service._state), before, strict=True):
            assert (array[0] == was[0]).all()
            assert (array[rows] != was[rows]).any(axis=1).all()


def test_a_state_that_is_longer_than_its_buffer_is_left_to_python():
    def make(row: int) -> Diary:
        return Diary(page=100 * row)

    with Desk(make, 2, rides=True) as one, Desk(make, 2, rides=True) as other:
        answered = of_both(one, other, 12)
        assert one.service._checkpoints.overflow
        told = [env.told for env in one.service._envs]
        assert of_both(one, other, 3) == [False] * 3
        assert [env.told for env in one.service._envs] == [n + 3 for n in told], "once a step"
        for desk in (one, other):
            desk.service._envs[1].text = ""
        assert of_both(one, other, 3) == [False, True, True], "that was short again"
    assert answered.index(False, 1) > 1 and not any(answered[answered.index(False, 1) :])


def test_what_can_t_be_told_of_a_state_is_as_in_python():
    def tear(desk: Desk, number: int) -> None:
        desk.service._envs[1].tears = number in (3, 4)

    with Desk(lambda row: Diary(), 2, rides=True) as one, Desk(lambda row: Diary(), 2, rides=True) as other:
        assert of_both(one, other, 8, tear)[3:] == [True] * 5


def test_physics_that_can_t_be_read_fail_their_row_as_in_python():
    def lose(desk: Desk, number: int) -> None:
        whole, subject = desk.service._sources[1], desk.service._renderables[1]
        subject.source = replace(whole, state_size=3) if number == 3 else whole

    with Desk(cheetah, 2, rides=True) as one, Desk(cheetah, 2, rides=True) as other:
        answered = of_both(one, other, 6, lose)
        assert not answered[3] and answered[4]


def test_an_unexpected_exception_fails_the_step_and_not_the_worker(monkeypatch):
    with Desk(cheetah, 2, rides=True) as desk:
        desk.step()

        def odd(rows: Any) -> None:
            raise MemoryError("nothing left")

        monkeypatch.setattr(desk.service._checkpoints, "capture", odd)
        desk.mine.sendall(desk.encode())
        got = desk.serve()
        assert isinstance(got, tuple) and got[7] == -1 and isinstance(got[8], MemoryError)
