"""Vector envs of other libraries. Each is started and stepped as its own documentation shows, with defaults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from aioenv.cli.bench.common import NotApplicable, refuse_many_processes
from aioenv.cli.bench.tasks import SYNTHETIC, Measured, Task, clock_blocking
from aioenv.platform import usable_cpus

__all__ = ["envpool", "pufferlib", "sb3_aioenv", "sb3_dummy", "sb3_subproc", "tianshou_subproc", "torchrl_parallel"]


def _sb3(task: Task, make: Callable[[list[Any]], Any]) -> Measured:
    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.seed(0)
        envs.reset()
        step: Callable[[Any], Any] = envs.step
        return step

    return clock_blocking(task, partial(make, [task.make_env] * task.num_envs), begin)


def sb3_subproc(task: Task) -> Measured:
    """Stable-Baselines3's, one process an env.

    Forked, which is not its default: with that, every process imports torch, which takes minutes for 64 envs on two
    CPUs. It makes no difference to how fast they step.
    """
    from stable_baselines3.common.vec_env import SubprocVecEnv

    refuse_many_processes(task)
    return _sb3(task, lambda env_fns: SubprocVecEnv(env_fns, start_method="fork"))


def sb3_dummy(task: Task) -> Measured:
    """Stable-Baselines3's, all envs in this process."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    return _sb3(task, DummyVecEnv)


def sb3_aioenv(task: Task) -> Measured:
    """Ours, as Stable-Baselines3 steps it and with the infos that it wants."""
    from aioenv.adapters.sb3 import VecEnv

    return _sb3(task, lambda env_fns: VecEnv(env_fns, **task.options))


def tianshou_subproc(task: Task) -> Measured:
    """Tianshou's, one process an env. It leaves resets to the caller."""
    from tianshou.env import SubprocVectorEnv

    refuse_many_processes(task)

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.seed(0)
        envs.reset()

        def step(actions: Any) -> None:
            _, _, terminated, truncated, _ = envs.step(actions)
            over = np.flatnonzero(terminated | truncated)
            if len(over):
                envs.reset(over)

        return step

    return clock_blocking(task, partial(SubprocVectorEnv, [task.make_env] * task.num_envs), begin)


def envpool(task: Task) -> Measured:
    """EnvPool's own C++ envs, on threads.

    Raises:
        NotApplicable: if it does not have this env.
    """
    import envpool as package

    if task.env in SYNTHETIC or task.env not in package.list_all_envs():
        raise NotApplicable(f"has no {task.env}")

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.reset()
        step: Callable[[Any], Any] = envs.step
        return step

    make = partial(package.make, task.env, env_type="gymnasium", num_envs=task.num_envs, seed=0)
    return clock_blocking(task, make, begin)


def torchrl_parallel(task: Task) -> Measured:
    """TorchRL's, one process an env; forked, as SB3's, and for the same reason."""
    import torch
    from torchrl.envs import GymWrapper, ParallelEnv

    refuse_many_processes(task)

    def create() -> Any:
        return GymWrapper(task.make_env(), categorical_action_encoding=True)

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.set_seed(0)
        data = envs.reset()

        def step(actions: Any) -> None:
            nonlocal data
            _, data = envs.step_and_maybe_reset(data.set("action", torch.from_numpy(actions)))

        return step

    return clock_blocking(task, partial(ParallelEnv, task.num_envs, create, mp_start_method="fork"), begin)


def pufferlib(task: Task) -> Measured:
    """PufferLib's, with Python envs in as many processes as CPUs, as far as their number divides that of the envs."""
    from pufferlib import vector
    from pufferlib.emulation import GymnasiumPufferEnv

    workers = max(n for n in range(1, usable_cpus() + 1) if task.num_envs % n == 0)

    def begin(envs: Any) -> Callable[[Any], Any]:
        envs.reset(seed=0)
        step: Callable[[Any], Any] = envs.step
        return step

    make = partial(
        vector.make,
        partial(GymnasiumPufferEnv, env_creator=task.make_env),
        num_envs=task.num_envs,
        backend=vector.Multiprocessing,
        num_workers=workers,
        overwork=True,  # it counts cores, and we CPUs
    )
    return clock_blocking(task, make, begin)
