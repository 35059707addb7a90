"""The life of a vector env, from before its start until it is closed or forgotten; and what it knows of its envs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import warnings
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Self

from gymnasium import Space

from aioenv.engine.fleet import Fleet, FleetConfig
from aioenv.engine.results import WorkerInfo
from aioenv.engine.schedule import Schedule
from aioenv.engine.session import CLOSE_GRACE_S, Session
from aioenv.engine.tracing import Traces
from aioenv.errors import ClosedError, LoopError
from aioenv.trace import wanted

if TYPE_CHECKING:
    from aioenv.rendering.config import RenderConfig

__all__ = ["Lifecycle"]


class Lifecycle(Traces):
    """Something that is started by an await, belongs to the loop of that await, and must be closed.

    Attributes:
        num_envs: how many slots there are.
        copy: whether results are arrays of the caller's own.
        closed: whether `close` has been called.
    """

    num_envs: int
    copy: bool
    closed = True  # until there is something to close
    _config: FleetConfig
    _render_config: RenderConfig | None = None
    _pixels_config: RenderConfig | None = None
    _must_reset: bool
    _timeout_s: float | None
    _on_timeout: str
    _loop: asyncio.AbstractEventLoop | None = None
    _starting: asyncio.Task[None] | None = None
    _closing: asyncio.Task[None] | None = None
    _session: Session | None = None
    _schedule: Schedule | None = None  # of the session, once it is started: one lookup less a step

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ensure_started().__await__()

    async def __aenter__(self) -> Self:
        return await self._ensure_started()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _ensure_started(self) -> Self:
        """Start the workers, once.

        If this is cancelled, the workers are ended.

        Raises:
            WorkerStartError: if an env could not be made; it carries the worker's traceback.
            SpaceMismatchError: if the envs' spaces can't be batched.
            RenderError: if images were asked for and can't be drawn.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._session = self._make_session()
            _open.add(self)
            self._starting = loop.create_task(self._session.start())
        self._check_loop()
        assert self._starting is not None
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            self._starting.cancel()
            await asyncio.wait([self._starting])
            await self.close()
            raise
        except BaseException:
            self.closed = True
            raise
        assert self._session is not None
        if self._schedule is None and (path := wanted()) is not None:
            assert self._session.schedule is not None
            self._begin_trace(self._session.schedule, path)
        self._schedule = self._session.schedule
        return self

    def _make_session(self) -> Session:
        return Session(
            self._config,
            self._render_config,
            self._pixels_config,
            copy=self.copy,
            must_reset=self._must_reset,
            timeout_s=self._timeout_s,
            on_timeout=self._on_timeout,
        )

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """End the workers: each may close its envs for `grace_s`, then gets SIGTERM, a second later SIGKILL.

        Idempotent. If this is cancelled, the workers are killed at once.

        Args:
            grace_s: in seconds; envs that write a video when they are closed, say, may want more than one.
        """
        self.closed = True
        _open.discard(self)
        if self._loop is None:
            return
        self._check_loop()
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(grace_s))
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._abandon()
            while not self._closing.done():  # not for long: every process is being killed
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([self._closing])
            raise

    async def _close(self, grace_s: float) -> None:
        assert self._starting is not None and self._session is not None
        if not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self._session.close(grace_s)
        self._end_trace()

    def _abandon(self) -> None:
        """Kill every process without waiting."""
        if self._session is not None:
            self._session.abandon()
        self._end_trace()

    def __del__(self) -> None:
        if not self.closed and self._session is not None and self._session.is_mine:
            self.closed = True
            self._abandon()
            warnings.warn(f"unclosed {self!r}; its workers were killed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "running" if self._schedule is not None else "not started"
        return f"<{type(self).__name__} num_envs={self.num_envs} {state}>"

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise LoopError(f"this vector env belongs to the event loop {self._loop}, it was used from {loop}")

    @property
    def _running(self) -> Schedule:
        """The schedule, if this is started, open, and on its own loop."""
        schedule = self._schedule
        if schedule is None or self.closed:
            self._check_open()
        if schedule is None:
            raise RuntimeError(f"{self!r}: start it first, with `async with envs:` or `await envs`")
        if asyncio.get_running_loop() is not self._loop:
            self._check_loop()
        return schedule

    @property
    def _started(self) -> Fleet:
        """The workers, if this is or was started: what is known of them outlives the close."""
        if self._session is None or self._schedule is None:
            raise RuntimeError(
                f"{self!r}: start it first, with `async with envs:` or `await envs`; spaces come from the workers"
            )
        return self._session.fleet

    # ------------------------------------------------------------ attributes

    @property
    def single_observation_space(self) -> Space[Any]:
        """The observation space of one slot."""
        return self._started.single_observation_space

    @property
    def observation_space(self) -> Space[Any]:
        """The space of a batch of observations."""
        return self._started.observation_space

    @property
    def single_action_space(self) -> Space[Any]:
        """The action space of one slot."""
        return self._started.single_action_space

    @property
    def action_space(self) -> Space[Any]:
        """The space of a batch of actions."""
        return self._started.action_space

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the first env, and `autoreset_mode`."""
        return self._started.metadata

    @property
    def spec(self) -> Any:
        """The `EnvSpec` of the first env, if it has one."""
        return self._started.spec

    @property
    def render_mode(self) -> str | None:
        """The render mode of the first env."""
        return self._started.render_mode

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes: pid, state ("running", "dead", …), slots, CPUs and memory."""
        members = self._session.fleet.members if self._session is not None else []
        return tuple(WorkerInfo(m.worker.pid, m.worker.state.value, m.worker.slots, m.worker.cpus) for m in members)


# Started and not closed: at the end of the program, before modules are taken down, their workers are killed.
_open: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for envs in list(_open):
        envs.__del__()
