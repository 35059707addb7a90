"""How fast images are drawn: by a `RenderPool`, and by bare loops of mjr_render and mjr_readPixels."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

import aioenv
from aioenv.cli.bench.common import NotApplicable
from aioenv.cli.bench.tasks import Passes, Task
from aioenv.cli.children import python
from aioenv.platform import usable_cpus
from aioenv.rendering.backends import backend_environment, candidate_backends
from aioenv.rendering.quality import parse_quality

__all__ = ["IMAGES_PER_S", "QUALITIES", "bare_images", "pool_images", "worker_images"]

IMAGES_PER_S = "images/s"
SIDE = 84
# A worker that takes longer over a few images has hung: mujoco issue 3444 tells of eight on one GPU.
HANG_S = 30.0

# One bare loop: no pool, no frames, and no flip of what OpenGL has upside down; but each image is of another state.
# What it draws with is MuJoCo's own, or what the pool draws with (`alike`).
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

QualityName: TypeAlias = Literal["exact", "fast"]
QUALITIES: tuple[QualityName, ...] = ("fast", "exact")


def _states(task: Task) -> tuple[aioenv.RenderPool, npt.NDArray[np.float64]]:
    """A pool that is not started, for what it knows of the model; and so many states, of steps with random actions.

    Raises:
        NotApplicable: if the env is none of MuJoCo's.
    """
    env = task.make_env()
    base = env.unwrapped
    if not hasattr(base, "model"):
        raise NotApplicable(f"{task.env} has no MuJoCo model to draw")
    pool = aioenv.RenderPool(base.model)
    env.reset(seed=0)
    env.action_space.seed(0)
    states: list[npt.NDArray[np.float64]] = []
    while len(states) < task.num_envs:
        if any(env.step(env.action_space.sample())[2:4]):
            env.reset()
        states.append(pool.get_state(base.data))
    env.close()
    return pool, np.array(states)


def bare_images(quality: QualityName, count: int | None, alike: bool, task: Task) -> dict[str, float]:
    """Bare loops, all at once.

    Args:
        count: how many; None for one a CPU.
        alike: whether they draw with what the pool draws with; else with MuJoCo's own.
    """
    pool, states = _states(task)
    from aioenv.state.render_source import dump_model

    how = parse_quality(quality), SIDE, task.warm_up_s, task.seconds, alike
    what = (dump_model(pool.model), pool.state_spec, states, *how)
    loops: list[subprocess.Popen[bytes]] = []
    env = {**os.environ, **backend_environment(candidate_backends(None)[0])}
    try:
        for _ in range(count or usable_cpus()):
            loop = subprocess.Popen(python(_BARE), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
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
        raise RuntimeError("a bare loop has ended; what it printed is above")
    return lines


def pool_images(quality: QualityName, transport: str, task: Task) -> dict[str, float]:
    """A pool with a worker a CPU: batches of so many states as there are envs, two of them in flight."""
    pool, states = _states(task)
    return {IMAGES_PER_S: _rate(task, pool.model, states, quality, usable_cpus(), transport=transport)}


def worker_images(workers: int, task: Task) -> dict[str, float]:
    """A pool with so many workers on the one device that MuJoCo chooses, in either quality."""
    pool, states = _states(task)
    larger = dataclasses.replace(task, num_envs=max(task.num_envs, 16 * workers))
    states = np.resize(states, (larger.num_envs, states.shape[1]))
    rates: dict[str, float] = {}
    for quality in QUALITIES:
        rates[f"{quality} /s"] = _rate(larger, pool.model, states, quality, workers)
    return rates


def _rate(task: Task, model: Any, states: npt.NDArray[np.float64], quality: Any, workers: int, **how: Any) -> float:
    async def main() -> float:
        async with aioenv.RenderPool(
            model,
            quality=quality,
            workers_per_device=workers,
            start=task.start,
            channel=task.channel,
            timeout_s=HANG_S,
            **how,
        ) as pool:
            flying = pool.submit(states, width=SIDE, height=SIDE)
            for _ in (passes := Passes(task)):
                following = pool.submit(states, width=SIDE, height=SIDE)
                await flying
                flying = following
            await flying
            # as much of a batch was drawn before the clock ran as is of the last one
            return passes.count * len(states) / passes.seconds

    return aioenv.run(main())
