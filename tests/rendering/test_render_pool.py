"""What the render pool draws and refuses. Tests bear the names of the lines of the reference's behaviour (RP1 to RP12).

Its faults (RP2, RP10, RP13), its memory, and whether its images are exact have files of their own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
from functools import partial
from pathlib import Path

import mujoco
import numpy as np
import pytest

import aioenv
from aioenv.cli.opengl import probe_opengl
from aioenv.rendering.config import parse_devices
from benchmarks.loop_time import CallbackClock
from tests.kits.mocap_kit import MOCAP
from tests.kits.render_pool_kit import ASSETS, PLAIN, SMALL, differ, pool_of, some_states


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
@pytest.mark.parametrize("transport", ["shared", "frames"])
async def test_rp3_rp4_rp5_rp6_rp7_rp15_shapes_order_cameras_refusals_views_and_rows(transport):
    async with pool_of(max_batch_size=7, max_image_size=101 * 103, transport=transport) as pool:
        states = some_states(pool, 5)
        await check_shapes(pool, states)
        await check_order(pool, states)
        await check_cameras(pool, states)
        check_refusals(pool, states)
        await check_views(pool, states)
        await check_rows_of_a_batch(pool, states)
    with pytest.raises(RuntimeError, match="the render pool was closed: it can't be used"):
        await pool.render(states, **SMALL)
    with pytest.raises(aioenv.ClosedError):
        await pool


async def check_shapes(pool, states):
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


async def check_order(pool, states):
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


async def check_cameras(pool, states):
    rgb = await pool.render(states, **SMALL, camera=["side", None])
    images = await pool.render(states, **SMALL)
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


LABELLED = mujoco.MjvOption()
LABELLED.label = 99


def check_refusals(pool, states):
    """Nothing is sent."""
    with_out = {**SMALL, "out": np.empty((5, 18, 24), np.uint8)}
    for wrong, message in [
        ({**SMALL, "camera": "nowhere"}, r"no camera 'nowhere'; it has \['side'\]"),
        ({**SMALL, "camera": 1}, "from -1 to 0, got 1"),
        ({**SMALL, "camera": 1.0}, "camera: expected"),
        ({**SMALL, "camera": []}, "camera: expected at least one"),
        ({**SMALL, "scene_option": {}}, r"scene_option: expected a mujoco\.MjvOption or None"),
        ({**SMALL, "scene_option": LABELLED}, "scene_option: label: expected 0 to"),
        ({"width": 102, "height": 103}, "make a RenderPool with a larger max_image_size"),
        ({"width": 0, "height": 3}, "width: expected an int from 1"),
        ({**SMALL, "slots": [0, 1, 2, 3, 7]}, "slots: expected ints from 0 to 6"),
        ({**SMALL, "slots": [0, 1, 2, 3, 3]}, "slots: expected each of them once"),
        ({**SMALL, "slots": [0, 1]}, "slots: expected one for each of 5 states"),
        ({**SMALL, "slots": [0.5] * 5}, "slots: expected a list of ints"),
        ({**SMALL, "randomize": True}, "randomize: the pool has no modder"),
        ({**SMALL, "edits": {"dof_damping": states}}, "edits: expected fields that a picture shows"),
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
        (mujoco.MjData(pool.model), r"write \[data\]"),
        (
            [mujoco.MjData(mujoco.MjModel.from_xml_string(MOCAP))],
            r"states\[0\]: expected an MjData of the pool's model",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            pool.submit(wrong_states, **SMALL)


async def check_views(pool, states):
    images = await pool.render(states, **SMALL)
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


async def check_rows_of_a_batch(pool, states):
    """RP15: images one by one, each to its row of a batch; slots number themselves unless they are named."""
    expected = await pool.render(states, **SMALL)
    batch = np.zeros_like(expected)
    drawn = [pool.submit([states[i]], **SMALL, slots=[i], out=batch[i : i + 1]) for i in (3, 0, 4, 1)]
    await asyncio.gather(*drawn)
    assert np.array_equal(batch[[3, 0, 4, 1]], expected[[3, 0, 4, 1]]) and not batch[2].any()
    assert np.array_equal(await pool.render(**SMALL, slots=range(5)), expected)  # slot 2 is as it was numbered before


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
        ({"quality": "best"}, ValueError, r"quality: expected one of \['exact', 'fast', 'coarse'\] or a RenderQuality"),
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


class PathLike:
    """A path that is no Path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.parametrize("take", [pool_of, lambda model: aioenv.SimPool(model, 1)])
