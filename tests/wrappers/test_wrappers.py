"""Wrappers of asynchronous vector envs: the results of Gymnasium's own around the blocking ones, bit for bit."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector

import aioenv
import aioenv.sync
from aioenv import wrappers
from aioenv.wrappers import NormalizeObservation, NormalizeReward, VectorWrapper
from tests.kits.compare import assert_same
from tests.kits.native_kit import Batch
from tests.kits.version_kit import needs_gymnasium, needs_mujoco_batch

SLOTS = 3
CONTINUOUS = ("Pendulum-v1", {"max_episode_steps": 7})
DISCRETE = ("CartPole-v1", {"max_episode_steps": 9})
WIDE = gym.spaces.Box(-1e9, 1e9, (4,), np.float32)
WHERE = {
    "workers": {"num_workers": 2},
    "in_process": {"num_workers": 0},
    "native": {"backend": "native", "one_generator": False},
    "native_workers": {"backend": "native", "one_generator": False, "num_workers": 2},
}


def halved(actions):
    return actions * np.float32(0.5)


def shifted(obs):
    return (obs + 1) * np.float32(3)


def squared(reward):
    return reward**2


CASES = {
    "NormalizeObservation": (DISCRETE, {}),
    "NormalizeReward": (CONTINUOUS, {"gamma": 0.9}),
    "RecordEpisodeStatistics": (DISCRETE, {"buffer_length": 5, "stats_key": "told"}),
    "ClipReward": (CONTINUOUS, {"min_reward": -5.0, "max_reward": -1.0}),
    "TransformReward": (CONTINUOUS, {"func": squared}),
    "TransformObservation": (DISCRETE, {"func": shifted, "single_observation_space": WIDE}),
    "FlattenObservation": (DISCRETE, {}),
    "DtypeObservation": (DISCRETE, {"dtype": np.float64}),
    "TransformAction": (CONTINUOUS, {"func": halved}),
    "ClipAction": (CONTINUOUS, {}),
    "RescaleAction": (CONTINUOUS, {"min_action": np.float32(-1), "max_action": np.float32(1)}),
}


def make(name, mode, where, **more):
    (env_id, kwargs), _ = CASES[name]
    how = {"num_workers": 2} if where.startswith("native") and env_id != "CartPole-v1" else WHERE[where]
    return aioenv.make_vec(env_id, SLOTS, autoreset_mode=mode, **kwargs, **how, **more)


def reference(name, mode):
    """Gymnasium's wrapper around Gymnasium's SyncVectorEnv."""
    (env_id, kwargs), arguments = CASES[name]
    envs = SyncVectorEnv([partial(gym.make, env_id, **kwargs)] * SLOTS, autoreset_mode=mode)
    return getattr(vector, name)(envs, **arguments)


def without_times(info):
    return {
        key: {inner: value for inner, value in told.items() if inner != "t"} if isinstance(told, dict) else told
        for key, told in info.items()
    }


def same(got, expected):
    assert_same(list(got[:-1]), list(expected[:-1]))
    assert_same(without_times(got[-1]), without_times(expected[-1]))


async def compare(envs, theirs, mode, steps=30):
    """The same seeds and actions for both; under DISABLED, resets with masks."""
    for space in ("observation_space", "single_observation_space", "action_space", "single_action_space"):
        assert getattr(envs, space) == getattr(theirs, space), space
    assert envs.metadata["autoreset_mode"] is mode and envs.autoreset_mode is mode
    same(await envs.reset(seed=[5, 6, 7]), theirs.reset(seed=[5, 6, 7]))
    theirs.action_space.seed(0)
    ends = 0
    for _ in range(steps):
        actions = theirs.action_space.sample()
        kept = actions.copy()
        result = await envs.step(actions)
        assert_same(actions, kept)
        same(result, theirs.step(actions.copy()))
        ended = result.terminated | result.truncated
        ends += ended.sum()
        if mode is AutoresetMode.DISABLED and ended.any():
            options = {"reset_mask": ended}
            same(await envs.reset(options=options), theirs.reset(options={"reset_mask": ended.copy()}))
            assert options == {"reset_mask": ended}, "it is the caller's"
    assert ends > SLOTS


@pytest.mark.asyncio
@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", CASES)
async def test_results_are_those_of_gymnasiums_wrapper(name, mode, where):
    arguments = CASES[name][1]
    try:
        theirs = reference(name, mode)
    except (ValueError, AssertionError) as refusal:
        with pytest.raises(type(refusal)) as error:
            await getattr(wrappers, name)(make(name, mode, where), **arguments)
        assert str(error.value) == str(refusal)
        return
    if name == "RecordEpisodeStatistics" and mode is AutoresetMode.DISABLED:
        pytest.skip("SyncVectorEnv takes the mask out of the options, and Gymnasium's wrapper resets all counts then")
    async with getattr(wrappers, name)(make(name, mode, where), **arguments) as envs:
        await compare(envs, theirs, mode)
    theirs.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in CASES if name != "NormalizeObservation"])
async def test_with_views_of_batches_and_masks(name):
    """The blocking vector env leaves the caller's options as they are, so counts of other slots stay in both."""
    mode, arguments = AutoresetMode.DISABLED, CASES[name][1]
    theirs = getattr(vector, name)(
        aioenv.sync.make_vec(CASES[name][0][0], SLOTS, autoreset_mode=mode, **CASES[name][0][1]), **arguments
    )
    async with getattr(wrappers, name)(make(name, mode, "workers", copy=False), **arguments) as envs:
        await compare(envs, theirs, mode)
    theirs.close()


