"""
PPO in torch
============

HalfCheetah learns to run. With `--awaited` the loop awaits its rollouts; without, it blocks. The results are the same.
With 5 seeds a return of 2,000 took 57 to 104 seconds, the median 85 s and 385,000 steps, each run on one core of two.
After a million steps (2.5 to 4 minutes) the returns are 3,700 to 5,900.

::

    python examples/training/ppo_torch.py --steps 1000000 --log ppo.csv --save ppo.pt
    python examples/training/curves.py ppo.csv --png ppo.png

.. image:: /_static/examples/training/ppo_torch.png
   :alt: The mean return by env-steps.
   :width: 500
"""

# sphinx_gallery_thumbnail_path = '_static/examples/training/ppo_torch.png'

import argparse
import math
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Normal

import aioenv
from aioenv.adapters.torch import TensorRollout, TorchVectorEnv

GAMMA, LAMBDA, CLIP, RATE, MAX_NORM, VALUE = 0.99, 0.95, 0.2, 1e-3, 0.5, 0.5
ROLLOUT, EPOCHS, MINIBATCH = 64, 5, 512  # steps of each slot in a rollout; rows of a minibatch


class RunningStats(nn.Module):
    """Mean and variance of all samples so far; buffers, so that they are saved with the policy."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    def update(self, batch):
        total = self.count + len(batch)
        share = (len(batch) / total).float()  # of the batch in all samples
        change = batch.mean(0) - self.mean
        self.mean += change * share
        self.var.lerp_(batch.var(0, correction=0), share).add_(change**2 * share * (1 - share))
        self.count.copy_(total)


def layer(inputs: int, outputs: int, scale: float = math.sqrt(2)) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, scale)
    nn.init.zeros_(made.bias)
    return made


class Agent(nn.Module):
    """A policy, a value function, and the statistics by which both normalise observations."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, 0.01))
        self.critic = nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.log_std = nn.Parameter(torch.full((outputs,), -0.5))
        self.stats = RunningStats(inputs)

    def normalize(self, obs):
        return ((obs - self.stats.mean) / (self.stats.var + 1e-8).sqrt()).clamp(-10, 10)

    def distribution(self, normal):
        return Normal(self.actor(normal), self.log_std.exp(), validate_args=False)

    @torch.no_grad()
    def act(self, obs):
        """Draw actions. The dict beside them comes back as `rollout.extras`."""
        self.stats.update(obs)
        normal = self.normalize(obs)
        policy = self.distribution(normal)
        drawn = policy.sample()
        logp, value = policy.log_prob(drawn).sum(-1), self.critic(normal).squeeze(-1)
        return drawn.clamp(-1, 1), {"normal": normal, "drawn": drawn, "logp": logp, "value": value}

    @torch.no_grad()
    def best(self, obs):
        return self.actor(self.normalize(obs)).clamp(-1, 1)


