"""The snippets of pages run, with what the text around them speaks of, and print what the page says."""

from __future__ import annotations

import asyncio
import contextlib
import re

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import aioenv
from aioenv.stats.sharing import can_share
from tests.kits.cli_kit import needs_opengl
from tests.kits.docs_kit import cell, page, snippets

MODEL = f"{gym.__path__[0]}/envs/mujoco/assets/half_cheetah.xml"
N = 8  # slots, in place of 64


def blocks(name):
    """The snippets of a page, with fewer slots and steps, and a model that is there."""
    for block in snippets(page(name)):
        block = re.sub(r"\b(100|200|500|1000)\b", "3", re.sub(r"\b(64|16)\b", str(N), block))
        yield re.sub(r'"(model|robot)\.xml"', repr(MODEL), block)


def still(*shape):
    """A policy whose actions are zeros."""
    return lambda obs: np.zeros((len(obs), *shape), np.float32)


async def run(*cells, **names):
    names = {"aioenv": aioenv, "np": np, "asyncio": asyncio, "__name__": "__main__", **names}
    for each in cells:
        await cell(each, names)


@pytest.mark.asyncio
async def test_native():
    begin, field, sims = blocks("docs/native.md")
    actions = np.zeros((N, 8), np.float32)
    await run(begin, actions=actions)
    async with aioenv.make_vec("Ant-v5", N, backend="native") as envs:
        await run(field, envs=envs)
        assert (envs.model_field("body_mass")[[3, 5]] == 1.5 * envs.model_field("body_mass")[[0, 1]]).all()
    await run(sims, policy=still(6))


@pytest.mark.asyncio
async def test_reliability():
    late, restart = blocks("docs/reliability.md")
    async with aioenv.make_vec("Ant-v5", 2) as envs:
        await envs.reset(seed=0)
        for seconds in ("0.5", "0"):  # in time, and late
            await run(late.replace("0.5", seconds), envs=envs, actions=np.zeros((2, 8), np.float32))
    await run(restart)


@pytest.mark.asyncio
async def test_a_timeline(tmp_path):
    (block,) = blocks("docs/trace.md")
    async with aioenv.make_vec("CartPole-v1", 2, render_mode="rgb_array", num_workers=1) as envs:
        obs, _ = await envs.reset(seed=0)
        await run(block, envs=envs, obs=obs, policy=lambda obs: np.zeros(2, int))
    assert (tmp_path / "run.json").stat().st_size > 1000


@needs_opengl
@pytest.mark.asyncio
async def test_rendering(tmp_path):
    beside, stream, pixels, recorded, drawn, submitted, looks, modders = blocks("docs/rendering.md")
    actions = np.zeros((N, 6), np.float32)
    await run(beside, actions=actions)
    await run(pixels)
    model = mujoco.MjModel.from_xml_path(MODEL)
    states = [mujoco.MjData(model) for _ in range(2)]
    await run(drawn, looks, states=states, model=model)
    await run(modders, model=model, renderer=None)
    render = aioenv.RenderConfig(width=8, height=8, quality="fast")
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(aioenv.RenderPool(model))
        envs = await stack.enter_async_context(aioenv.make_vec("HalfCheetah-v5", N, render=render))
        await envs.reset()
        await run(submitted, pool=pool, envs=envs, states=states, actions=actions)
        taken = asyncio.ensure_future(run(stream.replace("...", "break"), envs=envs))
        await asyncio.sleep(0)  # it waits for the next result's images
        await envs.step(actions)
        await taken
        await run(recorded, envs=envs, policy=still(6))
    assert (tmp_path / "run.mp4").stat().st_size > 0


SHARING = page("docs/sharing.md")


@pytest.mark.skipif(not can_share(), reason="no memory without a name here")
def test_the_examples_of_sharing_run(capsys):
    names = {"__name__": "__main__"}
    for code in snippets(SHARING):
        exec(code, names)
    (table,) = re.findall(r"```\n(eval.*?)```", SHARING, re.S)
    printed = capsys.readouterr().out
    assert printed.startswith(table)
    assert "[0, 4, 8]" in printed
    assert "\n808 [" in printed  # 8 resets, 100 steps of 8
    assert "(4,) CartPole-v1\n44 {'counts': [" in printed  # 4 resets, 10 steps of 4