@needs_mujoco_batch
@pytest.mark.asyncio
async def test_native_mujoco_tasks_in_a_stack():
    def stack(normalize_reward, normalize_observation, clip, envs):
        return clip(normalize_reward(normalize_observation(envs), gamma=0.95), -1.0, 1.0)

    kwargs = {"max_episode_steps": 10, "backend": "native"}
    theirs = stack(
        vector.NormalizeReward,
        vector.NormalizeObservation,
        vector.ClipReward,
        aioenv.sync.make_vec("HalfCheetah-v5", SLOTS, **kwargs),
    )
    envs = stack(
        NormalizeReward, NormalizeObservation, wrappers.ClipReward, aioenv.make_vec("HalfCheetah-v5", SLOTS, **kwargs)
    )
    async with envs:
        await compare(envs, theirs, AutoresetMode.NEXT_STEP, 40)
        assert_same(envs.env.env.obs_rms.mean, theirs.env.env.obs_rms.mean)
        assert repr(envs).startswith("<ClipReward, <NormalizeReward, <NormalizeObservation, <NativeVectorEnv")
    theirs.close()


@pytest.mark.parametrize("name", CASES)
def test_arguments_are_those_of_gymnasium(name):
    """By name and default; those of its wrapper, but for `env`."""
    theirs = list(inspect.signature(getattr(vector, name)).parameters.values())[1:]
    mine = list(inspect.signature(getattr(wrappers, name)).parameters.values())[1:]
    assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward", "ClipReward", "RecordEpisodeStatistics"])
def test_blocking_vector_envs_take_gymnasiums_wrappers(name):
    """They are vector envs of Gymnasium's kind."""
    theirs, (env_id, kwargs) = reference(name, AutoresetMode.NEXT_STEP), CASES[name][0]
    mine = getattr(vector, name)(aioenv.sync.make_vec(env_id, SLOTS, **kwargs), **CASES[name][1])
    same(mine.reset(seed=0), theirs.reset(seed=0))
    theirs.action_space.seed(0)
    for _ in range(25):
        actions = theirs.action_space.sample()
        same(mine.step(actions), theirs.step(actions))
    mine.close()
    theirs.close()


