"""
Images as observations
======================

Train on pixels: the policy of one group of slots runs while the other group is drawn.

::

    python examples/pixels.py --rollouts 5
"""

import argparse
import time

import numpy as np

import aioenv


class LinearPolicy:
    """Actions from shrunk grey images by one matrix, with noise; it learns which noise was followed by reward."""

    def __init__(self, actions: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.weights = np.zeros((21 * 21, actions))

    def __call__(self, obs: np.ndarray) -> tuple[np.ndarray, dict]:
        small = obs.mean(axis=-1).reshape(-1, 21, 4, 21, 4).mean(axis=(2, 4)).reshape(len(obs), -1) / 255
        noise = self.rng.normal(0, 0.5, (len(obs), self.weights.shape[1]))
        return np.clip(small @ self.weights + noise, -1, 1).astype(np.float32), {"small": small, "noise": noise}

    def learn(self, rollout: aioenv.Rollout) -> None:
        reward = np.where(rollout.valid, rollout.reward - rollout.reward[rollout.valid].mean(), 0.0)
        gradient = np.einsum("tnf,tna,tn->fa", rollout.extras["small"], rollout.extras["noise"], reward)
        self.weights += 0.05 * gradient / rollout.valid.sum()


async def main(rollouts: int, num_envs: int, steps: int) -> None:
    config = aioenv.RenderConfig(width=84, height=84, quality="fast", camera="track")
    async with aioenv.make_vec("HalfCheetah-v5", num_envs=num_envs, pixels=config) as envs:
        policy = LinearPolicy(envs.single_action_space.shape[0])
        await envs.reset(seed=0)
        for number in range(rollouts):
            begin = time.perf_counter()
            rollout = await envs.rollout(policy, steps, groups=2)
            policy.learn(rollout)
            rate = rollout.reward.size / (time.perf_counter() - begin)
            print(f"rollout {number}: reward {rollout.reward.mean():+.3f}, {rate:,.0f} images and env-steps/s")
    print(f"observations {rollout.obs.shape} {rollout.obs.dtype}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32)
    args = parser.parse_args()
    aioenv.run(main(args.rollouts, args.num_envs, args.steps))
