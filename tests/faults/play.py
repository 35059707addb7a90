"""Plays one cell of the grid: has the fault strike, and checks all that the contract says about what follows."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioenv
from aioenv import sync
from aioenv.testing import faulty_envs
from aioenv.testing.faulty_env import HUGE_BYTES
from tests.faults.grid import TABLE, Cell, Outcome

NUM_ENVS, NUM_WORKERS = 5, 2
FAULTY = 1  # between slots 0 and 2 in worker 0
OTHERS = {"async": (3, 4), "sync": (3, 4), "spares": (0, 2, 3, 4)}  # in other workers
ALL = tuple(range(NUM_ENVS))
ACTIONS = np.zeros(NUM_ENVS, np.int64)

# How long things may take, in seconds.
HANG_TIMEOUT_S = 0.5  # timeout_s where something hangs
START_TIMEOUT_S = {"spawn": 4.0, "forkserver": 2.0}  # start_timeout_s, likewise: it has to get as far as the env
AMPLE_S = 30.0  # either, elsewhere: only a machine that stands still needs it
LATE_S = 2.0  # the contract: an await ends at most so long after its timeout; with a death, at once
GRACE_S = 0.2
CLOSE_S = GRACE_S + 1.0 + LATE_S  # after the grace SIGTERM, a second later SIGKILL
STUCK_S = 10.0  # what has not ended by then never will


class Async:
    """`AsyncVectorEnv` as it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.envs = aioenv.AsyncVectorEnv(*args, **kwargs)

    async def start(self) -> None:
        await self.envs

    async def do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.envs, name)(*args, **kwargs)
        return await result if isinstance(result, Coroutine) else result


class Sync:
    """The blocking facade. Its methods are coroutines that never wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arguments = args, kwargs

    async def start(self) -> None:
        args, kwargs = self._arguments
        self.envs = sync.VectorEnv(*args, **kwargs)

    async def do(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.envs, name)(*args, **kwargs)


class Spares(Async):
    """`AsyncVectorEnv` with two envs a slot, each in a worker of its own."""

    def __init__(self, *args: Any, num_workers: int, **kwargs: Any) -> None:
        super().__init__(*args, spare_envs=True, **kwargs)


DOORS = {"async": Async, "sync": Sync, "spares": Spares}


def without_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
        raise AssertionError("a blocking method has waited")


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer, in whatever way it ends."""
    began = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - began
        assert took < seconds, f"it took {took:.2f} s of {seconds:.2f} s"


@contextlib.contextmanager
def watchdog(pids: Iterable[int], seconds: float) -> Iterator[None]:
    """Kill the workers, which ends every call, if the block hangs; and say so."""
    barked = threading.Event()

    def bark() -> None:
        barked.set()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    timer = threading.Timer(seconds, bark)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        assert not barked.is_set(), f"nothing came for {seconds} s"


