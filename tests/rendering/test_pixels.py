"""Images as observations: those of `envs.render()`, wherever an observation goes, and spaces as Gymnasium has them."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import AddRenderObservation, GrayscaleObservation
from gymnasium.wrappers import __all__ as _wrappers

import aioenv
from aioenv import sync
from tests.kits.compare import same_observations
from tests.kits.mocap_kit import MocapEnv
from tests.kits.process_kit import environment, run_alone

assert "AddRenderObservation" in _wrappers
FAST = aioenv.RenderConfig(24, 20, quality="fast")
BESIDE = aioenv.RenderConfig(24, 20, quality="fast", render_only=False)
# both ways to have images as observations
PIXEL_WAYS = pytest.mark.parametrize("workers", [None, pytest.param(2, marks=pytest.mark.stress)], ids=["own", "pool"])


def actions_of(envs, steps, seed=0):
    envs.action_space.seed(seed)
    return [envs.action_space.sample() for _ in range(steps)]


def make_mocap():
    return MocapEnv()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("env", "camera", "quality", "backend", "workers"),
    [
        ("HalfCheetah-v5", None, "exact", "egl", None),
        (make_mocap, ["above", -1], "fast", "osmesa", None),
        (make_mocap, ["above", -1], "fast", "egl", 2),
        pytest.param("HalfCheetah-v5", None, "exact", "egl", 2, marks=pytest.mark.stress),
        pytest.param(make_mocap, "side", "exact", "osmesa", None, marks=pytest.mark.stress),
        pytest.param("Humanoid-v5", None, "exact", "egl", None, marks=pytest.mark.stress),
    ],
)
async def test_pixels_are_what_render_gives(env, camera, quality, backend, workers):
    """`envs.render()` is compared with `mujoco.Renderer` in test_rendering."""
    config = aioenv.RenderConfig(33, 27, camera, quality, workers=workers, backend=backend)
    shown = aioenv.RenderConfig(33, 27, camera, quality, workers=1, backend=backend)
    async with aioenv.make_vec(env, 3, pixels=config, render=shown, num_workers=2) as envs:
        shape = (2, 27, 33, 3) if isinstance(camera, list) else (27, 33, 3)
        assert envs.single_observation_space == gym.spaces.Box(0, 255, shape, np.uint8)
        first, _ = await envs.reset(seed=0)
        assert first.shape == (3, *shape) and first.dtype == np.uint8
        assert np.array_equal(first, await envs.render())
        for action in actions_of(envs, 3):
            obs, *_ = await envs.step(action)
            assert np.array_equal(obs, await envs.render())
        assert len(np.unique(obs)) > 20 and not np.array_equal(obs, first)


class ByKey(gym.ObservationWrapper):
    """An observation that is a Dict."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Dict({"where": env.observation_space})

    def observation(self, observation):
        return {"where": observation}


def cart(wrapper=None, **kwargs):
    env = gym.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=5)
    env = wrapper(env) if wrapper else env
    return AddRenderObservation(env, **kwargs) if kwargs else env


