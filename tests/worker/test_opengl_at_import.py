"""Modules that choose how to draw when they are imported, as dm_control, PyOpenGL, pygame and matplotlib do."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.process.forkserver import AVAILABLE
from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import environment, run_alone

pytestmark = pytest.mark.usefixtures("own_fork_server")

needs_fork_server = pytest.mark.skipif(not AVAILABLE, reason="no fork server on this platform")

# a spawned worker is a process of its own: of these tests it has always passed all but one
STARTS = [start if start != "spawn" else pytest.param(start, marks=pytest.mark.stress) for start in START_METHODS]

# What dm_control does when it is imported (`dm_control._render`), and how its envs draw.
CHOOSES = '''
import importlib, os
import gymnasium as gym, numpy as np

AT_IMPORT = {name: os.environ.get(name) for name in NAMES}
FIRST
import mujoco
if AT_IMPORT["MUJOCO_GL"] in ("egl", "osmesa"):
    Context = importlib.import_module("mujoco." + AT_IMPORT["MUJOCO_GL"]).GLContext
else:
    Context = None  # GLFW's, which takes a display

XML = """<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size="1" rgba="1 0 0 1"/>
<camera name="c" pos="0 -4 0" xyaxes="1 0 0 0 0 1"/></worldbody></mujoco>"""


class Sphere(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def ask(self):
        return AT_IMPORT, os.getppid()

    def render(self):
        model = mujoco.MjModel.from_xml_string(XML)
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        gl = Context(24, 16)
        gl.make_current()
        scene, con = mujoco.MjvScene(model, 10), mujoco.MjrContext(model, 150)
        camera, image = mujoco.MjvCamera(), np.zeros((16, 24, 3), np.uint8)
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, con)
        mujoco.mjv_updateScene(model, data, mujoco.MjvOption(), None, camera, 7, scene)
        for _ in range(2):
            mujoco.mjr_render(mujoco.MjrRect(0, 0, 24, 16), scene, con)
        mujoco.mjr_readPixels(image, None, mujoco.MjrRect(0, 0, 24, 16), con)
        con.free()
        gl.free()
        return image
'''
GL_NAMES = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID")


@pytest.fixture
def chooses(tmp_path, monkeypatch):
    """Write such a module; its name. The parent has none of the variables."""
    for name in (*GL_NAMES, "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "modules").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def write(name: str = "chooses_at_import", first: str = "", names: tuple[str, ...] = GL_NAMES) -> str:
        source = CHOOSES.replace("NAMES", repr(names)).replace("FIRST", first)
        (tmp_path / "modules" / f"{name}.py").write_text(source)
        return name

    return write


def by_name(name):
    """Nothing about this factory tells the fork server what it will import."""

    def make():
        import importlib

        return importlib.import_module(name).Sphere()

    return make


def maps(pid):
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def by_id():
    """Register the env of such a module, as its package does: the fork server guesses what will be imported."""
    ids = []

    def register(name):
        ids.append(f"{name.replace('_', '')}-v0")
        gym.register(ids[-1], f"{name}:Sphere", disable_env_checker=True)
        return partial(gym.make, ids[-1])

    yield register
    for env_id in ids:
        del gym.registry[env_id]


def is_sphere(images):
    return images.shape[-3:] == (16, 24, 3) and (images[..., 8, 12, 0] > 60).all() and (images[..., 0, 0, :] == 0).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("gl", "by"), [("egl", "environ"), ("osmesa", "environ"), ("osmesa", "worker_env")])
async def test_they_see_at_import_what_a_process_of_their_own_would(chooses, by_id, monkeypatch, start, gl, by):
    name = chooses()
    known = by_id(name)
    worker_env = {"MUJOCO_GL": gl} if by == "worker_env" else None
    if by == "environ":
        monkeypatch.setenv("MUJOCO_GL", gl)
    for how in ("inside", "preload", "id"):
        kwargs = {"preload": [name]} if how == "preload" else {}
        factory = known if how == "id" else by_name(name)
        async with aioenv.AsyncVectorEnv(
            [factory] * 2, num_workers=2, start=start, worker_env=worker_env, **kwargs
        ) as e:
            await e.reset()
            for at_import, _ in await e.call("ask"):
                assert at_import["MUJOCO_GL"] == gl, how
                assert at_import["PYOPENGL_PLATFORM"] in (None, gl)
            assert is_sphere(np.stack(await e.call("render"))), how


@pytest.mark.asyncio
@needs_fork_server
async def test_vector_envs_of_several_backends_live_side_by_side(chooses):
    name = chooses()

    def some(gl, **kwargs):
        worker_env = {"MUJOCO_GL": gl, **kwargs} if gl else None
        return aioenv.AsyncVectorEnv([by_name(name)], start="forkserver", preload=[name], worker_env=worker_env)

    async with some("egl") as one, some("osmesa") as two, some(None) as three, some("egl") as four:
        async with some("egl", MUJOCO_EGL_DEVICE_ID="0") as five:
            told = [(await envs.call("ask"))[0] for envs in (one, two, three, four, five)]
            assert [at_import["MUJOCO_GL"] for at_import, _ in told] == ["egl", "osmesa", None, "egl", "egl"]
            assert told[4][0]["MUJOCO_EGL_DEVICE_ID"] == "0"
            servers = [server for _, server in told]
            assert servers[0] == servers[3] and len(set(servers)) == 4
            for envs in (one, two, four):
                await envs.reset()
                assert is_sphere(np.stack(await envs.call("render")))


@pytest.mark.asyncio
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", ["render", "pixels"])
async def test_where_the_backend_is_chosen_for_the_user(chooses, by_id, kind, start):
    """MUJOCO_GL is not set; `render=` and `pixels=` choose one for the workers."""
    name = chooses()
    config = aioenv.RenderConfig(24, 16)
    for factory in (by_name(name), by_id(name)):
        async with aioenv.make_vec(factory, 1, start=start, **{kind: config}) as envs:
            obs, _ = await envs.reset()
            assert is_sphere(await envs.render() if kind == "render" else obs)


@pytest.mark.asyncio
@needs_fork_server
async def test_envs_of_gymnasium_share_a_server_without_opengl(monkeypatch):
    """Whatever they will draw with: neither Gymnasium nor MuJoCo has to choose at import."""
    monkeypatch.delenv("MUJOCO_GL", raising=False)

    def some(worker_env=None):
        return aioenv.make_vec("InvertedPendulum-v5", 1, start="forkserver", worker_env=worker_env)

    def server_of(envs):
        (worker,) = envs.workers
        return int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[1])

    async with some() as one, some({"MUJOCO_GL": "egl"}) as two, some({"MUJOCO_GL": "osmesa"}) as three:
        servers = {server_of(envs) for envs in (one, two, three)}
        assert len(servers) == 1
    async with some({"MUJOCO_GL": "egl"}) as one:
        loaded = maps(server_of(one))
        assert "libmujoco" in loaded and "libEGL" not in loaded


@pytest.mark.asyncio
@needs_fork_server
async def test_what_one_vector_env_had_imported_is_not_what_another_draws_with(chooses):
    """The server of an env that MuJoCo's own variables say nothing to may be shared, until it has such a module."""
    name = chooses()
    plain = aioenv.make_vec("CartPole-v1", 1, start="forkserver", worker_env={"MUJOCO_GL": "osmesa"})
    async with plain, aioenv.AsyncVectorEnv([by_name(name)], start="forkserver", preload=[name]) as unset:
        assert (await unset.call("ask"))[0][0]["MUJOCO_GL"] is None
        worker_env = {"MUJOCO_GL": "egl"}
        async with aioenv.AsyncVectorEnv([by_name(name)], start="forkserver", worker_env=worker_env) as egl:
            assert (await egl.call("ask"))[0][0]["MUJOCO_GL"] == "egl"
            await egl.reset()
            assert is_sphere(np.stack(await egl.call("render")))


