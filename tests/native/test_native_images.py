"""NativeVectorEnv: images, drawn from the states of the batch."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aioenv
from aioenv import sync
from tests.kits.native_kit import TASK, Batch, Hindered, Pendulums
from tests.kits.video_kit import pictures

pytestmark = pytest.mark.asyncio

SMALL = aioenv.RenderConfig(32, 24, quality="fast", workers=2)
PLACES = [{}, {"run_in": "inline"}, {"num_workers": 2}]


def actions(n, steps):
    return np.random.default_rng(0).uniform(-3, 3, (steps, n, 1)).astype(np.float32)


@pytest.mark.parametrize("where", PLACES, ids=str)
async def test_images_are_those_of_single_envs(where):
    async with (
        aioenv.NativeVectorEnv(Pendulums, 4, render=SMALL, **where) as envs,
        aioenv.make_vec(TASK, 4, num_workers=1, render=SMALL) as singles,
    ):
        with pytest.raises(aioenv.RenderError, match="reset"):
            await envs.render()
        for each in (envs, singles):
            await each.reset(seed=[3, 4, 5, 6])
        first = await envs.render()
        assert not first.flags.owndata  # but a block of shared memory
        assert first.shape == (4, 24, 32, 3) and first.tobytes() == (await singles.render()).tobytes()
        for action in actions(4, 30):
            mine, theirs = await envs.step(action), await singles.step(action)
            assert mine.obs.tobytes() == theirs.obs.tobytes()
        assert (await envs.render()).tobytes() == (await singles.render()).tobytes() != first.tobytes()
        # a step may be in flight meanwhile
        before = (await envs.render()).copy()
        step = asyncio.ensure_future(envs.step(actions(4, 1)[0]))
        await asyncio.sleep(0)
        during = await envs.render()
        await step
        assert during.tobytes() in (before.tobytes(), (await envs.render()).tobytes())
        await singles.step(actions(4, 1)[0])
        mask = np.array([False, True, False, False])
        for each in (envs, singles):
            await each.reset(seed=8, options={"reset_mask": mask})
        assert (await envs.render()).tobytes() == (await singles.render()).tobytes()


@pytest.mark.parametrize("where", [{}, {"num_workers": 2}], ids=str)
async def test_images_of_what_was_received(where):
    async with (
        aioenv.NativeVectorEnv(Pendulums, 4, render=SMALL, **where) as envs,
        aioenv.make_vec(TASK, 4, num_workers=1, render=SMALL) as singles,
    ):
        for each in (envs, singles):
            each.send_reset(seed=3)
            await each.recv(4)
            each.send(actions(4, 1)[0])
        first = await envs.render()
        for each in (envs, singles):
            await each.recv(4)
            each.send_reset([2, 1], seed=9)
            assert (await each.recv(2)).slots.tolist() == [1, 2]
        images = await envs.render()
        assert images.tobytes() == (await singles.render()).tobytes() != first.tobytes()


@pytest.mark.parametrize("where", [{"run_in": "inline"}, {"num_workers": 1}], ids=str)
async def test_a_step_that_failed_has_no_images(where):
    ok, bad = np.zeros((2, 1), np.float32), np.full((2, 1), 2, np.float32)
    async with aioenv.NativeVectorEnv(Hindered, 2, render=SMALL, **where) as envs:
        await envs.reset(seed=1)
        with pytest.raises(aioenv.EnvError):
            await envs.step(bad)
        with pytest.raises(aioenv.RenderError, match="as it was told"):
            await envs.render()
        await envs.reset(seed=1)
        await envs.step(ok)
        assert (await envs.render()).any()


@pytest.mark.parametrize("take", [True, False])
async def test_a_cancelled_step_shows_when_it_is_taken(take):
    async with aioenv.NativeVectorEnv(Pendulums, 2, render=SMALL, run_in="thread") as envs:
        await envs.reset(seed=1)
        first = await envs.render()
        step = asyncio.ensure_future(envs.step(actions(2, 1)[0]))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        if take:
            await envs.recv(2)
            assert (await envs.render()).tobytes() != first.tobytes()
        else:
            assert (await envs.render()).tobytes() == first.tobytes()
            await envs.step(actions(2, 1)[0])
            assert (await envs.render()).tobytes() != first.tobytes()


class Narrow(Pendulums):
    def physics_states(self, slots=None, out=None):
        return super().physics_states(slots, out)[:, 1:]


class Single(Pendulums):
    def physics_states(self, slots=None, out=None):
        return super().physics_states(slots, out).astype(np.float32)


@pytest.mark.parametrize("where", [{}, {"num_workers": 1}], ids=str)
async def test_images_that_can_not_be_had(where):
    async with aioenv.make_vec("Hopper-v5", 2, backend="native", **where) as envs:
        with pytest.raises(aioenv.RenderError, match=r"made without render=aioenv\.RenderConfig"):
            await envs.render()
    with pytest.raises(aioenv.RenderError, match=r'no model and physics_states.*; backend="workers" takes envs'):
        await aioenv.NativeVectorEnv(Batch, 2, render=SMALL, **where)
    for made, got in ((Narrow, r"float64 \(\d, "), (Single, r"float32 \(\d, ")):
        with pytest.raises(aioenv.WorkerStartError, match=rf"of {made.__name__}: expected float64 .* got {got}"):
            await aioenv.NativeVectorEnv(made, 2, render=SMALL, **where)
    if not where:
        config = aioenv.RenderConfig(8, 8, camera="nowhere")
        with pytest.raises(ValueError, match="nowhere"):
            await aioenv.NativeVectorEnv(Pendulums, 2, render=config, **where)


async def test_blocking_images():
    with sync.make_vec(Pendulums, 2, backend="native", render=SMALL) as envs:
        envs.reset(seed=1)
        images = envs.render()
        assert len(images) == 2 and images[0].shape == (24, 32, 3) and images[0].any()


@pytest.mark.parametrize("where", [{}, {"num_workers": 2}], ids=str)
async def test_results_that_are_taken_together_are_one_of_a_stream(where):
    async with aioenv.make_vec(TASK, 2, backend="native", render=SMALL, **where) as envs:
        await envs.reset(seed=1)
        stream = envs.render_stream()
        for _ in range(2):
            for slot in range(2):
                envs.send(np.ones((1, 1), np.float32), [slot])
            assert len((await envs.recv(2)).slots) == 2
            newest = await envs.render()
        for expected in 1, 2:
            step, images = await anext(stream)
            assert step == expected
        assert np.array_equal(images, newest)


@pytest.mark.parametrize("where", [{"run_in": "inline"}, {"num_workers": 2}], ids=str)
async def test_streams_grids_and_videos(where, tmp_path):
    """Of a step that is made at once, too: a video's picture is of the states before it."""
    large = aioenv.RenderConfig(96, 64, quality="fast", workers=1)
    async with aioenv.NativeVectorEnv(Pendulums, 2, render=large, **where) as envs:
        stream = envs.render_stream(100)
        done = await aioenv.record(envs, tmp_path / "x.mp4", steps=6)
        items = [await anext(stream) for _ in range(7)]
        assert [step for step, _ in items] == list(range(7)) and done.pictures == 7
        assert np.array_equal(items[-1][1], await envs.render())
        grids = [np.concatenate(list(images), axis=1) for _, images in items]
        assert np.array_equal(await envs.render("grid"), grids[-1])
    shown = pictures(tmp_path / "x.mp4", 64, 192).astype(int)
    distances = np.abs(shown[:, None] - np.array(grids, int)).mean(axis=(2, 3, 4))
    assert len(shown) == 7 and distances.argmin(axis=1).tolist() == list(range(7))
