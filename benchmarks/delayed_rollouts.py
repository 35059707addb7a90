"""Rollouts of collectors over a network that delays: what they lose against no delay, over the same relay.

Delay and no delay take turns, so that a change of the machine's speed does not count as loss. Rates are those of each
collector, between its first and its last rollout of a turn.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import aioenv
from aioenv.cli.arguments import NoOp
from aioenv.cli.contenders import NotApplicable, Workload
from benchmarks.collectors import STEPS, SmallPolicy
from benchmarks.network import DELAYS_MS, RelayProcess, Sleeping
from benchmarks.resets import RATE
from tests.kits.relay_kit import RelayedCluster

__all__ = ["DELAYED", "DELAYED_ENVS", "DELAYED_KEYS", "DELAY_MS", "LOSS"]

DELAY_MS = max(DELAYS_MS)  # each way
LOSS = "loss %"
DELAYED_KEYS = (LOSS, f"{RATE}, 0", f"{RATE}, {DELAY_MS:g}")
# A step of a collector sleeps as long as one of a worker in `network.py`; or it computes.
DELAYED_ENVS = {"network-rollouts-noop": "noop", "network-rollouts-cartpole": "CartPole-v1"}
COLLECTORS = 2
_TURNS = 3  # of delay, and of no delay
_LONGER = 5  # times the suite's seconds: a rollout of steps that sleep takes 0.3 s
_SKIPPED = 2  # rollouts of each collector, after the delay has changed

_made = 0


def _sleeping_once() -> Any:
    """Make an env; the first one in a process sleeps in each step."""
    global _made
    _made += 1
    return Sleeping(NoOp) if _made == 1 else NoOp()


def _push_left() -> Callable[[Any], Any]:
    return lambda obs: np.zeros(len(obs), np.int64)


async def _turn(collector: Any, seconds: float) -> float:
    """Take rollouts for a while; return env-steps/s of all collectors."""
    seen = dict.fromkeys(range(collector.num_collectors), 0)
    first: dict[int, float] = {}
    last: dict[int, tuple[float, int]] = {}
    steps = dict.fromkeys(seen, 0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(last) < len(seen):
        rollout = await anext(collector)
        now, number = time.perf_counter(), rollout.collector
        seen[number] += 1
        if seen[number] <= _SKIPPED:
            continue
        if number not in first:
            first[number] = now
        else:
            steps[number] += rollout.reward.size
            last[number] = now, steps[number]
    return sum(count / (now - first[number]) for number, (now, count) in last.items())


async def _collect(workload: Workload, prefetch: int, relay: RelayProcess) -> dict[str, float]:
    env: Any = workload.env
    policy: Any = partial(SmallPolicy, 4, 0, False)
    if workload.env == "noop":
        env, policy = _sleeping_once, _push_left
    cluster: Any = RelayedCluster(relay)  # type: ignore[arg-type]  # it calls `port_to`
    rates: dict[float, list[float]] = {0.0: [], DELAY_MS: []}
    async with aioenv.RolloutCollector(
        env,
        workload.num_envs,
        policy=policy,
        steps=STEPS,
        num_collectors=COLLECTORS,
        seed=0,
        prefetch=prefetch,
        cluster=cluster,
    ) as collector:
        for _ in range(_TURNS):
            for delay, found in rates.items():
                relay.set_delay(delay / 1e3)
                found.append(await _turn(collector, _LONGER * workload.seconds))
        relay.set_delay(0.0)
    lost = [100 * (1 - slow / fast) for fast, slow in zip(*rates.values(), strict=True)]
    numbers = (lost, *rates.values())
    return dict(zip(DELAYED_KEYS, map(statistics.median, numbers), strict=True))


def _measure(prefetch: int, workload: Workload) -> dict[str, float]:
    """Measure two collectors with and without a delay.

    Raises:
        NotApplicable: if the env is none of `DELAYED_ENVS`.
    """
    if workload.env not in DELAYED_ENVS.values():
        raise NotApplicable(f"takes one of {', '.join(DELAYED_ENVS.values())}")
    with contextlib.closing(RelayProcess()) as relay:
        return aioenv.run(_collect(workload, prefetch, relay))


DELAYED: dict[str, Callable[[Workload], dict[str, float]]] = {
    "aioenv": partial(_measure, 0),
    "aioenv-prefetch": partial(_measure, 1),
}
