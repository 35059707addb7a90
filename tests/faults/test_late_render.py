"""Faults of envs that draw themselves after they have replied (`render=` with envs that are not MuJoCo's).

The step was right, and stays so; what is wrong is told by `render`, and by the next step if the worker is gone.
"""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

import aioenv
from aioenv.process.launch import START_METHODS
from aioenv.testing import faulty_envs
from aioenv.testing.faulty_env import makes_sense
from tests.faults.grid import TABLE, Outcome
from tests.faults.play import CLOSE_S, GRACE_S, LATE_S, check_gone, within
from tests.kits.loop_kit import run_on

FAULTS = [fault for fault in TABLE if makes_sense(fault, "render")]
ACTIONS = np.zeros(5, np.int64)
TIMEOUT_S = 0.5


@contextlib.asynccontextmanager
async def drawing(fault, start):
    """A vector env whose slot 1 has the fault when it draws its second image, which is just about to come."""
    hangs = TABLE[fault].running is Outcome.TIMEOUT
    envs = aioenv.AsyncVectorEnv(
        faulty_envs(5, fault, "render", slot=1, at=2),
        num_workers=2,
        start=start,
        render=aioenv.RenderConfig(),
        timeout_s=TIMEOUT_S if hangs else 30.0,
    )
    await envs
    pids = [worker.pid for worker in envs.workers]
    try:
        await envs.reset()
        assert not (await envs.render()).any()
        assert (await envs.step(ACTIONS)).reward.tolist() == [1] * 5
        yield envs
    finally:
        with within(CLOSE_S):
            await envs.close(grace_s=GRACE_S)
        check_gone(pids)


def cases(*outcomes):
    return [f for f in FAULTS if TABLE[f].running in outcomes]


def started(*outcomes):
    """Each fault in a forked worker, and one of each outcome in a spawned one; `make stress` has all."""
    return [
        pytest.param(fault, start, marks=[pytest.mark.stress] if number and start != START_METHODS[-1] else [])
        for outcome in outcomes
        for number, fault in enumerate(cases(outcome))
        for start in START_METHODS
    ]


@pytest.mark.parametrize(("fault", "start"), started(Outcome.SLOT, Outcome.WORKER, Outcome.NO_ERROR))
def test_render_tells_it_and_life_goes_on(fault, start):
    row = TABLE[fault]

    async def main():
        async with drawing(fault, start) as envs:
            if row.running is Outcome.NO_ERROR:
                assert (await envs.render() == 1).all()
            else:
                with within(LATE_S), pytest.raises(aioenv.RenderError) as caught:
                    await envs.render()
                assert row.says in str(caught.value)
            if row.running is Outcome.WORKER:
                assert isinstance(caught.value.__cause__, aioenv.WorkerDied)
                with within(LATE_S), pytest.raises(aioenv.WorkerDied) as died:
                    await envs.step(ACTIONS)
                assert 1 in died.value.slots and not {3, 4} & set(died.value.slots)
                return
            assert (await envs.step(ACTIONS)).reward.tolist() == [2] * 5
            assert (await envs.render() == 2).all()

    run_on("asyncio", main())


@pytest.mark.parametrize(("fault", "start"), started(Outcome.TIMEOUT))
def test_while_an_image_hangs_the_next_step_times_out(fault, start):
    async def main():
        async with drawing(fault, start) as envs:
            with within(TIMEOUT_S + LATE_S), pytest.raises(aioenv.StepTimeout):
                await envs.step(ACTIONS)
            ready = await envs.recv(2)
            assert (ready.slots.tolist(), ready.reward.tolist()) == ([3, 4], [2, 2])

    run_on("asyncio", main())


@pytest.mark.parametrize("fault", cases(Outcome.TIMEOUT))
def test_an_image_that_hangs_times_out(fault):
    async def main():
        async with drawing(fault, None) as envs, asyncio.timeout(TIMEOUT_S + LATE_S):
            with pytest.raises(aioenv.StepTimeout):
                await envs.render()

    run_on("asyncio", main())
