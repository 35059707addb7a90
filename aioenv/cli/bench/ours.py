"""aioenv's own contenders: the same vector env, used in several ways."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

import aioenv
from aioenv.cli.bench.common import NotApplicable, stepped
from aioenv.cli.bench.policies import TwoLayers
from aioenv.cli.bench.tasks import ACTION_BATCHES, SYNTHETIC, Measured, Passes, Task, clock_async, part
from aioenv.cli.ending import CommandEnded
from aioenv.cli.options import import_here
from aioenv.platform import usable_cpus
from aioenv.requirements import has_batch
from aioenv.worker.making import is_native_task

__all__ = [
    "aioenv_asyncio",
    "aioenv_drop_in",
    "aioenv_groups",
    "aioenv_native",
    "aioenv_native_sync",
    "aioenv_one",
    "aioenv_policy",
    "aioenv_policy_groups",
    "aioenv_policy_workers",
    "aioenv_sync",
    "aioenv_views",
    "aioenv_workers",
    "as_told",
    "has_groups",
    "has_native",
    "natively",
    "registered",
]

# Between two looks at the clock, if there is time for them; the groups run dry at the end of each rollout.
ROLLOUT_STEPS = 64


def as_told(task: Task) -> Measured:
    """The async API on the loop, with the groups and the arguments that the task says."""
    work = _rollouts(task) if task.groups > 1 else _steps(task)
    return asyncio.run(work) if task.loop == "asyncio" else aioenv.run(work)


def _make(task: Task) -> Any:
    if "backend" in task.keywords:
        return aioenv.make_vec(task.env, task.num_envs, **task.options)
    return aioenv.AsyncVectorEnv([task.make_env] * task.num_envs, **task.options)


async def _steps(task: Task) -> Measured:
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> Any:
            envs = await stack.enter_async_context(_make(task))
            obs, _ = await envs.reset(seed=0)
            if not task.policy:
                return envs.step
            choose = TwoLayers(envs.single_observation_space, envs.single_action_space)

            async def step(_: Any) -> None:
                nonlocal obs
                obs, *_ = await envs.step(choose(obs))

            return step

        return await clock_async(task, start)


async def _rollouts(task: Task) -> Measured:
    actions = task.actions()
    count = 0

    def in_turn(obs: Any, slots: Any) -> Any:
        nonlocal count
        count += 1
        return part(actions[count % ACTION_BATCHES], slots, envs.single_action_space)

    began = time.perf_counter()
    async with _make(task) as envs:
        await envs.reset(seed=0)
        policy = in_turn
        if task.policy:
            choose = TwoLayers(envs.single_observation_space, envs.single_action_space)
            policy = lambda obs, slots: choose(obs)  # noqa: E731
        start_s = time.perf_counter() - began
        roll_out = partial(envs.rollout, policy, groups=task.groups, split=task.split)
        steps = await _steps_that_fit(roll_out, task.seconds)
        for _ in (passes := Passes(task)):
            await roll_out(steps)
    return passes.measured(task, start_s, steps)


async def _steps_that_fit(roll_out: Callable[[int], Awaitable[Any]], seconds: float) -> int:
    """So many steps for a rollout, at least one, as there is time for: with slow envs 64 would take minutes."""
    for _ in range(2):  # the first is slower than those that follow
        began = time.perf_counter()
        await roll_out(1)
        fit = seconds / (time.perf_counter() - began)
        if fit >= ROLLOUT_STEPS:
            return ROLLOUT_STEPS
    return max(1, int(fit))


def aioenv_asyncio(task: Task) -> Measured:
    """The async API on asyncio's own loop."""
    return as_told(replace(task, loop="asyncio"))


def aioenv_one(task: Task) -> Measured:
    """The async API over one worker: where a step is shorter than it takes to wake two processes."""
    return as_told(replace(task, keywords={**task.keywords, "num_workers": 1}))


