"""Envs that are drawn: images as observations, and images beside the steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from typing import Any

import gymnasium

import aioenv
from aioenv.cli.bench.ours import natively
from aioenv.cli.bench.tasks import ACTION_BATCHES, Passes, Task
from aioenv.rendering.backends import backend_environment

__all__ = ["SIDE", "overlap", "pixels_aioenv", "pixels_gymnasium", "pixels_native"]

SIDE = 84  # of an image, in pixels
FRAME_SKIP = 5  # of Gymnasium's Humanoid
PILOTS, PILOT_STEPS, ROUND_STEPS, ROUNDS = 4, 15, 20, 5
EVEN = 1.1  # how many times as long the one may take as the other


def _with_images(env: str) -> Any:
    made = gymnasium.make(env, render_mode="rgb_array", width=SIDE, height=SIDE)
    return gymnasium.wrappers.AddRenderObservation(made)


def pixels_gymnasium(task: Task) -> dict[str, float]:
    """Of Gymnasium's, from its fork server, with its own wrapper."""
    from gymnasium.vector import AsyncVectorEnv

    backend = backend_environment("egl")
    # its workers draw with as many threads as there are CPUs, as they come
    os.environ.update({name: backend[name] for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM")})
    actions = task.actions()
    make_envs = [partial(_with_images, task.env)] * task.num_envs
    with contextlib.closing(AsyncVectorEnv(make_envs, context="forkserver")) as envs:
        envs.reset(seed=0)
        for number in (passes := Passes(task)):
            envs.step(actions[number % ACTION_BATCHES])
    return {"env-steps/s": passes.count * task.num_envs / passes.seconds}


def pixels_aioenv(quality: Any, workers: int | None, task: Task) -> dict[str, float]:
    """Of aioenv."""

    async def main() -> dict[str, float]:
        actions = task.actions()
        config = aioenv.RenderConfig(SIDE, SIDE, quality=quality, workers=workers)
        async with aioenv.make_vec(task.env, task.num_envs, pixels=config, **task.options) as envs:
            await envs.reset(seed=0)
            for number in (passes := Passes(task)):
                await envs.step(actions[number % ACTION_BATCHES])
        return {"env-steps/s": passes.count * task.num_envs / passes.seconds}

    return aioenv.run(main())


def pixels_native(quality: Any, task: Task) -> dict[str, float]:
    """Of aioenv, with the physics as one batch in this process, and render workers beside it.

    Raises:
        NotApplicable: if nobody has written the env as one vector env.
    """
    return pixels_aioenv(quality, None, natively(task))


def overlap(task: Task) -> dict[str, float]:
    """Physics in one env worker and images in one render worker: at once, against one after the other.

    Pilot runs find a frame skip with which both take about as long.
    """
    config = aioenv.RenderConfig(SIDE, SIDE, quality="fast", workers=1)

    async def timed(envs: Any, steps: int, way: str) -> float:
        actions = [envs.action_space.sample() for _ in range(steps)]
        began = time.perf_counter()
        for action in actions:
            if way == "overlapped":
                step = asyncio.ensure_future(envs.step(action))
                await asyncio.sleep(0)
                await envs.render()
                await step
            else:
                await envs.step(action)
                if way == "serial":
                    await envs.render()
        return (time.perf_counter() - began) / steps * 1e3

    async def main() -> dict[str, float]:
        kwargs: dict[str, Any] = {"num_workers": 1, **task.options, "frame_skip": FRAME_SKIP}
        for left in reversed(range(PILOTS)):
            async with (
                aioenv.make_vec(task.env, task.num_envs, **kwargs) as plain,
                aioenv.make_vec(task.env, task.num_envs, render=config, **kwargs) as drawn,
            ):
                for envs in (plain, drawn):
                    await envs.reset(seed=0)
                    await timed(envs, PILOT_STEPS, "physics")
                physics = await timed(plain, PILOT_STEPS, "physics")
                uneven = (await timed(drawn, PILOT_STEPS, "serial") - physics) / physics
                if not left or 1 / EVEN < uneven < EVEN:
                    return await measured(plain, drawn)
            kwargs["frame_skip"] = max(1, round(kwargs["frame_skip"] * uneven))
        raise AssertionError("the last pilot is followed by the measurement")

    async def measured(plain: Any, drawn: Any) -> dict[str, float]:
        found: dict[str, list[float]] = {"physics": [], "serial": [], "overlapped": []}
        for _ in range(ROUNDS):
            for way, times in found.items():
                times.append(await timed(plain if way == "physics" else drawn, ROUND_STEPS, way))
        physics, serial, both = (sorted(times)[ROUNDS // 2] for times in found.values())
        images = serial - physics
        return {
            "of longer": both / max(physics, images),
            "of serial": both / serial,
            "physics ms": physics,
            "images ms": images,
        }

    return aioenv.run(main())
