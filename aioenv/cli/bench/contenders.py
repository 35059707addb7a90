"""The vector envs that are compared, and what they are measured by."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from aioenv.cli.bench import bare, others, ours, raw
from aioenv.cli.bench.common import NotApplicable, refuse_many_processes, stepped
from aioenv.cli.bench.tasks import Measured, Task

__all__ = ["CONTENDERS", "Contender", "NotApplicable"]


@dataclass(frozen=True)
class Contender:
    """One vector env.

    Attributes:
        label: what to call it.
        package: the module that it takes.
        measure: steps it in this process.
        aside: whether it is compared only where it is named: it does more than the others.
    """

    label: str
    package: str
    measure: Callable[[Task], Measured]
    aside: bool = False

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


CONTENDERS: dict[str, Contender] = {
    "aioenv": Contender("aioenv (uvloop)", "uvloop", ours.as_told),
    "aioenv-asyncio": Contender("aioenv (asyncio)", "aioenv", ours.aioenv_asyncio),
    "aioenv-one": Contender("aioenv (num_workers=1)", "uvloop", ours.aioenv_one),
    "aioenv-views": Contender("aioenv (copy=False)", "aioenv", ours.aioenv_views),
    "aioenv-groups": Contender("aioenv (groups=2)", "aioenv", ours.aioenv_groups),
    "aioenv-workers": Contender("aioenv (groups=2, split=workers)", "aioenv", ours.aioenv_workers),
    "aioenv-policy": Contender("with a policy", "aioenv", ours.aioenv_policy, aside=True),
    "aioenv-policy-groups": Contender("the same (groups=2)", "aioenv", ours.aioenv_policy_groups, aside=True),
    "aioenv-policy-workers": Contender("the same (split=workers)", "aioenv", ours.aioenv_policy_workers, aside=True),
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
    "raw-batch-still": Contender("mujoco.batch, its clock stopped", "mujoco", raw.raw_batch_still),
    "raw-loop-still": Contender("MjData loop, its clock stopped", "mujoco", raw.raw_loop_still),
    "bare": Contender("bare loop, one env", "gymnasium", bare.bare_loop),
    "bare-all": Contender("bare loops, one a CPU", "gymnasium", bare.bare_loops),
    "bare-lockstep": Contender("bare loops in lock-step", "gymnasium", bare.bare_lockstep),
}