def aioenv_views(task: Task) -> Measured:
    """The async API whose results are views into two batches, used in turn."""
    return as_told(replace(task, keywords={**task.keywords, "copy": False}))


def aioenv_groups(task: Task) -> Measured:
    """The async API with two groups of slots, one of which steps while the other's actions are chosen.

    Raises:
        NotApplicable: if there is nothing to split.
    """
    if not has_groups():
        raise NotApplicable("has no rollout")
    if task.num_envs < 2:
        raise NotApplicable("takes two envs")
    return as_told(replace(task, groups=2))


def aioenv_workers(task: Task) -> Measured:
    """The async API with two groups of whole workers, one of which steps while the other's actions are chosen.

    Raises:
        NotApplicable: if there is nothing to split.
    """
    if usable_cpus() == 1:
        raise NotApplicable("takes two workers")
    return aioenv_groups(replace(task, split="workers"))


def aioenv_policy(task: Task) -> Measured:
    """The async API with a policy that takes time, between one step and the next."""
    return as_told(replace(task, policy=True))


def aioenv_policy_groups(task: Task) -> Measured:
    """The same with two groups of slots (see `aioenv_groups`)."""
    return aioenv_groups(replace(task, policy=True))


def aioenv_policy_workers(task: Task) -> Measured:
    """The same with two groups of whole workers (see `aioenv_workers`)."""
    return aioenv_workers(replace(task, policy=True))


def aioenv_native(task: Task) -> Measured:
    """The async API over one vector env: ours, or the one that the env's authors registered.

    Raises:
        NotApplicable: if there is none.
    """
    return as_told(natively(task))


def aioenv_native_sync(task: Task) -> Measured:
    """The blocking API over such a vector env.

    Raises:
        NotApplicable: if there is none.
    """
    options = natively(task).options
    return stepped(task, lambda make_envs: aioenv.sync.make_vec(task.env, len(make_envs), **options))


def natively(task: Task) -> Task:
    """The same, of one vector env in this process: nothing is said of workers.

    Raises:
        NotApplicable: if there is none.
    """
    if not has_native(task.env):
        if not has_batch() and task.env not in SYNTHETIC and is_native_task(registered(task.env)):
            raise NotApplicable("it needs mujoco >= 3.17 (mujoco.batch)")
        raise NotApplicable(f"nobody has written {task.env} as one vector env")
    return replace(task, start=None, channel="auto", keywords={**task.keywords, "backend": "native"})


def aioenv_sync(task: Task) -> Measured:
    """The blocking API."""
    return stepped(task, partial(aioenv.sync.VectorEnv, **task.options))


def aioenv_drop_in(task: Task) -> Measured:
    """What old code gets that imports Gymnasium's `AsyncVectorEnv` from here."""
    return stepped(task, partial(aioenv.sync.AsyncVectorEnv, num_workers=task.options.get("num_workers")))


def has_groups() -> bool:
    """Whether slots can be stepped in groups."""
    return hasattr(aioenv.AsyncVectorEnv, "rollout")


def has_native(env: str) -> bool:
    """Whether `make_vec` can step a vectorised version of this env, and there is one."""
    if env in SYNTHETIC or "backend" not in inspect.signature(aioenv.make_vec).parameters:
        return False
    spec = registered(env)
    return spec.vector_entry_point is not None or (is_native_task(spec) and has_batch())


def registered(env: str) -> EnvSpec:
    """What is registered under an id, or under `module:id` once that module is imported.

    Raises:
        gymnasium.error.Error: if nothing is.
        ImportError: if there is no such module, or it raises when it is imported.
    """
    module, colon, name = env.rpartition(":")
    if colon:
        try:
            import_here(module)
        except (ImportError, CommandEnded):
            raise
        except (Exception, SystemExit) as exc:
            raise ImportError(f"importing {module}: {type(exc).__name__}: {exc}") from exc
    return gymnasium.spec(name)
