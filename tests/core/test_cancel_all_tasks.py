"""A program cancels all tasks of the loop, as `asyncio.run` does at its end: ours are not among them.

A hang is what these would show: pytest's timeout ends it.
"""

from __future__ import annotations

import asyncio
import contextlib

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.process.launch import START_METHODS
from tests.kits.loop_kit import LOOPS

ACTIONS = np.array([0, 1, 1, 0])
SMALL = aioenv.RenderConfig(8, 8, quality="fast", workers=1)


class Closing(gym.Wrapper):
    """A CartPole that leaves a file when it is closed."""

    def __init__(self, path: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.path = path

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed\n")
        super().close()


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()


async def oracle(steps: int) -> np.ndarray:
    """What CartPoles look like after so many steps."""
    envs = gym.make_vec("CartPole-v1", 4, vectorization_mode="sync")
    obs, _ = envs.reset(seed=3)
    for _ in range(steps):
        obs = envs.step(ACTIONS)[0]
    envs.close()
    return obs


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", START_METHODS)
def test_the_main_coroutine_returns_while_another_steps(start, loop, tmp_path):
    path = tmp_path / "closed"
    ended = []

    async def work(ready):
        async with aioenv.AsyncVectorEnv([lambda: Closing(str(path))] * 4, num_workers=2, start=start) as envs:
            await envs.reset(seed=3)
            ready.set()
            try:
                while True:
                    await envs.step(ACTIONS)
            finally:
                ended.append(True)

    async def main():
        ready = asyncio.Event()
        main.task = asyncio.create_task(work(ready))
        await ready.wait()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())
    assert main.task.cancelled() and ended
    assert path.read_text() == "closed\n" * 4  # asked to, not killed


@pytest.mark.asyncio
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize("channel", ["scatter", "streams"])
async def test_the_cancelled_task_and_the_cancelling_one_may_step_on(start, channel):
    cleaned = asyncio.Event()

    async def work(envs):
        try:
            while True:
                await asyncio.sleep(60)
        finally:
            await envs.step(ACTIONS)
            cleaned.set()

    async with aioenv.make_vec("CartPole-v1", 4, num_workers=2, start=start, channel=channel) as envs:
        await envs.reset(seed=3)
        worker = asyncio.create_task(work(envs))
        await asyncio.sleep(0)
        cancel_all()
        with pytest.raises(asyncio.CancelledError):
            await worker
        assert cleaned.is_set()
        obs = (await envs.step(ACTIONS))[0]
    assert np.array_equal(obs, await oracle(2))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize("drawing", [False, True])
def test_at_any_moment_of_a_start(start, drawing, loop):
    async def once(turns):
        made = aioenv.make_vec("HalfCheetah-v5", 2, num_workers=2, start=start, render=SMALL if drawing else None)

        async def work():
            async with made:
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        for _ in range(turns):
            await asyncio.sleep(0)
        cancel_all()
        await asyncio.sleep(0)
        cancel_all()  # and once more, whatever it does now
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.closed

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        for turns in (1, 2, 3, 5, 20, 80):
            runner.run(once(turns))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", START_METHODS)
def test_in_any_moment_of_a_close(start, loop):
    async def once(turns):
        envs = await aioenv.make_vec("CartPole-v1", 4, num_workers=2, start=start)
        closing = asyncio.create_task(envs.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        cancel_all()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        await envs.close()
        assert all(info.state == "closed" for info in envs.workers)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        for turns in (1, 2, 3, 5, 10):
            runner.run(once(turns))


@pytest.mark.asyncio
async def test_a_worker_that_is_started_again_comes_back():
    async with aioenv.make_vec("CartPole-v1", 4, num_workers=2, restart=aioenv.RestartPolicy()) as envs:
        await envs.reset(seed=3)
        worker = envs._backend.worker_pool.members[0].worker
        worker.kill("a test")
        while worker.state.value == "ready":
            await asyncio.sleep(0)
        cancel_all()
        for _ in range(2):
            obs, *_ = await envs.step(ACTIONS)
        assert obs.shape == (4, 4) and worker.generation == 1


@pytest.mark.asyncio
async def test_a_pool_draws_on():
    async with aioenv.RenderPool(
        "<mujoco><worldbody><geom size='1'/></worldbody></mujoco>", workers_per_device=2
    ) as pool:
        before = await pool.render(slots=range(4), width=8, height=8)
        future = pool.submit(slots=range(4), width=8, height=8)
        cancel_all()
        assert np.array_equal(await future, before)
        assert np.array_equal(await pool.render(slots=range(4), width=8, height=8), before)


@pytest.mark.asyncio
async def test_our_tasks_are_invisible():
    async with aioenv.make_vec("HalfCheetah-v5", 2, num_workers=2, render=SMALL) as envs:
        await envs.reset(seed=3)
        await envs.render()
        assert asyncio.all_tasks() == {asyncio.current_task()}
