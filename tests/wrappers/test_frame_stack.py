"""Stacks of observations: those of Gymnasium's `FrameStackObservation` around each env, in every autoreset mode."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import DictInfoToList

import aioenv
import aioenv.sync
from aioenv.wrappers import FrameStack, FrameStackObservation, VectorWrapper
from tests.kits.compare import assert_same
from tests.kits.version_kit import needs_mujoco_batch

MODES = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
PLAIN = spaces.Box(0, 255, (2,), np.float32)
IMAGE = spaces.Box(0, 255, (6, 5, 3), np.uint8)
DEEP = spaces.Dict(
    {"image": IMAGE, "parts": spaces.Tuple((spaces.Discrete(200), PLAIN)), "bits": spaces.MultiBinary(2)}
)


class Told(gym.Env):
    """Each observation says which slot, episode and step it is of; episodes have 2 to 5 steps, ended in both ways."""

    action_space = spaces.Discrete(2)

    def __init__(self, slot, space):
        self.slot, self.observation_space, self.episode = slot, space, 0

    def observation(self, space=None):
        space = space or self.observation_space
        number = self.slot * 60 + self.episode * 6 + self.t
        match space:
            case spaces.Dict():
                return {key: self.observation(one) for key, one in space.spaces.items()}
            case spaces.Tuple():
                return tuple(map(self.observation, space.spaces))
            case spaces.Discrete():
                return np.int64(number)
            case spaces.MultiBinary():
                return np.array([number % 2, number // 2 % 2], np.int8)
        return np.full(space.shape, number, space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = (self.episode + 1) % 10, 0
        return self.observation(), {}

    def step(self, action):
        self.t += 1
        over = self.t == 2 + (self.slot + self.episode) % 4
        terminated = over and self.episode % 2 == 0
        return self.observation(), 1.0, terminated, over and not terminated, {"t": self.t}


def factories(space):
    return [partial(Told, slot, space) for slot in range(3)]


def stacked(space, **kwargs):
    """Gymnasium's wrapper around each env."""
    return [
        lambda factory=factory: gym.wrappers.FrameStackObservation(factory(), **kwargs) for factory in factories(space)
    ]


async def compare(envs, theirs, mode, steps=40):
    assert envs.observation_space == theirs.observation_space
    assert envs.single_observation_space == theirs.single_observation_space
    assert_same(tuple(await envs.reset(seed=0)), theirs.reset(seed=0))
    seen = 0
    for _ in range(steps):
        got = await envs.step(np.zeros(3, np.int64))
        assert_same(tuple(got), theirs.step(np.zeros(3, np.int64)))
        ended = got.terminated | got.truncated
        seen += sum(map(bool, got.info.get("_final_obs", ())))
        if mode is AutoresetMode.DISABLED and ended.any():
            obs, info = await envs.reset(options={"reset_mask": ended})
            assert_same((obs, info), theirs.reset(options={"reset_mask": ended}))
    assert bool(seen) is (mode is AutoresetMode.SAME_STEP)


@pytest.mark.asyncio
@MODES
@pytest.mark.parametrize("padding", ["reset", "zero", "own"])
@pytest.mark.parametrize("space", [PLAIN, IMAGE, DEEP], ids=["plain", "image", "deep"])
async def test_stacks_are_those_of_gymnasium(space, padding, mode):
    if padding == "own":
        space.seed(3)
        padding = space.sample()
    if space is DEEP and not isinstance(padding, str):
        pytest.skip("Gymnasium compares the observation with a string, which numpy refuses in dicts")
    kwargs = {"stack_size": 4, "padding_type": padding}
    theirs = SyncVectorEnv(stacked(space, **kwargs), autoreset_mode=mode)
    async with FrameStack(
        aioenv.AsyncVectorEnv(factories(space), num_workers=2, autoreset_mode=mode), **kwargs
    ) as envs:
        await compare(envs, theirs, mode)
    theirs.close()


