"""
An async loop
=============

Reset, then step a random policy, on the event loop.

::

    python examples/async_loop.py --steps 1000
"""

import argparse
import time

import aioenv


async def main(steps: int, num_envs: int) -> None:
    async with aioenv.make_vec("HalfCheetah-v5", num_envs=num_envs) as envs:
        obs, _ = await envs.reset(seed=0)
        envs.action_space.seed(0)
        returns = 0.0
        begin = time.perf_counter()
        for _ in range(steps):
            actions = envs.action_space.sample()  # your policy here: obs is (num_envs, 17)
            obs, reward, _terminated, _truncated, _info = await envs.step(actions)
            returns += reward.mean()
        seconds = time.perf_counter() - begin
    print(f"{steps * num_envs / seconds:,.0f} env-steps/s; mean return so far {returns:.1f}; obs {obs.shape}")


if __name__ == "__main__":  # for argparse only: workers need no such guard
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--num-envs", type=int, default=16)
    args = parser.parse_args()
    aioenv.run(main(args.steps, args.num_envs))