# ---------------------------------------------------------------- any wrapper


@pytest.mark.asyncio
async def test_any_wrapper_of_gymnasium():
    kwargs = {"min_obs": np.float32(-1), "max_obs": np.float32(1)}
    theirs = vector.RescaleObservation(gym.make_vec("MountainCar-v0", 2, vectorization_mode="sync"), **kwargs)
    envs = VectorWrapper(aioenv.make_vec("MountainCar-v0", 2, num_workers=0), vector.RescaleObservation, **kwargs)
    assert "RescaleObservation" in repr(envs)
    async with envs:
        assert envs.observation_space == theirs.observation_space
        same(await envs.reset(seed=0), theirs.reset(seed=0))
        same(await envs.step(np.array([2, 0])), theirs.step(np.array([2, 0])))
    theirs.close()


class Late(gym.vector.VectorWrapper):
    def step(self, actions):
        return self.env.step(actions + 1)


class Both(gym.vector.VectorActionWrapper):
    def step(self, actions):
        return super().step(actions)


@pytest.mark.asyncio
async def test_wrappers_that_change_actions_in_step_are_refused():
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=0) as envs:
        with pytest.raises(TypeError, match="a `step` of its own"):
            VectorWrapper(envs, Both)
        with pytest.raises(TypeError, match=r"expected a gymnasium.vector.VectorWrapper, got Batch"):
            VectorWrapper(envs, lambda env: Batch(2))
        late = VectorWrapper(envs, Late)
        await late.reset(seed=0)
        with pytest.raises(TypeError, match="derive it from gymnasium"):
            await late.step(np.zeros(2, np.int64))


class Twice(gym.vector.VectorWrapper):
    def step(self, actions):
        self.env.step(actions)
        return self.env.step(actions)


class StepsInReset(gym.vector.VectorWrapper):
    def reset(self, *, seed=None, options=None):
        self.env.reset(seed=seed, options=options)
        return *self.env.step(np.zeros(2, np.int64))[:1], {}


@pytest.mark.asyncio
async def test_wrappers_that_take_two_results_of_one_request_are_told():
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=0) as envs:
        await envs.reset(seed=0)
        with pytest.raises(TypeError, match=r"more than once.*aioenv\.sync\.make_vec"):
            await VectorWrapper(envs, Twice).step(np.zeros(2, np.int64))
        with pytest.raises(TypeError, match="more than once"):
            await VectorWrapper(envs, StepsInReset).reset(seed=0)


@pytest.mark.parametrize("name", ["RecordVideo", "HumanRendering"])
def test_wrappers_that_draw_are_refused(name, tmp_path):
    envs = aioenv.make_vec("CartPole-v1", 2, num_workers=0, render_mode="rgb_array")
    arguments = {"video_folder": str(tmp_path / "videos")} if name == "RecordVideo" else {}
    with pytest.raises(TypeError, match=rf"{name} calls render\(\).*aioenv\.record"):
        VectorWrapper(envs, getattr(vector, name), **arguments)
    assert not (tmp_path / "videos").exists()


@pytest.mark.asyncio
async def test_functions_that_make_a_wrapper_that_draws_are_refused():
    envs = aioenv.make_vec("CartPole-v1", 2, num_workers=0, render_mode="rgb_array")
    with pytest.raises(TypeError, match=r"HumanRendering calls render\(\)"):
        await VectorWrapper(envs, lambda envs: vector.HumanRendering(envs))
    assert envs.closed


