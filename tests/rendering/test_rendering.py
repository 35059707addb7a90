"""Images: exact ones are mujoco.Renderer's pixel by pixel, and drawing never loses or mixes up a state."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import aioenv
from aioenv.rendering import config as qualities
from tests.kits.mocap_kit import MOCAP, STATE, make
from tests.kits.process_kit import environment, run_alone
from tests.kits.version_kit import version_of

# In a process of its own, as the two OpenGL backends can't live in one: draws states with mujoco.Renderer alone.
REFERENCE = """
import pickle, sys
import mujoco, numpy as np
model_bytes, config, states, width, height, camera, fast = pickle.loads(sys.stdin.buffer.read())
model = mujoco.MjModel.from_binary_path("m.mjb", {"m.mjb": model_bytes})
model.vis.global_.offwidth, model.vis.global_.offheight = max(width, 640), max(height, 480)
if fast:
    model.vis.quality.offsamples = 0
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
if camera is None:
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:] = np.median(data.geom_xpos, axis=0)
    camera.distance = model.stat.extent
    for key, value in config.items():
        if np.ndim(value):
            getattr(camera, key)[:] = value
        else:
            setattr(camera, key, value)
sizes = model.geom_size.copy()
if hasattr(model, "light_directional"):  # before MuJoCo 3.3.3
    directional = model.light_directional.all()
else:
    directional = (model.light_type == mujoco.mjtLightType.mjLIGHT_DIRECTIONAL).all()
if fast and directional:  # planes in 32 x 32 patches
    for plane in np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE):
        model.geom_size[plane, 2] = max(model.geom_size[plane, 2], max(model.geom_size[plane, :2]) / 16)
renderer = mujoco.Renderer(model, height, width)
model.geom_size[:] = sizes
if fast:
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
    renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
