"""Measure images: as observations, beside the steps, of a `RenderPool`, and of bare loops of MuJoCo's own calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt

import aioenv
from aioenv.cli.contenders import ACTION_BATCHES, NotApplicable, TimedLoop, Workload, natively
from aioenv.cli.processes import python_command
from aioenv.platform import usable_cpus
from aioenv.rendering.backends import backend_environment, candidate_backends
from aioenv.rendering.config import parse_quality

__all__ = [
    "IMAGES_PER_S",
    "QUALITIES",
    "SIDE",
    "bare_images",
    "overlap",
    "pixels_aioenv",
    "pixels_gymnasium",
    "pixels_native",
    "pool_images",
    "worker_images",
]

SIDE = 84  # of an image, in pixels
IMAGES_PER_S = "images/s"
FRAME_SKIP = 5  # of Gymnasium's Humanoid
# The parameters of `overlap`: pilot runs, the steps of each, the steps of a round, and rounds.
PILOTS, PILOT_STEPS, ROUND_STEPS, ROUNDS = 4, 15, 20, 5
EVEN = 1.1  # physics and images take equally long if neither takes more than so many times as long as the other
# A worker that takes longer over a few images has hung: mujoco issue 3444 reports eight that do on one GPU.
HANG_S = 30.0

QualityName: TypeAlias = Literal["exact", "fast"]
QUALITIES: tuple[QualityName, ...] = ("fast", "exact")


# ---------------------------------------------------------------- images as observations, and beside the steps


def _with_images(env: str) -> Any:
    made = gymnasium.make(env, render_mode="rgb_array", width=SIDE, height=SIDE)
    return gymnasium.wrappers.AddRenderObservation(made)


def pixels_gymnasium(workload: Workload) -> dict[str, float]:
    """Measure Gymnasium's vector env, from its fork server, with its own wrapper of images."""
    from gymnasium.vector import AsyncVectorEnv

    backend = backend_environment("egl")
    # by default its workers draw with as many threads as there are CPUs
    os.environ.update({name: backend[name] for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM")})
    actions = workload.actions()
    make_envs = [partial(_with_images, workload.env)] * workload.num_envs
    with contextlib.closing(AsyncVectorEnv(make_envs, context="forkserver")) as envs:
        envs.reset(seed=0)
        for number in (loop := TimedLoop(workload)):
            envs.step(actions[number % ACTION_BATCHES])
    return {"env-steps/s": loop.count * workload.num_envs / loop.seconds}


def pixels_aioenv(quality: Any, workload: Workload) -> dict[str, float]:
    """Measure aioenv with `pixels=`."""

    async def main() -> dict[str, float]:
        actions = workload.actions()
        config = aioenv.RenderConfig(SIDE, SIDE, quality=quality)
        async with aioenv.make_vec(workload.env, workload.num_envs, pixels=config, **workload.options) as envs:
            await envs.reset(seed=0)
            for number in (loop := TimedLoop(workload)):
                await envs.step(actions[number % ACTION_BATCHES])
        return {"env-steps/s": loop.count * workload.num_envs / loop.seconds}

    return aioenv.run(main())


def pixels_native(quality: Any, workload: Workload) -> dict[str, float]:
    """Measure it with the physics as one batch in this process, and render workers beside it.

    Raises:
        NotApplicable: if the env has no vectorised version.
    """
    return pixels_aioenv(quality, natively(workload))


def overlap(workload: Workload) -> dict[str, float]:
    """Measure physics in one env worker and images in one render worker: at once, and one after the other.

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
        kwargs: dict[str, Any] = {"num_workers": 1, **workload.options, "frame_skip": FRAME_SKIP}
        for left in reversed(range(PILOTS)):
            async with (
                aioenv.make_vec(workload.env, workload.num_envs, **kwargs) as plain,
                aioenv.make_vec(workload.env, workload.num_envs, render=config, **kwargs) as drawn,
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


# ---------------------------------------------------------------- images of states

# One bare loop: no pool, no frames, and images stay upside down, as OpenGL has them; each image is of another state.
# It draws with MuJoCo's own contexts, or with those of the pool (`alike`).
_BARE = """
import pickle, sys, time
import mujoco, numpy as np
from aioenv.rendering.contexts import make_contexts
data, spec, states, quality, side, warm_up_s, seconds, alike = pickle.load(sys.stdin.buffer)
model = mujoco.MjModel.from_binary_path("m.mjb", {"m.mjb": data})
data = mujoco.MjData(model)
quality.prepare_model(model)
scene = mujoco.MjvScene(model, 10_000)
quality.prepare_scene(scene)
gl = mujoco.GLContext(side, side)
gl.make_current()
model.vis.global_.offwidth = model.vis.global_.offheight = side
if alike:
    contexts = make_contexts(model, quality)
else:
    with quality.prepared_planes(model):
        contexts = [mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)]
context = contexts[0]
mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, context)
rect, option, camera = mujoco.MjrRect(0, 0, side, side), mujoco.MjvOption(), mujoco.MjvCamera()
mujoco.mjv_defaultFreeCamera(model, camera)
image = np.empty((side, side, 3), np.uint8)
print("ready", flush=True)
sys.stdin.buffer.read(1)
for budget in (warm_up_s, seconds):
    count, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < began + budget or not count:
        mujoco.mj_setState(model, data, states[count % len(states)], spec)
        mujoco.mj_forward(model, data)
        mujoco.mjv_updateScene(model, data, option, None, camera, mujoco.mjtCatBit.mjCAT_ALL.value, scene)
        mujoco.mjr_render(rect, scene, context)
        mujoco.mjr_readPixels(image, None, rect, context)
        count += 1
