"""Faults that used to end in a misleading message, or in more than one slot's loss."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv

pytestmark = pytest.mark.usefixtures("fork_server")

ACTIONS = np.zeros(2, np.int64)


class Speechless(Exception):
    def __str__(self):
        raise KeyboardInterrupt("not a word")


def untold():
    """An error that Python itself fails to print."""
    return SyntaxError("not a line", ("env.py", 3, "no number", object()))


class Raises(gym.Env):
    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, error=None) -> None:
        self.error = error

    def reset(self, *, seed=None, options=None):
        if options and self.error is not None:
            raise self.error()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self.error is not None:
            raise self.error()
        return np.zeros(1, np.float32), 1.0, False, False, {"_no_result": True}


def pair(error=None, **options):
    return aioenv.AsyncVectorEnv([lambda: Raises(error), Raises], **options)


@pytest.mark.parametrize("error", [Speechless, lambda: ValueError("x" * (1 << 22))], ids=["speechless", "verbose"])
@pytest.mark.asyncio
async def test_what_an_exception_says_is_its_slots_affair_and_kept_short(error):
    async with pair(error, num_workers=1) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.step(ACTIONS)
        assert caught.value.slots == (0,) and caught.value.partial.reward.tolist() == [0, 1]
        assert "_active" not in caught.value.partial.info  # what an env says in its infos is never taken for ours
        assert len(str(caught.value)) < 1 << 16
        assert "its __str__ raised" in str(caught.value) or len(str(caught.value.__cause__)) == 1 << 22


@pytest.mark.asyncio
async def test_an_exception_that_can_not_be_printed_is_its_slots_affair():
    async with pair(untold, num_workers=1) as envs:
        await envs.reset()
        for ask in (envs.step(ACTIONS), envs.reset(options={"fail": True})):
            with pytest.raises(aioenv.EnvError, match="SyntaxError") as caught:
                await ask
            assert caught.value.slots == (0,) and "raise self.error()" in caught.value.traceback
            await envs.reset()


@pytest.mark.asyncio
async def test_a_call_that_does_not_pickle_for_one_worker_is_made_in_no_env():
    async with pair(num_workers=2) as envs:
        await envs.set_attr("mark", [1, 2])
        with pytest.raises(TypeError, match=r"set_attr\('mark'\): expected what can be pickled"):
            await envs.set_attr("mark", [3, threading.Lock()])
        assert await envs.get_attr("mark") == (1, 2)


@pytest.mark.parametrize("channel", ["scatter", "streams"])
@pytest.mark.asyncio
async def test_a_loop_that_stood_still_is_no_timeout(channel):
    async with pair(num_workers=2, channel=channel) as envs:
        await envs.reset()
        await envs.step(ACTIONS)
        step = asyncio.ensure_future(envs.step(ACTIONS, timeout_s=0.3))
        while not envs.outstanding:
            await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251 - that is the fault
        assert (await step).reward.tolist() == [1, 1]


@pytest.mark.asyncio
async def test_a_worker_that_does_not_come_back_says_why(tmp_path):
    flag = tmp_path / "made"

    def once():
        if flag.exists():
            raise OSError("the licence server is gone")
        return Raises()

    policy = aioenv.RestartPolicy(max_restarts=1, backoff_s=0.01)
    async with aioenv.AsyncVectorEnv([once, Raises], num_workers=2, restart=policy) as envs:
        await envs.reset()
        flag.touch()
        os.kill(envs.workers[0].pid, 9)
        with pytest.raises(aioenv.WorkerDied, match=r"could not be started again: .*the licence server is gone"):
            while True:
                await envs.step(ACTIONS)


def test_run_wants_a_coroutine():
    async def main():
        pass

    with pytest.raises(TypeError, match=r"aioenv\.run: expected a coroutine.*got <function"):
        aioenv.run(main)


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
@pytest.mark.asyncio
async def test_whatever_an_env_raises_at_its_end_the_others_are_closed(error, tmp_path):
    async with aioenv.AsyncVectorEnv(
        [partial(Ends, tmp_path / "0", error), partial(Ends, tmp_path / "1")], num_workers=1
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


class Ends(Raises):
    def __init__(self, path, error=None) -> None:
        super().__init__(error)
        self.path = path

    def close(self):
        self.path.touch()
        if self.error is not None:
            raise self.error


@pytest.mark.asyncio
async def test_an_env_that_exits_has_the_others_of_its_worker_closed(tmp_path):
    async with aioenv.AsyncVectorEnv(
        [partial(Raises, SystemExit), partial(Ends, tmp_path / "other")], num_workers=1
    ) as envs:
        await envs.reset()
        with pytest.raises(aioenv.WorkerDied, match="exited with code 0 while it ran slot 0"):
            await envs.step(ACTIONS)
        assert (tmp_path / "other").exists()
