"""Draw the picture of render qualities in the docs, docs/images/quality.png, and print the table of their costs.

    python -m benchmarks.render_qualities [--picture-only]

The costs are reliable only on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import mujoco
import numpy as np
from gymnasium.envs.mujoco import mujoco_env

import aioenv
from aioenv import RenderQuality
from aioenv.cli.terminal import show_table
from aioenv.rendering.config import FAST

# Drawn in the picture; the costs are of a HalfCheetah.
SCENE = """
<mujoco>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".3 .4 .6" rgb2=".1 .1 .2" width="64" height="64"/>
    <texture name="tiles" type="2d" builtin="checker" rgb1=".1 .15 .2" rgb2=".15 .2 .3" width="64" height="64"/>
    <material name="tiles" texture="tiles" texrepeat="6 6" texuniform="true" reflectance=".4"/>
  </asset>
  <worldbody>
    <light pos=".5 -1 3" dir="-.2 .3 -1" diffuse=".8 .8 .8"/>
    <camera name="still" pos="0 -2.6 1" xyaxes="1 0 0 0 .3 1" fovy="40"/>
    <geom type="plane" size="2 2 .1" material="tiles"/>
    <geom type="box" pos="-.4 0 .3" euler="0 0 30" size=".2 .2 .2" rgba=".9 .4 .2 1"/>
    <geom type="sphere" pos=".3 0 .35" size=".22" rgba=".3 .8 .4 1"/>
    <geom type="capsule" pos="0 .5 .6" euler="20 30 0" size=".05 .25" rgba=".8 .8 .2 1"/>
  </worldbody>
</mujoco>
"""
CHEETAH = Path(mujoco_env.__file__).parent / "assets" / "half_cheetah.xml"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "quality.png"
WIDTH, HEIGHT, SIDE = 200, 150, 84
# In the order of the table; those with a number are in the picture, from left to right.
QUALITIES: dict[str, tuple[Any, int | None]] = {
    '"exact"': ("exact", 1),
    "RenderQuality(shadow_map=1024)": (RenderQuality(shadow_map=1024), 2),
    "RenderQuality(samples=0)": (RenderQuality(samples=0), None),
    "RenderQuality(reflections=False)": (RenderQuality(reflections=False), None),
    "RenderQuality(shadows=False)": (RenderQuality(shadows=False), 3),
    "RenderQuality(shadows=False, reflections=False)": (RenderQuality(shadows=False, reflections=False), None),
    '"fast"': ("fast", 4),
    '"coarse"': ("coarse", 5),
    'fast, buffer="model"': (replace(FAST, buffer="model"), None),
}


def milliseconds(pool: aioenv.sync.RenderPool, states: np.ndarray) -> float:
    """Measure the time of an image in one worker: the median of five batches."""
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        pool.render(states, width=SIDE, height=SIDE, camera="track")
        taken.append((time.perf_counter() - began) / len(states) * 1e3)
    return statistics.median(taken[1:])


def main() -> None:
    """Draw, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture-only", action="store_true", help="measure nothing")
    measure = not parser.parse_args().picture_only
    os.environ.setdefault("MUJOCO_GL", "egl")
    panels, costs, renderer = [], {}, ""
    for name, (quality, panel) in QUALITIES.items():
        if panel:
            with aioenv.sync.RenderPool(SCENE, quality=quality) as pool:
                panels.append(pool.render(slots=[0], width=WIDTH, height=HEIGHT, camera="still")[0])
                renderer = pool.renderer
        if measure:
            with aioenv.sync.RenderPool(CHEETAH, quality=quality) as pool:
                costs[name] = milliseconds(pool, np.tile(pool.get_state(mujoco.MjData(pool.model)), (32, 1)))
    imageio.imwrite(PICTURE, np.concatenate(panels, axis=1), optimize=True)
    print(f"{PICTURE.name}: {PICTURE.stat().st_size} bytes; drawn by {renderer}")
    rows = []
    for name, cost in costs.items():
        panel = QUALITIES[name][1]
        share = f"{cost / next(iter(costs.values())):.2g}"
        rows.append((name, f"picture {panel}" if panel else "", share, f"{cost:.2g}"))
    if rows:
        show_table(("quality", "", "share", "ms an image"), rows, texts=2)


if __name__ == "__main__":
    main()
