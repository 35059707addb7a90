"""Kit for tests of collectors: policies, and rollouts joined to one of all slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import aioenv

FIELDS = ("obs", "actions", "reward", "terminated", "truncated", "valid")


class Linear:
    """For CartPole; row by row, and exact. Its weights are those of the version that it was given."""

    def __init__(self, weights: Any = (0.0, 0.0, 1.0, 1.0)) -> None:
        self.weights = np.array(weights)

    def update(self, weights: Any) -> None:
        self.weights = weights["w"]

    def __call__(self, obs: Any, slots: Any) -> Any:
        score = (obs * self.weights).sum(1)
        return (score > 0).astype(np.int64), {"score": score, "slot": slots}


class RandomPolicy:
    """Draws actions from the generators of the slots."""

    def __call__(self, obs: Any, generators: Any) -> Any:
        return np.array([generator.integers(2) for generator in generators])


def weights(version: int) -> dict[str, Any]:
    """The weights of a version, which makes other actions than those before."""
    return {"w": np.array([0.1 * version, -0.1, 1.0, 1.0 + version % 3]), "more": np.arange(5000.0) + version}


def joined(rollouts: Sequence[Any]) -> dict[str, Any]:
    """The arrays of the rollouts of one round, of all slots in order."""
    rollouts = sorted(rollouts, key=lambda rollout: rollout.collector)
    assert np.concatenate([rollout.slots for rollout in rollouts]).tolist() == [*range(sum(map(width, rollouts)))]
    found = {name: np.concatenate([getattr(r, name) for r in rollouts], axis=1) for name in FIELDS}
    found |= {name: np.concatenate([r.extras[name] for r in rollouts], axis=1) for name in rollouts[0].extras}
    return {**found, "last_obs": np.concatenate([rollout.last_obs for rollout in rollouts])}


def width(rollout: Any) -> int:
    """The number of its slots."""
    return len(rollout.slots)


async def rounds(collector: aioenv.RolloutCollector, count: int, update: bool = True) -> list[list[Any]]:
    """Some rounds of a collector in sync mode, with the weights of the next version after each."""
    found: list[list[Any]] = [[]]
    async for rollout in collector:
        found[-1].append(rollout)
        if len(found[-1]) == collector.num_collectors:
            if len(found) == count:
                break
            await collector.update(weights(len(found)) if update else None)
            found.append([])
    return found


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype and np.array_equal(got[name], array), name
