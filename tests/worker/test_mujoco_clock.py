"""The clock of MuJoCo's profiler stands still until it is wanted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

import aioenv
from aioenv import speedups
from tests.kits.version_kit import needs, needs_mujoco_batch
from tests.kits.worker_kit import compiled


class Timed(HalfCheetahEnv):
    """Tells what the profiler says, and may install a clock."""

    def __init__(self, clock: Any = None) -> None:
        super().__init__()
        if clock is not None:
            import mujoco

            mujoco.set_mjcb_time(clock)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        timer = self.data.timer[0]  # mjTIMER_STEP
        return obs, reward, terminated, truncated, {**info, "duration": timer.duration, "number": int(timer.number)}


async def told(make: Any, **kwargs: Any) -> tuple[list[float], list[int]]:
    async with aioenv.AsyncVectorEnv([make, make], **kwargs) as envs:
        await envs.reset(seed=0)
        info: Any = {}
        for _ in range(3):
            info = (await envs.step(np.zeros((2, 6), np.float32)))[4]
        return info["duration"].tolist(), info["number"].tolist()


# what the bindings of older ones don't install is not there to be stopped
CLOCK = needs("mujoco", "3.17")


@pytest.mark.asyncio
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
async def test_in_workers_it_stands_still(start):
    durations, numbers = await told(Timed, start=start)
    assert numbers == [15, 15], "it counts"
    if speedups.compiled:
        assert durations == [0.0, 0.0]


@pytest.mark.asyncio
async def test_a_clock_that_an_env_installs_is_kept():
    durations, numbers = await told(lambda: Timed(time.perf_counter))
    assert numbers == [15, 15] and min(durations) > 0


def in_a_process(code: str, **variables: str) -> list[str]:
    begin = """
import time, mujoco
from aioenv.mujoco_versions import stop_clock
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><body><joint/><geom size='.1'/></body></worldbody></mujoco>")
def runs():
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data, 10)
    assert data.timer[0].number == 10
    print(data.timer[0].duration > 0)
"""
    run = [sys.executable, "-c", begin + code]
    return subprocess.check_output(run, text=True, env={**os.environ, **variables}).split()


@CLOCK
@compiled
def test_it_stands_still_until_it_is_wanted():
    code = """
runs(); print(stop_clock()); runs(); print(stop_clock()); runs()
mujoco.set_mjcb_time(None); runs()
print(stop_clock()); runs()
mujoco.set_mjcb_time(time.perf_counter); print(stop_clock()); runs()
mujoco.set_mjcb_time(None); runs(); print(stop_clock()); runs()
"""
    expected = "True True False True False True True False False True True True False"
    assert in_a_process(code) == expected.split()


@compiled
def test_a_foreign_c_clock_is_left_alone():
    code = """
import ctypes
from aioenv import mujoco_versions
ticks = []
tick = ctypes.CFUNCTYPE(ctypes.c_double)(lambda: ticks.append(1) or float(len(ticks)))
mujoco_versions._clock_variable(mujoco).value = ctypes.cast(tick, ctypes.c_void_p).value
print(stop_clock()); runs(); print(len(ticks) > 20)
"""
    assert in_a_process(code) == ["False", "True", "True"]


@needs_mujoco_batch
@compiled
def test_pools_of_simulations_which_native_tasks_are_made_of_stop_it():
    code = """
import aioenv
data = mujoco.MjData(model)
mujoco.mj_step(model, data)
before = data.timer[0].duration
with aioenv.SimPool(model, 2) as pool:
    runs()
    mujoco.mj_step(model, data)
    print(data.timer[0].duration > before > 0)
    mujoco.set_mjcb_time(None)
    pool.step()
    mujoco.mj_step(model, data)
    print(data.timer[0].duration > before)
"""
    assert in_a_process(code) == ["False", "False", "True"]


@needs_mujoco_batch
@compiled
def test_a_pool_that_is_refused_leaves_it_going():
    code = """
import aioenv
model.opt.enableflags |= int(mujoco.mjtEnableBit.mjENBL_SLEEP)
try:
    aioenv.SimPool(model, 2)
except ValueError:
    model.opt.enableflags = 0
    runs()
"""
    assert in_a_process(code) == ["True"]


@CLOCK
def test_without_what_was_compiled_it_goes_on():
    code = "print(stop_clock()); runs()"
    assert in_a_process(code, AIOENV_NO_SPEEDUPS="1") == ["False", "True"]


def test_where_mujoco_was_not_imported_it_is_not():
    code = "import sys; from aioenv.mujoco_versions import stop_clock; print(stop_clock(), 'mujoco' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


@compiled
def test_results_are_the_same():
    """As bits: a step with it and one without."""
    code = """
import gymnasium, numpy, hashlib
def play():
    env = gymnasium.make("Hopper-v5")
    env.reset(seed=1)
    env.action_space.seed(1)
    found = hashlib.sha256()
    for _ in range(200):
        obs, reward, terminated, *_ = env.step(env.action_space.sample())
        found.update(obs.tobytes() + numpy.float64(reward).tobytes())
        if terminated:
            env.reset()
    print(found.hexdigest())
play(); assert stop_clock(); play()
"""
    first, second = in_a_process(code)
    assert first == second
