"""Native stepping in combinations: Ctrl-C and threads, some slots and types, states and modes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv import sync
from aioenv.inprocess.requests import owned_info
from aioenv.native.engines import ThreadPool
from aioenv.native.tasks.common import adjacent_view, clamp, negated, norm
from aioenv.worker.making import make_registered
from tests.kits.compare import assert_same
from tests.kits.mujoco_kit import both
from tests.kits.native_kit import Good


def test_ctrl_c_while_another_thread_is_at_work():
    """The call ends when no thread works any more, and the next one knows nothing of it."""
    team, main = ThreadPool(2), threading.main_thread()
    both, seen, ended, helps = threading.Barrier(2), threading.Event(), threading.Event(), threading.Event()
    early, done = [], []

    def interrupted(number, frame):
        seen.set()
        raise KeyboardInterrupt

    def work(item):
        both.wait(30)
        if threading.current_thread() is not main:
            while sys._current_frames()[main.ident].f_code.co_name != "_await":  # where it waits for this
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGINT)
            assert seen.wait(30)
            early.append(ended.wait(0.2))

    def next_work(item):
        if threading.current_thread() is main:
            assert helps.wait(30)
        else:
            helps.set()
            ended.wait(0.2)
        done.append(item)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            team.run(work, range(2))
    finally:
        signal.signal(signal.SIGINT, before)
    ended.set()
    assert early == [False]
    ended.clear()
    team.run(next_work, range(2))
    assert sorted(done) == [0, 1]
    team.close()


def test_ctrl_c_in_a_piece_of_work_begins_no_other():
    team, done = ThreadPool(1), []

    def work(item):
        done.append(item)
        if item == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        team.run(work, range(9))
    assert done == [0, 1, 2]
    team.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=str)
def test_the_first_slot_that_is_stepped_says_what_type_an_info_has(mode):
    class Counts(Good):
        def outcome(self, actions, obs):
            return obs[:, 0].copy(), np.arange(3) == 1, {"n": np.full(3, 2.5)}

        def start_info(self, slots):
            return {"n": np.zeros(len(self.qpos[slots]), np.int64)}

    with closing(Counts(3, autoreset_mode=mode)) as env:
        env.reset(seed=0)
        for _ in range(2 if mode is AutoresetMode.NEXT_STEP else 1):
            info = env.step_some(np.zeros((3, 1), np.float32), np.array([1, 2]))[4]
        assert_same(info["n"], np.array([0, 0, 2]))


@pytest.mark.parametrize("backend", ["native", "workers"])
def test_without_autoreset_a_state_of_an_ended_episode_can_be_stepped_on(backend):
    actions = np.zeros((2, 2), np.float32)
    with sync.make_vec("Reacher-v5", 2, backend=backend, autoreset_mode="Disabled", max_episode_steps=2) as envs:
        envs.reset(seed=0)
        envs.step(actions)
        envs.step(actions)
        state = envs.get_state([0])
        envs.reset(seed=1)
        envs.set_state(state, [1])
        assert envs.step(actions).truncated.tolist() == [False, True]


class Gives(VectorEnv):
    """Gives the same infos again and again, or keeps some of their arrays."""

    single_observation_space = Box(0, 1, (), np.float64)
    observation_space = Box(0, 1, (2,), np.float64)
    single_action_space = Box(0, 1, (), np.float64)
    action_space = Box(0, 1, (2,), np.float64)

    def __init__(self, num_envs, keeps):
        self.num_envs, self.keeps = num_envs, keeps
        self.column, self.infos = np.zeros(2), {"whole": np.zeros(2)}

    def reset(self, *, seed=None, options=None):
        return np.zeros(2), self.infos

    def step(self, actions):
        self.column += 1
        self.infos["whole"] += 1
        info = self.infos if self.keeps == "dict" else {"kept": self.column, "view": self.column[:], "new": np.ones(2)}
        return np.zeros(2), np.zeros(2), np.zeros(2, np.bool_), np.zeros(2, np.bool_), info


@pytest.mark.parametrize("keeps", ["dict", "array"])
def test_infos_are_the_callers_own_whatever_the_env_keeps(keeps):
    with sync.make_vec(lambda num_envs: Gives(num_envs, keeps), 2, backend="native") as envs:
        reset = envs.reset().info
        infos = [envs.step(np.zeros(2)).info for _ in range(3)]
    assert reset["whole"].tolist() == [0, 0]
    for number, info in enumerate(infos, 1):
        for key, column in info.items():
            assert column.tolist() == ([1, 1] if key == "new" else [number] * 2), key


def test_unshared_results_are_not_copied():
    new, nested, shared = np.ones(2), np.ones(2), np.ones(2)
    known = {id(array): name for name, array in (("new", new), ("nested", nested), ("shared", shared))}

    def given():
        nonlocal new, nested
        info = {"new": new, "inner": {"nested": nested}, "shared": shared, "again": shared, "text": "as it is"}
        new = nested = None
        return info

    def taken():
        info = given()
        return owned_info(info)

    info = taken()
    gc.collect()
    assert known.get(id(info["new"])) == "new"
    assert info["shared"] is not shared and info["again"] is not info["shared"] and info["text"] == "as it is"
    assert info["inner"]["nested"].tolist() == [1, 1]


# ---------------------------------------------------------------- arithmetic that must give the very same bits


def test_cheaper_arithmetic_gives_the_same_bits():
    rng = np.random.default_rng(0)
    values = np.concatenate((rng.normal(size=(4000, 3)) * 10.0 ** rng.integers(-9, 9, (4000, 1)), np.zeros((2, 3))))
    values[-1] = -0.0
    expected = np.array([x**2 for x in values.ravel().tolist()]).reshape(values.shape)  # C's `pow`
    assert_same(np.float_power(values, 2), expected)
    assert_same(norm(values), np.array([np.linalg.norm(row) for row in values]))
    sorts = (np.float64(0), np.float64(0.1), np.float32(0.1), np.uint8(3), np.uint16(0), np.uint32(3), np.uint64(0))
    for weight in (0, 1, 3, 0.0, -0.0, 0.1, -2.5, True, np.True_, np.False_, *sorts):
        for column in (values[:, 0].copy(), values[:, 0].astype(np.float32)):
            assert_same(column * negated(weight), -(weight * column))
    odd = np.concatenate((values[:, :2], [[np.nan, np.inf], [-np.inf, 10.0]]))
    clipped = odd.copy()
    clamp(clipped, 10)
    assert_same(clipped, np.clip(odd, -10, 10))


def test_arrays_side_by_side():
    rows = np.arange(24.0).reshape(4, 6)
    both = adjacent_view(rows[:, 1:3], rows[:, 3:4])
    assert np.shares_memory(both, rows)
    assert_same(both, rows[:, 1:4])
    rows[2, 2] = 70
    assert both[2, 1] == 70
    with pytest.raises(ValueError, match="one behind the other"):
        adjacent_view(rows[:, 1:3], rows[:, 4:])


def test_what_has_no_bounds_overflows_as_numbers_do():
    """Speeds beyond the root of the largest number: infinite penalties, as Gymnasium's, not an error."""
    with closing(make_registered("InvertedDoublePendulum-v5", {}, num_envs=2)) as env, np.errstate(over="ignore"):
        env.reset(seed=0)
        env.qvel[1, 1] = 1e200
        reward, _, info = env.outcome(np.zeros((2, 1), np.float32), None)
        assert np.isfinite(reward[0]) and reward[1] == -np.inf == info["velocity_penalty"][1]


@pytest.mark.parametrize("name", ["Ant-v5", "HumanoidStandup-v5"])
def test_actions_may_lie_in_memory_in_any_order(name):
    """Gymnasium's envs get a row each, whose sum does not depend on where the others are."""
    rng = np.random.default_rng(1)
    with both(name, 3, AutoresetMode.NEXT_STEP, {}) as (ours, theirs):
        assert_same(ours.reset(seed=1), theirs.reset(seed=1))
        for arranged in (np.asfortranarray, lambda actions: actions[::-1], lambda actions: actions[:, ::-1]):
            for step in range(4):
                actions = arranged(rng.uniform(-1, 1, ours.action_space.shape).astype(np.float32))
                assert_same(ours.step(actions), theirs.step(actions), f"step {step}")
