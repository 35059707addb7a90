"""PettingZoo's parallel envs as Gymnasium envs. The package is not needed: whatever has the interface will do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.wrappers.utils import create_zero_array

from aioenv.envs.actors import ActorEnv, ActorID, Rewards
from aioenv.errors import ResetNeededError

__all__ = ["PettingZooEnv"]


class PettingZooEnv(ActorEnv):
    """A `pettingzoo.ParallelEnv` as a Gymnasium env, in which all agents act at once.

    Observations and actions are dicts by agent, with an entry for every agent there may be, since the spaces of a batch
    are fixed. Info dicts have, as bool arrays in the order of `possible_agents`: "agent_mask", who is there and acts
    next; "terminations" and "truncations", whose part has just ended. Who is not there observes zeros, and its action
    is ignored. Who has just left still has its last observation. "agents" has the infos of agents that have any.

    The reward is the sum over agents; `actor_rewards` has them one by one. An episode ends when nobody is left: it is
    terminated if the part of one that left last was terminated, else truncated.

    Args:
        env: a parallel env, as `module.parallel_env()` makes it.

    Raises:
        TypeError: if it is none.
    """

    def __init__(self, env: Any) -> None:
        missing = [name for name in ("possible_agents", "observation_space", "action_space") if not hasattr(env, name)]
        if missing:
            raise TypeError(f"env: expected a PettingZoo ParallelEnv, got {type(env).__name__} without {missing[0]}")
        if hasattr(type(env), "agent_iter"):
            raise TypeError(
                f"env: expected a PettingZoo ParallelEnv, got an AECEnv, {type(env).__name__}, whose agents act in "
                "turn: take pettingzoo.utils.aec_to_parallel(env)"
            )
        super().__init__(env)
        self._agents = list(env.possible_agents)
        self._places = {agent: place for place, agent in enumerate(self._agents)}
        self.observation_space = spaces.Dict({agent: env.observation_space(agent) for agent in self._agents})
        self.action_space = spaces.Dict({agent: env.action_space(agent) for agent in self._agents})
        self._zeros = {agent: create_zero_array(space) for agent, space in self.observation_space.spaces.items()}
        self._rewards: Rewards = np.zeros(len(self._agents), np.float32)

    def _mask(self, agents: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask = np.zeros(len(self._agents), np.bool_)
        for agent in agents:
            if agent not in self._places:
                raise ValueError(f"expected agents of possible_agents, {self._agents}, got {agent!r}")
            mask[self._places[agent]] = True
        return mask

    def _inform(self, infos: Mapping[Any, Any], terminated: Any, truncated: Any) -> dict[str, Any]:
        masks = {"agent_mask": self.env.agents, "terminations": terminated, "truncations": truncated}
        info: dict[str, Any] = {name: self._mask(agents) for name, agents in masks.items()}
        if told := {agent: dict(info) for agent, info in infos.items() if info}:
            info["agents"] = told
        return info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        observations, infos = self.env.reset(seed=seed, options=options)
        return {**self._zeros, **observations}, self._inform(infos, (), ())

    def step(self, action: Mapping[Any, Any]) -> tuple[dict[Any, Any], float, bool, bool, dict[str, Any]]:
        """Step, with the actions of those that are there.

        Raises:
            ResetNeededError: if nobody is left.
        """
        if not self.env.agents:
            raise ResetNeededError("step: no agent is left, reset this env first")
        result = self.env.step({agent: action[agent] for agent in self.env.agents})
        observations, rewards, terminations, truncations, infos = result
        terminated = [agent for agent, flag in terminations.items() if flag]
        truncated = [agent for agent, flag in truncations.items() if flag]
        self._rewards = np.zeros(len(self._agents), np.float32)
        for agent, reward in rewards.items():
            self._rewards[self._places[agent]] = reward
        over = not self.env.agents
        info = self._inform(infos, terminated, truncated)
        ends = bool(over and terminated)
        return {**self._zeros, **observations}, float(sum(rewards.values())), ends, over and not ends, info

    def actor_id(self) -> ActorID:
        """All agents act at once."""
        return ActorID(0)

    def is_actor_done(self) -> bool:
        """Whether nobody is left."""
        return not self.env.agents

    def actor_rewards(self) -> Rewards:
        """The reward of each possible agent in the last step, 0 for who was not there; a reset leaves it as it is."""
        return self._rewards