ALONE = {"render_only": True}
NAMED = {"render_only": False, "render_key": "image", "obs_key": "own"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("mode", "wrapper", "names"),
    [
        (AutoresetMode.NEXT_STEP, None, ALONE),
        (AutoresetMode.SAME_STEP, None, NAMED),
        (AutoresetMode.SAME_STEP, ByKey, {"render_only": False}),
        *(
            pytest.param(*case, marks=pytest.mark.stress)
            for case in (
                (AutoresetMode.SAME_STEP, None, ALONE),
                (AutoresetMode.DISABLED, None, ALONE),
                (AutoresetMode.NEXT_STEP, None, NAMED),
                (AutoresetMode.NEXT_STEP, ByKey, {"render_only": False}),
            )
        ),
    ],
)
async def test_envs_that_draw_themselves_are_as_with_gymnasiums_wrapper(mode, wrapper, names):
    theirs = SyncVectorEnv([lambda: cart(wrapper, **names)] * 2, autoreset_mode=mode)
    config = aioenv.RenderConfig(**names)
    envs = aioenv.AsyncVectorEnv([lambda: cart(wrapper)] * 2, pixels=config, autoreset_mode=mode, num_workers=1)
    async with envs:
        assert envs.observation_space == theirs.observation_space
        assert envs.single_observation_space == theirs.single_observation_space
        expected, _ = theirs.reset(seed=3)
        obs, _ = await envs.reset(seed=3)
        assert same_observations(obs, expected)
        for action in actions_of(envs, 7 if mode is not AutoresetMode.DISABLED else 5):
            expected = theirs.step(action)
            result = await envs.step(action)
            assert all(map(same_observations, result[:4], expected[:4]))
            assert ("final_obs" in result.info) == ("final_obs" in expected[4])
            if "final_obs" in expected[4]:
                assert all(map(same_observations, result.info["final_obs"], expected[4]["final_obs"]))
    theirs.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("transport", "workers"), [pytest.param("frames", None, marks=pytest.mark.stress), ("shared", None), ("shared", 2)]
)
async def test_wherever_an_observation_goes(transport, workers):
    """Resets, masks, send and recv, terminal observations: each image is that of a lock-step run."""
    config = aioenv.RenderConfig(24, 20, quality="fast", render_only=False, workers=workers)
    kwargs = {"pixels": config, "transport": transport, "num_workers": 2, "max_episode_steps": 4}
    async with aioenv.make_vec("HalfCheetah-v5", 4, **kwargs) as envs:
        space = envs.single_observation_space
        assert set(space) == {"state", "pixels"} and space["pixels"].shape == (20, 24, 3)
        actions = actions_of(envs, 6)
        first, _ = await envs.reset(seed=0)
        run = [first] + [(await envs.step(action)).obs for action in actions]
        assert not np.array_equal(run[1]["pixels"], run[2]["pixels"])
        # the same, slot by slot
        await envs.reset(seed=0)
        envs.send(actions[0][[2, 0]], [2, 0])
        ready = await envs.recv(2)
        assert ready.slots.tolist() == [0, 2]
        assert all(np.array_equal(ready.obs[key], run[1][key][[0, 2]]) for key in space)
        envs.send(actions[0][[1]], [1])
        assert np.array_equal((await envs.recv()).obs["pixels"], run[1]["pixels"][[1]])
        # a reset of one slot leaves the others' images as they were
        obs, _ = await envs.reset(seed=0, options={"reset_mask": np.array([False, True, False, False])})
        assert np.array_equal(obs["pixels"][[0, 2]], run[1]["pixels"][[0, 2]])
        assert np.array_equal(obs["pixels"][1], first["pixels"][1])
        for groups in (1, 2):
            await envs.reset(seed=0)
            rollout = await envs.rollout(Replay(actions), 6, groups=groups)
            assert all(np.array_equal(rollout.obs[key], np.stack([o[key] for o in run[:-1]])) for key in space)
            assert np.array_equal(rollout.last_obs["pixels"], run[-1]["pixels"])
    async with aioenv.make_vec("HalfCheetah-v5", 4, **kwargs, autoreset_mode="SameStep", copy=False) as envs:
        await envs.reset(seed=0)
        for t, action in enumerate(actions[:4]):
            obs, _, _, truncated, info = await envs.step(action)
            assert np.array_equal(obs["pixels"], run[t + 1]["pixels"]) == (t < 3)
        assert truncated.all()
        assert np.array_equal(np.stack([one["pixels"] for one in info["final_obs"]]), run[4]["pixels"])


class Replay:
    """A policy that gives each slot the actions of a list, one after the other."""

    def __init__(self, actions):
        self.actions = actions
        self.step = np.zeros(len(actions[0]), int)

    def __call__(self, obs, slots):
        step = self.step[slots[0]]
        self.step[slots] += 1
        return self.actions[step][slots]


