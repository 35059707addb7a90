"""
The fastest slots first
=======================

Step slots as they get ready, without waiting for the slowest.

Half of these envs take ten times as long a step as the others. In lock-step all would wait for them; here the
fast ones go on.

::

    python examples/event_driven.py --seconds 3
"""

import argparse
import time

import gymnasium as gym
import numpy as np

import aioenv


class Slow(gym.Wrapper):
    """A step takes a while, as if a simulator or a network were behind it."""

    def __init__(self, env: gym.Env, seconds: float) -> None:
        super().__init__(env)
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


def factory(slot: int):
    return lambda: Slow(gym.make("CartPole-v1"), 0.010 if slot % 2 else 0.001)


async def main(seconds: float) -> None:
    rng = np.random.default_rng(0)
    # one worker a slot: these envs sleep, so they don't fight for CPUs
    async with aioenv.AsyncVectorEnv([factory(i) for i in range(8)], num_workers=8) as envs:
        steps = np.zeros(envs.num_envs, int)
        end = time.perf_counter() + seconds
        envs.send_reset(seed=0)
        async for ready in envs.ready(min_slots=2):  # two or more at a time: a batch for the policy
            steps[ready.slots] += 1
            if time.perf_counter() < end:
                envs.send(rng.integers(2, size=len(ready.slots)), ready.slots)
    print(f"steps by slot: {steps.tolist()}")
    print(f"fast slots did {steps[::2].mean() / steps[1::2].mean():.1f} times as many as slow ones")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0)
    aioenv.run(main(parser.parse_args().seconds))