@pytest.mark.asyncio
@pytest.mark.parametrize("start", STARTS)
async def test_pyopengl_chooses_its_platform_by_the_same_variable(chooses, start):
    name = chooses("opengl_first", "import OpenGL.GL")
    worker_env = {"MUJOCO_GL": "egl"}
    for kwargs in ({"preload": [name]}, {}):
        async with aioenv.AsyncVectorEnv([by_name(name)], start=start, worker_env=worker_env, **kwargs) as envs:
            await envs.reset()
            assert is_sphere(np.stack(await envs.call("render")))


@pytest.mark.asyncio
@pytest.mark.parametrize("start", START_METHODS)
async def test_the_parents_choice_is_not_the_workers(chooses, monkeypatch, start):
    """Once it has drawn with EGL, MuJoCo has set PYOPENGL_PLATFORM, and it would not import OSMesa."""
    name = chooses()
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    worker_env = {"MUJOCO_GL": "osmesa"}
    async with aioenv.AsyncVectorEnv([by_name(name)], start=start, worker_env=worker_env) as envs:
        await envs.reset()
        assert is_sphere(np.stack(await envs.call("render")))
    arguments = {"start": start, "worker_env": worker_env, "render_mode": "rgb_array"}
    async with aioenv.make_vec("InvertedPendulum-v5", 1, width=24, height=16, **arguments) as envs:
        await envs.reset(seed=0)
        assert np.stack(await envs.call("render")).std() > 0
    for kind in ("render", "pixels"):
        async with aioenv.make_vec(
            by_name(name), 1, worker_env=worker_env, **{kind: aioenv.RenderConfig(24, 16)}
        ) as envs:
            obs, _ = await envs.reset()
            assert is_sphere(await envs.render() if kind == "render" else obs)
    async with aioenv.make_vec(
        "InvertedPendulum-v5", 1, worker_env=worker_env, pixels=aioenv.RenderConfig(24, 16)
    ) as e:
        assert (await e.reset(seed=0))[0].std() > 0


