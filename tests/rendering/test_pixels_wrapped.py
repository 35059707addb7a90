"""`pixels=` over envs with observation wrappers: those of images apply to them, and none is lost in silence."""

from __future__ import annotations

import logging
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import (
    DelayObservation,
    FlattenObservation,
    FrameStackObservation,
    GrayscaleObservation,
    NormalizeObservation,
    ResizeObservation,
    TimeAwareObservation,
    TransformObservation,
)

import aioenv
from aioenv import sync

CONFIG = aioenv.RenderConfig(width=24, height=16)


class Drawn(gym.Env):
    """Draws how many steps there were, and observes other images."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = spaces.Discrete(2)
    render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros((8, 8, 3), np.uint8), {}

    def step(self, action):
        self.time += 1
        return np.full((8, 8, 3), 200, np.uint8), 1.0, self.time == 4, False, {}

    def render(self):
        return np.full((16, 24, 3), self.time * 10, np.uint8)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("how", ["factory", "wrappers"])
def test_a_stack_is_one_of_images(mode, how):
    stack = partial(FrameStackObservation, stack_size=3)
    kwargs = {"pixels": CONFIG, "autoreset_mode": mode, "num_workers": 1}
    made = (lambda: stack(Drawn())) if how == "factory" else Drawn
    with sync.make_vec(made, 2, wrappers=[stack] * (how == "wrappers"), **kwargs) as envs:
        assert envs.single_observation_space == spaces.Box(0, 255, (3, 16, 24, 3), np.uint8)
        obs, _ = envs.reset(seed=1)
        seen = [obs[0, :, 0, 0, 0].tolist()]
        for _ in range(6):
            obs, _, terminated, _, info = envs.step(np.zeros(2, np.int64))
            seen.append(obs[0, :, 0, 0, 0].tolist())
            if mode == "SameStep" and terminated[0]:
                assert info["final_obs"][0][:, 0, 0, 0].tolist() == [20, 30, 40]
    start = [[0, 0, 0], [0, 0, 10], [0, 10, 20], [10, 20, 30]]
    assert seen == [*start, *([[20, 30, 40]] if mode == "NextStep" else []), *start][:7]


def test_of_a_mujoco_env():
    """The images are those that there are without a stack."""
    actions = np.full((2, 6), 0.4, np.float32)
    kwargs = {"pixels": CONFIG, "num_workers": 1}
    with sync.make_vec("HalfCheetah-v5", 2, **kwargs) as plain:
        images = [plain.reset(seed=3)[0], *(plain.step(actions)[0] for _ in range(3))]
        drawn_by = plain._envs._session.worker_pool.drawn_by
    with sync.make_vec("HalfCheetah-v5", 2, wrappers=[partial(FrameStackObservation, stack_size=2)], **kwargs) as envs:
        assert envs._envs._session.worker_pool.drawn_by == drawn_by != ""
        before = envs.reset(seed=3)[0]
        for t in range(3):
            obs = envs.step(actions)[0]
            assert (
                (obs[:, 0] == images[t]).all()
                and (obs[:, 1] == images[t + 1]).all()
                and (before[:, 1] == images[t]).all()
            )
            before = obs


def test_wrappers_that_refuse_the_states():
    """`GrayscaleObservation` takes images alone, so it is never put around the env's own observations."""
    actions = np.full((2, 6), 0.4, np.float32)
    kwargs = {"pixels": CONFIG, "num_workers": 1}
    with sync.make_vec("HalfCheetah-v5", 2, **kwargs) as plain:
        images = [plain.reset(seed=3)[0], *(plain.step(actions)[0] for _ in range(2))]
    gray = [np.sum(np.multiply(image, [0.2125, 0.7154, 0.0721]), axis=-1).astype(np.uint8) for image in images]
    wrappers = [GrayscaleObservation, partial(FrameStackObservation, stack_size=3)]
    with sync.make_vec("HalfCheetah-v5", 2, wrappers=wrappers, **kwargs) as envs:
        assert envs.single_observation_space.shape == (3, 16, 24)
        envs.reset(seed=3)
        envs.step(actions)
        assert (envs.step(actions)[0] == np.stack(gray, axis=1)).all()
        assert envs._envs._session.worker_pool.drawn_by != ""
    config = aioenv.RenderConfig(width=24, height=16, workers=1)
    with pytest.raises(ValueError, match=r"pixels: GrayscaleObservation, FrameStackObservation .*workers=None"):
        sync.make_vec("HalfCheetah-v5", 1, wrappers=wrappers, pixels=config)


