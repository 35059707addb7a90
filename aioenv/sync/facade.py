"""What the blocking vector envs share: an `AsyncVectorEnv` on a loop thread of its own, from start to close."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any, Self

import gymnasium

from aioenv.engine.results import WorkerInfo
from aioenv.engine.session import CLOSE_GRACE_S
from aioenv.sync.portal import Portal
from aioenv.sync.tracing import BlockingTrace
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["Facade"]


class Facade(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A `gymnasium.vector.VectorEnv` over an `AsyncVectorEnv` that runs on a thread of its own.

    One that is forgotten is closed when it is collected, or at the end of the program.
    """

    closed = True  # until there is something to close

    def _start(self, envs: AsyncVectorEnv) -> None:
        """Start the workers, and take over what they tell of their envs.

        Raises:
            WorkerStartError, SpaceMismatchError, RenderError: as the start of `AsyncVectorEnv`.
        """
        self._envs = envs
        self._portal = Portal()
        try:
            self._portal.call(envs._ensure_started)
        except BaseException:
            self._portal.close()
            raise
        self.closed = False
        _open_facades.add(self)
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

    def trace(self, path: str | os.PathLike[str]) -> BlockingTrace:
        """Collect a timeline, until the end of a `with` block over it (see `AsyncVectorEnv.trace`)."""
        return BlockingTrace(self._portal, self._envs.trace, path)

    def _end(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """End the workers, whose envs may take `grace_s` seconds to close, and the loop thread.

        A forked copy has neither, and leaves those of its parent alone.
        """
        if self._portal.is_mine:
            self._portal.call(self._envs.close, grace_s=grace_s)
        self._portal.close()

    def _forget(self) -> None:
        """Nobody has closed this, and nobody will."""
        session = self._envs._session if not self.closed else None
        if session is None or not session.is_mine:  # a forked copy has no such thread, either
            return
        self.closed = True
        if self._portal.is_here:  # collected there: it can't wait for itself
            self._envs.closed = True
            self._envs._abandon()
            self._portal.close()
        else:
            self._end()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can't be copied or pickled: it owns processes and a thread. Pickle what makes it, a function"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._forget()


_open_facades: weakref.WeakSet[Facade] = weakref.WeakSet()


def _forget_all() -> None:
    """At the end of the program, while threads and modules still work."""
    for facade in list(_open_facades):
        facade._forget()


atexit.register(_forget_all)