images = []
for state in [states[0], *states]:  # the first image of a context may differ
    mujoco.mj_setState(model, data, state, int(mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_forward(model, data)
    renderer.update_scene(data, camera)
    images.append(renderer.render())
renderer.close()
sys.stdout.buffer.write(pickle.dumps(np.stack(images[1:])))
"""


FAST_BUT_SIDES = replace(qualities.FAST, side_stacks=None)


def reference(backend: str, *what) -> np.ndarray:
    import pickle

    env = {**environment(), "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    done = run_alone(REFERENCE, stdin=pickle.dumps(what), env=env)
    return pickle.loads(done.stdout)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "backend", "width", "height", "camera", "quality"),
    [
        ("HalfCheetah-v5", "egl", 41, 37, None, "exact"),
        ("HalfCheetah-v5", "egl", 64, 48, "track", FAST_BUT_SIDES),
        ("mocap", "osmesa", 32, 32, "side", "exact"),
        *(
            pytest.param(*case, marks=pytest.mark.stress)
            for case in (
                ("HalfCheetah-v5", "egl", 84, 84, None, "exact"),
                ("HalfCheetah-v5", "osmesa", 101, 103, None, "exact"),
                ("Humanoid-v5", "egl", 64, 64, None, "exact"),
                ("Humanoid-v5", "egl", 84, 84, None, FAST_BUT_SIDES),
                ("mocap", "egl", 100, 120, None, "exact"),  # larger than the model's own buffer
                ("mocap", "egl", 640, 480, 0, "fast"),  # its lights are not directional
            )
        ),
    ],
)
async def test_pixels_are_those_of_mujocos_renderer(name, backend, width, height, camera, quality):
    config = aioenv.RenderConfig(width, height, camera, quality, workers=2, backend=backend)
    n = 3
    async with aioenv.make_vec(make, n, name=name, render=config) as envs:
        (model, view), *_ = await envs.call("model_and_view")
        await envs.reset(seed=0)
        rng = np.random.default_rng(0)
        states, images = [], []
        for _ in range(4):
            low, high = envs.action_space.low, envs.action_space.high
            await envs.step(rng.uniform(low, high).astype(envs.action_space.dtype))
            states += await envs.call("whole_state")
            drawn = await envs.render()
            assert drawn.shape == (n, height, width, 3) and drawn.dtype == np.uint8
            images.append(drawn)
    if camera is None and name != "mocap" and version_of("gymnasium") < (1, 4):
        camera = "track"  # which was the env's own camera then, where the model has it
    expected = reference(backend, model, view, states, width, height, camera, quality != "exact")
    assert len(np.unique(expected)) > 20 and not np.array_equal(expected[0], expected[-1])
    assert np.array_equal(np.concatenate(images), expected)


FAST = aioenv.RenderConfig(32, 32, quality="fast", workers=2)


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_images_are_of_the_state_returned_last_while_the_next_step_runs():
    async with aioenv.make_vec("HalfCheetah-v5", 4, render=FAST, num_workers=2) as envs:
        with pytest.raises(aioenv.RenderError, match="no state yet"):
            await envs.render()
        actions = np.random.default_rng(0).uniform(-1, 1, (30, 4, 6)).astype(np.float32)
        alone, beside = [], []
        await envs.reset(seed=0)
        for action in actions:
            await envs.step(action)
            alone.append(await envs.render())
        await envs.reset(seed=0)
        await envs.step(actions[0])
        for action in actions[1:]:
            step = asyncio.ensure_future(envs.step(action))
            await asyncio.sleep(0)
            beside.append(await envs.render())
            await step
        beside.append(await envs.render())
        assert np.array_equal(alone, beside)
        # unclaimed images are dropped, and the newest are still right
        await envs.reset(seed=0)
        for action in actions:
            await envs.step(action)
        assert np.array_equal(await envs.render(), alone[-1])


@pytest.mark.asyncio
async def test_masked_resets_and_single_slots_keep_the_others_images():
    async with aioenv.make_vec("HalfCheetah-v5", 3, render=FAST, num_workers=2) as envs:
        zeros = np.zeros((3, 6), np.float32)
        await envs.reset(seed=0)
        fresh = await envs.render()
        for _ in range(10):
            await envs.step(zeros + 0.5)
        later = await envs.render()
        assert not np.array_equal(later, fresh)
        await envs.reset(seed=[None, 1, None], options={"reset_mask": np.array([False, True, False])})
        images = await envs.render()
        assert np.array_equal(images[[0, 2]], later[[0, 2]]) and np.array_equal(images[1], fresh[1])
        envs.send(zeros[:2] - 0.5, [2, 0])
        ready = await envs.recv(2)
        assert ready.slots.tolist() == [0, 2]
        moved = await envs.render()
        assert np.array_equal(moved[1], images[1])
        assert not np.array_equal(moved[0], images[0]) and not np.array_equal(moved[2], images[2])


@pytest.mark.asyncio
async def test_without_a_config_render_is_a_call():
    async with aioenv.make_vec("CartPole-v1", 2, render_mode="rgb_array") as envs:
        await envs.reset(seed=0)
        images = await envs.render()
        assert images.shape == (2, 400, 600, 3)
    async with aioenv.make_vec("Pendulum-v1", 2) as envs:
        with pytest.raises(aioenv.RenderError, match="render_mode"):
            await aioenv.AsyncVectorEnv([lambda: gym.make("Pendulum-v1")], render=aioenv.RenderConfig())


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_a_render_worker_that_dies_is_named_and_stepping_goes_on():
    async with aioenv.make_vec("HalfCheetah-v5", 2, render=FAST) as envs:
        await envs.reset(seed=0)
        await envs.render()
        os.kill(envs._session._pool.pids[0], signal.SIGKILL)
        for _ in range(3):
            await envs.step(np.zeros((2, 6), np.float32))
        with pytest.raises(aioenv.RenderError, match=r"render worker 0.*SIGKILL"):
            await envs.render()
        obs, *_ = await envs.step(np.zeros((2, 6), np.float32))
        assert np.isfinite(obs).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("config", [FAST, replace(FAST, depth=True)], ids=["rgb", "depth"])
@pytest.mark.parametrize("backend", ["workers", "native"])
async def test_other_slots_have_their_images_when_a_render_worker_dies(config, backend):
    actions = np.zeros((4, 6), np.float32)

    def rows(images):
        return list(zip(*images, strict=True)) if isinstance(images, tuple) else [(image,) for image in images]

    async with aioenv.make_vec("HalfCheetah-v5", 4, backend=backend, render=config) as envs:
        await envs.reset(seed=0)
        whole = rows(await envs.render())
        stream = envs.render_stream()
        os.kill(envs._session.pools[0].pids[1], signal.SIGKILL)
        await envs.reset(seed=0)
        with pytest.raises(aioenv.RenderError, match=r"^render: render worker 1.*SIGKILL") as caught:
            await envs.render()
        with pytest.raises(aioenv.RenderError, match=r"^render_stream: step 1: render worker 1.*SIGKILL") as streamed:
            await anext(stream)
        for error in (caught.value, streamed.value):
            assert error.slots == (1, 3)
            for slot, (images, expected) in enumerate(zip(rows(error.partial), whole, strict=True)):
                for image, kind in zip(images, expected, strict=True):
                    assert np.array_equal(image, kind if slot in (0, 2) else np.zeros_like(kind))
        await envs.step(actions)


@pytest.mark.asyncio
async def test_depth_and_segmentation_of_several_cameras_are_the_pools():
    """What a `RenderPool` gives for the same states, which is compared with `mujoco.Renderer` elsewhere."""
    cameras = ["side", -1]
    config = aioenv.RenderConfig(
        30, 22, cameras, "fast", depth=True, segmentation=True, workers=2, devices=[0], max_in_flight=1
    )
    pool = aioenv.RenderPool(mujoco.MjModel.from_xml_string(MOCAP), quality="fast", state_spec=STATE)
    async with aioenv.make_vec(make, 3, name="mocap", render=config) as envs, pool:
        await envs.reset(seed=0)
        for _ in range(3):
            await envs.step(np.random.default_rng(0).uniform(-1, 1, (3, 3)))
        states = np.stack(await envs.call("whole_state"))
        images = await envs.render()
        kwargs = {"width": 30, "height": 22, "depth": True, "segmentation": True}
        expected = await pool.render(states, camera=cameras, **kwargs)
        assert [array.shape for array in images] == [(3, 2, 22, 30, 3), (3, 2, 22, 30), (3, 2, 22, 30, 2)]
        for mine, theirs in zip(images, expected, strict=True):
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        envs.send(np.zeros((1, 3)), [1])
        await envs.recv()
        later = await envs.render()
        assert all(np.array_equal(one[[0, 2]], other[[0, 2]]) for one, other in zip(later, images, strict=True))
        assert (await envs.render("grid")).shape == (2 * 22, 2 * 60, 3)


@pytest.mark.asyncio
async def test_ve_tiling_gives_one_picture_of_all():
    async with aioenv.make_vec("HalfCheetah-v5", 3, render=FAST, num_workers=1) as envs:
        await envs.reset(seed=0)
        images, grid = await envs.render(), await envs.render(mode="grid")
        assert grid.shape == (64, 64, 3) and grid.any(axis=(0, 1)).all()
        assert np.array_equal(grid[:32, 32:], images[1]) and np.array_equal(grid[32:, :32], images[2])
        assert not grid[32:, 32:].any()
        with pytest.raises(
            ValueError, match='expected None, "arrays" or "grid", got "human"'.replace('"human"', "'human'")
        ):
            await envs.render("human")


def test_a_blocking_stream_is_for_another_thread():
    taken: queue.SimpleQueue = queue.SimpleQueue()

    def take(stream):
        for item in stream:
            taken.put(item)

    with aioenv.sync.make_vec("CartPole-v1", 2, render=aioenv.RenderConfig(), num_workers=1) as envs:
        with ThreadPoolExecutor(1) as other:
            rest = other.submit(take, envs.render_stream())
            envs.reset(seed=0)
            assert envs.render("grid").shape == (400, 1200, 3)
            for number in range(2):
                step, images = taken.get(timeout=30)
                assert step == number and np.array_equal(images, envs.render())
                envs.step(np.ones(2, int))
            envs.close()
            rest.result(timeout=30)


@pytest.mark.asyncio
async def test_a_stream_gives_every_result_in_order_while_steps_go_on():
    async with aioenv.make_vec("HalfCheetah-v5", 2, render=FAST, num_workers=1) as envs:
        actions = np.random.default_rng(0).uniform(-1, 1, (8, 2, 6)).astype(np.float32)
        await envs.reset(seed=0)
        alone = [await envs.render()]
        for action in actions:
            await envs.step(action)
            alone.append(await envs.render())
        stream, small = envs.render_stream(buffer=100), envs.render_stream(buffer=2)
        await envs.reset(seed=0)  # result 9
        for action in actions:
            await envs.step(action)
        items = [await anext(stream) for _ in range(9)]
        assert [step for step, _ in items] == list(range(9, 18))
        assert np.array_equal([images for _, images in items], alone)
        # what was not taken in time has gone, the newest is there
        late = [await anext(small) for _ in range(2)]
        assert [step for step, _ in late] == [16, 17] and np.array_equal(late[1][1], alone[-1])
        # a cancelled wait loses nothing
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        envs.send(actions[0][:1], [1])
        await envs.recv()
        step, images = await anext(stream)
        assert step == 18 and np.array_equal(images, await envs.render()) and np.array_equal(images[0], alone[-1][0])
        await small.aclose()
        assert [item async for item in small] == []
        os.kill(envs._session._pool.pids[0], signal.SIGKILL)
        await envs.step(actions[0])
        with pytest.raises(aioenv.RenderError, match=r"step 19.*render worker 0.*SIGKILL"):
            await anext(stream)
        rest = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
    assert await rest is None
    async with aioenv.make_vec("CartPole-v1", 1) as envs:
        with pytest.raises(aioenv.RenderError, match="pass render="):
            envs.render_stream()
    async with aioenv.make_vec("HalfCheetah-v5", 2, backend="native", render=FAST) as envs:
        stream = envs.render_stream()
        await envs.reset(seed=0)
        await envs.step(actions[0])
        items = [await anext(stream), await anext(stream)]
        assert [step for step, _ in items] == [0, 1] and np.array_equal([images for _, images in items], alone[:2])


@pytest.mark.asyncio
async def test_an_unknown_camera_is_refused_at_the_start():
    with pytest.raises(ValueError, match=r"no camera 'nowhere'; it has \['track'\]"):
        await aioenv.make_vec("HalfCheetah-v5", 1, render=aioenv.RenderConfig(8, 8, camera="nowhere"))
    with pytest.raises(ValueError, match="expected a number from -1 to 0, got 5"):
        await aioenv.make_vec("HalfCheetah-v5", 1, render=aioenv.RenderConfig(8, 8, camera=5))


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["render", "pixels"])
async def test_a_camera_that_an_env_asks_for_and_its_model_has_not_is_refused_at_the_start(what):
    images = {what: aioenv.RenderConfig(8, 8)}
    with pytest.raises(ValueError, match=r"camera_id=1, of a model that has only \['track'\]"):
        await aioenv.make_vec("HalfCheetah-v5", 1, camera_id=1, **images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width: expected an int from 1"),
        ({"height": 1.5}, "height"),
        ({"quality": "best"}, "quality"),
        ({"backend": "vulkan"}, "backend"),
        ({"camera": 1.0}, "camera"),
        ({"workers": -1}, "workers"),
        ({"camera": []}, "camera"),
        ({"camera": ["a", 1.5]}, "camera"),
        ({"depth": 1}, "depth: expected True or False"),
        ({"segmentation": None}, "segmentation"),
        ({"devices": 0}, "devices: expected how many"),
        ({"devices": [0, -1]}, "devices"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"render_only": "no"}, "render_only"),
        ({"render_key": 3}, "render_key: expected a str"),
        ({"render_only": False, "render_key": "state"}, "two different keys"),
    ],
)
def test_a_config_is_checked_when_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        aioenv.RenderConfig(**arguments)


@pytest.mark.asyncio
async def test_without_opengl_the_error_says_what_to_install(monkeypatch):
    """GLFW without a display stands for a machine without OpenGL."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(aioenv.RenderError, match=r"glfw: (.|\n)*apt-get install libegl1"):
        await aioenv.make_vec("HalfCheetah-v5", 1, render=aioenv.RenderConfig(8, 8, backend="glfw"))


@pytest.mark.asyncio
@pytest.mark.parametrize("way", [{"render": {}}, {"pixels": {}}, {"pixels": {"workers": 1}}], ids=str)
async def test_a_device_that_does_not_exist_is_an_error_and_no_other_draws_in_its_place(way):
    ((name, more),) = way.items()
    config = aioenv.RenderConfig(8, 8, quality="fast", backend="auto", devices=[99], **more)
    with pytest.raises(aioenv.RenderError, match="there is no device 99 here: EGL has"):
        await aioenv.make_vec("HalfCheetah-v5", 1, **{name: config})


class Blind(gym.Env):
    """Its second image can't be drawn."""

    observation_space = action_space = gym.spaces.Discrete(2)
    render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return 0, {}

    def step(self, action):
        self.steps += 1
        return 0, 0.0, False, False, {}

    def render(self):
        if self.steps == 1:
            raise ValueError("too dark")
        return np.full((2, 2, 3), self.steps, np.uint8)


def test_a_blocking_stream_goes_on_after_an_image_that_could_not_be_drawn():
    with aioenv.sync.make_vec(Blind, 1, render=aioenv.RenderConfig(), num_workers=1) as envs:
        stream = envs.render_stream()
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(np.zeros(1, int))
        assert next(stream)[0] == 0
        with pytest.raises(aioenv.RenderError, match="too dark"):
            next(stream)
        step, images = next(stream)
        assert step == 2 and (images == 2).all()


@pytest.mark.asyncio
async def test_envs_without_a_render_mode_that_raise_are_told_of_with_a_hint():
    async with aioenv.make_vec("InvertedPendulum-v5", 2, num_workers=1) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError) as info:
            await envs.render()
        assert 'make them with render_mode="rgb_array"' in info.value.__notes__[-1]
        await envs.step(np.zeros((2, 1), np.float32))
