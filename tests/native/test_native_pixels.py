"""NativeVectorEnv: images as observations, those of `backend="workers"` pixel by pixel, wherever they go."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import sync
from aioenv.rendering.step_pool import StepRenderPool
from tests.kits.compare import same_observations
from tests.kits.native_kit import Hindered, Pendulums

TASK = "HalfCheetah-v5"
FAST = aioenv.RenderConfig(24, 20, quality="fast", workers=2)
BESIDE = aioenv.RenderConfig(24, 20, quality="fast", render_only=False, workers=1)
NAMED = aioenv.RenderConfig(
    16, 12, ["track", -1], quality="fast", render_only=False, render_key="image", obs_key="own", workers=1
)
HERE, SPLIT = {}, {"num_workers": 2}
PLACES = [HERE, SPLIT]
STRESSED = pytest.param(SPLIT, marks=pytest.mark.stress)
everywhere = pytest.mark.parametrize("where", PLACES, ids=["here", "workers"])


def actions_of(envs, steps):
    envs.action_space.seed(0)
    return [envs.action_space.sample() for _ in range(steps)]


def everything(result):
    """What a result has of observations: its own, and terminal ones."""
    ends = result.info.get("final_obs", ())
    return result.obs, {slot: obs for slot, obs in enumerate(ends) if obs is not None}


@pytest.mark.parametrize(
    ("task", "mode", "config", "places"),
    [
        (TASK, AutoresetMode.SAME_STEP, FAST, [HERE]),
        *(
            pytest.param(*case, marks=pytest.mark.stress)
            for case in (
                (TASK, AutoresetMode.SAME_STEP, FAST, [SPLIT]),
                (TASK, AutoresetMode.SAME_STEP, NAMED, PLACES),
                (TASK, AutoresetMode.NEXT_STEP, BESIDE, PLACES),
                (TASK, AutoresetMode.DISABLED, FAST, PLACES),
                *(
                    (f"{task}-v5", AutoresetMode.SAME_STEP, aioenv.RenderConfig(33, 27), PLACES)
                    for task in "Ant Humanoid Pusher Reacher Walker2d InvertedDoublePendulum".split()
                ),
            )
        ),
    ],
)
@pytest.mark.asyncio
async def test_observations_are_those_of_workers_that_draw(task, mode, config, places):
    """The workers draw their own envs there, from their own `MjData`: no code in common but the drawing itself."""
    alone = aioenv.RenderConfig(**{**vars(config), "workers": None})
    make = partial(aioenv.make_vec, task, 3, autoreset_mode=mode, max_episode_steps=3)
    async with make(pixels=alone, num_workers=1) as reference:
        run = [(await reference.reset(seed=[5, 6, 9])).obs]
        actions = actions_of(reference, 7)
        for action in actions:
            result = await reference.step(action)
            run.append(everything(result))
            if mode is AutoresetMode.DISABLED and result.truncated.any():
                mask = np.array([True, False, True])
                # the one that goes on must not be stepped: its episode is over, so it is reset by itself
                run.append((await reference.reset(seed=11, options={"reset_mask": mask})).obs)
                run.append((await reference.reset(seed=7, options={"reset_mask": ~mask})).obs)
        spaces = reference.single_observation_space, reference.observation_space
    if mode is AutoresetMode.SAME_STEP:
        assert sum(len(finals) for _, finals in run[1:]) >= 6
    for where in places:
        async with make(backend="native", pixels=config, **where) as envs:
            assert (envs.single_observation_space, envs.observation_space) == spaces
            expected = iter(run)
            assert same_observations((await envs.reset(seed=[5, 6, 9])).obs, next(expected))
            for action in actions:
                result = await envs.step(action)
                obs, finals = everything(result)
                expected_obs, expected_finals = next(expected)
                assert same_observations(obs, expected_obs) and obs in envs.observation_space
                assert same_observations(finals, expected_finals)
                if mode is AutoresetMode.DISABLED and result.truncated.any():
                    mask = np.array([True, False, True])
                    again = await envs.reset(seed=11, options={"reset_mask": mask})
                    assert same_observations(again.obs, next(expected))
                    again = await envs.reset(seed=7, options={"reset_mask": ~mask})
                    assert same_observations(again.obs, next(expected))
            assert not list(expected)


@everywhere
@pytest.mark.asyncio
async def test_wherever_an_observation_goes(where):
    """Sends and resets of some, states, cancelled steps, `render=` beside, rollouts: images of a lock-step run."""
    shown = aioenv.RenderConfig(24, 20, quality="fast", workers=1)
    async with aioenv.make_vec(TASK, 4, backend="native", pixels=BESIDE, render=shown, **where) as envs:
        actions = actions_of(envs, 4)
        run = [(await envs.reset(seed=0)).obs]
        for action in actions:
            run.append((await envs.step(action)).obs)
            assert np.array_equal(run[-1]["pixels"], await envs.render())
        assert len(np.unique(run[1]["pixels"][0])) > 20 and not np.array_equal(run[1]["pixels"], run[2]["pixels"])
        kept = [{key: array.copy() for key, array in obs.items()} for obs in run]
        envs.send_reset(seed=0)
        assert same_observations((await envs.recv(4)).obs, run[0])
        states = await envs.get_state()
        envs.send(actions[0])
        # one half, then the other
        first = await envs.recv(2, 2)
        second = await envs.recv(2)
        order = np.argsort(np.concatenate([first.slots, second.slots]))
        pixels = np.concatenate([first.obs["pixels"], second.obs["pixels"]])[order]
        assert np.array_equal(pixels, run[1]["pixels"])
        envs.send_reset([3, 1], seed=0)
        ready = await envs.recv(2)
        assert ready.slots.tolist() == [1, 3]
        assert all(np.array_equal(ready.obs[key], run[0][key][[1, 3]]) for key in run[0])
        # the others are as they were
        obs, _ = await envs.reset(seed=0, options={"reset_mask": np.array([True, False, False, False])})
        assert np.array_equal(obs["pixels"][[0, 1, 3]], run[0]["pixels"][[0, 1, 3]])
        assert np.array_equal(obs["pixels"][2], run[1]["pixels"][2])
        await envs.set_state(states)
        step = asyncio.ensure_future(envs.step(actions[0]))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert same_observations((await envs.recv(4)).obs, run[1])
        assert same_observations((await envs.step(actions[1])).obs, run[2])
        # some by themselves, while another is paused
        await envs.reset(seed=0)
        envs.pause([2])
        obs, *_, info = await envs.step(actions[0])
        moved = np.array([True, True, False, True])
        assert info["_active"].tolist() == moved.tolist()
        for key in run[0]:
            assert np.array_equal(obs[key][moved], run[1][key][moved])
            assert np.array_equal(obs[key][2], run[0][key][2])
        alone, *_ = await envs.step_at(1, actions[1][1])
        assert same_observations(alone, {key: array[1] for key, array in run[2].items()})
        obs, _ = await envs.reset(seed=0, options={"reset_mask": np.array([True, False, False, False])})
        assert np.array_equal(obs["pixels"], np.stack([run[i]["pixels"][s] for s, i in enumerate((0, 2, 0, 1))]))
        envs.resume_all()
        # results that were handed out stay unchanged
        assert all(map(same_observations, run, kept))
        if where:
            await envs.reset(seed=0)
            rollout = await envs.rollout(lambda obs, slots: actions[0][slots], 1, groups=2)
            assert np.array_equal(rollout.obs["pixels"], run[0]["pixels"][None])
            assert np.array_equal(rollout.last_obs["pixels"], run[1]["pixels"])


@pytest.mark.parametrize("where", [HERE, STRESSED], ids=["here", "workers"])
@pytest.mark.asyncio
async def test_render_workers_that_are_late_or_die(where):
    async with aioenv.make_vec(TASK, 2, backend="native", pixels=FAST, max_episode_steps=2, **where) as envs:
        (action,) = actions_of(envs, 1)
        await envs.reset(seed=0)
        pids = envs._session._pixels_pool.pids
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(aioenv.StepTimeout, match=r"no (reply|result) from render workers, though"):
            await envs.step(action, timeout_s=0.5)
        os.kill(pids[0], signal.SIGCONT)
        assert (await envs.recv(2)).obs.any(axis=(1, 2, 3)).all()
        os.kill(pids[0], signal.SIGSTOP)
        step = asyncio.ensure_future(envs.step(action))
        await asyncio.sleep(0)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(aioenv.EnvError, match="could not be drawn: render worker 0") as info:
            await step
        assert info.value.slots == ((0,) if where else (0, 1))
        obs, _, _, truncated, _ = info.value.partial
        assert not obs[0].any() and obs[1].any() and truncated.all()
        with pytest.raises(aioenv.EnvError, match="render worker 0"):
            await envs.reset(seed=0)


@pytest.mark.asyncio
async def test_closing_ends_a_step_that_waits_for_its_images():
    envs = await aioenv.make_vec(TASK, 2, backend="native", pixels=FAST)
    await envs.reset(seed=0)
    for pid in envs._session._pixels_pool.pids:
        os.kill(pid, signal.SIGSTOP)
    step = asyncio.ensure_future(envs.step(actions_of(envs, 1)[0]))
    while not envs._inprocess._requests.pixel_renderer.drawing:
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(envs.close())
    await asyncio.sleep(0)
    for pid in envs._session._pixels_pool.pids:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(aioenv.ClosedError):
        await step
    await closing


@pytest.mark.parametrize("mode", ["SameStep", pytest.param("NextStep", marks=pytest.mark.stress)])
@pytest.mark.asyncio
async def test_a_worker_that_is_started_again(mode):
    """The ends of lost episodes are told with the last images."""
    policy = aioenv.RestartPolicy(backoff_s=0.01)
    make = partial(aioenv.make_vec, TASK, 4, backend="native", pixels=BESIDE, num_workers=2, autoreset_mode=mode)
    async with make(restart=policy) as envs:
        actions = actions_of(envs, 3)
        await envs.reset(seed=0)
        last = await envs.step(actions[0])
        os.kill(envs.workers[0].pid, signal.SIGKILL)
        lost = await envs.step(actions[1])
        assert lost.truncated.tolist() == [True, True, False, False] == lost.info["restarted"].tolist()
        for slot in range(2):
            told = {key: array[slot] for key, array in lost.obs.items()}
            if mode == "SameStep":
                told = lost.info["final_obs"][slot]
            assert same_observations(told, {key: array[slot] for key, array in last.obs.items()})
        after = await envs.step(actions[2])
        assert after.obs["pixels"].any(axis=(1, 2, 3)).all() and not after.truncated.any()


@pytest.mark.stress
@pytest.mark.asyncio
async def test_a_worker_whose_slots_go_on():
    """The step that was lost with it ends episodes, and the one after it does not; with the same images."""
    make = partial(aioenv.make_vec, TASK, 2, backend="native", pixels=BESIDE, max_episode_steps=2)
    policy = aioenv.RestartPolicy(resume=True, backoff_s=0.01)
    async with make(num_workers=1, restart=policy, autoreset_mode="SameStep") as envs:
        actions = actions_of(envs, 3)
        runs = []
        for killed in (False, True):
            run = [await envs.reset(seed=0)]
            for t, action in enumerate(actions):
                if killed and t == 1:
                    os.kill(envs.workers[0].pid, signal.SIGKILL)
                run.append(await envs.step(action))
            runs.append([everything(result) for result in run])
        assert [len(finals) for _, finals in runs[0]] == [0, 0, 2, 0]
        for (obs, finals), (again, final_again) in zip(*runs, strict=True):
            assert same_observations(obs, again) and same_observations(finals, final_again)


class ByKey(gym.vector.VectorObservationWrapper):
    """Observations that are Dicts, of a dtype that is not the space's."""

    def __init__(self, num_envs):
        super().__init__(Hindered(num_envs))
        self.single_observation_space = gym.spaces.Dict({"where": self.env.single_observation_space})
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)

    def observations(self, observations):
        return {"where": observations.astype(np.float32)}


