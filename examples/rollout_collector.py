"""
Rollouts from collectors
========================

Search for a CartPole policy by an evolution strategy: each collector runs envs and policy in a process of its own, and
sends whole rollouts.

::

    python examples/rollout_collector.py --rounds 20

In sync mode all collectors use the same weights, and wait for the next ones. So the numbers are the same for any
``--collectors``. At the end it prints who waited for whom.
"""

import argparse

import numpy as np

import aioenv

NOISE, RATE = 0.5, 0.3


class Policy:
    """A linear policy; each slot has weights of its own: the mean, and noise that its generator draws at times."""

    def __init__(self):
        self.mean, self.noise = np.zeros(4), None

    def update(self, weights):
        self.mean, self.noise = weights["mean"], None

    def __call__(self, obs, generators):
        if self.noise is None:  # once a rollout
            self.noise = np.array([generator.normal(size=4) for generator in generators])
        score = (obs * (self.mean + NOISE * self.noise)).sum(axis=1)
        return (score > 0).astype(np.int64), {"noise": self.noise}


async def main(rounds: int, num_envs: int, steps: int, collectors: int) -> None:
    mean = np.zeros(4)
    async with aioenv.RolloutCollector(
        "CartPole-v1",
        num_envs,
        policy=Policy,
        steps=steps,
        num_collectors=collectors,
        mode="sync",
        seed=0,
    ) as collector:
        found = []
        async for rollout in collector:
            found.append(rollout)
            if len(found) < collector.num_collectors:
                continue
            found.sort(key=lambda one: one.collector)
            falls = np.concatenate([one.terminated.sum(axis=0) for one in found])
            noise = np.concatenate([one.extras["noise"][0] for one in found])
            better = (falls.mean() - falls) / (falls.std() + 1e-9)
            mean = mean + RATE * (better[:, None] * noise).mean(axis=0) / NOISE
            if collector.version % 5 == 0:
                print(f"round {collector.version}: {falls.mean():.2f} falls of a slot in {steps} steps")
            if collector.version == rounds:
                break
            found = []
            await collector.update({"mean": mean})
        print(collector.stats())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--collectors", type=int, default=2)
    args = parser.parse_args()
    aioenv.run(main(args.rounds, args.num_envs, args.steps, args.collectors))
