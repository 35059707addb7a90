"""
Slow resets
===========

Give each slot a second env, which is reset while the first one runs an episode.

A reset of these envs takes as long as 50 steps, as if it loaded a scene. Without spare envs all slots wait for it. Open
the timelines at https://ui.perfetto.dev.

::

    python examples/spare_envs.py
"""

import argparse
import time

import gymnasium as gym
import numpy as np

import aioenv

ENVS = 4


class Scene(gym.Env):
    """An env whose resets are slow, and whose steps are fast."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        time.sleep(0.1)  # loads a scene
        self.left = int(self.np_random.integers(60, 120))
        return np.ones(1, np.float32), {}

    def step(self, action):
        time.sleep(0.002)
        self.left -= 1
        return np.ones(1, np.float32), 1.0, False, self.left == 0, {}


async def main(steps: int, out: str) -> None:
    actions = np.zeros(ENVS, int)
    for spares in (False, True):
        workers = 2 * ENVS if spares else ENVS  # one an env: they sleep, so they don't fight for CPUs
        async with aioenv.AsyncVectorEnv([Scene] * ENVS, num_workers=workers, spare_envs=spares) as envs:
            await envs.reset(seed=0)
            began = time.perf_counter()
            with envs.trace(f"{out}-{'with' if spares else 'without'}.json") as trace:
                for _ in range(steps):
                    await envs.step(actions)
            rate = ENVS * steps / (time.perf_counter() - began)
            print(f"{'with' if spares else 'without'} spare envs: {rate:.0f} transitions/s, see {trace.path}")
            print(envs.stats())


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400, help="how many")
parser.add_argument("--out", default="spare-envs", help="how the files of the timelines begin")
args = parser.parse_args()
aioenv.run(main(args.steps, args.out))
