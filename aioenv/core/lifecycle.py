"""The life of a vector env, from before its start until it is closed or forgotten; and what it knows of its envs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from gymnasium import Space
from gymnasium.envs.registration import EnvSpec

from aioenv.core.results import WorkerInfo
from aioenv.core.scheduler import RequestScheduler
from aioenv.core.session import CLOSE_GRACE_S, Session
from aioenv.core.tracing import Traces
from aioenv.core.worker_pool import WorkerPool, WorkerPoolConfig
from aioenv.process.async_resource import AsyncResource
from aioenv.tracing.timeline import wanted

if TYPE_CHECKING:
    from aioenv.rendering.config import RenderConfig

__all__ = ["Lifecycle"]


class Lifecycle(Traces, AsyncResource):
    """The life of a vector env.

    Attributes:
        num_envs: how many slots there are.
        copy: whether results are arrays of the caller's own.
        closed: whether `close` has been called.
    """

    num_envs: int
    copy: bool
    _noun = "vector env"
    _config: WorkerPoolConfig
    _render_config: RenderConfig | None = None
    _pixels_config: RenderConfig | None = None
    _must_reset: bool
    _timeout_s: float | None
    _on_timeout: str
    _session: Session | None = None
    _schedule: RequestScheduler | None = None  # of the session, once it is started: one lookup less a step

    async def _ensure_started(self) -> Self:
        """Start the workers, once.

        If this is cancelled, the workers are ended.

        Raises:
            WorkerStartError: if an env could not be made; it carries the worker's traceback.
            SpaceMismatchError: if the envs' spaces can't be batched.
            RenderError: if images were asked for and can't be drawn.
            OSError: if the timeline that `AIOENV_TRACE` asks for can't be written.
        """
        await super()._ensure_started()
        assert self._session is not None
        self._schedule = self._session.backend
        return self

    def _start(self) -> Coroutine[Any, Any, None]:
        self._session = self._make_session()
        return self._start_session(self._session)

    async def _start_session(self, session: Session) -> None:
        path = wanted()
        try:
            await session.start()
        except BaseException:
            self._forget_code()
            raise
        if self._config.restart is None:
            self._forget_code()
        if path is not None:
            assert session.backend is not None
            self._trace_all(session.backend, path)

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
        try:
            await self._close_once(partial(self._close, grace_s))
        finally:
            if self.closed:
                self._forget_code()

    async def _close(self, grace_s: float) -> None:
        assert self._session is not None
        try:
            await self._session.close(grace_s)
        finally:
            self._end_trace()

    def _abandon(self) -> None:
        """Kill every process without waiting."""
        if self._session is not None:
            self._session.abandon()
        self._forget_code()
        self._end_trace()

    def _forget_code(self) -> None:
        """Let go of the snapshot of the factories, and its memory: no worker is started from it any more."""
        if self._config.code is not None:
            self._config = self._config._replace(code=None)
            if self._session is not None:
                self._session.forget_code()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "running" if self._schedule is not None else "not started"
        workers = f" num_workers={self._config.num_workers}" if self._config.num_workers else ""
        return f"<{type(self).__name__} num_envs={self.num_envs}{workers} {state}>"

    if not TYPE_CHECKING:  # for who forgets the "async"; type checkers say it by themselves

        def __enter__(self) -> None:
            raise TypeError(f"{self!r}: use `async with`; for code without await there is aioenv.sync.make_vec")

        def __exit__(self, *exc_info: object) -> None: ...

    @property
    def _running(self) -> RequestScheduler:
        """The schedule, if this is started, open, and on its own loop."""
        schedule = self._schedule
        if schedule is None or self.closed:
            self._check_open()
        if schedule is None:
            raise RuntimeError(f"{self!r}: start it first, with `async with envs:` or `await envs`")
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            self._check_loop()
        return schedule

    @property
    def _started(self) -> WorkerPool:
        """The workers, if this is or was started: what is known of them outlives the close."""
        if self._session is None or self._schedule is None:
            raise RuntimeError(
                f"{self!r}: start it first, with `async with envs:` or `await envs`; spaces come from the workers"
            )
        return self._session.worker_pool

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
    def spec(self) -> EnvSpec | None:
        """The `EnvSpec` of the first env, if it has one that pickles.

        Arrays, strings and bytes of 64 KiB or more among its arguments are the very ones that the vector env was made
        with: equal ones are looked for in the first factory, in what it refers to, and in Gymnasium's registry. An
        `OmittedValue` stands for a value that is not found, since a factory made it, or the env changed it; its repr
        tells what was left out.
        """
        spec: EnvSpec | None = self._started.spec
        return spec

    @property
    def render_mode(self) -> str | None:
        """The render mode of the first env; "rgb_array" if it has none, and `render=` or `pixels=` draw."""
        mode = self._started.render_mode
        pixels = self._pixels_config if not self._config.vectorized else None
        draws = self._render_config is not None or pixels is not None
        return "rgb_array" if mode is None and draws else mode

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes: pid, state ("ready", "busy", "dead", …), slots, CPUs and memory."""
        members = self._session.worker_pool.members if self._session is not None else []
        return tuple(WorkerInfo(m.worker.pid, m.worker.state.value, m.worker.slots, m.worker.cpus) for m in members)