def test_the_blocking_twin():
    with sync.make_vec("HalfCheetah-v5", 2, pixels=FAST, num_workers=1) as envs:
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (2, 20, 24, 3) and obs in envs.observation_space
        moved, *_ = envs.step(envs.action_space.sample())
        assert not np.array_equal(obs, moved)


class Tricky(MocapEnv):
    """Edits its model, takes a new one until its next reset, blows up, or raises, as it is told."""

    had = None

    def reset(self, *, seed=None, options=None):
        if self.had is not None:
            (self.model, self.data), self.had = self.had, None
        return super().reset(seed=seed, options=options)

    def step(self, action):
        match int(action[0]):
            case 1:
                self.model.geom_rgba[:] = (0, 0, 1, 1)
                self.model.cam_pos[:, 2] += 0.5
            case 2:
                self.had = self.had or (self.model, self.data)
                self.model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
                self.data = mujoco.MjData(self.model)
                return np.zeros(3), 0.0, False, False, {}
            case 3:
                self.data.qpos[:] = np.nan
                return np.zeros(3), 0.0, False, False, {}
            case 4:
                raise ValueError("no")
        return super().step(np.array([0.0, 0, 1]))


@pytest.mark.asyncio
async def test_edits_of_a_model_and_other_models_show_and_bad_states_do_no_harm():
    config = aioenv.RenderConfig(20, 20, "side", "fast")
    async with aioenv.make_vec(Tricky, 2, pixels=config, num_workers=1) as envs:

        async def step(what):
            obs, *_ = await envs.step(np.array([[what, 0, 0], [0, 0, 0]], float))
            return obs

        await envs.reset(seed=0)
        before = await step(0)
        assert np.array_equal(before[0], before[1])
        edited = await step(1)
        assert np.abs(edited[0].astype(int) - edited[1]).max() > 100
        with pytest.raises(aioenv.EnvError, match="slot 0") as info:
            await step(4)
        assert np.array_equal(info.value.partial.obs[0], edited[0])
        begun, _ = await envs.reset(seed=0)
        broken = await step(3)
        assert not np.array_equal(broken[0], broken[1])
        # the camera by that name is gone with the model
        with pytest.raises(aioenv.EnvError, match="no camera 'side'"):
            await step(2)
        # and is there again with the next one
        again, _ = await envs.reset(seed=0)
        assert np.array_equal(again, begun)
    async with aioenv.make_vec(Tricky, 2, pixels=FAST, num_workers=1) as envs:
        await envs.reset(seed=0)
        obs, *_ = await envs.step(np.array([[2.0, 0, 0], [0, 0, 0]]))
        assert not np.array_equal(obs[0], obs[1])


@pytest.mark.asyncio
@PIXEL_WAYS
async def test_a_worker_that_is_started_again_draws_again(workers):
    config = aioenv.RenderConfig(24, 20, quality="fast", workers=workers)
    policy = aioenv.RestartPolicy(resume=True, backoff_s=0.01)
    async with aioenv.make_vec("HalfCheetah-v5", 2, pixels=config, num_workers=2, restart=policy) as envs:
        actions = actions_of(envs, 4)
        await envs.reset(seed=0)
        run = [(await envs.step(action)).obs for action in actions]
        await envs.reset(seed=0)
        for t, action in enumerate(actions):
            if t == 2:
                os.kill(envs.workers[1].pid, signal.SIGKILL)
            assert np.array_equal((await envs.step(action)).obs, run[t])
        states = await envs.get_state()
        again = (await envs.step(actions[0])).obs
        await envs.set_state(states)
        assert np.array_equal((await envs.step(actions[0])).obs, again)


