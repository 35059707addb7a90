"""Make the picture of the page that the documentation shows: `python -m tests.watching.picture [ENV]`.

It takes viser, playwright and Chromium (`make watch`).
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
from PIL import Image

import aioenv
from tests.docs.pages import DOCS
from tests.watching.browser_kit import NOTICES, open_page, picture

GROUND = slice(720, 790)  # rows of pixels in which nothing moves


async def main(env: str) -> None:
    """Watch 16 envs with random actions, wait until the page has faded in, and write what it shows."""
    async with aioenv.make_vec(env, 16, num_workers=2, render=aioenv.RenderConfig(workers=0)) as envs:
        watch = await envs.watch()
        await envs.reset(seed=0)

        async def step() -> None:
            while True:
                await envs.step(envs.action_space.sample())
                await asyncio.sleep(0.004)

        steps = asyncio.create_task(step())
        async with open_page(watch.url, []) as page:
            before = await picture(page)
            while True:
                await asyncio.sleep(8)
                await page.evaluate(NOTICES)
                after = await picture(page)
                if envs.stats().steps > 1_300 and np.abs(after - before)[GROUND].max() < 8:
                    break
                before = after
        steps.cancel()
    out = DOCS / "images" / "watch.webp"
    Image.fromarray(after.astype(np.uint8)).save(out, quality=85, method=6)
    print(out)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "HalfCheetah-v5"))
