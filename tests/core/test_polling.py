"""Polling: no longer than it may, and not where it does not pay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aioenv
from aioenv.core import dispatcher
from aioenv.worker import worker_end
from aioenv.worker.worker_end import SpinPoller


class Clock:
    """Time passes only when it is read."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def test_it_stops_at_its_deadline(monkeypatch):
    clock = Clock(1e-6)
    monkeypatch.setattr(worker_end, "perf_counter", clock)
    asked = []
    assert not SpinPoller(50e-6).wait(lambda: asked.append(1))
    assert 45 <= len(asked) <= 52 and clock.now <= 53e-6


def test_a_hit_ends_the_wait_at_once(monkeypatch):
    monkeypatch.setattr(worker_end, "perf_counter", Clock(1e-6))
    answers = iter([False, False, True])
    assert SpinPoller(50e-6).wait(lambda: next(answers))
    assert next(answers, None) is None


def test_misses_make_it_rest_ever_longer_and_a_hit_makes_it_as_at_the_start(monkeypatch):
    monkeypatch.setattr(worker_end, "perf_counter", Clock(100e-6))
    poller, asked = SpinPoller(50e-6), []

    def polls(waits: int, answer: bool) -> list[bool]:
        """For each wait, whether anything was asked at all."""
        outcome = []
        for _ in range(waits):
            asked.clear()
            poller.wait(lambda: asked.append(1) or answer)
            outcome.append(bool(asked))
        return outcome

    first = [True] * 8 + [False] * 32
    assert polls(40, False) == first
    assert polls(72, False) == [True] * 8 + [False] * 64
    assert polls(100_000, False).count(True) < 1000, "what never pays is hardly ever tried"
    while not polls(1, True)[0]:
        pass
    assert polls(40, False) == first


def test_zero_never_polls():
    poller = SpinPoller(0.0)
    assert not any(poller.wait(lambda: 1 / 0) for _ in range(100))


def test_who_looks_by_himself_is_told_for_how_long():
    poller = SpinPoller(50e-6)
    turns = []
    for _ in range(42):
        turns.append(poller.next_wait())
        if turns[-1]:
            assert not poller.record(False)
    assert turns == [50e-6] * 8 + [0.0] * 32 + [50e-6] * 2
    assert poller.record(True)


@pytest.mark.asyncio
@pytest.mark.parametrize(("cpus", "polls"), [(2, False), (3, True)])
async def test_the_loop_polls_only_on_a_cpu_that_no_worker_needs(monkeypatch, cpus, polls):
    monkeypatch.setattr(dispatcher, "usable_cpus", lambda: cpus)
    waits: list[SpinPoller] = []
    async with aioenv.make_vec("CartPole-v1", 8, num_workers=2) as envs:
        wait = SpinPoller.wait

        def counting(poller: SpinPoller, ready: Any) -> bool:
            waits.append(poller)
            return wait(poller, ready)

        monkeypatch.setattr(SpinPoller, "wait", counting)
        await envs.reset(seed=0)
        await envs.rollout(lambda obs: (obs[:, 2] > 0).astype(np.int64), 300, groups=2)
        for _ in range(20):
            await envs.step(np.zeros(8, np.int64))
    assert bool(waits) == polls
