"""Spare envs under cancellations, timeouts, killed workers and ends at any moment: aligned, and nothing is left."""

from __future__ import annotations

from functools import partial

import pytest

import aioenv
from tests.faults.spares_kit import MODES, Driver, N, Twin
from tests.kits.loop_kit import LOOPS, run_on

SLOW_S, RESET_S = 0.0005, 0.02
loops = pytest.mark.parametrize("loop", LOOPS)
modes = pytest.mark.parametrize("mode", MODES, ids=[mode.value for mode in MODES])


def twins(slow_s: float = SLOW_S, reset_s: float = RESET_S, hold: str | None = None):
    return [partial(Twin, slot, slow_s, reset_s, hold) for slot in range(N)]


@loops
@modes
def test_all_workers_are_known_and_end_whichever_runs_the_episode(mode, loop):
    async def main():
        async with aioenv.AsyncVectorEnv(twins(0, 0), autoreset_mode=mode, spare_envs=True) as envs:
            pids = [worker.pid for worker in envs.workers]
            assert len(set(pids)) == 2 * N
            await envs.reset(seed=0)
            spare = (await envs.get_attr("spare"))[0]
            while (await envs.get_attr("spare"))[0] == spare:
                await envs.step([0] * N)
            assert [worker.pid for worker in envs.workers] == pids

    run_on(loop, main())


# ---------------------------------------------------------------- random cancellations, timeouts and kills


async def disturb(mode, cases: int, *, seed: int, copy: bool = True) -> None:
    async with aioenv.AsyncVectorEnv(twins(), autoreset_mode=mode, spare_envs=True, copy=copy) as envs:
        driver = Driver(envs, mode, seed)
        await driver.begin()
        await driver.run(cases)
        assert envs.stats().spare_waits, "none waited for a spare env"


@modes
@pytest.mark.usefixtures("way")
def test_cancellations_and_timeouts_at_random_instants(mode):
    run_on("asyncio", disturb(mode, 25, seed=1))


@modes
def test_cancellations_and_timeouts_on_uvloop_without_copies(mode):
    run_on("uvloop", disturb(mode, 25, seed=2, copy=False))


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [3, 4])
@loops
@modes
@pytest.mark.usefixtures("way")
def test_five_hundred_cancellations_and_timeouts(mode, loop, seed):
    run_on(loop, disturb(mode, 500, seed=seed, copy=seed == 3))
