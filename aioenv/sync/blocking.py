"""The base classes of `aioenv.sync`: blocking twins of async objects, each with a loop thread of its own."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import gymnasium
from gymnasium import Space

from aioenv.core.results import WorkerInfo
from aioenv.core.waits import Stats
from aioenv.errors import ClosedError
from aioenv.process.async_resource import AsyncResource
from aioenv.sync.portal import Portal
from aioenv.sync.stepping import BlockingStepper
from aioenv.tracing.timeline import Trace, raise_or_log
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["BlockingResource", "BlockingTrace", "BlockingVectorEnv", "like_function", "like_method", "signed"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class BlockingResource:
    """Run an async resource on a loop thread of its own.

    Subclasses have a `close`, which calls `_end`. An object that the program drops is closed when it is collected, or
    at the end of the program.

    Attributes:
        closed: whether `close` has been called.
    """

    closed = True  # until there is something to close
    _inner: AsyncResource
    _portal: Portal

    def _start_on_thread(self, inner: AsyncResource) -> None:
        """Start the resource on a new thread; if that fails, end the thread, and raise the error."""
        self._inner = inner
        self._portal = Portal(f"the {inner._noun}")
        try:
            self._portal.call(inner._ensure_started)
        except BaseException:
            self._portal.close()
            raise
        self.closed = False
        inner._owned = True  # if both are collected as part of a cycle, either may come first
        _open.add(self)

    def _end(self, **how: Any) -> None:
        """End the workers and the loop thread. In a forked copy, which has neither, this does nothing.

        Args:
            **how: passed to the `close` of the resource.
        """
        if not self._portal.is_copy:
            with contextlib.suppress(ClosedError):  # another thread has closed it meanwhile
                self._portal.call(self._inner.close, **how)
        self._portal.close()

    def _close_dropped(self) -> None:
        """Close an object that the program has dropped without closing it."""
        if self.closed or self._inner._pid != os.getpid():  # a forked copy has no such thread
            return
        self.closed = True
        if self._portal.is_own_thread:  # collected there, where waiting would be a deadlock
            self._inner.closed = True
            self._inner._abandon()
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
        self.close()  # type: ignore[attr-defined]  # its arguments differ between subclasses

    def __del__(self) -> None:
        self._close_dropped()


_open: weakref.WeakSet[BlockingResource] = weakref.WeakSet()


@atexit.register
def _close_all_dropped() -> None:
    """Close open objects at the end of the program, while threads and modules still work."""
    for each in list(_open):
        each._close_dropped()


class BlockingVectorEnv(BlockingResource, gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A `gymnasium.vector.VectorEnv` over an `AsyncVectorEnv` that runs on a thread of its own."""

    # as Gymnasium has them, but with types that strict checkers know
    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]

    def _start(self, envs: AsyncVectorEnv) -> None:
        """Start the workers, and take over the attributes of the vector env.

        Raises:
            WorkerStartError, SpaceMismatchError, RenderError: as the start of `AsyncVectorEnv`.
        """
        self._envs = envs
        self._start_on_thread(envs)
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
        """Return how long the run waited for envs, for images and for the policy (see `AsyncVectorEnv.stats`)."""
        return self._envs.stats(reset=reset)

    def trace(self, path: str | os.PathLike[str]) -> BlockingTrace:
        """Collect a timeline until the end of a `with` block over it (see `AsyncVectorEnv.trace`)."""
        return BlockingTrace(self._portal, self._envs.trace, path)


class BlockingTrace:
    """A timeline that is collected until `stop` or the end of a `with` block.

    Args:
        portal: the loop thread of the traced object.
        begin: starts the collection, on the loop.
        path: the file's.

    Attributes:
        path: the file's.
    """

    def __init__(
        self, portal: Portal, begin: Callable[[str | os.PathLike[str]], Trace], path: str | os.PathLike[str]
    ) -> None:
        self._portal = portal
        self._trace: Trace = portal.run(begin, path)
        self.path: Path = self._trace.path

    @property
    def stopped(self) -> bool:
        """Whether the collection has ended, by `stop` or with the traced object."""
        return self._trace.stopped

    def stop(self) -> None:
        """Stop the collection, and write the file. Idempotent.

        Raises:
            OSError: if the file can't be written.
        """
        if not self.stopped:
            self._portal.run(self._trace.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with raise_or_log(error):
            self.stop()

    def __repr__(self) -> str:
        return repr(self._trace)


# ---------------------------------------------------------------- signatures


def signed(theirs: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a function that passes all of its arguments on, so that `help` and notebooks show their signature."""

    def decorate(ours: F) -> F:
        own = inspect.signature(ours)
        signature = inspect.signature(theirs).replace(return_annotation=own.return_annotation)
        ours.__signature__ = signature  # type: ignore[attr-defined]
        return ours

    return decorate


def like_function(theirs: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function that passes all of its arguments to another one; type checkers see the other's signature."""
    return signed(theirs)


def like_method(
    theirs: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a method that passes all of its arguments to one of another class; otherwise as `like_function`."""
    return signed(theirs)
