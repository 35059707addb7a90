"""Envs of other packages: steps equal to SyncVectorEnv's, images equal to Gymnasium's and to `mujoco.Renderer`'s."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
import aioenv.sync
from tests.ecosystem.environments import make
from tests.kits.compare import assert_same

STEPS = 25
NUM_ENVS = 3

# 480 x 480 images of software OpenGL take their time; other packages warn of themselves, and Gymnasium of them
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def as_batch(envs, seeds):
    """A batch of actions of the vector env, seeded."""
    envs.action_space.seed(seeds)
    return [envs.action_space.sample() for _ in range(STEPS)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("mode", "start"),
    list(zip(AutoresetMode, ["forkserver", "spawn", "forkserver"], strict=True)),
    ids=lambda value: getattr(value, "value", value),
)
async def test_steps_are_those_of_sync_vector_env(task, mode, start):
    def assert_equal(got, expected, where):
        for result in (got, expected):  # infos that the package draws from a generator that no seed reaches
            for key in task.unseeded_infos:
                result[-1].pop(key, None), result[-1].pop(f"_{key}", None)
        assert_same(got, expected, where)

    factories = [functools.partial(make, task)] * NUM_ENVS
    theirs = SyncVectorEnv(factories, autoreset_mode=mode)
    try:
        async with aioenv.AsyncVectorEnv(factories, num_workers=2, autoreset_mode=mode, start=start) as ours:
            assert_equal(tuple(await ours.reset(seed=3)), theirs.reset(seed=3), "reset")
            over = np.zeros(NUM_ENVS, bool)
            for t, actions in enumerate(as_batch(theirs, 5)):
                if mode is AutoresetMode.DISABLED and over.any():
                    assert_equal(tuple(await ours.reset(seed=t)), theirs.reset(seed=t), f"reset at {t}")
                expected = theirs.step(actions)
                assert_equal(tuple(await ours.step(actions)), expected, f"step {t}")
                over = expected[2] | expected[3]
    finally:
        theirs.close()


def test_their_own_images_are_those_of_gymnasiums_async_vector_env(task):
    """In Gymnasium's own size, from envs that share a worker; Gymnasium has a process for each."""
    factories = [functools.partial(make, task, limit=4, render_mode="rgb_array")] * NUM_ENVS
    theirs = gym.vector.AsyncVectorEnv(factories, context="spawn", shared_memory=False)
    try:
        with aioenv.sync.AsyncVectorEnv(factories, num_workers=2, shared_memory=False) as ours:
            ours.reset(seed=3), theirs.reset(seed=3)
            for t, actions in enumerate(as_batch(ours, 5)[:7]):
                ours.step(actions), theirs.step(actions)
                if t % 3 == 0:
                    assert_same(list(ours.call("render")), list(theirs.call("render")), f"step {t}")
    finally:
        theirs.close()


class Truth(gym.Wrapper):
    """Draws what the env's model and data show now, with `mujoco.Renderer`, in the env's worker.

    The camera is the env's own. A free one looks at the middle of the model as it was made.
    """

    def __init__(self, env):
        super().__init__(env)
        import mujoco

        base = self.env.unwrapped
        renderer = getattr(base, "mujoco_renderer", None)
        self.max_geom = getattr(renderer, "max_geom", 10_000)
        self.camera = mujoco.MjvCamera()
        number = getattr(renderer, "camera_id", None)
        if number is not None and number >= 0:
            self.camera.type, self.camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, number
            return
        data = mujoco.MjData(base.model)
        mujoco.mj_forward(base.model, data)
        self.camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        self.camera.lookat[:] = np.median(data.geom_xpos, axis=0)
        self.camera.distance = base.model.stat.extent
        for key, value in (getattr(renderer, "default_cam_config", None) or {}).items():
            if np.ndim(value):
                getattr(self.camera, key)[:] = value
            else:
                setattr(self.camera, key, value)

    def truth(self, width, height, camera):
        import mujoco

        model, data = self.env.unwrapped.model, self.env.unwrapped.data
        spec = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(model, spec))
        mujoco.mj_getState(model, data, state, spec)
        fresh = mujoco.MjData(model)
        mujoco.mj_setState(model, fresh, state, spec)
        mujoco.mj_forward(model, fresh)
        with mujoco.Renderer(model, height, width, max_geom=self.max_geom) as renderer:
            renderer.update_scene(fresh, camera or self.camera)
            return renderer.render()


def make_with_truth(task, **kwargs):
    return Truth(make(task, **kwargs))


@pytest.mark.asyncio
async def test_images_of_the_model_are_those_of_mujoco_renderer(task):
    if task.images != "model" and not task.camera:
        pytest.skip("this env draws itself")
    factories = [functools.partial(make_with_truth, task)] * NUM_ENVS
    config = aioenv.RenderConfig(width=96, height=64, camera=task.camera or None)
    async with aioenv.AsyncVectorEnv(factories, num_workers=2, render=config) as envs:
        await envs.reset(seed=3)
        for t, actions in enumerate(as_batch(envs, 5)[:11]):
            await envs.step(actions)
            if t % 5 == 0 and t:
                images = await envs.render()
                truth = np.stack(await envs.call("truth", 96, 64, task.camera))
                assert (images == truth).all(), f"step {t}: {np.mean((images != truth).any(-1)):.1%} of pixels differ"


@pytest.mark.asyncio
async def test_images_of_steps_by_the_envs_themselves(task):
    """`render=` of envs that draw themselves: their `render()`."""
    if task.images != "own":
        pytest.skip("drawn from the env's model")
    factories = [functools.partial(make, task, render_mode="rgb_array")] * NUM_ENVS
    async with aioenv.AsyncVectorEnv(factories, num_workers=2, render=aioenv.RenderConfig()) as envs:
        await envs.reset(seed=3)
        for actions in as_batch(envs, 5)[:3]:
            await envs.step(actions)
            images = await envs.render()
            assert np.array_equal(images, np.stack(await envs.call("render")))


@pytest.mark.asyncio
async def test_pixels_repeat_from_the_seed(task):
    """Pixels as observations, of two runs with the same seeds, in the size that was asked for."""
    kwargs = {"render_mode": "rgb_array"} if task.images == "own" else {}
    if task.frame_stack:
        pytest.skip("pixels of an env with a frame stack are refused")
    factories = [functools.partial(make, task, limit=3, **kwargs)] * NUM_ENVS
    pixels = aioenv.RenderConfig() if task.images == "own" else aioenv.RenderConfig(width=64, height=48)
    runs = []
    for _ in range(2):
        async with aioenv.AsyncVectorEnv(factories, num_workers=2, pixels=pixels) as envs:
            obs, _ = await envs.reset(seed=3)
            seen = [obs]
            seen += [(await envs.step(actions)).obs for actions in as_batch(envs, 5)[:5]]
            runs.append(np.stack(seen))
    assert np.array_equal(*runs)
    if task.images == "model":
        assert runs[0].shape[2:] == (48, 64, 3)