print(count / (now - began), flush=True)
for context in contexts:
    context.free()
gl.free()
"""


def _states(workload: Workload) -> tuple[aioenv.RenderPool, npt.NDArray[np.float64]]:
    """Make a pool that is not started, for its model, and a state for each env, of steps with random actions.

    Raises:
        NotApplicable: if the env has no MuJoCo model.
    """
    env = workload.make_env()
    base = env.unwrapped
    if not hasattr(base, "model"):
        raise NotApplicable(f"{workload.env} has no MuJoCo model to draw")
    pool = aioenv.RenderPool(base.model)
    env.reset(seed=0)
    env.action_space.seed(0)
    states: list[npt.NDArray[np.float64]] = []
    while len(states) < workload.num_envs:
        if any(env.step(env.action_space.sample())[2:4]):
            env.reset()
        states.append(pool.get_state(base.data))
    env.close()
    return pool, np.array(states)


def bare_images(quality: QualityName, count: int | None, alike: bool, workload: Workload) -> dict[str, float]:
    """Measure bare loops, all at once.

    Args:
        quality: of the images.
        count: how many loops; None for one a CPU.
        alike: whether they draw with the pool's contexts; else with MuJoCo's own.
        workload: the env whose states are drawn.
    """
    pool, states = _states(workload)
    from aioenv.state.render_source import dump_model

    how = parse_quality(quality), SIDE, workload.warm_up_s, workload.seconds, alike
    what = (dump_model(pool.model), pool.state_spec, states, *how)
    loops: list[subprocess.Popen[bytes]] = []
    env = {**os.environ, **backend_environment(candidate_backends(None)[0])}
    try:
        for _ in range(count or usable_cpus()):
            loop = subprocess.Popen(python_command(_BARE), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
            loops.append(loop)
            assert loop.stdin is not None
            loop.stdin.write(pickle.dumps(what))
            loop.stdin.flush()
        _lines(loops)
        for loop in loops:
            assert loop.stdin is not None
            loop.stdin.write(b"g")
            loop.stdin.flush()
        return {IMAGES_PER_S: sum(map(float, _lines(loops)))}
    finally:
        for loop in loops:
            loop.communicate()


def _lines(loops: Sequence[subprocess.Popen[bytes]]) -> list[str]:
    lines = [loop.stdout.readline().decode() for loop in loops if loop.stdout is not None]
    if not all(lines):
        raise RuntimeError("a bare loop has ended; its error is printed above")
    return lines


def pool_images(quality: QualityName, transport: str, workload: Workload) -> dict[str, float]:
    """Measure a pool with a worker a CPU: batches of a state of each env, two of them in flight."""
    pool, states = _states(workload)
    return {IMAGES_PER_S: _rate(workload, pool.model, states, quality, usable_cpus(), transport=transport)}


def worker_images(workers: int, workload: Workload) -> dict[str, float]:
    """Measure a pool with so many workers on the one device that MuJoCo chooses, in either quality."""
    pool, states = _states(workload)
    larger = dataclasses.replace(workload, num_envs=max(workload.num_envs, 16 * workers))
    states = np.resize(states, (larger.num_envs, states.shape[1]))
    rates: dict[str, float] = {}
    for quality in QUALITIES:
        rates[f"{quality} /s"] = _rate(larger, pool.model, states, quality, workers)
    return rates


def _rate(
    workload: Workload, model: Any, states: npt.NDArray[np.float64], quality: Any, workers: int, **how: Any
) -> float:
    async def main() -> float:
        async with aioenv.RenderPool(
            model,
            quality=quality,
            workers_per_device=workers,
            start=workload.start,
            channel=workload.channel,
            timeout_s=HANG_S,
            **how,
        ) as pool:
            in_flight = pool.submit(states, width=SIDE, height=SIDE)
            for _ in (loop := TimedLoop(workload)):
                following = pool.submit(states, width=SIDE, height=SIDE)
                await in_flight
                in_flight = following
            await in_flight
            # the part of the first batch drawn before the clock ran makes up for the last, drawn after it
            return loop.count * len(states) / loop.seconds

    return aioenv.run(main())
