"""
PPO in torch on a Ray cluster
=============================

Collectors on the machines of a Ray cluster play, each with a copy of the policy, and send whole rollouts. The learner
hands new weights to all of them after each update. They play on while it learns, so rollouts are made with weights that
are about one update old. Ratios of probabilities are those to the policy that has played.

::

    python examples/training/ray_ppo.py --collectors 8 --log ray.csv    # on the cluster of this machine, or a new one
    python examples/training/ray_ppo.py --local --log local.csv         # the same in processes of this machine
    python examples/training/curves.py local.csv --png ppo.png

.. image:: /_static/examples/training/ray_ppo.png
   :alt: The mean return by env-steps.
   :width: 500
"""

# sphinx_gallery_thumbnail_path = '_static/examples/training/ray_ppo.png'

import argparse
import asyncio
import math
import os
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import aioenv
from aioenv.adapters.torch import TensorRollout, as_tensors

GAMMA, LAMBDA, CLIP, RATE, MAX_NORM, VALUE = 0.99, 0.95, 0.2, 3e-4, 0.5, 0.5
ROLLOUT, EPOCHS, MINIBATCH = 64, 10, 512  # steps of each slot in a rollout; rows of a minibatch


class RunningStats(nn.Module):
    """Mean and variance of all samples so far; buffers, so that they travel with the weights."""

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
    """A policy, a value function, and the statistics by which both normalise observations.

    Each collector makes one, and calls it without gradients. The learner has another, whose weights they get.
    """

    def __init__(self, inputs: int, outputs: int, discrete: bool) -> None:
        super().__init__()
        torch.set_num_threads(1)  # the networks are small
        self.actor = nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, 0.01))
        self.critic = nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
        self.log_std = None if discrete else nn.Parameter(torch.zeros(outputs))
        self.stats = RunningStats(inputs)
        self.seeded = False

    def normalize(self, obs):
        return ((obs - self.stats.mean) / (self.stats.var + 1e-8).sqrt()).clamp(-10, 10)

    def distribution(self, normal):
        out = self.actor(normal)
        if self.log_std is None:
            return Categorical(logits=out, validate_args=False)
        return Independent(Normal(out, self.log_std.exp(), validate_args=False), 1, validate_args=False)

    def value(self, normal):
        return self.critic(normal).squeeze(-1)

    def forward(self, obs, generators):
        """Draw actions. The dict beside them comes back as `rollout.extras`."""
        if not self.seeded:  # torch draws the same numbers in every new process, but each slot has a generator of numpy
            torch.manual_seed(int(generators[0].integers(1 << 62)))
            self.seeded = True
        policy = self.distribution(self.normalize(obs.float()))
        drawn = policy.sample()
        return drawn if self.log_std is None else drawn.clamp(-1, 1), {"drawn": drawn, "logp": policy.log_prob(drawn)}


