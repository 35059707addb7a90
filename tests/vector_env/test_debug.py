"""`debug=True`: the whole engine, with workers that are threads of this process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.process import connection
from aioenv.testing import VectorEnvContract
from aioenv.testing.faulty_env import FaultyEnv, faulty_envs
from tests.kits.loop_kit import run_on
from tests.kits.process_kit import run_alone


class TestContract(VectorEnvContract):
    async def start(self, env_fns, **options):
        return await aioenv.AsyncVectorEnv(env_fns, num_workers=2, debug=True, transport="shared", **options)


class TellsThread(FaultyEnv):
    """Tells where it lives, and prints."""

    def where(self):
        print("printed by an env")
        return os.getpid(), threading.current_thread().name, threading.current_thread().daemon


def test_envs_live_on_threads_of_this_process_which_stays_as_it_is(capsys):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = dict(os.environ), list(sys.path), os.getcwd(), gc.get_freeze_count(), os.sched_getaffinity(0)
    streams = [os.fstat(fd) for fd in (0, 1, 2)]

    async def main():
        options = {"worker_env": {"DISPLAY": ":7"}, "cpu_affinity": [0], "start": "spawn", "channel": "streams"}
        async with aioenv.AsyncVectorEnv(
            [partial(TellsThread, slot=i) for i in range(3)], debug=True, **options
        ) as envs:
            await envs.reset(seed=0)
            where = await envs.call("where")
            assert where == ((os.getpid(), "aioenv-worker-0", True),) * 3
            assert [(worker.pid, worker.state) for worker in envs.workers] == [(os.getpid(), "ready")]
            result = await envs.step(np.zeros(3, np.int64))
            assert result.obs[:, 2].tolist() == [1, 1, 1]
            assert (dict(os.environ), list(sys.path), os.getcwd(), gc.get_freeze_count()) == before[:4]
            assert os.sched_getaffinity(0) == before[4]

    run_on("uvloop", main())
    assert capsys.readouterr().out == "printed by an env\n" * 3
    assert handlers == {number: signal.getsignal(number) for number in handlers}
    assert [(s.st_dev, s.st_ino) for s in streams] == [(s.st_dev, s.st_ino) for s in (os.fstat(fd) for fd in (0, 1, 2))]


def test_a_breakpoint_in_an_env_stops_at_this_terminal():
    script = """
import gymnasium, numpy, aioenv

class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        secret = 41
        breakpoint()
        return secret % 9, float(secret), False, False, {}

async def main():
    async with aioenv.AsyncVectorEnv([Env] * 2, debug=True) as envs:
        await envs.reset()
        print("rewards", (await envs.step(numpy.zeros(2, int))).reward)