@pytest.mark.parametrize(
    "where", [pytest.param({"run_in": "inline"}, marks=pytest.mark.stress), STRESSED], ids=["here", "workers"]
)
@pytest.mark.asyncio
async def test_vector_envs_of_your_own(where):
    async with aioenv.NativeVectorEnv(ByKey, 2, pixels=BESIDE, **where) as envs:
        assert list(envs.single_observation_space) == ["pixels", "where"]
        obs, _ = await envs.reset(seed=1)
        assert obs in envs.observation_space and obs["where"].dtype == np.float64
        moved, *_ = await envs.step(np.ones((2, 1), np.float32))
        assert moved in envs.observation_space and not np.array_equal(obs["pixels"], moved["pixels"])
        with pytest.raises(aioenv.EnvError, match="as it was told"):
            await envs.step(np.full((2, 1), 2, np.float32))
        assert same_observations((await envs.reset(seed=1)).obs, obs)


class Ends(Pendulums):
    """SAME_STEP, where the states in which episodes ended are unknown."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.metadata = {**self.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}


@everywhere
@pytest.mark.asyncio
async def test_what_can_not_be_is_refused(where, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    make = partial(aioenv.make_vec, backend="native", **where)
    with pytest.raises(ValueError, match=r'no model and physics_states.*use backend="workers"'):
        await make("CartPole-v1", 2, pixels=FAST)
    if where:
        return
    with pytest.raises(ValueError, match="Ends has no final_physics_states"):
        await make(Ends, 2, pixels=FAST)
    with pytest.raises(ValueError, match="render_key='where' is a key"):
        await make(ByKey, 2, pixels=aioenv.RenderConfig(8, 8, render_only=False, render_key="where"))
    with pytest.raises(ValueError, match="no camera 'nowhere'"):
        await make(TASK, 2, pixels=aioenv.RenderConfig(8, 8, "nowhere"))
    with pytest.raises(aioenv.RenderError, match=r"glfw: (.|\n)*apt-get install libegl1"):
        await make(TASK, 1, pixels=aioenv.RenderConfig(8, 8, backend="glfw"))
    with pytest.raises(ValueError, match="depth=True is for render="):
        make(TASK, 1, pixels=aioenv.RenderConfig(8, 8, depth=True))
    with pytest.raises(TypeError, match=r"pixels: expected an aioenv\.RenderConfig"):
        make(TASK, 1, pixels=True)


@pytest.mark.asyncio
async def test_states_that_episodes_ended_in():
    async with aioenv.make_vec(TASK, 3, backend="native", autoreset_mode="SameStep", max_episode_steps=2) as envs:
        await envs.reset(seed=0)
        env = envs._inprocess._env.env.unwrapped
        with pytest.raises(ValueError, match=r"no episode has ended in \[1\], only in \[\]"):
            env.final_physics_states([1])
        await envs.step(np.zeros((3, 6), np.float32))
        await envs.reset(options={"reset_mask": np.array([False, True, False])})
        _, finals = everything(await envs.step(np.zeros((3, 6), np.float32)))
        now = env.physics_states()
        assert sorted(finals) == [0, 2] and env.final_physics_states([2, 0]).shape == (2, env.pool.state_size)
        assert not np.array_equal(env.final_physics_states([2, 0]), now[[2, 0]])
        with pytest.raises(ValueError, match=r"no episode has ended in \[1\], only in \[0, 2\]"):
            env.final_physics_states([0, 1])


@pytest.mark.asyncio
async def test_groups_draw_their_own_slots_while_some_are_paused(monkeypatch):
    asked = []
    submit = StepRenderPool.submit

    def note(pool, slots, *rest):
        asked.append(list(slots))
        return submit(pool, slots, *rest)

    def policy(obs, slots):
        return np.zeros((len(slots), 1), np.float32)

    monkeypatch.setattr(StepRenderPool, "submit", note)
    async with aioenv.make_vec("InvertedPendulum-v5", 5, backend="native", pixels=FAST) as envs:
        await envs.reset(seed=0)
        envs.pause([0])
        whole = await envs.rollout(policy, 2, groups=1)
        await envs.reset(seed=0)
        asked.clear()
        rollout = await envs.rollout(policy, 2, groups=2)
        look, *groups = asked
        assert look == [0, 1, 2, 3, 4] and sorted(groups) == [[1, 2]] * 2 + [[3, 4]] * 2
        assert np.array_equal(rollout.obs, whole.obs) and rollout.obs[:, 0].any()  # it stands still, and is seen
        asked.clear()
        obs, *_ = await envs.step(np.zeros((5, 1), np.float32))
        assert obs[0].any() and asked == [[0, 1, 2, 3, 4]]


@pytest.mark.asyncio
@pytest.mark.parametrize("where", [HERE, {"num_workers": 1}], ids=["here", "workers"])
@pytest.mark.parametrize("leaves_out", ["mask", "pause"])
async def test_images_of_slots_put_into_a_state_stay_until_they_are_stepped_as_observations_do(where, leaves_out):
    async with aioenv.make_vec(TASK, 2, backend="native", pixels=BESIDE, render=BESIDE, **where) as envs:
        await envs.reset(seed=0)
        states = await envs.get_state()
        for actions in actions_of(envs, 3):
            last = (await envs.step(actions)).obs
        await envs.set_state(states[:1], [1])
        if leaves_out == "mask":
            seen = (await envs.reset(options={"reset_mask": np.array([True, False])})).obs
        else:
            envs.pause(1)
            seen = (await envs.step(actions)).obs
            envs.resume()
        assert all(np.array_equal(seen[key][1], last[key][1]) for key in last)
        assert np.array_equal(await envs.render(), seen["pixels"])
        seen = (await envs.step(actions)).obs
        assert not np.array_equal(seen["pixels"][1], last["pixels"][1])
        assert np.array_equal(await envs.render(), seen["pixels"])


def test_the_blocking_twin():
    one = aioenv.RenderConfig(24, 20, quality="fast", workers=1)
    with sync.make_vec(TASK, 2, backend="native", pixels=one) as envs:
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (2, 20, 24, 3) and obs in envs.observation_space
        moved, *_ = envs.step(envs.action_space.sample())
        assert not np.array_equal(obs, moved)
        assert envs.stats().env_s > 0