def test_models_in_every_form(take, tmp_path, monkeypatch):
    """Those that draw take the same as those that compute."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = mujoco.MjModel.from_xml_string(PLAIN)
    path = tmp_path / "model.xml"
    path.write_text(PLAIN)
    mujoco.mj_saveModel(model, str(tmp_path / "model.mjb"), None)
    forms = [model, mujoco.MjSpec.from_string(PLAIN), PLAIN, path, PathLike(path), "~/model.xml"]
    for form in (*forms, str(tmp_path / "model.mjb")):
        assert np.array_equal(take(form).model.geom_size, model.geom_size)
    with pytest.raises(TypeError, match="model: expected an MjModel, an MjSpec, a path or a string of XML, got int"):
        take(3)


@pytest.mark.asyncio
async def test_a_pool_without_states_draws_the_slots_that_there_are():
    async with pool_of(workers_per_device=2) as pool:
        assert len(await pool.render(**SMALL)) == 2, "one a worker, as MjRenderPool"
        with pytest.raises(ValueError, match="no_such_field"):
            await pool.render(slots=[9], edits={"no_such_field": np.zeros((1, 1))}, **SMALL)
        assert len(await pool.render(**SMALL)) == 2, "the refused call used no slot"
        assert len(await pool.render(slots=[4], **SMALL)) == 1
        assert len(await pool.render(**SMALL)) == 5
    async with pool_of(max_batch_size=3) as pool:
        assert len(await pool.render(**SMALL)) == 3


# ------------------------------------------------------------ RP8 to RP12


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
    assert parse_devices(1) is None and parse_devices(3) == (0, 1, 2)
    # OSMesa knows no devices: here the variable is just handed over
    assert pool_of(devices=[1, 9], workers_per_device=2).devices == (1, 9, 1, 9)
    async with pool_of(devices=[1, 9], workers_per_device=1, backend="osmesa", modder=ByDevice) as pool:
        images = await pool.render(slots=range(4), width=20, height=20, camera="side", randomize=True)
        balls = images[:, 7, 10].tolist()
        assert balls == balls[:2] * 2 and balls[0][0] + 50 < balls[1][0]


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
    textures = np.tile(pool.model.mat_texid, (4, 1, 1))
    textures[0] = -1
    edited = await draw(edits={"mat_texid": textures})
    assert [np.array_equal(a, b) for a, b in zip(images, edited, strict=True)] == [False, True, True, True]
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


@pytest.mark.asyncio
@pytest.mark.stress
async def test_ten_thousand_states_take_the_loop_little_at_a_time():
    async with pool_of() as pool:
        states = np.tile(some_states(pool, 10), (1000, 1))
        with CallbackClock().running() as clock:
            images = await pool.render(states, width=84, height=84)
        assert len(clock.spans) > 100 and differ(images[:10]) and np.array_equal(images[:10], images[-10:])
        assert np.quantile(clock.spans, 0.99) < sum(clock.spans) / 20


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
        assert concurrent.futures.wait([dropped], timeout=30).done == {dropped}
        assert np.array_equal(pool.render(states, **SMALL), images)
    pool.close()
    with pytest.raises(aioenv.ClosedError):
        pool.render(states, **SMALL)
    forgotten = aioenv.sync.RenderPool(PLAIN, quality="fast")
    del forgotten
    gc.collect()


def test_a_blocking_pool_that_could_not_be_closed_is_closed_later():
    pool = aioenv.sync.RenderPool(PLAIN, quality="fast")
    with pytest.raises(aioenv.LoopError):
        pool._portal.run(pool.close)  # as the callback of a future that `submit` gave
    assert not pool.closed
    pool.close()
    assert pool.closed