class Trainer:
    """Learns from rollouts, wherever they come from."""

    def __init__(self, envs: TorchVectorEnv, args: argparse.Namespace) -> None:
        self.agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.shape[0])
        self.optimizer = torch.optim.Adam(self.agent.parameters(), RATE, eps=1e-5, fused=True)
        self.episode_stats = envs.episode_stats
        self.steps, self.last = 0, args.steps
        self.returns = torch.zeros(args.num_envs)  # discounted, of the current episodes
        self.return_stats = RunningStats()
        self.log = open(args.log or os.devnull, "w", buffering=1)  # a line at a time
        print("steps,seconds,return", file=self.log)
        self.began = time.perf_counter()

    def normalize(self, rollout: TensorRollout):
        """Return the rewards, divided by the standard deviation of discounted returns."""
        returns = torch.empty_like(rollout.reward)
        ended = rollout.terminated | rollout.truncated
        for t, reward in enumerate(rollout.reward):
            returns[t] = self.returns = self.returns * GAMMA + reward
            self.returns = self.returns * ~ended[t]
        self.return_stats.update(returns[rollout.valid])
        return (rollout.reward / (self.return_stats.var + 1e-8).sqrt()).clamp(-10, 10)

    @torch.no_grad()
    def advantages(self, rollout: TensorRollout):
        """Return how much better each step was than its value had promised (GAE).

        `rollout.next_obs` has the last observation of an episode, not the first one of the next episode. So an episode
        that a time limit cuts is worth what it would have earned. Only one that is terminated is worth nothing more.
        """
        promised = self.agent.critic(self.agent.normalize(rollout.next_obs)).squeeze(-1) * ~rollout.terminated
        advantage = self.normalize(rollout) + GAMMA * promised - rollout.extras["value"]
        goes_on = ~(rollout.terminated | rollout.truncated)
        for t in reversed(range(len(advantage) - 1)):
            advantage[t] += GAMMA * LAMBDA * goes_on[t] * advantage[t + 1]
        return advantage

    def learn(self, rollout: TensorRollout) -> None:
        advantage = self.advantages(rollout)
        returns = advantage + rollout.extras["value"]
        real = rollout.valid  # not the steps in which an env was reset instead
        normal, drawn, old_logp = (rollout.extras[name][real] for name in ("normal", "drawn", "logp"))
        advantage, returns = advantage[real], returns[real]
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * max(1 - self.steps / self.last, 0.0)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(returns)).split(MINIBATCH):
                logp = self.agent.distribution(normal[rows]).log_prob(drawn[rows]).sum(-1)
                ratio = (logp - old_logp[rows]).exp()
                gain = advantage[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = 0.5 * (self.agent.critic(normal[rows]).squeeze(-1) - returns[rows]).square().mean()
                self.optimizer.zero_grad()
                (policy_loss + VALUE * value_loss).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
                self.optimizer.step()
        self.steps += int(real.sum())
        self.report()

    def report(self) -> None:
        stats = self.episode_stats.write()  # of the episodes that have ended since the last call
        if stats["episode_count"]:
            seconds, mean = time.perf_counter() - self.began, stats["return/mean"]
            print(f"{self.steps},{seconds:.1f},{mean:.2f}", file=self.log)
            print(f"{self.steps} steps, {self.steps / seconds:.0f}/s: mean return {mean:.1f}", flush=True)


class TensorBoard:
    """A writer of episode statistics."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary = SummaryWriter(directory)

    def write(self, prefix, step, stats):
        for name, value in stats.items():
            self.summary.add_scalar(f"{prefix}/{name}", value, step)
        self.summary.flush()


def train(settings: dict, args: argparse.Namespace) -> Trainer:
    with TorchVectorEnv(aioenv.sync.make_vec(**settings), obs_dtype=torch.float32, reward_dtype=torch.float32) as envs:
        trainer = Trainer(envs, args)
        envs.reset(seed=args.seed)
        while trainer.steps < args.steps:
            trainer.learn(envs.rollout(trainer.agent.act, ROLLOUT, groups=1))
        return trainer


async def train_awaited(settings: dict, args: argparse.Namespace) -> Trainer:
    """Do the same in a coroutine: other tasks of the event loop run while the envs step."""
    envs = TorchVectorEnv(aioenv.make_vec(**settings), obs_dtype=torch.float32, reward_dtype=torch.float32)
    async with envs:
        trainer = Trainer(envs, args)
        await envs.reset(seed=args.seed)
        while trainer.steps < args.steps:
            trainer.learn(await envs.rollout(trainer.agent.act, ROLLOUT, groups=1))
        return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="HalfCheetah-v5", help="with continuous actions, from -1 to 1")
    parser.add_argument("--backend", default="native", choices=["native", "workers", "auto"])
    parser.add_argument("--awaited", action="store_true", help="await rollouts instead of blocking")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", metavar="PATH", help="write the returns as CSV, for curves.py")
    parser.add_argument("--save", metavar="PATH", help="save the policy, for evaluate_torch.py")
    parser.add_argument("--tensorboard", metavar="DIR")
    args = parser.parse_args()
    Path(args.save or "").parent.mkdir(parents=True, exist_ok=True)  # or training would be lost

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are small
    writers = [TensorBoard(args.tensorboard)] if args.tensorboard else []
    settings = {
        "env": args.env,
        "num_envs": args.num_envs,
        "backend": args.backend,
        "episode_stats": aioenv.EpisodeStats(prefix="train" if writers else None, writers=writers),
    }
    trainer = aioenv.run(train_awaited(settings, args)) if args.awaited else train(settings, args)
    if args.save:
        torch.save({"algorithm": "ppo", "env": args.env, "agent": trainer.agent.state_dict()}, args.save)