@pytest.mark.asyncio
async def test_the_wrapper_may_have_arguments_of_any_name():
    envs = aioenv.make_vec("CartPole-v1", 2, num_workers=0)
    flat = gym.wrappers.FlattenObservation
    async with VectorWrapper(envs, vector.VectorizeTransformObservation, wrapper=flat) as wrapped:
        assert (await wrapped.reset(seed=0)).obs.shape == (2, 4)


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
async def test_rollouts_with_infos_in_lists(mode):
    def made():
        return aioenv.make_vec("CartPole-v1", 2, num_workers=0, max_episode_steps=3, autoreset_mode=mode)

    def policy(obs):
        return np.ones(len(obs), np.int64)

    async with made() as envs, VectorWrapper(made(), vector.DictInfoToList) as lists:
        await envs.reset(seed=0)
        assert (await lists.reset(seed=0)).info == [{}, {}]
        expected, rollout = await envs.rollout(policy, 7), await lists.rollout(policy, 7)
        assert_same(rollout.next_obs, expected.next_obs)
        assert_same(list(rollout.infos), list(expected.infos))
        envs.pause(0)
        lists.pause(0)
        assert isinstance((await lists.step(np.ones(2, np.int64))).info, list)
        await envs.step(np.ones(2, np.int64))
        expected, rollout = await envs.rollout(policy, 7), await lists.rollout(policy, 7)
        assert_same(rollout.valid, expected.valid)
    async with made() as envs, wrappers.ClipReward(VectorWrapper(made(), vector.DictInfoToList), -5.0) as around:
        for made_one in (envs, around):
            await made_one.reset(seed=0)
            made_one.pause(0)
        expected, rollout = await envs.rollout(policy, 7), await around.rollout(policy, 7)
        assert_same(rollout.valid, expected.valid)
        assert_same(rollout.next_obs[:, 1], expected.next_obs[:, 1])


def test_what_is_no_asynchronous_vector_env_is_refused():
    envs = gym.make_vec("CartPole-v1", 2)
    with pytest.raises(TypeError, match=r"it goes into the wrapper of gymnasium.wrappers.vector itself"):
        NormalizeReward(envs)
    envs.close()
    with pytest.raises(TypeError, match="got str"):
        NormalizeReward("CartPole-v1")


@pytest.mark.asyncio
@needs_gymnasium("1.4")
async def test_what_gymnasium_refuses_closes_the_vector_env_and_says_what_else_there_is():
    envs = aioenv.make_vec("CartPole-v1", 2, num_workers=1, autoreset_mode="SameStep")
    with pytest.raises(ValueError, match="NEXT_STEP") as error:
        await NormalizeObservation(envs)
    assert "aioenv.stats.NormalizeObservation" in error.value.__notes__[0]
    assert envs.closed
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=0) as running:
        with pytest.raises(gym.error.InvalidBound, match="epsilon"):
            NormalizeObservation(running, epsilon=-1.0)
        assert not running.closed, "its user started it"
        assert await running.reset(seed=0)


@pytest.mark.asyncio
async def test_resets_of_some_slots_are_refused_before_they_are_sent():
    async with NormalizeObservation(aioenv.make_vec("CartPole-v1", 2, num_workers=0)) as envs:
        await envs.reset(seed=0)
        count = envs.obs_rms.count
        with pytest.raises(ValueError, match="Nothing was sent"):
            await envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.obs_rms.count == count
        await envs.reset(options={"reset_mask": np.array([True, True])})
        assert envs.obs_rms.count == count + 2


# ---------------------------------------------------------------- start, attributes, refusals


