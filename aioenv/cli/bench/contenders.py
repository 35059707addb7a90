"""The vector envs that are compared. Each is started and stepped as its own documentation shows, with defaults."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np

import aioenv
from aioenv.cli.bench.tasks import SYNTHETIC, Measured, Task, clock_async, clock_blocking

__all__ = ["CONTENDERS", "Contender", "NotApplicable"]


class NotApplicable(Exception):
    """This contender does not have this env; the message says so."""


@dataclass(frozen=True)
class Contender:
    """One vector env.

    Attributes:
        label: what to call it.
        package: the module that it takes.
        measure: steps it in this process.
    """

    label: str
    package: str
    measure: Callable[[Task], Measured]

    @property
    def installed(self) -> bool:
        """Whether its package is there."""
        return importlib.util.find_spec(self.package) is not None


@contextlib.contextmanager
def closing(opened: list[Any]) -> Iterator[None]:
    """Close what was opened, if anything was."""
    try:
        yield
    finally:
        for envs in opened:
            envs.close()


async def _aioenv(task: Task) -> Measured:
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> Any:
            envs = await stack.enter_async_context(
                aioenv.AsyncVectorEnv([task.make_env] * task.num_envs, **task.options)
            )
            await envs.reset(seed=0)
            return envs.step

        return await clock_async(task, start)


def aioenv_default(task: Task) -> Measured:
    """The async API on the loop that `aioenv.run` picks: uvloop."""
    return aioenv.run(_aioenv(task))


def aioenv_asyncio(task: Task) -> Measured:
    """The async API on asyncio's own loop."""
    return asyncio.run(_aioenv(task))


def _gymnasium_like(task: Task, make: Callable[[list[Any]], Any]) -> Measured:
    opened: list[Any] = []

    def start() -> Callable[[Any], Any]:
        envs = make([task.make_env] * task.num_envs)
        opened.append(envs)
        envs.reset(seed=0)
        step: Callable[[Any], Any] = envs.step
        return step

    with closing(opened):
        return clock_blocking(task, start)


def aioenv_sync(task: Task) -> Measured:
    """The blocking API."""
    return _gymnasium_like(task, partial(aioenv.sync.VectorEnv, **task.options))


def gymnasium_async(task: Task) -> Measured:
    """Gymnasium's, one process an env."""
    from gymnasium.vector import AsyncVectorEnv

    return _gymnasium_like(task, AsyncVectorEnv)


def gymnasium_sync(task: Task) -> Measured:
    """Gymnasium's, all envs in this process."""
    from gymnasium.vector import SyncVectorEnv

    return _gymnasium_like(task, SyncVectorEnv)


def bare_loop(task: Task) -> Measured:
    """One env, stepped without any vector env, reset when its episode is over."""
    opened: list[Any] = []

    def start() -> Callable[[Any], Any]:
        env = task.make_env()
        opened.append(env)
        env.reset(seed=0)

        def step(actions: Any) -> None:
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

        return step

    with closing(opened):
        return clock_blocking(task, start)


def _sb3(task: Task, make: Callable[[list[Any]], Any]) -> Measured:
    opened: list[Any] = []

    def start() -> Callable[[Any], Any]:
        envs = make([task.make_env] * task.num_envs)
        opened.append(envs)
        envs.seed(0)
        envs.reset()
        step: Callable[[Any], Any] = envs.step
        return step

    with closing(opened):
        return clock_blocking(task, start)


def sb3_subproc(task: Task) -> Measured:
    """Stable-Baselines3's, one process an env.

    Forked, which is not its default: with that, every process imports torch, which takes minutes for 64 envs on two
    CPUs. It makes no difference to how fast they step.
    """
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return _sb3(task, lambda env_fns: SubprocVecEnv(env_fns, start_method="fork"))


def sb3_dummy(task: Task) -> Measured:
    """Stable-Baselines3's, all envs in this process."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    return _sb3(task, DummyVecEnv)


def tianshou_subproc(task: Task) -> Measured:
    """Tianshou's, one process an env. It leaves resets to the caller."""
    from tianshou.env import SubprocVectorEnv

    opened: list[Any] = []

    def start() -> Callable[[Any], Any]:
        envs = SubprocVectorEnv([task.make_env] * task.num_envs)
        opened.append(envs)
        envs.seed(0)
        envs.reset()

        def step(actions: Any) -> None:
            _, _, terminated, truncated, _ = envs.step(actions)
            over = np.flatnonzero(terminated | truncated)
            if len(over):
                envs.reset(over)

        return step

    with closing(opened):
        return clock_blocking(task, start)


def envpool(task: Task) -> Measured:
    """EnvPool's own C++ envs, on threads.

    Raises:
        NotApplicable: if it does not have this env.
    """
    import envpool as package

    if task.env in SYNTHETIC or task.env not in package.list_all_envs():
        raise NotApplicable(f"has no {task.env}")
    opened: list[Any] = []

    def start() -> Callable[[Any], Any]:
        envs = package.make(task.env, env_type="gymnasium", num_envs=task.num_envs, seed=0)
        opened.append(envs)
        envs.reset()
        step: Callable[[Any], Any] = envs.step
        return step

    with closing(opened):
        return clock_blocking(task, start)


def aioenv_native(task: Task) -> Measured:
    """The async API over the env's own vectorized version, on uvloop.

    Raises:
        NotApplicable: if it has none.
    """
    spec = None if task.env in SYNTHETIC else gymnasium.spec(task.env)
    if spec is None or spec.vector_entry_point is None:
        raise NotApplicable(f"nobody has written {task.env} as one vector env")

    async def measure() -> Measured:
        async with aioenv.make_vec(task.env, task.num_envs, backend="native") as envs:

            async def start() -> Any:
                await envs.reset(seed=0)
                return envs.step

            return await clock_async(task, start)

    return aioenv.run(measure())


CONTENDERS: dict[str, Contender] = {
    "aioenv": Contender("aioenv (uvloop)", "uvloop", aioenv_default),
    "aioenv-asyncio": Contender("aioenv (asyncio)", "aioenv", aioenv_asyncio),
    "aioenv-sync": Contender("aioenv.sync", "aioenv", aioenv_sync),
    "gymnasium-async": Contender("gymnasium AsyncVectorEnv", "gymnasium", gymnasium_async),
    "gymnasium-sync": Contender("gymnasium SyncVectorEnv", "gymnasium", gymnasium_sync),
    "sb3-subproc": Contender("SB3 SubprocVecEnv", "stable_baselines3", sb3_subproc),
    "sb3-dummy": Contender("SB3 DummyVecEnv", "stable_baselines3", sb3_dummy),
    "tianshou-subproc": Contender("Tianshou SubprocVectorEnv", "tianshou", tianshou_subproc),
    "envpool": Contender("EnvPool", "envpool", envpool),
    "bare": Contender("bare loop, one env", "gymnasium", bare_loop),
    "aioenv-native": Contender("aioenv native (uvloop)", "uvloop", aioenv_native),
}
