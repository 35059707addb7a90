"""The vector envs that are compared, and the bare loops that they are measured by."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioenv.cli.bench import others, ours, raw
from aioenv.cli.bench.common import NotApplicable, refuse_many_processes, stepped
from aioenv.cli.bench.tasks import Measured, Task, clock_blocking
from aioenv.machine import usable_cpus

__all__ = ["CONTENDERS", "Contender", "NotApplicable"]

BARRIER_S = 60.0  # until all loops must be ready to begin


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


def gymnasium_async(task: Task) -> Measured:
    """Gymnasium's, one process an env."""
    from gymnasium.vector import AsyncVectorEnv

    refuse_many_processes(task)
    return stepped(task, AsyncVectorEnv)


def gymnasium_sync(task: Task) -> Measured:
    """Gymnasium's, all envs in this process."""
    from gymnasium.vector import SyncVectorEnv

    return stepped(task, SyncVectorEnv)


def bare_loop(task: Task) -> Measured:
    """One env, stepped without any vector env, reset when its episode is over."""
    return _bare(task, lambda: None)


def _bare(task: Task, ready: Callable[[], Any]) -> Measured:
    def begin(env: Any) -> Callable[[Any], Any]:
        env.reset(seed=0)
        ready()

        def step(actions: Any) -> None:
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

        return step

    return clock_blocking(task, task.make_env, begin)


def bare_loops(task: Task) -> Measured:
    """A bare loop for each usable CPU, all at once: what the machine gives when CPUs share a core, or a clock."""
    cpus = usable_cpus()
    barrier = multiprocessing.Barrier(cpus)
    running = []
    for _ in range(cpus):
        reading, writing = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_one_of_the_loops, args=(task, barrier, writing))
        process.start()
        writing.close()  # so that the end of the process ends the wait for its result
        running.append((process, reading))
    results: list[Measured] = []
    for process, pipe in running:
        results.append(pipe.recv())
        process.join()
    seconds = max(result.seconds for result in results)
    rate = sum(result.env_steps / result.seconds for result in results)
    return Measured(
        steps=sum(result.steps for result in results),
        seconds=seconds,
        env_steps=round(rate * seconds),
        start_s=max(result.start_s for result in results),
    )


def _one_of_the_loops(task: Task, barrier: Any, pipe: Any) -> None:
    pipe.send(_bare(task, lambda: barrier.wait(BARRIER_S)))


CONTENDERS: dict[str, Contender] = {
    "aioenv": Contender("aioenv (uvloop)", "uvloop", ours.as_told),
    "aioenv-asyncio": Contender("aioenv (asyncio)", "aioenv", ours.aioenv_asyncio),
    "aioenv-one": Contender("aioenv (num_workers=1)", "uvloop", ours.aioenv_one),
    "aioenv-views": Contender("aioenv (copy=False)", "aioenv", ours.aioenv_views),
    "aioenv-groups": Contender("aioenv (groups=2)", "aioenv", ours.aioenv_groups),
    "aioenv-native": Contender("aioenv (backend=native)", "aioenv", ours.aioenv_native),
    "aioenv-native-sync": Contender("aioenv.sync (backend=native)", "aioenv", ours.aioenv_native_sync),
    "aioenv-sync": Contender("aioenv.sync", "aioenv", ours.aioenv_sync),
    "aioenv-drop-in": Contender("aioenv.sync.AsyncVectorEnv", "aioenv", ours.aioenv_drop_in),
    "aioenv-sb3": Contender("aioenv.adapters.sb3", "stable_baselines3", others.sb3_aioenv),
    "gymnasium-async": Contender("gymnasium AsyncVectorEnv", "gymnasium", gymnasium_async),
    "gymnasium-sync": Contender("gymnasium SyncVectorEnv", "gymnasium", gymnasium_sync),
    "sb3-subproc": Contender("SB3 SubprocVecEnv", "stable_baselines3", others.sb3_subproc),
    "sb3-dummy": Contender("SB3 DummyVecEnv", "stable_baselines3", others.sb3_dummy),
    "tianshou-subproc": Contender("Tianshou SubprocVectorEnv", "tianshou", others.tianshou_subproc),
    "torchrl-parallel": Contender("TorchRL ParallelEnv", "torchrl", others.torchrl_parallel),
    "pufferlib": Contender("PufferLib Multiprocessing", "pufferlib", others.pufferlib),
    "envpool": Contender("EnvPool", "envpool", others.envpool),
    "raw-batch": Contender("mujoco.batch, physics alone", "mujoco", raw.raw_batch),
    "raw-loop": Contender("MjData loop, physics alone", "mujoco", raw.raw_loop),
    "bare": Contender("bare loop, one env", "gymnasium", bare_loop),
    "bare-all": Contender("bare loops, one a CPU", "gymnasium", bare_loops),
}