@pytest.mark.asyncio
async def test_start_attributes_and_close():
    made = aioenv.make_vec("CartPole-v1", 2, num_workers=1, render_mode="rgb_array")
    envs = NormalizeReward(wrappers.RecordEpisodeStatistics(made))
    assert envs.num_envs == 2 and not envs.closed and envs.unwrapped is made
    with pytest.raises(RuntimeError, match="start it first"):
        _ = envs.observation_space
    for call in (lambda: envs.step(np.zeros(2, np.int64)), envs.recv):
        with pytest.raises(RuntimeError, match="start it first"):
            await call()
    assert (await envs) is envs
    assert (await envs) is envs
    assert envs.spec.id == "CartPole-v1" and envs.render_mode == "rgb_array" and len(envs.workers) == 1
    assert envs.gamma == 0.99 and envs.episode_count == 0 and not envs.outstanding
    assert await envs.get_attr("gravity") == (9.8, 9.8)
    await envs.reset(seed=0)
    assert (await envs.render()).shape == (2, 400, 600, 3)
    envs.pause(1)
    _, reward, *_, info = await envs.step(np.zeros(2, np.int64))
    assert reward[1] == 0 and info["_active"].tolist() == [True, False]
    envs.resume()
    for name in ("send", "recv_some", "episodes", "step_at", "set_state", "_backend"):
        assert not hasattr(envs, name), name
    with pytest.raises(AttributeError, match=r"has no send: it gives results of some slots.*use step\(\)"):
        envs.send(np.zeros(2, np.int64))
    with pytest.raises(AttributeError, match="has no set_state"):
        await envs.set_state([])
    await envs.close()
    await envs.close()
    assert made.closed and envs.closed
    for call in (lambda: envs.step(np.zeros(2, np.int64)), envs.recv, lambda: envs):
        with pytest.raises(aioenv.ClosedError):
            await call()


@pytest.mark.asyncio
async def test_a_running_vector_env_can_be_wrapped():
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=0) as made:
        envs = NormalizeReward(made)
        assert envs.observation_space == made.observation_space
        await envs.reset(seed=0)
        result = await envs.step(np.zeros(2, np.int64))
        assert isinstance(result, aioenv.StepResult) and result.reward.dtype == np.float64


@pytest.mark.asyncio
async def test_loops_around_wrapped_vector_envs(tmp_path):
    """Those of whole batches work; the others say what they lack."""
    shapes = []

    def policy(obs):
        shapes.append(obs.shape)
        return np.zeros(2, np.int64)

    async with wrappers.FrameStack(
        aioenv.make_vec("CartPole-v1", 2, num_workers=1, render_mode="rgb_array"), 3
    ) as envs:
        recording = await aioenv.record(envs, tmp_path / "out.mp4", steps=4, policy=policy)
    assert recording.path.stat().st_size and shapes == [(2, 3, 4)] * 4
    async with NormalizeReward(aioenv.make_vec("CartPole-v1", 2, num_workers=0)) as envs:
        with pytest.raises(AttributeError, match="has no episodes"):
            await aioenv.evaluate(envs, lambda obs: np.zeros(2, np.int64), 2)


# ---------------------------------------------------------------- states


async def trained(envs, steps=20):
    envs.action_space.seed(0)
    await envs.reset(seed=0)
    for _ in range(steps):
        result = await envs.step(envs.action_space.sample())
    return result


def normalized(num_envs=2):
    envs = aioenv.make_vec("Pendulum-v1", num_envs, num_workers=0, max_episode_steps=8)
    return NormalizeReward(NormalizeObservation(envs))


