"""Collectors of rollouts that connect over TCP, as those of a cluster do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np
import pytest

import aioenv
from aioenv.cluster.local import LocalCluster
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
