"""Draw the moving picture of the landing page: 16 HalfCheetahs, each with a gait of its own.

    MUJOCO_GL=egl python docs/landing_picture.py

The gaits are sines: random ones, of which the best are kept and varied. It writes `_static/cheetahs.webp` and, for
readers who want no motion, its first image as `_static/cheetahs-still.webp`. Both are the same for the same versions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

import aioenv

JOINTS = 6
TILES = 16
CANDIDATES = 64
SEED = 0  # of every slot: in the film a gait runs as it did in the search
ZOOM = 1.35
GAP = 4  # pixels between the images
FRAME_MS = 50  # of an image: HalfCheetah's own pace


class Gaits(NamedTuple):
    """Open-loop policies: each joint of each slot follows a sine, plus some noise."""

    frequency: npt.NDArray[np.float64]  # (slots, 1), in cycles a step
    offset: npt.NDArray[np.float64]  # (slots, joints)
    size: npt.NDArray[np.float64]
    phase: npt.NDArray[np.float64]

    def actions(self, step: int) -> npt.NDArray[np.float32]:
        """Return the actions of all slots at a step."""
        wave = self.offset + self.size * np.sin(2 * np.pi * (self.frequency * step + self.phase))
        return np.clip(wave, -1, 1).astype(np.float32)

    def of(self, slots: npt.NDArray[np.int64]) -> Gaits:
        """Return the gaits of some slots."""
        return Gaits(*(values[slots] for values in self))

    def varied(self, rng: np.random.Generator) -> Gaits:
        """Return the same gaits with a little noise."""
        scales = (0.004, 0.1, 0.1, 0.04)
        return Gaits(*(v + rng.normal(0, s, v.shape) for v, s in zip(self, scales, strict=True)))


def draw(rng: np.random.Generator) -> Gaits:
    """Draw random gaits, one a slot."""
    shape = CANDIDATES, JOINTS
    frequency = rng.uniform(0.1, 0.22, (CANDIDATES, 1))
    return Gaits(frequency, rng.normal(0, 0.2, shape), rng.uniform(0.4, 1.2, shape), rng.uniform(0, 1, shape))


async def score(envs: aioenv.AsyncVectorEnv, gaits: Gaits, steps: int = 120) -> npt.NDArray[np.float64]:
    """Return how far each gait runs, less a fine for a body that tips over."""
    await envs.reset(seed=[SEED] * CANDIDATES)
    far, tipped = np.zeros(CANDIDATES), np.zeros(CANDIDATES)
    for step in range(steps):
        obs, _, _, _, info = await envs.step(gaits.actions(step))
        far += info["reward_forward"]
        tipped = np.maximum(tipped, np.abs(obs[:, 1]))
    fine: npt.NDArray[np.float64] = 1000 * np.maximum(tipped - 0.7, 0)
    return far - fine


async def find_gaits(rng: np.random.Generator, rounds: int) -> Gaits:
    """Return gaits that run, by random search; the half that runs best is varied in each round."""
    async with aioenv.make_vec("HalfCheetah-v5", CANDIDATES, backend="native") as envs:
        families = []  # several searches, so that the cheetahs differ
        for _ in range(TILES):
            gaits = draw(rng)
            for _ in range(rounds):
                best = np.argsort(-await score(envs, gaits))[: CANDIDATES // 4]
                kept, tried = gaits.of(best), [gaits.of(best).varied(rng) for _ in range(3)]
                gaits = Gaits(*(np.concatenate(values) for values in zip(kept, *tried, strict=True)))
            best = np.argsort(-await score(envs, gaits))[:1]
            families.append(gaits.of(best))
    return Gaits(*(np.concatenate(values) for values in zip(*families, strict=True)))


def tiled(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return one picture of all images, with gaps between them."""
    _, height, width, _ = images.shape
    picture = np.full((4 * (height + GAP) - GAP, 4 * (width + GAP) - GAP, 3), 255, np.uint8)
    for slot, image in enumerate(images):
        top, left = (slot // 4) * (height + GAP), (slot % 4) * (width + GAP)
        picture[top : top + height, left : left + width] = image
    return picture


async def film(gaits: Gaits, frames: int, fade: int, width: int, height: int) -> list[npt.NDArray[np.uint8]]:
    """Return the frames; the last ones fade into those before the first, so that the picture can be looped."""
    wide, high = round(width * ZOOM), round(height * ZOOM)
    left, top = (wide - width) // 2, high - height - 2  # less sky
    quality = aioenv.RenderQuality(shadow_map=1024)
    config = aioenv.RenderConfig(width=wide, height=high, camera="track", quality=quality)
    taken = []
    async with aioenv.make_vec("HalfCheetah-v5", TILES, backend="native", render=config) as envs:
        await envs.reset(seed=[SEED] * TILES)
        for step in range(20 + fade + frames):
            await envs.step(gaits.actions(step))
            if step >= 20:
                images = (await envs.render())[:, top : top + height, left : left + width]
                taken.append(tiled(images).astype(np.float32))
    before, shown = taken[:fade], taken[fade:]
    for number, earlier in enumerate(before):
        share = (number + 1) / (fade + 1)
        shown[number - fade] = (1 - share) * shown[number - fade] + share * earlier
    return [frame.round().astype(np.uint8) for frame in shown]


async def main(out: Path, rounds: int, frames: int, fade: int, width: int, height: int, quality: int) -> None:
    """Find gaits, film them, and write both pictures."""
    gaits = await find_gaits(np.random.default_rng(0), rounds)
    images = [Image.fromarray(frame) for frame in await film(gaits, frames, fade, width, height)]
    moving, still = out / "cheetahs.webp", out / "cheetahs-still.webp"
    options = {"quality": quality, "method": 6, "minimize_size": True}
    images[0].save(moving, save_all=True, append_images=images[1:], duration=FRAME_MS, loop=0, **options)
    images[0].save(still, quality=80, method=6)
    print(f"{moving}: {moving.stat().st_size / 1e3:.0f} kB, {len(images)} images; {still.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "_static")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--frames", type=int, default=56)
    parser.add_argument("--fade", type=int, default=5)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--height", type=int, default=100)
    parser.add_argument("--quality", type=int, default=26)
    aioenv.run(main(**vars(parser.parse_args())))
