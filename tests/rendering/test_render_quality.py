"""Qualities: what "fast" and "coarse" leave out, and what they must not change."""

from __future__ import annotations

import asyncio
import dataclasses

import gymnasium
import mujoco
import numpy as np
import pytest

from aioenv import RenderQuality
from aioenv.rendering.config import COARSE, FAST
from tests.kits.render_pool_kit import pool_of

PLAIN = RenderQuality(shadows=False, reflections=False, samples=0)
FLOOR = """
<mujoco>
  <asset><material name="wet" rgba=".5 .5 .6 1" specular="1" shininess=".3"/></asset>
  <worldbody>
    <light directional="{light}" pos="0 0 2" dir=".4 .3 -1" specular="1 1 1"/>
    <geom type="plane" size="10 10 {patch}" material="wet"/>
    <geom type="capsule" pos="0 0 .6" size=".3 .5" euler="0 60 20"/>
  </worldbody>
</mujoco>
"""
SUNNY, SUNNY_COARSE = (FLOOR.format(light="true", patch=patch) for patch in (0.1, 20))
LAMP, LAMP_COARSE = (FLOOR.format(light="false", patch=patch) for patch in (0.1, 20))


async def draw(*drawn) -> list[np.ndarray]:
    """What each (model, quality) shows; int, so that differences can be negative."""

    async def one(model, quality):
        async with pool_of(model, quality=quality, workers_per_device=1) as pool:
            return (await pool.render(slots=[0], width=84, height=84))[0].astype(int)

    return await asyncio.gather(*(one(*each) for each in drawn))


@pytest.mark.asyncio
async def test_planes_of_fewer_patches_look_the_same():
    with gymnasium.make("Hopper-v5") as env:
        model = env.unwrapped.model
    images = []
    for quality in (PLAIN, "fast"):
        async with pool_of(model, quality=quality, workers_per_device=1) as pool:
            images.append(await pool.render(slots=[0], width=84, height=84, depth=True, segmentation=True))
    (rgb, depth, segmentation), (other, deep, seen) = images
    assert np.abs(rgb.astype(int) - other).max() <= 2
    assert np.array_equal(segmentation, seen)
    np.testing.assert_allclose(depth, deep, rtol=1e-4)


@pytest.mark.asyncio
@pytest.mark.parametrize("task", ["Ant-v5", "Humanoid-v5", "Swimmer-v5"])
async def test_straight_sides_of_fewer_stacks_look_the_same(task):
    with gymnasium.make(task) as env:
        model = env.unwrapped.model
    many, few = await draw((model, dataclasses.replace(FAST, side_stacks=None)), (model, "fast"))
    off = np.abs(many - few).max(axis=2)
    assert 0 < (off > 0).mean() < 0.02
    assert (off > 2).mean() < 0.001


@pytest.mark.asyncio
async def test_planes_are_cut_into_fewer_patches():
    single = RenderQuality(shadows=False, reflections=False, samples=0, plane_patches=1)
    many, one, coarse = await draw((SUNNY, PLAIN), (SUNNY, single), (SUNNY_COARSE, PLAIN))
    assert np.abs(one - many).max() > 2  # light at four corners alone
    assert (one == coarse).all()


@pytest.mark.asyncio
async def test_planes_under_lights_that_have_a_place_are_as_they_were():
    many, fast, coarse = await draw((LAMP, PLAIN), (LAMP, "fast"), (LAMP_COARSE, PLAIN))
    assert (fast == many).all()
    assert np.abs(coarse - many).max() > 20  # they would not be


@pytest.mark.asyncio
async def test_coarse_shapes_have_fewer_sides_and_never_more():
    more = RenderQuality(shadows=False, reflections=False, samples=0, slices=500, stacks=500)
    fast, coarse, plain, same = await draw((SUNNY, "fast"), (SUNNY, "coarse"), (SUNNY, PLAIN), (SUNNY, more))
    assert 0 < (fast != coarse).any(axis=2).mean() < 0.2
    assert (same == plain).all()


def test_the_sizes_of_planes_stay_the_models_own():
    model = mujoco.MjModel.from_xml_string(SUNNY)
    before = model.geom_size.copy()
    with COARSE.prepared_planes(model):
        assert (model.geom_size != before).sum() == 1
    assert (model.geom_size == before).all()


@pytest.mark.parametrize(
    "wrong", [{"slices": 2}, {"stacks": 1.5}, {"side_stacks": 1}, {"plane_patches": 0}, {"plane_patches": True}]
)
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected an int from"):
        RenderQuality(**wrong)