@pytest.mark.asyncio
async def test_render_workers_that_draw_observations():
    """Terminal images are whole observations here; what becomes of a cancelled step, and of a render worker's death."""
    runs = []
    for workers in (None, 1):
        config = aioenv.RenderConfig(24, 20, quality="fast", workers=workers)
        kwargs = {"num_workers": 2, "max_episode_steps": 2, "autoreset_mode": "SameStep", "wrappers": [Draws]}
        async with aioenv.make_vec("HalfCheetah-v5", 3, pixels=config, **kwargs) as envs:
            assert envs.observation_space == gym.spaces.Box(0, 255, (3, 20, 24, 3), np.uint8)
            actions = actions_of(envs, 4)
            run = [(await envs.reset(seed=0)).obs]
            for action in actions:
                result = await envs.step(action)
                run += [result.obs, *result.info.get("final_obs", [])]
            runs.append(run)
            if workers is None:
                # what an env draws for itself, in another context of the same process, leaves ours as it is
                assert (await envs.call("draw_itself"))[0].shape == (480, 480, 3)
                assert np.array_equal((await envs.reset(seed=0)).obs, run[0])
                continue
            step = asyncio.ensure_future(envs.step(actions[0]))
            await asyncio.sleep(0)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            while envs.outstanding:
                ready = await envs.recv()
                assert ready.obs.shape[1:] == (20, 24, 3) and ready.obs.any(axis=(1, 2, 3)).all()
            pid = envs._session._pixels_pool.pids[0]
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(aioenv.StepTimeout, match="no reply from render workers"):
                await envs.step(actions[0], timeout_s=0.5)
            os.kill(pid, signal.SIGCONT)
            assert (await envs.recv(3)).obs.any(axis=(1, 2, 3)).all()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aioenv.SlotError, match="could not be drawn: render worker 0"):
                for action in actions:  # it may take a moment to die
                    await envs.step(action)
    assert len(runs[0]) == 1 + 4 + 2 * 3 and all(map(np.array_equal, *runs))
    with pytest.raises(ValueError, match='observation_mode="same"'):
        aioenv.make_vec("HalfCheetah-v5", 1, pixels=config, observation_mode="different")
    with pytest.raises(ValueError, match="no camera 'nowhere'"):
        await aioenv.make_vec("HalfCheetah-v5", 1, pixels=aioenv.RenderConfig(8, 8, "nowhere", workers=1))


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["auto", "frames"])
async def test_other_slots_have_their_images_when_a_render_worker_dies(transport):
    config, actions = replace(FAST, workers=2), np.zeros((4, 6), np.float32)
    task = {"num_workers": 2, "max_episode_steps": 1, "autoreset_mode": "SameStep", "transport": transport}
    async with aioenv.make_vec("HalfCheetah-v5", 4, pixels=config, **task) as envs:
        await envs.reset(seed=0)
        whole = await envs.step(actions)
        await envs.reset(seed=0)
        os.kill(envs._session._pixels_pool.pids[1], signal.SIGKILL)
        with pytest.raises(aioenv.EnvError, match="could not be drawn: render worker 1") as caught:
            await envs.step(actions)
        errors, some = caught.value.errors, caught.value.partial
        assert [error.slots for error in errors] == [(1,), (3,)]
        assert not some.obs[1::2].any() and np.array_equal(some.obs[::2], whole.obs[::2])
        # all else they have
        assert np.array_equal(some.reward, whole.reward) and some.truncated.all()
        for slot, (image, expected) in enumerate(zip(some.info["final_obs"], whole.info["final_obs"], strict=True)):
            assert np.array_equal(image, np.zeros_like(expected) if slot % 2 else expected)
        with pytest.raises(aioenv.EnvError, match="slot 1"):
            await envs.step(actions)


@pytest.mark.asyncio
async def test_wrappers_that_draw_draw():
    """What a wrapper makes of a picture is not in the state: such an env draws itself."""
    async with aioenv.AsyncVectorEnv([Sepia], pixels=FAST) as envs:
        obs, _ = await envs.reset(seed=0)
        assert obs.shape == (1, 20, 24, 3) and not obs[..., 2].any() and obs[..., 0].any()
    async with aioenv.AsyncVectorEnv([Sepia], render=FAST, num_workers=1) as envs:
        await envs.reset(seed=0)
        images = await envs.render()
        assert images.shape == (1, 480, 480, 3) and not images[..., 2].any() and images[..., 0].any()


