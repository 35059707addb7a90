"""An exception in a callback or on a thread reaches the awaiter of the operation."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.errors import WireError, WorkerDied
from aioenv.ipc.frames import Kind
from aioenv.ipc.messages import CallRequest, dump_code
from aioenv.process.channel import ScatterChannel
from aioenv.process.connection import OutstandingRequests
from aioenv.process.supervisor import Worker
from aioenv.worker.service import Service
from tests.kits.native_kit import BAD, OK, Batch, everywhere
from tests.kits.render_pool_kit import PLAIN, SMALL, pool_of, some_states

pytestmark = pytest.mark.asyncio


def stop(*args, **kwargs):
    raise StopIteration("enough")


def late(*args, **kwargs):
    raise TimeoutError("of its own")


def cancelled(*args, **kwargs):
    raise asyncio.CancelledError("of its own")


class Speechless(Exception):
    def __str__(self):
        raise LookupError("no word for it")


def speechless(*args, **kwargs):
    raise Speechless


def untold(*args, **kwargs):
    raise SyntaxError("not a line", ("env.py", 3, "no number", object()))


ODD = (
    (stop, "StopIteration: enough"),
    (late, "TimeoutError: of its own"),
    (cancelled, "CancelledError: of its own"),
    (speechless, "Speechless: .its __str__ raised"),
    (untold, "SyntaxError"),
)


@everywhere
async def test_what_a_future_can_not_have_or_means_something_else(where):
    for error, told in ODD:
        async with aioenv.NativeVectorEnv(partial(Batch, misbehave=error), 3, **where) as envs:
            with pytest.raises(aioenv.EnvError, match=told):
                await envs.call("misbehave")
            await envs.reset()
            with pytest.raises(aioenv.EnvError, match=told):
                await envs.step(BAD)
            await envs.reset()


@everywhere
async def test_a_factory_with_such_an_error(where):
    for make, told in ODD:
        with pytest.raises(aioenv.WorkerStartError, match=told):
            await aioenv.NativeVectorEnv(make, 3, start_timeout_s=30, **where)


async def test_a_timeout_of_the_env_is_not_ours():
    async with aioenv.NativeVectorEnv(partial(Batch, misbehave=late), 3, timeout_s=30) as envs:
        with pytest.raises(aioenv.EnvError, match="of its own"):
            await envs.call("misbehave")


async def test_an_env_that_exits_when_it_is_closed_is_closed(caplog):
    class Exits(Batch):
        def close_extras(self, **kwargs):
            sys.exit(3)

    envs = await aioenv.NativeVectorEnv(Exits, 3, run_in="thread")
    await envs.close()
    assert [record.getMessage() for record in caplog.records] == ["the vector env raised when it was closed"]


class Ragged(Batch):
    """Episodes of two steps, whose infos have parts of different lengths."""

    def step(self, actions):
        obs, reward, *_ = super().step(actions)
        over = np.full(self.num_envs, obs[0, 0] % 2 == 0)
        parts = [np.zeros(slot + 1) for slot in range(self.num_envs)]
        return obs, reward, over, self.flags, {"parts": parts, "_parts": ~self.flags}


def fail_to_reduce(values):
    raise LookupError("no such number")


@everywhere
async def test_an_event_that_can_not_be_reduced_is_told_to_its_reader(where):
    stats = aioenv.EpisodeStats([aioenv.EpisodeEvent("parts", episode=fail_to_reduce)])
    async with aioenv.NativeVectorEnv(Ragged, 3, episode_stats=stats, **where) as envs:
        await envs.reset()
        for _ in range(4):
            result = await envs.step(OK)
        assert result.info["episode"]["l"].tolist() == [2, 2, 2]
        for ask in (stats.epoch, stats.write):
            with pytest.raises(ValueError, match=r"event 'parts': .* could not be reduced") as caught:
                ask()
            assert caught.value.__cause__ is not None
        stats.clear()
        assert stats.epoch()["episode_count"] == 0


class Broken(aioenv.EpisodeStats):
    """A user's own statistics, with a mistake in them."""

    def step(self, *args, **kwargs):
        raise LookupError("a mistake")


