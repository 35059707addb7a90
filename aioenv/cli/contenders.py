"""The vector envs that `aioenv bench` compares: aioenv in several ways, and other libraries' with their defaults.

Each is started and stepped as its own documentation shows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate

import aioenv
from aioenv import sync
from aioenv.cli.env_ids import SYNTHETIC, native_problem
from aioenv.cli.rounds import (
    ACTION_BATCHES,
    NotApplicable,
    Throughput,
    TimedLoop,
    Workload,
    measure_blocking,
    rows_of_batch,
)
from aioenv.platform import usable_cpus

__all__ = ["CONTENDERS", "MAX_PROCESSES", "Contender", "natively", "step_aioenv", "step_bare"]

# Steps between two looks at the clock, if there is time for them; the groups run dry at the end of each rollout.
ROLLOUT_STEPS = 64
# More processes say nothing new about a vector env that takes a process for each env.
MAX_PROCESSES = 64

Wrap = Callable[[Any], Any]


@dataclass(frozen=True)
class Contender:
    """Something that steps envs.

    Attributes:
        label: its name in tables.
        package: the module that it needs.
        step: steps it in this process.
        process_per_env: whether it takes a process for each env.
    """

    label: str
    package: str
    step: Callable[[Workload], Throughput]
    process_per_env: bool = False

    @property
    def installed(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.package) is not None

    def measure(self, workload: Workload) -> dict[str, Any]:
        """Step it in this process; returns the fields of its `Throughput`.

        Raises:
            NotApplicable: if it does not have this env, or would take too many processes.
        """
        if self.process_per_env and workload.num_envs > MAX_PROCESSES:
            raise NotApplicable(f"a process an env: not measured with more than {MAX_PROCESSES}")
        return dataclasses.asdict(self.step(workload))


# ---------------------------------------------------------------- aioenv


def step_aioenv(
    workload: Workload, *, wrap: Wrap = lambda envs: envs, keywords: dict[str, Any] | None = None, **changes: Any
) -> Throughput:
    """Measure the async API, step after step or in rollouts of several groups.

    Args:
        workload: what to step, and how.
        wrap: wraps the vector env for stepping.
        keywords: more arguments of the vector env.
        changes: other values of the workload's attributes.

    Raises:
        NotApplicable: if there is nothing to split into groups.
    """
    workload = replace(workload, keywords={**workload.keywords, **(keywords or {})}, **changes)
    if workload.groups > 1 and workload.num_envs < 2:
        raise NotApplicable("takes two envs")
    if workload.split == "workers" and usable_cpus() == 1:
        raise NotApplicable("takes two workers")
    work = (_roll_out if workload.groups > 1 else _step)(workload, wrap)
    return asyncio.run(work) if workload.loop == "asyncio" else aioenv.run(work)


def _make(workload: Workload) -> Any:
    if "backend" in workload.keywords:
        return aioenv.make_vec(workload.env, workload.num_envs, **workload.options)
    return aioenv.AsyncVectorEnv(workload.factories, **workload.options)


async def _step(workload: Workload, wrap: Wrap) -> Throughput:
    actions = workload.actions()
    began = time.perf_counter()
    async with _make(workload) as envs:
        wrapped = wrap(envs)
        await wrapped.reset(seed=0)
        start_s = time.perf_counter() - began
        for number in (loop := TimedLoop(workload)):
            await wrapped.step(actions[number % ACTION_BATCHES])
    return loop.throughput(start_s)


async def _roll_out(workload: Workload, wrap: Wrap) -> Throughput:
    actions = itertools.cycle(workload.actions())
    began = time.perf_counter()
    async with _make(workload) as envs:
        await envs.reset(seed=0)

        def in_turn(obs: Any, slots: Any) -> Any:
            return rows_of_batch(next(actions), slots, envs.single_action_space)

        start_s = time.perf_counter() - began
        roll_out = partial(wrap(envs).rollout, in_turn, groups=workload.groups, split=workload.split)
        steps = await _steps_that_fit(roll_out, workload.seconds)
        for _ in (loop := TimedLoop(workload)):
            await roll_out(steps)
    return loop.throughput(start_s, steps)


async def _steps_that_fit(roll_out: Callable[[int], Awaitable[Any]], seconds: float) -> int:
    """Return how many steps of a rollout there is time for, at least one: with slow envs 64 would take minutes."""
    for _ in range(2):  # the first is slower than those that follow
        began = time.perf_counter()
        await roll_out(1)
        fit = seconds / (time.perf_counter() - began)
        if fit >= ROLLOUT_STEPS:
            return ROLLOUT_STEPS
    return max(1, int(fit))


def natively(workload: Workload) -> Workload:
    """Return the same workload for the env's vectorised version in this process, where nothing is said of workers.

    Raises:
        NotApplicable: if there is none.
    """
    if problem := native_problem(workload.env):
        raise NotApplicable(problem)
    return replace(workload, start=None, channel="auto", keywords={**workload.keywords, "backend": "native"})


def _blocking(make: Callable[[Workload], Any]) -> Callable[[Workload], Throughput]:
    """Return a function that measures the blocking vector env which `make` makes of a workload."""
    return lambda workload: measure_blocking(workload, lambda: make(workload))


# ---------------------------------------------------------------- other libraries


def _reset_sb3(envs: Any) -> Any:
    envs.seed(0)
    envs.reset()
    return envs.step


def _sb3(name: str, workload: Workload, **options: Any) -> Throughput:
    """Measure one of Stable-Baselines3's vector envs.

    `SubprocVecEnv` is forked, which is not its default: with that every process imports torch, which takes minutes for
    64 envs on two CPUs. The speed of steps is the same.
    """
    from stable_baselines3.common import vec_env

    return measure_blocking(workload, partial(getattr(vec_env, name), workload.factories, **options), _reset_sb3)


def _sb3_aioenv(workload: Workload) -> Throughput:
    """Measure aioenv as Stable-Baselines3 steps it, with the infos that it wants."""
    from aioenv.adapters.sb3 import VecEnv

    return measure_blocking(workload, lambda: VecEnv(workload.factories, **workload.options), _reset_sb3)


def _tianshou(workload: Workload) -> Throughput:
    from tianshou.env import SubprocVectorEnv

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.seed(0)
        envs.reset()

        def step(actions: Any) -> None:
            _, _, terminated, truncated, _ = envs.step(actions)
            ended = np.flatnonzero(terminated | truncated)
            if len(ended):  # it leaves resets to the caller
                envs.reset(ended)

        return step

    return measure_blocking(workload, lambda: SubprocVectorEnv(workload.factories), begin)


def _torchrl(workload: Workload) -> Throughput:
    """Measure it forked, for the same reason as SB3's."""
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv

    def create() -> Any:
        return GymWrapper(workload.make_env(), categorical_action_encoding=True)

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.set_seed(0)
        data = envs.reset()

        def step(actions: Any) -> None:
            nonlocal data
            _, data = envs.step_and_maybe_reset(data.set("action", torch.from_numpy(actions)))

        return step

    return measure_blocking(workload, lambda: ParallelEnv(workload.num_envs, create, mp_start_method="fork"), begin)


