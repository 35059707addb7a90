"""Native MuJoCo tasks behind the API: results, states, restarts, images, and what a step costs the loop."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv import sync
from aioenv.native.tasks.locomotion_2d import Hopper
from tests.kits.compare import assert_same

pytestmark = pytest.mark.asyncio

SMALL = aioenv.RenderConfig(32, 24, quality="fast", workers=1)


def actions_of(envs, steps, seed=1):
    envs.action_space.seed(seed)
    return [envs.action_space.sample() for _ in range(steps)]


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
async def test_over_workers_all_is_gymnasiums(mode):
    make = partial(gym.make, "Hopper-v5", max_episode_steps=13)
    reference = SyncVectorEnv([make] * 5, autoreset_mode=mode)
    async with aioenv.make_vec(
        "Hopper-v5", 5, backend="native", num_workers=2, autoreset_mode=mode, max_episode_steps=13
    ) as envs:
        assert envs.autoreset_mode is mode
        assert_same(tuple(await envs.reset(seed=3)), reference.reset(seed=3))
        for actions in actions_of(reference, 40):
            expected = reference.step(actions)
            result = await envs.step(actions)
            assert_same(tuple(result), expected)
            over = result.terminated | result.truncated
            if mode is AutoresetMode.DISABLED and over.any():
                with pytest.raises(aioenv.ResetNeededError, match="are over"):
                    await envs.step(actions)
                options = {"reset_mask": over}
                assert_same(tuple(await envs.reset(options=options)), reference.reset(options=dict(options)))
    reference.close()


async def test_without_autoreset_nothing_is_sent_over_an_end():
    async with aioenv.make_vec(
        "InvertedPendulum-v5", 2, backend="native", autoreset_mode="Disabled", max_episode_steps=1
    ) as envs:
        await envs.reset(seed=1)
        actions = np.zeros((2, 1), np.float32)
        assert (await envs.step(actions)).truncated.all()
        with pytest.raises(aioenv.ResetNeededError):
            await envs.step(actions)
        with pytest.raises(aioenv.ResetNeededError):
            envs.send(actions)
        await envs.reset(options={"reset_mask": np.array([True, False])})
        with pytest.raises(aioenv.ResetNeededError, match=r"\[1\]"):
            await envs.step(actions)
        await envs.reset()
        envs.send(actions)
        await envs.recv(2)
        with pytest.raises(aioenv.ResetNeededError):
            await envs.step(actions)


@pytest.mark.parametrize(
    "task", ["Hopper-v5", "Ant-v5", *(pytest.param(t, marks=pytest.mark.stress) for t in ("Humanoid-v5", "Reacher-v5"))]
)
async def test_slots_go_on_elsewhere(task, tmp_path):
    make = partial(aioenv.make_vec, task, backend="native", max_episode_steps=17)
    async with make(4) as first, make(3, num_workers=2) as second:
        await first.reset(seed=1)
        await second.reset(seed=9)
        for actions in actions_of(first, 10):
            await first.step(actions)
        states = await first.get_state([3, 1, 0])
        assert states[0].env_id == task and not states[0].has_pickles
        aioenv.save(tmp_path / "states", states)
        await second.set_state(aioenv.load(tmp_path / "states"))
        back = await second.get_state()
        for mine, theirs in zip(back, states, strict=True):
            assert_same(mine.arrays, theirs.arrays)
        ends = 0
        for actions in actions_of(first, 25, seed=2):
            expected, result = await first.step(actions), await second.step(actions[[3, 1, 0]])
            for mine, theirs in zip(result[:4], expected[:4], strict=True):
                assert mine.tobytes() == theirs[[3, 1, 0]].tobytes()
            ends += int((result.terminated | result.truncated).sum())
        assert ends >= 3


@pytest.mark.parametrize("where", [{"num_workers": 0}, {"backend": "native"}, {"backend": "native", "num_workers": 2}])
@pytest.mark.parametrize("before", [{"num_workers": 0}, {"backend": "native"}])
async def test_a_state_that_awaits_a_reset_is_refused_under_same_step_and_the_others_are_set(before, where):
    actions = np.zeros((2, 3), np.float32)
    async with aioenv.make_vec("Hopper-v5", 2, max_episode_steps=3, **before) as envs:
        await envs.reset(seed=0)
        for _ in range(3):
            await envs.step(actions)
        (over,) = await envs.get_state([0])
        await envs.step(actions)
        (begun,) = await envs.get_state([1])
        expected = await envs.step(actions)
    mode = AutoresetMode.SAME_STEP
    async with aioenv.make_vec("Hopper-v5", 2, max_episode_steps=3, autoreset_mode=mode, **where) as envs:
        await envs.reset(seed=1)
        with pytest.raises(aioenv.ResumeError, match="slot 0: this state awaits a reset"):
            await envs.set_state([over, begun])
        assert np.array_equal((await envs.step(actions)).obs[1], expected.obs[1])


class Mortal(Hopper):
    def before_step(self):
        super().before_step()
        if self.qvel[0, 0] == 77:
            os.kill(os.getpid(), signal.SIGKILL)

    def doom(self, pid):
        if os.getpid() == pid:
            self.qvel[0, 0] = 77

    def pid(self):
        return os.getpid()


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
async def test_a_worker_that_died_is_started_again(mode):
    make = partial(Mortal, autoreset_mode=mode)
    async with (
        aioenv.NativeVectorEnv(make, 4, num_workers=2, restart=aioenv.RestartPolicy()) as envs,
        aioenv.NativeVectorEnv(partial(Hopper, autoreset_mode=mode), 2) as rest,
    ):
        await envs.reset(seed=1)
        await rest.reset(seed=3)
        steps = actions_of(envs, 4)
        last = await envs.step(steps[0])
        await rest.step(steps[0][2:])
        (pid, *_) = await envs.call("pid")
        await envs.call("doom", pid)
        lost, going_on = await envs.step(steps[1]), await rest.step(steps[1][2:])
        assert lost.truncated.tolist() == [True, True, False, False] == lost.info["restarted"].tolist()
        assert lost.obs[2:].tobytes() == going_on.obs.tobytes()
        if mode is AutoresetMode.SAME_STEP:
            assert_same(np.stack(lost.info["final_obs"][:2]), last.obs[:2])
        else:
            assert_same(lost.obs[:2], last.obs[:2])
        if mode is AutoresetMode.DISABLED:
            with pytest.raises(aioenv.ResetNeededError):
                await envs.step(steps[2])
            await envs.reset(options={"reset_mask": lost.truncated})
        for actions in steps[2:]:
            result, going_on = await envs.step(actions), await rest.step(actions[2:])
            assert result.obs[2:].tobytes() == going_on.obs.tobytes() and np.isfinite(result.obs).all()
            assert not result.truncated.any()


async def test_images():
    make = partial(aioenv.make_vec, "Hopper-v5", 3, render=SMALL)
    async with make(backend="native") as envs, make(num_workers=1) as singles:
        for each in (envs, singles):
            await each.reset(seed=1)
        for actions in actions_of(envs, 12):
            mine, theirs = await envs.step(actions), await singles.step(actions)
            assert mine.obs.tobytes() == theirs.obs.tobytes()
        assert_same(await envs.render(), await singles.render())


async def test_a_long_step_leaves_the_loop_alone():
    async with aioenv.make_vec("Ant-v5", 64, backend="native") as envs:
        await envs.reset(seed=1)
        steps, busy = actions_of(envs, 25), []
        for actions in steps:
            began = time.thread_time()
            await envs.step(actions)
            busy.append(time.thread_time() - began)
        assert envs.runs == "thread" and np.median(busy) < 0.5e-3


async def test_blocking():
    reference = SyncVectorEnv([partial(gym.make, "Swimmer-v5")] * 3)
    with sync.make_vec("Swimmer-v5", 3, backend="native") as envs:
        assert_same(tuple(envs.reset(seed=2)), reference.reset(seed=2))
        for actions in actions_of(envs, 5):
            assert_same(tuple(envs.step(actions)), reference.step(actions))
        states = envs.get_state([1])
        envs.set_state(states, [2])
        result = envs.step(np.zeros((3, 2), np.float32))
        assert result.obs[1].tobytes() == result.obs[2].tobytes()
    reference.close()
