"""NativeVectorEnv: where it runs, and what becomes of it: cancelled, late, faulty, closed, forgotten."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from functools import partial

import gymnasium as gym
import pytest

import aioenv
from aioenv.process.env_thread import RunTimes
from tests.kits.native_kit import BAD, OK, Batch, Gate, everywhere, fail, here

pytestmark = pytest.mark.asyncio

# ---------------------------------------------------------------- where it runs


async def test_short_steps_come_to_the_loop_and_long_ones_leave_it():
    async with aioenv.NativeVectorEnv(partial(Batch, misbehave=partial(time.sleep, 0.02)), 3) as envs:
        await envs.reset()
        assert envs.runs == "thread"
        for _ in range(3000):
            await envs.step(OK)
            if envs.runs == "inline":
                break
        await envs.step(OK)
        env = envs._inprocess._env.env
        assert threading.get_ident() in env.threads and len(env.threads) == 2
        await envs.step(BAD)
        assert envs.runs == "thread"
        env.threads.clear()
        await envs.step(OK)
        assert threading.get_ident() not in env.threads
    assert env.closed_on not in (None, threading.get_ident())


async def test_short_work_moves_to_the_loop_and_back():
    times = RunTimes(100e-6, None)
    steps = 0
    while not times.inline:
        times.record(60e-6)
        steps += 1
    assert 8 < steps < 60
    for _ in range(50):
        times.record(60e-6)
    times.record(5e-3)
    times.record(5e-3)
    assert times.inline, "one that was preempted says nothing about the rest"
    for _ in range(100):
        times.record(150e-6)
    assert times.inline, "between the limits it stays where it is"
    for _ in range(100):
        times.record(250e-6)
    assert not times.inline
    for _ in range(100):
        times.record(150e-6)
    assert not times.inline
    for fixed in (True, False):
        times = RunTimes(100e-6, fixed)
        for seconds in (1e-6, 1.0):
            times.record(seconds)
            assert times.inline is fixed


async def test_what_draws_stays_on_its_thread():
    async with aioenv.NativeVectorEnv(partial(Batch, render_mode="rgb_array"), 3) as envs:
        await envs.reset()
        for _ in range(60):
            await envs.step(OK)
        images = await envs.render()
        assert images.shape == (3, 4, 5, 3) and (images == 60).all() and envs.runs == "thread"
        env = envs._inprocess._env.env
        assert len(env.threads) == 1 and threading.get_ident() not in env.threads
    assert env.closed_on in env.threads
    async with aioenv.NativeVectorEnv(Batch, 3, timeout_s=9) as envs:
        await envs.reset()
        for _ in range(60):
            await envs.step(OK)
        assert envs.runs == "thread"
        with pytest.raises(aioenv.RenderError, match="render_mode"):
            await envs.render()


async def test_steps_on_the_loop_let_it_turn():
    async with aioenv.NativeVectorEnv(partial(Batch, misbehave=partial(time.sleep, 0.001)), 3, run_in="inline") as envs:
        await envs.reset()
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(5):
            await envs.step(BAD)
        task.cancel()
        assert turns >= 4


# ---------------------------------------------------------------- cancellation, timeouts, the end


@pytest.mark.parametrize("take", [True, False])
async def test_a_step_cancelled_on_the_loop_waits(take):
    async with aioenv.NativeVectorEnv(Batch, 3, run_in="inline", copy=False) as envs:
        await envs.reset()
        envs._inprocess._last_yield_s = 0.0
        task = asyncio.create_task(envs.step(OK))
        await asyncio.sleep(0)
        with pytest.raises(aioenv.PendingCallError):
            await envs.step(OK)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert envs.outstanding
        if take:
            assert (await envs.recv()).obs.max() == 1
        assert (await envs.step(OK)).obs.max() == 2
        assert not envs.outstanding


@pytest.mark.parametrize("take", [True, False])
@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_step_on_the_thread_is_taken_or_dropped(take, how, caplog):
    gate = Gate()
    async with aioenv.NativeVectorEnv(partial(Batch, misbehave=gate), 3, run_in="thread") as envs:
        await envs.reset()
        envs._inprocess._env.env.flags[1] = True  # an episode ends in it
        if how == "cancelled":
            task = asyncio.create_task(envs.step(BAD))
            await gate.is_reached()
            with pytest.raises(aioenv.PendingCallError):
                await envs.step(OK)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(aioenv.StepTimeout, match=r"timeout_s=0\.05.*recv") as caught:
                await envs.step(BAD, timeout_s=0.05)
            assert caught.value.slots == caught.value.running == (0, 1, 2)
        assert envs.outstanding
        if take:
            empty = await envs.recv(deadline_s=0.01)
            assert len(empty.slots) == 0 and empty.obs.shape == (0, 2)
        with pytest.raises(aioenv.PendingCallError):
            await envs.call("level")
        gate.opened.set()
        if take:
            ready = await envs.recv()
            assert ready.slots.tolist() == [0, 1, 2] and ready.obs.max() == 1 and ready.terminated.tolist()[1]
        assert (await envs.step(OK)).obs.max() == 2
        assert take is ("ends of the episodes in slots [1]" not in caplog.text)


async def test_a_call_that_takes_too_long_is_dropped():
    gate = Gate()
    async with aioenv.NativeVectorEnv(partial(Batch, misbehave=gate), 3, timeout_s=0.1) as envs:
        with pytest.raises(aioenv.StepTimeout, match="dropped"):
            await envs.call("misbehave")
        gate.opened.set()
        assert await envs.get_attr("level") == (7, 7, 7)


@pytest.mark.parametrize("waits", ["step", "recv"])
async def test_close_does_not_wait_for_what_hangs(waits, caplog):
    gate = Gate()
    envs = await aioenv.NativeVectorEnv(partial(Batch, misbehave=gate), 3, run_in="thread")
    await envs.reset()
    if waits == "recv":
        envs.send(BAD)
    task = asyncio.create_task(envs.step(BAD) if waits == "step" else envs.recv())
    await gate.is_reached()
    env = envs._inprocess._env.env
    began = time.monotonic()
    await envs.close(grace_s=0.1)
    assert time.monotonic() - began < 2 and "a thread can't be killed" in caplog.text
    with pytest.raises(aioenv.ClosedError):
        await asyncio.wait_for(task, 10)
    assert env.closed_on is None
    gate.opened.set()  # now it ends after all, which `nothing_left_behind` sees
    (thread,) = [t for t in threading.enumerate() if t.name == "aioenv-env"] or [threading.Thread()]
    if thread.ident:
        await asyncio.to_thread(thread.join, 10)
    assert env.closed_on is not None


async def test_close_ends_the_wait_for_a_call_that_hangs():
    gate = Gate()
    envs = await aioenv.NativeVectorEnv(partial(Batch, misbehave=gate), 3, run_in="thread")
    call = asyncio.create_task(envs.call("misbehave"))
    await gate.is_reached()
    await envs.close(grace_s=0.1)
    with pytest.raises(aioenv.ClosedError):
        await asyncio.wait_for(call, 10)
    gate.opened.set()
    for thread in [t for t in threading.enumerate() if t.name == "aioenv-env"]:
        await asyncio.to_thread(thread.join, 10)


@pytest.mark.parametrize("run_in", ["auto", "inline", "thread"])
async def test_closed_while_a_policy_is_awaited(run_in):
    closing = threading.Event()
    envs = await aioenv.NativeVectorEnv(Batch, 3, run_in=run_in)
    await envs.reset()
    for _ in range(3000):  # to where it stays
        await envs.step(OK)
        if envs.runs == "inline" or run_in == "thread":
            break
    if run_in != "inline":
        envs._inprocess._env.env.close_extras = lambda **kwargs: closing.wait(10)
    closer = None

    async def policy(obs):
        nonlocal closer
        if closer is None:
            closer = asyncio.create_task(envs.close())
            while not envs._inprocess._closing:
                await asyncio.sleep(0)
        return OK

    rollout = asyncio.create_task(envs.rollout(policy, 5))
    with pytest.raises(aioenv.ClosedError):
        await asyncio.wait_for(rollout, 10)
    closing.set()
    await closer


@here
async def test_closed_is_closed(where):
    envs = aioenv.NativeVectorEnv(Batch, 3, **where)
    with pytest.raises(RuntimeError, match="start it first"):
        await envs.step(OK)
    await envs
    await envs.reset()
    await envs.close()
    await envs.close()
    assert envs.closed and envs.metadata == Batch.metadata and envs.workers == ()
    for use in (envs.reset, envs.recv, envs.render, partial(envs.step, OK), partial(envs.get_attr, "level")):
        with pytest.raises(aioenv.ClosedError):
            await use()
    for use in (envs.send_reset, partial(envs.send, OK)):
        with pytest.raises(aioenv.ClosedError):
            use()


async def test_another_loop_is_refused():
    async with aioenv.NativeVectorEnv(Batch, 3) as envs:
        with pytest.raises(aioenv.LoopError):
            await asyncio.to_thread(asyncio.run, envs.reset())


async def test_a_forgotten_one_ends_its_thread():
    envs = await aioenv.NativeVectorEnv(Batch, 3)
    await envs.reset()
    with pytest.warns(ResourceWarning, match="unclosed"):
        del envs
        gc.collect()


# ---------------------------------------------------------------- errors


@everywhere
async def test_an_exception_is_every_slots(where):
    async with aioenv.NativeVectorEnv(partial(Batch, misbehave=fail), 3, **where) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match=r"slots 0 to 2 .*as it was told") as caught:
            await envs.step(BAD)
        error = caught.value
        assert error.slots == (0, 1, 2) and "in fail" in error.traceback and isinstance(error.__cause__, ValueError)
        assert (error.pid == os.getpid()) is ("run_in" in where)
        with pytest.raises(aioenv.EnvError, match="must be reset first"):
            await envs.step(OK)
        await envs.reset()
        assert (await envs.step(OK)).obs.max() == 1
        envs.send(BAD)
        with pytest.raises(aioenv.EnvError, match="as it was told"):
            await envs.recv()
        envs.send_reset()
        assert (await envs.recv(3)).obs.max() == 0


async def test_an_exit_on_the_thread_is_an_error_too():
    async with aioenv.NativeVectorEnv(partial(Batch, misbehave=partial(os.sys.exit, 3)), 3, run_in="thread") as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match="SystemExit: 3"):
            await envs.step(BAD)
        with pytest.raises(aioenv.EnvError, match="SystemExit"):
            await envs.call("misbehave")
        await envs.reset()


async def test_an_interrupted_step_on_the_loop_leaves_failed_slots():
    def interrupt():
        raise KeyboardInterrupt

    envs = await aioenv.NativeVectorEnv(partial(Batch, misbehave=interrupt), 3, run_in="inline")
    await envs.reset()
    with pytest.raises(KeyboardInterrupt):
        await envs.step(BAD)
    with pytest.raises(aioenv.EnvError, match="KeyboardInterrupt"):
        await envs.step(OK)
    await envs.close()


@everywhere
async def test_one_that_can_not_be_made(where):
    for make, message in (
        (lambda num_envs: fail(), "as it was told"),
        (lambda num_envs: Batch(num_envs + 1), "made a vector env of 4 slots"),
        (lambda num_envs: gym.make("CartPole-v1"), "expected a function that makes a gymnasium.vector.VectorEnv"),
    ):
        with pytest.raises(aioenv.WorkerStartError, match=message) as caught:
            await aioenv.NativeVectorEnv(make, 3, **where)
        assert caught.value.slots == (0, 1, 2) and "Traceback" in caught.value.traceback


@here
async def test_one_whose_description_is_wrong_is_closed(where):
    made = []

    def make(num_envs):
        made.append(Batch(num_envs))
        made[0].metadata = None
        return made[0]

    with pytest.raises(TypeError, match="NoneType"):
        await aioenv.NativeVectorEnv(make, 2, **where)
    assert made[0].closed_on is not None
    assert "aioenv-env" not in {thread.name for thread in threading.enumerate()}


async def test_one_that_takes_too_long_to_be_made():
    gate = Gate()

    def make(num_envs):
        gate()
        return Batch(num_envs)

    with pytest.raises(aioenv.WorkerStartError, match=r"start_timeout_s=0\.05"):
        await aioenv.NativeVectorEnv(make, 3, start_timeout_s=0.05)
    gate.opened.set()


async def test_a_cancelled_start_waits_for_the_end_of_the_thread(caplog):
    """A program that ends while its thread imports MuJoCo crashes."""
    made = []

    def make(num_envs):
        time.sleep(0.3)
        made.append(Batch(num_envs))
        return made[0]

    starting = asyncio.ensure_future(aioenv.NativeVectorEnv(make, 2)._ensure_started())
    while "aioenv-env" not in {thread.name for thread in threading.enumerate()}:
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert made[0].closed_on is not None and not caplog.records
    assert "aioenv-env" not in {thread.name for thread in threading.enumerate()}


async def test_a_dead_worker_takes_its_share_alone():
    def make_killer(num_envs):
        return Batch(num_envs, misbehave=lambda: os.kill(os.getpid(), signal.SIGKILL))

    async with aioenv.NativeVectorEnv(make_killer, 4, num_workers=2) as envs:
        await envs.reset()
        with pytest.raises(aioenv.WorkerDied, match="SIGKILL") as caught:
            await envs.step([1, 0, 0, 0])
        assert caught.value.slots == (0, 1) and caught.value.partial.reward.tolist() == [0, 0, 1, 1]
        envs.send([0, 0], [2, 3])
        assert (await envs.recv(2)).obs.max() == 2