def _pufferlib(workload: Workload) -> Throughput:
    """Measure it with as many processes as CPUs, as far as their number divides that of the envs."""
    from pufferlib import vector
    from pufferlib.emulation import GymnasiumPufferEnv

    make = partial(
        vector.make,
        partial(GymnasiumPufferEnv, env_creator=workload.make_env),
        num_envs=workload.num_envs,
        backend=vector.Multiprocessing,
        num_workers=max(n for n in range(1, usable_cpus() + 1) if workload.num_envs % n == 0),
        overwork=True,  # it counts cores, and we CPUs
    )
    return measure_blocking(workload, make)


def _envpool(workload: Workload) -> Throughput:
    """Measure its own C++ envs, on threads."""
    import envpool

    if workload.env in SYNTHETIC or workload.env not in envpool.list_all_envs():
        raise NotApplicable(f"has no {workload.env}")

    def begin(envs: Any) -> Any:
        envs.reset()
        return envs.step

    make = partial(envpool.make, workload.env, env_type="gymnasium", num_envs=workload.num_envs, seed=0)
    return measure_blocking(workload, make, begin)


def step_bare(workload: Workload, ready: Callable[[], Any] = lambda: None) -> Throughput:
    """Measure one env, stepped without any vector env, reset when its episode ends.

    Args:
        workload: what to step; each batch of actions is taken one by one.
        ready: called once the env is reset.
    """

    def begin(env: Any) -> Callable[[Any], Any]:
        env.reset(seed=0)
        space = batch_space(env.action_space, workload.num_envs)
        ready()

        def step(actions: Any) -> None:
            for action in actions if isinstance(actions, np.ndarray) else iterate(space, actions):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

        return step

    return measure_blocking(workload, workload.make_env, begin)


