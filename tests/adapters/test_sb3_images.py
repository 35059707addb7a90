"""Images and videos of `aioenv.adapters.sb3`, for every way to draw."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types

import gymnasium as gym
import numpy as np
import pytest

import aioenv

INSTALLED = importlib.util.find_spec("stable_baselines3") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="Stable-Baselines3 is not installed")

SMALL = aioenv.RenderConfig(32, 24, quality="fast", workers=1)
make = functools.partial(gym.make, "HalfCheetah-v5")


def over(kind: str):
    from aioenv.adapters import sb3

    match kind:
        case "factories":
            return sb3.VecEnv([make] * 2, render=SMALL)
        case "env":
            return sb3.make_vec("HalfCheetah-v5", 2, render_mode="rgb_array", width=32, height=24)
        case "here":
            return sb3.make_vec("HalfCheetah-v5", 2, render_mode="rgb_array", width=32, height=24, num_workers=0)
        case "native":
            return sb3.make_vec("HalfCheetah-v5", 2, render=SMALL, backend="native")
    return sb3.make_vec("HalfCheetah-v5", 2, render=SMALL)


@pytest.mark.parametrize("kind", ["factories", "env", "here", "native", "beside"])
def test_videos_are_recorded_at_the_speed_of_the_envs(kind, monkeypatch, tmp_path):
    from stable_baselines3.common.vec_env import VecVideoRecorder

    if importlib.util.find_spec("moviepy") is None:  # which only writes the file
        monkeypatch.setitem(sys.modules, "moviepy", types.ModuleType("moviepy"))
    monkeypatch.setenv("MUJOCO_GL", "egl")  # for envs that draw themselves: there may be no display
    envs = over(kind)
    try:
        assert envs.render_mode == "rgb_array"
        assert envs.metadata["render_fps"] == 20 and "rgb_array" in envs.metadata["render_modes"]
        assert "autoreset_mode" not in envs.metadata
        recorder = VecVideoRecorder(envs, str(tmp_path), lambda step: step == 0, video_length=50)
        assert recorder.frames_per_sec == 20
        recorder.reset()
        recorder.step(np.zeros((2, 6), np.float32))
        assert [frame.shape for frame in recorder.recorded_frames] == [(48, 32, 3)] * 2
        assert recorder.recorded_frames[0].any()
        recorder.recorded_frames.clear()  # of which no file is wanted
        assert len(envs.get_images()) == 2
    finally:
        envs.close()


def test_nothing_is_drawn_unless_asked_for():
    from aioenv.adapters import sb3

    envs = sb3.make_vec("HalfCheetah-v5", 2, backend="native")
    try:
        assert envs.render_mode is None
        with pytest.warns(UserWarning, match="no `render_mode` was passed"):
            assert envs.render() is None
    finally:
        envs.close()
