"""States of native tasks set on single envs of the same id, and back: either goes on where the other was."""

from __future__ import annotations

import os
import signal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics

import aioenv
from tests.kits.compare import assert_same

pytestmark = pytest.mark.asyncio

N, LIMIT = 2, 23
TASKS = (
    "Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Pusher Reacher Swimmer "
    "Walker2d"
).split()
NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
TO_NATIVE, TO_SINGLE = ({}, {"backend": "native"}), ({"backend": "native"}, {})


def vec(task, mode, **kwargs):
    if not {"backend", "restart"} & kwargs.keys():
        kwargs["debug"] = True  # in threads of this process, which start sooner
    return aioenv.make_vec(task, N, autoreset_mode=mode, max_episode_steps=LIMIT, **kwargs)


async def follow(task, mode, ways, path=None):
    """Step two vector envs alike, the second of which is given the first's states again and again."""
    first, second = (vec(f"{task}-v5", mode, **way) for way in ways)
    async with first, second:
        space = first.action_space
        space.seed(7)
        await first.reset(seed=5)
        await second.reset(seed=70)
        over = np.zeros(N, np.bool_)
        given_when_over = 0
        for k in range(3 * LIMIT):
            if k in (0, 1, 7, 40) or over.any():
                states = await first.get_state()
                if path is not None:
                    aioenv.save(path, states)
                    states = aioenv.load(path)
                await second.set_state(states)
                given_when_over += over.any()
            if mode is DISABLED and over.any():
                mask = {"reset_mask": over}
                assert_same(*[tuple(await envs.reset(options=mask)) for envs in (first, second)])
            actions = space.sample()
            expected, got = await first.step(actions), await second.step(actions)
            assert_same(tuple(got), tuple(expected))
            over = expected.terminated | expected.truncated
        assert given_when_over


@pytest.mark.parametrize(
    ("task", "mode", "ways"),
    [
        ("Ant", NEXT, TO_NATIVE),
        ("Humanoid", SAME, TO_SINGLE),
        ("Hopper", DISABLED, TO_NATIVE),
        ("Ant", NEXT, TO_SINGLE),
    ],
    ids=["ant", "humanoid", "hopper", "ant-back"],
)
async def test_the_other_goes_on(task, mode, ways, tmp_path):
    await follow(task, mode, ways, tmp_path / "states")


@pytest.mark.stress
@pytest.mark.parametrize("ways", [TO_NATIVE, TO_SINGLE], ids=["to-native", "to-single"])
@pytest.mark.parametrize("mode", [pytest.param(mode, id=mode.name) for mode in AutoresetMode])
@pytest.mark.parametrize("task", TASKS)
async def test_every_task_goes_on(task, mode, ways):
    await follow(task, mode, ways)


async def test_a_state_that_was_given_outlives_its_worker():
    restart = aioenv.RestartPolicy(resume=True)
    async with (
        vec("Ant-v5", NEXT, backend="native") as native,
        vec("Ant-v5", NEXT, restart=restart, num_workers=1) as single,
    ):
        await native.reset(seed=1)
        await single.reset(seed=2)
        for _ in range(5):
            await native.step(native.action_space.sample())
        await single.set_state(await native.get_state())
        os.kill(single.workers[0].pid, signal.SIGKILL)
        for _ in range(3):
            actions = native.action_space.sample()
            expected, got = await native.step(actions), await single.step(actions)
            assert_same(tuple(got), tuple(expected))


async def test_an_episode_that_was_followed_at_once_is_not_over():
    async with vec("Reacher-v5", SAME, backend="native") as first, vec("Reacher-v5", NEXT, backend="native") as second:
        await first.reset(seed=1)
        await second.reset(seed=2)
        for _ in range(LIMIT):
            result = await first.step(first.action_space.sample())
        assert result.truncated.all()
        await second.set_state(await first.get_state())
        actions = first.action_space.sample()
        assert_same((await second.step(actions))[:4], (await first.step(actions))[:4])


async def over(envs):
    """States of episodes that have just ended."""
    await envs.reset(seed=1)
    for _ in range(LIMIT):
        await envs.step(envs.action_space.sample())
    return await envs.get_state()


async def test_a_reset_that_would_not_come_is_refused():
    async with vec("Reacher-v5", NEXT) as single, vec("Reacher-v5", NEXT, backend="native") as native:
        theirs, ours = await over(single), await over(native)
    async with vec("Reacher-v5", SAME, backend="native") as native, vec("Reacher-v5", SAME) as single:
        for envs, states in ((native, theirs), (single, ours), (native, ours)):
            await envs.reset(seed=1)
            with pytest.raises(aioenv.ResumeError, match="awaits a reset"):
                await envs.set_state(states)


def counted(**kwargs):
    return RecordEpisodeStatistics(gym.make("Reacher-v5", **kwargs))


async def test_what_one_of_them_does_not_count_is_refused():
    native = aioenv.make_vec("Reacher-v5", 1, backend="native")
    endless = aioenv.make_vec("Reacher-v5", 1, max_episode_steps=-1, debug=True)
    async with native, endless, aioenv.AsyncVectorEnv([counted], debug=True) as single:
        for envs in (native, endless, single):
            await envs.reset(seed=1)
        with pytest.raises(aioenv.ResumeError, match=r"native task, which has no \w+\.episode_count"):
            await single.set_state(await native.get_state())
        with pytest.raises(aioenv.ResumeError, match=r"has \w+\.episode_count, .* a native task has not"):
            await native.set_state(await single.get_state())
        with pytest.raises(aioenv.ResumeError, match="without a TimeLimit"):
            await native.set_state(await endless.get_state())
        await endless.set_state(await native.get_state())  # which counts without being asked


async def test_another_model_is_refused():
    async with aioenv.make_vec("Hopper-v5", 1, xml_file="walker2d.xml", debug=True) as single:
        await single.reset(seed=1)
        async with aioenv.make_vec("Hopper-v5", 1, backend="native") as native:
            await native.reset(seed=1)
            for source, target in ((native, single), (single, native)):
                with pytest.raises(aioenv.ResumeError, match="is of another MuJoCo model: signature"):
                    await target.set_state(await source.get_state())
