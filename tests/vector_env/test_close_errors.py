"""`close()` where an env, or ours, raises or takes long: every process and thread ends, and the error is told."""

from __future__ import annotations

import logging
import math
import os
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector.utils import batch_space

import aioenv
from aioenv.process.launch import START_METHODS
from aioenv.rendering.queue import RenderQueue
from aioenv.rendering.step_images import StepImages
from tests.kits.render_pool_kit import SMALL, pool_of, some_states

pytestmark = pytest.mark.asyncio


class Unsaved(gym.Env):
    """Can't be closed as it should be."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def close(self):
        raise OSError("the replay could not be saved")


class Leaves(Unsaved):
    """As some that have a window do."""

    def close(self):
        sys.exit(3)


class UnsavedBatch(gym.vector.VectorEnv):
    """The same as one vector env."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Unsaved.observation_space, Unsaved.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def close_extras(self, **kwargs):
        raise OSError("the replay could not be saved")


WAYS = {start: {"num_workers": 1, "start": start} for start in START_METHODS} | {"debug": {"debug": True}}


def told(caplog) -> list[str]:
    """Warnings of workers, without which worker it is."""
    return [
        record.getMessage().partition("): ")[2] or f"{record.getMessage()}\n{record.exc_text}"
        for record in caplog.records
        if record.name == "aioenv.workers" and record.levelno == logging.WARNING
    ]


@pytest.mark.parametrize("way", WAYS)
async def test_an_env_that_raises_when_it_is_closed_is_told(way, caplog):
    async with aioenv.make_vec(Unsaved, 2, **WAYS[way]) as envs:
        await envs.reset()
    (text,) = told(caplog)  # of both
    assert text.startswith("an env raised when it was closed\nTraceback")
    assert text.endswith("OSError: the replay could not be saved")


async def test_what_others_raise_then_is_told_too(caplog):
    class Other(Unsaved):
        def close(self):
            raise ValueError("something else")

    async with aioenv.AsyncVectorEnv([Unsaved, Other, Unsaved, Other], num_workers=1) as envs:
        await envs.reset()
    assert [text.rpartition("\n")[2] for text in told(caplog)] == [
        "OSError: the replay could not be saved",
        "ValueError: something else",
    ]


async def test_a_vector_env_in_a_worker_that_raises_when_it_is_closed_is_told(caplog):
    async with aioenv.NativeVectorEnv(UnsavedBatch, 2, num_workers=1) as envs:
        await envs.reset()
    (text,) = told(caplog)
    assert text.startswith("the vector env raised when it was closed\nTraceback")


@pytest.mark.parametrize("way", WAYS)
async def test_an_env_that_ends_its_program_when_it_is_closed_is_no_fault(way, caplog):
    async with aioenv.make_vec(Leaves, 2, **WAYS[way]) as envs:
        await envs.reset()
    assert told(caplog) == []


class Slow(Unsaved):
    """Has much to save."""

    def __init__(self, fifo: str) -> None:
        self.fifo = fifo

    def close(self):
        with open(self.fifo) as until_somebody_writes:
            until_somebody_writes.read()


@pytest.mark.parametrize("start", START_METHODS)
async def test_an_env_that_has_no_time_left_to_close_is_told(start, fifo, caplog):
    factories = [Unsaved, lambda: Slow(fifo)]
    async with aioenv.AsyncVectorEnv(factories, num_workers=1, start=start) as envs:
        await envs.reset()
        (worker,) = envs.workers
        await envs.close(grace_s=0.1)
    (late,) = [record for record in caplog.records if record.name == "aioenv"]
    assert late.levelno == logging.WARNING
    beginning = f"worker 0 (pid {worker.pid}) has not ended within grace_s=0.1, at slot 1: it is killed"
    assert late.getMessage().startswith(beginning)


async def test_who_gives_envs_no_time_to_close_is_told_nothing(fifo, caplog):
    async with aioenv.make_vec(lambda: Slow(fifo), 1) as envs:
        await envs.reset()
        await envs.close(grace_s=0)
    assert caplog.records == []


CONFIG = aioenv.RenderConfig(24, 18, quality="fast", workers=1)


def fails(*args):
    raise ZeroDivisionError("by a bug of ours")


def ended(pids) -> bool:
    """Whether there are no such processes any more."""
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("where", [{"num_workers": 1}, {"backend": "native"}])
async def test_a_vector_env_is_closed_although_a_part_of_it_fails(where, monkeypatch):
    envs = await aioenv.make_vec("InvertedPendulum-v5", 2, render=CONFIG, **where)
    await envs.reset(seed=0)
    pids = [worker.pid for worker in envs.workers] + [pid for pool in envs._session.pools for pid in pool.pids]
    thread = getattr(envs._session, "_thread", None)
    monkeypatch.setattr(StepImages, "fail_all", fails)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await envs.close()
    assert pids and ended(pids)
    assert thread is None or thread.ended
    with pytest.raises(aioenv.ClosedError):
        await envs.step(np.zeros((2, 1), np.float32))


async def test_a_pool_is_closed_although_a_part_of_it_fails(monkeypatch):
    pool = await pool_of()
    await pool.render(some_states(pool, 2), **SMALL)
    pids = pool.pids
    monkeypatch.setattr(RenderQueue, "close", fails)
    with pytest.raises(ZeroDivisionError):
        await pool.close()
    assert ended(pids)


@pytest.mark.parametrize("grace_s", ["1", math.nan, None])
@pytest.mark.parametrize("way", WAYS)
async def test_a_grace_period_that_is_no_number_closes_nothing(way, grace_s):
    async with aioenv.make_vec("CartPole-v1", 2, **WAYS[way]) as envs:
        await envs.reset()
        with pytest.raises(ValueError, match="grace_s: expected a number of seconds, got"):
            await envs.close(grace_s=grace_s)
        await envs.step([0, 0])
    assert envs.closed
