"""Render workers that hang, as in a driver: no wait is endless, and images come from new ones."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

import aioenv
from aioenv.rendering.queue import Watchdog
from tests.faults.play import within

TIMEOUT_S = 2.5
CONFIG = aioenv.RenderConfig(width=24, height=20, workers=2)
POLICY = aioenv.RestartPolicy(backoff_s=0.01)
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (3, 2, 6)).astype(np.float32)


@asynccontextmanager
async def stalled(**options):
    """A vector env of which one render worker stands still over the first step's images; with that one's pid."""
    options |= {"render": CONFIG, "timeout_s": TIMEOUT_S, "num_workers": 1}
    async with aioenv.make_vec("HalfCheetah-v5", 2, **options) as envs:
        await envs.reset(seed=0)
        await patiently(envs.render)
        expected = []
        for action in ACTIONS:
            await envs.step(action)
            expected.append((await patiently(envs.render)).copy())
        await envs.reset(seed=0)
        await patiently(envs.render)
        pid = envs._session._pool.pids[1]
        os.kill(pid, signal.SIGSTOP)
        await envs.step(ACTIONS[0])
        yield envs, pid, expected


async def patiently(call):
    """What a call gives in the end: the first image of a process may take longer than one wait lasts."""
    for _ in range(20):
        try:
            return await call()
        except aioenv.StepTimeout:
            continue
    raise AssertionError("it never comes")


def pids(envs):
    return envs._session._pool.pids


async def go_on(envs, expected):
    for action, images in zip(ACTIONS[1:], expected[1:], strict=True):
        await envs.step(action)
        assert np.array_equal(await envs.render(), images)


@pytest.mark.stress
@pytest.mark.asyncio
async def test_with_a_policy_the_next_call_has_the_images():
    async with stalled(restart=POLICY) as (envs, pid, expected):
        stream = envs.render_stream()
        with within(TIMEOUT_S + 2), pytest.raises(aioenv.StepTimeout, match=rf"render workers 1 \(pid {pid}, busy\)"):
            await envs.render()
        assert np.array_equal(await patiently(envs.render), expected[0])
        assert pids(envs)[1] != pid
        os.kill(pids(envs)[1], signal.SIGSTOP)
        await envs.step(ACTIONS[1])
        with within(TIMEOUT_S + 2), pytest.raises(aioenv.StepTimeout, match="render_stream"):
            await anext(stream)
        assert np.array_equal((await patiently(stream.next))[1], expected[1])
        await envs.step(ACTIONS[2])
        assert np.array_equal(await envs.render(), expected[2])


@pytest.mark.asyncio
async def test_with_restart_the_call_goes_on():
    async with stalled(restart=POLICY, on_timeout="restart") as (envs, pid, expected):
        assert np.array_equal(await envs.render(), expected[0])
        assert pids(envs)[1] != pid
        await go_on(envs, expected)


@pytest.mark.stress
@pytest.mark.parametrize("policy", [None, POLICY], ids=["none", "policy"])
@pytest.mark.asyncio
async def test_with_kill_it_is_gone_for_good(policy):
    async with stalled(restart=policy, on_timeout="kill") as (envs, pid, _):
        for _ in range(2):
            with within(2 * TIMEOUT_S + 2), pytest.raises(aioenv.RenderError, match="finished no image for timeout_s"):
                await envs.render()
            await envs.step(ACTIONS[1])
        assert pids(envs)[1] == pid


@pytest.mark.stress
@pytest.mark.asyncio
async def test_without_a_policy_it_is_left_alone():
    async with stalled() as (envs, pid, expected):
        stream = envs.render_stream()
        for _ in range(3):
            with within(TIMEOUT_S + 2), pytest.raises(aioenv.StepTimeout, match=r"is replaced if restart="):
                await envs.render()
        os.kill(pid, signal.SIGCONT)
        assert np.array_equal(await envs.render(), expected[0])
        os.kill(pid, signal.SIGSTOP)
        await envs.step(ACTIONS[1])
        with within(TIMEOUT_S + 2), pytest.raises(aioenv.StepTimeout, match="render_stream"):
            await anext(stream)
        os.kill(pid, signal.SIGCONT)
        assert np.array_equal((await anext(stream))[1], expected[1])
        assert pids(envs)[1] == pid


@pytest.mark.stress
@pytest.mark.parametrize("when", ["late", "replaced"])
@pytest.mark.asyncio
async def test_close_does_not_wait_for_it(when):
    with within(30):
        async with stalled(restart=POLICY) as (envs, _, _):
            if when == "replaced":
                with pytest.raises(aioenv.StepTimeout):
                    await envs.render()
            began = time.monotonic()
    assert time.monotonic() - began < 4


@pytest.mark.stress
@pytest.mark.asyncio
async def test_a_loop_that_stood_still_blames_no_worker():
    async with stalled(restart=POLICY) as (envs, pid, expected):
        os.kill(pid, signal.SIGCONT)
        time.sleep(TIMEOUT_S + 0.2)  # noqa: ASYNC251 - that is the fault
        assert np.array_equal(await envs.render(), expected[0])
        assert pids(envs)[1] == pid


@pytest.mark.stress
@pytest.mark.parametrize("on_timeout", ["raise", "restart"])
@pytest.mark.asyncio
async def test_of_images_that_are_observations(on_timeout):
    config = aioenv.RenderConfig(width=24, height=20, workers=2)
    options = {"pixels": config, "timeout_s": TIMEOUT_S, "restart": POLICY, "on_timeout": on_timeout}
    async with aioenv.make_vec("HalfCheetah-v5", 2, num_workers=1, **options) as envs:
        await envs.reset(seed=0, timeout_s=60)
        expected = (await envs.step(ACTIONS[0])).obs.copy()
        await envs.reset(seed=0)
        os.kill(envs._session._pixels_pool.pids[1], signal.SIGSTOP)
        if on_timeout == "restart":
            assert np.array_equal((await envs.step(ACTIONS[0])).obs, expected)
        else:
            with within(TIMEOUT_S + 2), pytest.raises(aioenv.StepTimeout, match="no reply from render workers"):
                await envs.step(ACTIONS[0])
            assert np.array_equal((await patiently(lambda: envs.recv(2))).obs, expected)
        assert (await envs.step(ACTIONS[1])).obs.any()


@pytest.mark.asyncio
async def test_which_workers_are_late():
    loop = asyncio.get_running_loop()
    late: asyncio.Queue[float] = asyncio.Queue()
    watch = Watchdog(0.05, lambda: late.put_nowait(loop.time()))
    watch.sent()
    watch.answered(died=False)  # else its first answer may take longer
    watch.sent()
    watch.sent()
    began = loop.time()
    time.sleep(0.1)  # noqa: ASYNC251 - a loop that stood still blames no worker
    await asyncio.sleep(0)
    watch.answered(died=False)
    assert late.empty()
    assert await late.get() - began > 0.15  # one is still open
    watch.answered(died=True)
    watch.sent()  # a new process takes its time
    await asyncio.sleep(0.3)
    assert late.empty()
    watch.close()
