"""Envs that draw themselves, in their workers, after their replies."""

from __future__ import annotations

import os
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv

import aioenv
import aioenv.sync


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_other_envs_draw_themselves_after_their_reply():
    config = aioenv.RenderConfig()
    async with aioenv.make_vec("CartPole-v1", 3, num_workers=2, render=config) as envs:
        await envs.reset(seed=0)
        for _ in range(3):
            await envs.step(np.ones(3, int))
        images = await envs.render()
        assert images.shape == (3, 400, 600, 3)
        assert np.array_equal(images, np.stack(await envs.call("render")))
        envs.send([0], [1])
        await envs.recv()
        assert np.array_equal(await envs.render(), np.stack(await envs.call("render")))


@pytest.mark.asyncio
@pytest.mark.parametrize("slot", [0, 1])
async def test_each_env_must_be_made_to_draw(slot):
    modes = ["rgb_array"] * 2
    modes[slot] = None
    factories = [partial(gym.make, "CartPole-v1", render_mode=mode) for mode in modes]
    with pytest.raises(aioenv.RenderError, match=f'takes render_mode="rgb_array"; got render_mode=None of slot {slot}'):
        await aioenv.AsyncVectorEnv(factories, num_workers=1, render=aioenv.RenderConfig())


def refuse():
    raise ImportError("not here")


class BadImage:
    """An image that does not pickle, or not unpickle in another process."""

    def __init__(self, pickles):
        self.pickles = pickles

    def __reduce__(self):
        if not self.pickles:
            raise TypeError("a bad image")
        return refuse, ()


class Moody(gym.Env):
    """Draws itself; its action tells it to fail in step, in render, or to die while it draws."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(6)
    render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        self.mood = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 1:
            raise ValueError("step")
        self.mood = action
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self):
        if self.mood == 2:
            raise ValueError("render")
        if self.mood == 3:
            os._exit(9)
        if self.mood > 3:
            return BadImage(self.mood == 5)
        return np.full((2, 2, 3), self.mood, np.uint8)


@pytest.mark.asyncio
@pytest.mark.parametrize("workers", [1, 2])
async def test_envs_that_fail_while_they_draw(workers):
    async with aioenv.make_vec(Moody, 2, num_workers=workers, render=aioenv.RenderConfig()) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match="slot 1"):
            await envs.step([0, 1])
        assert (await envs.render()).shape == (2, 2, 2, 3)
        await envs.reset()
        await envs.step([0, 2])
        with pytest.raises(aioenv.RenderError, match="slot 1 could not be rendered") as caught:
            await envs.render()
        assert caught.value.slots == (1,)
        assert np.array_equal(caught.value.partial[0], np.zeros((2, 2, 3))) and caught.value.partial[1:] == (None,)
        await envs.step([2, 2])
        with pytest.raises(
            aioenv.RenderError, match=r"slot [01] could not be rendered[\s\S]*there are no images of"
        ) as caught:
            await envs.render()
        assert caught.value.slots == (0, 1) and str(caught.value).endswith("(there are no images of slots [0, 1])")
        await envs.step([0, 0])
        assert (await envs.render()).shape == (2, 2, 2, 3)
        for mood, why in (
            (4, "can't be pickled"),
            (5, "its image does not unpickle in this process: ImportError: not here"),
        ):
            await envs.step([mood, 0])
            with pytest.raises(aioenv.RenderError, match="slot 0 could not be rendered") as caught:
                await envs.render()
            assert why in str(caught.value) and "slot 1" not in str(caught.value) and caught.value.slots == (0,)
            await envs.reset(options={"reset_mask": np.array([True, False])})  # of the other one it is known
            assert (await envs.render()).shape == (2, 2, 2, 3)
        await envs.step([0, 3])  # the reply was out before it died
        with pytest.raises(aioenv.RenderError, match="exited with code 9") as caught:
            await envs.render()
        assert caught.value.slots == ((0, 1) if workers == 1 else (1,))
        if workers == 1:
            assert caught.value.partial is None
        else:
            assert np.array_equal(caught.value.partial[0], np.zeros((2, 2, 3))) and caught.value.partial[1] is None


class Painted(HalfCheetahEnv):
    """A MuJoCo env with a render of its own, which may show anything."""

    def render(self):
        return np.full((4, 5, 3), 7, np.uint8)


@pytest.mark.parametrize("kind", ["render", "pixels"])
def test_what_an_env_draws_itself_and_what_its_cameras_see(kind):
    def images_of(camera):
        size = {"width": 24, "height": 16} if camera else {}
        kwargs = {kind: aioenv.RenderConfig(camera=camera, quality="fast", **size)}
        with aioenv.sync.make_vec(partial(Painted, render_mode="rgb_array"), 2, num_workers=1, **kwargs) as envs:
            obs, _ = envs.reset(seed=0)
            return np.stack(envs.render()) if kind == "render" else obs

    assert np.array_equal(images_of(None), np.full((2, 4, 5, 3), 7))
    images = images_of("track")
    assert images.shape == (2, 16, 24, 3) and len(np.unique(images)) > 20
    with pytest.raises((aioenv.RenderError, ValueError), match=r"or .* a render of .* own.*not with camera="):
        images_of(["track", None])


@pytest.mark.parametrize("gl", [None, "egl"])
def test_an_env_that_draws_without_opengl_is_told_what_to_do(monkeypatch, gl):
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    worker_env = {"MUJOCO_GL": gl} if gl else None
    arguments = {"num_workers": 1, "render_mode": "rgb_array", "worker_env": worker_env}
    with aioenv.sync.make_vec("InvertedPendulum-v5", 2, **arguments) as envs:
        envs.reset(seed=0)
        if gl:
            assert envs.render()[0].shape == (480, 480, 3)
            return
        for _ in range(2):  # by itself MuJoCo would end the worker, from the second image on
            with pytest.raises(aioenv.EnvError, match=r"MUJOCO_GL is '' here.*MUJOCO_GL=egl or osmesa") as failed:
                envs.render()
            assert failed.value.slots == (0, 1)
