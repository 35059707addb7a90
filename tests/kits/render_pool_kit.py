"""Kit for tests of the render pool: a small model, pools of it, and states that look different."""

from __future__ import annotations

import os
from pathlib import Path

import mujoco
import numpy as np
from gymnasium.envs.mujoco import mujoco_env

import aioenv

ASSETS = Path(mujoco_env.__file__).parent / "assets"
SMALL = {"width": 24, "height": 18}
PLAIN = """
<mujoco>
  <asset>
    <texture name="grid" type="2d" builtin="checker" rgb1="1 0 0" rgb2="0 1 0" width="8" height="8"/>
    <material name="grid" texture="grid"/>
  </asset>
  <worldbody>
    <light pos="0 0 3"/>
    <camera name="side" pos="0 -3 1" xyaxes="1 0 0 0 .3 1"/>
    <geom type="plane" size="2 2 .1" material="grid"/>
    <body mocap="true" pos="0 0 .5"><geom name="ball" size=".4" rgba="0 0 1 1"/></body>
  </worldbody>
</mujoco>
"""


def pool_of(model=PLAIN, **arguments):
    """A pool that is quick to start and to draw."""
    return aioenv.RenderPool(model, **{"quality": "fast", "workers_per_device": 2, **arguments})


def some_states(pool, count: int) -> np.ndarray:
    """States of `PLAIN` that can be told apart."""
    data = mujoco.MjData(pool.model)
    states = []
    for i in range(count):
        data.mocap_pos[0] = (i / count - 0.5, 0, 0.5)
        states.append(pool.get_state(data))
    return np.array(states)


def differ(images) -> bool:
    """Whether all images of a batch are different."""
    return len({image.tobytes() for image in images}) == len(images)


def held(pool) -> int:
    """Bytes that a pool's images take in shared memory."""
    return os.fstat(pool._workers.memory.fd).st_blocks * 512
