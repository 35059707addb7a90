"""Kit of the alignment tests: an env that remembers everything, its reference, and a task that is cancelled."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from tests.kits.compare import assert_same

N = 4


class Ledger(gym.Env):
    """Observes how many resets and steps it has done, and a digest of every action: what is lost shows for ever.

    Args:
        slow_s: how long a step and an image take, in seconds, so that a cancellation can come meanwhile.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's own convention
    observation_space = spaces.Box(-1e9, 1e9, (4,), np.float64)
    action_space = spaces.Discrete(1000)
    render_mode = "rgb_array"
    LENGTH = 7

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s
        self.resets = self.steps = self.digest = self.notes = 0

    def _work(self) -> None:
        if self.slow_s:
            import time

            time.sleep(self.slow_s)

    def _observe(self):
        return np.array([self.resets, self.steps, self.digest, self.np_random.random()])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._work()
        self.resets += 1
        self.t = 0
        return self._observe(), {"resets": self.resets}

    def step(self, action):
        self._work()
        self.steps += 1
        self.t += 1
        self.digest = (31 * self.digest + int(action) + 1) % 1_000_003
        return self._observe(), float(action), self.t >= self.LENGTH, False, {"steps": self.steps}

    def render(self):
        self._work()
        return np.full((4, 5, 3), (7 * self.steps + self.resets) % 256, np.uint8)

    def note(self, number):
        """Remember a number; returns a digest of all of them."""
        self._work()
        self.notes = (31 * self.notes + number + 1) % 1_000_003
        return self.notes


class Reference:
    """The same envs in this process, under Gymnasium's own SyncVectorEnv: a run without any cancellation.

    Args:
        factory: makes one of them.
    """

    def __init__(self, factory: Callable[[], gym.Env]) -> None:
        self.envs = SyncVectorEnv([factory] * N)

    def copy(self) -> Reference:
        other = copy.copy(self)
        other.envs = copy.deepcopy(self.envs)
        return other

    def step(self, actions) -> tuple[Any, ...]:
        return copy.deepcopy(self.envs.step(actions))

    def reset(self, **kwargs: Any) -> tuple[Any, ...]:
        """As a step would tell it: with rewards of 0 and flags False."""
        obs, info = self.envs.reset(**kwargs)
        return copy.deepcopy((obs, np.zeros(N), np.zeros(N, bool), np.zeros(N, bool), info))

    def render(self) -> np.ndarray:
        return np.stack(self.envs.render())


def as_step(result: Any) -> tuple[Any, ...]:
    """A result of `step`, `reset` or `recv` of all slots, in the form of `Reference`."""
    if len(result) == 2:
        obs, info = result
        return obs, np.zeros(N), np.zeros(N, bool), np.zeros(N, bool), info
    return tuple(result[-5:])


def same(got: Any, expected: Any) -> bool:
    try:
        assert_same(got, expected)
    except AssertionError:
        return False
    return True


# ---------------------------------------------------------------- a cancellation at the k-th suspension


class _Counting(Coroutine[Any, Any, Any]):
    """A coroutine that says whenever it suspends."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], on_suspension: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._on_suspension = on_suspension

    def send(self, value: Any) -> Any:
        awaited = self._coroutine.send(value)
        self._on_suspension()
        return awaited

    def throw(self, *exc: Any) -> Any:
        awaited = self._coroutine.throw(*exc)
        self._on_suspension()
        return awaited

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("it is for tasks alone")


class CancelAt:
    """Runs an operation, and cancels it at the k-th suspension of its task or of any task that it starts.

    Args:
        k: counted from 1.

    Attributes:
        hit: whether the operation suspended so often that it was cancelled, and ended by that.
        result: what it returned, if it was not.
    """

    def __init__(self, k: int) -> None:
        self._left = k
        self._task: asyncio.Task[Any] | None = None
        self.hit = False
        self.result: Any = None

    def _on_suspension(self) -> None:
        self._left -= 1
        if self._left == 0 and self._task is not None:
            self._task.cancel()

    def _make_task(self, loop: Any, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Counting(coroutine, self._on_suspension), loop=loop, **kwargs)

    async def run(self, operation: Coroutine[Any, Any, Any]) -> CancelAt:
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        loop.set_task_factory(self._make_task)
        try:
            self._task = loop.create_task(operation)
            await asyncio.wait([self._task])
        finally:
            loop.set_task_factory(before)
        self.hit = self._task.cancelled()
        if not self.hit:
            self.result = self._task.result()
        return self
