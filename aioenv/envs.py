"""Envs of several actors as Gymnasium envs: PettingZoo's parallel envs, and envs that step in sub-steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol, SupportsFloat

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Space, spaces
from gymnasium.wrappers.utils import create_zero_array

from aioenv.errors import ResetNeededError

__all__ = ["ActorID", "PettingZooEnv", "StructuredEnv", "SubStepEnv"]

Rewards = npt.NDArray[np.float32]


class ActorID(NamedTuple):
    """The actor whose turn it is.

    Attributes:
        step_key: the sub-step, a key of the spaces.
        agent_id: the agent that acts in it; None if all agents act at once.
    """

    step_key: Hashable
    agent_id: Any = None


class ActorEnv(Env[Any, Any]):
    """A Gymnasium env around an env of another interface, to which it forwards unknown attributes.

    Attributes:
        env: the wrapped env.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)

    def __getattr__(self, name: str) -> Any:
        # not `get_state`: it would lack the rewards and the actor that are kept here
        if name.startswith("_") or name in ("env", "get_state", "set_state"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.env, name)

    def actor_id(self) -> ActorID:
        """Return the actor whose turn it is."""
        raise NotImplementedError

    def is_actor_done(self) -> bool:
        """Return whether this actor has nothing more to do in this episode."""
        raise NotImplementedError

    def actor_rewards(self) -> Rewards | None:
        """Return each actor's reward in the last whole step, also after a reset: float32 `(n_actors,)`, or None."""
        raise NotImplementedError

    def render(self) -> Any:
        """Render the wrapped env."""
        return self.env.render()

    def close(self) -> None:
        """Close the wrapped env."""
        self.env.close()


class PettingZooEnv(ActorEnv):
    """A `pettingzoo.ParallelEnv` as a Gymnasium env, in which all agents act at once.

    Observations and actions are dicts by agent, with an entry for every possible agent, since the spaces of a batch are
    fixed. Info dicts have bool arrays in the order of `possible_agents`. "agent_mask" has the agents that are present
    and act next, "terminations" and "truncations" those whose episode has just ended. An absent agent observes zeros,
    and its action is ignored; an agent that has just left still has its last observation. "agents" has the infos of
    agents that have any.

    The reward is the sum over agents; `actor_rewards` has them one by one. An episode ends when no agent is left: it is
    terminated if an agent that left last was terminated, else truncated.

    Args:
        env: a parallel env, as `module.parallel_env()` makes it.

    Raises:
        TypeError: if it is no parallel env.
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
        """Step, with the actions of the agents that are present.

        Raises:
            ResetNeededError: if no agent is left.
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
        ended = not self.env.agents
        info = self._inform(infos, terminated, truncated)
        terminates = bool(ended and terminated)
        return {**self._zeros, **observations}, float(sum(rewards.values())), terminates, ended and not terminates, info

    def actor_id(self) -> ActorID:
        """Return the actor: all agents act at once."""
        return ActorID(0)

    def is_actor_done(self) -> bool:
        """Return whether no agent is left."""
        return not self.env.agents

    def actor_rewards(self) -> Rewards:
        """Return the reward of each possible agent in the last step, 0 for absent ones; a reset does not change it."""
        return self._rewards


class StructuredEnv(Protocol):
    """An env whose step is a round of sub-steps; in each, one actor gets an observation and acts.

    It also has a `render` if it can be drawn.

    Attributes:
        observation_spaces, action_spaces: by step key, in the order of a round.
    """

    @property  # a property, so that subtypes of Space fit; a plain attribute will do
    def observation_spaces(self) -> Mapping[Any, Space[Any]]:
        """The observation spaces, by step key."""

    @property
    def action_spaces(self) -> Mapping[Any, Space[Any]]:
        """The action spaces, by step key."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return the observation of the first actor, and an info dict."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act for the actor of `actor_id`; return the observation of the next one, and the rest as in Gymnasium."""

    def actor_id(self) -> tuple[Any, Any]:
        """Return the actor whose turn it is, as an `ActorID` or a plain pair: step key and agent."""

    def is_actor_done(self) -> bool:
        """Return whether this actor has nothing more to do in this episode."""

    def actor_rewards(self) -> Any:
        """Return a reward for each actor in the last completed round; None if there are no such rewards."""

    def close(self) -> None:
        """Close the env, as in Gymnasium."""


class SubStepEnv(ActorEnv):
    """A structured env as a Gymnasium env, each step of which makes one sub-step.

    Observations and actions are dicts by step key. Entries of actors other than the current one are zero in an
    observation, and ignored in an action. Info dicts have "sub_step", the index of the current step key, and
    "agent_id".

    Args:
        env: a `StructuredEnv`.

    Raises:
        TypeError: if it is no `StructuredEnv`.
        ValueError: if observation and action spaces have different keys, or no keys.
    """

    def __init__(self, env: StructuredEnv) -> None:
        wanted = ("observation_spaces", "action_spaces", "actor_id", "is_actor_done", "actor_rewards")
        if missing := [name for name in wanted if not hasattr(env, name)]:
            raise TypeError(f"env: expected a StructuredEnv, got {type(env).__name__} without {missing[0]}")
        super().__init__(env)
        self._keys = list(env.observation_spaces)
        if not self._keys or set(self._keys) != set(env.action_spaces):
            raise ValueError(
                f"env: expected observation and action spaces of the same step keys, got {self._keys} and "
                f"{list(env.action_spaces)}"
            )
        self.observation_space = spaces.Dict(dict(env.observation_spaces))
        self.action_space = spaces.Dict({key: env.action_spaces[key] for key in self._keys})
        self._zeros = {key: create_zero_array(space) for key, space in env.observation_spaces.items()}
        self._stepped = False
        self._last_rewards: Rewards | None = None  # of the episode before

    def _to_dicts(self, obs: Any, info: dict[str, Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
        key, agent = self.env.actor_id()
        if key not in self._zeros:
            raise ValueError(f"actor_id: expected a step key of {self._keys}, got {key!r}")
        return {**self._zeros, key: obs}, {**info, "sub_step": self._keys.index(key), "agent_id": agent}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        if self._stepped:
            self._last_rewards = self._read_rewards()
            self._stepped = False
        obs, info = self.env.reset(seed=seed, options=options)
        return self._to_dicts(obs, info)

    def step(self, action: Mapping[Any, Any]) -> tuple[dict[Any, Any], SupportsFloat, bool, bool, dict[str, Any]]:
        """Make one sub-step, with the current actor's action."""
        obs, reward, terminated, truncated, info = self.env.step(action[self.env.actor_id()[0]])
        self._stepped = True
        obs, info = self._to_dicts(obs, info)
        return obs, reward, terminated, truncated, info

    def actor_id(self) -> ActorID:
        """Return the actor whose turn it is."""
        return ActorID(*self.env.actor_id())

    def is_actor_done(self) -> bool:
        """Return whether this actor has nothing more to do in this episode."""
        return bool(self.env.is_actor_done())

    def actor_rewards(self) -> Rewards | None:
        """Return the actors' rewards in the last round; right after a reset those of the episode before."""
        return self._read_rewards() if self._stepped or self._last_rewards is None else self._last_rewards

    def _read_rewards(self) -> Rewards | None:
        rewards = self.env.actor_rewards()
        return None if rewards is None else np.array(rewards, np.float32)
