"""`pixels=` over envs that draw themselves: the same from equal seeds, in the size that was asked for; and videos."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.mujoco.ant_v5 import AntEnv
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv
from gymnasium.envs.mujoco.mujoco_env import MujocoEnv

import aioenv
from aioenv import sync

needs_record_video = pytest.mark.skipif(
    not hasattr(gym.wrappers.vector, "RecordVideo"), reason="Gymnasium 1.2 has no RecordVideo of vector envs"
)
SMALL = {"render_mode": "rgb_array", "width": 32, "height": 24}


class Marked(AntEnv):
    """As a maze of Gymnasium-Robotics: a render of its own, and where its camera looks is fixed at its first image."""

    def render(self):
        return MujocoEnv.render(self).copy()


class Nested(gym.Env):
    """As an AntMaze: the env that has the renderer is within."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, **kwargs):
        self.ant_env = Marked(**kwargs)
        self.render_mode = "rgb_array"
        self.observation_space, self.action_space = self.ant_env.observation_space, self.ant_env.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.ant_env.reset(seed=seed)

    def step(self, action):
        return self.ant_env.step(action)

    def render(self):
        return self.ant_env.render()

    def close(self):
        self.ant_env.close()


class Drifting(gym.Env):
    """What it shows first it shows for ever, and it counts: its constructions, its resets and its images."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"
    open = 0

    def __init__(self, exclusive=False):
        self.exclusive = exclusive
        if exclusive and type(self).open:
            raise OSError("address already in use")
        type(self).open += 1
        self.resets = self.images = 0
        self.shown = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.colour = self.np_random.integers(256, size=3)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self):
        self.images += 1
        if self.shown is None:
            self.shown = self.colour
        image = np.zeros((4, 6, 3), np.uint8)
        image[:2], image[2:] = self.shown, self.colour
        return image

    def close(self):
        type(self).open -= 1

    def tell(self):
        return self.resets, self.images, type(self).open


class Alone(Drifting):
    pass


def one_ready():
    env = Drifting()
    return lambda: env


def run(make, n=2, workers=1, **kwargs):
    with sync.VectorEnv([make] * n, num_workers=workers, pixels=aioenv.RenderConfig(**kwargs)) as envs:
        obs = [envs.reset(seed=7)[0]]
        envs.action_space.seed(0)
        obs += [envs.step(envs.action_space.sample())[0] for _ in range(2)]
        return np.stack(obs)


def reference(make, n=2):
    """Images of Gymnasium's envs that were not asked for an image before."""
    of = []
    for slot in range(n):
        env = make()
        env.reset(seed=7 + slot)
        of.append(env.render())
        env.close()
    return np.stack(of)


