"""What contenders are given to step: an env, its actions, and for how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

__all__ = [
    "SYNTHETIC",
    "Measured",
    "NoOp",
    "Passes",
    "Pixels",
    "Task",
    "Uneven",
    "clock_async",
    "clock_blocking",
    "part",
]

# Different batches of actions, used in turn.
ACTION_BATCHES = 64
MEAN_SLEEP_S = 2e-3


class NoOp(gymnasium.Env[Any, Any]):
    """Does nothing: what is left is what a vector env costs by itself."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """An observation of zeros."""
        return self._obs, {}

    def step(self, action: Any) -> Any:
        """The same again."""
        return self._obs, 0.0, False, False, {}


class Pixels(gymnasium.Env[Any, Any]):
    """As cheap, with observations of Atari's size: four stacked grey images, 28 kB."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs = np.arange(84 * 84 * 4, dtype=np.uint8).reshape(84, 84, 4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """The one observation that there is."""
        return self._obs, {}

    def step(self, action: Any) -> Any:
        """The same again."""
        return self._obs, 0.0, False, False, {}


class Uneven(NoOp):
    """Sleeps in each step, for 2 ms on average, exponentially distributed: most steps are short, and a few long."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Zeros; the seed decides how long the steps take."""
        gymnasium.Env.reset(self, seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> Any:
        """The same again, later."""
        time.sleep(self.np_random.exponential(MEAN_SLEEP_S))
        return super().step(action)


SYNTHETIC: dict[str, type[gymnasium.Env[Any, Any]]] = {"noop": NoOp, "pixels": Pixels, "uneven": Uneven}


@dataclass(frozen=True)
class Measured:
    """What one contender did in one round.

    Attributes:
        steps: batches stepped while the clock ran.
        seconds: how long that took.
        env_steps: steps of single envs.
        start_s: seconds from the constructor's call until every env was reset.
    """

    steps: int
    seconds: float
    env_steps: int
    start_s: float


@dataclass(frozen=True)
class Task:
    """One env, so many of it, for so long.

    Attributes:
        env: an id of Gymnasium, or a name in `SYNTHETIC`.
        num_envs: how many.
        seconds: for how long to step with the clock running.
        warm_up_s: for how long before that.
        start, channel: how aioenv starts its workers and talks to them; nobody else does.
        keywords: more arguments of `aioenv.make_vec`, by name.
        groups, split: in how many groups of what aioenv steps the slots, in turn.
        policy: whether a policy chooses aioenv's actions from its observations, instead of batches taken in turn.
        loop: aioenv's event loop, "uvloop" or "asyncio".
    """

    env: str
    num_envs: int
    seconds: float
    warm_up_s: float = 0.3
    start: Literal["forkserver", "spawn"] | None = None
    channel: Literal["auto", "scatter", "streams"] = "auto"
    keywords: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    split: Literal["slots", "workers"] = "slots"
    policy: bool = False
    loop: str = "uvloop"

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for aioenv's own vector envs."""
        return {"start": self.start, "channel": self.channel, **self.keywords}

    @property
    def make_env(self) -> Callable[[], Any]:
        """A factory of one env, the same for every contender."""
        return SYNTHETIC.get(self.env) or partial(gymnasium.make, self.env)

    def actions(self) -> list[Any]:
        """Batches of actions to take in turn, the same for every contender: arrays, of most spaces."""
        env = self.make_env()
        space = batch_space(env.action_space, self.num_envs)
        env.close()
        space.seed(0)
        return [space.sample() for _ in range(ACTION_BATCHES)]


def part(batch: Any, slots: npt.NDArray[np.int64], space: gymnasium.Space[Any]) -> Any:
    """The actions of some slots.

    Args:
        batch: those of all.
        slots: which.
        space: that of one action.
    """
    if isinstance(batch, np.ndarray):
        return batch[slots]
    if isinstance(space, spaces.Dict):
        return {key: part(batch[key], slots, one) for key, one in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(part(one_batch, slots, one) for one_batch, one in zip(batch, space.spaces, strict=True))
    return tuple(batch[slot] for slot in slots)


class Passes:
    """Numbers of passes, from 0: as many as there is time for to warm up, then as many to be counted::

        for number in (passes := Passes(task)):
            envs.step(actions[number % ACTION_BATCHES])

    Attributes:
        count: how many were counted, at least one.
        seconds: how long these took.
    """

    count: int
    seconds: float

    def __init__(self, task: Task) -> None:
        self._budgets = task.warm_up_s, task.seconds

    def __iter__(self) -> Iterator[int]:
        for budget in self._budgets:
            count = 0
            began = time.perf_counter()
            end = began + budget
            while (now := time.perf_counter()) < end or not count:
                yield count
                count += 1
        self.count, self.seconds = count, now - began

    def measured(self, task: Task, start_s: float, steps: int = 1) -> Measured:
        """What they say of a contender, which has started within `start_s`, and makes so many steps a pass."""
        steps *= self.count
        return Measured(steps, self.seconds, steps * task.num_envs, start_s)


def clock_blocking(task: Task, make: Callable[[], Any], begin: Callable[[Any], Callable[[Any], Any]]) -> Measured:
    """Start a contender, warm it up, count how many batches it steps, and close it.

    Args:
        make: makes the envs.
        begin: resets them, and returns the function that steps them.
    """
    actions = task.actions()
    began = time.perf_counter()
    with contextlib.closing(make()) as envs:
        step = begin(envs)
        start_s = time.perf_counter() - began
        for number in (passes := Passes(task)):
            step(actions[number % ACTION_BATCHES])
    return passes.measured(task, start_s)


async def clock_async(task: Task, start: Callable[[], Awaitable[Callable[[Any], Awaitable[Any]]]]) -> Measured:
    """The same for a contender that is awaited, and closed by the caller.

    Args:
        start: makes and resets the envs, and returns the function that steps them.
    """
    actions = task.actions()
    began = time.perf_counter()
    step = await start()
    start_s = time.perf_counter() - began
    for number in (passes := Passes(task)):
        await step(actions[number % ACTION_BATCHES])
    return passes.measured(task, start_s)