@pytest.mark.asyncio
async def test_states_go_with_the_policy(tmp_path):
    async with normalized() as envs:
        await trained(envs)
        state = pickle.loads(pickle.dumps(envs.state_dict()))
        np.savez(tmp_path / "stats.npz", **state)
        assert all(type(array) is np.ndarray for array in state.values())
        assert sorted(state) == [
            *(f"NormalizeObservation.obs_rms.{name}" for name in ("count", "mean", "var")),
            *(f"NormalizeReward.return_rms.{name}" for name in ("count", "mean", "var")),
        ]
        kept = {name: array.copy() for name, array in state.items()}
        mean = envs.env.obs_rms.mean.copy()
        await trained(envs)
        assert_same(state, kept, "the arrays are the caller's")
        assert not np.array_equal(envs.env.obs_rms.mean, mean)
    async with normalized(5) as others:  # another number of slots
        with np.load(tmp_path / "stats.npz") as file:
            others.load_state_dict(file)
        assert_same(others.state_dict(), kept)
        assert_same(others.env.obs_rms.mean, mean)
        others.update_running_mean = others.env.update_running_mean = False
        await trained(others)
        assert_same(others.state_dict(), kept, "frozen")
        others.update_running_mean = True
        await trained(others)
        assert others.return_rms.count > float(kept["NormalizeReward.return_rms.count"])
        assert_same(state, kept)


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["before the start", "after it"])
async def test_attributes_are_set_in_gymnasiums_wrapper(when):
    async with normalized() as envs:
        await trained(envs)
        statistics = envs.env.obs_rms
    others = NormalizeObservation(aioenv.make_vec("Pendulum-v1", 2, num_workers=0))
    clipped = VectorWrapper(aioenv.make_vec("Pendulum-v1", 2, num_workers=0), vector.NormalizeObservation)
    if when == "after it":
        await others
        await clipped
    others.obs_rms, others.mine, clipped.update_running_mean = statistics, "mine", False
    async with others, clipped:
        assert others.wrapper.obs_rms is others.obs_rms is statistics
        assert_same(others.state_dict()["NormalizeObservation.obs_rms.mean"], statistics.mean)
        assert others.mine == "mine" and not hasattr(others.wrapper, "mine")
        count = clipped.obs_rms.count
        await clipped.reset(seed=0)
        assert clipped.obs_rms.count == count and clipped.wrapper.update_running_mean is False


@pytest.mark.asyncio
async def test_two_wrappers_of_a_kind_and_wrong_states():
    async with NormalizeReward(normalized()) as envs:
        state = envs.state_dict()
        assert "NormalizeReward.return_rms.mean" in state and "NormalizeReward2.return_rms.mean" in state
        with pytest.raises(ValueError, match=r"state: expected \['NormalizeObservation.obs_rms.count'"):
            envs.load_state_dict({})
        with pytest.raises(ValueError, match=r"obs_rms.mean: expected shape \(3,\), got \(4,\)"):
            envs.load_state_dict({**state, "NormalizeObservation.obs_rms.mean": np.zeros(4)})
        assert_same(envs.state_dict(), state)
    async with wrappers.ClipReward(aioenv.make_vec("CartPole-v1", 2, num_workers=0), -1.0, 1.0) as envs:
        assert envs.state_dict() == {}
        envs.load_state_dict({})


# ---------------------------------------------------------------- rollouts


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
async def test_rollouts_are_wrapped(mode):
    """Row by row what `step` gives; the second one goes on where the first one stopped."""
    rng = np.random.default_rng(0)
    actions = rng.uniform(-2, 2, (30, 2, 1)).astype(np.float32)

    def wrapped():
        made = aioenv.make_vec("Pendulum-v1", 2, num_workers=2, max_episode_steps=7, autoreset_mode=mode)
        return NormalizeReward(wrappers.FrameStack(made, 3))

    rows, ended = [], np.zeros(2, bool)
    async with wrapped() as envs:
        obs, _ = await envs.reset(seed=0)
        for t in range(30):
            valid = ~ended if mode is AutoresetMode.NEXT_STEP else np.ones(2, bool)
            if mode is AutoresetMode.DISABLED and ended.any():
                obs, _ = await envs.reset(options={"reset_mask": ended})
            following, reward, terminated, truncated, info = await envs.step(actions[t])
            ended = terminated | truncated
            next_obs = following.copy()
            for slot in np.flatnonzero(info.get("_final_obs", [])):
                next_obs[slot] = info["final_obs"][slot]
            rows.append((obs, actions[t], reward, terminated, truncated, valid, next_obs))
            obs = following
    expected = list(map(np.stack, zip(*rows, strict=True)))
    calls = iter(range(30))

    def policy(obs):
        return actions[next(calls)], {"first": obs[:, 0, 0]}

    async with wrapped() as envs:
        await envs.reset(seed=0)
        one, two = await envs.rollout(policy, 11), await envs.rollout(policy, 19)
    for index, name in enumerate(("obs", "actions", "reward", "terminated", "truncated", "valid", "next_obs")):
        got = np.concatenate([getattr(one, name), getattr(two, name)])
        compared = expected[5] if name in ("next_obs",) else np.ones((30, 2), bool)
        assert_same(got[compared], expected[index][compared], name)
    assert_same(one.extras["first"], one.obs[:, :, 0, 0])
    assert_same(two.last_obs, obs)


