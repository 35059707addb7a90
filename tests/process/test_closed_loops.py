"""Loops that are closed, or end with an exception, while workers are started: nothing is left of these."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import warnings
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS, LaunchResources, launch
from aioenv.testing import leak_check
from tests.kits.loop_kit import LOOPS


def turn(loop):
    """One turn of a loop, which waits for nothing."""
    loop.call_soon(loop.stop)
    loop.run_forever()


@contextlib.contextmanager
def forgetting():
    """Collect garbage after this block, without the warnings of unclosed objects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


async def held():
    return LaunchResources()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("known", [True, False])
def test_a_launch_in_any_turn(known, channel, start, loop):
    """The caller that abandons it knows what it holds; of a forgotten one its coroutine does."""
    began = 0
    for turns in range(1, 8):
        with leak_check():
            running = LOOPS[loop]()
            holds = running.run_until_complete(held())
            task = running.create_task(launch(start, channel, dict(os.environ), (), None, holds))
            for _ in range(turns):
                turn(running)
            running.close()
            if task.done():
                task.result().abandon()
            else:
                began += 1
                task._log_destroy_pending = False
                if known:
                    holds.abandon()
            with forgetting():
                if not known:
                    del task, holds
    assert began or start == "spawn", "which takes one turn"


class Gated(gym.Env):
    """An env that is made when the other end of a fifo is opened."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, fifo):
        with open(fifo, encoding="ascii") as opened:
            opened.read()

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Enough(Exception):
    """What a loop ends with."""


async def starting(envs, _):
    """Both workers are there, and neither's env."""
    task = asyncio.ensure_future(envs.__aenter__())
    task._log_destroy_pending = False
    while any(worker.pid is None for worker in envs.workers) or not envs.workers:
        await asyncio.sleep(0)


async def started(envs, fifo):
    """All is well."""
    task = asyncio.ensure_future(envs.__aenter__())
    while not task.done():
        try:
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # it has no reader yet
            await asyncio.sleep(0)
    await task
    await envs.reset()


async def restarting(envs, fifo):
    """One worker has died, and the next one's env is not there."""
    await started(envs, fifo)
    dead = envs.workers[1].pid
    os.kill(dead, signal.SIGKILL)
    while envs.workers[1].state != "restarting" or envs.workers[1].pid in (None, dead):
        await asyncio.sleep(0)


async def until(moment):
    """End the loop with an exception then."""
    await asyncio.wait_for(moment, 60)
    for _ in range(5):  # what was to begin has begun, or asyncio would say that it has not
        await asyncio.sleep(0)
    raise Enough


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize("moment", [starting, started, restarting])
@pytest.mark.parametrize("closed", [True, False])
def test_a_vector_env_in_any_state(closed, moment, start, loop, fifo):
    """It is closed while there are references to it, or forgotten."""
    running = LOOPS[loop]()
    restart = aioenv.RestartPolicy(backoff_s=0.0)
    envs = aioenv.AsyncVectorEnv([partial(Gated, fifo)] * 2, num_workers=2, start=start, restart=restart)
    with leak_check():
        with pytest.raises(Enough) as caught:
            running.run_until_complete(until(moment(envs, fifo)))
        caught.value.__traceback__ = None
        del caught
        running.close()
        with forgetting():
            if closed:
                asyncio.run(envs.close())
            else:
                del envs


@pytest.mark.skipif("forkserver" not in START_METHODS, reason="takes a fork server")
@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("closed", [True, False])
def test_a_pool_whose_fork_server_is_not_ready(closed, loop):
    """It imports for longer than these turns take."""
    running = LOOPS[loop]()
    with leak_check():
        pool = aioenv.RenderPool("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>", workers_per_device=2)
        task = running.create_task(pool.__aenter__())
        task._log_destroy_pending = False
        for _ in range(20):
            turn(running)
        assert not task.done()
        running.close()
        with forgetting():
            if closed:
                asyncio.run(pool.close())
            else:
                del pool, task
