"""
A curriculum
============

CartPole begins further and further from its balance, the more episodes a slot has had. A quarter of the slots has the
hardest task from the start, so that the run tells how well it goes.

::

    python examples/training/curriculum.py --steps 150000 --curve curriculum.png

.. image:: /_static/examples/training/curriculum.png
   :alt: The mean returns on the hardest task and on the curriculum, by env-steps.
   :width: 500
"""

# sphinx_gallery_thumbnail_path = '_static/examples/training/curriculum.png'

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical

import aioenv
from aioenv.adapters.torch import TensorRollout, TorchVectorEnv

GAMMA, LAMBDA, CLIP, ENTROPY, RATE = 0.99, 0.95, 0.2, 0.01, 1e-3
ROLLOUT, EPOCHS, MINIBATCHES = 64, 4, 4
EASY, HARD, GROWTH = 0.05, 0.15, 0.002  # how far from 0 a state begins; the growth from episode to episode


def options(slot: int, episode: int) -> dict[str, float]:
    """Return the options of the reset that begins an episode of a slot."""
    reach = HARD if slot % 4 == 0 else min(EASY + GROWTH * episode, HARD)
    return {"low": -reach, "high": reach}


class Agent(nn.Module):
    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, actions))
        self.critic = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 1))

    def policy(self, obs):
        return Categorical(logits=self.actor(obs), validate_args=False)

    @torch.no_grad()
    def act(self, obs):
        """Draw actions. The dict beside them comes back as `rollout.extras`."""
        policy = self.policy(obs)
        actions = policy.sample()
        return actions, {"logp": policy.log_prob(actions), "value": self.critic(obs).squeeze(-1)}

    @torch.no_grad()
    def best(self, obs):
        return self.actor(obs).argmax(-1)


@torch.no_grad()
def advantages(agent: Agent, rollout: TensorRollout):
    """Return how much better each step was than its value had promised (GAE)."""
    promised = agent.critic(rollout.next_obs).squeeze(-1) * ~rollout.terminated
    advantage = rollout.reward + GAMMA * promised - rollout.extras["value"]
    goes_on = ~(rollout.terminated | rollout.truncated)
    for t in reversed(range(len(advantage) - 1)):
        advantage[t] += GAMMA * LAMBDA * goes_on[t] * advantage[t + 1]
    return advantage


def learn(agent: Agent, optimizer: torch.optim.Optimizer, rollout: TensorRollout) -> None:
    """Improve the agent on a rollout (PPO)."""
    advantage = advantages(agent, rollout)
    returns = advantage + rollout.extras["value"]
    real = rollout.valid  # not the steps in which an env was reset instead
    obs, actions, old_logp = rollout.obs[real], rollout.actions[real], rollout.extras["logp"][real]
    advantage, returns = advantage[real], returns[real]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(obs)).chunk(MINIBATCHES):
            policy = agent.policy(obs[rows])
            ratio = (policy.log_prob(actions[rows]) - old_logp[rows]).exp()
            gain = torch.min(advantage[rows] * ratio, advantage[rows] * ratio.clamp(1 - CLIP, 1 + CLIP))
            value_loss = (agent.critic(obs[rows]).squeeze(-1) - returns[rows]).square().mean()
            optimizer.zero_grad()
            (-gain.mean() - ENTROPY * policy.entropy().mean() + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def ended_returns(rollout: TensorRollout, running):
    """Return slots and returns of the episodes that have ended; `running` is the sum of each slot's rewards."""
    ended = []
    for reward, over in zip(rollout.reward, rollout.terminated | rollout.truncated, strict=True):
        running += reward
        ended += [(slot, float(running[slot])) for slot in over.nonzero()[:, 0].tolist()]
        running[over] = 0.0
    return ended


async def main(args: argparse.Namespace) -> list[tuple[int, str, float]]:
    envs = aioenv.make_vec("CartPole-v1", args.num_envs, backend=args.backend, autoreset_options=options)
    curve: list[tuple[int, str, float]] = []  # steps, task, mean return
    async with TorchVectorEnv(envs, reward_dtype=torch.float32) as envs:
        agent = Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
        optimizer = torch.optim.Adam(agent.parameters(), RATE)
        running, steps = torch.zeros(args.num_envs), 0
        # a reset of your own passes options of its own: episode 0 is easy for all
        await envs.reset(seed=args.seed, options={"low": -EASY, "high": EASY})
        while steps < args.steps:
            rollout = await envs.rollout(agent.act, ROLLOUT, groups=1)
            optimizer.param_groups[0]["lr"] = RATE * (1 - steps / args.steps)
            learn(agent, optimizer, rollout)
            steps += int(rollout.valid.sum())
            ended = ended_returns(rollout, running)
            for task, is_task in (("hardest", lambda slot: slot % 4 == 0), ("curriculum", lambda slot: slot % 4)):
                returns = [own for slot, own in ended if is_task(slot)]
                if returns:
                    curve.append((steps, task, sum(returns) / len(returns)))
                    print(f"{steps} steps, {task}: mean return {curve[-1][2]:.1f}", flush=True)
    hardest = {"low": -HARD, "high": HARD}
    async with TorchVectorEnv(aioenv.make_vec("CartPole-v1", 8, autoreset_options=hardest)) as envs:
        evaluation = await aioenv.evaluate(envs.envs, envs.numpy_policy(agent.best), args.episodes, seed=args.seed)
    print(f"evaluation of the hardest task: mean return {evaluation.returns.mean():.1f}")
    return curve


def log(curve: list[tuple[int, str, float]], directory: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(directory) as summary:
        for steps, task, mean in curve:
            summary.add_scalar(f"return/{task}", mean, steps)


def draw(curve: list[tuple[int, str, float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for task, colour in (("curriculum", "#0072b2"), ("hardest", "#d55e00")):
        points = [(steps, mean) for steps, name, mean in curve if name == task]
        axes.plot(*zip(*points, strict=True), label=task, color=colour)
    axes.set(xlabel="env-steps", ylabel="mean return", title="CartPole-v1")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="auto", choices=["workers", "auto"])
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--episodes", type=int, default=50, help="of the evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", metavar="PATH", help="draw the returns, as PNG")
    parser.add_argument("--tensorboard", metavar="DIR")
    args = parser.parse_args()
    Path(args.curve or "").parent.mkdir(parents=True, exist_ok=True)  # or training would be lost

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    curve = aioenv.run(main(args))
    if args.tensorboard:
        log(curve, args.tensorboard)
    if args.curve and curve:
        draw(curve, args.curve)
