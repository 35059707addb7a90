"""
Several agents
==============

Step a PettingZoo-style `ParallelEnv` in worker processes: two hunters run after a hare.

::

    python examples/multi_agent.py --steps 100
"""

import argparse

import numpy as np
from gymnasium import spaces

import aioenv
from aioenv.envs import PettingZooEnv


class Chase:
    """Two hunters on a ring run after a hare. It has what a `ParallelEnv` must have, no more."""

    possible_agents = ("hare", "hunter_0", "hunter_1")

    def __init__(self):
        self.agents = []
        self.rng = np.random.default_rng()

    def observation_space(self, agent):
        return spaces.Box(-0.5, 0.5, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.t = list(self.possible_agents), 0
        self.place = dict(zip(self.agents, self.rng.random(3), strict=True))
        return self.look(), {agent: {} for agent in self.agents}

    def look(self):
        """Return where the two others are, from -0.5 to 0.5 around the ring."""
        ring = {a: [(self.place[b] - self.place[a] + 0.5) % 1 - 0.5 for b in self.place if b != a] for a in self.agents}
        return {agent: np.array(gaps, np.float32) for agent, gaps in ring.items()}

    def step(self, actions):
        self.t += 1
        for agent, action in actions.items():
            self.place[agent] += (int(action) - 1) * (0.06 if agent == "hare" else 0.05)
        observations = self.look()
        caught = {agent: agent != "hare" and bool(abs(gaps[0]) < 0.03) for agent, gaps in observations.items()}
        caught["hare"] = any(caught.values())
        rewards = {agent: (-1.0 if agent == "hare" else 1.0) * caught[agent] for agent in self.agents}
        late = dict.fromkeys(self.agents, self.t >= 50)
        if caught["hare"] or self.t >= 50:
            self.agents = []
        return observations, rewards, {a: caught[a] for a in late}, late, {a: {} for a in late}

    def close(self):
        pass


async def main(steps: int) -> None:
    total, episodes = np.zeros(3), 0
    async with aioenv.make_vec(lambda: PettingZooEnv(Chase()), num_envs=8) as envs:
        envs.action_space.seed(0)
        obs, _ = await envs.reset(seed=0)
        for _ in range(steps):
            actions = envs.action_space.sample()
            for hunter in ("hunter_0", "hunter_1"):  # they run towards the hare, which runs at random
                actions[hunter] = np.sign(obs[hunter][:, 0]).astype(np.int64) + 1
            obs, _, terminated, truncated, info = await envs.step(actions)
            caught = info["terminations"]
            total += caught.sum(0)
            episodes += int((terminated | truncated).sum())
    print(f"{episodes} episodes; caught {int(total[0])}, by hunters {total[1:].astype(int).tolist()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    aioenv.run(main(parser.parse_args().steps))
