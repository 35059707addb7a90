"""The render pool. Tests bear the names of the lines of the reference's behaviour (RP1 to RP13) that they hold."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import mujoco
import numpy as np
import pytest
from gymnasium.envs.mujoco import mujoco_env
from test_rendering import MOCAP
from test_workers import environment

import aioenv
from aioenv import memory
from aioenv.cli.bench.loop_time import CallbackClock
from aioenv.cli.opengl import probe_opengl
from aioenv.rendering import blocks
from aioenv.rendering.asking import check_devices

SMALL = {"width": 24, "height": 18}
PLAIN = """
<mujoco>
  <asset>
    <texture name="grid" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 1 0" width="8" height="8"/>
    <material name="grid" texture="grid"/>
  </asset>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="side" pos="0 -3 1" xyaxes="1 0 0 0 .3 1"/>
    <geom type="plane" size="2 2 .1" material="grid"/>
    <body mocap="true" pos="0 0 .5"><geom name="ball" size=".4" rgba="0 0 1 1"/></body>
  </worldbody>
</mujoco>
"""


def pool_of(model=PLAIN, **arguments):
    """A pool that is quick to start and to draw."""
    return aioenv.RenderPool(model, **{"quality": "fast", "workers_per_device": 2, **arguments})


def some_states(pool, count: int) -> np.ndarray:
    """States of `PLAIN` that can be told apart."""
    data = mujoco.MjData(pool.model)
    states = []
    for i in range(count):
        data.mocap_pos[0] = (i / count - 0.5, 0, 0.5)
        states.append(pool.get_state(data))
    return np.array(states)


def differ(images) -> bool:
    """Whether all images of a batch are different."""
    return len({image.tobytes() for image in images}) == len(images)


# ------------------------------------------------------------ exactness

# In a process of its own, as the two OpenGL backends can't live in one: what mujoco.Renderer draws.
REFERENCE = """
import pickle, sys
import mujoco, numpy as np
model_bytes, spec, states, sizes, cameras, fast, least = pickle.loads(sys.stdin.buffer.read())
images = []
for width, height in sizes:
    model = mujoco.MjModel.from_binary_path("m.mjb", {"m.mjb": model_bytes})
    model.vis.global_.offwidth, model.vis.global_.offheight = max(width, least[0]), max(height, least[1])
    if fast:
        model.vis.quality.offsamples = 0
    data = mujoco.MjData(model)
    renderer = mujoco.Renderer(model, height, width)
    if fast:
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
    kinds = [[], [], []]
    for number, state in enumerate([states[0], *states]):  # the first image of a context may differ
        mujoco.mj_setState(model, data, state, spec)
        mujoco.mj_forward(model, data)
        for camera in cameras:
            renderer.update_scene(data, camera)
            rgb = renderer.render()
            renderer.enable_depth_rendering()
            depth = renderer.render()
            renderer.enable_segmentation_rendering()
            segmentation = renderer.render()
            renderer.disable_segmentation_rendering()
            if number:
                for kind, image in zip(kinds, (rgb, depth, segmentation)):
                    kind.append(image)
    renderer.close()
    images.append([np.stack(kind).reshape(len(states), len(cameras), *kind[0].shape) for kind in kinds])
sys.stdout.buffer.write(pickle.dumps(images))
"""


def reference(backend: str, *what) -> list[list[np.ndarray]]:
    env = {**environment(), "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend, "LP_NUM_THREADS": "0"}
    done = subprocess.run([sys.executable, "-c", REFERENCE], input=pickle.dumps(what), capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


ORTHOGRAPHIC = """
<mujoco>
  <visual><global orthographic="true" fovy="4"/></visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".4 .6 .8" rgb2="0 0 0" width="64" height="64"/>
  </asset>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="top" pos="0 0 5" projection="orthographic" fovy="3"/>
    <geom type="plane" size="2 2 .1" rgba=".5 .7 .5 1"/>
    <body pos="0 0 .5"><freejoint/><geom type="ellipsoid" size=".4 .2 .1" rgba="1 1 0 1"/></body>
  </worldbody>