def in_place(envs):
    return wrappers.TransformObservation(wrappers.ClipReward(envs, -1.0), tripled, single_observation_space=WIDE)


def tripled(obs):
    obs *= np.float32(3)
    return obs


def by_name(envs):
    single = gym.spaces.Dict({"all": WIDE, "pair": gym.spaces.Tuple([WIDE])})
    return wrappers.TransformObservation(envs, named, single_observation_space=single)


def named(obs):
    return {"all": obs, "pair": (obs + 1,)}


def overwrite(obs):
    """As a caller may, whose arrays they are."""
    for part in (obs["all"], *obs["pair"]) if isinstance(obs, dict) else [obs]:
        part[...] = 777


def take(obs, index):
    """Return one step of a rollout's observations."""
    if isinstance(obs, dict):
        return {key: take(part, index) for key, part in obs.items()}
    return tuple(take(part, index) for part in obs) if isinstance(obs, tuple) else obs[index]


@pytest.mark.parametrize(
    "wrap",
    [
        partial(wrappers.ClipReward, min_reward=-1.0),
        partial(wrappers.FrameStack, stack_size=2),
        by_name,
        in_place,
        lambda envs: wrappers.ClipReward(NormalizeReward(by_name(envs)), -1.0),
    ],
)
@pytest.mark.asyncio
async def test_a_rollout_begins_with_what_was_returned_whatever_the_caller_did_with_it(wrap):
    async with wrap(aioenv.make_vec("CartPole-v1", SLOTS, num_workers=0)) as envs:
        found = []
        for writes in (False, True):
            obs, _ = await envs.reset(seed=0)
            if writes:
                overwrite(obs)
            for _ in range(2):
                rollout = await envs.rollout(lambda obs: np.ones(SLOTS, np.int64), 3)
                if not writes:
                    assert_same(obs, take(rollout.obs, 0))
                found.append(rollout.obs)
                if writes:
                    overwrite(rollout.last_obs)
                result = await envs.step(np.zeros(SLOTS, np.int64))
                obs = result.obs
                if writes:
                    overwrite(obs)
        for got, expected in zip(found[2:], found[:2], strict=True):
            assert_same(got, expected)


@pytest.mark.asyncio
async def test_rollouts_need_an_observation_and_obey_masks():
    made = aioenv.make_vec("Pendulum-v1", 2, num_workers=0, max_episode_steps=4, autoreset_mode="NextStep")
    async with NormalizeObservation(made) as envs:
        with pytest.raises(aioenv.ResetNeededError):
            await envs.rollout(lambda obs: np.zeros((2, 1)), 3)
        await envs.reset(seed=0)
        with pytest.raises(aioenv.ActionError, match="rollout, group 0"):
            await envs.rollout(lambda obs: np.zeros((3, 1)), 3)
        with pytest.raises(ValueError, match="steps"):
            await envs.rollout(lambda obs: np.zeros((2, 1)), 0)
        envs.pause(0)
        rollout = await envs.rollout(lambda obs: np.zeros((2, 1)), 5)
        assert not rollout.valid[:, 0].any() and rollout.valid[:, 1].tolist() == [True] * 4 + [False]


# ---------------------------------------------------------------- cancellation


async def turns(n):
    for _ in range(n):
        await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("then", ["recv", "step"])
