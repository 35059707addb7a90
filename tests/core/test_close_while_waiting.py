"""`close()` while another task waits: that task gets a ClosedError, whatever it waits for."""

from __future__ import annotations

import asyncio
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv import RestartPolicy
from aioenv.stats import NormalizeObservation, SharedRunningStats
from tests.kits.stats_kit import SHAPE, Endless

WAIT = 1


class Waiter(gym.Env):
    """Waits at a fifo: in a step with action 1, in a reset with options, or when it is called."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, fifo: str) -> None:
        self._gate = fifo

    def wait(self):
        with open(self._gate, encoding="ascii") as fifo:  # a fifo, whose other end is never opened
            fifo.read()

    def reset(self, *, seed=None, options=None):
        if options:
            self.wait()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == WAIT:
            self.wait()
        return np.zeros(1, np.float32), 0.0, False, False, {}


async def episodes(envs, policy):
    async for _ in envs.episodes(policy, 2):
        pass


async def paused(envs, actions):
    envs.pause(0)
    await envs.step(actions)


async def received(envs, actions):
    if not envs.outstanding:
        envs.send(actions)
    await envs.recv(2)


CALLS = {
    "step": lambda envs, actions: envs.step(actions),
    "reset": lambda envs, actions: envs.reset(options={"wait": True}),
    "step_at": lambda envs, actions: envs.step_at(1, actions[1]),
    "reset_at": lambda envs, actions: envs.reset_at(1, options={"wait": True}),
    "rollout": lambda envs, actions: envs.rollout(lambda obs: actions[: len(obs)], 2),
    "episodes": lambda envs, actions: episodes(envs, lambda obs: actions),
    "evaluate": lambda envs, actions: aioenv.evaluate(envs, lambda obs: actions, 2),
    "paused": paused,
    "recv": received,
    "call": lambda envs, actions: envs.call("wait"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CALLS)
async def test_what_is_in_flight(name, fifo):
    envs = await aioenv.AsyncVectorEnv([lambda: Waiter(fifo)] * 2, num_workers=2)
    await envs.reset()
    await closed(envs, CALLS[name](envs, np.full(2, WAIT)))


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"call"}))
async def test_what_waits_for_a_cancelled_step(name, fifo):
    envs = await aioenv.AsyncVectorEnv([lambda: Waiter(fifo)] * 2, num_workers=2)
    await envs.reset()
    step = asyncio.ensure_future(envs.step(np.full(2, WAIT)))
    while not envs.outstanding:
        await asyncio.sleep(0)
    step.cancel()
    await asyncio.wait([step])
    await closed(envs, CALLS[name](envs, np.full(2, WAIT)))


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CALLS)
async def test_what_waits_for_a_restart(name, fifo):
    policy = RestartPolicy(backoff_s=30.0)  # which the second restart waits
    envs = await aioenv.AsyncVectorEnv([lambda: Waiter(fifo)] * 2, num_workers=2, restart=policy)
    await envs.reset()
    for again in range(2):
        pid = envs.workers[1].pid
        os.kill(pid, signal.SIGKILL)
        while envs.workers[1].pid == pid and envs.workers[1].state in ("ready", "busy"):
            await asyncio.sleep(0)
        if not again:
            await envs.step([0, 0])
    await closed(envs, CALLS[name](envs, np.zeros(2, np.int64)))


async def closed(envs, call):
    """Close, with a call that waits."""
    waiting = asyncio.ensure_future(call)
    try:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done(), waiting
    finally:
        await envs.close(grace_s=0.05)
    with pytest.raises(aioenv.ClosedError):
        await waiting


async def two_starts(envs):
    """Two tasks that wait for the start."""

    async def start():
        await envs

    starts = [asyncio.ensure_future(start()) for _ in range(2)]
    await asyncio.sleep(0)
    return starts


@pytest.mark.asyncio
async def test_the_start():
    envs = aioenv.AsyncVectorEnv([gym.Env])
    starts = await two_starts(envs)
    await envs.close()
    for started in starts:
        with pytest.raises(aioenv.ClosedError):
            await started


@pytest.mark.asyncio
async def test_a_start_that_another_has_cancelled():
    one, other = await two_starts(aioenv.AsyncVectorEnv([gym.Env]))
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    with pytest.raises(aioenv.ClosedError):
        await other


@pytest.mark.asyncio
async def test_a_merge_of_statistics_without_shared_memory():
    with SharedRunningStats(SHAPE, 1, shared=False) as seen:
        envs = await aioenv.AsyncVectorEnv([lambda: NormalizeObservation(Endless(), seen.at(0))])
        await envs.reset()
        merger = envs._check_running().merger
        before = merger._exchanging
        step = asyncio.ensure_future(envs.step([0]))
        while merger._exchanging is before:
            await asyncio.sleep(0)
        assert not step.done()
        await envs.close()
        with pytest.raises(aioenv.ClosedError):
            await step
