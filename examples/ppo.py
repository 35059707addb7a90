"""
PPO in numpy
============

A whole training run: rollouts, advantages, updates, and an evaluation at the end.

::

    python examples/ppo.py --updates 40
"""

import argparse
from functools import partial

import numpy as np

import aioenv

GAMMA, LAMBDA, CLIP, ENTROPY, RATE = 0.99, 0.95, 0.2, 0.01, 3e-3
EPOCHS, MINIBATCHES = 4, 4


class Network:
    """One hidden layer, trained by Adam."""

    def __init__(self, inputs: int, outputs: int, scale: float, rng: np.random.Generator) -> None:
        first, last = rng.normal(size=(inputs, 64)) / np.sqrt(inputs), rng.normal(size=(64, outputs)) * scale / 8
        self.weights = [first, np.zeros(64), last, np.zeros(outputs)]
        self.moments = [(np.zeros_like(weight), np.zeros_like(weight)) for weight in self.weights]
        self.updates = 0

    def __call__(self, obs):
        first, first_bias, last, last_bias = self.weights
        return np.tanh(obs @ first + first_bias) @ last + last_bias

    def learn(self, obs, gradient_at):
        """Descend one step; `gradient_at(outputs)` is the gradient of each row's loss."""
        first, first_bias, last, last_bias = self.weights
        hidden = np.tanh(obs @ first + first_bias)
        ahead = gradient_at(hidden @ last + last_bias) / len(obs)
        behind = (ahead @ last.T) * (1 - hidden**2)
        gradients = obs.T @ behind, behind.sum(0), hidden.T @ ahead, ahead.sum(0)
        self.updates += 1
        for weight, (mean, square), gradient in zip(self.weights, self.moments, gradients, strict=True):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            size = np.sqrt(square / (1 - 0.999**self.updates)) + 1e-8
            weight -= RATE * mean / (1 - 0.9**self.updates) / size


def log_softmax(logits):
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def policy_gradient(actions, old_logp, advantage, logits):
    """Return the gradient of PPO's clipped loss, less a bonus for entropy."""
    logp = log_softmax(logits)
    chance, chosen = np.exp(logp), np.eye(logits.shape[1])[actions]
    ratio = np.exp((logp * chosen).sum(axis=1) - old_logp)
    counts = np.where(advantage > 0, ratio < 1 + CLIP, ratio > 1 - CLIP)
    entropy = -(chance * logp).sum(axis=1, keepdims=True)
    return ENTROPY * chance * (logp + entropy) - (counts * ratio * advantage)[:, None] * (chosen - chance)


def value_gradient(returns, values):
    return values - returns[:, None]


def advantages(rollout: aioenv.Rollout, last_value):
    """Return how much better each step was than its value had promised (GAE).

    After an episode's end there is a row in which the env was reset instead. The policy saw the episode's last
    observation there. So the value in the next row is always that of the state after a step, also at a time limit. The
    row itself is not learned from: `rollout.valid` is False.
    """
    values = np.concatenate((rollout.extras["value"], last_value[None]))
    advantage = np.zeros_like(rollout.reward)
    later = np.zeros_like(last_value)
    for t in reversed(range(len(advantage))):
        goes_on = ~(rollout.terminated[t] | rollout.truncated[t])
        promised = np.where(rollout.terminated[t], 0.0, values[t + 1])
        later = rollout.reward[t] + GAMMA * promised - values[t] + GAMMA * LAMBDA * goes_on * later
        advantage[t] = later
    return advantage


class Agent:
    def __init__(self, inputs: int, actions: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.actor, self.critic = Network(inputs, actions, 0.01, self.rng), Network(inputs, 1, 1.0, self.rng)

    def act(self, obs):
        """Draw actions from the policy; the dict beside them comes back as `rollout.extras`."""
        logp = log_softmax(self.actor(obs))
        actions = (logp + self.rng.gumbel(size=logp.shape)).argmax(axis=1)
        return actions, {"value": self.critic(obs)[:, 0], "logp": logp[np.arange(len(obs)), actions]}

    def best(self, obs):
        return self.actor(obs).argmax(axis=1)

    def learn(self, rollout: aioenv.Rollout) -> None:
        valid = rollout.valid
        advantage = advantages(rollout, self.critic(rollout.last_obs)[:, 0])[valid]
        returns = advantage + rollout.extras["value"][valid]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        obs, actions, logp = rollout.obs[valid], rollout.actions[valid], rollout.extras["logp"][valid]
        for _ in range(EPOCHS):
            for rows in np.array_split(self.rng.permutation(len(obs)), MINIBATCHES):
                self.critic.learn(obs[rows], partial(value_gradient, returns[rows]))
                self.actor.learn(obs[rows], partial(policy_gradient, actions[rows], logp[rows], advantage[rows]))


async def main(updates: int, num_envs: int, steps: int) -> None:
    async with aioenv.make_vec("CartPole-v1", num_envs, episode_stats=True) as envs:
        agent = Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
        await envs.reset(seed=0)
        for update in range(updates):
            # one group, since CartPole's steps are short; and so the draws are the same for any number of workers
            rollout = await envs.rollout(agent.act, steps, groups=1)
            agent.learn(rollout)
            stats = envs.episode_stats.write()  # of the episodes that have ended in this rollout
            print(f"update {update}: {stats['episode_count']:.0f} episodes, mean return {stats['return/mean']:.1f}")
        evaluation = await aioenv.evaluate(envs, agent.best, episodes=20, seed=1)
        print(f"evaluation: mean return {evaluation.returns.mean():.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=128)
    args = parser.parse_args()
    aioenv.run(main(args.updates, args.num_envs, args.steps))