CONTENDERS: dict[str, Contender] = {
    "aioenv": Contender("aioenv (uvloop)", "uvloop", step_aioenv),
    "aioenv-asyncio": Contender("aioenv (asyncio)", "aioenv", partial(step_aioenv, loop="asyncio")),
    # faster where a step is shorter than it takes to wake two processes
    "aioenv-one": Contender("aioenv (num_workers=1)", "uvloop", partial(step_aioenv, keywords={"num_workers": 1})),
    "aioenv-views": Contender("aioenv (copy=False)", "aioenv", partial(step_aioenv, keywords={"copy": False})),
    "aioenv-groups": Contender("aioenv (groups=2)", "aioenv", partial(step_aioenv, groups=2)),
    "aioenv-workers": Contender(
        "aioenv (groups=2, split=workers)", "aioenv", partial(step_aioenv, groups=2, split="workers")
    ),
    "aioenv-native": Contender("aioenv (backend=native)", "aioenv", lambda load: step_aioenv(natively(load))),
    "aioenv-native-sync": Contender(
        "aioenv.sync (backend=native)",
        "aioenv",
        _blocking(lambda load: sync.make_vec(load.env, load.num_envs, **natively(load).options)),
    ),
    "aioenv-sync": Contender(
        "aioenv.sync", "aioenv", _blocking(lambda load: sync.VectorEnv(load.factories, **load.options))
    ),
    # the drop-in: Gymnasium's AsyncVectorEnv, imported from here
    "aioenv-drop-in": Contender(
        "aioenv.sync.AsyncVectorEnv",
        "aioenv",
        _blocking(lambda load: sync.AsyncVectorEnv(load.factories, num_workers=load.keywords.get("num_workers"))),
    ),
    "aioenv-sb3": Contender("aioenv.adapters.sb3", "stable_baselines3", _sb3_aioenv),
    "gymnasium-async": Contender(
        "gymnasium AsyncVectorEnv",
        "gymnasium",
        _blocking(lambda load: AsyncVectorEnv(load.factories)),
        process_per_env=True,
    ),
    "gymnasium-sync": Contender(
        "gymnasium SyncVectorEnv", "gymnasium", _blocking(lambda load: SyncVectorEnv(load.factories))
    ),
    "sb3-subproc": Contender(
        "SB3 SubprocVecEnv",
        "stable_baselines3",
        partial(_sb3, "SubprocVecEnv", start_method="fork"),
        process_per_env=True,
    ),
    "sb3-dummy": Contender("SB3 DummyVecEnv", "stable_baselines3", partial(_sb3, "DummyVecEnv")),
    "tianshou-subproc": Contender("Tianshou SubprocVectorEnv", "tianshou", _tianshou, process_per_env=True),
    "torchrl-parallel": Contender("TorchRL ParallelEnv", "torchrl", _torchrl, process_per_env=True),
    "pufferlib": Contender("PufferLib Multiprocessing", "pufferlib", _pufferlib),
    "envpool": Contender("EnvPool", "envpool", _envpool),
    "bare": Contender("bare loop, one env", "gymnasium", step_bare),
}
