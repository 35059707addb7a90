"""Large rollouts of collectors of this machine lie in shared memory."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.cluster.local import LocalCluster
from aioenv.collector import collector_pool
from aioenv.collector.collect_requests import DumpedRollout
from aioenv.worker import worker_context
from tests.collector.collector_kit import FIELDS

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no anonymous memory to share"),
]

SHAPE = (100, 100)


class Images(gym.Env):
    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._image(), {}

    def step(self, action):
        self.steps += 1
        return self._image(), float(self.np_random.random()), self.steps == 7, False, {}

    def _image(self):
        return self.np_random.integers(0, 255, SHAPE, np.uint8)


class Right:
    def __call__(self, obs, slots):
        return np.ones(len(obs), np.int64), {"mean": obs.mean((1, 2)), "slot": slots}


def images(num_collectors: Any = 2, **options: Any) -> aioenv.RolloutCollector:
    """Rollouts of at least 1 MiB."""
    settings = {"policy": Right, "steps": 60, "mode": "sync", "seed": 3, "num_collectors": num_collectors, **options}
    return aioenv.RolloutCollector(Images, 4, **settings)


async def one_round(collecting: Any) -> list[Any]:
    found = [await anext(collecting) for _ in range(collecting.num_collectors)]
    await collecting.update()
    return sorted(found, key=lambda one: one.collector)


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def is_shared(array: Any) -> bool:
    address = array.ctypes.data
    for line in maps():
        begin, end = (int(text, 16) for text in line.split()[0].split("-"))
        if begin <= address < end:
            return "memfd:aioenv" in line
    return False


def copies(rollouts: list[Any]) -> list[list[Any]]:
    return [[np.array(getattr(one, name)) for name in FIELDS] + [np.array(one.extras["mean"])] for one in rollouts]


def assert_same(got: list[list[Any]], expected: list[list[Any]]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        for array, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(array, other)


async def rounds(count: int, **options: Any) -> list[Any]:
    async with images(**options) as collecting:
        return [one for _ in range(count) for one in await one_round(collecting)]


@pytest.mark.parametrize("num_workers", [0, 1])
async def test_they_equal_those_in_messages(monkeypatch, num_workers):
    shared = await rounds(4, num_workers=num_workers)
    # the first ones travel: their sizes were not known
    assert [is_shared(one.obs) for one in shared] == [False] * 2 + [True] * 6
    assert all(is_shared(one.extras["mean"]) and one.obs.flags.writeable for one in shared[2:])
    monkeypatch.setattr(collector_pool, "_BLOCK_BYTES", 1 << 40)
    sent = await rounds(4, num_workers=num_workers)
    assert not any(is_shared(one.obs) for one in sent)
    assert_same(copies(shared), copies(sent))


async def test_memory_is_used_again_once_no_array_of_a_rollout_is_left():
    async with images(1) as collecting:
        await one_round(collecting)
        kept = (await one_round(collecting))[0].obs[3]  # a view is enough
        before = kept.copy()
        places = {(await one_round(collecting))[0].obs.ctypes.data for _ in range(8)}
        assert len(places) <= 2 and np.array_equal(kept, before)
        held = [await one_round(collecting) for _ in range(5)]
        assert len({one.obs.ctypes.data for (one,) in held}) == 5
        assert np.array_equal(kept, before)
    assert np.array_equal(kept, before)
    del held, kept
    gc.collect()
    assert not any("memfd:aioenv" in line for line in maps())


@pytest.mark.skipif(sys.platform != "linux", reason="agents take pidfds")
async def test_some_collectors_are_here_and_others_on_a_cluster():
    found = await rounds(3, num_collectors=[1, 1], cluster=[None, LocalCluster()])
    assert [is_shared(one.obs) for one in found] == [False, False, True, False, True, False]
    assert_same(copies(found), copies(await rounds(3)))


async def test_a_collector_that_is_replaced_shares_memory_too():
    async with images() as collecting:
        first = await one_round(collecting)
        second = await one_round(collecting)
        worker = collecting._pool.workers[0]
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while worker.generation == 0 or worker.state.value != "ready":
                await asyncio.sleep(0.001)
        before = copies(second)
        third = await one_round(collecting)
        fourth = await one_round(collecting)
        assert all(is_shared(one.obs) for one in (*second, *third, *fourth)) and not is_shared(first[0].obs)
        assert [one.restarted for one in (*third, *fourth)].count(True) == 1
        assert_same(copies(second), before)
        for one in (*third, *fourth):
            np.testing.assert_array_equal(one.extras["mean"], one.obs.mean((2, 3)))


async def test_without_memory_they_travel():
    async with images() as collecting:
        await one_round(collecting)
        assert all(is_shared(one.obs) for one in await one_round(collecting))
        collecting._pool._memory.close()  # no more is to be had
        kept = [await one_round(collecting) for _ in range(3)]
        assert not any(is_shared(one.obs) for one in kept[-1])


class Unmapped(Right):
    """In the place of shared memory its process has a descriptor that can't be mapped."""

    def __call__(self, obs, slots):
        worker_context._context.memory_fd = os.open(os.devnull, os.O_RDWR)
        return super().__call__(obs, slots)


async def test_what_can_not_be_mapped_travels():
    found = await rounds(3, policy=Unmapped)
    assert not any(is_shared(one.obs) for one in found)
    for one in found:
        np.testing.assert_array_equal(one.extras["mean"], one.obs.mean((2, 3)))


class OfObjects:
    """Returns objects that travel within the pickle, and tells how many rollouts its collector holds."""

    def __call__(self, obs):
        held = sum(isinstance(one, DumpedRollout) for one in gc.get_objects())
        return np.ones(len(obs), np.int64), {"objects": np.full(len(obs), {"main__": held}, object)}


async def test_a_rollout_that_was_sent_is_not_held():
    found = await rounds(4, num_collectors=1, policy=OfObjects)
    assert [one.extras["objects"][-1, 0]["main__"] for one in found] == [0] * 4
