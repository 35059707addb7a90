"""
A timeline
==========

Trace physics and images that overlap. Open run.json at https://ui.perfetto.dev, or sum it up.

::

    python examples/timeline.py && aioenv trace run.json
"""

import argparse
import asyncio

import numpy as np

import aioenv

ENVS = 8


async def main(steps: int, out: str) -> None:
    render = aioenv.RenderConfig(width=64, height=64, quality="fast", workers=1)
    async with aioenv.make_vec("Humanoid-v5", ENVS, num_workers=1, render=render, frame_skip=50) as envs:
        actions = np.zeros((steps + 1, ENVS, 17), np.float32)
        await envs.reset(seed=0)
        await envs.step(actions[0])
        with envs.trace(out) as trace:
            step = asyncio.ensure_future(envs.step(actions[0]))
            for t in range(1, steps + 1):
                await step
                step = asyncio.ensure_future(envs.step(actions[t]))  # the next step is on its way …
                await envs.render()  # … while the state of this one is drawn
            await step
        print(envs.stats())
        print(trace.path)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40, help="how many")
parser.add_argument("--out", default="run.json", help="where to write")
args = parser.parse_args()
aioenv.run(main(args.steps, args.out))
