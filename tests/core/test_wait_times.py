"""Times that a vector env and its caller waited for each other: the clock by itself, and in a vector env."""

from __future__ import annotations

import asyncio
import contextlib

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv import sync
from aioenv.core import waits
from aioenv.core.waits import Clock, Stats
from tests.kits.counter_kit import Counter, counters


class Time:
    """Passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch):
    time = Time()
    monkeypatch.setattr(waits, "perf_counter", time)
    return time


def seconds(stats: Stats) -> tuple[float, float, float]:
    return stats.env_s, stats.image_s, stats.policy_s


def test_waits_that_overlap_count_once(time):
    clock = Clock()
    assert clock.stats(1, 0) == Stats(0, 0, 0, 0, 1) and clock.stats(1, 0).bound == "idle"
    time.now += 50  # before the first request: no wait
    first = clock.envs.begin()
    time.now += 1
    second = clock.envs.begin()
    time.now += 2
    first.end()
    time.now += 4
    assert seconds(clock.stats(1, 0)) == (7, 0, 0)  # one is still open
    second.end()
    time.now += 8
    assert seconds(clock.stats(1, 0)) == (7, 0, 0)  # no next request yet
    clock.envs.begin().end()
    assert seconds(clock.stats(1, 0)) == (7, 0, 8)


def test_a_wait_for_images_counts_while_no_env_is_awaited(time):
    clock = Clock()
    images = clock.images.begin()
    time.now += 1
    envs = clock.envs.begin()
    time.now += 2
    assert seconds(clock.stats(1, 0)) == (2, 1, 0)
    envs.end()
    time.now += 4
    assert seconds(clock.stats(1, 0)) == (2, 5, 0)
    images.end()
    assert seconds(clock.stats(1, 0)) == (2, 5, 0) and clock.stats(1, 0).bound == "image-bound"
    time.now += 8
    envs = clock.envs.begin()
    time.now += 1
    images = clock.images.begin()
    time.now += 1
    envs.end()
    time.now += 1
    images.end()
    assert seconds(clock.stats(1, 0)) == (4, 6, 8) and clock.stats(1, 0).bound == "policy-bound"


def test_counting_anew_leaves_out_what_is_under_way(time):
    clock = Clock()
    old = clock.envs.begin()
    time.now += 1
    clock.restart_count(5)
    time.now += 1
    old.end()
    assert clock.stats(1, 7) == Stats(0, 0, 0, 2, 1)
    clock.envs.begin().end()
    time.now += 3
    clock.envs.begin().end()
    assert seconds(clock.stats(1, 0)) == (0, 0, 3)


def test_the_table():
    stats = Stats(env_s=1.5, image_s=0.0, policy_s=0.5, env_steps=6400, num_envs=64)
    assert stats.wall_s == 2 and stats.steps == 100 and stats.env_steps_per_s == 3200
    assert stats.shares == {"envs": 0.75, "images": 0.0, "policy": 0.25} and stats.bound == "env-bound"
    assert str(stats).splitlines() == [
        "waited for     seconds   share",
        "envs             1.500   75.0%",
        "images           0.000    0.0%",
        "policy           0.500   25.0%",
        "100 steps of 64 envs in 2.000 s: 3,200 env-steps/s, env-bound",
    ]
    assert "idle" in str(Stats(0, 0, 0, 0, 4))


@pytest.mark.asyncio
async def test_a_vector_env_tells_what_it_waited_for(time, gate):
    path, open_gate = gate
    async with aioenv.AsyncVectorEnv(counters(4, gate=path), num_workers=2) as envs:
        assert envs.stats().bound == "idle"
        await envs.reset()
        for _ in range(3):
            time.now += 10  # the policy thinks
            await envs.step([0] * 4)
        stats = envs.stats()
        assert seconds(stats) == (0, 0, 30) and stats.bound == "policy-bound"
        assert stats.env_steps == 12 and stats.steps == 3
        waiting = asyncio.ensure_future(envs.step([Counter.WAIT, 0, 0, 0]))
        await asyncio.sleep(0)
        time.now += 100
        assert seconds(envs.stats()) == (100, 0, 30)
        open_gate()
        await waiting
        stats = envs.stats(reset=True)
        assert seconds(stats) == (100, 0, 30) and stats.bound == "env-bound" and stats.env_steps == 16
        assert envs.stats() == Stats(0, 0, 0, 0, 4)
        # an error is a result, too
        with pytest.raises(aioenv.EnvError):
            await envs.step([Counter.RAISE, 0, 0, 0])
        await envs.reset()
        assert envs.stats(reset=True).policy_s == 0
        # some slots: what the caller does while they step is the policy's time
        envs.send([0, 0, Counter.WAIT], iter([0, 1, 3]))
        assert (await envs.recv(2)).slots.tolist() == [0, 1]
        time.now += 5
        open_gate()
        await envs.recv()
        assert seconds(envs.stats()) == (0, 0, 5) and envs.stats().env_steps == 3
        envs.stats(reset=True)
        # from the first request to the last result
        envs.send([0] * 4)
        time.now += 7
        await envs.recv(4)
        assert seconds(envs.stats()) == (0, 0, 7)
        # a step is one, whatever becomes of its result
        envs.stats(reset=True)
        with pytest.raises(aioenv.StepTimeout):
            await envs.step([Counter.WAIT, 0, 0, 0], timeout_s=0.01)
        open_gate()
        await envs.recv(4)
        with pytest.raises(aioenv.EnvError):
            await envs.step([Counter.RAISE, 0, 0, 0])
        with pytest.raises(aioenv.ActionError):
            await envs.step([0] * 5)
        with pytest.raises(aioenv.EnvError, match="must be reset"):
            await envs.step([0] * 4)
        await envs.reset()
        assert envs.stats().env_steps == 8
        # calls and states
        envs.stats(reset=True)
        for use in (envs.get_attr("level"), envs.call_at(1, "get_wrapper_attr", "level"), envs.get_state()):
            waiting = asyncio.ensure_future(use)
            await asyncio.sleep(0)
            time.now += 1
            with contextlib.suppress(aioenv.AioenvError):
                await waiting
        assert seconds(envs.stats()) == (3, 0, 0)
        envs.stats(reset=True)

        def policy(obs):
            time.now += 1
            return [0] * len(obs)

        rollout = await envs.rollout(policy, 5)
        assert rollout.reward.shape == (5, 4)
        assert seconds(envs.stats()) == (0, 0, 10) and envs.stats().env_steps == 20


class SlowDrawer(Counter):
    """Draws when it is let."""

    def render(self):
        with open(self.gate) as fifo:
            fifo.read()
        return np.zeros((2, 2, 3), np.uint8)


@pytest.mark.asyncio
async def test_a_vector_env_waits_for_images(time, gate):
    path, open_gate = gate
    async with aioenv.AsyncVectorEnv([lambda: SlowDrawer(gate=path)]) as envs:
        await envs.reset()
        time.now += 1
        drawing = asyncio.ensure_future(envs.render())
        await asyncio.sleep(0)
        time.now += 2
        open_gate()
        assert (await drawing).shape == (1, 2, 2, 3)
        assert seconds(envs.stats()) == (0, 2, 1) and envs.stats().bound == "image-bound"


def test_blocking_code_too():
    for make in (
        lambda: sync.make_vec("CartPole-v1", 4, num_workers=1),
        lambda: sync.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 4, num_workers=1),
    ):
        with make() as envs:
            envs.reset(seed=0)
            for _ in range(10):
                envs.step(np.zeros(4, int))
            stats = envs.stats(reset=True)
            assert stats.env_steps == 40 and stats.env_s > 0 and stats.policy_s > 0
            envs.step_async(np.zeros(4, int)) if hasattr(envs, "step_async") else envs.send(np.zeros(4, int))
            assert envs.stats().env_steps == 4
            envs.step_wait() if hasattr(envs, "step_wait") else envs.recv(4)
            assert envs.stats().env_steps == 4
