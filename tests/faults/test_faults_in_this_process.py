"""Faults of envs that live in this process (`num_workers=0`): those that a thread survives, at every moment.

The outcomes are those of the grid over workers (`grid.py`), but for what one process for all can't do: an env that
ends its program takes all slots with it, and an env that hangs delays the others.
"""

from __future__ import annotations

import itertools
import logging
import threading
from typing import NamedTuple

import pytest

import aioenv
from aioenv.process import thread_process
from aioenv.process.env_thread import RunTimes
from aioenv.sync import portal
from aioenv.testing import FAULTS, MOMENTS, faulty_env, faulty_envs
from aioenv.testing.faulty_env import makes_sense
from tests.faults.grid import NO_ERROR, TABLE, Outcome
from tests.faults.play import (
    ACTIONS,
    ALL,
    CLOSE_S,
    DOORS,
    FAULTY,
    GRACE_S,
    LATE_S,
    NUM_ENVS,
    Play,
    within,
    without_loop,
)
from tests.kits.loop_kit import LOOPS, run_on

# They end the process, take its descriptors, signals or memory away, or leave a process behind.
NEED_PROCESS = {
    "os_exit", "segfault", "sigkill", "closes_fds", "out_of_memory", "hangs_in_c", "ignores_sigterm", "forks",
}  # fmt: skip
TIMEOUT_S = 0.3
START_TIMEOUT_S = 0.5
AMPLE_S = 30.0


class Cell(NamedTuple):
    """A fault at a moment; whether steps and resets run on the env's thread or inline; the loop, and the door."""

    fault: str
    when: str
    where: str
    loop: str
    door: str

    @property
    def outcome(self) -> Outcome:
        row = TABLE[self.fault]
        if self.when == "close":
            return NO_ERROR
        return row.start if self.when in ("import", "factory") else row.running

    def __str__(self) -> str:
        return "-".join(self)


def cells():
    """All faults and moments; loops and doors go round."""
    points = itertools.cycle(itertools.product(LOOPS, ("async", "sync")))  # spare envs need processes
    for fault, when in itertools.product(FAULTS, MOMENTS):
        if fault in NEED_PROCESS or not makes_sense(fault, when):
            continue
        # an env with a limit of time, or one that draws, stays on its thread; so do calls
        inline = when in ("reset", "step") and fault != "hangs"
        for where in ("thread", "inline") if inline else ("thread",):
            for _ in range(2 if fault == "hangs" else 1):
                cell = Cell(fault, when, where, *next(points))
                yield pytest.param(cell, id=str(cell))


class Inline(RunTimes):
    """Runs everything inline, from the beginning."""

    def __init__(self, *args) -> None:
        super().__init__(args[0], True)


class PlayHere(Play):
    """One cell. `gate` lets what hangs go on."""

    def __init__(self, cell, gate) -> None:
        self.cell, self.gate = cell, gate
        self.row = TABLE[cell.fault]
        self.hangs = cell.fault == "hangs"
        limits = {}
        if cell.where == "thread":
            limits = {"timeout_s": TIMEOUT_S if self.hangs else AMPLE_S}
        else:
            self.order = tuple(name for name in self.order if name != "render")
        self.start_timeout_s = START_TIMEOUT_S if self.hangs else AMPLE_S
        render_mode = "rgb_array" if cell.where == "thread" else None
        at = 2 if cell.when == "step" else 1
        self.door = DOORS[cell.door](
            faulty_envs(NUM_ENVS, cell.fault, cell.when, slot=FAULTY, at=at, render_mode=render_mode),
            num_workers=0,
            start_timeout_s=self.start_timeout_s,
            **limits,
        )
        self.do = self.door.do
        self.episode = self.t = 0

    async def run(self) -> None:
        if self.cell.outcome is Outcome.START:
            with within(self.start_timeout_s + LATE_S), pytest.raises(aioenv.WorkerStartError) as caught:
                await self.door.start()
            assert FAULTY in caught.value.slots
            self.check_words(caught.value)
            return
        await self.door.start()
        try:
            await self.strike()
        finally:
            with within(CLOSE_S):
                await self.do("close", grace_s=GRACE_S)
        await self.do("close")
        with pytest.raises(aioenv.ClosedError):
            await self.do("step", ACTIONS)

    async def worker_dies(self, name: str) -> None:
        with within(LATE_S), pytest.raises(aioenv.WorkerDied) as caught:
            await self.operate(name)
        error = caught.value
        assert (error.slot, error.slots) == (FAULTY, ALL) and f"while it ran slot {FAULTY}" in str(error)
        self.check_words(error)
        for again in ("step", "reset", "call"):
            with within(LATE_S), pytest.raises(aioenv.WorkerDied):
                await self.operate(again)

    async def nobody_answers(self, name: str) -> None:
        with within(TIMEOUT_S + LATE_S), pytest.raises(aioenv.StepTimeout) as caught:
            await self.operate(name)
        self.check_words(caught.value)
        if self.cell.door == "sync":
            return  # closed while it hangs
        self.gate.set()
        if name in ("reset", "step"):
            ready = await self.do("recv", NUM_ENVS)
            self.check(name, ready[1:], ALL)
        await self.go_on()


@pytest.mark.parametrize("cell", list(cells()))
def test_grid(cell, monkeypatch, caplog):
    gate = threading.Event()
    monkeypatch.setitem(faulty_env._ACTS, "hangs", gate.wait)
    if cell.where == "inline":
        monkeypatch.setattr(thread_process, "RunTimes", Inline)
    try:
        with caplog.at_level(logging.WARNING, "aioenv"):
            if cell.door == "sync":
                monkeypatch.setattr(portal, "new_event_loop", LOOPS[cell.loop])
                without_loop(PlayHere(cell, gate).run())
            else:

                async def run():
                    await PlayHere(cell, gate).run()

                run_on(cell.loop, run())
        hung = cell.fault == "hangs" and not gate.is_set()
        assert ("has not ended: a thread can't be killed" in caplog.text) == hung
    finally:
        gate.set()
        for thread in threading.enumerate():
            if thread.name.startswith("aioenv-worker"):
                thread.join()


def test_the_grid_leaves_nothing_out():
    met = {(cell.fault, cell.when) for cell in (param.values[0] for param in cells())}
    assert {fault for fault, _ in met} | NEED_PROCESS == set(FAULTS)
    assert {when for _, when in met} == set(MOMENTS)