async def test_statistics_that_raise_end_the_step():
    async with aioenv.NativeVectorEnv(Batch, 3, run_in="thread", episode_stats=Broken()) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match="a mistake"):
            await asyncio.wait_for(envs.step(OK), 30)
        envs.send_reset()
        assert len((await envs.recv(3)).slots) == 3
        envs.send(OK)
        with pytest.raises(aioenv.EnvError, match="a mistake"):
            await asyncio.wait_for(envs.recv(3), 30)


async def test_images_that_can_not_be_put_where_they_belong_fail_their_call_alone():
    async with pool_of() as pool:
        states = some_states(pool, 4)
        out = np.zeros((4, SMALL["height"], SMALL["width"], 3), np.uint8)
        drawn = pool.submit(states, out=out, **SMALL)
        out.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            await asyncio.wait_for(drawn, 30)
        pids = pool.pids
        assert (await pool.render(states, **SMALL)).any() and pool.pids == pids


async def test_an_argument_that_is_not_there_is_an_error_in_blocking_code():
    def draw():
        with aioenv.sync.RenderPool(PLAIN, quality="fast") as pool:
            for name in ("render", "submit"):
                with pytest.raises(TypeError, match="widht"):
                    getattr(pool, name)(np.zeros((1, pool.state_size)), widht=4, height=4)
            shape = pool.render(np.zeros((1, pool.state_size)), **SMALL).shape
            assert not pool.closed
        assert pool.closed and "closed" in repr(pool)
        pool.close()  # again
        return shape

    assert await asyncio.wait_for(asyncio.to_thread(draw), 30) == (1, SMALL["height"], SMALL["width"], 3)


class Loud(gym.Env):
    """Prints more than a pipe holds."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        print(("loud" * 1000 + "\n") * 200)
        return np.zeros(1, np.float32), {}


class Refuses(logging.Handler):
    def emit(self, record):
        raise LookupError("no more room")


async def test_a_log_handler_that_raises_does_not_keep_envs_from_printing(caplog):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    log, handler = logging.getLogger("aioenv.workers"), Refuses()
    log.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "aioenv.workers"):
            async with aioenv.AsyncVectorEnv([Loud]) as envs:
                await asyncio.wait_for(envs.reset(), 30)
    finally:
        log.removeHandler(handler)
    (complaint,) = complaints
    assert "could not be logged" in complaint["message"] and isinstance(complaint["exception"], LookupError)


async def test_a_log_handler_that_raises_does_not_keep_workers_from_coming_back(caplog):
    log, handler = logging.getLogger("aioenv"), Refuses()
    log.addHandler(handler)
    try:
        async with aioenv.make_vec("CartPole-v1", 4, num_workers=2, restart=aioenv.RestartPolicy()) as envs:
            await envs.reset(seed=0)
            os.kill(envs.workers[0].pid, signal.SIGKILL)
            result = await asyncio.wait_for(envs.step(np.zeros(4, np.int64)), 30)
            assert result.truncated.tolist() == [True, True, False, False]
    finally:
        log.removeHandler(handler)


class Sleeper(Service):
    """Answers no call within the test."""

    def describe(self):
        return None


async def test_the_end_of_a_worker_is_told_to_all_though_one_can_not_hear_it(caplog):
    told = []

    def deaf(outcome):
        raise LookupError("cannot hear")

    worker = Worker(dump_code(Sleeper), index=0)
    worker.on_death = told.append
    await worker.start()
    worker.submit(Kind.CALL, (), dump_code(CallRequest("kill_me", (), {})), on_reply=deaf)
    worker.submit(Kind.CALL, (), dump_code(CallRequest("kill_me", (), {})), on_reply=told.append)
    with caplog.at_level(logging.CRITICAL, "aioenv"):
        worker.kill("it is a test")
        await worker._connection.cleaned_up()
    assert isinstance(told[0], WorkerDied) and told[1] is worker
    await worker.close()


async def test_what_the_kernel_refuses_to_send_ends_the_channel():
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # refuses what is too long for one packet
    channel = ScatterChannel(mine, OutstandingRequests(0))
    try:
        channel.send(Kind.STEP, 0, 0, [b"x" * (64 << 20)], b"")
        with pytest.raises(WireError, match="a request could not be sent"):
            await asyncio.wait_for(channel.receive(lambda frame: None), 30)
    finally:
        channel.close()
        theirs.close()
