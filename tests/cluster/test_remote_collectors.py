"""Collectors of rollouts that connect over TCP, as those of a cluster do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import aioenv
from aioenv.cluster.local import LocalCluster, ProcessAgent
from aioenv.ipc.shared_data import refuse_data
from tests.collector.collector_kit import FIELDS, Linear

pytestmark = [pytest.mark.asyncio, pytest.mark.skipif(sys.platform != "linux", reason="agents take pidfds")]


def collector(cluster=None, num_collectors=2, **options):
    return aioenv.RolloutCollector(
        "CartPole-v1",
        4,
        policy=Linear,
        steps=30,
        num_collectors=num_collectors,
        mode="sync",
        seed=3,
        cluster=cluster,
        **options,
    )


async def rollouts(collector, number=4):
    """The rollouts of some rounds, by round and collector."""
    found = []
    async with collector:
        async for rollout in collector:
            found.append(rollout)
            if len(found) == number * collector.num_collectors:
                break
            if len(found) % collector.num_collectors == 0:
                await collector.update()
    return sorted(found, key=lambda each: (each.weights_version, each.collector))


@pytest.mark.parametrize(
    ("cluster", "num_collectors"), [(LocalCluster(2), 2), ([None, LocalCluster()], [1, 1])], ids=["all", "mixed"]
)
@pytest.mark.parametrize("num_workers", [0, 1])
async def test_rollouts_equal_those_of_local_collectors(cluster, num_collectors, num_workers):
    here = await rollouts(collector(num_workers=num_workers))
    there = await rollouts(collector(cluster, num_collectors, num_workers=num_workers))
    assert len(here) == len(there) == 8
    for ours, theirs in zip(here, there, strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


async def test_a_collector_whose_agent_is_killed_is_placed_again():
    async with collector(LocalCluster(2)) as collecting:
        first = [await anext(collecting) for _ in range(2)]
        worker = collecting._pool.workers[0]
        os.kill(worker._connection._process._agent.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while worker.generation == 0 and worker.state.value in ("ready", "busy", "draining"):
                await asyncio.sleep(0)
        await collecting.update()
        second = [await anext(collecting) for _ in range(2)]
    assert not any(rollout.restarted for rollout in first)
    assert {rollout.collector: rollout.restarted for rollout in second} == {0: True, 1: False}


LARGE = 5 << 20


class Mapped:
    """Says where its weights are: whether on pages that it shares with other processes, and the sum of the weights.

    It keeps its last `keep` weights, and changes the newest ones, which no other collector may see.
    """

    def __init__(self, keep=1):
        self.keep, self.kept = keep, []

    def update(self, weights):
        self.kept = [*self.kept, weights][-self.keep :]

    def __call__(self, obs):
        count = len(obs)
        told = {"sum": np.zeros(count), "pages": np.zeros(count), "kept": np.full(count, float(len(self.kept)))}
        if self.kept:
            array = self.kept[-1]["large"]
            told["sum"][:] = array.sum()
            told["pages"][:] = memory_at(array.ctypes.data)
            array[0] = -1 - array[1:].sum()  # the sum is -1 from now on
        return np.zeros(count, np.int64), told


COPIED, MEMFD, PLASMA = range(3)


def memory_at(address: int) -> int:
    """What is mapped there, so that pages are copied when they are written to: a memfd, Ray's object store, or none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            area, permissions, _, _, _, *path = line.split()
            begin, end = (int(text, 16) for text in area.split("-"))
            if begin <= address < end:
                if permissions.endswith("p") and path:
                    return MEMFD if "memfd:aioenv" in path[0] else PLASMA if "plasma" in path[0] else COPIED
    return COPIED


