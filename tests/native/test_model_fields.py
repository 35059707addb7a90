"""`model_field` over workers: one array that every process has, and the results of an env in this process."""

from __future__ import annotations

import copy
import os
import signal

import mujoco
import numpy as np
import pytest

import aioenv
from aioenv.native.sim_pool import SimPool
from aioenv.native.tasks.locomotion_2d import HalfCheetah, Swimmer

NUM_ENVS = 4
POLICY = aioenv.RestartPolicy(max_restarts=100, backoff_s=0.0, resume=True)


def make(env, **kwargs):
    return aioenv.make_vec(env, NUM_ENVS, backend="native", max_episode_steps=4, **kwargs)


async def drive(envs, victim=None, derived=True) -> list:
    """Everything that comes of changing models between steps; a worker dies before and after."""
    space = envs.single_action_space
    rng = np.random.default_rng(1)
    out = [await envs.reset(seed=5)]
    masses = envs.model_field("body_mass")
    assert masses.shape[0] == NUM_ENVS and masses.dtype == np.float64 and (masses == masses[0]).all()
    for t in range(9):
        if t == 1:
            masses[[0, 3]] *= 1.5  # live at once
        if t == 3:
            envs.model_field("opt.gravity")[2] = 0, 0, -3
            envs.model_field("opt.timestep")[1] *= 0.5
            assert envs.model_field("opt.iterations").dtype == np.int32
        if t == 5:
            masses[3] *= 2
        if t == 5 and derived:
            envs.model_field("dof_invweight0")
            await envs.call("set_const")  # which writes here
            out.append((envs.model_field("dof_invweight0").copy(),))
        if victim is not None and t in (2, 6):
            os.kill(envs.workers[victim].pid, signal.SIGKILL)
        out.append(await envs.step(rng.uniform(-1, 1, (NUM_ENVS, *space.shape)).astype(np.float32)))
    return [*out, (masses.copy(),)]


def equal(a, b) -> bool:
    arrays = (x for x in zip(a, b, strict=True) if isinstance(x[0], np.ndarray))
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in arrays)


@pytest.mark.asyncio
@pytest.mark.parametrize("task", ["Ant-v5", "Swimmer-v5"])  # of both designs
async def test_results_are_those_of_an_env_in_this_process(task):
    async with make(task) as envs:
        expected = await drive(envs)
    async with make(task, num_workers=2) as envs:
        got = await drive(envs)
        masses = envs.model_field("body_mass")
        assert envs.model_field("body_mass") is masses
    assert all(map(equal, got, expected)) and len(got) == len(expected)
    assert masses[3, 1] > masses[1, 1]  # the array outlives the vector env


@pytest.mark.asyncio
async def test_a_worker_that_is_started_again_has_them():
    async with make("Swimmer-v5") as envs:
        expected = await drive(envs, derived=False)
    async with make("Swimmer-v5", num_workers=2, restart=POLICY) as envs:
        pid = envs.workers[1].pid
        got = await drive(envs, victim=1, derived=False)
        assert pid != envs.workers[1].pid
    changed = [t for t, (a, b) in enumerate(zip(got, expected, strict=True)) if not equal(a, b)]
    assert changed == []


class Heavy(Swimmer):
    """Takes a field itself."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.model_field("body_mass")[:] *= 2

    def before_step(self):
        self.model_field("opt.viscosity")


@pytest.mark.asyncio
async def test_what_is_refused():
    async with make(Heavy, num_workers=2) as envs:
        with pytest.raises(ValueError, match=r"'body_mass' is no field .* or the env has taken it itself"):
            envs.model_field("body_mass")
        with pytest.raises(ValueError, match="no_such_field"):
            envs.model_field("no_such_field")
        await envs.reset(seed=1)
        actions = np.ones((NUM_ENVS, 2), np.float32)
        envs.send(actions)
        with pytest.raises(aioenv.PendingCallError, match="model_field"):
            envs.model_field("opt.gravity")
        await envs.recv(NUM_ENVS)
        envs.model_field("opt.viscosity")  # too late, as only the workers know
        with pytest.raises(aioenv.EnvError, match="taken by the env itself"):
            await envs.step(actions)
    async with aioenv.make_vec("CartPole-v1", 2, backend="native", num_workers=1) as envs:
        with pytest.raises(ValueError, match="no NativeMujocoEnv"):
            envs.model_field("body_mass")


def test_blocking():
    with aioenv.sync.make_vec("Reacher-v5", 2, backend="native", num_workers=2) as envs:
        envs.reset(seed=1)
        twice = np.zeros((2, 2), np.float32)
        twice[:] = 0.5
        before = envs.step(twice)[0]
        envs.reset(seed=1)
        envs.model_field("opt.gravity")[...] = 0, 9, 0
        envs.model_field("actuator_gear")[1] *= 3
        after = envs.step(twice)[0]
        assert not np.array_equal(before[1], after[1])


def test_a_pool_takes_its_fields_from_a_given_array():
    for post_constraint in (False, True):
        with SimPool(HalfCheetah(1).model, 2, post_constraint=post_constraint) as pool:
            fields = pool.unchanged_fields()
            mass = np.stack([fields["body_mass"]] * 2)
            with pytest.raises(ValueError, match=r"'body_mass' is float64 of shape \(2, 8\), got float32"):
                pool.share_model_field("body_mass", mass.astype(np.float32))
            pool.share_model_field("body_mass", mass)
            assert pool.model_field("body_mass") is mass and "body_mass" not in pool.unchanged_fields()
            mass[1] *= 2
            qvel = pool.bind("qvel")
            pool.reset()
            pool.step(nstep=5)
            assert not np.array_equal(qvel[0], qvel[1])
            with pytest.raises(ValueError, match="taken by the env itself"):
                pool.share_model_field("body_mass", mass.copy())


@pytest.mark.parametrize("post_constraint", [False, True])
def test_constants_of_some_are_derived_anew(post_constraint):
    """The others keep what was written, though no call has come since; and everybody goes on as a single simulation."""
    model = HalfCheetah(1).model
    models = [copy.copy(model) for _ in range(3)]
    datas = [mujoco.MjData(each) for each in models]
    with SimPool(model, 3, post_constraint=post_constraint) as pool:
        pool.reset()
        pool.bind("ctrl")[:] = 0.5
        states = np.empty((3, pool.state_size))
        for turn, slots in enumerate(([2], None, [1, 0])):
            masses, weights = pool.model_field("body_mass"), pool.model_field("dof_invweight0") if turn else None
            for slot, each in enumerate(models):
                masses[slot] *= 1 + 0.2 * (slot + turn)
                each.body_mass[:] = masses[slot]
                if slots is None or slot in slots:
                    mujoco.mj_setConst(each, mujoco.MjData(each))
            pool.set_const(slots)
            pool.step(nstep=7)
            for each, data, row in zip(models, datas, states, strict=True):
                data.ctrl[:] = 0.5
                mujoco.mj_step(each, data, 7)
                mujoco.mj_getState(each, data, row, mujoco.mjtState.mjSTATE_INTEGRATION)
            assert np.array_equal(masses, [each.body_mass for each in models])
            assert weights is None or np.array_equal(weights, [each.dof_invweight0 for each in models])
            assert np.array_equal(pool.get_states(), states), turn
