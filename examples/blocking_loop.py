"""
A blocking loop
===============

The same for code without `await`: a `gymnasium.vector.VectorEnv`, with Gymnasium's wrappers around it.

::

    python examples/blocking_loop.py --steps 1000
"""

import argparse

import gymnasium as gym
import numpy as np

from aioenv import sync


def main(steps: int, num_envs: int) -> None:
    envs = gym.wrappers.vector.RecordEpisodeStatistics(sync.make_vec("CartPole-v1", num_envs=num_envs))
    envs.reset(seed=0)
    envs.action_space.seed(0)
    lengths: list[int] = []
    for _ in range(steps):
        _obs, _reward, _terminated, _truncated, info = envs.step(envs.action_space.sample())
        if "episode" in info:
            lengths += info["episode"]["l"][info["_episode"]].tolist()
    envs.close()
    print(f"{len(lengths)} episodes, {np.mean(lengths):.1f} steps long on average")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--num-envs", type=int, default=16)
    args = parser.parse_args()
    main(args.steps, args.num_envs)
