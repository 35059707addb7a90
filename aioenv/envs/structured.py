"""Envs whose steps have parts: each part is one actor's turn, with spaces of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, SupportsFloat

import numpy as np
from gymnasium import Space, spaces
from gymnasium.wrappers.utils import create_zero_array

from aioenv.envs.actors import ActorEnv, ActorID, Rewards

__all__ = ["StructuredEnv", "SubStepEnv"]


class StructuredEnv(Protocol):
    """A step of this env is a round of sub-steps; in each, one actor gets an observation and acts.

    It has a `render`, too, if it is to be drawn.

    Attributes:
        observation_spaces, action_spaces: by step key, in the order of a round.
    """

    @property  # of any type of spaces; a plain attribute will do
    def observation_spaces(self) -> Mapping[Any, Space[Any]]:
        """Of what actors observe, by step key."""

    @property
    def action_spaces(self) -> Mapping[Any, Space[Any]]:
        """Of what they do, by step key."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: what the first actor observes, and an info dict."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act for whom `actor_id` names: what the next one observes, the reward, and the rest as in Gymnasium."""

    def actor_id(self) -> tuple[Any, Any]:
        """Whose turn it is, as an `ActorID` or a plain pair: step key and agent."""

    def is_actor_done(self) -> bool:
        """Whether this actor has nothing more to do in this episode."""

    def actor_rewards(self) -> Any:
        """A reward for each actor in the last round that was completed; None if there is no such thing."""

    def close(self) -> None:
        """As in Gymnasium."""


class SubStepEnv(ActorEnv):
    """A structured env as a Gymnasium env, which makes one sub-step a step.

    Observations and actions are dicts by step key. What is not the current actor's is zero in an observation, and
    ignored in an action. Info dicts have "sub_step", the place of the current step key among all, and "agent_id".

    Args:
        env: a `StructuredEnv`.

    Raises:
        TypeError: if it is none.
        ValueError: if observation and action spaces have different keys, or none.
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
        self._kept: Rewards | None = None  # of the episode before

    def _look(self, obs: Any, info: dict[str, Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
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
            self._kept = self._ask()
            self._stepped = False
        obs, info = self.env.reset(seed=seed, options=options)
        return self._look(obs, info)

    def step(self, action: Mapping[Any, Any]) -> tuple[dict[Any, Any], SupportsFloat, bool, bool, dict[str, Any]]:
        """Make one sub-step, with the current actor's action."""
        obs, reward, terminated, truncated, info = self.env.step(action[self.env.actor_id()[0]])
        self._stepped = True
        obs, info = self._look(obs, info)
        return obs, reward, terminated, truncated, info

    def actor_id(self) -> ActorID:
        """Whose turn it is."""
        return ActorID(*self.env.actor_id())

    def is_actor_done(self) -> bool:
        """Whether this actor has nothing more to do in this episode."""
        return bool(self.env.is_actor_done())

    def actor_rewards(self) -> Rewards | None:
        """The actors' rewards in the last round; right after a reset those of the episode before."""
        return self._ask() if self._stepped or self._kept is None else self._kept

    def _ask(self) -> Rewards | None:
        rewards = self.env.actor_rewards()
        return None if rewards is None else np.array(rewards, np.float32)
