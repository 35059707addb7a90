"""What the blocking vector envs share: an `AsyncVectorEnv` on a loop thread of its own, from start to close."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
from gymnasium import Space

from aioenv.core.results import WorkerInfo
from aioenv.core.waits import Stats
from aioenv.sync.blocking import Blocking
from aioenv.sync.stepping import BlockingStepper
from aioenv.sync.tracing import BlockingTrace
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["Facade"]


class Facade(Blocking, gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A `gymnasium.vector.VectorEnv` over an `AsyncVectorEnv` that runs on a thread of its own."""

    # as Gymnasium has them, but with types that strict checkers know
    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]

    def _start(self, envs: AsyncVectorEnv) -> None:
        """Start the workers, and take over what they tell of their envs.

        Raises:
            WorkerStartError, SpaceMismatchError, RenderError: as the start of `AsyncVectorEnv`.
        """
        self._envs = envs
        self._run(envs)
        self._stepper = BlockingStepper(self._portal, envs)
        self.num_envs = envs.num_envs
        self.single_observation_space = envs.single_observation_space
        self.observation_space = envs.observation_space
        self.single_action_space = envs.single_action_space
        self.action_space = envs.action_space
        self.metadata = envs.metadata
        self.render_mode = envs.render_mode
        self.autoreset_mode = envs.autoreset_mode

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes: pid, state and slots."""
        return self._envs.workers

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute."""
        raise NotImplementedError

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every env; otherwise as `call`."""
        return self.call(name)

    @property
    def np_random_seed(self) -> Any:
        """The seed of every env's generator, fetched from the workers."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """A copy of every env's generator, fetched from the workers."""
        return self.get_attr("np_random")

    def stats(self, *, reset: bool = False) -> Stats:
        """How long the run waited for envs, for images and for the policy (see `AsyncVectorEnv.stats`)."""
        return self._envs.stats(reset=reset)

    def trace(self, path: str | os.PathLike[str]) -> BlockingTrace:
        """Collect a timeline, until the end of a `with` block over it (see `AsyncVectorEnv.trace`)."""
        return BlockingTrace(self._portal, self._envs.trace, path)
