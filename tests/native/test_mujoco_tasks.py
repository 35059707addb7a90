"""Gymnasium's MuJoCo tasks as one batch, and the base that others are written on."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import threading
import time
import types
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv.native.engines import ThreadPool
from aioenv.worker.making import is_native_task, make_registered
from tests.kits.compare import assert_same
from tests.kits.mujoco_kit import OTHER_ARGUMENTS, TASKS, both, compare

MODES = list(AutoresetMode)
_ASSETS = Path(gym.__file__).parent / "envs" / "mujoco" / "assets"


@pytest.mark.parametrize(
    ("name", "mode"), [(n, m) for n, m in zip(TASKS, itertools.cycle(MODES), strict=False)], ids=str
)
def test_a_task_is_gymnasiums(name, mode):
    arguments = OTHER_ARGUMENTS[name][0] | {"max_episode_steps": 23}
    assert compare(name, mode, arguments, num_envs=3, steps=30, mask_every=17)
    assert compare(
        name, MODES[(MODES.index(mode) + 1) % 3], {"max_episode_steps": 11}, num_envs=4, steps=30, mask_every=9
    )


@pytest.mark.parametrize("name", ["HumanoidStandup-v5", "Hopper-v5"])
def test_what_becomes_unstable_is_gymnasiums(name, tmp_path, caplog, monkeypatch):
    """MuJoCo resets such a simulation itself, its controls too, of which the humanoids' cost is made."""
    monkeypatch.chdir(tmp_path)
    file = name.partition("-")[0].lower() + ".xml"
    spec = mujoco.MjSpec.from_file(str(_ASSETS / file))
    for actuator in spec.actuators:
        actuator.ctrllimited = mujoco.mjtLimited.mjLIMITED_FALSE
    (tmp_path / file).write_text(spec.to_xml())
    rng = np.random.default_rng(1)
    with both(name, 3, AutoresetMode.SAME_STEP, {"xml_file": str(tmp_path / file)}) as (ours, theirs):
        assert_same(ours.reset(seed=5), theirs.reset(seed=5))
        for step in range(8):
            actions = rng.uniform(-1, 1, ours.action_space.shape).astype(np.float32)
            actions[1] *= 1e6 if step % 3 == 0 else 1
            actions[2] = np.nan if step % 3 == 1 else actions[2]
            assert_same(ours.step(actions), theirs.step(actions), f"step {step}")
    assert "unstable" in caplog.text


# ---------------------------------------------------------------- states, and models of one's own


def made(name, num_envs, **kwargs):
    return make_registered(name, {"autoreset_mode": AutoresetMode.NEXT_STEP, **kwargs}, num_envs=num_envs)


@pytest.mark.parametrize("name", ["Ant-v5", "Humanoid-v5", "InvertedPendulum-v5"])
def test_a_slot_goes_on_from_a_state(name):
    """In another env and another slot, in the middle of an episode or after its end, generators included."""
    with closing(made(name, 4, max_episode_steps=9)) as env, closing(made(name, 6, max_episode_steps=9)) as other:
        env.action_space.seed(3)
        env.reset(seed=1)
        other.reset(seed=100)
        for _ in range(9):
            env.step(env.action_space.sample())
        with pytest.raises(ValueError, match="one a slot"):
            other.set_state(env.get_state(), [0])
        states = pickle.loads(pickle.dumps(env.get_state()))
        assert any(state["over"] for state in states)
        slots = [5, 0, 3, 1]
        other.set_state(states, slots)
        for _ in range(25):
            actions = env.action_space.sample()
            theirs = np.zeros(other.action_space.shape, np.float32)
            theirs[slots] = actions
            expected, got = env.step(actions), other.step(theirs)
            for mine, other_ones in zip(expected[:4], got[:4], strict=True):
                assert mine.tobytes() == other_ones[slots].tobytes()
    with closing(made("Reacher-v5", 1)) as env, pytest.raises(ValueError, match="another task"):
        env.set_state(states[:1])
    mode = AutoresetMode.SAME_STEP
    with closing(made(name, 1, autoreset_mode=mode)) as env, pytest.raises(ValueError, match="would never be reset"):
        env.set_state([state for state in states if state["over"]][:1])