class Trainer:
    """Learns from rollouts of collectors."""

    def __init__(self, agent: Agent, args: argparse.Namespace) -> None:
        self.agent = agent
        self.optimizer = torch.optim.Adam(agent.parameters(), RATE, eps=1e-5, fused=True)
        self.steps, self.last = 0, args.steps
        self.returns = torch.zeros(args.num_envs)  # by slot, discounted, of the current episodes
        self.return_stats = RunningStats()
        self.finished: list[float] = []  # returns of episodes, since the last report
        self.log = open(args.log or os.devnull, "w", buffering=1)  # a line at a time
        print("steps,seconds,return", file=self.log)
        self.began = time.perf_counter()
        self.summary = None
        if args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.summary = SummaryWriter(args.tensorboard)

    def normalize(self, rollout: TensorRollout, slots):
        """Return the rewards, divided by the standard deviation of discounted returns."""
        running = self.returns[slots]
        returns = torch.empty_like(rollout.reward)
        ended = rollout.terminated | rollout.truncated
        for t, reward in enumerate(rollout.reward):
            returns[t] = running = running * GAMMA + reward
            running = running * ~ended[t]
        self.returns[slots] = running
        self.return_stats.update(returns[rollout.valid])
        return (rollout.reward / (self.return_stats.var + 1e-8).sqrt()).clamp(-10, 10)

    @torch.no_grad()
    def rows(self, collected: aioenv.CollectedRollout) -> list[torch.Tensor]:
        """Return what is learned from a rollout, a row for each step: with advantages by GAE.

        `rollout.next_obs` has the last observation of an episode, not the first one of the next episode. So an episode
        that a time limit cuts is worth what it would have earned. Only one that is terminated is worth nothing more.
        """
        rollout = as_tensors(collected, obs_dtype=torch.float32, reward_dtype=torch.float32)
        if collected.restarted:  # its collector has died: the slots begin new episodes
            self.returns[collected.slots] = 0
        normal = self.agent.normalize(rollout.obs)
        value = self.agent.value(normal)
        promised = self.agent.value(self.agent.normalize(rollout.next_obs)) * ~rollout.terminated
        advantage = self.normalize(rollout, collected.slots) + GAMMA * promised - value
        goes_on = ~(rollout.terminated | rollout.truncated)
        for t in reversed(range(len(advantage) - 1)):
            advantage[t] += GAMMA * LAMBDA * goes_on[t] * advantage[t + 1]
        rows = normal, rollout.extras["drawn"], rollout.extras["logp"], advantage, advantage + value
        return [part[rollout.valid] for part in rows]  # without the steps in which an env was reset instead

    def learn(self, batch: list[aioenv.CollectedRollout]) -> None:
        parts = zip(*(self.rows(rollout) for rollout in batch), strict=True)
        normal, drawn, old_logp, advantage, returns = (torch.cat(part) for part in parts)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * max(1 - self.steps / self.last, 0.0)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(returns)).split(MINIBATCH):
                ratio = (self.agent.distribution(normal[rows]).log_prob(drawn[rows]) - old_logp[rows]).exp()
                gain = advantage[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = 0.5 * (self.agent.value(normal[rows]) - returns[rows]).square().mean()
                self.optimizer.zero_grad()
                (policy_loss + VALUE * value_loss).backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
                self.optimizer.step()

    def count(self, batch: list[aioenv.CollectedRollout]) -> None:
        """Count steps, observations, and the returns of episodes that have ended."""
        for rollout in batch:
            self.steps += int(rollout.valid.sum())
            self.agent.stats.update(torch.from_numpy(rollout.obs[rollout.valid]).float())
            for info in rollout.infos:
                if "episode" in info:
                    self.finished += info["episode"]["r"][info["_episode"]].tolist()

    def report(self, lag: float) -> None:
        if not self.finished:
            return
        seconds, mean = time.perf_counter() - self.began, sum(self.finished) / len(self.finished)
        self.finished.clear()
        rate = self.steps / seconds
        print(f"{self.steps},{seconds:.1f},{mean:.2f}", file=self.log)
        print(f"{self.steps} steps, {rate:.0f}/s, weights {lag:.1f} updates old: mean return {mean:.1f}", flush=True)
        if self.summary is not None:
            self.summary.add_scalar("train/return/mean", mean, self.steps)
            self.summary.flush()


def make_agent(env: str) -> Agent:
    with gym.make(env) as one:
        discrete = isinstance(one.action_space, gym.spaces.Discrete)
        outputs = int(one.action_space.n) if discrete else one.action_space.shape[0]
        return Agent(one.observation_space.shape[0], outputs, discrete)


async def train(args: argparse.Namespace) -> Trainer:
    trainer, batch = Trainer(make_agent(args.env), args), []
    collector = aioenv.RolloutCollector(
        args.env,
        args.num_envs,
        policy=partial(make_agent, args.env),
        steps=ROLLOUT,
        num_collectors=args.collectors,
        cluster=None if args.local else aioenv.RayCluster(args.address),
        mode=args.mode,  # "sync": collectors wait for each update
        prefetch=args.prefetch,  # rollouts that a collector begins ahead: 1 hides the round trip to far machines
        seed=args.seed,
        backend=args.backend,
        episode_stats=True,
    )
    async with collector:
        await collector.update(trainer.agent.state_dict())
        async for rollout in collector:
            batch.append(rollout)
            if len(batch) < collector.num_collectors:
                continue
            batch.sort(key=lambda one: one.collector)  # so that results with --mode sync are repeatable
            lag = collector.version - sum(one.weights_version for one in batch) / len(batch)
            if trainer.steps:  # the first batch only tells how observations are normalised
                await asyncio.to_thread(trainer.learn, batch)  # in a thread: rollouts arrive meanwhile
            trainer.count(batch)
            trainer.report(lag)
            if trainer.steps >= args.steps:
                break
            batch = []
            await collector.update(trainer.agent.state_dict())
        print(collector.stats())
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="HalfCheetah-v5", help="CartPole-v1, say")
    parser.add_argument("--backend", default="native", choices=["native", "workers", "auto"])
    parser.add_argument("--local", action="store_true", help="collectors are processes of this machine, without Ray")
    parser.add_argument("--address", help="of the Ray cluster; the one of this machine, or a new one, if none is given")
    parser.add_argument("--collectors", type=int, default=2)
    parser.add_argument("--num-envs", type=int, default=64, help="of all collectors")
    parser.add_argument("--mode", default="async", choices=["async", "sync"])
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", metavar="PATH", help="write the returns as CSV, for curves.py")
    parser.add_argument("--save", metavar="PATH", help="save the policy")
    parser.add_argument("--tensorboard", metavar="DIR")
    args = parser.parse_args()
    Path(args.save or "").parent.mkdir(parents=True, exist_ok=True)  # or training would be lost

    torch.manual_seed(args.seed)
    trainer = aioenv.run(train(args))
    if args.save:
        torch.save({"algorithm": "ray_ppo", "env": args.env, "agent": trainer.agent.state_dict()}, args.save)