class Draws(gym.Wrapper):
    def draw_itself(self):
        return self.env.render()


class Sepia(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("HalfCheetah-v5", render_mode="rgb_array"))

    def render(self):
        return super().render() * np.array([1, 1, 0], np.uint8)


@pytest.mark.asyncio
async def test_what_can_not_be_is_refused():
    config = aioenv.RenderConfig(8, 8, camera="nowhere")
    with pytest.raises(ValueError, match=r"no camera 'nowhere'; it has \['track'\]"):
        await aioenv.make_vec("HalfCheetah-v5", 2, pixels=config)
    with pytest.raises(ValueError, match="render_mode=None"):
        await aioenv.AsyncVectorEnv([lambda: gym.make("CartPole-v1")], pixels=FAST)
    with pytest.raises(ValueError, match="render_key='where' is a key"):
        taken = aioenv.RenderConfig(8, 8, quality="fast", render_only=False, render_key="where")
        await aioenv.make_vec("HalfCheetah-v5", 1, wrappers=[ByKey], pixels=taken)
    with pytest.raises(aioenv.WorkerStartError, match="no such thing"):
        await aioenv.make_vec(fails_with_a_value_error, 1, pixels=FAST)
    with pytest.raises(ValueError, match="depth=True is for render="):
        aioenv.make_vec("HalfCheetah-v5", 1, pixels=aioenv.RenderConfig(8, 8, depth=True))
    with pytest.raises(TypeError, match=r"pixels: expected an aioenv\.RenderConfig"):
        aioenv.make_vec("HalfCheetah-v5", 1, pixels=True)


def fails_with_a_value_error():
    raise ValueError("no such thing")


@pytest.mark.asyncio
async def test_without_opengl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    with pytest.raises(aioenv.RenderError, match=r"glfw: (.|\n)*apt-get install libegl1"):
        await aioenv.make_vec("HalfCheetah-v5", 1, pixels=aioenv.RenderConfig(8, 8, backend="glfw"))


@pytest.mark.asyncio
@pytest.mark.stress
async def test_more_wrappers_go_on_top(monkeypatch):
    """The wrapper is an ordinary one: a spec with it makes the same env elsewhere."""
    async with aioenv.make_vec("HalfCheetah-v5", 1, pixels=FAST) as envs:
        obs, _ = await envs.reset(seed=0)
        spec = envs.spec
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM"):
        monkeypatch.setenv(name, "egl")
    async with aioenv.make_vec(lambda: GrayscaleObservation(gym.make(spec)), 1) as envs:
        grey, _ = await envs.reset(seed=0)
        assert grey.shape == (1, 20, 24)
        assert np.abs(grey - obs.mean(axis=-1)).mean() < 20


def test_workers_that_are_threads_draw_each_in_a_context_of_its_own():
    """And on a backend that works: MuJoCo's own choice hangs where there is no display."""
    code = """
import asyncio, os, aioenv, numpy as np
async def main():
    config = aioenv.RenderConfig(24, 20, quality="fast")
    runs = []
    for kwargs in ({"debug": True}, {}):
        async with aioenv.make_vec("HalfCheetah-v5", 4, pixels=config, num_workers=2, **kwargs) as envs:
            await envs.reset(seed=0)
            runs.append((await envs.step(np.ones((4, 6), np.float32))).obs)
    assert np.array_equal(*runs) and not np.array_equal(runs[0][0], runs[0][1])
    assert "MUJOCO_GL" not in os.environ  # nothing is decided for others
aioenv.run(main())
"""
    env = {name: value for name, value in environment().items() if name not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    run_alone(code, env=env)