@pytest.mark.parametrize(("name", "field"), [("Hopper-v5", "geom_friction"), ("Humanoid-v5", "body_mass")])
def test_every_slot_has_a_model_of_its_own(name, field):
    with both(name, 3, AutoresetMode.SAME_STEP, {"max_episode_steps": 20}) as (ours, theirs):
        values = ours.model_field(field)
        for slot in range(3):
            values[slot] *= 1 + 0.2 * slot
            getattr(theirs.envs[slot].unwrapped.model, field)[:] = values[slot]
        assert ours.model_field(field) is values and not np.array_equal(getattr(ours.model, field), values[1])
        assert_same(ours.reset(seed=5), theirs.reset(seed=5))
        theirs.action_space.seed(1)
        for step in range(30):
            if step == 25:  # they are read anew at every step
                values[1] = values[2]
                getattr(theirs.envs[1].unwrapped.model, field)[:] = values[2]
            actions = theirs.action_space.sample()
            assert_same(ours.step(actions), theirs.step(actions), f"step {step}")


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Ant-v5"])
def test_the_number_of_frames_can_be_changed(name):
    """Speeds in rewards and infos follow it."""
    with both(name, 2, AutoresetMode.NEXT_STEP, {}) as (ours, theirs):
        assert_same(ours.reset(seed=5), theirs.reset(seed=5))
        ours.frame_skip = 2
        for env in theirs.envs:
            env.unwrapped.frame_skip = 2
        actions = np.full(ours.action_space.shape, 0.4, np.float32)
        assert_same(ours.step(actions), theirs.step(actions))
        assert ours.dt == theirs.envs[0].unwrapped.dt


@pytest.mark.parametrize("post_constraint", [False, True])
def test_scalars_of_a_model_and_derived_constants(post_constraint):
    model = mujoco.MjModel.from_xml_string(XML)
    with aioenv.SimPool(model, 3, num_threads=2, post_constraint=post_constraint) as pool:
        timestep, mass = pool.model_field("opt.timestep"), pool.model_field("body_mass")
        weights = pool.model_field("dof_invweight0")
        timestep[1] = 0.01
        mass[2] *= 2
        pool.set_const([2])
        assert weights[2, 0] == pytest.approx(weights[0, 0] / 2)
        pool.reset()
        pool.step(nstep=3)
        assert pool.get_states()[:, 0].tolist() == pytest.approx([0.006, 0.03, 0.006])
        for wrong in ("no_such_field", "nq"):
            with pytest.raises(ValueError, match=wrong):
                pool.model_field(wrong)


# ---------------------------------------------------------------- the pool of simulations

XML = """<mujoco><option timestep="0.002"/><worldbody><geom type="plane" size="5 5 .1"/>
<body name="ball" pos="0 0 .3"><freejoint/><geom size=".1"/><site name="top" pos="0 0 .1"/></body></worldbody>
<actuator><motor site="top" gear="0 0 1 0 0 0"/></actuator>
<keyframe><key qpos="1 2 3 1 0 0 0"/></keyframe></mujoco>"""


