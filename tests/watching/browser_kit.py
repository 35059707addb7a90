"""The page of a run in Chromium: pictures of it, and where its tiles are."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import AsyncIterator
from pathlib import Path

import gymnasium
import numpy as np
import numpy.typing as npt
from PIL import Image
from playwright.async_api import Page, async_playwright

from aioenv.state.render_source import find_source
from aioenv.watching.scene import FOV, ShownModel, arrange

CHROMIUM = Path("/usr/bin/chromium")
SIZE = 1200, 800
# WebGL on the CPU
OPTIONS = ["--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
OPTIONS += ["--ignore-gpu-blocklist", "--disable-background-networking", "--disable-component-update"]
# of viser, about WebGL on the CPU
NOTICES = "document.querySelectorAll('[class*=Notification-root]').forEach(notice => notice.remove())"

Picture = npt.NDArray[np.int16]


@contextlib.asynccontextmanager
async def open_page(url: str, errors: list[str]) -> AsyncIterator[Page]:
    """Open a page; what it logs as an error is added to `errors`."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = await browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        await page.goto(url)
        try:
            yield page
        finally:
            await browser.close()


async def picture(page: Page) -> Picture:
    """What the page shows."""
    taken = await page.screenshot(timeout=60_000)
    return np.asarray(Image.open(io.BytesIO(taken)).convert("RGB"), np.int16)


class Tiles:
    """Where the tiles of an env are in a picture.

    Args:
        env: an id.
        k: how many tiles.
    """

    def __init__(self, env: str, k: int) -> None:
        made = gymnasium.make(env)
        source = find_source(made)
        made.close()
        assert source is not None
        model = ShownModel(source)
        view, _ = arrange(k, [model])
        position, target = np.array(view.position), np.array(view.target)
        forward = (target - position) / np.linalg.norm(target - position)
        right = np.cross(forward, [0, 0, 1])
        right /= np.linalg.norm(right)
        up = np.cross(right, forward)
        focal = SIZE[1] / 2 / math.tan(FOV / 2)
        self._boxes = []
        for place in view.places:
            # the inner part, which neither labels nor neighbours reach
            middle = place + np.array([0, 0, 0.5 * model.height]) - position
            scale = focal / (middle @ forward)
            x, y = SIZE[0] / 2 + scale * (middle @ right), SIZE[1] / 2 - scale * (middle @ up)
            across, along = 0.25 * model.extent[0] * scale, 0.4 * model.height * scale
            self._boxes.append(tuple(map(round, (y - along, y + along, x - across, x + across))))

    def changed(self, before: Picture, after: Picture) -> set[int]:
        """The tiles in which two pictures differ."""
        far = np.abs(after - before).max(2) > 24
        return {
            slot for slot, (top, bottom, left, right) in enumerate(self._boxes) if far[top:bottom, left:right].sum() > 8
        }
