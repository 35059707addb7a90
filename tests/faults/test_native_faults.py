"""The Python rows of the grid, for a native task: an exception, or something odd, in the code of a batch.

A fault is the vector env's, so it touches all of its slots: in this process all there are, over workers those of one.
What ends or hangs a process is about processes, whatever they hold (`test_grid.py`); a thread can only be left to
itself (`tests/native/test_native_lifetime.py`).
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest

import aioenv
from aioenv.native.tasks.locomotion_2d import Hopper
from aioenv.testing.faulty_env import HUGE_BYTES, makes_sense, strike
from tests.faults.grid import NO_ERROR, SLOT, TABLE

pytestmark = pytest.mark.asyncio

N = 4
# rows in which no process is lost; those that are about a process's limits and descriptors are for a process of its own
ROWS = [fault for fault, row in TABLE.items() if row.running in (SLOT, NO_ERROR) and fault != "forks"]
IN_A_PROCESS = {"out_of_memory", "prints", "floods_stderr"}


class Faulty(Hopper):
    """A task whose next reset, step or call has a fault, once it is told so."""

    def __init__(self, num_envs: int, fault: Any = None, when: str = "") -> None:
        self.armed: Any = (fault, when)
        super().__init__(num_envs)
        self._strikes("factory")

    def pid(self) -> int:
        return os.getpid()

    def arm(self, pid: int, fault: str, when: str) -> None:
        """The next moment of that sort has this fault, in one of the processes."""
        if os.getpid() == pid:
            self.armed = fault, when

    def _strikes(self, moment: str) -> Any:
        fault, when = self.armed
        if when != moment:
            return None
        self.armed = None, ""
        strike(fault)
        return fault

    def answer(self) -> Any:
        return np.full(HUGE_BYTES, 7, np.uint8) if self._strikes("call") == "huge_info" else 5

    def reset(self, **kwargs: Any) -> Any:
        return self._odd(self._strikes("reset"), super().reset(**kwargs))

    def step(self, actions: Any) -> Any:
        return self._odd(self._strikes("step"), super().step(actions))

    def _odd(self, fault: Any, result: Any) -> Any:
        obs, *rest, info = result
        if fault == "wrong_shape":
            obs = obs[:, 1:]
        elif fault == "wrong_dtype":
            obs = obs.astype(np.complex128)
        elif fault == "nan":
            obs[:] = np.nan
        elif fault == "huge_info":
            info = {**info, "huge": np.full((self.num_envs, HUGE_BYTES // self.num_envs), 7, np.uint8)}
        return obs, *rest, info

    def close_extras(self, **kwargs: Any) -> None:
        super().close_extras(**kwargs)
        self._strikes("close")


def says(fault: str) -> str:
    """What the error has in it."""
    return {"wrong_shape": "expected shape", "wrong_dtype": "complex128"}.get(fault, TABLE[fault].says)


@pytest.mark.parametrize("num_workers", [0, 2], ids=["here", "workers"])
async def test_faults_while_it_runs(num_workers):
    touched = range(N // 2) if num_workers else range(N)
    others = [slot for slot in range(N) if slot not in touched]
    actions = np.zeros((N, 3), np.float32)
    async with (
        aioenv.NativeVectorEnv(Faulty, N, num_workers=num_workers) as envs,
        aioenv.NativeVectorEnv(Hopper, N) as twin,
    ):
        (pid, *_) = await envs.call("pid")
        for when in ("reset", "step", "call"):
            for fault in ROWS:
                if not makes_sense(fault, when) or (fault in IN_A_PROCESS and not num_workers):
                    continue
                for each in (envs, twin):
                    await each.reset(seed=3)
                await envs.call("arm", pid, fault, when)
                do = {
                    "reset": partial(envs.reset, seed=4),
                    "step": partial(envs.step, actions),
                    "call": partial(envs.call, "answer"),
                }[when]
                expected = {"reset": partial(twin.reset, seed=4), "step": partial(twin.step, actions)}.get(when)
                if TABLE[fault].running is SLOT:
                    with pytest.raises(aioenv.EnvError) as caught:
                        await do()
                    error = caught.value
                    assert error.slots == tuple(touched) and says(fault) in str(error), (fault, when, str(error))
                    assert error.pid == pid and "Traceback" in error.traceback
                    result = error.partial
                else:
                    result = await do()
                right = others if TABLE[fault].running is SLOT or fault in ("nan", "huge_info") else range(N)
                if expected is not None:
                    wanted = await expected()
                    if right:
                        assert result.obs[right].tobytes() == wanted.obs[right].tobytes(), (fault, when)
                elif right:
                    assert [result[slot] for slot in right] == [5] * len(right)
                # what has not failed goes on; what has waits for its reset
                if TABLE[fault].running is SLOT and when != "call":
                    with pytest.raises(aioenv.EnvError, match="must be reset first"):
                        await envs.step(actions)
                    mask = np.isin(range(N), touched)
                    for each in (envs, twin):
                        await each.reset(seed=5, options={"reset_mask": mask})
                    result, wanted = [await each.step(actions) for each in (envs, twin)]
                    assert result.obs.tobytes() == wanted.obs.tobytes(), (fault, when)
                elif fault != "nan":
                    result, wanted = [await each.step(actions) for each in (envs, twin)]
                    assert result.obs.tobytes() == wanted.obs.tobytes(), (fault, when)


@pytest.mark.parametrize("num_workers", [0, 2], ids=["here", "workers"])
@pytest.mark.parametrize("fault", ["raises_two_args", "raises_unpicklable"])
async def test_faults_at_its_start(fault, num_workers):
    with pytest.raises(aioenv.WorkerStartError) as caught:
        await aioenv.NativeVectorEnv(partial(Faulty, fault=fault, when="factory"), N, num_workers=num_workers)
    assert says(fault) in str(caught.value)
    # over workers every share fails, and the first to say so is named
    assert caught.value.slots in ([(0, 1), (2, 3)] if num_workers else [tuple(range(N))])


@pytest.mark.parametrize("num_workers", [0, 2], ids=["here", "workers"])
async def test_faults_at_its_end(num_workers):
    envs = await aioenv.NativeVectorEnv(Faulty, N, num_workers=num_workers)
    (pid, *_) = await envs.call("pid")
    await envs.call("arm", pid, "raises", "close")
    await envs.close()
    await envs.close()
    with pytest.raises(aioenv.ClosedError):
        await envs.reset()