@pytest.mark.parametrize("where", ["workers", "in_process", "native", "native_workers"])
async def test_each_transition_is_counted_once_however_it_was_cancelled(where, then, caplog):
    """Steps are cancelled after 0, 1, … turns of the loop. Those that were sent count, others were never made."""
    stack = (wrappers.RecordEpisodeStatistics, NormalizeReward, NormalizeObservation)
    made = aioenv.make_vec("CartPole-v1", SLOTS, max_episode_steps=5, **WHERE[where])
    theirs = SyncVectorEnv([partial(gym.make, "CartPole-v1", max_episode_steps=5)] * SLOTS)
    envs = made
    for wrapper in stack:
        envs = wrapper(envs)
        theirs = getattr(vector, wrapper.__name__)(theirs)
    left = 0
    async with envs:
        same(await envs.reset(seed=0), theirs.reset(seed=0))
        theirs.action_space.seed(0)
        for number in range(24):
            actions = theirs.action_space.sample()
            task = asyncio.ensure_future(envs.step(actions))
            await turns(number % 6)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                same(task.result(), theirs.step(actions))
                continue
            if not made.outstanding:
                with pytest.raises(aioenv.NoAsyncCallError):
                    await envs.recv()
                continue
            left += 1
            expected = theirs.step(actions)
            if then == "recv":
                ready = await envs.recv()
                assert ready.slots.tolist() == [0, 1, 2]
                same(ready[1:], expected)
            else:
                actions = theirs.action_space.sample()
                same(await envs.step(actions), theirs.step(actions))
        assert_same(envs.obs_rms.mean, theirs.obs_rms.mean)
        assert envs.obs_rms.count == theirs.obs_rms.count
        assert_same(envs.return_rms.var, theirs.env.return_rms.var)
        assert envs.episode_count == theirs.env.env.episode_count > 0
        assert_same(list(envs.length_queue), list(theirs.env.env.length_queue))
    assert left > 3 or where in ("in_process", "native")
    theirs.close()


@pytest.mark.asyncio
async def test_a_cancelled_reset_of_some_slots():
    """`recv` has the result; slots that were not reset keep their stacks and their counts."""
    made = aioenv.make_vec("CartPole-v1", 3, num_workers=3, autoreset_mode="Disabled")
    async with wrappers.RecordEpisodeStatistics(wrappers.FrameStack(made, 2)) as envs:
        await envs.reset(seed=0)
        before = await envs.step(np.ones(3, np.int64))
        mask = np.array([False, True, False])
        task = asyncio.ensure_future(envs.reset(seed=7, options={"reset_mask": mask}))
        while not made.outstanding:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        ready = await envs.recv()
        first, _ = gym.make("CartPole-v1").reset(seed=8)
        assert ready.slots.tolist() == [0, 1, 2] and not ready.reward.any()
        assert_same(ready.obs[1], np.stack([first, first]))
        assert_same(ready.obs[[0, 2]], before.obs[[0, 2]])
        assert envs.episode_lengths.tolist() == [1, 0, 1]
        after = await envs.step(np.ones(3, np.int64))
        assert_same(after.obs[[0, 2], 0], before.obs[[0, 2], 1])
        assert_same(after.obs[1, 0], first)


@pytest.mark.asyncio
async def test_a_run_goes_on_bit_for_bit_with_states_and_statistics():
    def make():
        return wrappers.NormalizeObservation(aioenv.make_vec("HalfCheetah-v5", 4, num_workers=1))

    async with make() as envs:
        await envs.reset(seed=0)
        for _ in range(5):
            await envs.step(np.zeros((4, 6)))
        states, statistics = await envs.unwrapped.get_state(), envs.state_dict()
        today = await envs.step(np.ones((4, 6)))
    async with make() as envs:
        envs.load_state_dict(statistics)
        await envs.unwrapped.set_state(states)
        tomorrow = await envs.step(np.ones((4, 6)))
    assert (today.obs == tomorrow.obs).all()