def large(version: int) -> dict:
    return {"large": np.full(LARGE // 8, float(version)), "small": np.arange(300.0), "n": version}


def of_mapped(cluster, num_collectors=2, policy=Mapped, **options):
    options = {"steps": 1, "mode": "sync", "num_collectors": num_collectors, **options}
    return aioenv.RolloutCollector("CartPole-v1", 4, policy=policy, cluster=cluster, **options)


async def one_round(collecting):
    return sorted([await anext(collecting) for _ in range(collecting.num_collectors)], key=lambda one: one.collector)


async def weights_are_mapped(cluster, num_collectors=2, memory=(MEMFD, MEMFD)) -> None:
    """Check that the collectors that are on a cluster share the memory of weights, and none sees what others write."""
    async with of_mapped(cluster, num_collectors) as collecting:
        await one_round(collecting)
        for version in (1, 2, 3):
            mine = large(version)
            await collecting.update(mine)
            mine["large"][:] = 0  # they were copied
            for rollout, kind in zip(await one_round(collecting), memory, strict=True):
                assert rollout.extras["sum"][0, 0] == version * LARGE // 8, "the very weights"
                assert rollout.extras["pages"][0, 0] == kind
        await collecting.update()
        for rollout in await one_round(collecting):
            assert rollout.extras["sum"][0, 0] == -1, "what it wrote itself"


@pytest.mark.parametrize(
    ("cluster", "num_collectors", "memory"),
    [(LocalCluster(2), 2, (MEMFD, MEMFD)), ([None, LocalCluster()], [1, 1], (COPIED, MEMFD))],
    ids=["all", "mixed"],
)
async def test_weights_are_mapped(cluster, num_collectors, memory):
    await weights_are_mapped(cluster, num_collectors, memory)


async def test_small_weights_travel_in_messages():
    async with of_mapped(LocalCluster()) as collecting:
        await one_round(collecting)
        await collecting.update({"large": np.ones(1000)})
        assert [(one.extras["sum"][0, 0], one.extras["pages"][0, 0]) for one in await one_round(collecting)] == [
            (1000, 0)
        ] * 2


async def a_replaced_collector_gets_the_newest_weights(cluster) -> None:
    async with of_mapped(cluster) as collecting:
        await one_round(collecting)
        for version in (1, 2):
            await collecting.update(large(version))
            await one_round(collecting)
        worker = collecting._pool.workers[0]
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            while worker.generation == 0:
                await asyncio.sleep(0)
        await collecting.update()  # the same weights
        replaced, other = await one_round(collecting)
        assert (replaced.restarted, other.restarted) == (True, False)
        assert replaced.extras["sum"][0, 0] == 2 * LARGE // 8 and replaced.extras["pages"][0, 0]
        assert other.extras["sum"][0, 0] == -1
        await collecting.update(large(3))
        assert {one.extras["sum"][0, 0] for one in await one_round(collecting)} == {3 * LARGE // 8}


async def test_a_replaced_collector_gets_the_newest_weights():
    await a_replaced_collector_gets_the_newest_weights(LocalCluster(2))


async def unpicklable_weights_change_nothing(cluster) -> None:
    async with of_mapped(cluster) as collecting:
        await one_round(collecting)
        await collecting.update(large(1))
        with pytest.raises(TypeError, match="generator"):
            await collecting.update({**large(2), "more": (each for each in ())})
        assert collecting.version == 1
        assert {one.extras["sum"][0, 0] for one in await one_round(collecting)} == {LARGE // 8}


async def test_unpicklable_weights_change_nothing():
    await unpicklable_weights_change_nothing(LocalCluster())


@pytest.mark.parametrize("options", [{}, {"mode": "async", "prefetch": 2}])
async def test_weights_that_can_not_be_shared_travel_in_messages(monkeypatch, options):
    monkeypatch.setattr(ProcessAgent, "give", lambda self, data: refuse_data(self._inbox, data.number))
    async with of_mapped(LocalCluster(), **options) as collecting:
        await one_round(collecting)
        for version in (1, 2, 3):
            await collecting.update(large(version))
            async for rollout in collecting:
                if rollout.weights_version == version:
                    break
            assert rollout.extras["sum"][0, 0] in (version * LARGE // 8, -1) and not rollout.extras["pages"].any()
            if not options:
                await anext(collecting)


async def test_a_policy_may_keep_all_its_weights():
    async with of_mapped(LocalCluster(), policy=lambda: Mapped(keep=100)) as collecting:
        await one_round(collecting)
        for version in range(1, 6):
            await collecting.update(large(version))
            for rollout in await one_round(collecting):
                assert rollout.extras["kept"][0, 0] == version
                assert rollout.extras["sum"][0, 0] == version * LARGE // 8


def mapped_by(pid: int) -> int:
    """The number of areas of anonymous shared memory that a process maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:aioenv")


async def test_old_weights_are_freed():
    async with of_mapped(LocalCluster()) as collecting:
        await one_round(collecting)
        kept = []
        for version in range(1, 6):
            await collecting.update(large(version))
            kept += [weakref.ref(data.source) for data in collecting._pool._weights.shared.values()]
            await one_round(collecting)
        assert [one() is not None for one in kept] == [False] * 4 + [True]
        assert mapped_by(collecting.pids[0]) == 2  # the mark of the row, and the newest weights
    assert kept[-1]() is None