</mujoco>
"""
FLEX = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="side" pos="0 -3 1" xyaxes="1 0 0 0 .3 1"/>
    <geom type="plane" size="2 2 .1" rgba=".3 .3 .5 1"/>
    <flexcomp name="cloth" type="grid" count="5 5 1" spacing=".2 .2 .1" pos="0 0 1" radius=".02" rgba="0 .7 .7 1">
      <edge equality="true"/>
    </flexcomp>
  </worldbody>
</mujoco>
"""
ASSETS = Path(mujoco_env.__file__).parent / "assets"
MODELS = {
    # a smaller shadow map, which is nearly all of an exact image's time
    "small": (MOCAP.replace("<visual>", '<visual><quality shadowsize="256"/>'), ["side", -1]),
    "mocap": (MOCAP, ["side", -1, "above"]),
    "orthographic": (ORTHOGRAPHIC, ["top", None]),
    "flex": (FLEX, ["side"]),
    "cheetah": (ASSETS / "half_cheetah.xml", ["track", None]),
    "humanoid": (ASSETS / "humanoid.xml", ["track"]),
}


async def check_exact(name: str, backend: str, quality: str, sizes, least=(1, 1)) -> None:
    model, cameras = MODELS[name]
    async with aioenv.RenderPool(model, quality=quality, backend=backend) as pool:
        data = mujoco.MjData(pool.model)
        states = []
        rng = np.random.default_rng(0)
        for _ in range(3):
            data.mocap_pos += rng.normal(0, 0.1, data.mocap_pos.shape)
            mujoco.mj_step(pool.model, data, 20)
            states.append(pool.get_state(data))
        drawn = [
            await pool.render(states, width=w, height=h, camera=cameras, depth=True, segmentation=True)
            for w, h in sizes
        ]
        buffer = np.empty(mujoco.mj_sizeModel(pool.model), np.uint8)
        mujoco.mj_saveModel(pool.model, None, buffer)
        spec = pool.state_spec
    numbered = [-1 if camera is None else camera for camera in cameras]
    expected = reference(backend, buffer.tobytes(), spec, states, sizes, numbered, quality == "fast", least)
    for ours, theirs in zip(drawn, expected, strict=True):
        for kind, other in zip(ours, theirs, strict=True):
            assert kind.dtype == other.dtype and np.array_equal(kind, other)
    assert len(np.unique(drawn[0][0])) > 20 and differ(drawn[0][0])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "backend", "quality", "sizes"),
    [("small", "egl", "exact", [(31, 33), (40, 24)]), ("orthographic", "osmesa", "fast", [(21, 13)])],
)
async def test_pixels_depth_and_segmentation_are_those_of_mujocos_renderer(name, backend, quality, sizes):
    await check_exact(name, backend, quality, sizes)


@pytest.mark.stress
@pytest.mark.asyncio
@pytest.mark.parametrize("quality", ["exact", "fast"])
@pytest.mark.parametrize("backend", ["egl", "osmesa"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "small"])
async def test_pixels_of_every_model_and_size(name, backend, quality):
    await check_exact(name, backend, quality, [(101, 103), (84, 84), (1, 1), (240, 7), (101, 103)], (640, 480))


# ------------------------------------------------------------ RP1 to RP7


@pytest.mark.asyncio
async def test_rp1_starts_whatever_way_but_fork():
    with pytest.raises(ValueError, match='start="fork" is refused'):
        pool_of(start="fork")
    same = aioenv.RenderQuality(shadows=False, reflections=False, samples=0, buffer="model")
    drawn = []
    ways = [("spawn", "streams", "shared", "fast"), ("forkserver", "scatter", "frames", same)]
    for start, channel, transport, quality in ways:
        async with pool_of(start=start, channel=channel, transport=transport, quality=quality) as pool:
            drawn.append(await pool.render(some_states(pool, 3), **SMALL))
            assert pool.backend in ("egl", "osmesa") and len(set(pool.pids)) == 2
            assert pool.renderer == probe_opengl(pool.backend).renderer
    assert drawn[0].shape == (3, 18, 24, 3) and differ(drawn[0]) and np.array_equal(*drawn)


@pytest.mark.asyncio
async def test_rp2_closed_twice_forgotten_or_cancelled_nothing_is_left():
    pool = await pool_of(workers_per_device=1)
    future = pool.submit(**SMALL, slots=range(500))
    await pool.close()
    with pytest.raises(aioenv.ClosedError):
        await future
    await pool.close()
    assert "closed" in repr(pool)
    del pool, future
    forgotten = await pool_of(workers_per_device=1)
    with pytest.warns(ResourceWarning, match="its workers were killed"):
        del forgotten
        gc.collect()
    starting = asyncio.ensure_future(pool_of(workers_per_device=1)._ensure_started())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    never = pool_of()
    with pytest.raises(RuntimeError, match="start it first"):
        never.submit(**SMALL)
    await never.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["shared", "frames"])
