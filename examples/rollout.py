"""
Rollouts
========

Collect rollouts: while the policy computes for one half of the envs, the other half steps.

::

    python examples/rollout.py --steps 128

At the end it prints where the time went. Give the policy more to do (`--work 500`) and the envs wait for it; with
`--groups 1` both wait for each other.
"""

import argparse

import numpy as np

import aioenv


class Policy:
    """A small random network, with a value beside each action."""

    def __init__(self, inputs: int, outputs: int, work: int) -> None:
        rng = np.random.default_rng(0)
        self.hidden = rng.normal(size=(inputs, 64)) / np.sqrt(inputs)
        self.square = rng.normal(size=(64, 64)) / 8
        self.action = rng.normal(size=(64, outputs)) / 8
        self.work = work

    def __call__(self, obs):
        x = np.tanh(obs @ self.hidden)
        for _ in range(self.work):
            x = np.tanh(x @ self.square)
        return np.tanh(x @ self.action).astype(np.float32), {"value": x.mean(axis=1)}


async def main(steps: int, num_envs: int, groups: int, work: int) -> None:
    async with aioenv.make_vec("HalfCheetah-v5", num_envs=num_envs, max_episode_steps=100) as envs:
        await envs.reset(seed=0)
        policy = Policy(17, 6, work)
        for _ in range(3):  # each goes on where the last one stopped
            rollout = await envs.rollout(policy, steps, groups)
            learn = rollout.valid  # not from steps in which an env was reset instead
            print(f"obs {rollout.obs.shape}, {learn.sum()} of {learn.size} rows to learn from", end=", ")
            print(f"mean reward {rollout.reward[learn].mean():.3f}, value {rollout.extras['value'][learn].mean():.3f}")
        print(envs.stats())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--work", type=int, default=1)
    args = parser.parse_args()
    aioenv.run(main(args.steps, args.num_envs, args.groups, args.work))