@pytest.mark.asyncio
@MODES
@pytest.mark.parametrize("how", [{"copy": False}, {"transport": "shared"}, {"num_workers": 0}], ids=str)
async def test_stacks_outlast_the_batches_that_they_are_made_of(mode, how):
    """Results that are written to afterwards are the caller's alone."""
    theirs = SyncVectorEnv(stacked(IMAGE, stack_size=3), autoreset_mode=mode)
    made = aioenv.AsyncVectorEnv(factories(IMAGE), autoreset_mode=mode, **{"num_workers": 2, **how})
    async with FrameStack(made, 3) as envs:
        (await envs.reset(seed=0)).obs[:] = 0
        theirs.reset(seed=0)
        for _ in range(15):
            got, expected = await envs.step(np.zeros(3, np.int64)), theirs.step(np.zeros(3, np.int64))
            assert_same(tuple(got), expected)
            ended = got.terminated | got.truncated
            got.obs[:] = 0
            if mode is AutoresetMode.DISABLED and ended.any():
                await envs.reset(options={"reset_mask": ended})
                theirs.reset(options={"reset_mask": ended})
    theirs.close()


@MODES
@pytest.mark.parametrize("make", [SyncVectorEnv, aioenv.sync.SyncVectorEnv, aioenv.sync.VectorEnv])
def test_blocking_vector_envs_are_stacked_by_the_same_code(make, mode):
    mine = FrameStackObservation(make(factories(DEEP), autoreset_mode=mode), 3)
    theirs = SyncVectorEnv(stacked(DEEP, stack_size=3), autoreset_mode=mode)
    assert_same(tuple(mine.reset(seed=0)), theirs.reset(seed=0))
    for _ in range(20):
        got = mine.step(np.zeros(3, np.int64))
        assert_same(tuple(got), theirs.step(np.zeros(3, np.int64)))
        ended = got[2] | got[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            options = {"reset_mask": ended}
            assert_same(tuple(mine.reset(options=dict(options))), theirs.reset(options=dict(options)))
    mine.close()
    theirs.close()


@needs_mujoco_batch
@pytest.mark.asyncio
@MODES
async def test_native_tasks(mode):
    kwargs = {"max_episode_steps": 6, "autoreset_mode": mode}
    stack = partial(gym.wrappers.FrameStackObservation, stack_size=2)
    reference = aioenv.make_vec("Hopper-v5", 3, num_workers=0, wrappers=[stack], **kwargs)
    async with (
        FrameStack(aioenv.make_vec("Hopper-v5", 3, backend="native", **kwargs), 2) as envs,
        reference as theirs,
    ):
        assert_same((await envs.reset(seed=0)).obs, (await theirs.reset(seed=0)).obs)
        for number in range(20):
            envs.action_space.seed(number)
            actions = envs.action_space.sample()
            got, expected = await envs.step(actions), await theirs.step(actions)
            assert_same(tuple(got), tuple(expected))
            ended = got.terminated | got.truncated
            if mode is AutoresetMode.DISABLED and ended.any():
                options = {"reset_mask": ended}
                assert_same((await envs.reset(options=options)).obs, (await theirs.reset(options=options)).obs)


@pytest.mark.asyncio
@MODES
async def test_paused_slots_keep_their_stacks(mode):
    """Slot 1 goes on where it stopped, also if its episode had ended."""
    for steps in range(1, 6):
        theirs = SyncVectorEnv(stacked(PLAIN, stack_size=3), autoreset_mode=mode)
        made = aioenv.AsyncVectorEnv(factories(PLAIN), num_workers=3, autoreset_mode=mode)
        async with FrameStack(made, 3) as envs:
            await envs.reset(seed=0)
            theirs.reset(seed=0)
            for _ in range(steps):
                if mode is AutoresetMode.DISABLED:
                    await envs.reset()
                    theirs.reset()
                got, expected = await envs.step(np.zeros(3, np.int64)), theirs.step(np.zeros(3, np.int64))
            envs.pause(1)
            for _ in range(2):
                if mode is AutoresetMode.DISABLED:
                    await envs.reset()
                got = await envs.step(np.zeros(3, np.int64))
                assert_same(got.obs[1], expected[0][1])
            envs.resume(1)
            if mode is AutoresetMode.DISABLED:
                continue  # it was reset with the others
            got, expected = await envs.step(np.zeros(3, np.int64)), theirs.step(np.zeros(3, np.int64))
            assert_same(got.obs[1], expected[0][1])
        theirs.close()


@pytest.mark.asyncio
async def test_images_of_render_workers_are_stacked():
    pixels = aioenv.RenderConfig(width=20, height=16, workers=1)
    kwargs = {"pixels": pixels, "max_episode_steps": 3, "autoreset_mode": "SameStep"}
    async with (
        FrameStack(aioenv.make_vec("InvertedPendulum-v5", 2, num_workers=1, **kwargs), 3) as envs,
        aioenv.make_vec("InvertedPendulum-v5", 2, num_workers=1, **kwargs) as theirs,
    ):
        assert envs.single_observation_space.shape == (3, 16, 20, 3)
        await envs.reset(seed=0)
        frames = [(await theirs.reset(seed=0)).obs] * 3
        for _ in range(7):
            got, expected = await envs.step(np.ones((2, 1))), await theirs.step(np.ones((2, 1)))
            if expected.truncated.all():
                assert_same(
                    got.info["final_obs"][1], np.stack([*(f[1] for f in frames[1:]), expected.info["final_obs"][1]])
                )
                frames = [expected.obs] * 3
            else:
                frames = [*frames[1:], expected.obs]
            assert_same(got.obs, np.stack(frames, axis=1))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stack_size": 2.0}, TypeError, "stack_size: expected an int, got 2.0"),
        ({"stack_size": True}, TypeError, "stack_size"),
        ({"stack_size": 0}, ValueError, "stack_size: expected a positive int, got 0"),
        ({"stack_size": 2, "padding_type": "rest"}, ValueError, "padding_type: expected 'reset', 'zero'"),
        ({"stack_size": 2, "padding_type": np.zeros(3)}, ValueError, "padding_type: expected 'reset', 'zero'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    envs = SyncVectorEnv(factories(PLAIN))
    with pytest.raises(error, match=message):
        FrameStackObservation(envs, **arguments)
    envs.close()


def test_observations_that_are_no_arrays_are_refused():
    envs = SyncVectorEnv(factories(PLAIN))
    envs.single_observation_space = spaces.Dict({"text": spaces.Text(3)})
    with pytest.raises(TypeError, match="expected an observation space of arrays"):
        FrameStackObservation(envs, 2)
    envs.close()


@pytest.mark.asyncio
async def test_infos_in_lists_are_refused():
    """They would hide which slots have a last observation, and which are paused."""
    made = aioenv.make_vec("CartPole-v1", 2, num_workers=0, autoreset_mode="SameStep")
    async with FrameStack(VectorWrapper(made, DictInfoToList), 2) as envs:
        with pytest.raises(TypeError, match="expected infos as a dict, got a list: put DictInfoToList around it"):
            await envs.reset(seed=0)


class Kept(Told):
    def get_state(self):
        return self.episode, self.t

    def set_state(self, state):
        self.episode, self.t = state


@MODES
@pytest.mark.parametrize("before", range(1, 6))
@pytest.mark.asyncio
async def test_a_stack_begins_with_the_first_observation_after_a_state_was_set(mode, before):
    async def steps(envs, count):
        found = []
        for _ in range(count):
            obs, _, terminated, truncated, info = await envs.step(np.zeros(3, np.int64))
            found.append((obs, info.get("final_obs")))
            ended = terminated | truncated
            if mode is AutoresetMode.DISABLED and ended.any():
                await envs.reset(options={"reset_mask": ended})
        return found

    def make():
        env_fns = [partial(Kept, slot, PLAIN) for slot in range(3)]
        return FrameStack(aioenv.AsyncVectorEnv(env_fns, num_workers=0, autoreset_mode=mode), 3)

    async with make() as envs:
        await envs.reset(seed=0)
        await steps(envs, before)
        states = await envs.unwrapped.get_state()
        today = await steps(envs, 8)
    async with make() as envs:
        await envs.unwrapped.set_state(states)
        tomorrow = await steps(envs, 8)
    first, final = tomorrow[0]
    for slot in range(3):
        begins_with = first if final is None or final[slot] is None else final
        assert_same(begins_with[slot], np.stack([begins_with[slot][-1]] * 3))
    for (mine, _), (theirs, _) in zip(tomorrow, today, strict=True):
        assert_same(mine[:, -1], theirs[:, -1])
    for (mine, _), (theirs, _) in zip(tomorrow[2:], today[2:], strict=True):
        assert_same(mine, theirs)
