"""A fork server that is stopped (SIGSTOP) neither delays what is asked of it, nor the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

import aioenv
from aioenv.process import forkserver, process
from aioenv.process.forkserver import ForkServer
from aioenv.process.launch import START_METHODS
from aioenv.testing import faulty_envs

pytestmark = pytest.mark.skipif("forkserver" not in START_METHODS, reason="takes a fork server")


def _stop():
    """Stop all fork servers, and wait until they are."""
    for server in ForkServer._servers.values():
        os.kill(server.pid, signal.SIGSTOP)
        info = os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)
        assert info is not None


@pytest.fixture
def endless_waits(monkeypatch):
    """Who waits for a stopped process waits for ever."""
    monkeypatch.setattr(process, "_REAP_S", 3600.0)
    monkeypatch.setattr(forkserver, "_EXIT_S", 3600.0)


@pytest.mark.parametrize("start", START_METHODS)
def test_close_does_not_wait_for_it(start, endless_waits, own_fork_server):
    async def main() -> None:
        async with aioenv.make_vec("CartPole-v1", 2, start=start, num_workers=2) as envs:
            await envs.reset()
            _stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_workers_have_started_is_ended_all_the_same(endless_waits, own_fork_server):
    async def main() -> list[int]:
        async with aioenv.AsyncVectorEnv(faulty_envs(2, "forks", "step", slot=1, at=1), num_workers=2) as envs:
            await envs.reset()
            await envs.step(envs.action_space.sample())
            groups = [worker.pid for worker in envs.workers]
            _stop()
        return groups

    for group in asyncio.run(asyncio.wait_for(main(), 60)):
        with pytest.raises(ProcessLookupError):
            while True:  # the server reaps them after it has killed them
                os.killpg(group, 0)


def test_workers_are_started_again(endless_waits, own_fork_server, caplog):
    caplog.set_level(logging.CRITICAL)

    async def main() -> None:
        async with aioenv.make_vec("CartPole-v1", 2, num_workers=2, restart=aioenv.RestartPolicy()) as envs:
            await envs.reset()
            _stop()
            os.kill(envs.workers[1].pid, signal.SIGKILL)
            result = await envs.step([0, 0])
            assert result.info["restarted"].tolist() == [False, True]
            _stop()
            async with aioenv.make_vec("CartPole-v1", 1) as more:
                await more.reset()

    asyncio.run(asyncio.wait_for(main(), 60))