@pytest.mark.parametrize(
    ("wrap", "shape"),
    [
        (GrayscaleObservation, (16, 24)),
        (lambda env: GrayscaleObservation(env, keep_dim=True), (16, 24, 1)),
        (lambda env: FrameStackObservation(GrayscaleObservation(env), 4), (4, 16, 24)),
        (lambda env: DelayObservation(env, 2), (16, 24, 3)),
        (
            lambda env: FrameStackObservation(TransformObservation(env, np.array, env.observation_space), 2),
            (2, 16, 24, 3),
        ),
    ],
    ids=["gray", "gray-keep", "gray-stack", "delay", "through-another"],
)
def test_wrappers_of_images(wrap, shape):
    with sync.VectorEnv([lambda: wrap(Drawn())] * 2, pixels=CONFIG, num_workers=1) as envs:
        assert envs.single_observation_space.shape == shape
        envs.reset(seed=1)
        obs = [envs.step(np.zeros(2, np.int64))[0] for _ in range(3)][-1]
        assert obs.shape == (2, *shape) and obs.max() == (10 if shape == (16, 24, 3) else 30)


def test_resized():
    pytest.importorskip("cv2")
    with sync.VectorEnv([lambda: ResizeObservation(Drawn(), (4, 6))] * 2, pixels=CONFIG, num_workers=1) as envs:
        assert envs.reset()[0].shape == (2, 4, 6, 3)


def test_beside_images_the_envs_own_stay_as_they_are():
    config = aioenv.RenderConfig(width=24, height=16, render_only=False)
    with sync.VectorEnv([lambda: FrameStackObservation(Drawn(), 2)] * 2, pixels=config, num_workers=1) as envs:
        shapes = {key: space.shape for key, space in envs.single_observation_space.spaces.items()}
        assert shapes == {"state": (2, 8, 8, 3), "pixels": (16, 24, 3)}


def test_render_workers_can_not():
    config = aioenv.RenderConfig(width=24, height=16, workers=1)
    with pytest.raises(ValueError, match=r"pixels: FrameStackObservation .*RenderConfig\(workers=None\)"):
        sync.make_vec("HalfCheetah-v5", 1, wrappers=[partial(FrameStackObservation, stack_size=2)], pixels=config)


def test_a_padding_that_is_no_image():
    wrap = partial(FrameStackObservation, stack_size=2, padding_type=np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(
        ValueError, match=r"pixels: FrameStackObservation can't be put around the images: .*padding_type"
    ):
        sync.VectorEnv([lambda: wrap(Drawn())], pixels=CONFIG)


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (NormalizeObservation, "NormalizeObservation"),
        (lambda env: TimeAwareObservation(gym.wrappers.TimeLimit(env, 9)), "TimeAwareObservation"),
        (
            lambda env: FlattenObservation(TimeAwareObservation(gym.wrappers.TimeLimit(env, 9), flatten=False)),
            "FlattenObservation, TimeAwareObservation",
        ),
    ],
    ids=["normalize", "time", "both"],
)
def test_what_images_replace_is_said_once(wrap, name, caplog):
    with caplog.at_level(logging.WARNING, "aioenv.workers"):
        with sync.VectorEnv([lambda: wrap(Drawn())] * 3, pixels=CONFIG, num_workers=1) as envs:
            envs.reset(seed=1)
    said = [record.getMessage() for record in caplog.records if "pixels:" in record.getMessage()]
    assert len(said) == 1 and f"what {name} made of them" in said[0] and "render_only=False" in said[0]


def test_of_plain_envs_nothing_is_said(caplog):
    with caplog.at_level(logging.WARNING, "aioenv.workers"):
        with sync.make_vec("HalfCheetah-v5", 1, pixels=CONFIG) as envs:
            envs.reset(seed=1)
    assert not [record for record in caplog.records if "pixels:" in record.getMessage()]
