"""`CollectedRollout`, the result of a collector, and `CollectorStats`, the waits of a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.rollout.recorder import Rollout

__all__ = ["CollectedRollout", "CollectorStats"]


class CollectedRollout(Rollout):
    """A `Rollout` of the slots of one collector: column i of its arrays is slot `slots[i]`.

    Attributes:
        collector: the number of the collector.
        slots: the numbers of its slots among all slots, int64, ascending.
        weights_version: the number of the `update` whose weights made it, from 1; 0: those of the policy's factory.
        restarted: whether the collector was replaced since its last rollout. All slots then begin new episodes with
            this one, and those that had not ended before are lost.
    """

    collector: int
    slots: npt.NDArray[np.int64]
    weights_version: int
    restarted: bool

    def __repr__(self) -> str:
        where = f"collector={self.collector} weights_version={self.weights_version}" + " restarted" * self.restarted
        return f"<CollectedRollout {where}{super().__repr__().removeprefix('<Rollout')}"


class CollectorStats(NamedTuple):
    """The work and the waits of collectors and learner, since the first rollout was asked for; `print` shows a table.

    Attributes:
        wall_s: since then, in seconds.
        learner_wait_s: how long the learner waited for rollouts, in seconds.
        collector_wait_s: how long collectors waited for the learner, in seconds, on average: a rollout was not taken,
            or, in sync mode, weights were not updated.
        policy_s: how long the policies ran, in seconds, on average; of rollouts that have arrived.
        rollouts: how many rollouts were handed out.
        env_steps: steps of single envs in these.
        stale: how many rollouts were dropped because of `max_weight_lag`.
        restarts: how often a collector was replaced.
        lost: how many rollouts were lost thereby, and collected again.
        updates: how often weights were updated.
        num_collectors: how many collectors there are.
    """

    wall_s: float
    learner_wait_s: float
    collector_wait_s: float
    policy_s: float
    rollouts: int
    env_steps: int
    stale: int
    restarts: int
    lost: int
    updates: int
    num_collectors: int

    @property
    def env_steps_per_s(self) -> float:
        """Steps of single envs in a second; 0 if there were none."""
        return self.env_steps / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        wall_s = self.wall_s or 1.0
        rows = [
            ("learner waits for rollouts", self.learner_wait_s),
            ("collectors wait for the learner", self.collector_wait_s),
            ("policies run", self.policy_s),
        ]
        lines = [f"{'':<33} seconds   share"]
        lines += [f"{name:<33} {seconds:>7.3f} {seconds / wall_s:>7.1%}" for name, seconds in rows]
        counts = f"{self.rollouts:,} rollouts of {self.num_collectors} collectors, {self.updates:,} updates"
        lines.append(f"{counts}, {self.env_steps:,} steps in {wall_s:.3f} s: {self.env_steps_per_s:,.0f} env-steps/s")
        if self.stale or self.restarts:
            lines.append(f"{self.stale:,} rollouts were stale; {self.restarts:,} restarts, {self.lost:,} rollouts lost")
        return "\n".join(lines)
