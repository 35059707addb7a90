"""
SAC in torch
============

Hopper learns to hop. The envs step while the networks learn: one update for four env-steps, however fast the machine
is. The tutorial *Off-policy: SAC* builds such a program, and looks at its timeline.

::

    for seed in 0 1 2 3 4; do
        python examples/training/sac_torch.py --until 1500 --seed $seed --log sac-$seed.csv --save sac-$seed.pt
    done
    python examples/training/curves.py sac-*.csv --bar 1500 --png sac.png

Five seeds of five reach 1500: after 160,000 to 290,000 steps, the median after 207,000 steps and 8 minutes. Each run
had one core of a virtual machine (AMD EPYC), which its workers shared; with two cores a run takes about 70 % of the
time.

.. image:: /_static/examples/training/sac_torch.png
   :alt: Thin curves of the mean return of five seeds by env-steps, and their median.
   :width: 500
"""

# sphinx_gallery_thumbnail_path = '_static/examples/training/sac_torch.png'

import argparse
import contextlib
import copy
import math
import os
import time
from collections import deque
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import softplus

import aioenv
from aioenv.adapters.torch import TorchVectorEnv

GAMMA, TAU, RATE, BATCH, HIDDEN = 0.99, 0.01, 1e-3, 128, 128
ACTOR_EVERY = 2  # updates of the critics to one of the actor
REPORT, LAST = 1000, 20  # env-steps between two reports; episodes whose mean return is reported


class ReplayBuffer:
    """The last transitions, a row each of one tensor: so a batch is taken in one piece."""

    def __init__(self, size: int, inputs: int, outputs: int) -> None:
        self.widths = (inputs, outputs, 1, inputs, 1)
        self.rows = torch.empty(size, sum(self.widths))
        self.added = 0

    def add(self, obs, actions, reward, next_obs, terminated):
        rows = torch.cat((obs, actions, reward[:, None], next_obs, terminated[:, None]), 1)
        self.rows[(self.added + torch.arange(len(rows))) % len(self.rows)] = rows
        self.added += len(rows)

    def sample(self, number: int):
        rows = self.rows[torch.randint(min(self.added, len(self.rows)), (number,))]
        obs, actions, reward, next_obs, terminated = rows.split(self.widths, 1)
        return obs, actions, reward[:, 0], next_obs, terminated[:, 0]


class Actor(nn.Module):
    """A normal distribution of actions, squashed by tanh to the bounds of the action space."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * outputs)
        )
        self.register_buffer("bound", torch.ones(outputs))  # saved with the policy

    def forward(self, obs):
        """Draw actions; return them and the logarithms of their densities (of the actions before they are scaled)."""
        mean, log_std = self.network(obs).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_slope = 2 * (math.log(2) - raw - softplus(-2 * raw))  # of tanh
        logp = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - log_slope
        return raw.tanh() * self.bound, logp.sum(-1)

    @torch.no_grad()
    def best(self, obs):
        return self.network(obs).chunk(2, -1)[0].tanh() * self.bound


class Critics(nn.Module):
    """Two values of an observation and an action; the two networks are stacked, and computed in one go."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        sizes = (inputs + outputs, HIDDEN, HIDDEN, 1)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in pairwise(sizes):
            bound = fan_in**-0.5
            self.weights.append(torch.empty(2, fan_in, fan_out).uniform_(-bound, bound))
            self.biases.append(torch.empty(2, 1, fan_out).uniform_(-bound, bound))

    def forward(self, obs, actions):
        hidden = torch.cat((obs, actions), -1).expand(2, -1, -1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden.relu() if number else hidden, weight)
        return hidden.squeeze(-1)  # (2, batch)


class Learner:
    """The buffer, the networks, and how they learn."""

    def __init__(self, inputs: int, outputs: int, bound, size: int) -> None:
        self.buffer = ReplayBuffer(size, inputs, outputs)
        self.actor, self.critics = Actor(inputs, outputs), Critics(inputs, outputs)
        self.actor.bound.copy_(torch.as_tensor(bound))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = torch.zeros((), requires_grad=True)
        self.entropy = -outputs  # that the temperature aims at
        self.policy = [*self.actor.parameters(), self.log_temperature]
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), RATE, fused=True)
        self.policy_optimizer = torch.optim.Adam(self.policy, RATE, fused=True)
        self.updates = 0

    @torch.no_grad()
    def act(self, obs, at_random: bool):
        drawn = self.actor(obs)[0]
        return self.actor.bound * (2 * torch.rand_like(drawn) - 1) if at_random else drawn

    def update(self) -> None:
        obs, actions, reward, next_obs, terminated = self.buffer.sample(BATCH)
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            next_actions, next_logp = self.actor(next_obs)
            next_value = self.targets(next_obs, next_actions).amin(0) - temperature * next_logp
            # a truncated episode would have gone on, so it is worth what its last observation promises
            value = reward + GAMMA * (1 - terminated) * next_value
        self.critic_optimizer.zero_grad()
        (self.critics(obs, actions) - value).square().mean(-1).sum().backward()
        self.critic_optimizer.step()

        if self.updates % ACTOR_EVERY == 0:
            drawn, logp = self.actor(obs)
            loss = (temperature * logp - self.critics(obs, drawn).amin(0)).mean()
            loss = loss - self.log_temperature * (logp.detach().mean() + self.entropy)
            self.policy_optimizer.zero_grad()
            loss.backward(inputs=self.policy)
            self.policy_optimizer.step()

        for target, critic in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
            target.lerp_(critic.detach(), TAU)
        self.updates += 1