async def test_rp3_rp4_rp5_rp6_rp7_shapes_order_cameras_refusals_and_views(transport):
    async with pool_of(max_batch_size=7, max_image_size=101 * 103, transport=transport) as pool:
        states = some_states(pool, 5)
        # RP3
        images, depth = await pool.render(states, width=101, height=103, depth=True)
        assert images.shape == (5, 103, 101, 3) and images.dtype == np.uint8
        assert depth.shape == (5, 103, 101) and depth.dtype == np.float32
        rgb, depth, ids = await pool.render(states, **SMALL, camera=["side", None], depth=True, segmentation=True)
        assert rgb.shape == (5, 2, 18, 24, 3) and depth.shape == (5, 2, 18, 24) and ids.shape == (5, 2, 18, 24, 2)
        assert ids.dtype == np.int32 and set(np.unique(ids[..., 0])) == {-1, 0, 1}
        assert (depth[ids[..., 0] >= 0] < 10).all() and 1 < depth.min() < 2.7
        none = await pool.render(np.empty((0, pool.state_size)), **SMALL, depth=True)
        assert [array.shape for array in none] == [(0, 18, 24, 3), (0, 18, 24)]
        assert (await pool.render([], **SMALL)).shape == (0, 18, 24, 3)
        # RP4
        images = await pool.render(states, **SMALL)
        assert differ(images)
        assert np.array_equal(await pool.render(states[::-1], **SMALL), images[::-1])
        assert np.array_equal(await pool.render(states[:1], **SMALL, slots=[6]), images[:1])
        assert np.array_equal(await pool.render(**SMALL, slots=[6, 0]), images[[0, 4]])
        last = await pool.render(**SMALL)
        initial = await pool.render([mujoco.MjData(pool.model)], **SMALL, slots=[5])
        assert np.array_equal(last, [*images[::-1], initial[0], images[0]])
        datas = [mujoco.MjData(pool.model) for _ in states]
        for data, state in zip(datas, states, strict=True):
            mujoco.mj_setState(pool.model, data, state, pool.state_spec)
        assert np.array_equal(await pool.render(datas, **SMALL), images)
        # RP5
        side = await pool.render(states, **SMALL, camera="side")
        assert np.array_equal(side, rgb[:, 0]) and np.array_equal(images, rgb[:, 1])
        assert not np.array_equal(side, images)
        for same in (0, np.int64(0)):
            assert np.array_equal(await pool.render(states, **SMALL, camera=same), side)
        own = mujoco.MjvCamera()
        mujoco.mjv_defaultFreeCamera(pool.model, own)
        assert np.array_equal(await pool.render(states, **SMALL, camera=own), images)
        own.azimuth += 20
        assert not np.array_equal(await pool.render(states, **SMALL, camera=own), images)
        # RP6: nothing is sent
        with_out = {**SMALL, "out": np.empty((5, 18, 24), np.uint8)}
        for wrong, message in [
            ({**SMALL, "camera": "nowhere"}, r"no camera 'nowhere'; it has \['side'\]"),
            ({**SMALL, "camera": 1}, "from -1 to 0, got 1"),
            ({**SMALL, "camera": 1.0}, "camera: expected"),
            ({**SMALL, "camera": []}, "camera: expected at least one"),
            ({"width": 102, "height": 103}, "make a RenderPool with a larger max_image_size"),
            ({"width": 0, "height": 3}, "width: expected an int from 1"),
            ({**SMALL, "slots": [0, 1, 2, 3, 7]}, "slots: expected ints from 0 to 6"),
            ({**SMALL, "slots": [0, 1, 2, 3, 3]}, "slots: expected each of them once"),
            ({**SMALL, "slots": [0, 1]}, "slots: expected one for each of 5 states"),
            ({**SMALL, "slots": [0.5] * 5}, "slots: expected a list of ints"),
            ({**SMALL, "randomize": True}, "randomize: the pool has no modder"),
            ({**SMALL, "edits": {"qpos0": states}}, "edits: expected fields that a picture shows"),
            ({**SMALL, "edits": {"geom_rgba": np.zeros((5, 4))}}, r"expected shape \(5, 2, 4\)"),
            (with_out, r"out: expected for rgb an array uint8 \(5, 18, 24, 3\)"),
            (
                {**SMALL, "depth": True, "out": (np.empty((5, 18, 24, 3), np.uint8),)},
                "out: expected arrays for rgb, depth",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                pool.submit(states, **wrong)
        for wrong_states, message in [
            (np.concatenate([states, states]), "at most max_batch_size=7, got 10"),
            (states[:, 1:], rf"expected an array of shape \(N, {pool.state_size}\)"),
            (datas[0], r"write \[data\]"),
            (
                [mujoco.MjData(mujoco.MjModel.from_xml_string(MOCAP))],
                r"states\[0\]: expected an MjData of the pool's model",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                pool.submit(wrong_states, **SMALL)
        # RP7
        view, depths = await pool.render(states, **SMALL, depth=True, copy=False)
        kept, kept_depths = view.copy(), depths.copy()
        mine = await pool.render(states[::-1], **SMALL, depth=True)
        assert np.array_equal(view, kept) and np.array_equal(depths, kept_depths)
        for _ in range(2):  # two in turn
            assert np.array_equal(view, kept) and np.array_equal(depths, kept_depths)
            again, again_depths = await pool.render(states[::-1], **SMALL, depth=True, copy=False)
        assert np.shares_memory(again, view) and np.shares_memory(again_depths, depths)
        assert np.array_equal(view, kept[::-1]) and np.array_equal(depths, kept_depths[::-1])
        assert np.array_equal(mine[0], view) and not np.shares_memory(mine[0], view)
        orders = (slice(5), slice(None, None, -1), slice(1, 5), slice(5))
        at_once = [pool.submit(rows, **SMALL, copy=False) for rows in map(states.__getitem__, orders)]
        for drawn, order in zip(await asyncio.gather(*at_once), orders, strict=True):
            assert np.array_equal(drawn, images[order])
        out = np.zeros((10, 18, 24, 3), np.uint8)[::2]
        assert await pool.render(states, **SMALL, out=out) is out and np.array_equal(out, images)
    with pytest.raises(RuntimeError, match="has been closed"):
        await pool.render(states, **SMALL)
    with pytest.raises(aioenv.ClosedError):
        await pool


def held(pool) -> int:
    """Bytes that a pool's images take in shared memory."""
    return os.fstat(pool._crew.memory.fd).st_blocks * 512


@pytest.mark.asyncio
async def test_the_memory_of_images_is_used_again_once_nobody_has_them(monkeypatch):
    async with pool_of(workers_per_device=1) as pool:
        states = some_states(pool, 4)
        draw = partial(pool.render, states, **SMALL)

        async def place() -> int:
            return (await draw()).__array_interface__["data"][0]

        # the last call is let go of when the loop turns again
        places = [await place() for _ in range(8)]
        assert len(set(places)) <= 2
        kept = await draw()
        row = (await draw())[2, 3:]  # a view is enough to keep it
        expected = kept.copy()
        for _ in range(8):
            other = await pool.render(states[::-1], **SMALL)
            assert not np.shares_memory(other, kept) and not np.shares_memory(other, row)
        assert np.array_equal(kept, expected) and np.array_equal(row, expected[2, 3:])
        # what is too large to be kept, the system has back with the images
        monkeypatch.setattr(blocks, "KEPT_BYTES", 1 << 20)
        many = await pool.render(np.tile(states, (50, 1)), width=200, height=200)
        assert held(pool) > many.nbytes
        del many
        await draw()
        assert held(pool) < 1 << 20
        last = await draw()
    assert np.array_equal(kept, expected) and np.array_equal(last, expected)


@pytest.mark.asyncio
async def test_without_memory_to_share_images_travel(monkeypatch):
    async with pool_of() as pool:
        states = some_states(pool, 4)
        shared = await pool.render(states, **SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(pool._crew.memory, "fd", -1)  # no more is to be had
            large = await pool.render(states, width=124, height=118)
            out = await pool.render(states, width=124, height=118, out=np.empty_like(large))
        assert np.array_equal(large, out) and differ(large)
    monkeypatch.setattr(memory, "AVAILABLE", False)
    with pytest.raises(ValueError, match='transport="shared": this platform has no memory'):
        pool_of(transport="shared")
    async with pool_of() as pool:
        assert pool._crew.memory is None
        assert np.array_equal(await pool.render(states, **SMALL), shared)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"transport": "pigeon"}, ValueError, "transport: expected 'auto', 'frames' or 'shared'"),
        ({"devices": 0}, ValueError, "devices: expected how many"),
        ({"devices": []}, ValueError, "devices"),
        ({"devices": "01"}, ValueError, "devices"),
        ({"devices": [0, True]}, ValueError, "devices"),
        ({"workers_per_device": 0}, ValueError, "workers_per_device: expected an int"),
        ({"max_batch_size": -1}, ValueError, "max_batch_size: expected an int"),
        ({"max_image_size": 1.5}, ValueError, "max_image_size: expected an int"),
        ({"modder": aioenv.LightModder(mujoco.MjModel.from_xml_string(PLAIN))}, ValueError, "modder: expected a class"),
        ({"seed": -1}, ValueError, "seed: expected an int"),
        ({"quality": "best"}, ValueError, r"quality: expected one of \['exact', 'fast'\] or a RenderQuality"),
        ({"timeout_s": 0}, ValueError, "timeout_s: expected a positive number"),
        ({"state_spec": int(mujoco.mjtState.mjSTATE_ACT)}, ValueError, "it has none of them"),
        ({"model": 3}, TypeError, "model: expected an MjModel, an MjSpec, a path or a string of XML"),
        ({"model": "/no/such/file.xml"}, FileNotFoundError, "there is no file"),
        ({"start": "thread"}, ValueError, "start: expected one of"),
    ],
)
def test_rp6_arguments_are_checked_when_the_pool_is_made(arguments, kind, message):
    with pytest.raises(kind, match=message):
        pool_of(**arguments)


@pytest.mark.parametrize("arguments", [{"shadows": 1}, {"samples": -1}, {"shadow_map": 1 << 20}, {"buffer": "tile"}])
def test_a_quality_is_checked_when_it_is_made(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}: expected"):
        aioenv.RenderQuality(**arguments)


# ------------------------------------------------------------ RP8 to RP11


@pytest.mark.asyncio
async def test_rp8_a_look_is_of_the_seed_the_slot_and_the_count_alone():
    modders = [aioenv.TextureModder, aioenv.LightModder, aioenv.CameraModder, aioenv.MaterialModder]

    async def looks(workers: int, seed: int) -> list[np.ndarray]:
        async with pool_of(workers_per_device=workers, seed=seed, modder=modders) as pool:
            draw = partial(pool.render, slots=range(5), camera="side", **SMALL)
            images = [await draw(randomize=randomize) for randomize in (False, True, False, True)]
            await pool.render(slots=[3, 1], camera="side", **SMALL, randomize=True)
            return [*images, await draw()]

    own, first, still, second, third = one = await looks(1, 0)
    assert (own == own[0]).all() and differ(first) and differ(second)
    assert np.array_equal(first, still) and not any(map(np.array_equal, first, second))
    assert [np.array_equal(a, b) for a, b in zip(second, third, strict=True)] == [True, False, True, False, True]
    assert np.array_equal(one, await looks(3, 0))


@pytest.mark.stress
@pytest.mark.asyncio
async def test_rp8_other_seeds_give_other_looks():
    looks = []
    for seed in (0, 1, None, None):
        async with pool_of(seed=seed, modder=aioenv.TextureModder) as pool:
            looks.append((await pool.render(slots=[1], camera="side", **SMALL, randomize=True))[0])
    assert differ(looks)


class ByDevice(aioenv.Modder):
    """Colours the ball by the device that its worker is told to draw on."""

    def randomize(self):
        self._edit("geom_rgba", 1, (int(os.environ["MUJOCO_EGL_DEVICE_ID"]) / 10, 0, 0, 1))


@pytest.mark.asyncio
async def test_rp9_workers_take_the_devices_in_turn():
    assert check_devices(1) is None and check_devices(3) == (0, 1, 2)
    # OSMesa knows no devices: here the variable is just handed over
    assert pool_of(devices=[1, 9], workers_per_device=2).devices == (1, 9, 1, 9)
    async with pool_of(devices=[1, 9], workers_per_device=1, backend="osmesa", modder=ByDevice) as pool:
        images = await pool.render(slots=range(4), width=20, height=20, camera="side", randomize=True)
        balls = images[:, 7, 10].tolist()
        assert balls == balls[:2] * 2 and balls[0][0] + 50 < balls[1][0]


class Raises(aioenv.Modder):
    """Can't be made."""

    def __init__(self, model, **kwargs):
        raise RuntimeError("no such modder today")


class Exits(aioenv.Modder):
    """Takes its process with it."""

    def __init__(self, model, **kwargs):
        os._exit(7)


@pytest.mark.asyncio
async def test_rp10_a_start_that_fails_is_told_at_once_with_the_workers_traceback():
    async with asyncio.timeout(45):
        with pytest.raises(aioenv.RenderError, match=r"MUJOCO_EGL_DEVICE_ID[\s\S]*apt-get install") as caught:
            await pool_of(devices=[99], workers_per_device=1, backend="egl")
        assert "Traceback" in caught.value.__cause__.traceback and "canvas.py" in caught.value.__cause__.traceback
        with pytest.raises(aioenv.WorkerStartError, match="no such modder today") as caught:
            await pool_of(modder=Raises, workers_per_device=1)
        assert "Traceback" in caught.value.traceback and "test_render_pool.py" in caught.value.traceback


@pytest.mark.stress
@pytest.mark.asyncio
async def test_rp10_modders_that_are_none():
    with pytest.raises(aioenv.RenderError, match="exited with code 7"):
        await pool_of(modder=Exits, backend="egl")
    with pytest.raises(aioenv.WorkerStartError, match=r"expected an aioenv\.Modder, got dict"):
        await pool_of(modder=lambda model, renderer: {})


@pytest.mark.asyncio
async def test_rp11_mocap_bodies_and_edits_calls_at_once_and_cancelled_ones():
    async with pool_of() as pool:
        states = some_states(pool, 4)
        await check_mocap_and_edits(pool, states)
        await check_calls_at_once(pool, some_states(pool, 6))
        await check_a_cancelled_call(pool, some_states(pool, 400))


async def check_mocap_and_edits(pool, states):
    draw = partial(pool.render, states, camera="side", **SMALL)
    ids = (await draw(segmentation=True))[1]
    columns = [np.flatnonzero((image[..., 0] == 1).any(axis=0)).mean() for image in ids]
    assert (np.diff(columns) > 1).all()  # the ball goes right
    images = await draw()
    colours = np.tile(pool.model.geom_rgba, (4, 1, 1))
    colours[2, 1] = (1, 1, 0, 1)
    edited = await draw(edits={"geom_rgba": colours})
    assert [np.array_equal(a, b) for a, b in zip(images, edited, strict=True)] == [True, True, False, True]
    moved = np.tile(pool.model.geom_pos, (4, 1, 1))
    moved[3, 1] = (0, 0, 0.3)  # of a geom that was compiled in the middle of its body
    edited = await draw(edits={"geom_pos": moved})
    assert [np.array_equal(a, b) for a, b in zip(images, edited, strict=True)] == [True, True, True, False]
    positions = np.tile(pool.model.cam_pos, (4, 1, 1)) + np.arange(4)[:, None, None] / 10
    still = np.tile(states[:1], (4, 1))
    assert differ(await pool.render(still, camera="side", **SMALL, edits={"cam_pos": positions}))
    assert np.array_equal(await draw(), images)


async def check_calls_at_once(pool, states):
    alone = [await pool.render(states[i:], width=8 + i, height=9) for i in range(5)]
    futures = [pool.submit(states[i:], width=8 + i, height=9) for i in range(5)]
    states[:] = 0  # it has a copy
    together = await asyncio.gather(*futures)
    assert all(map(np.array_equal, alone, together))

    def elsewhere():
        with pytest.raises(aioenv.LoopError, match="belongs to the event loop"):
            asyncio.run(pool.render(**SMALL))

    await asyncio.to_thread(elsewhere)


async def check_a_cancelled_call(pool, states):
    out = np.zeros((400, 60, 80, 3), np.uint8)
    rendering = asyncio.ensure_future(pool.render(states, width=80, height=60, out=out))
    while not out.any():
        await asyncio.sleep(0.001)
    rendering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rendering
    kept = out.copy()
    assert not out[-1].any()
    behind = await pool.render(states[:20], width=80, height=60)
    assert np.array_equal(out, kept) and differ(behind)
    drawn = kept[:20].any(axis=(1, 2, 3))
    assert np.array_equal(behind[drawn], kept[:20][drawn])


# ------------------------------------------------------------ RP12 and RP13


@pytest.mark.asyncio
async def test_rp12_steps_go_on_while_images_are_drawn():
    async with (
        aioenv.make_vec("HalfCheetah-v5", 2, num_workers=1) as envs,
        aioenv.RenderPool(ASSETS / "half_cheetah.xml", quality="exact") as pool,
    ):
        await envs.reset(seed=0)
        future = pool.submit(slots=range(8), width=100, height=100)
        steps = 0
        while not future.done():
            await envs.step(np.zeros((2, 6), np.float32))
            steps += 1
        assert steps >= 10  # it takes some 200 ms to draw them, and less than one to step
        assert (await future).shape == (8, 100, 100, 3)


class Faulty(aioenv.Modder):
    """In slots of a blue ball: raises, hangs or dies, as a file says, which it removes first."""

    where: str

    def randomize(self):
        self._edit("geom_rgba", 1, self.rng.uniform(0, 1, 4))
        path = Path(self.where)
        with open(path, "a+") as file:
            file.seek(0)
            faults = file.read()
            file.truncate(0)
            file.write(faults[1:])
        match faults[:1]:
            case "r":
                raise ValueError("a fault of the modder")
            case "h":
                while True:
                    time.sleep(10)
            case "k":
                os.kill(os.getpid(), signal.SIGKILL)


def faulty(path: Path):
    return type("FaultyThere", (Faulty,), {"where": str(path)})


@pytest.mark.asyncio
async def test_rp13_a_worker_that_raises_dies_or_hangs_fails_its_call_and_is_replaced(tmp_path):
    path = tmp_path / "faults"
    path.write_text("")
    async with pool_of(modder=faulty(path), seed=0, timeout_s=1.0, workers_per_device=2) as pool:
        draw = partial(pool.render, camera="side", **SMALL)
        await draw(slots=[0, 1], randomize=True)
        pids = pool.pids
        path.write_text("r")
        with pytest.raises(aioenv.RenderError, match=r"a fault of the modder[\s\S]*Traceback"):
            await draw(slots=[0], randomize=True)
        assert differ(await draw(slots=[0, 1])) and pool.pids == pids
        path.write_text("k")
        innocent = pool.submit(slots=[1], camera="side", **SMALL)
        with pytest.raises(aioenv.RenderError, match=r"render worker 0 is gone.*SIGKILL"):
            await draw(slots=[0], randomize=True)
        assert (await innocent).shape == (1, 18, 24, 3)
        path.write_text("h")
        started = time.monotonic()
        failing = pool.submit(slots=[1], camera="side", **SMALL, randomize=True)
        waiting = pool.submit(slots=[1], camera="side", **SMALL)  # behind it, and of no fault
        with pytest.raises(aioenv.RenderTimeout, match=r"render worker 1 .*timeout_s=1\.0; it is replaced"):
            await failing
        assert time.monotonic() - started < 3
        assert (await waiting).shape == (1, 18, 24, 3)
        assert not set(pids) & set(pool.pids)


@pytest.mark.asyncio
async def test_rp13_with_retry_what_a_worker_died_over_is_drawn_once_again(tmp_path):
    path = tmp_path / "faults"
    path.write_text("")
    async with pool_of(modder=faulty(path), seed=0, timeout_s=1.0, workers_per_device=1, retry=True) as pool:
        draw = partial(pool.render, camera="side", slots=range(3), **SMALL)
        expected = [await draw(randomize=True) for _ in range(3)]
    async with pool_of(modder=faulty(path), seed=0, timeout_s=1.0, workers_per_device=1, retry=True) as pool:
        draw = partial(pool.render, camera="side", slots=range(3), **SMALL)
        drawn = []
        for fault in ("k", "h"):
            path.write_text(fault)
            drawn.append(await draw(randomize=True))
        drawn.append(await draw(randomize=True))
        assert np.array_equal(drawn, expected)
        path.write_text("kk")
        with pytest.raises(aioenv.RenderError, match="SIGKILL"):
            await draw(randomize=True)
        with pytest.raises(aioenv.RenderError, match="SIGKILL") as caught:  # for good, and at once
            await draw()
        assert "It is not restarted any more: 3 restarts in 60 s." in caught.value.__notes__


@pytest.mark.asyncio
@pytest.mark.stress
async def test_ten_thousand_states_take_the_loop_little_at_a_time():
    async with pool_of() as pool:
        states = np.tile(some_states(pool, 10), (1000, 1))
        with CallbackClock().running() as clock:
            images = await pool.render(states, width=84, height=84)
        assert len(clock.spans) > 100 and differ(images[:10]) and np.array_equal(images[:10], images[-10:])
        assert np.quantile(clock.spans, 0.99) < 0.5e-3


def resident(pid: int | str) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def holdings() -> tuple[int, int, list[str]]:
    """How many descriptors, threads and mappings of shared memory this process has."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    here = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return *here, [line for line in maps if "memfd:aioenv" in line]


@pytest.mark.stress
@pytest.mark.asyncio
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", ["shared", "frames"])
async def test_memory_stays_flat_over_twenty_thousand_batches(transport):
    async with pool_of(modder=aioenv.TextureModder, transport=transport) as pool:
        states = some_states(pool, 2)
        out = np.empty((2, 18, 24, 3), np.uint8)
        sizes = []
        for count in (4_000, 16_000):
            for number in range(count):
                how = ({}, {"copy": False}, {"out": out}, {"depth": True})[number % 4]
                await pool.render(states, **SMALL, randomize=number % 10 == 0, **how)
            sizes.append([resident(pid) for pid in ("self", *pool.pids)])
        print(transport, "MiB before, after:", *([round(size / 2**20, 1) for size in some] for some in sizes))
        assert all(after < before * 1.02 for before, after in zip(*sizes, strict=True)), sizes
        assert transport == "frames" or held(pool) < 1 << 20


@pytest.mark.stress
@pytest.mark.asyncio
@pytest.mark.timeout(1200)
async def test_memory_stays_flat_over_two_hundred_pools():
    sizes, held_then = [], []
    for count in (20, 180):
        for _ in range(count):
            async with pool_of(workers_per_device=1) as pool:
                await pool.render(**SMALL)
        gc.collect()
        sizes.append(resident("self"))
        held_then.append(holdings())
    print("MiB before, after:", *(round(size / 2**20, 1) for size in sizes), held_then)
    assert sizes[1] < sizes[0] * 1.02, sizes
    assert all(after <= before for before, after in zip(*held_then, strict=True)) and held_then[1][2] == []


# In a process of its own: makes and frees contexts, and tells what it holds after the first ones and in the end.
CONTEXTS = """
import os, sys
import mujoco, numpy as np
from aioenv.rendering.canvas import Canvas
from aioenv.rendering.quality import FAST
def held():
    size = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return size, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
model = mujoco.MjModel.from_xml_string(sys.stdin.read())
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
image = np.empty((18, 24, 3), np.uint8)
for count in (20, 180):
    for _ in range(count):
        canvas = Canvas(model, FAST)
        canvas.look(data, mujoco.MjvCamera(), mujoco.MjvOption(), 24, 18)
        canvas.draw(image)
        canvas.close()
    print(*held())
"""


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["egl", "osmesa"])
def test_two_hundred_contexts_leave_nothing(backend):
    env = {**environment(), "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend, "LP_NUM_THREADS": "0"}
    done = subprocess.run([sys.executable, "-c", CONTEXTS], input=PLAIN, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    (size, *before), (later, *after) = (map(int, line.split()) for line in done.stdout.splitlines())
    print(backend, "MiB before, after:", round(size / 2**20, 1), round(later / 2**20, 1), before, after)
    assert later < size * 1.02 and after == before


def test_models_in_every_form(tmp_path):
    model = mujoco.MjModel.from_xml_string(PLAIN)
    (tmp_path / "model.xml").write_text(PLAIN)
    mujoco.mj_saveModel(model, str(tmp_path / "model.mjb"), None)
    forms = [model, mujoco.MjSpec.from_string(PLAIN), PLAIN, tmp_path / "model.xml", str(tmp_path / "model.mjb")]
    assert {pool_of(form).state_size for form in forms} == {pool_of(PLAIN).state_size}


# ------------------------------------------------------------ the blocking twin


def test_the_blocking_pool():
    with aioenv.sync.RenderPool(PLAIN, quality="fast", workers_per_device=2) as pool:
        states = some_states(pool, 5)
        images = pool.render(states, **SMALL)
        assert images.shape == (5, 18, 24, 3) and differ(images) and pool.num_workers == 2
        futures = [pool.submit(states[i:], **SMALL) for i in range(3)]
        assert all(np.array_equal(future.result(30), images[i:]) for i, future in enumerate(futures))
        with pytest.raises(ValueError, match="no camera"):
            pool.submit(states, **SMALL, camera="nowhere")
        dropped = pool.submit(np.tile(states, (200, 1)), width=80, height=60)
        assert dropped.cancel()
        assert np.array_equal(pool.render(states, **SMALL), images)
    pool.close()
    with pytest.raises(aioenv.ClosedError):
        pool.render(states, **SMALL)
    forgotten = aioenv.sync.RenderPool(PLAIN, quality="fast")
    del forgotten
    gc.collect()