VARIABLES = {
    "SDL_VIDEODRIVER": "dummy",
    "MPLBACKEND": "agg",
    "PYGLET_HEADLESS": "1",
    "PYGLFW_LIBRARY_VARIANT": "x11",
    "OPENCV_LOG_LEVEL": "ERROR",
    "QT_QPA_PLATFORM": "offscreen",
    "WAYLAND_DISPLAY": "wayland-7",
}


@pytest.mark.asyncio
@needs_fork_server
async def test_other_libraries_that_read_variables_when_they_are_imported(chooses):
    name = chooses(names=("MUJOCO_GL", *VARIABLES))
    known = aioenv.AsyncVectorEnv([by_name(name)], start="forkserver", preload=[name])
    async with (
        known,
        aioenv.AsyncVectorEnv([by_name(name)], start="forkserver", preload=[name], worker_env=VARIABLES) as envs,
    ):
        assert (await envs.call("ask"))[0][0] == {"MUJOCO_GL": None, **VARIABLES}


@pytest.mark.asyncio
@needs_fork_server
@pytest.mark.parametrize("gl", ["disable", "off", "glfw"])
async def test_a_backend_that_mujoco_has_not_is_an_error_and_no_hang(gl):
    """With `disable` MuJoCo has no GLContext at all."""

    def make():
        env = gym.make("CartPole-v1")

        def shoot():
            import mujoco

            mujoco.GLContext(8, 8)

        env.unwrapped.shoot = shoot
        return env

    worker_env = {"MUJOCO_GL": gl}
    async with aioenv.AsyncVectorEnv([make], start="forkserver", worker_env=worker_env, timeout_s=20) as envs:
        if gl == "glfw":
            return  # it may draw or not
        with pytest.raises(aioenv.EnvError, match="GLContext"):
            await envs.call("shoot")


def test_the_parent_that_has_drawn(tmp_path):
    """The same from the beginning, in a program of its own."""
    code = """
    import os, aioenv, aioenv.sync, gymnasium as gym, numpy as np
    env = gym.make("InvertedPendulum-v5", render_mode="rgb_array", width=24, height=16)
    env.reset(seed=0)
    own = env.render()
    assert os.environ["PYOPENGL_PLATFORM"] == "egl"
    arguments = dict(render_mode="rgb_array", width=24, height=16)
    for worker_env in ({"MUJOCO_GL": "osmesa"}, None, {"MUJOCO_GL": "osmesa"}):
        with aioenv.sync.make_vec("InvertedPendulum-v5", 1, worker_env=worker_env, **arguments) as envs:
            envs.reset(seed=0)
            assert np.abs(envs.render()[0].astype(int) - own).max() < 20
    """
    env = {name: value for name, value in environment().items() if name not in GL_NAMES}
    run_alone(code, env={**env, "MUJOCO_GL": "egl"})