class Report:
    """Prints and logs the mean return of the last episodes."""

    def __init__(self, episode_stats: aioenv.EpisodeStats, path: str | None) -> None:
        self.episode_stats = episode_stats
        self.returns: deque[float] = deque(maxlen=LAST)
        self.best, self.reported = -math.inf, 0
        self.path = path or os.devnull
        with open(self.path, "w") as file:
            print("steps,seconds,return", file=file)
        self.began = time.perf_counter()

    def add(self, info: dict) -> None:
        if "episode" in info:
            self.returns.extend(info["episode"]["r"][info["_episode"]].tolist())

    def write(self, steps: int, updates: int) -> None:
        self.reported, seconds = steps, time.perf_counter() - self.began
        self.episode_stats.write()
        if self.returns:
            mean = sum(self.returns) / len(self.returns)
            self.best = max(self.best, mean) if len(self.returns) == LAST else self.best
            with open(self.path, "a") as file:
                print(f"{steps},{seconds:.1f},{mean:.2f}", file=file)
            print(f"{steps} steps, {updates} updates, {seconds:.0f} s: mean return {mean:.1f}", flush=True)


class TensorBoard:
    """A writer of episode statistics."""

    def __init__(self, directory: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.summary = SummaryWriter(directory)

    def write(self, prefix, step, stats):
        for name, value in stats.items():
            self.summary.add_scalar(f"{prefix}/{name}", value, step)
        self.summary.flush()


async def train(args: argparse.Namespace) -> Learner:
    writers = [TensorBoard(args.tensorboard)] if args.tensorboard else []
    stats = aioenv.EpisodeStats(prefix="train" if writers else None, writers=writers)
    made = aioenv.make_vec(args.env, args.num_envs, num_workers=args.workers, episode_stats=stats)
    async with TorchVectorEnv(made, obs_dtype=torch.float32, reward_dtype=torch.float32) as envs:
        inputs, outputs = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        learner = Learner(inputs, outputs, envs.single_action_space.high, args.buffer)
        buffer = learner.buffer
        report = Report(stats, args.log)
        # of each slot: what it has seen, what was sent to it, and whether its next result begins an episode
        obs, actions = torch.zeros(args.num_envs, inputs), torch.zeros(args.num_envs, outputs)
        resetting = torch.ones(args.num_envs, dtype=torch.bool)
        with envs.trace(args.trace) if args.trace else contextlib.nullcontext():
            envs.send_reset(seed=args.seed)
            while buffer.added < args.steps and report.best < args.until:
                slots, next_obs, reward, terminated, truncated, info = await envs.recv(args.min_slots)
                real = ~resetting[slots]  # the result that begins an episode is no transition
                transitions = (obs[slots], actions[slots], reward, next_obs, terminated)
                buffer.add(*(column[real] for column in transitions))
                resetting[slots] = terminated | truncated

                drawn = learner.act(next_obs, at_random=buffer.added < args.random)
                envs.send(drawn, slots)  # these envs step …
                obs[slots], actions[slots] = next_obs, drawn
                while learner.updates < args.ratio * (buffer.added - args.random):
                    learner.update()  # … while the networks learn
                report.add(info)
                if buffer.added >= report.reported + REPORT:
                    report.write(buffer.added, learner.updates)
        if buffer.added > report.reported:
            report.write(buffer.added, learner.updates)
        print(envs.stats())
        return learner


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="Hopper-v5", help="with continuous actions")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2, help="processes that step them")
    parser.add_argument("--min-slots", type=int, default=4, help="wait for so many; if for all, runs are the same")
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--random", type=int, default=5000, help="steps before the networks learn and act")
    parser.add_argument("--ratio", type=float, default=0.25, help="updates for each env-step")
    parser.add_argument("--buffer", type=int, default=1_000_000, help="transitions that are kept")
    parser.add_argument("--until", type=float, default=math.inf, help="stop at this mean return")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", metavar="PATH", help="write steps, seconds and returns as CSV, for curves.py")
    parser.add_argument("--save", metavar="PATH", help="save the policy, for evaluate_torch.py")
    parser.add_argument("--tensorboard", metavar="DIR")
    parser.add_argument("--trace", metavar="PATH", help="write a timeline of the run")
    args = parser.parse_args()
    Path(args.save or "").parent.mkdir(parents=True, exist_ok=True)  # or training would be lost

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the envs' workers use the other CPUs
    learner = aioenv.run(train(args))
    if args.save:
        torch.save({"algorithm": "sac", "env": args.env, "agent": learner.actor.state_dict()}, args.save)
