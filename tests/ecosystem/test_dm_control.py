"""dm_control chooses its OpenGL when it is imported: it, and what is built on it, draws as in a process of its own."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import aioenv
from aioenv import sync
from tests.kits.process_kit import environment, run_alone

ENVS = {
    "shimmy": ("dm_control/cartpole-swingup-v0", {"render_kwargs": {"width": 64, "height": 48}}),
    "gym_aloha": ("gym_aloha/AlohaTransferCube-v0", {"obs_type": "pixels_agent_pos"}),
}
PACKAGES = pytest.mark.parametrize("package", ENVS)


def make(package):
    """Make an env of a package that only the worker imports."""
    importlib.import_module(package)
    import gymnasium as gym

    name, kwargs = ENVS[package]
    return gym.make(name, render_mode="rgb_array", **kwargs)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    pytest.importorskip("dm_control")
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def truth(package, gl, path):
    """What the env draws in a process of its own: its images after a reset."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    code = f"""
    import sys, importlib, numpy as np, gymnasium as gym
    importlib.import_module({package!r})
    name, kwargs = {ENVS[package]!r}
    images = []
    for seed in range(2):
        env = gym.make(name, render_mode="rgb_array", **kwargs)
        env.reset(seed=seed)
        images.append(env.render())
    np.save(sys.argv[1], images)
    """
    run_alone(code, str(path / "truth.npy"), env={**environment(), "MUJOCO_GL": gl})
    return np.load(path / "truth.npy")


@PACKAGES
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
@pytest.mark.parametrize("gl", ["egl", "osmesa"])
def test_it_draws_in_workers(package, gl, start, tmp_path, monkeypatch):
    """In the first vector env of a program, and in those after it; by MUJOCO_GL here, and of the workers alone."""
    expected = truth(package, gl, tmp_path)
    for given in (True, False, True):
        if not given:
            monkeypatch.setenv("MUJOCO_GL", gl)
        variables = {"MUJOCO_GL": gl} if given else None
        preload = [package] if given else []
        factories = [lambda: make(package)] * 2
        with sync.VectorEnv(factories, num_workers=2, start=start, worker_env=variables, preload=preload) as envs:
            envs.reset(seed=0)
            assert np.array_equal(np.stack(envs.render()), expected)


@PACKAGES
@pytest.mark.parametrize("kind", ["render", "pixels"])
def test_it_draws_where_the_backend_is_chosen_for_it(package, kind, tmp_path):
    expected = truth(package, "egl", tmp_path)
    config = aioenv.RenderConfig(backend="egl")
    with sync.VectorEnv([lambda: make(package)] * 2, num_workers=1, **{kind: config}) as envs:
        obs, _ = envs.reset(seed=0)
        assert np.array_equal(np.stack(envs.render()) if kind == "render" else obs, expected)
