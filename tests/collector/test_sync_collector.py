"""`aioenv.sync.RolloutCollector`: the same by plain iteration."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

import aioenv
from tests.collector.collector_kit import Linear, weights
from tests.collector.test_rollout_collector import Short, flat


def test_iteration_updates_and_stats():
    with aioenv.sync.RolloutCollector(
        "CartPole-v1", 4, policy=Linear, steps=8, num_collectors=2, mode="sync", seed=0
    ) as collector:
        versions = []
        for rollout in collector:
            versions.append(rollout.weights_version)
            assert np.array_equal(rollout.extras["slot"][0], rollout.slots)
            if len(versions) % 2 == 0:
                assert collector.update(weights(len(versions) // 2)) == len(versions) // 2 == collector.version
            if len(versions) == 6:
                break
        assert versions == [0, 0, 1, 1, 2, 2]
        assert collector.stats().rollouts == 6 and collector.num_collectors == 2 and len(collector.pids) == 2
        assert collector.single_action_space.n == 2 and collector.single_observation_space.shape == (4,)
        assert "aioenv.sync.RolloutCollector num_envs=4 num_collectors=2 mode='sync' running" in repr(collector)
    with pytest.raises(aioenv.ClosedError):
        next(collector)
    collector.close()


def test_it_ends_with_the_episodes():
    with aioenv.sync.RolloutCollector(Short, 2, policy=lambda: flat, steps=4, num_collectors=1) as collector:
        assert sum(rollout.reward.sum() for rollout in collector) == 2 * 3 * 2


def test_errors():
    with (
        aioenv.sync.RolloutCollector("CartPole-v1", 2, policy=lambda: flat, num_collectors=1) as collector,
        pytest.raises(aioenv.PolicyError, match="expected a policy with update"),
    ):
        collector.update({"w": 1})
        next(collector)


def test_an_interrupted_wait_loses_no_rollout():
    def sequence(interrupt):
        with aioenv.sync.RolloutCollector(
            "CartPole-v1", 2, policy=Linear, steps=100, num_collectors=1, seed=0
        ) as collector:
            found = []
            while len(found) < 5:
                timer = threading.Timer(0.001 * len(found), signal.raise_signal, [signal.SIGINT])
                try:
                    if interrupt:
                        timer.start()
                    found.append(next(collector).obs)
                    timer.cancel()
                    if interrupt:
                        timer.join()
                except KeyboardInterrupt:
                    interrupt = False
            return found

    for mine, theirs in zip(sequence(True), sequence(False), strict=True):
        assert np.array_equal(mine, theirs)
