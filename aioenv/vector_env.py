"""`AsyncVectorEnv`: many Gymnasium envs in worker processes, stepped with `await`.

The class documents and checks. It delegates to objects that it makes when it is started: the scheduler sends requests
and hands out results; the others are built on it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from aioenv.core.arguments import (
    check_cpu_affinity,
    check_factories,
    check_num_workers,
    check_observation_mode,
    check_on_timeout,
    check_preload,
    check_recv,
    check_render,
    check_seconds,
    check_seed_plan,
    check_timeout,
    check_transport,
    check_worker_env,
    listed_factories,
)
from aioenv.core.env_calls import EnvCalls
from aioenv.core.env_images import EnvImages
from aioenv.core.episode_tracker import check_episode_stats
from aioenv.core.imports import needed_by
from aioenv.core.programs import make_program
from aioenv.core.requests import KEPT, TURNS
from aioenv.core.results import Ready, ResetResult, SlotStep, StepResult, WorkerInfo
from aioenv.core.scheduler import RequestScheduler
from aioenv.core.session import CLOSE_GRACE_S, Session
from aioenv.core.waits import Clock, Stats
from aioenv.core.worker_pool import WorkerPool, WorkerPoolConfig
from aioenv.creator import place_creators
from aioenv.envs import ActorID
from aioenv.process.async_resource import AsyncResource
from aioenv.process.channel import check_channel
from aioenv.process.launch import check_start
from aioenv.rendering.pixels import with_pixels
from aioenv.rendering.step_images import ImageStream
from aioenv.rollout.episode_stepper import EpisodeStepper, GroupEpisodeStepper
from aioenv.rollout.numbered_episodes import Episode, NumberedEpisodes
from aioenv.rollout.recorder import Rollout
from aioenv.rollout.rollout import Policy, Rollouts
from aioenv.rollout.subset import ActiveSlots, Pausing, SingleSlot, check_steps_some
from aioenv.rollout.worker_backend import RememberedState, WorkerRolloutBackend
from aioenv.spaces.autoreset import parse_mode
from aioenv.spaces.seeding import check_options, split_reset_options
from aioenv.state.env_state import EnvState
from aioenv.stats.episodes import EpisodeStats
from aioenv.stats.sharing import collected
from aioenv.tracing.timeline import Trace, Traced, wanted
from aioenv.worker.boot import IGNORABLE

if TYPE_CHECKING:
    from aioenv.process.restart import RestartPolicy
    from aioenv.process.supervisor import Worker
    from aioenv.rendering.config import RenderConfig

__all__ = ["AsyncVectorEnv", "SubsetBackend", "WorkerInfo"]


class SubsetBackend(NamedTuple):
    """What steps a subset of the slots, which workers and a vector env in this process do in ways of their own.

    Attributes:
        single_slot: steps and resets one slot.
        make_active: makes what steps the slots that are not paused.
        make_rollout: makes what a rollout is sent over, given what steps the slots that are not paused, if there is.
        make_stepper: makes what numbered episodes are stepped by.
    """

    single_slot: Any
    make_active: Callable[[], Any]
    make_rollout: Callable[[ActiveSlots | None], Any]
    make_stepper: Callable[[], EpisodeStepper]


class AsyncVectorEnv(Traced, AsyncResource):
    """Many envs, stepped at once in worker processes; every call that waits is awaited.

    Nothing is started by the constructor. Use it as an async context manager, or await it and close it::

        async with AsyncVectorEnv([make_env] * 64) as envs:
            obs, info = await envs.reset(seed=0)
            obs, reward, terminated, truncated, info = await envs.step(actions)

        envs = await AsyncVectorEnv([make_env] * 8)
        ...
        await envs.close()

    It belongs to the event loop that it was started on. No env is built in this process: spaces come from the
    workers. Factories travel by value, so lambdas, closures and classes of `__main__` or of a notebook work, and no
    `if __name__ == "__main__"` guard is needed.

    Args:
        env_fns: a factory for each slot. Slots are numbered by their place in it. An `EnvCreator` is taken as that of
            its slot.
        num_workers: how many processes; slots are spread over them evenly. Default: as many as this process may
            use CPUs, at most one a slot.
        start: how processes are started: "forkserver" (forked from a process that has imported the modules that they
            need), "spawn" (a new interpreter each), or None for "forkserver" where the platform has it.
        channel: how frames travel: "scatter" (a socket, read straight into the batch), "streams" (pipes under
            asyncio's streams, the portable reference), or "auto" for the fastest that the platform has.
        transport: where arrays travel: "frames" (through the channel), "shared" (anonymous memory that all workers
            map; a frame says where), or "auto": large ones, and what render workers draw, in shared memory.
        preload: names of modules that a worker imports before it unpickles a factory; a fork server imports them
            once for all.
        copy: whether results are arrays of your own (their memory is used again once you have let go of them and of
            every view); with False they are views into two batches used in turn, valid until the second next step: in
            asyncio's debug mode a `StaleViewWarning` says if they are still in use then.
        observation_mode: "same" (all observation spaces are equal), "different" (bounds may differ), or a tuple
            `(batched space, single space)`, as in Gymnasium.
        autoreset_mode: an `AutoresetMode` of Gymnasium, or its value.
        timeout_s: how long `reset`, `step`, `recv`, `render` and calls of envs may wait for replies, in seconds; None
            for ever.
        on_timeout: what happens then in `reset`, `step` and `recv`: "raise" a StepTimeout; "kill" the workers that
            owe a reply, for good; or "restart" them. Where workers are killed the call goes on: it returns what their
            slots report then, or raises WorkerDied. A render worker that finishes no image for `timeout_s` holds
            nothing that could be lost: with `restart` it is replaced, and draws again what it had not, even with
            "raise".
        restart: start workers again that died; None: their slots are lost.
        start_timeout_s: how long a worker may take to come up, in seconds.
        log_prefix: goes before each line that envs print. What they print becomes log records of the logger
            "aioenv.workers", at level INFO; warnings, each once, at level WARNING.
        worker_env: environment variables for the workers, over those of this process and over the limit of one
            thread for each numeric library. A list has one mapping (or None) for each of `num_workers` workers.
        render: draw images of every returned state while the next steps run; None draws nothing by itself.
        pixels: make images the observations, or one key of them (see `RenderConfig`); None leaves them as they are.
        ignore_signals: let workers ignore SIGTERM, SIGUSR1 and SIGUSR2, so that a cluster that tells all processes of
            a job of its end ends no env before you have saved your work. (SIGINT they always ignore, and SIGKILL
            nobody can: `close` comes to that a second later.)
        debug: run the envs in this process instead, on a thread for each worker (by default one for all), so that
            `breakpoint()` in an env stops at this terminal, and a debugger sees them. All else is as always; `start`,
            `channel`, `worker_env` and `cpu_affinity` say nothing. What an env does to its process it does to this one.
        cpu_affinity: which CPUs the workers may use: "spread" pins each to one of those that this process may use, in
            turn; a sequence of CPU numbers, or of sets of them, gives worker i element `i % len`; None leaves it to
            the system, and to what this process may use.
        episode_stats: count returns, lengths and times of episodes, in `envs.episode_stats` and, where an episode ends,
            as "episode" in the infos, as Gymnasium's RecordEpisodeStatistics does; or an `EpisodeStats` that is told
            of more.
        stats_prefix: what these statistics are called, "train" say, in the log "aioenv.stats" and by writers; with None
            they are not logged.
        seed_plan: seeds for episodes that are given none, autoresets above all; at least `num_envs`. Slot i's episode k
            gets number `i + k * num_envs` of them, and from the start again at the end: the same for any number of
            workers. A reset of all slots begins anew; a seed of a reset stands in place of its slot's first.
        check_numerics: make it an error if an env gives a reward or an observation that is NaN or infinite, be it
            within the bounds of its space: an `EnvError` of its slot, which must be reset then, with a `NumericsError`
            as its `__cause__` that says in which step since the slot's reset, and where. (Steps count from the start of
            a worker that was started again.) It takes about 1 µs a step and env, if observations are small.

    Attributes:
        num_envs: how many slots there are.
        closed: whether `close` has been called.

    Raises:
        ValueError: if `env_fns` is empty, or an argument is none of the values it may have.
        TypeError: if an element of `env_fns` is not callable, or can't be pickled.
    """

    _noun = "vector env"
    _session: Session | None = None
    _episode_stats: EpisodeStats | None = None
    _scheduler: RequestScheduler | None = None  # of the session; not None once it is started
    _sends_whole = False  # whether `send` must check that it is given all slots of a worker
    # made when it is started
    _calls: EnvCalls
    _images: EnvImages
    _pausing: Pausing
    _single_slot: Any
    _rollouts: Rollouts
    _episodes: NumberedEpisodes

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Env[Any, Any]]],
        *,
        num_workers: int | None = None,
        start: Literal["forkserver", "spawn"] | None = None,
        channel: Literal["auto", "scatter", "streams"] = "auto",
        transport: Literal["auto", "frames", "shared"] = "auto",
        preload: Iterable[str] = (),
        copy: bool = True,
        observation_mode: Literal["same", "different"] | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: AutoresetMode | Literal["NextStep", "SameStep", "Disabled"] = AutoresetMode.NEXT_STEP,
        timeout_s: float | None = None,
        on_timeout: Literal["raise", "kill", "restart"] = "raise",
        restart: RestartPolicy | None = None,
        start_timeout_s: float = 60.0,
        log_prefix: str | None = None,
        worker_env: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
        render: RenderConfig | None = None,
        pixels: RenderConfig | None = None,
        cpu_affinity: Literal["spread"] | Sequence[int | Iterable[int]] | None = None,
        ignore_signals: bool = False,
        debug: bool = False,
        episode_stats: bool | EpisodeStats = False,
        stats_prefix: str | None = None,
        seed_plan: Sequence[int] | None = None,
        check_numerics: bool = False,
    ) -> None:
        env_fns = place_creators(listed_factories(env_fns))
        check_factories(env_fns)
        needed = needed_by(env_fns)
        check_render(render, pixels)
        if pixels is not None:
            if pixels.workers is not None and observation_mode != "same":
                raise ValueError('pixels: render workers (workers=) take observation_mode="same"')
            env_fns = with_pixels(env_fns, pixels)
        self.num_envs = len(env_fns)
        self.closed = False
        self.copy = copy
        self.autoreset_mode = parse_mode(autoreset_mode)
        check_observation_mode(observation_mode)
        self._render_config, self._pixels_config = render, pixels
        self._must_reset = self.autoreset_mode is AutoresetMode.DISABLED  # Gymnasium's AsyncVectorEnv does not ask
        self._timeout_s = check_timeout(timeout_s)
        self._on_timeout = check_on_timeout(on_timeout, restart)
        workers = check_num_workers(1 if debug and num_workers is None else num_workers, self.num_envs)
        self._clock = Clock()
        with collected() as stats:
            code = make_program(env_fns, workers, live=debug)
        self._config = WorkerPoolConfig(
            code=code,
            num_workers=workers,
            start=check_start(start),
            channel=check_channel(channel),
            transport=check_transport(transport),
            num_lanes=1 + (KEPT if copy else TURNS),
            preload=check_preload(preload),
            needed=needed,
            observation_mode=observation_mode,
            autoreset_mode=self.autoreset_mode,
            start_timeout_s=check_seconds("start_timeout_s", start_timeout_s),
            log_prefix=log_prefix,
            worker_env=check_worker_env(None if debug else worker_env, workers),
            find_sources=render is not None or (pixels is not None and pixels.workers is not None),
            by_camera=all(config.by_camera for config in (render, pixels) if config is not None),
            looks="each reset" if render is None else render.edits,
            restart=restart,
            cpu_affinity=check_cpu_affinity(None if debug else cpu_affinity),
            ignored=IGNORABLE if ignore_signals else (),
            debug=debug,
            stats=stats,
            check_numerics=bool(check_numerics),
            seeds=check_seed_plan(seed_plan, self.num_envs, restart),
            # at the end: they are bound to this vector env, which another wrong argument would keep from being made
            episodes=check_episode_stats(episode_stats, stats_prefix, self.num_envs, self.autoreset_mode),
        )
        self._episode_stats = self._config.episodes

    # ------------------------------------------------------------ start and close

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
        if self._scheduler is None:
            assert self._session is not None
            assert self._session.schedule is not None
            self._take_over(self._session, self._session.schedule)
            self._scheduler = self._session.schedule
        return self

    def _take_over(self, session: Session, scheduler: RequestScheduler) -> None:
        """Make the objects that the methods delegate to.

        None of them refers to the vector env, so that one that is forgotten is collected at once.
        """
        clock, mode = self._clock, self.autoreset_mode
        backend = self._subset_backend(scheduler)
        self._sends_whole = bool(session.fleet.members) and not session.fleet.steps_some
        self._calls = EnvCalls(scheduler, clock, mode)
        render_mode = self._render_mode_of(session.fleet)
        self._images = EnvImages(
            scheduler, session.images, clock, render_mode=render_mode, one_env=self._config.vectorized
        )
        self._single_slot = backend.single_slot
        self._pausing = pausing = Pausing(scheduler, backend.make_active)
        self._rollouts = Rollouts(scheduler, lambda: backend.make_rollout(pausing.current), clock, mode)
        self._episodes = NumberedEpisodes(scheduler, backend.make_stepper, pausing, clock)

    def _subset_backend(self, scheduler: RequestScheduler) -> SubsetBackend:
        remembered = RememberedState()
        return SubsetBackend(
            SingleSlot(scheduler),
            partial(ActiveSlots, scheduler),
            lambda active: WorkerRolloutBackend(scheduler, active, remembered),
            partial(GroupEpisodeStepper, scheduler),
        )

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
            assert session.schedule is not None
            self._trace_all(session.schedule, path)

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
        state = "closed" if self.closed else "running" if self._scheduler is not None else "not started"
        workers = f" num_workers={self._config.num_workers}" if self._config.num_workers else ""
        return f"<{type(self).__name__} num_envs={self.num_envs}{workers} {state}>"

    if not TYPE_CHECKING:  # for callers who forget the "async"; type checkers find it by themselves

        def __enter__(self) -> None:
            raise TypeError(f"{self!r}: use `async with`; for code without await there is aioenv.sync.make_vec")

        def __exit__(self, *exc_info: object) -> None: ...

    def _check_running(self) -> RequestScheduler:
        """Return the scheduler; raise if this is not started, is closed, or is used on another loop.

        Raises:
            RuntimeError: if it is not started.
            ClosedError: if it is closed.
            LoopError: if it was started on another loop, or none runs here.
        """
        scheduler = self._scheduler
        if scheduler is None or self.closed:
            self._check_open()
        if scheduler is None:
            raise RuntimeError(f"{self!r}: start it first, with `async with envs:` or `await envs`")
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            self._check_loop()
        return scheduler

    @property
    def _started(self) -> WorkerPool:
        """The workers of a vector env that is or was started; they stay after the close."""
        if self._session is None or self._scheduler is None:
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
        return self._render_mode_of(self._started)

    def _render_mode_of(self, fleet: WorkerPool) -> str | None:
        pixels = self._pixels_config if not self._config.vectorized else None
        draws = self._render_config is not None or pixels is not None
        return "rgb_array" if fleet.render_mode is None and draws else fleet.render_mode

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes: pid, state ("ready", "busy", "dead", …), slots, CPUs and memory."""
        members = self._session.fleet.members if self._session is not None else []
        return tuple(WorkerInfo(m.worker.pid, m.worker.state.value, m.worker.slots, m.worker.cpus) for m in members)

    # ------------------------------------------------------------ whole batches

    async def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> ResetResult:
        """Begin an episode in every slot, or in those that `options["reset_mask"]` names.

        If this is cancelled, or times out, the envs do reset all the same; `recv` takes the result.

        Args:
            seed: an int seeds slot i with `seed + i`; a list gives each slot its own (None: no seed).
            options: passed to each env's `reset`, but for "reset_mask", a bool array of shape `(num_envs,)`:
                slots where it is False go on as they are and keep their last observation.
            timeout_s: instead of the constructor's, in seconds.

        Raises:
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            EnvError: if an env raised; `error.partial` has what the others returned.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed.
        """
        scheduler = self._check_running()
        mask, rest = split_reset_options(options, self.num_envs)
        wait = self._clock.envs.begin()
        try:
            if scheduler.table.paused is not None:
                return await self._pausing.active().reset(seed, mask, rest, check_timeout(timeout_s))
            return await scheduler.reset(seed, mask, rest, check_timeout(timeout_s))
        finally:
            wait.end()

    async def step(self, actions: Any, *, timeout_s: float | None = None) -> StepResult:
        """Step every slot.

        If this is cancelled before anything was sent, nothing happened. After that the envs do step, and the result
        waits: `recv` takes it; a later `step` or `reset` first waits for it and then drops it, with a warning if
        an episode ended in it.

        Args:
            actions: a batch of `action_space`: for most spaces an array of shape `(num_envs, *shape)`. It is
                cast to the space's dtype.
            timeout_s: instead of the constructor's, in seconds.

        Returns:
            `(obs, reward, terminated, truncated, info)`: observations as a batch of `observation_space`, reward
            float64 and flags bool of shape `(num_envs,)`, infos as arrays by key.

        Raises:
            ActionError: if the actions don't fit the action space. Nothing was sent.
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            ResetNeededError: if a slot's episode is over and autoreset is disabled. Nothing was sent.
            EnvError: if an env raised; `error.partial` has what the others returned. The slot must be reset.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed.
        """
        scheduler, wait = self._check_running(), self._clock.envs.begin()
        try:
            if scheduler.table.paused is not None:
                return await self._pausing.active().step(actions, check_timeout(timeout_s))
            return await scheduler.step(actions, timeout_s=check_timeout(timeout_s))
        finally:
            wait.end()

    # ------------------------------------------------------------ some slots, in the order in which they finish

    def send(self, actions: Any, slots: Iterable[int] | None = None) -> None:
        """Send actions to some slots; never blocks, and returns nothing: `recv` or `ready` give the results.

        Args:
            actions: a batch of actions, one for each of `slots` in that order.
            slots: slot numbers, None for all.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied: as for `step`. Nothing was sent.
        """
        scheduler = self._check_running()
        if isinstance(slots, Iterable) and not isinstance(slots, np.ndarray):
            slots = list(slots)
        if slots is not None and self._sends_whole:
            check_steps_some(scheduler, "send", slots)
        with self._clock.envs:  # a vector env in this process may step here and now
            scheduler.send(actions, slots)

    def send_reset(
        self,
        slots: Iterable[int] | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin episodes in some slots; never blocks: `recv` or `ready` give the first observations.

        Args:
            slots: slot numbers, None for all.
            seed: an int seeds slot i with `seed + i`; a list gives each of `slots` its own.
            options: passed to each env's `reset`.

        Raises:
            ValueError: if a list of seeds has another length than there are slots, or `options` has a "reset_mask".
            PendingCallError: if one of the slots has a request in flight. Nothing was sent.
        """
        scheduler = self._check_running()
        check_options(options)
        if options is not None and "reset_mask" in options:
            raise ValueError('send_reset: name the slots instead of options["reset_mask"]')
        with self._clock.envs:
            scheduler.send_reset(slots, seed, options)

    async def recv(self, min_slots: int = 1, max_slots: int | None = None, *, deadline_s: float | None = None) -> Ready:
        """Take the results of `min_slots` slots or more, as soon as so many are in.

        If this is cancelled, nothing is taken and nothing is lost.

        Args:
            min_slots: how many to wait for; at most what is in flight.
            max_slots: how many to take at most; None for all that are in.
            deadline_s: after this many seconds, take what is in, be it nothing.

        Raises:
            ValueError: if `min_slots` or `max_slots` is less than 1, or an argument is no such number.
            NoAsyncCallError: if nothing is in flight and nothing is ready.
            EnvError: if an env raised; `error.partial` has the other slots' results.
            WorkerDied: likewise, if a worker ended.
            StepTimeout: if `timeout_s` passed.
        """
        check_recv(min_slots, max_slots, deadline_s)
        scheduler = self._check_running()
        wait = self._clock.envs.begin()
        try:
            return await scheduler.recv(min_slots, max_slots, deadline_s)
        finally:
            wait.end()

    async def ready(
        self, min_slots: int = 1, max_slots: int | None = None, *, deadline_s: float | None = None
    ) -> AsyncIterator[Ready]:
        """Iterate over results as they come, until nothing is in flight any more.

        If this is cancelled, or left, what was not taken yet waits for `recv`.

        Args, Raises: as `recv`; `deadline_s` is counted anew for each result.

        Yields:
            What `recv` gives.
        """
        while self.outstanding:
            yield await self.recv(min_slots, max_slots, deadline_s=deadline_s)

    @property
    def outstanding(self) -> bool:
        """Whether anything is in flight, or has come and was not taken: whether `recv` would give something."""
        return self._check_running().outstanding

    # ------------------------------------------------------------ one slot, and paused ones

    async def step_at(self, slot: int, action: Any) -> SlotStep:
        """Step one slot; others may be in flight meanwhile (`send`).

        If this is cancelled after it was sent, `recv` takes the result, or a later `step` or `reset` drops it.

        Args:
            slot: its number.
            action: an action of `single_action_space`.

        Returns:
            `(obs, reward, terminated, truncated, info)`, as the env gave them: no batch.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied, StepTimeout: as for `step`.
            PausedError: if the slot is paused.
        """
        check_steps_some(self._check_running(), "step_at", [slot])
        with self._clock.envs:
            step: SlotStep = await self._single_slot.step_at(slot, action)
        return step

    async def reset_at(
        self, slot: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult:
        """Begin an episode in one slot; otherwise as `step_at`.

        Args:
            slot: its number.
            seed: for it alone: exactly this one.
            options: passed to the env's `reset`.

        Raises:
            TypeError: if the seed is no int.
            PendingCallError, PausedError, EnvError, WorkerDied, StepTimeout: as for `step_at`.
        """
        self._check_running()
        check_options(options)
        if options is not None and "reset_mask" in options:
            raise ValueError('reset_at: it is about one slot; leave out options["reset_mask"]')
        with self._clock.envs:
            result: ResetResult = await self._single_slot.reset_at(slot, seed, options)
        return result

    def pause(self, slots: int | Iterable[int]) -> None:
        """Leave slots out of whole batches, until they are resumed. Never blocks, and tells the workers nothing.

        They keep their process and their state, in the middle of an episode, say. Batches keep their shape: `step` and
        `reset` take and give as many rows as before. The rows of paused slots in actions, seeds and reset masks are
        ignored. In results they repeat the slot's last observation (zeros, if it had none, if its worker is gone, or
        while that is busy: a reply of the slot's own is in flight, say, or a call that was cancelled goes on), with
        reward 0 and flags False, and `info["_active"]`, a bool array that is there while anything is paused, is False.
        `send` and `send_reset` without slots leave them out, too; to name one there, in `step_at` or in `reset_at` is a
        `PausedError`. Calls, attributes, states and images are as before. A worker whose slots are all paused gets no
        frames.

        A reply that is in flight is not lost: `recv` takes it. A slot that has failed, or whose worker is gone, may be
        paused, too: the others go on.

        Args:
            slots: a slot number, or some; `numpy.flatnonzero(…)` of nothing pauses none. One that is paused already
                stays so.

        Raises:
            IndexError, ValueError: if they are no slot numbers. Nothing is paused.
        """
        self._check_running()
        self._pausing.pause(slots)

    def resume(self, slots: int | Iterable[int] | None = None) -> None:
        """Take slots into whole batches again, where they are. One that is not paused stays as it is.

        Args:
            slots: a slot number, or some; None for all. A slot that is `exhausted` tries another reset with its next
                step.

        Raises:
            IndexError, ValueError: if they are no slot numbers.
        """
        self._check_running()
        self._pausing.resume(slots)

    def resume_all(self) -> None:
        """Take all slots into whole batches again."""
        self.resume()

    @property
    def active_slots(self) -> npt.NDArray[np.int64]:
        """The slots that are not paused, int64, ascending."""
        return self._check_running().table.live

    @property
    def exhausted(self) -> tuple[int, ...]:
        """The slots that were paused because their envs have no further episode, ascending.

        An env says so by raising `EpisodesDone` in `reset`. Where it has an attribute `finite_episodes` that is true,
        a StopIteration means the same; `construct_envs` gives it to envs that were dealt episodes. It is no error,
        whoever resets: the slot is paused. In the result `info["_active"]` is False for it, unless its last episode
        ended in that very step (under SAME_STEP).
        """
        return tuple(sorted(self._check_running().table.exhausted))

    # ------------------------------------------------------------ rollouts and episodes

    async def rollout(
        self, policy: Policy, steps: int, groups: int = 2, *, split: Literal["slots", "workers"] = "slots"
    ) -> Rollout:
        """Collect `steps` steps of every slot, with the envs of one group stepping while the policy of another runs.

        The slots of every worker are split into `groups` groups, so that a worker which is done with one group finds
        the next one's actions waiting; with 1 it is lock-step. Such groups are for a policy that waits for another
        device. Where it computes on the CPUs that the envs need, `split="workers"` costs less: then a group is one or
        more whole workers, which rest while the policy of their own group runs. Trajectories do not depend on `groups`
        and `split`, as long as the policy treats row by row. It begins with the envs as they are: `reset` first; a
        second rollout goes on where the first one stopped. Under `AutoresetMode.DISABLED` it resets, without a seed,
        each slot whose episode is over before its next step; the episode's last observation is in
        `infos[t]["final_obs"]`, as under SAME_STEP.

        If this is cancelled, or the policy raises, or a timeout passes, what is in flight is left as by a cancelled
        `step`: the envs do step, `recv` takes the results, and a later `step`, `reset` or `rollout` first waits for
        them and drops them, with a warning if an episode ended in one.

        Args:
            policy: `policy(obs)` gives a batch of actions for a batch of observations, those of a group's k slots;
                or `(actions, extras)`, a dict of arrays of shape `(k, …)` to be kept, values and log-probabilities
                say, with the same keys each time. (Not where an action is itself a pair whose second element is a
                Dict: there it is all actions.) If it has a parameter `slots`, it gets the slot numbers too, int64 of
                shape `(k,)`, ascending, the same each time it is a group's turn: a recurrent policy keeps its state by
                them. They are its own. It may be a coroutine function. A plain function holds up the loop, while
                workers go on.
            steps: how many, of each slot.
            groups: how many; at most as many as the worker with the fewest slots has, or, with `split="workers"`, as
                there are workers; more are so many. Of vector envs see `NativeVectorEnv`.
            split: whether a group is some slots of every worker, "slots", or all of some workers, "workers". Of vector
                envs it says nothing.

        Returns:
            Arrays `(steps, num_envs, …)`; `valid` says which rows to learn from (see `Rollout`). Slots that are paused
            when it begins are not stepped: their last observation throughout, and `valid` False.

        Raises:
            ResetNeededError: if a slot has no observation yet: never reset, or just put into a state.
            PausedError: if all slots are paused.
            ActionError: if actions don't fit the action space; the message names the group.
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            EnvError: if an env raised; `error.partial` is a `Rollout` of what was collected, all groups' last steps
                included. The slot must be reset; the others are in order.
            WorkerDied: likewise, if a worker ended.
            StepTimeout: if a group's step took longer than `timeout_s`; `error.partial` as above.
        """
        self._check_running()
        return await self._rollouts.run(policy, steps, groups, split)

    def episodes(
        self, policy: Policy, n: int, *, seed: int | Sequence[int | None] | None = None
    ) -> AsyncGenerator[Episode, None]:
        """Run episodes 0 … n-1, each exactly once and to its end, however long each is::

            async for episode in envs.episodes(policy, 100, seed=0):
                print(episode.number, episode.total_reward)

        They come as they end. Episode k begins with a reset with a seed of its own, so that its result, for a
        deterministic policy that treats row by row, depends neither on how many slots and workers there are nor on
        what was lost on the way; and since those that count are chosen before they are run, short ones are not
        over-represented. A slot with nothing left to do is paused, until the end of the iteration. Afterwards, or when
        the iteration is left early, `reset` before you step. Where envs reset by themselves in the last step of an
        episode (`AutoresetMode.SAME_STEP`), they are reset twice.

        With `restart=RestartPolicy()` an episode that a worker has lost is run again, with its seed. If this is
        cancelled, the policy raises, or something goes wrong in an env, what is in flight is left as by a cancelled
        `step`.

        Args:
            policy: `policy(obs)` gives a batch of actions for the observations of all slots, `(num_envs, …)`: rows of
                slots that are not stepped just now are ignored. Of the parameters that it names it gets `slots` (as for
                `rollout`: here always all of them), `episodes`, int64 `(num_envs,)`, which episode each row is of, -1
                for none; and `started`, bool `(num_envs,)`, whose observation is an episode's first one: there a
                recurrent policy clears its state. It may be a coroutine function.
            n: how many.
            seed: an int, or None for fresh entropy, from which a seed is drawn for each episode; or a list of n.

        Raises:
            ValueError, TypeError: if an argument is none of the values that it may have.
            PausedError: if all slots are paused.
            PendingCallError: if a slot has a request in flight, or a result that nobody took; or another iteration
                has begun since: it has the slots; or they were stepped or reset by somebody else meanwhile.
            EpisodesDone: if envs have no further episode before n have been run.
            ActionError, EnvError, WorkerDied, StepTimeout: as for `step`.
        """
        self._check_running()
        return self._episodes.iterate(policy, n, seed, owner=self)

    @property
    def episode_stats(self) -> EpisodeStats:
        """Returns, lengths, times and events of the episodes that have ended: `print(envs.episode_stats.epoch())`.

        Raises:
            RuntimeError: if nobody asked for them.
        """
        if self._episode_stats is None:
            raise RuntimeError(
                "episode_stats: nobody counts episodes here; make the vector env with episode_stats=True"
            )
        return self._episode_stats

    def stats(self, *, reset: bool = False) -> Stats:
        """How long the run waited for envs, for images and for the policy; `print` it.

        Args:
            reset: count anew from here.
        """
        steps = 0 if self._scheduler is None else self._scheduler.table.steps
        stats = self._clock.stats(self.num_envs, steps)
        if reset:
            self._clock.start_anew(steps)
        return stats

    # ------------------------------------------------------------ images

    @property
    def draws_beside(self) -> bool:
        """Whether images are drawn beside the steps (`render=`): `render` may be awaited while a step is in flight."""
        return self._session is not None and self._session.images is not None

    @overload
    async def render(self, mode: Literal["arrays"] | None = None) -> Any: ...

    @overload
    async def render(self, mode: Literal["grid"]) -> npt.NDArray[np.uint8]: ...

    async def render(self, mode: Literal["arrays", "grid"] | None = None) -> Any:
        """Images of the states that `reset` and `step` (or `recv`) returned last.

        With `render=` given to the constructor they are already on their way, drawn from the very state that was
        returned, and a step may be in flight meanwhile. Without, this is `call("render")`: with `pixels=` the images
        that observations hold, several cameras side by side; else None, unless the envs were made with a `render_mode`,
        "rgb_array" say.

        If this is cancelled, the images are drawn all the same.

        Args:
            mode: None or "arrays" for one image a slot (the blocking API tells these two apart); "grid" for one picture
                of all, as square a grid as it gets.

        Returns:
            uint8 of shape `(num_envs, height, width, 3)`, row by row from the top; a tuple where the images of
            the envs differ in shape. With `depth` or `segmentation` a tuple of that and of these arrays: depth float32
            `(num_envs, height, width)` in metres, and segmentation int32 `(num_envs, height, width, 2)`. With a list of
            C cameras an axis of C comes second. The same arrays again if nothing was returned in between. With "grid"
            colours alone, `(rows * height, columns * width, 3)`.

        Raises:
            RenderError: if there is no state yet; if an image could not be drawn (`slots`), with the others as
                `partial`; with "grid" also if the envs' images differ in shape.
            StepTimeout: if `timeout_s` passed. The images are drawn all the same, by another render worker if
                this one hangs and `restart` allows it.
            ValueError: if `mode` is neither.
        """
        self._check_running()
        return await self._images.render(mode)

    def render_stream(self, buffer: int = 8) -> ImageStream:
        """Iterate over the images of all results from now on, in order, while stepping goes on::

            async for step, images in envs.render_stream():
                video.append(images)

        Each result of `reset`, `step` or `recv` that is handed out, and each of a group of `rollout`, gives one item:
        its number, counted from 0 at the first result of this vector env, and what `render()` would have given then
        (nothing, as long as a slot has had no result yet). The arrays may be those that `render()` and other streams
        give: copy what you write to.
        Stepping never waits for the stream. When more than `buffer` items wait, because they are drawn or taken
        slower than steps are made, the oldest is dropped, which shows as a gap in the numbers. There may be several.

        It ends when the vector env is closed, with what is not drawn by then left out; `await stream.aclose()` ends
        it before. A cancelled iteration loses nothing.

        Args:
            buffer: how many items may wait.

        Raises:
            RenderError: if nothing is drawn, since `render=` was not given; while iterating, if an image could
                not be drawn: iterate again to go on with the next step.
            StepTimeout: while iterating, if a result's images are not drawn within `timeout_s` from when they are
                waited for: iterate again to wait on.
            ValueError: if `buffer` is not a positive int.
        """
        self._check_running()
        return self._images.stream(buffer)

    # ------------------------------------------------------------ methods, attributes and states of the envs

    async def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env (or read an attribute), through its wrappers.

        If this is cancelled, the envs run it all the same; the results are dropped.

        Args:
            name: of the method or attribute, wherever in the stack of wrappers it is.
            *args: for the method.
            **kwargs: likewise.

        Returns:
            One result a slot.

        Raises:
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            EnvError: if an env raised; `error.partial` has the others' results.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed. The envs run it all the same; the results are dropped.
        """
        self._check_running()
        return await self._calls.call(name, args, kwargs)

    @overload
    async def call_at(self, slots: int, name: str, /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    async def call_at(self, slots: Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    async def call_at(self, slots: int | Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one slot's env, or of some slots' envs (or read an attribute); otherwise as `call`.

        Args:
            slots: a slot number, or some. (It stands first, so that every keyword is the method's own.)
            name: of the method or attribute, wherever in the stack of wrappers it is.
            *args: for the method.
            **kwargs: likewise.

        Returns:
            For a number its result; else a tuple of one result for each of `slots`, in that order.

        Raises:
            ValueError, IndexError: if they are no slot numbers.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        self._check_running()
        return await self._calls.call_at(slots, name, args, kwargs)

    async def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every env; otherwise as `call`."""
        self._check_running()
        return await self._calls.get_attr(name)

    async def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env.

        If this is cancelled, it is set all the same.

        Args:
            name: of the attribute; it is set on the wrapper that has it, else on the env itself.
            values: a list or tuple with an element for each slot; anything else is the value of all.

        Raises:
            ValueError: if a list has another length than there are slots.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        self._check_running()
        await self._calls.set_attr(name, values)

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """A live field of the models of native MuJoCo slots (see `NativeVectorEnv.model_field`).

        Raises:
            ValueError: always, since envs with a model each have none in common; with `backend="native"` they have.
        """
        raise ValueError(
            f'model_field({name!r}): only with backend="native"; of single envs, `call` a method that changes the model'
        )

    async def get_state(self, slots: Iterable[int] | None = None) -> list[EnvState]:
        """The states of envs: with `set_state` any env of the same sort goes on from there, bit for bit.

        They hold what the next steps, and the next automatic resets, depend on: all of MuJoCo's data, what wrappers
        count, the random generator, and whether a reset is due. An env that is not MuJoCo's, or a wrapper that
        Gymnasium does not have, must have `get_state()` and `set_state(state)`. Changes to a MuJoCo model are not
        among it. If this is cancelled, nothing is lost.

        Args:
            slots: slot numbers, None for all.

        Returns:
            One state for each of `slots`, in that order; `aioenv.save` writes them to a file.

        Raises:
            ResumeError: if a state can't be had; the message names the wrapper or env in the way.
            PendingCallError, EnvError, WorkerDied: as for `call`.
        """
        self._check_running()
        return await self._calls.get_state(slots)

    async def set_state(self, states: Iterable[EnvState], slots: Iterable[int] | None = None) -> None:
        """Bring envs into states that `get_state` gave, of whichever slot, worker, process or `aioenv.load`.

        A slot that has failed, or whose episode was over, can be stepped again. No observation is returned, and
        images show the new state after the next step. If this is cancelled, envs take on the states all the same, but
        a slot that had failed stays so: set them again.

        Args:
            states: one for each of `slots`, in that order.
            slots: slot numbers, None for all.

        Raises:
            ValueError: if there are more or fewer states than slots.
            TypeError: if one is no `EnvState`.
            ResumeError: if one is of another sort of env, whose slot is as it was then; the others' states are set.
            PendingCallError, EnvError, WorkerDied: as for `call`.
        """
        self._check_running()
        await self._calls.set_state(states, slots)

    # ------------------------------------------------------------ envs of several actors

    async def actor_rewards(self) -> npt.NDArray[np.float32] | None:
        """The reward of each actor in the last whole step, one actor a row.

        It outlives an autoreset: until its first whole step, a new episode has those of the one before. If this is
        cancelled, nothing is lost. Calls raise what `call` raises.

        Returns:
            float32 of shape `(n_actors, num_envs)`; None if an env has no such rewards.

        Raises:
            ValueError: if envs have different numbers of actors.
        """
        self._check_running()
        return await self._calls.actor_rewards()

    async def actor_ids(self, *, same_step: bool = True) -> tuple[ActorID, ...]:
        """Whose turn it is in each slot.

        If this is cancelled, nothing is lost. Calls raise what `call` raises.

        Args:
            same_step: whether all envs must be in the same part of their step, so that one policy serves them all.

        Returns:
            `(step_key, agent_id)`, one a slot.

        Raises:
            OutOfStepError: if they are in different ones, and must not be.
            TypeError: if an env has no actors.
        """
        self._check_running()
        return await self._calls.actor_ids(same_step=same_step)

    async def is_actor_done(self) -> npt.NDArray[np.bool_]:
        """Whether the actor whose turn it is has nothing more to do, bool of shape `(num_envs,)`.

        If this is cancelled, nothing is lost. Calls raise what `call` raises.

        Raises:
            TypeError: if an env has no actors.
        """
        self._check_running()
        return await self._calls.is_actor_done()

    # ------------------------------------------------------------ the timeline

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Collect a timeline, from now until the end of a `with` block over it, its `stop()`, or `close`::

            with envs.trace("run.json"):
                ...

        It shows, for each worker and render worker, when it stepped, reset, drew and waited, and what the loop did:
        waiting for envs or images, sending, handling replies, and in between the policy. Spans have the number of the
        step that they are of: step n leads to state n, of which the images n are. Open it at https://ui.perfetto.dev,
        or draw it with `aioenv trace run.json --png out.png`. It is written when it ends, also after an error;
        after a million spans it ends by itself.

        With the variable `AIOENV_TRACE=run.json` every vector env and render pool of the process is traced from its
        start to its close, the second one to run-2.json, and so on.

        Args:
            path: of the JSON file; one that is there is overwritten.

        Raises:
            RuntimeError: if a timeline is being collected already, or the vector env is not started.
            ClosedError: if it is closed.
            OSError: if the file can't be written.
        """
        return self._trace_all(self._check_running(), path)

    def _trace_all(self, scheduler: RequestScheduler, path: str | os.PathLike[str]) -> Trace:
        """Trace whoever takes part: the schedule, its workers, and those that draw."""
        assert self._session is not None
        workers: list[Worker] = [member.worker for member in self._session.fleet.members]
        drawing: list[Worker] = list(getattr(self._session, "render_workers", ()))
        names = [f"worker {w.index}: {_slots(w.slots)}" for w in workers]
        names += [f"render worker {w.index}" for w in drawing]
        dispatch: Any = getattr(scheduler, "dispatch", None)  # a vector env in this process has none

        def attach(trace: Trace | None) -> None:
            self._clock.trace(trace)
            if dispatch is not None:
                dispatch.trace = trace
            if scheduler.images is not None:
                scheduler.images.trace = trace
            for index, worker in enumerate((*workers, *drawing)):
                worker.trace(trace.tracks[index] if trace is not None else None)

        return self._begin_trace(path, names, attach)


def _slots(slots: tuple[int, ...]) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]}-{slots[-1]}"