def members(groups: Iterable[int]) -> list[str]:
    """The living processes of process groups."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, rest = stat.read_text().rsplit(")", 1)
            state, _, group = rest.split()[:3]
            if int(group) in groups and state != "Z":
                found.append(name + ")")
    return found


def check_gone(groups: Iterable[int]) -> None:
    """Fail unless nothing of these process groups lives; they have been killed, which takes effect in a moment."""
    deadline = time.monotonic() + 1.0
    while left := members(groups):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.005)


class Play:
    """One cell.

    Args:
        cell: which.

    Attributes:
        order: what everybody does with a vector env.
    """

    order: tuple[str, ...] = ("reset", "step", "step", "render", "call", "close")

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.row = TABLE[cell.fault]
        self.hangs = self.row.running is Outcome.TIMEOUT
        self.timeout_s = HANG_TIMEOUT_S if self.hangs else AMPLE_S
        hangs_at_start = self.hangs and cell.outcome is Outcome.START
        workers = 2 if cell.door == "spares" else 1  # a slot
        self.start_timeout_s = workers * START_TIMEOUT_S[cell.start] if hangs_at_start else AMPLE_S
        self.door = DOORS[cell.door](
            faulty_envs(NUM_ENVS, cell.fault, cell.when, slot=FAULTY, at=2 if cell.when == "step" else 1),
            num_workers=NUM_WORKERS,
            start=cell.start,
            timeout_s=self.timeout_s,
            start_timeout_s=self.start_timeout_s,
        )
        self.do = self.door.do
        self.others = OTHERS[cell.door]
        self.episode = self.t = 0  # of every slot that is well

    async def run(self) -> None:
        """Play it, and fail if anything is not as the contract says."""
        if self.cell.outcome is Outcome.START:
            await self.fail_to_start()
            return
        await self.door.start()
        pids = [worker.pid for worker in self.door.envs.workers]
        try:
            with watchdog(pids, self.timeout_s + LATE_S + 0.5 if self.hangs else STUCK_S):
                await self.strike()
        finally:
            with watchdog(pids, STUCK_S), within(CLOSE_S):
                await self.do("close", grace_s=GRACE_S)
        await self.do("close")  # once more does nothing
        with pytest.raises(aioenv.ClosedError):
            await self.do("step", ACTIONS)
        check_gone(pids)

    # ------------------------------------------------------------ the fault strikes

    async def fail_to_start(self) -> None:
        with within(self.start_timeout_s + LATE_S), pytest.raises(aioenv.WorkerStartError) as caught:
            await self.door.start()
        error = caught.value
        assert FAULTY in error.slots
        self.check_words(error)
        assert error.pid is not None
        check_gone([error.pid])

    async def strike(self) -> None:
        """What everybody does, up to the moment of the fault; then that, and what follows."""
        for name in self.order:
            if name == self.cell.when and not (name == "step" and self.t == 0):
                break
            self.check(name, await self.operate(name), ALL)
        if name == "close":
            return
        follow = {
            Outcome.NO_ERROR: self.no_error,
            Outcome.SLOT: self.slot_fails,
            Outcome.WORKER: self.worker_dies,
            Outcome.TIMEOUT: self.nobody_answers,
        }
        await follow[self.cell.outcome](name)

    async def no_error(self, name: str) -> None:
        result = await self.operate(name)
        returned_wrong = self.cell.fault in ("nan", "huge_info")
        self.check(name, result, [slot for slot in ALL if slot != FAULTY] if returned_wrong else ALL)
        if self.cell.fault == "nan":
            assert np.isnan(result[0][FAULTY]).all()
            assert name == "reset" or np.isnan(result.reward[FAULTY])
        if self.cell.fault == "huge_info":
            huge = result[FAULTY] if name == "call" else result.info["huge"][FAULTY]
            assert huge.nbytes == HUGE_BYTES and (huge == 7).all()
        await self.go_on()

    async def slot_fails(self, name: str) -> None:
        with pytest.raises(aioenv.EnvError) as caught:
            await self.operate(name)
        error = caught.value
        assert (error.slot, error.slots, len(error.errors)) == (FAULTY, (FAULTY,), 1)
        self.check_words(error)
        assert "Traceback" in error.traceback
        self.check(name, error.partial, [slot for slot in ALL if slot != FAULTY])
        if name in ("reset", "step"):
            with pytest.raises(aioenv.EnvError) as refused:
                await self.do("step", ACTIONS)
            assert refused.value.slots == (FAULTY,)
        await self.go_on()

    async def worker_dies(self, name: str) -> None:
        with within(LATE_S), pytest.raises(aioenv.WorkerDied) as caught:
            await self.operate(name)
        error = caught.value
        assert FAULTY in error.slots and not set(self.others) & set(error.slots)
        if self.cell.fault != "closes_fds":  # that process ends later, when it replies
            assert error.slot == FAULTY and f"while it ran slot {FAULTY}" in str(error)
        self.check_words(error)
        self.check(name, error.partial, self.others)
        with within(LATE_S), pytest.raises(aioenv.WorkerDied) as refused:
            await self.do("step", ACTIONS)
        assert FAULTY in refused.value.slots
        await self.others_go_on()

    async def nobody_answers(self, name: str) -> None:
        with within(self.timeout_s + LATE_S), pytest.raises(aioenv.StepTimeout) as caught:
            await self.operate(name)
        self.check_words(caught.value)
        if name in ("reset", "step"):
            ready = await self.do("recv", len(self.others))
            assert ready.slots.tolist() == list(self.others)
            self.check(name, ready[1:], self.others, rows=range(len(self.others)))
        await self.others_go_on()

    def check_words(self, error: Exception) -> None:
        assert self.row.says in str(error)
        assert (type(error.__cause__).__name__ if error.__cause__ else None) == self.row.cause

    # ------------------------------------------------------------ life goes on

    async def go_on(self) -> None:
        """All slots, once more."""
        for name in dict.fromkeys(self.order[:-1]):
            self.check(name, await self.operate(name), ALL)

    async def others_go_on(self) -> None:
        """The slots of the other worker."""
        assert await self.do("call_at", self.others[0], "answer") == 1000 * self.others[0] + self.t
        await self.do("send", ACTIONS[: len(self.others)], self.others)
        self.t += 1
        ready = await self.do("recv", len(self.others))
        self.check("step", ready[1:], self.others, rows=range(len(self.others)))

    async def operate(self, name: str) -> Any:
        match name:
            case "reset":
                self.episode, self.t = self.episode + 1, 0
                return await self.do("reset", seed=7)
            case "step":
                self.t += 1
                return await self.do("step", ACTIONS)
            case "call":
                return await self.do("call", "answer")
        return await self.do(name)

    def check(self, name: str, result: Any, slots: Iterable[int], rows: Iterable[int] | None = None) -> None:
        """Fail unless these slots have, in these rows of the result, what `FaultyEnv` says they have."""
        for slot, row in zip(slots, slots if rows is None else rows, strict=True):
            match name:
                case "reset" | "step":
                    number, episode, t = result[0][row].tolist()
                    assert (number, t) == (slot, self.t)
                    # a reset that failed has begun no episode
                    assert episode == self.episode or slot == FAULTY
                    assert name == "reset" or (result[1][row], result[2][row], result[3][row]) == (self.t, 0, 0)
                case "call":
                    assert result[row] == 1000 * slot + self.t
                case "render":
                    assert np.array_equal(result[row], np.full((4, 4, 3), self.t, np.uint8))
