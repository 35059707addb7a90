"""Faults of workers on a cluster: who is concerned, how they are named, and what is left."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import aioenv
from tests.kits.compare import assert_same
from tests.kits.process_kit import environment, processes_with, sockets_on

ENV = "InvertedPendulum-v5"
N = 4
LIMIT_S = 10.0
# until a worker is replaced: its env is made anew, which takes longer on a busy machine
REPLACED_S = 30.0
# each test process has ports of its own, so that its sockets can be counted
PORTS = range(30_000 + os.getpid() % 20 * 100, 30_100 + os.getpid() % 20 * 100)
NAME = f"AIOENV_TEST_MARK_{os.getpid()}"

again = pytest.mark.parametrize("again", [pytest.param(n, marks=[pytest.mark.stress] if n else []) for n in range(20)])
resumed = pytest.mark.parametrize("resume", [False, True], ids=["no restart", "resume"])


class Play:
    """Steps slots on two workers in lockstep with the same envs in this process; a fault concerns one of the workers.

    Args:
        cluster: as of `make_vec`.
        num_workers: likewise.
        resume: whether workers are restarted, and go on bit for bit; if not, they are not restarted.
        **options: likewise.

    Attributes:
        envs: the vector env.
        victim: the number of the worker that a fault concerns.
        error: the `WorkerDied` that named the fault.
    """

    def __init__(self, cluster, num_workers, resume, **options) -> None:
        policy = aioenv.RestartPolicy(resume=True, backoff_s=0.0) if resume else None
        self._resume = resume
        self.victim = 0
        self.envs = aioenv.make_vec(
            ENV, N, num_workers=num_workers, cluster=cluster, restart=policy, worker_env={NAME: "1"}, **options
        )
        self._reference = SyncVectorEnv([partial(gym.make, ENV)] * N)
        self._reference.action_space.seed(1)
        self.error: aioenv.WorkerDied | None = None
        self._number = 0

    async def __aenter__(self):
        await self.envs
        assert_same(tuple(await self.envs.reset(seed=1)), self._reference.reset(seed=1))
        await self.steps(10)
        return self

    async def __aexit__(self, *exc_info):
        await self.envs.close()
        self._reference.close()

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.step()

    async def step(self) -> None:
        actions, rows = self._reference.action_space.sample(), np.arange(N)
        expected = self._reference.step(actions)
        try:
            got = await self.envs.step(actions)
        except aioenv.WorkerDied as error:
            assert not self._resume, "it is resumed"
            lost = self.envs.workers[self.victim].slots
            assert error.slots == lost
            self.error, got, rows = error, error.partial, np.setdiff1d(rows, lost)
            if got is None:  # it was dead before anything was sent
                self.envs.send(actions[rows], rows)
                _, *got = await self.envs.recv(len(rows))
                expected, rows = [one[rows] for one in expected[:4]], np.arange(len(rows))
        else:
            assert self.error is None, "the slots of a dead worker stay dead"
        self._number += 1
        assert_same([one[rows] for one in got[:4]], [one[rows] for one in expected[:4]], f"step {self._number}")

    async def noticed(self) -> float:
        """Wait until the victim counts as dead; return the seconds that this took."""
        begun, pid = time.monotonic(), self.envs.workers[self.victim].pid
        while (victim := self.envs.workers[self.victim]).pid == pid and victim.state in ("ready", "busy", "draining"):
            await asyncio.sleep(0.005)
        return time.monotonic() - begun

    async def named(self) -> tuple[float, float]:
        """Step until the fault is named, or the worker replaced; return the seconds until it was noticed, and those."""
        begun, pid = time.monotonic(), self.envs.workers[self.victim].pid
        noticing = asyncio.ensure_future(self.noticed())
        while self.error is None and (not self._resume or self.envs.workers[self.victim].pid == pid):
            await self.step()
            assert time.monotonic() - begun < 120
        return await noticing, time.monotonic() - begun

    async def held(self, message: str, record, fault: str) -> None:
        """Check that a fault, which has been inflicted, is named in time, and that all go on.

        With resume it is not named, but noticed, and the new worker has to be there within `REPLACED_S`.
        """
        record("fault", fault + (", resumed" if self._resume else ""))
        noticed_s, seconds = await self.named()
        named_s = noticed_s if self._resume else seconds
        record("named_s", named_s)
        if self._resume:
            record("replaced_s", seconds)
        await self.steps(20)
        if self.error is not None:
            assert re.search(message, str(self.error)), self.error
        assert named_s < LIMIT_S
        assert seconds < (REPLACED_S if self._resume else LIMIT_S)


DRIVER = """
import asyncio, sys
import aioenv
from aioenv.cluster.local import LocalCluster

async def main(address, host, first, last, name):
    ports = range(int(first), int(last))
    if address:
        cluster = aioenv.RayCluster(address, listen=(host, ports))
    else:
        cluster = LocalCluster(2, ports=ports)
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=2, cluster=cluster, worker_env={name: "1"}) as envs:
        await envs.reset()
        print("up", *(worker.pid for worker in envs.workers), flush=True)
        while True:
            await envs.step([0, 1])

asyncio.run(main(*sys.argv[1:]))
"""


def kill_driver(address: str, host: str, record, fault: str, left) -> None:
    """Kill a process with a vector env, and wait until nothing is left of it."""
    record("fault", fault)
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), address, host, str(PORTS[0]), str(PORTS[-1]), NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**environment(), NAME: "1"}) as driver:
        words = driver.stdout.readline().split()
        assert len(words) == 3 and processes_with(f"{NAME}=") > {*map(int, words[1:])}
        driver.kill()
    begun = time.monotonic()
    while (found := left()) and time.monotonic() < begun + LIMIT_S:
        time.sleep(0.01)
    record("named_s", time.monotonic() - begun)
    assert not found


async def refused(cluster, message: str, record, fault: str, limit_s: float = LIMIT_S) -> None:
    """Check that a vector env does not start, why, and in time."""
    record("fault", fault)
    begun = time.monotonic()
    with pytest.raises(aioenv.WorkerStartError, match=message):
        await aioenv.make_vec("CartPole-v1", 2, num_workers=2, cluster=cluster, worker_env={NAME: "1"})
    record("named_s", time.monotonic() - begun)
    assert time.monotonic() - begun < limit_s


def left_here() -> list:
    """The processes and connections of such workers."""
    return [*processes_with(f"{NAME}="), *sockets_on(PORTS)]


def agent_of(envs):
    """The agent of the first worker."""
    return envs._session.worker_pool.workers[0]._connection._process._agent
