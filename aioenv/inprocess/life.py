"""The life of a vector env in this process: how it comes to be, what is known of it, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode

from aioenv.core.episode_tracker import InProcessEpisodeTracker
from aioenv.core.images.image_requests import ImageRequest, StepImages
from aioenv.core.images.pixel_renderer import ResultPixelRenderer
from aioenv.core.session import NO_PHYSICS, late_pool
from aioenv.core.slots import SlotTable
from aioenv.core.worker_pool import WorkerPoolConfig
from aioenv.errors import ClosedError, EnvError, RenderError, StartTimeout, StepTimeout, WorkerStartError
from aioenv.inprocess.durations import SHORT_S, RunTimes
from aioenv.inprocess.env_thread import EnvThread
from aioenv.inprocess.last_results import LastResults
from aioenv.inprocess.requests import InProcessRequests
from aioenv.ipc.messages import reason_of, traceback_of
from aioenv.process.async_resource import together
from aioenv.rendering.pixel_states import PixelStates
from aioenv.rendering.pixels import PixelsRefused, in_place
from aioenv.spaces.large_boxes import batch
from aioenv.spaces.layout import Layout
from aioenv.state.render_source import PhysicsReader, find_physics
from aioenv.worker.making import make_vector_env
from aioenv.worker.vector_access import CheckedNumerics, has_one_generator, steps_some

if TYPE_CHECKING:
    from aioenv.rendering.config import RenderConfig
    from aioenv.rendering.step_pool import StepRenderPool

__all__ = ["SoloLife", "ends_program"]

_log = logging.getLogger("aioenv")

_PLAIN = (Box, Discrete, MultiBinary, MultiDiscrete)  # spaces of one array
# How long a thread with nothing to do may take to end, in seconds.
_END_S = 1.0


def ends_program(exc: BaseException) -> bool:
    """Whether what an env raises on the loop is not its own: Ctrl-C, say.

    A CancelledError is: the loop cancels nothing in the middle of a call, and a task would end of it without a word.
    """
    return not isinstance(exc, (Exception, asyncio.CancelledError))


class SoloLife:
    """What `Solo` is before it is stepped, and after.

    Args:
        factory: called with `num_envs`.
        run_in: "inline", "thread", or "auto" to choose while it runs.
        copy: whether results must be the caller's own.
        timeout_s: how long any wait may last, in seconds; None for ever.
        config: how long the factory may take, and how what draws is started.
        render: what to draw of every result; None: nothing.
        pixels: how to draw the states that `factory` gives as observations (see `PixelStates`); None: it gives none.

    Attributes:
        images: what draws; None if nobody wants images.
        draws: whether anything is drawn of a result, so that it is more than what the env gives.
        table: the states of the slots.
        steps, resets: how long they take, and so where they are made.
        actions, observations: the layouts of the single spaces.
        episodes: counts episodes; None: nobody does.
        steps_some: whether the env can step some of its slots. any_thread: whether any thread may step it.
        kind: what it is, in messages.
        splits: whether it does not matter which of them step together. last: what it has said last.
    """

    history = None  # nothing here goes on elsewhere
    members: Sequence[Any] = ()  # there are no worker processes
    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
    actions: Layout
    observations: Layout
    steps_some: bool
    any_thread: bool
    kind: str
    splits: bool
    last: LastResults
    metadata: dict[str, Any]
    spec: Any
    render_mode: str | None

    def __init__(
        self,
        factory: Callable[..., Any],
        num_envs: int,
        *,
        run_in: str,
        copy: bool,
        timeout_s: float | None,
        config: WorkerPoolConfig,
        render: RenderConfig | None,
        pixels: RenderConfig | None,
    ) -> None:
        self.num_envs = num_envs
        self._factory = factory
        self._run_in = run_in
        self._copy = copy
        self._timeout_s = timeout_s
        self._config = config
        self._render = render
        self._pixels = pixels
        self.draws = render is not None or pixels is not None
        self._physics: PhysicsReader | None = None
        self._pool: StepRenderPool | None = None
        self._pixels_pool: StepRenderPool | None = None
        self._pid = os.getpid()
        self._env: Any = None
        self._thread: EnvThread | None = None
        self._last = 0.0  # when the last step was made, by `perf_counter`
        self._last_turn = 0.0  # when the loop could last do something else, likewise
        self._all = np.arange(num_envs)
        self.table = SlotTable(num_envs, must_reset=False)
        self.images: StepImages | None = None
        self._flights = InProcessRequests(self.table, num_envs, self._error)
        self._closing = False
        self.episodes: InProcessEpisodeTracker | None = None
        self.backend: SoloLife | None = None  # itself, once it is started

    @property
    def worker_pool(self) -> Self:
        """What knows the spaces."""
        return self

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Make the env, where it is going to live. If that fails, or is cancelled, nothing is left.

        Raises:
            WorkerStartError: if the factory raised, took too long, or made something else.
            RenderError: if images were asked for and can't be drawn.
            ValueError: if pixels were asked for that the env does not have.
        """
        try:
            await self._start_env()
        except WorkerStartError as exc:
            if isinstance(exc.__cause__, PixelsRefused):
                raise ValueError(str(exc.__cause__)) from None
            raise
        try:
            if self._pixels is not None:
                await self._start_painter(self._pixels)
            if self._render is not None:
                await self._start_images(self._render)
        except GeneratorExit:  # its loop was closed
            self.abandon()
            raise
        except BaseException:
            await self.close(_END_S)
            raise
        self.backend = self

    @property
    def pools(self) -> list[StepRenderPool]:
        """What draws states, for `render` and for observations."""
        return [pool for pool in (self._pool, self._pixels_pool) if pool is not None]

    @property
    def render_workers(self) -> Sequence[Any]:
        """Those that draw states, for `render` and for observations."""
        return [worker for pool in self.pools for worker in pool.workers]

    async def _start_env(self) -> None:
        start_timeout_s = self._config.start_timeout_s
        limit = asyncio.timeout(start_timeout_s)
        try:
            if self._run_in == "inline":
                self._make()
            else:
                self._thread = EnvThread()
                async with limit:
                    await self._thread.ask(self._make)
        except BaseException as exc:
            self._finish()
            if isinstance(exc, TimeoutError) and limit.expired():  # the thread goes on, and ends when the factory does
                assert self._thread is not None
                self._thread.leave()
                message = f"the vector env was not made within {start_timeout_s=}"
                raise self._not_made(message, kind=StartTimeout) from exc
            if isinstance(exc, Exception) or (self._thread is None and not ends_program(exc)):
                if self._thread is not None:
                    await self._thread.gone(_END_S)
                text = traceback_of(exc)
                message = f"the vector env could not be made: {reason_of(exc)}\n{text}"
                raise self._not_made(message, text) from exc
            if self._thread is not None:
                self._thread.leave()
            raise
        env = self._env
        self.single_observation_space, self.observation_space = env.single_observation_space, env.observation_space
        self.single_action_space, self.action_space = env.single_action_space, env.action_space
        self.metadata, self.spec, self.render_mode = dict(env.metadata), env.spec, env.render_mode
        self.table.must_reset = self.metadata.get("autoreset_mode") is AutoresetMode.DISABLED
        self.steps_some = steps_some(env)
        self.splits = self.steps_some and not has_one_generator(env)
        self.last = LastResults(self.num_envs, keeps_obs=not self.steps_some)
        # what draws is tied to its thread, and only a thread can be waited for with a timeout
        chooses = self._run_in == "auto" and self.render_mode is None and self._timeout_s is None
        self.any_thread = chooses and not self.draws and getattr(env, "any_thread", False) is True
        inner = env
        while isinstance(inner, (CheckedNumerics, PixelStates)):
            inner = inner.env
        self.kind = type(inner).__name__
        if self._config.episodes is not None:
            mode = self.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
            self.episodes = self._flights.episodes = InProcessEpisodeTracker(self._config.episodes, mode, self.num_envs)
        self.actions = Layout(self.single_action_space, bounded=True)
        self.observations = self._received = Layout(self.single_observation_space)
        checked = isinstance(self.single_observation_space, _PLAIN) or self._pixels is not None
        self._obs_space = self.observation_space if checked else None
        self._one_each = (self.num_envs,)
        plain = isinstance(self.single_action_space, _PLAIN)
        self._dtype = self.actions.leaves[0].dtype if plain else None
        self._shape = (self.num_envs, *self.actions.leaves[0].shape) if plain else None
        inline = None if chooses else self._run_in == "inline"
        self.steps, self.resets = RunTimes(SHORT_S, inline), RunTimes(SHORT_S, inline)

    async def _start_images(self, render: RenderConfig) -> None:
        """Have what draws started: from the states of the batch itself."""
        if self._physics is None:
            raise RenderError(NO_PHYSICS)
        self._pool = late_pool([self._physics.source] * self.num_envs, render, self._config, self._timeout_s)
        await self._pool.start()
        self.images = self._flights.images = StepImages(self.num_envs, self._pool, render.max_in_flight)

    async def _start_painter(self, pixels: RenderConfig) -> None:
        """Have what draws observations started, and tell the user's spaces from then on."""
        assert self._physics is not None
        self._pixels_pool = late_pool([self._physics.source] * self.num_envs, pixels, self._config, self._timeout_s)
        await self._pixels_pool.start()
        key, space = in_place(self.single_observation_space, pixels)
        self.single_observation_space, self.observation_space = space, batch(space, self.num_envs)
        self.observations = Layout(space)
        self._flights.painter = ResultPixelRenderer(self._pixels_pool, key, self._not_drawn)

    def _read_states(self, shot: ImageRequest) -> None:
        """Put the states that the env is in now into a shot; where the env is."""
        assert self._physics is not None
        some = None if len(shot.slots) == self.num_envs else shot.slots.tolist()
        shot.states = np.empty((len(shot.slots), self._physics.source.state_size))
        self._physics.read(some, shot.states)

    def _make(self) -> None:
        self._env = make_vector_env(self._factory, self.num_envs)
        if self._config.check_numerics:
            self._env = CheckedNumerics(self._env)
        if self.draws:
            self._physics = find_physics(self._env)

    def _not_made(
        self, message: str, text: str = "", *, kind: type[WorkerStartError] = WorkerStartError
    ) -> WorkerStartError:
        return kind(message, slots=tuple(self._all.tolist()), pid=self._pid, traceback=text)

    async def close(self, grace_s: float) -> None:
        """Close the env, and end its thread; whoever waits for a result gets a ClosedError.

        Args:
            grace_s: how long the env may take for what it is doing and for its close, in seconds. What takes longer
                can't be ended: the thread is left to itself, and closes the env when it comes to that.
        """
        try:
            self._flights.close()
            if self.images is not None:
                self.images.fail_all(ClosedError("the vector env was closed"))
        finally:  # whatever went wrong before: neither a process nor a thread may be left
            await self._end(grace_s)

    async def _end(self, grace_s: float) -> None:
        try:
            self._finish()
        finally:
            await together(*(pool.close() for pool in self.pools))
        if self._thread is not None and not await self._thread.gone(grace_s):
            _log.warning(
                "the vector env has not ended within grace_s=%s: a thread can't be killed, so it is left to itself "
                "(it is a daemon, and does not keep the program from ending); with num_workers=1 the env lives in a "
                "process, which can be killed",
                grace_s,
            )

    def abandon(self) -> None:
        """Have the env closed without waiting for it."""
        self._finish()
        for pool in self.pools:
            pool.abandon()
        if self._thread is not None:
            self._thread.leave()

    def _finish(self) -> None:
        """Close the env after whatever it is doing, once."""
        if self._closing:
            return
        self._closing = True
        if self._thread is None:
            self._close_env()
        else:
            self._thread.finish(self._close_env)

    def _close_env(self) -> None:
        env, self._env = self._env, None
        try:
            if env is not None:
                env.close()
        except BaseException as exc:
            if self._thread is None and ends_program(exc):
                raise
            _log.warning("the vector env raised when it was closed", exc_info=True)

    # ------------------------------------------------------------ errors, waits

    def _not_drawn(self, exc: Exception) -> EnvError:
        return self._error(exc, f"it could not be drawn: {exc}")

    def _error(self, exc: BaseException, what: str | None = None) -> EnvError:
        text = traceback_of(exc)
        where = f"slots 0 to {self.num_envs - 1}" if self.num_envs > 1 else "slot 0"
        what = what or f"{reason_of(exc)}\n{text}"
        error = EnvError(
            f"{where} (the vector env in this process, pid {self._pid}): {what}",
            slots=tuple(self._all.tolist()),
            pid=self._pid,
            traceback=text,
        )
        error.__cause__ = exc
        return error

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("the vector env was closed while this was in flight")

    async def _patiently(self, wait: Any, timeout_s: float | None, meaning: str) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if timeout_s is None:
            return await wait
        try:
            async with asyncio.timeout(timeout_s):
                return await wait
        except TimeoutError:
            slots = tuple(self._all.tolist())
            late = self._flights.painter is not None and self._flights.painter.drawing
            who = "render workers, though the vector env has replied," if late else "the vector env"
            message = f"no result from {who} within timeout_s={timeout_s}; {meaning}"
            raise StepTimeout(message, slots=slots, running=slots) from None