@pytest.mark.parametrize("post_constraint", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_pool_is_a_loop_over_simulations(post_constraint, num_threads):
    model = mujoco.MjModel.from_xml_string(XML)
    datas = [mujoco.MjData(model) for _ in range(5)]
    state = mujoco.mjtState.mjSTATE_INTEGRATION
    threads = threading.active_count()
    with aioenv.SimPool(model, 5, num_threads=num_threads, post_constraint=post_constraint) as pool:
        ctrl, qpos, xpos = (pool.bind(name) for name in ("ctrl", "qpos", "xpos"))
        assert pool.bind("ctrl") is ctrl or np.shares_memory(pool.bind("ctrl"), ctrl)
        forces = pool.bind("cfrc_ext")
        pool.reset()
        ctrl[:, 0] = controls = np.arange(5) - 2.0
        rng = np.random.default_rng(1)
        mask = np.array([True, False, False, True, True])
        for step in range(60):
            which = [{}, {"n": 2}, {"slots": [4, 1]}, {"slots": mask}][step % 4]
            slots = np.arange(5)[which.get("slots", slice(which.get("n")))] if which else range(5)
            nstep = int(rng.integers(1, 20))
            pool.step(**which, nstep=nstep)
            for slot in slots:
                datas[slot].ctrl[:] = controls[slot]
                mujoco.mj_step(model, datas[slot], nstep)
                mujoco.mj_rnePostConstraint(model, datas[slot])
                assert np.array_equal(xpos[slot], datas[slot].xpos)
                assert not post_constraint or np.array_equal(forces[slot], datas[slot].cfrc_ext)
            expected = np.zeros((5, pool.state_size))
            for data, row in zip(datas, expected, strict=True):
                mujoco.mj_getState(model, data, row, state)
            assert np.array_equal(pool.get_states(), expected)
        order = [1, 2, 3, 4, 0]
        assert np.array_equal(pool.get_states(order), expected[order])
        assert qpos[:, 2].min() < 0.2, "one has hit the floor"
        # whole states, out and in; what is written to a bound field is the state
        pool.set_states(expected[[0, 0]], [3, 2])
        assert np.array_equal(qpos[2], qpos[0]) and np.array_equal(pool.get_states([3])[0], expected[0])
        qpos[1, :3] = 7
        contact = forces[1].copy()
        pool.forward(n=2)
        assert xpos[1, 1].tolist() == [7, 7, 7]
        assert np.array_equal(forces[1], contact), "`mj_forward` leaves contact forces as they are"
        pool.reset([1], keyframe=0)
        assert qpos[1, :3].tolist() == [1, 2, 3] and xpos[1, 1].tolist() == [1, 2, 3] and ctrl[1, 0] == 0
        assert np.array_equal(pool.get_states([2]), expected[:1])
        out = np.empty((1, pool.state_size))
        assert pool.get_states([2], out) is out and np.array_equal(out, expected[:1])
        for wrong, error in (
            (lambda: pool.step([5]), IndexError),
            (lambda: pool.step([1, 1]), ValueError),
            (lambda: pool.step(n=6), IndexError),
            (lambda: pool.step([0], n=1), ValueError),
            (lambda: pool.step(nstep=0), ValueError),
            (lambda: pool.step(np.ones(4, bool)), IndexError),
            (lambda: pool.reset(keyframe=1), IndexError),
            (lambda: pool.set_states(expected, [0]), ValueError),
            (lambda: pool.get_states([0], expected), ValueError),
            (lambda: pool.bind("efc_force"), ValueError),
            (lambda: pool.bind("no_such_field"), ValueError),
        ):
            with pytest.raises(error):
                wrong()
    pool.close()
    assert threading.active_count() == threads
    with pytest.raises(aioenv.ClosedError):
        pool.step()


@pytest.mark.parametrize("name", ["Hopper-v5", "Ant-v5"])
def test_threads_end_with_the_env(name):
    def count(expected=None):
        deadline = time.monotonic() + 10
        while (found := len(os.listdir("/proc/self/task"))) != expected and expected and time.monotonic() < deadline:
            os.sched_yield()  # a thread that has been joined may not be gone quite yet
        return found

    gc.collect()
    before = min(count() for _ in range(200))  # without those of earlier tests that are still ending
    env = made(name, 8, num_threads=4)
    env.reset(seed=1)
    assert count() == before + 3
    seen = env.qpos.copy()
    env.close()
    gc.collect()
    assert count(before) == before and np.array_equal(env.qpos, seen)
    with pytest.raises(aioenv.ClosedError):
        env.step(env.action_space.sample())
    with pytest.raises(aioenv.ClosedError):
        env.reset()
    made(name, 8, num_threads=4)  # this one is never closed
    gc.collect()
    assert count(before) == before


def test_what_a_thread_raises_comes_to_the_caller():
    team = ThreadPool(3)
    done = []
    barrier = threading.Barrier(3)

    def work(item):
        if item < 3:
            barrier.wait(30)  # so that each thread has one of them
        if item == 1:
            raise ValueError("as it was told")
        done.append(item)

    for _ in range(2):
        done.clear()
        with pytest.raises(ValueError, match="as it was told"):
            team.run(work, range(20))
        assert sorted(done) == [0, *range(2, 20)]
    team.close()
    team.close()


class Careless(aioenv.NativeMujocoEnv):
    """Gives live arrays away, of which there should be copies."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, XML, 2, **kwargs)
        self.set_observation_size(self.model.nq)

    def draw_start(self, slots):
        return np.repeat(self.init_qpos[None], len(slots), axis=0), np.ones((len(slots), self.model.nv))

    def observe(self, slots):
        return self.qpos[slots]

    def outcome(self, actions, obs):
        return self.qpos[:, 0], None, {"z": self.qpos[:, 2]}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=str)
def test_what_is_given_away_is_a_copy(mode):
    with closing(Careless(3, autoreset_mode=mode, max_episode_steps=4)) as env:
        env.reset()
        env.step(np.zeros((3, 1), np.float32))
        first, _ = env.reset(options={"reset_mask": np.array([True, False, False])})
        given = [first]
        for _ in range(9):
            before = first.copy(), env.qpos.copy()
            obs, reward, _, _, info = env.step(np.zeros((3, 1), np.float32))
            given += [obs, reward, info["z"]]
            assert np.array_equal(first, before[0]) and (env.qpos != before[1]).any()
            assert (env.qpos[:, 2] > 0.1).all(), "no zero was written into the physics"
        assert not any(np.shares_memory(array, env.qpos) for array in given)


# ---------------------------------------------------------------- arguments, and what is refused


def test_what_makes_no_sense():
    for wrong in (
        {"max_episode_steps": 0},
        {"max_episode_steps": 1.5},
        {"frame_skip": 0},
        {"frame_skip": -1},
        {"frame_skip": 2.5},
        {"num_threads": 0},
        {"num_threads": True},
        {"render_mode": "human"},
        {"autoreset_mode": "Never"},
    ):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"(?i){name.replace('_', '.?')}"):
            made("Swimmer-v5", 2, **wrong)
    for scale, error in ((-1, ValueError), (float("inf"), OverflowError), (float("nan"), OverflowError)):
        with closing(made("Swimmer-v5", 2, reset_noise_scale=scale)) as env, pytest.raises(error, match="uniform"):
            env.reset()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        made("Swimmer-v5", 2, xml_file="/nowhere.xml")
    with pytest.raises(FileNotFoundError, match=r"'my/swimmer.xml' is none of .* say"):
        made("Swimmer-v5", 2, xml_file="my/swimmer.xml")
    with pytest.raises(TypeError, match="MjModel"):
        aioenv.SimPool(3, 2)
    with pytest.raises(ValueError, match="num_sims"):
        aioenv.SimPool(XML, 0)
    for post_constraint in (False, True):
        with pytest.raises(ValueError, match=r"sleep is not part of the state .* switch that off: model.opt"):
            sleeping = XML.replace("<option ", "<option><flag sleep='enable'/></option><option ")
            aioenv.SimPool(sleeping, 2, post_constraint=post_constraint)


def test_a_step_that_can_not_be_made():
    with closing(made("Reacher-v5", 2, max_episode_steps=2, autoreset_mode=AutoresetMode.DISABLED)) as env:
        actions = np.zeros((2, 2), np.float32)
        with pytest.raises(ResetNeeded):
            env.step(actions)
        obs, _ = env.reset(options={"reset_mask": np.array([True, False])})
        assert obs[0].any() and not obs[1].any()
        with pytest.raises(ResetNeeded):
            env.step(actions)
        env.reset(seed=1)
        with pytest.raises(ValueError, match="shape"):
            env.step(actions[:1])
        env.step(actions)
        env.step(actions)
        for mask in (None, np.array([False, True])):
            if mask is not None:
                env.reset(options={"reset_mask": mask})
            before = env.qpos.copy()
            with pytest.raises(ResetNeeded, match=r"slots \[0" if mask is not None else r"slots \[0, 1\]"):
                env.step(actions)
            assert np.array_equal(env.qpos, before)
        for mask, error in (
            ([True, False], TypeError),
            (np.ones(3, bool), ValueError),
            (np.ones(2), TypeError),
            (np.zeros(2, bool), ValueError),
        ):
            with pytest.raises(error, match="reset_mask"):
                env.reset(options={"reset_mask": mask})
        with pytest.raises(ValueError, match="num_envs=2"):
            env.reset(seed=[1])
        env.reset(seed=np.array([7, 8]))
        for seed, error in ((1.5, TypeError), ("ab", TypeError), ([1, 2.5], TypeError), ([1, -2], gym.error.Error)):
            with pytest.raises(error):
                env.reset(seed=seed)
            assert env.np_random_seed == (7, 8), "none of them was taken"


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [None, 2])
async def test_through_make_vec(num_workers):
    mode = AutoresetMode.SAME_STEP
    theirs = SyncVectorEnv([lambda: gym.make("Hopper-v5", max_episode_steps=12)] * 4, autoreset_mode=mode)
    async with aioenv.make_vec(
        "Hopper-v5", 4, backend="native", num_workers=num_workers, autoreset_mode="SameStep", max_episode_steps=12
    ) as envs:
        assert envs.autoreset_mode is mode and envs.spec.id == "Hopper-v5"
        theirs.action_space.seed(1)
        assert_same(tuple(await envs.reset(seed=3)), theirs.reset(seed=3))
        for _ in range(20):
            actions = theirs.action_space.sample()
            assert_same(tuple(await envs.step(actions)), theirs.step(actions))
    theirs.close()
    mine = types.SimpleNamespace(**vars(gym.spec("Hopper-v5")))
    assert not is_native_task("Hopper-v4") and not is_native_task("CartPole-v1") and not is_native_task(mine)


@pytest.mark.asyncio
async def test_model_fields_behind_the_api():
    async with aioenv.make_vec("Swimmer-v5", 3, backend="native") as envs:
        direct = made("Swimmer-v5", 3)
        for fields in (envs.model_field, direct.model_field):
            fields("opt.viscosity")[1] = 0.7
            fields("body_mass")[2] *= 2
        await envs.reset(seed=1)
        direct.reset(seed=1)
        actions = np.ones((3, 2), np.float32)
        for _ in range(5):
            assert (await envs.step(actions)).obs.tobytes() == direct.step(actions)[0].tobytes()
        direct.close()
        assert envs.model_field("body_mass") is envs.model_field("body_mass")
        envs.send(actions)
        with pytest.raises(aioenv.PendingCallError, match="model_field"):
            envs.model_field("body_mass")
        await envs.recv(3)
        with pytest.raises(ValueError, match="no_such_field"):
            envs.model_field("no_such_field")
    async with aioenv.make_vec("CartPole-v1", 2, backend="native") as envs:
        with pytest.raises(ValueError, match="no NativeMujocoEnv"):
            envs.model_field("body_mass")


def test_model_fields_of_the_blocking_one():
    with aioenv.sync.make_vec("Reacher-v5", 2, backend="native") as envs:
        envs.reset(seed=1)
        masses = envs.model_field("body_mass")
        masses[1] *= 3
        envs.step(np.ones((2, 2), np.float32))
        assert envs.model_field("body_mass") is masses
