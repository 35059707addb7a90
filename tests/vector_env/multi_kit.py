"""Envs of several actors: a ParallelEnv such as PettingZoo's simple_spread, and a two-stage structured env."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from aioenv.envs import ActorID


class Spread:
    """Agents on a plane share landmarks: all get the (negative) distance, each a penalty for bumping into another.

    As PettingZoo's simple_spread, with two differences: an agent that has found its landmark leaves, and one comes
    late. Another interface than `ParallelEnv`'s is not used.
    """

    metadata = {"name": "spread_v0", "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, n: int = 3, max_cycles: int = 7, render_mode: str | None = None) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(n)]
        self.agents: list[str] = []
        self.render_mode = render_mode
        self.max_cycles = max_cycles
        self._observed = {agent: spaces.Box(-np.inf, np.inf, (4,), np.float32) for agent in self.possible_agents}
        self._acts = {agent: spaces.Discrete(5) for agent in self.possible_agents}

    def observation_space(self, agent):
        return self._observed[agent]

    def action_space(self, agent):
        return self._acts[agent]

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.t = 0
        places = self.rng.uniform(-1, 1, (len(self.possible_agents), 2))
        self.place = dict(zip(self.possible_agents, places, strict=True))
        self.marks = self.rng.uniform(-1, 1, (len(self.possible_agents), 2))
        self.agents = self.possible_agents[:-1]  # the last one comes later
        return {agent: self._observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def _observe(self, agent):
        mark = self.marks[self.possible_agents.index(agent)]
        return np.concatenate([self.place[agent], mark - self.place[agent]]).astype(np.float32)

    def step(self, actions: dict[str, Any]):
        assert set(actions) == set(self.agents)
        self.t += 1
        moves = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)]) * 0.3
        for agent, action in actions.items():
            self.place[agent] = self.place[agent] + moves[action] + self.rng.normal(0, 0.05, 2)
        acting = self.agents
        gaps = {a: [float(np.hypot(*(self.place[a] - mark))) for mark in self.marks] for a in acting}
        shared = -sum(map(min, zip(*gaps.values(), strict=True)))
        rewards = {a: shared - sum(np.hypot(*(self.place[a] - self.place[b])) < 0.2 for b in acting) for a in acting}
        found = {a: gaps[a][self.possible_agents.index(a)] < 0.25 for a in acting}
        late = self.t >= self.max_cycles
        observations = {a: self._observe(a) for a in acting}
        self.agents = [] if late else [a for a in acting if not found[a]]
        infos = {a: {"gap": min(gaps[a])} for a in acting}
        truncated = dict.fromkeys(acting, late)
        if self.t == 2 and not late:
            newcomer = self.possible_agents[-1]
            self.agents = [*self.agents, newcomer]
            observations[newcomer], infos[newcomer] = self._observe(newcomer), {}
            rewards[newcomer], found[newcomer], truncated[newcomer] = 0.0, False, False
        return observations, rewards, found, truncated, infos

    def render(self):
        return np.full((2, 2, 3), self.t, np.uint8)

    def close(self):
        pass


class TwoStage:
    """A part is chosen, then cut: two sub-steps a step, each with its spaces. If risky, a choice may end it all."""

    observation_spaces = {"choose": spaces.Box(0, 1, (3,), np.float32), "cut": spaces.Discrete(5)}  # noqa: RUF012
    action_spaces = {"choose": spaces.Discrete(3), "cut": spaces.Box(-1, 1, (2,), np.float32)}  # noqa: RUF012
    render_mode = None

    def __init__(self, steps: int = 3, risky: bool = False, rewards: bool = True) -> None:
        self.steps, self.risky, self.has_rewards = steps, risky, rewards
        self.last = np.zeros(2)

    def reset(self, *, seed=None, options=None):
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.turn, self.t, self.pieces = "choose", 0, self.rng.random(3).astype(np.float32)
        self.last = np.zeros(2)
        return self.pieces, {"pieces_left": 3}

    def step(self, action):
        if self.turn == "choose":
            self.chosen = int(action)
            self.turn = "cut"
            lost = self.risky and self.rng.random() < 0.3
            return self.chosen + 1, 0.0, bool(lost), False, {}
        self.t += 1
        waste = float(np.abs(action).sum() * self.pieces[self.chosen])
        self.last = np.array([self.pieces[self.chosen], -waste])
        self.pieces = self.rng.random(3).astype(np.float32)
        self.turn = "choose"
        return self.pieces, float(self.last.sum()), False, self.t >= self.steps, {"waste": waste}

    def actor_id(self):
        return ActorID(self.turn, 0)

    def is_actor_done(self):
        return self.turn == "choose" and self.t == self.steps

    def actor_rewards(self):
        return self.last if self.has_rewards else None

    def render(self):
        return None

    def close(self):
        pass
