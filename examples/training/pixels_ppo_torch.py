"""
PPO from pixels in torch
========================

A pole learns to stand. The policy sees images alone: the last three, grey, of 48x48 pixels. A worker steps the envs and
draws the next rollout while this process learns from the last one.

::

    python examples/training/pixels_ppo_torch.py --until 950 --log pixels.csv --save pixels.pt
    python examples/training/curves.py pixels.csv --png pixels.png --bar 950

A random policy has a return of 5, one that does nothing 24, the best possible one 1000. All of 5 seeds reached 950, in
71,000 to 108,000 steps and 3 to 9 minutes; the median took 90,000 steps and 3.4 minutes, without a GPU, on one core of
two that other programs used too. On both of these cores an update of 2,048 steps took 7.3 s, and 7.9 to 10.6 s with
`--in-turn`.

.. image:: /_static/examples/training/pixels_ppo_torch.png
   :alt: Thin curves of the mean return by env-steps, and their median.
   :width: 500
"""

# sphinx_gallery_thumbnail_path = '_static/examples/training/pixels_ppo_torch.png'

import argparse
import asyncio
import copy
import math
import os
import time
from functools import partial
from pathlib import Path

import torch
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation
from torch import nn
from torch.distributions import Normal

import aioenv
from aioenv.adapters.torch import TensorRollout, TorchVectorEnv

GAMMA, LAMBDA, CLIP, RATE, MAX_NORM, VALUE = 0.99, 0.95, 0.2, 5e-4, 0.5, 0.5
ROLLOUT, EPOCHS, MINIBATCH = 128, 4, 128  # steps of each slot in a rollout; rows of a minibatch
REWARD = 0.1  # rewards are multiplied by it, so that values are not far from 1


def make_envs(env: str, num_envs: int, size: int = 48, stack: int = 3, num_workers: int = 1, **kwargs):
    """Return a vector env whose observations are uint8 (num_envs, stack, size, size). The workers draw."""
    return aioenv.make_vec(
        env,
        num_envs,
        num_workers=num_workers,
        pixels=aioenv.RenderConfig(width=size, height=size, quality="coarse"),
        wrappers=[GrayscaleObservation, partial(FrameStackObservation, stack_size=stack)],
        **kwargs,
    )


