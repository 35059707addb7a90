"""
Images beside the steps
=======================

Draw the images of one step while the next step runs.

::

    python examples/rendering.py --steps 200
"""

import argparse
import asyncio
import time

import aioenv


async def main(steps: int, num_envs: int) -> None:
    # "exact" gives the pixels of mujoco.Renderer; "fast" leaves out shadows, reflections and multisampling
    config = aioenv.RenderConfig(width=84, height=84, quality="fast")
    async with aioenv.make_vec("HalfCheetah-v5", num_envs=num_envs, render=config) as envs:
        await envs.reset(seed=0)
        begin = time.perf_counter()
        for _ in range(steps):
            step = asyncio.ensure_future(envs.step(envs.action_space.sample()))
            await asyncio.sleep(0)  # the step is on its way …
            images = await envs.render()  # … while the images of the state before it are drawn
            await step
        seconds = time.perf_counter() - begin
    print(f"images {images.shape} {images.dtype}; {steps * num_envs / seconds:,.0f} images and env-steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--num-envs", type=int, default=16)
    args = parser.parse_args()
    aioenv.run(main(args.steps, args.num_envs))