aioenv.run(main())
"""
    commands = "p secret + 1\nsecret = 5\nc\nc\n"
    done = run_alone(script, stdin=commands)
    assert "(Pdb) 42" in done.stdout and "rewards [ 5. 41.]" in done.stdout


def test_events_pauses_rollouts_and_evaluation_are_as_always():
    async def main():
        make = [partial(FaultyEnv, slot=slot, length=4) for slot in range(4)]
        async with aioenv.AsyncVectorEnv(make, num_workers=2, debug=True) as envs:
            envs.send_reset(seed=0)
            assert (await envs.recv(4)).slots.tolist() == [0, 1, 2, 3]
            envs.pause(1)
            assert (await envs.step(np.zeros(4, np.int64))).info["_active"].tolist() == [True, False, True, True]
            envs.resume()
            rollout = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3)
            assert rollout.last_obs[:, 2].tolist() == [4, 3, 4, 4]
            evaluation = await aioenv.evaluate(envs, lambda obs: np.zeros(4, np.int64), 6, seed=1)
            assert evaluation.lengths.tolist() == [4] * 6
            images = await envs.render()
            assert images.shape == (4, 4, 4, 3)

    run_on("asyncio", main())


def test_what_envs_raise_at_any_moment():
    async def main():
        with pytest.raises(aioenv.WorkerStartError, match="for slot 1: ValueError: the fault has struck") as caught:
            await aioenv.AsyncVectorEnv(faulty_envs(2, "raises", "factory", slot=1), debug=True)
        assert caught.value.slots == (1,)
        async with aioenv.AsyncVectorEnv(faulty_envs(2, "sys_exit", "step", slot=1), debug=True) as envs:
            await envs.reset()
            with pytest.raises(aioenv.WorkerDied, match="exited with code 7"):
                await envs.step(np.zeros(2, np.int64))
        restart = aioenv.RestartPolicy()
        envs = aioenv.AsyncVectorEnv(faulty_envs(2, "sys_exit", "step", slot=1, at=2), debug=True, restart=restart)
        async with envs:
            await envs.reset()
            await envs.step(np.zeros(2, np.int64))
            assert (await envs.step(np.zeros(2, np.int64))).truncated.tolist() == [True, True]

    run_on("uvloop", main())


@pytest.mark.parametrize("options", [{"debug": True}, {"num_workers": 0}], ids=str)
def test_close_waits_for_no_bytes_behind_the_last_reply(options, monkeypatch):
    monkeypatch.setattr(connection, "_LAST_BYTES_S", 1000)  # as long as a process may leave its streams open

    async def main():
        async with asyncio.timeout(30):
            async with aioenv.AsyncVectorEnv(faulty_envs(2, None, "step"), **options) as envs:
                await envs.reset()
                await envs.step(np.zeros(2, np.int64))
            async with aioenv.AsyncVectorEnv(faulty_envs(2, "sys_exit", "step", slot=1), **options) as envs:
                await envs.reset()
                with pytest.raises(aioenv.WorkerDied, match="exited with code 7"):
                    await envs.step(np.zeros(2, np.int64))

    run_on("asyncio", main())


class Stuck(gym.Env):
    """Hangs in a step until it is let go."""

    observation_space = action_space = gym.spaces.Discrete(2)
    gates: dict = {}  # noqa: RUF012

    def __init__(self, gate):
        self.gate = gate

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        Stuck.gates[self.gate].wait()
        return 0, 0.0, False, False, {}


def test_an_env_that_hangs_is_left_to_itself(caplog):
    gate = Stuck.gates["gate"] = threading.Event()

    async def main():
        async with aioenv.AsyncVectorEnv([partial(Stuck, "gate")], debug=True, timeout_s=0.1) as envs:
            await envs.reset()
            with pytest.raises(aioenv.StepTimeout) as caught:
                await envs.step([0])
            assert caught.value.running == (0,)
            began = time.monotonic()
            with caplog.at_level(logging.WARNING, "aioenv"):
                await envs.close(grace_s=0.05)
            assert time.monotonic() - began < 1.5
        (record,) = caplog.records
        assert "a thread can't be killed" in record.message
        gate.set()
        for thread in threading.enumerate():
            if thread.name == "aioenv-worker-0":
                thread.join(5)

    run_on("asyncio", main())


def test_a_worker_that_takes_too_long_is_replaced(caplog):
    gate = Stuck.gates["other"] = threading.Event()

    async def main():
        restart = aioenv.RestartPolicy()
        options = {"timeout_s": 0.1, "on_timeout": "restart", "restart": restart}
        async with aioenv.AsyncVectorEnv([partial(Stuck, "other")], debug=True, **options) as envs:
            await envs.reset()
            assert (await envs.step([0])).truncated.tolist() == [True]
            gate.set()
            async with asyncio.timeout(5):
                while sum(thread.name == "aioenv-worker-0" for thread in threading.enumerate()) > 1:
                    await asyncio.sleep(0.01)

    run_on("uvloop", main())


def test_the_blocking_twin_and_make_vec():
    with aioenv.sync.make_vec("CartPole-v1", 2, debug=True) as envs:
        first, _ = envs.reset(seed=3)
        assert envs.workers[0].pid == os.getpid()
    with aioenv.sync.make_vec("CartPole-v1", 2) as envs:
        assert np.array_equal(first, envs.reset(seed=3)[0])
        assert envs.workers[0].pid != os.getpid()
    with pytest.raises(ValueError, match=r'debug: not with backend="native".* backend="workers" takes'):
        aioenv.make_vec("CartPole-v1", 2, backend="native", debug=True)
