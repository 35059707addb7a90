"""What envs of several actors have in common."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Env

__all__ = ["ActorEnv", "ActorID", "Rewards"]

Rewards = npt.NDArray[np.float32]


class ActorID(NamedTuple):
    """Whose turn it is.

    Attributes:
        step_key: the part of the step, a key of the spaces.
        agent_id: who acts in it, among those that take turns there; None for all at once.
    """

    step_key: Hashable
    agent_id: Any = None


class ActorEnv(Env[Any, Any]):
    """A Gymnasium env over one of another interface. What it does not have itself, the one below is asked for.

    Attributes:
        env: the one below.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.render_mode = getattr(env, "render_mode", None)

    def __getattr__(self, name: str) -> Any:
        # not its state: who acts, and the rewards that are kept here, would be missing from that
        if name.startswith("_") or name in ("env", "get_state", "set_state"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.env, name)

    def actor_id(self) -> ActorID:
        """Whose turn it is."""
        raise NotImplementedError

    def is_actor_done(self) -> bool:
        """Whether this actor has nothing more to do in this episode."""
        raise NotImplementedError

    def actor_rewards(self) -> Rewards | None:
        """The reward of each actor in the last whole step, also after a reset: float32 `(n_actors,)`, or None."""
        raise NotImplementedError

    def render(self) -> Any:
        """What the env below draws."""
        return self.env.render()

    def close(self) -> None:
        """Close the env below."""
        self.env.close()
