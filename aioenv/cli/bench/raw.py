"""The physics of MuJoCo tasks alone: what stepping a batch of them could cost at least."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from aioenv.cli.bench.common import NotApplicable
from aioenv.cli.bench.tasks import SYNTHETIC, Measured, Task, clock_blocking

__all__ = ["raw_batch", "raw_batch_still", "raw_loop", "raw_loop_still"]

# States of a run with natural ends of episodes: so many, so many steps apart.
_SNAPSHOTS, _APART = 16, 8


def raw_batch(task: Task) -> Measured:
    """`mujoco.batch`, without what some tasks need after a step."""
    return _raw(task, post_constraint=False)


def raw_batch_still(task: Task) -> Measured:
    """The same with MuJoCo's clock stopped, as native tasks have it."""
    return _raw(task, post_constraint=False, still=True)


def raw_loop(task: Task) -> Measured:
    """A loop over `MjData` on threads, with `mj_rnePostConstraint` after each step, as Gymnasium's envs call it."""
    return _raw(task, post_constraint=True)


def raw_loop_still(task: Task) -> Measured:
    """The same with MuJoCo's clock stopped, as native tasks have it."""
    return _raw(task, post_constraint=True, still=True)


def _raw(task: Task, *, post_constraint: bool, still: bool = False) -> Measured:
    """Step simulations that nobody observes, from states of a real run, which are loaded anew every few steps.

    Raises:
        NotApplicable: if it is none of Gymnasium's MuJoCo tasks.
    """
    import mujoco

    from aioenv.mujoco_clock import stop_clock
    from aioenv.requirements import has_batch
    from aioenv.worker.making import is_native_task, make_registered

    if task.env in SYNTHETIC or not is_native_task(task.env):
        raise NotApplicable(f"{task.env} is no MuJoCo task")
    if not has_batch():
        raise NotApplicable("it needs mujoco >= 3.17 (mujoco.batch)")
    from aioenv.native.sim_pool import SimPool

    env: Any = make_registered(task.env, {}, num_envs=task.num_envs)

    def begin(pool: SimPool) -> Callable[[Any], Any]:
        env.reset(seed=0)
        actions = task.actions()
        snapshots = []
        for i in range(_SNAPSHOTS * _APART):
            if i % _APART == 0:
                snapshots.append(env.physics_states())
            env.step(actions[i % len(actions)])
        ctrl, nstep = pool.bind("ctrl"), env.frame_skip
        slots = np.arange(task.num_envs)
        count = itertools.count()
        if not still:  # as it comes, which the pool has changed
            mujoco.set_mjcb_time(None)
        elif not stop_clock():
            raise NotApplicable("MuJoCo's clock can't be stopped here")

        def step(batch: Any) -> None:
            number = next(count)
            if number % _APART == 0:
                pool.set_states(snapshots[number // _APART % _SNAPSHOTS], slots)
            ctrl[...] = batch
            pool.advance(nstep)

        return step

    with contextlib.closing(env):
        make = partial(SimPool, env.model, task.num_envs, post_constraint=post_constraint)
        return clock_blocking(task, make, begin)