@pytest.mark.parametrize("make", [Drifting, partial(Marked, **SMALL), partial(Nested, **SMALL)])
def test_the_same_seeds_give_the_same_images(make, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    size = {} if make is Drifting else {"width": 32, "height": 24}
    one, other = run(make, **size), run(make, workers=2, **size)
    assert np.array_equal(one, other)
    assert np.array_equal(one[0], reference(make))


def test_an_env_is_not_touched_before_its_first_reset():
    config = aioenv.RenderConfig()
    for make in (Drifting, partial(Alone, exclusive=True)):
        n = 2 if make is Drifting else 1
        with sync.VectorEnv([make] * n, num_workers=1, pixels=config) as envs:
            assert envs.call("tell") == ((0, 0, n),) * n
            envs.reset(seed=0)
            assert envs.call("tell") == ((1, 1, n),) * n
    with sync.VectorEnv([one_ready()], num_workers=1, pixels=config) as envs:  # which is there but once
        assert envs.reset(seed=0)[0].shape == (1, 4, 6, 3)


@pytest.mark.parametrize("make", [Marked, Nested])
def test_an_env_with_gymnasiums_renderer_draws_in_the_size_that_was_asked_for(make, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    images = run(partial(make, render_mode="rgb_array"), 1, width=40, height=30)
    assert images.shape == (3, 1, 30, 40, 3)
    assert np.array_equal(images[0], reference(partial(make, render_mode="rgb_array", width=40, height=30), 1))
    if make is Nested:
        return
    larger = run(partial(make, **SMALL), 1, width=64, height=48)
    assert larger.shape == (3, 1, 48, 64, 3) and len(np.unique(larger[0][0, :, :32])) > 20


def test_another_size_than_an_env_draws_is_refused():
    with pytest.raises(ValueError, match=r"pixels: this env draws itself, 6 x 4 pixels.* asked for width=8, height=4"):
        run(Drifting, width=8, height=4)
    with pytest.raises(ValueError, match=r"600 x 400 pixels.*make_vec.*RenderConfig"):
        sync.make_vec("CartPole-v1", 2, pixels=aioenv.RenderConfig(84, 84)).close()
    assert run(Drifting, width=6, height=4).shape == (3, 2, 4, 6, 3)


def recorded(envs, folder):
    return closing(
        gym.wrappers.vector.RecordVideo(envs, str(folder), video_length=3, step_trigger=lambda step: step == 0)
    )


ACTIONS = np.zeros((2, 6), np.float32)


@needs_record_video
@pytest.mark.parametrize(("camera", "workers"), [(None, None), (["track", None], None), (["track", None], 1)])
def test_a_video_is_of_the_observations(tmp_path, camera, workers):
    def make():
        return gym.make("HalfCheetah-v5")  # made without a render mode: nothing else would draw it

    config = aioenv.RenderConfig(32, 24, camera, "fast", workers=workers)
    with sync.VectorEnv([make] * 2, num_workers=2, pixels=config) as envs, recorded(envs, tmp_path / "v") as video:
        video.reset(seed=0)
        for _ in range(3):
            obs, *_ = video.step(ACTIONS)
            images = np.stack(envs.render())
            side_by_side = obs if camera is None else np.concatenate([obs[:, 0], obs[:, 1]], axis=2)
            assert np.array_equal(images, side_by_side)
            assert video.recorded_frames[-1].size == images.size
        video.step(ACTIONS)
    assert list(tmp_path.glob("v/*.mp4"))


@needs_record_video
@pytest.mark.parametrize("more", [{"depth": True}, {"segmentation": True, "camera": ["track", None]}, {"camera": [0]}])
def test_a_video_is_of_colours(tmp_path, more):
    """Whatever else is drawn: Gymnasium's wrappers take one picture a slot."""
    config = aioenv.RenderConfig(32, 24, quality="fast", **more)
    views = len(more.get("camera", "1"))
    with (
        sync.make_vec("HalfCheetah-v5", 2, num_workers=1, render=config) as envs,
        recorded(envs, tmp_path / "v") as video,
    ):
        video.reset(seed=0)
        for _ in range(3):
            video.step(ACTIONS)
        assert video.recorded_frames[-1].size == 2 * 24 * 32 * 3 * views
        images = envs.render()
        assert isinstance(images, tuple) and [image.shape for image in images] == [(24, 32 * views, 3)] * 2
        arrays = envs.render("arrays")
        colours = arrays[0] if {"depth", "segmentation"} & set(more) else arrays
        axes = (views,) if "camera" in more else ()
        assert colours.shape == (2, *axes, 24, 32, 3)
        assert np.array_equal(colours[:, 0] if axes else colours, np.stack(images)[:, :, :32])
        if "depth" in more:
            assert arrays[1].shape == (2, 24, 32) and arrays[1].dtype == np.float32
        video.step(ACTIONS)
    assert list(tmp_path.glob("v/*.mp4"))


def test_the_size_of_a_pendulum_with_a_render_of_its_own_that_draws_when_it_is_made(monkeypatch):
    """Its renderer can't be told any more: refused, not drawn in another size."""
    monkeypatch.setenv("MUJOCO_GL", "egl")

    class Eager(InvertedPendulumEnv):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.reset()
            self.render()

        def render(self):
            return MujocoEnv.render(self)

    with pytest.raises(ValueError, match="32 x 24 pixels"):
        run(partial(Eager, **SMALL), 1, width=40, height=30)
