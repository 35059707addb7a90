"""Resets that take as long as many steps: whole batches, the fastest slots first, and spare envs.

An episode has 200 steps that sleep for 1 ms. The first episodes of the slots end one after the other, so later ones do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import aioenv
from aioenv.cli.contenders import (
    ACTION_BATCHES,
    CONTENDERS,
    NotApplicable,
    Throughput,
    TimedLoop,
    Workload,
    rows_of_batch,
    step_aioenv,
)
from benchmarks.contenders import loops_at_once

__all__ = ["RATE", "RESETS", "RESET_ENVS", "Resetting"]

RATE = "env-steps/s"
STEPS, STEP_S = 200, 1e-3
LONGER = 10  # times the suite's seconds, in which too few episodes end
RESET_ENVS = {
    "SleepingResets-v0": {"reset_s": 0.2},
    "InstantResets-v0": {"reset_s": 0.0},
    "BusyResets-v0": {"reset_s": 0.2, "busy": True},
    "HalfResets-v0": {"reset_s": 0.1},
    "LongResets-v0": {"reset_s": 0.3},
}


class Resetting(gymnasium.Env[Any, Any]):
    """An env whose steps sleep, and whose resets sleep or compute.

    Args:
        reset_s: how long a reset takes, in seconds.
        busy: whether it computes.
        first: the steps of the first episode.
        render_mode: unused.
    """

    observation_space: gymnasium.Space[Any] = spaces.Box(-1, 1, (4,), np.float32)
    action_space: gymnasium.Space[Any] = spaces.Discrete(2)

    def __init__(self, reset_s: float, busy: bool = False, first: int = STEPS, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._reset_s, self._busy = reset_s, busy
        self._left = 0
        self._next = STEPS if aioenv.is_spare_env() else first
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Sleep or compute, and return zeros."""
        super().reset(seed=seed)
        if self._busy:
            end = time.process_time() + self._reset_s
            while time.process_time() < end:
                pass
        elif self._reset_s:
            time.sleep(self._reset_s)
        self._left = self._next
        return self._obs, {}

    def step(self, action: int) -> Any:
        """Sleep, and return zeros."""
        time.sleep(STEP_S)
        self._left, self._next = self._left - 1, STEPS  # until then a reset that checks the env changes nothing
        return self._obs, 0.0, False, self._left <= 0, {}


for _name, _kwargs in RESET_ENVS.items():
    gymnasium.register(
        _name, entry_point="benchmarks.resets:Resetting", kwargs=_kwargs, disable_env_checker=True, order_enforce=False
    )


@dataclass(frozen=True)
class OutOfPhase(Workload):
    """Some of these envs; the first episode of each has another length.

    Attributes:
        first: the first episode's length where it is one env.
    """

    first: int = STEPS

    @property
    def make_env(self) -> Callable[[], Any]:
        """A factory of one env."""
        return partial(gymnasium.make, self.env, first=self.first)

    @property
    def factories(self) -> list[Callable[[], Any]]:
        """A factory for each env."""
        return [replace(self, first=first).make_env for first in self._first]

    @property
    def loops(self) -> list[Workload]:
        """A workload for each env."""
        return [replace(self, num_envs=1, first=first) for first in self._first]

    @property
    def _first(self) -> list[int]:
        return [1 + slot * STEPS // self.num_envs for slot in range(self.num_envs)]


Step = Callable[[OutOfPhase], Throughput]


def _measure(step: Step, workload: Workload) -> dict[str, float]:
    """Measure the throughput of a contender, for longer than the suite's other rows.

    Raises:
        NotApplicable: if the env is none of `RESET_ENVS`.
    """
    if workload.env not in RESET_ENVS:
        raise NotApplicable(f"takes one of {', '.join(RESET_ENVS)}")
    longer = {"seconds": LONGER * workload.seconds, "warm_up_s": LONGER * workload.warm_up_s}
    done = step(OutOfPhase(**{**vars(workload), **longer}))
    return {RATE: done.env_steps / done.seconds}


def _peer(name: str, workload: OutOfPhase) -> Throughput:
    """Measure another library's vector env.

    Raises:
        NotApplicable: if its package is missing.
    """
    if not CONTENDERS[name].installed:
        raise NotApplicable("not installed")
    return CONTENDERS[name].step(workload)


def _one_each(workload: OutOfPhase) -> OutOfPhase:
    """Return the workload with one worker an env."""
    return replace(workload, keywords={"num_workers": workload.num_envs})


def _with_spares(workload: OutOfPhase) -> OutOfPhase:
    return replace(workload, keywords={"spare_envs": True})


def _recv(workload: Workload) -> Throughput:
    """Take results as soon as there are any."""

    async def main() -> Throughput:
        actions = workload.actions()
        began = time.perf_counter()
        async with aioenv.AsyncVectorEnv(workload.factories, **workload.options) as envs:
            await envs.reset(seed=0)
            start_s = time.perf_counter() - began
            envs.send(actions[0])
            for number in (loop := TimedLoop(workload)):
                if not number:
                    taken = 0
                ready = await envs.recv(min_slots=1)
                taken += len(ready.slots)
                batch = actions[number % ACTION_BATCHES]
                envs.send(rows_of_batch(batch, ready.slots, envs.single_action_space), ready.slots)
        return Throughput(loop.count, loop.seconds, taken, start_s)

    return aioenv.run(main())


_STEPS: dict[str, Step] = {
    "gymnasium-async": partial(_peer, "gymnasium-async"),
    "sb3-subproc": partial(_peer, "sb3-subproc"),
    "torchrl-parallel": partial(_peer, "torchrl-parallel"),
    "aioenv-step": lambda load: step_aioenv(_one_each(load)),
    "aioenv-recv": lambda load: _recv(_one_each(load)),
    "aioenv-spares": lambda load: step_aioenv(_with_spares(load)),
    "aioenv-spares-recv": lambda load: _recv(_with_spares(load)),
    "aioenv-instant": lambda load: step_aioenv(_one_each(replace(load, env="InstantResets-v0"))),
    "bare": lambda load: loops_at_once(load.loops),
}
RESETS: dict[str, Callable[[Workload], dict[str, float]]] = {
    name: partial(_measure, step) for name, step in _STEPS.items()
}