def initialized(layer: nn.Module, scale: float = math.sqrt(2)) -> nn.Module:
    nn.init.orthogonal_(layer.weight, scale)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A policy and a value function of one view of the images."""

    def __init__(self, shape: tuple[int, int, int], outputs: int) -> None:
        super().__init__()
        convolutions = nn.Sequential(
            initialized(nn.Conv2d(shape[0], 16, 8, 4)),
            nn.ReLU(),
            initialized(nn.Conv2d(16, 32, 4, 2)),
            nn.ReLU(),
            nn.Flatten(),
        ).to(memory_format=torch.channels_last)  # which is faster on a CPU
        inputs = convolutions(torch.zeros(1, *shape)).shape[1]
        self.view = nn.Sequential(convolutions, initialized(nn.Linear(inputs, 128)), nn.LayerNorm(128), nn.ReLU())
        self.actor, self.critic = initialized(nn.Linear(128, outputs), 0.01), initialized(nn.Linear(128, 1), 1.0)
        self.log_std = nn.Parameter(torch.full((outputs,), -1.0))

    def forward(self, images):
        """Return the distribution of actions, and values."""
        view = self.view(images.to(memory_format=torch.channels_last) / 255)
        return Normal(self.actor(view), self.log_std.exp(), validate_args=False), self.critic(view).squeeze(-1)


class Trainer:
    """Collects with one agent while another one learns."""

    def __init__(self, envs: TorchVectorEnv, args: argparse.Namespace) -> None:
        self.high = torch.as_tensor(envs.single_action_space.high)
        self.agent = Agent(envs.single_observation_space.shape, len(self.high))
        self.collector = copy.deepcopy(self.agent)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), RATE, eps=1e-5, fused=True)
        # two threads draw numbers: each has its own generator, so that runs can be repeated
        self.noise, self.order = torch.Generator().manual_seed(args.seed), torch.Generator().manual_seed(args.seed)
        self.episode_stats = envs.episode_stats
        self.steps, self.last, self.mean = 0, args.steps, -math.inf
        self.log = open(args.log or os.devnull, "w", buffering=1)  # a line at a time
        print("steps,seconds,return", file=self.log)
        self.began = time.perf_counter()

    def publish(self) -> None:
        """Let the next rollout be collected with what was learned."""
        self.collector.load_state_dict(self.agent.state_dict())

    @torch.no_grad()
    def act(self, images):
        """Draw actions. The dict beside them comes back as `rollout.extras`."""
        policy, _ = self.collector(images)
        drawn = torch.normal(policy.mean, policy.stddev, generator=self.noise)
        return drawn.clamp(-1, 1) * self.high, {"drawn": drawn, "logp": policy.log_prob(drawn).sum(-1)}

    @torch.no_grad()
    def best(self, images):
        return self.agent(images)[0].mean.clamp(-1, 1) * self.high

    @torch.no_grad()
    def advantages(self, rollout: TensorRollout):
        """Return how much better each step was than its value had promised (GAE), and the returns.

        Under NEXT_STEP, the default, the row after a step has the observation that it led to, at the end of an episode
        too: the last stack. So an episode that a time limit cuts is worth what it would have earned.
        """
        images = torch.cat([rollout.obs, rollout.last_obs[None]])
        value = torch.cat([self.agent(rows)[1] for rows in images.flatten(0, 1).split(256)]).view(len(images), -1)
        advantage = rollout.reward * REWARD + GAMMA * value[1:] * ~rollout.terminated - value[:-1]
        goes_on = ~(rollout.terminated | rollout.truncated)
        for t in reversed(range(len(advantage) - 1)):
            advantage[t] += GAMMA * LAMBDA * goes_on[t] * advantage[t + 1]
        return advantage, advantage + value[:-1]

    def learn(self, rollout: TensorRollout) -> None:
        real = rollout.valid  # not the steps in which an env was reset instead
        advantage, returns = (part[real] for part in self.advantages(rollout))
        images, drawn, old_logp = rollout.obs[real], rollout.extras["drawn"][real], rollout.extras["logp"][real]
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * max(1 - self.steps / self.last, 0.0)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(returns), generator=self.order).split(MINIBATCH):
                policy, value = self.agent(images[rows])
                ratio = (policy.log_prob(drawn[rows]).sum(-1) - old_logp[rows]).exp()
                gain = advantage[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = 0.5 * (value - returns[rows]).square().mean()
                self.optimizer.zero_grad()
                (policy_loss + VALUE * value_loss).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
                self.optimizer.step()
        self.steps += int(real.sum())

    def report(self) -> None:
        stats = self.episode_stats.write()  # of the episodes that have ended since the last call
        if stats["episode_count"]:
            seconds, self.mean = time.perf_counter() - self.began, stats["return/mean"]
            print(f"{self.steps},{seconds:.1f},{self.mean:.2f}", file=self.log)
            print(f"{self.steps} steps, {self.steps / seconds:.0f}/s: mean return {self.mean:.1f}", flush=True)


class TensorBoard:
    """A writer of episode statistics."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary = SummaryWriter(directory)

    def write(self, prefix, step, stats):
        for name, value in stats.items():
            self.summary.add_scalar(f"{prefix}/{name}", value, step)
        self.summary.flush()


async def train(args: argparse.Namespace) -> Trainer:
    writers = [TensorBoard(args.tensorboard)] if args.tensorboard else []
    stats = aioenv.EpisodeStats(prefix="train" if writers else None, writers=writers)
    envs = make_envs(args.env, args.num_envs, args.size, args.stack, args.num_workers, episode_stats=stats)
    async with TorchVectorEnv(envs, reward_dtype=torch.float32) as envs:
        trainer = Trainer(envs, args)
        await envs.reset(seed=args.seed)
        rollout = await envs.rollout(trainer.act, ROLLOUT)
        while trainer.steps < args.steps and trainer.mean < args.until:
            learning = asyncio.to_thread(trainer.learn, rollout)
            if args.in_turn:
                await learning
                trainer.publish()
                rollout = await envs.rollout(trainer.act, ROLLOUT)
            else:
                rollout, _ = await asyncio.gather(envs.rollout(trainer.act, ROLLOUT), learning)
                trainer.publish()
            trainer.report()
        print(envs.stats())  # how long the rollouts waited for the worker, and for the policy
    trainer.log.close()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="InvertedPendulum-v5", help="a MuJoCo env")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--num-workers", type=int, default=1, help="they step and draw; one CPU is for the learner")
    parser.add_argument("--size", type=int, default=48, help="of an image, in pixels")
    parser.add_argument("--stack", type=int, default=3, help="how many images an observation has")
    parser.add_argument("--in-turn", action="store_true", help="draw no images while the policy learns")
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--until", metavar="RETURN", type=float, default=math.inf, help="stop at this mean return")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", metavar="PATH", help="write the returns as CSV, for curves.py")
    parser.add_argument("--save", metavar="PATH", help="save the policy")
    parser.add_argument("--tensorboard", metavar="DIR")
    args = parser.parse_args()
    Path(args.save or "").parent.mkdir(parents=True, exist_ok=True)  # or training would be lost

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are small, and workers need the other CPUs
    trainer = aioenv.run(train(args))
    if args.save:
        torch.save({"algorithm": "pixels_ppo", "env": args.env, "agent": trainer.agent.state_dict()}, args.save)
