"""`AsyncVectorEnv`: many Gymnasium envs in worker processes, stepped with `await`.

The class documents and checks. It delegates to objects that it makes when it is started: the backend sends requests
and hands out results; the others are built on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from aioenv.core.arguments import (
    check_autoreset_options,
    check_clusters,
    check_cpu_affinity,
    check_factories,
    check_grace,
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
    refuse_on_cluster,
    refuse_with_spares,
    refuse_without_workers,
)
from aioenv.core.backend import Backend, EnvInfo, Session
from aioenv.core.choice import BackendChoice, cheap_run
from aioenv.core.env_calls import EnvCalls
from aioenv.core.episode_tracker import check_episode_stats
from aioenv.core.images import EnvImages
from aioenv.core.requests import BATCHES_IN_TURN, BATCHES_KEPT
from aioenv.core.results import Ready, ResetResult, SlotStep, StepResult, WorkerInfo
from aioenv.core.session import CLOSE_GRACE_S, WorkerSession
from aioenv.core.waits import Clock, Stats
from aioenv.core.worker_pool import WorkerPoolConfig, make_program, needed_by
from aioenv.creator import bind_to_slots
from aioenv.display import MOST_ROWS, describe, prepare_notebook, slot_ranges, table
from aioenv.envs import ActorID
from aioenv.process.async_resource import AsyncResource
from aioenv.process.channel import check_channel
from aioenv.process.launch import check_start
from aioenv.rendering.pixels import with_pixels
from aioenv.rendering.step_images import ImageStream
from aioenv.rollout.numbered_episodes import Episode, NumberedEpisodes
from aioenv.rollout.recorder import Rollout
from aioenv.rollout.rollout import Policy, Rollouts
from aioenv.rollout.subset import Pausing, SingleSlot
from aioenv.spaces.autoreset import parse_mode
from aioenv.spaces.seeding import check_options, split_reset_options
from aioenv.state.snapshot import EnvState
from aioenv.stats.episodes import EpisodeStats
from aioenv.stats.sharing import record_pickled
from aioenv.tracing.timeline import Trace, Traced, path_from_environment
from aioenv.watching.viewer import Viewer, check_watch
from aioenv.worker.boot import IGNORABLE

if TYPE_CHECKING:
    from aioenv.process.remote import Cluster
    from aioenv.process.restart_policy import RestartPolicy
    from aioenv.rendering.config import RenderConfig

__all__ = ["AsyncVectorEnv", "WorkerInfo"]


_log = logging.getLogger("aioenv")


class AsyncVectorEnv(Traced, AsyncResource):
    """Many envs, stepped at once in worker processes; every method that waits is a coroutine function.

    The constructor starts no process. Use it as an async context manager, or await it and close it::

        async with AsyncVectorEnv([make_env] * 64) as envs:
            obs, info = await envs.reset(seed=0)
            obs, reward, terminated, truncated, info = await envs.step(actions)

        envs = await AsyncVectorEnv([make_env] * 8)
        ...
        await envs.close()

    It belongs to the event loop that it was started on. No env is built in this process: spaces come from the workers.
    Factories are pickled by value, so lambdas, closures and classes of `__main__` or of a notebook work. No
    `if __name__ == "__main__"` guard is needed.

    Args:
        env_fns: a factory for each slot, in the order of slots. Each slot gets its own variant of an `EnvCreator`.
        num_workers: the number of processes; slots are spread over them evenly. Default: the number of CPUs that this
            process may use, at most one worker a slot. 0: the envs live in this process, which is faster where all
            slots together step in less than about 100 µs. Steps and resets of less than 0.5 ms run on the loop,
            longer ones on a thread of the envs' own, where the envs are made, called and closed. Envs with a
            `render_mode` and those of a vector env with a `timeout_s` stay on that thread; so do all with
            `debug=True`, as they must if what they use belongs to one thread (a connection of sqlite3, say) or if
            they run an event loop. A thread can't be killed or restarted, and an env that crashes ends this process.
        cluster: the machines on which workers are placed (see `RayCluster`); None: this one. With a list, `num_workers`
            is a list as well: `cluster=[None, RayCluster()], num_workers=[2, 62]`. All arrays then travel in frames.
            Where they are, results are the same. Images of `render=` are drawn on this machine. It is not for
            `debug=`, `spare_envs=`, `cpu_affinity=`, `transport="shared"` and statistics in shared memory.
        start: how processes are started. "forkserver": forked from a process that has imported the modules that they
            need. "spawn": a new interpreter each. None: "forkserver" where the platform has it, else "spawn".
        channel: the transport of frames. "scatter": a socket, read straight into the batch. "streams": pipes under
            asyncio's streams, the portable reference. "auto": the fastest that the platform has.
        transport: the transport of arrays. "frames": through the channel. "shared": in anonymous memory that all
            workers map. "auto": large arrays, and those that render workers draw, in shared memory, others in frames.
        preload: names of modules that a worker imports before it unpickles a factory; a fork server imports them
            once for all workers.
        copy: whether results are arrays of your own. Their memory is used again once you have released them and every
            view of them. With False they are views into two batches used in turn, valid until the second next step. In
            asyncio's debug mode a `StaleViewWarning` is given if they are still in use then.
        observation_mode: "same" (all observation spaces are equal), "different" (bounds may differ), or a tuple
            `(batched space, single space)`, as in Gymnasium.
        autoreset_mode: an `AutoresetMode` of Gymnasium, or its value.
        timeout_s: how long `reset`, `step`, `recv`, `render` and calls of envs may wait for replies, in seconds; None:
            without limit.
        on_timeout: the reaction of `reset`, `step` and `recv` to a timeout: "raise" a StepTimeout; "kill" the workers
            that owe a reply; or "restart" them. After a kill the call goes on: it returns the results that the slots
            have then, or raises WorkerDied. A render worker that finishes no image for `timeout_s` holds no state that
            could be lost. With `restart` it is replaced, even with "raise", and its images are drawn again.
        restart: the policy by which workers that died are started again; None: their slots are lost.
        start_timeout_s: how long the start of a worker may take, in seconds.
        log_prefix: is put before each line that envs print. These lines become log records of the logger
            "aioenv.workers", at level INFO; warnings, each once, at level WARNING.
        worker_env: environment variables for the workers. They take precedence over those of this process, and over the
            limit of one thread for each numeric library. A list has one mapping (or None) for each of `num_workers`
            workers.
        render: draw images of every returned state while the next steps run; None: no images are drawn beside steps.
        pixels: make images the observations, or one key of them (see `RenderConfig`); None: observations are the envs'
            own.
        ignore_signals: let workers ignore SIGTERM, SIGUSR1 and SIGUSR2. So a cluster that signals all processes of a
            job before it ends stops no env before you have saved your work. (Workers always ignore SIGINT. `close`
            sends SIGKILL, which can't be ignored, a second after SIGTERM.)
        debug: run the envs in this process instead, on a thread for each worker (by default one for all). Then
            `breakpoint()` in an env stops at this terminal, and a debugger sees the envs. `start`, `channel`,
            `worker_env` and `cpu_affinity` have no effect then. An env that changes its process, or ends it, does so to
            this one.
        cpu_affinity: the CPUs that the workers may use. "spread" pins each worker to one CPU of this process, in turn.
            With a sequence of CPU numbers, or of sets of them, worker i gets element `i % len`. None: the CPUs of this
            process.
        episode_stats: count returns, lengths and times of episodes, in `envs.episode_stats`. Where an episode ends,
            they are "episode" in the infos, as of Gymnasium's RecordEpisodeStatistics. Or an `EpisodeStats` that counts
            more.
        stats_prefix: the name of these statistics ("train" for example) in the log "aioenv.stats" and in writers; with
            None they are not logged.
        seed_plan: seeds for episodes that are given none, autoresets above all; at least `num_envs`. Slot i's episode k
            gets seed number `i + k * num_envs`, modulo their number, for any number of workers. A reset of all slots
            starts the plan again. A seed that is passed to a reset stands in place of the episode's own.
        autoreset_options: the options of automatic resets: a dict, passed to each of them as `options`, or a function
            `f(slot, episode)` that returns such a dict or None. Automatic resets are those of the autoreset mode, and
            those of rollouts and numbered episodes. A reset of your own passes its own options alone. Episode 0 of a
            slot is the one that the last reset of all slots began. Each later reset of the slot adds 1, for any number
            of workers, also after the restart of one. The function is copied into the workers as the factories are; if
            it raises, its slot has an `EnvError`. It is not for `RestartPolicy(resume=True)`; a dict is.
        check_numerics: raise an `EnvError` if a reward or an observation is NaN or infinite, even if it is within the
            bounds of its space. Its `__cause__` is a `NumericsError` with the step since the slot's reset (or since
            the restart of its worker) and the place of the value. The slot must be reset then. The check takes about
            1 µs a step and env, if observations are small.
        spare_envs: give each slot a second env, which is reset while the first one runs an episode, so that the next
            episode begins at once. It is for resets that take as long as many steps. The episodes of a slot alternate
            between its two envs; in a factory `aioenv.is_spare_env()` tells which one is made. Each env has a worker of
            its own: `num_workers` is `2 * num_envs`, and nothing smaller. A reset that you ask for goes to one env, and
            discards the episode that the other one had begun. Its seed is that of the first env; the second one gets
            `numpy.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1)[0] >> 2`. With a `seed_plan` both take
            their seeds from the plan. `set_attr` reaches both envs, `call` and `get_attr` the one whose episode runs,
            or both (`spares=True`). A function of `autoreset_options` is called an episode earlier. `actor_rewards`
            raises a ValueError. With `restart=` a slot whose worker has died goes on in its other env, after the
            truncated end of the episode; without, after a reset of your own. It is not for `AutoresetMode.DISABLED`,
            `debug=`, `RestartPolicy(resume=True)`, `transport="shared"` and shared statistics.

    Attributes:
        num_envs: the number of slots.
        closed: whether `close` has been called.

    Raises:
        ValueError: if `env_fns` is empty, or an argument is not one of its values.
        TypeError: if an element of `env_fns` is not callable, or it or `autoreset_options` can't be pickled; if
            `spare_envs` is not a bool.
    """

    _noun = "vector env"
    _session: Session | None = None
    _episode_stats: EpisodeStats | None = None
    _backend: Backend | None = None  # of the session; not None once it is started
    _choice: BackendChoice | None = None  # made before the start; None: there is nothing to choose
    # made when it is started
    _calls: EnvCalls
    _images: EnvImages
    _pausing: Pausing
    _single_slot: SingleSlot
    _rollouts: Rollouts
    _episodes: NumberedEpisodes
    _watch: Viewer | None = None

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Env[Any, Any]]],
        *,
        num_workers: int | Sequence[int] | None = None,
        cluster: Cluster | Sequence[Cluster | None] | None = None,
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
        autoreset_options: Mapping[str, Any] | Callable[[int, int], Mapping[str, Any] | None] | None = None,
        check_numerics: bool = False,
        spare_envs: bool = False,
    ) -> None:
        env_fns = bind_to_slots(listed_factories(env_fns))
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
        num_workers, clusters = check_clusters(cluster, num_workers, self.num_envs)
        here = isinstance(num_workers, (int, np.integer)) and not isinstance(num_workers, bool) and num_workers == 0
        if here:
            refuse_without_workers(
                start=start is not None,
                channel=channel != "auto",
                transport=transport == "shared",
                on_timeout=on_timeout != "raise",
                restart=restart is not None,
                log_prefix=log_prefix is not None,
                worker_env=worker_env is not None,
                cpu_affinity=cpu_affinity is not None,
                ignore_signals=bool(ignore_signals),
            )
            transport = "frames"  # which no frame is made for
        in_thread = here or debug
        if not isinstance(spare_envs, (bool, np.bool_)):
            raise TypeError(f"spare_envs: expected True (one for each slot) or False, got {spare_envs!r}")
        if spare_envs:
            refuse_with_spares(
                self.num_envs,
                num_workers,
                autoreset_mode=self._must_reset,
                debug=debug,
                resume=restart is not None and restart.resume,
                transport=transport == "shared",
            )
            num_workers, transport = self.num_envs, "frames"  # each env has memory of its own for its resets
        if clusters:
            refuse_on_cluster(
                debug=debug,
                spare_envs=bool(spare_envs),
                transport=transport == "shared",
                cpu_affinity=cpu_affinity is not None,
            )
            transport = "frames"
        workers = check_num_workers(1 if here or (debug and num_workers is None) else num_workers, self.num_envs)
        options = check_autoreset_options(autoreset_options, restart)
        self._clock = Clock()
        with record_pickled() as stats:
            code = make_program(env_fns, workers, live=in_thread, portable=bool(clusters), autoreset_options=options)
        if clusters:
            refuse_on_cluster(stats=any(one.shared for one in stats))
        if spare_envs:
            if stats:
                raise ValueError(
                    "spare_envs: not with SharedRunningStats, so far: a reset ahead of time would count too early"
                )
            workers *= 2
        self._config = WorkerPoolConfig(
            code=code,
            num_workers=workers,
            start=check_start(start),
            channel=check_channel(channel),
            transport=check_transport(transport),
            num_shared_batches=1 + (BATCHES_KEPT if copy else BATCHES_IN_TURN),
            preload=check_preload(preload),
            needed=needed,
            observation_mode=observation_mode,
            autoreset_mode=self.autoreset_mode,
            start_timeout_s=check_seconds("start_timeout_s", start_timeout_s),
            log_prefix=log_prefix,
            worker_env=check_worker_env(None if in_thread else worker_env, workers),
            find_sources=render is not None or (pixels is not None and pixels.workers is not None),
            by_camera=all(config.by_camera for config in (render, pixels) if config is not None),
            looks="each reset" if render is None else render.edits,
            restart=restart,
            cpu_affinity=check_cpu_affinity(None if in_thread else cpu_affinity),
            ignored=IGNORABLE if ignore_signals else (),
            in_thread=in_thread,
            inline=here and not debug,
            stats=stats,
            check_numerics=bool(check_numerics),
            spares=bool(spare_envs),
            clusters=clusters,
            seeds=check_seed_plan(seed_plan, self.num_envs, restart),
            # last: they are bound to this vector env, which must not fail on another argument after that
            episodes=check_episode_stats(episode_stats, stats_prefix, self.num_envs, self.autoreset_mode),
        )
        self._episode_stats = self._config.episodes
        prepare_notebook()
        # whether something was asked for that only processes give, or that costs as much as they do
        asked = (start, restart, log_prefix, worker_env, cpu_affinity, timeout_s, render, pixels)
        self._needs_workers = (
            in_thread or ignore_signals or spare_envs or bool(clusters) or any(one is not None for one in asked)
        )

    # ------------------------------------------------------------ start and close

    async def _ensure_started(self) -> Self:
        """Start the workers, once. If this is cancelled, they are ended.

        Raises:
            WorkerStartError: if an env could not be made; it has the worker's traceback.
            SpaceMismatchError: if the envs' spaces can't be batched.
            RenderError: if images were asked for and can't be drawn.
            OSError: if the timeline can't be written to the path that `AIOENV_TRACE` names.
        """
        await super()._ensure_started()
        if self._backend is None:
            assert self._session is not None
            assert self._session.backend is not None
            self._make_parts(self._session, self._session.backend)
            self._backend = self._session.backend
        return self

    def _make_parts(self, session: Session, backend: Backend) -> None:
        """Make the objects that the methods delegate to.

        None of them refers to the vector env, so that one that is forgotten is collected at once.
        """
        clock, mode = self._clock, self.autoreset_mode
        self._calls = EnvCalls(backend, clock, mode)
        render_mode = self._render_mode_of(session.env_info)
        self._images = EnvImages(
            backend, session.images, clock, render_mode=render_mode, one_env=self._config.vectorized
        )
        self._single_slot = SingleSlot(backend)
        self._pausing = Pausing(backend)
        self._rollouts = Rollouts(backend, clock, mode)
        self._episodes = NumberedEpisodes(backend, clock)

    def _start(self) -> Coroutine[Any, Any, None]:
        if self._choice is not None:
            return self._choose_and_start(self._choice)
        self._session = self._make_session()
        return self._start_session(self._session)

    async def _choose_and_start(self, choice: BackendChoice) -> None:
        if await choice.prefers_this_process(self._config.start_timeout_s):
            code = make_program(choice.factories, 1, live=True, autoreset_options=choice.autoreset_options)
            self._config = self._config._replace(
                code=code, num_workers=1, transport="frames", worker_env=[None], in_thread=True, inline=True
            )
        self._choice = None
        self._session = self._make_session()
        await self._start_session(self._session)

    async def _start_session(self, session: Session) -> None:
        path = path_from_environment()
        try:
            await session.start()
        except BaseException:
            self._forget_code()
            raise
        if self._config.restart is None:
            self._forget_code()
        if path is not None:
            assert session.backend is not None
            self._trace_backend(session.backend, path)

    def _make_session(self) -> Session:
        return WorkerSession(
            self._config,
            self._render_config,
            self._pixels_config,
            copy=self.copy,
            must_reset=self._must_reset,
            timeout_s=self._timeout_s,
            on_timeout=self._on_timeout,
        )

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """Close the envs and end the workers. Idempotent; if this is cancelled, the workers are killed at once.

        Args:
            grace_s: how long a worker may take to close its envs, in seconds, before it gets SIGTERM, and a second
                later SIGKILL. Envs that write a video when they are closed may need more than the default.

        Raises:
            ValueError: if `grace_s` is no number. Nothing has been closed then.
        """
        end = partial(self._close, check_grace("grace_s", grace_s))
        try:
            await self._close_once(end)
        finally:
            if self.closed:
                self._forget_code()

    async def _close(self, grace_s: float) -> None:
        if self._session is None:  # its start was cancelled before there was one
            return
        if self.backend == "workers" and not self._needs_workers and (advice := cheap_run(self.stats())):
            _log.info("%r: %s", self, advice)
        try:
            if self._watch is not None:
                await self._watch.close()
        finally:
            try:
                await self._session.close(grace_s)
            finally:
                self._stop_trace()

    def _abandon(self) -> None:
        """Kill every process without waiting."""
        if self._watch is not None:
            self._watch.abandon()
        if self._session is not None:
            self._session.abandon()
        self._forget_code()
        self._stop_trace()

    def _forget_code(self) -> None:
        """Release the snapshot of the factories: no worker is started from it any more."""
        if self._config.code is not None:
            self._config = self._config._replace(code=None)
            if self._session is not None:
                self._session.forget_code()

    def __repr__(self) -> str:
        return describe(type(self).__name__, self._facts())

    def _repr_html_(self) -> str:
        facts = self._facts()
        stats = self.stats()
        if stats.env_steps:
            facts["env-steps"] = f"{stats.env_steps:,}, {stats.env_steps_per_s:,.0f} a second, {stats.bound}"
        workers = self.workers
        rows = [
            [worker.pid or "", worker.state, slot_ranges(worker.slots), worker.node or "this machine"]
            for worker in workers[:MOST_ROWS]
        ]
        html = table(type(self).__name__, facts.items())
        if rows:
            left = f", the first {MOST_ROWS} of them" if len(workers) > MOST_ROWS else ""
            html += table(f"{len(workers)} workers{left}", rows, ["pid", "state", "slots", "machine"])
        return html

    def _facts(self) -> dict[str, Any]:
        """Return the settings that `repr` and notebooks show, by name."""
        started = self._backend is not None
        facts: dict[str, Any] = {}
        if started and self.spec is not None:
            facts["env"] = self.spec.id
        facts |= {"num_envs": self.num_envs, "backend": self.backend}
        if self._config.num_workers and self.backend != "in_process":
            facts["num_workers"] = self._config.num_workers
        if started or self.backend != "native":  # a native vector env brings its own mode
            facts["autoreset_mode"] = self.autoreset_mode.value
        facts["state"] = "closed" if self.closed else "running" if started else "not started"
        return facts

    if not TYPE_CHECKING:  # for callers that forget the "async"; type checkers find it by themselves

        def __enter__(self) -> None:
            raise TypeError(f"{self!r}: use `async with`; for code without await there is aioenv.sync.make_vec")

        def __exit__(self, *exc_info: object) -> None: ...

    def _check_running(self) -> Backend:
        """Return the backend; raise if this is not started, is closed, or is used on another loop.

        Raises:
            RuntimeError: if it is not started.
            ClosedError: if it is closed.
            LoopError: if it was started on another loop, or none runs here.
        """
        backend = self._backend
        if backend is None or self.closed:
            self._check_open()
        if backend is None:
            raise RuntimeError(f"{self!r}: start it first, with `async with envs:` or `await envs`")
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            self._check_loop()
        return backend

    @property
    def _env_info(self) -> EnvInfo:
        """The spaces, spec and the like of the envs; known from the start on, also after the close."""
        if self._session is None or self._backend is None:
            raise RuntimeError(
                f"{self!r}: start it first, with `async with envs:` or `await envs`; spaces come from the workers"
            )
        return self._session.env_info

    # ------------------------------------------------------------ attributes

    @property
    def single_observation_space(self) -> Space[Any]:
        """The observation space of one slot."""
        return self._env_info.single_observation_space

    @property
    def observation_space(self) -> Space[Any]:
        """The space of a batch of observations."""
        return self._env_info.observation_space

    @property
    def single_action_space(self) -> Space[Any]:
        """The action space of one slot."""
        return self._env_info.single_action_space

    @property
    def action_space(self) -> Space[Any]:
        """The space of a batch of actions."""
        return self._env_info.action_space

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the first env, with `autoreset_mode`."""
        return self._env_info.metadata

    @property
    def spec(self) -> EnvSpec | None:
        """The `EnvSpec` of the first env, if it has one that pickles.

        Arrays, strings and bytes of 64 KiB or more among its arguments are not sent back by the worker. Equal ones are
        looked up in the first factory, in the objects that it refers to, and in Gymnasium's registry. A
        placeholder, whose repr describes the value, stands for one that is not found, because a factory made it or the
        env changed it.
        """
        spec: EnvSpec | None = self._env_info.spec
        return spec

    @property
    def render_mode(self) -> str | None:
        """The render mode of the first env; "rgb_array" if it has none and `render=` or `pixels=` was given."""
        return self._render_mode_of(self._env_info)

    def _render_mode_of(self, info: EnvInfo) -> str | None:
        pixels = self._pixels_config if not self._config.vectorized else None
        render = self._render_config
        draws = (render is not None and render.workers != 0) or pixels is not None
        return "rgb_array" if info.render_mode is None and draws else info.render_mode

    @property
    def backend(self) -> Literal["auto", "workers", "in_process", "native"]:
        """Where the envs step: "workers"; "in_process", single envs in this process (`num_workers=0`); or "native".

        "auto" before the start, if the choice is made then.
        """
        if self._choice is not None:
            return "auto"
        return "in_process" if self._config.in_thread else "workers"

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The worker processes: pid, state ("ready", "busy", "dead", …), slots, CPUs and memory."""
        workers = self._session.workers if self._session is not None else []
        return tuple(WorkerInfo(w.pid, w.state.value, w.slots, w.cpus, w.node) for w in workers)

    # ------------------------------------------------------------ whole batches

    async def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> ResetResult:
        """Begin an episode in every slot, or in the slots of `options["reset_mask"]`.

        If this is cancelled, or times out, the envs are reset all the same, and `recv` takes the result.

        Args:
            seed: an int seeds slot i with `seed + i`; a list has a seed for each slot (None: no seed).
            options: passed to each env's `reset`, without "reset_mask". The mask is a bool array of shape
                `(num_envs,)`: slots where it is False are not reset, and their last observation is returned.
            timeout_s: instead of the constructor's, in seconds.

        Returns:
            `(obs, info)`: observations as a batch of `observation_space`, infos as arrays by key.

        Raises:
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            EnvError: if an env raised; `error.partial` has the results of the others.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed.
        """
        backend = self._check_running()
        mask, rest = split_reset_options(options, self.num_envs)
        wait = self._clock.envs.begin()
        try:
            return await backend.reset(seed, mask, rest, check_timeout(timeout_s))
        finally:
            wait.end()

    async def step(self, actions: Any, *, timeout_s: float | None = None) -> StepResult:
        """Step every slot.

        If this is cancelled before the actions were sent, it has no effect. After that the envs are stepped all the
        same, and `recv` takes the result. A later `step` or `reset` first waits for that result and drops it, with a
        warning if an episode ended in it.

        Args:
            actions: a batch of `action_space`: for most spaces an array of shape `(num_envs, *shape)`. It is cast to
                the space's dtype.
            timeout_s: instead of the constructor's, in seconds.

        Returns:
            `(obs, reward, terminated, truncated, info)`: observations as a batch of `observation_space`, reward
            float64 and flags bool of shape `(num_envs,)`, infos as arrays by key.

        Raises:
            ActionError: if the actions don't fit the action space. Nothing was sent.
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            ResetNeededError: if a slot's episode is over and autoreset is disabled. Nothing was sent.
            EnvError: if an env raised; `error.partial` has the results of the others. The slot must be reset.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed.
        """
        backend, wait = self._check_running(), self._clock.envs.begin()
        try:
            return await backend.step(actions, timeout_s=check_timeout(timeout_s))
        finally:
            wait.end()

    # ------------------------------------------------------------ some slots, in the order in which they finish

    def send(self, actions: Any, slots: Iterable[int] | None = None) -> None:
        """Send actions to some slots, without waiting; `recv` or `ready` give the results.

        Args:
            actions: a batch of actions, one for each of `slots` in that order.
            slots: slot numbers, None for all.

        Raises:
            ValueError: if it would step some slots of a vector env that must be stepped as a whole (see
                `NativeVectorEnv`). Nothing was sent.
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied: as for `step`. Nothing was sent.
        """
        backend = self._check_running()
        if isinstance(slots, Iterable) and not isinstance(slots, np.ndarray):
            slots = list(slots)
        with self._clock.envs:  # a vector env in this process may step here and now
            backend.send(actions, slots)

    def send_reset(
        self,
        slots: Iterable[int] | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin episodes in some slots, without waiting; `recv` or `ready` give the first observations.

        Args:
            slots: slot numbers, None for all.
            seed: an int seeds slot i with `seed + i`; a list has a seed for each of `slots`.
            options: passed to each env's `reset`.

        Raises:
            ValueError: if a list of seeds has another length than there are slots, or `options` has a "reset_mask".
            PendingCallError: if one of the slots has a request in flight. Nothing was sent.
        """
        backend = self._check_running()
        check_options(options)
        if options is not None and "reset_mask" in options:
            raise ValueError('send_reset: name the slots instead of options["reset_mask"]')
        with self._clock.envs:
            backend.send_reset(slots, seed, options)

    async def recv(self, min_slots: int = 1, max_slots: int | None = None, *, deadline_s: float | None = None) -> Ready:
        """Wait until `min_slots` slots have results, and take the results of all slots that have one.

        If this is cancelled, no result is taken and none is lost.

        Args:
            min_slots: the number of slots to wait for; of those in flight, if they are fewer.
            max_slots: the most slots to take; None: all slots that have a result.
            deadline_s: after so many seconds take the results that there are, which may be none.

        Returns:
            `(slots, obs, reward, terminated, truncated, info)`: slot numbers, ascending, and a row for each of them.

        Raises:
            ValueError: if `min_slots` or `max_slots` is less than 1, or an argument is no such number.
            NoAsyncCallError: if no request is in flight and no result is ready.
            EnvError: if an env raised; `error.partial` has the other slots' results.
            WorkerDied: likewise, if a worker ended.
            StepTimeout: if `timeout_s` passed.
        """
        check_recv(min_slots, max_slots, deadline_s)
        backend = self._check_running()
        wait = self._clock.envs.begin()
        try:
            return await backend.recv(min_slots, max_slots, deadline_s)
        finally:
            wait.end()

    async def ready(
        self, min_slots: int = 1, max_slots: int | None = None, *, deadline_s: float | None = None
    ) -> AsyncIterator[Ready]:
        """Iterate over results as they arrive, until no request is in flight.

        If this is cancelled, or left, `recv` takes the results that were not taken here.

        Args, Raises: as `recv`; `deadline_s` starts again with each result.

        Yields:
            The results of `recv`.
        """
        while self.outstanding:
            yield await self.recv(min_slots, max_slots, deadline_s=deadline_s)

    @property
    def outstanding(self) -> bool:
        """Whether a request is in flight, or a result was not taken: whether `recv` would return a result."""
        return self._check_running().outstanding

    # ------------------------------------------------------------ one slot, and paused ones

    async def step_at(self, slot: int, action: Any) -> SlotStep:
        """Step one slot; requests of other slots may be in flight (`send`).

        If this is cancelled after the action was sent, `recv` takes the result, or a later `step` or `reset` drops it.

        Args:
            slot: the slot number.
            action: an action of `single_action_space`.

        Returns:
            `(obs, reward, terminated, truncated, info)` of the one env, not as a batch.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied, StepTimeout: as for `step`.
            PausedError: if the slot is paused.
            ValueError: if the slot must be stepped with others (see `NativeVectorEnv`).
        """
        self._check_running()
        with self._clock.envs:
            return await self._single_slot.step_at(slot, action)

    async def reset_at(
        self, slot: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult:
        """Begin an episode in one slot; otherwise as `step_at`.

        Args:
            slot: the slot number.
            seed: the seed of its env.
            options: passed to the env's `reset`.

        Raises:
            TypeError: if the seed is not an int.
            PendingCallError, PausedError, EnvError, WorkerDied, StepTimeout: as for `step_at`.
        """
        self._check_running()
        check_options(options)
        if options is not None and "reset_mask" in options:
            raise ValueError('reset_at: it is about one slot; leave out options["reset_mask"]')
        with self._clock.envs:
            return await self._single_slot.reset_at(slot, seed, options)

    def pause(self, slots: int | Iterable[int]) -> None:
        """Leave slots out of whole batches until they are resumed; sends nothing to the workers, and does not wait.

        Paused slots keep their process and their state, also in the middle of an episode. Batches keep their shape, so
        `step` and `reset` take and return as many rows as before. The rows of paused slots in actions, seeds and reset
        masks are ignored. In results these rows have the slot's last observation, reward 0 and flags False. The
        observation is zeros if the slot had none, if its worker is gone, or while its worker is busy with another
        request. While any slot is paused, results have `info["_active"]`, a bool array that is False for paused slots.

        `send` and `send_reset` without slots leave paused slots out, too. To name one there, in `step_at` or in
        `reset_at` raises a `PausedError`. Calls, attributes, states and images are as before. A worker whose slots are
        all paused gets no frames. A reply in flight is not lost: `recv` takes it. A slot that has failed, or whose
        worker is gone, may be paused, so that the others go on.

        Args:
            slots: a slot number, or some; an empty array, as from `numpy.flatnonzero(…)`, pauses none. A slot that is
                paused stays paused.

        Raises:
            IndexError, ValueError: if they are not slot numbers; or if the slots of a vector env must be stepped as a
                whole (see `NativeVectorEnv`). Nothing is paused.
        """
        self._check_running()
        self._pausing.pause(slots)

    def resume(self, slots: int | Iterable[int] | None = None) -> None:
        """Take slots into whole batches again, in the state in which they were paused; others stay as they are.

        Args:
            slots: a slot number, or some; None for all. A slot that is `exhausted` tries another reset with its next
                step.

        Raises:
            IndexError, ValueError: as for `pause`. Nothing is resumed.
        """
        self._check_running()
        self._pausing.resume(slots)

    def resume_all(self) -> None:
        """Take all slots into whole batches again."""
        self.resume()

    @property
    def active_slots(self) -> npt.NDArray[np.int64]:
        """The slots that are not paused, int64, ascending."""
        return self._check_running().table.active

    @property
    def exhausted(self) -> tuple[int, ...]:
        """The slots that were paused because their envs have no further episode, ascending.

        An env reports this by raising `EpisodesDone` in `reset`. If it has an attribute `finite_episodes` that is true,
        a StopIteration means the same; `construct_envs` sets it on envs to which it gave episodes. This is not an
        error, for any cause of the reset: the slot is paused. In the result `info["_active"]` is False for it, unless
        its last episode ended in that very step (under SAME_STEP).
        """
        return tuple(sorted(self._check_running().table.exhausted))

    # ------------------------------------------------------------ rollouts and episodes

    async def rollout(
        self, policy: Policy, steps: int, groups: int = 2, *, split: Literal["slots", "workers"] = "slots"
    ) -> Rollout:
        """Collect `steps` steps of every slot, with the envs of one group stepping while the policy of another runs.

        The slots of every worker are split into `groups` groups. So a worker that is done with one group finds the next
        one's actions waiting; with 1 group all slots step in lock-step. Such groups are for a policy that waits for
        another device. If it computes on the CPUs that the envs need, `split="workers"` costs less. Then a group is one
        or more whole workers, which are idle while the policy of their own group runs. Trajectories do not depend on
        `groups` and `split`, as long as the policy treats row by row.

        A rollout begins with the envs as they are: `reset` first; a second rollout goes on where the first one stopped.
        Under `AutoresetMode.DISABLED` it resets each slot whose episode is over, without a seed, before its next step.
        The episode's last observation is in `infos[t]["final_obs"]`, as under SAME_STEP.

        If this is cancelled, or the policy raises, or a timeout passes, requests in flight are left as by a cancelled
        `step`: the envs are stepped all the same, and `recv` takes the results. A later `step`, `reset` or `rollout`
        first waits for them and drops them, with a warning if an episode ended in one.

        Args:
            policy: `policy(obs)` gets a batch of observations, those of a group's k slots, and returns a batch of
                actions. Or it returns `(actions, extras)`, where `extras` is a dict of arrays of shape `(k, …)` to be
                recorded, such as values and log-probabilities. Its keys are the same each time. (If an action is itself
                a pair whose second element is a Dict, the whole answer is actions.) A parameter named `slots` gets the
                slot numbers, int64 of shape `(k,)`, ascending, the same ones each time. A recurrent policy keeps its
                state by them. It may be a coroutine function. A plain function blocks the loop, while workers go on.
            steps: the number of steps of each slot.
            groups: the number of groups; at most as many as the worker with the fewest slots has, or, with
                `split="workers"`, as there are workers. For vector envs see `NativeVectorEnv`.
            split: "slots": a group is some slots of every worker; "workers": a group is all slots of some workers. It
                has no effect on vector envs.

        Returns:
            Arrays `(steps, num_envs, …)`; learn from the rows where `valid` is True (see `Rollout`). Slots that are
            paused when it begins are not stepped: all their rows have the last observation, and `valid` False.

        Raises:
            ResetNeededError: if a slot has no observation yet: it was never reset, or its state was just set.
            PausedError: if all slots are paused.
            ActionError: if actions don't fit the action space; the message names the group.
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            EnvError: if an env raised; `error.partial` is a `Rollout` of the steps collected, with the last steps of
                all groups. The slot must be reset; the others can go on.
            WorkerDied: likewise, if a worker ended.
            StepTimeout: if a group's step took longer than `timeout_s`; `error.partial` as above.
        """
        self._check_running()
        return await self._rollouts.run(policy, steps, groups, split)

    def episodes(
        self, policy: Policy, n: int, *, seed: int | Sequence[int | None] | None = None
    ) -> AsyncGenerator[Episode, None]:
        """Run episodes 0 … n-1, each exactly once and to its end::

            async for episode in envs.episodes(policy, 100, seed=0):
                print(episode.number, episode.total_reward)

        Episodes are yielded as they end. Episode k begins with a reset with a seed of its own. So the result of a
        deterministic policy that treats row by row depends neither on the number of slots and workers, nor on restarts.
        The episodes that count are chosen before they are run, so short ones are not over-represented.

        A slot without further episodes is paused until the end of the iteration. After the iteration, also if it was
        left early, `reset` before you step. Envs that reset themselves in the last step of an episode
        (`AutoresetMode.SAME_STEP`) are reset twice. With `restart=RestartPolicy()` an episode that a worker has lost is
        run again, with its seed. If this is cancelled, the policy raises, or an env fails, requests in flight are left
        as by a cancelled `step`.

        Args:
            policy: `policy(obs)` returns a batch of actions for the observations of all slots, `(num_envs, …)`; rows of
                slots that are not stepped are ignored. Parameters of these names get more: `slots`, the slot numbers,
                always all; `episodes`, int64 `(num_envs,)`, the number of each row's episode, -1 for none; `started`,
                bool `(num_envs,)`, whether a row is an episode's first observation, at which a recurrent policy clears
                its state. It may be a coroutine function.
            n: the number of episodes.
            seed: an int, or None for fresh entropy, from which a seed is drawn for each episode; or a list of n seeds.

        Raises:
            ValueError, TypeError: if an argument is not one of its values, or if the slots of a vector env must be
                stepped as a whole (see `NativeVectorEnv`).
            PausedError: if all slots are paused.
            PendingCallError: if a slot has a request in flight, or a result that was not taken; if another iteration
                has begun since; or if other code has stepped or reset slots meanwhile.
            EpisodesDone: if the envs have no further episode before n have been run.
            ActionError, EnvError, WorkerDied, StepTimeout: as for `step`.
        """
        self._check_running()
        return self._episodes.iterate(policy, n, seed, owner=self)

    @property
    def episode_stats(self) -> EpisodeStats:
        """Returns, lengths, times and events of the episodes that have ended: `print(envs.episode_stats.epoch())`.

        Raises:
            RuntimeError: if the vector env was made without `episode_stats`.
        """
        if self._episode_stats is None:
            raise RuntimeError("episode_stats: episodes are not counted; make the vector env with episode_stats=True")
        return self._episode_stats

    def stats(self, *, reset: bool = False) -> Stats:
        """Return how long the run waited for envs, for images and for the policy; `print` it.

        Args:
            reset: whether to count from zero again after this.
        """
        steps = 0 if self._backend is None else self._backend.table.steps
        waits = 0, 0.0
        if self._backend is not None and (spares := self._backend.spares) is not None:
            waits = spares.waits, spares.wait_s
        stats = self._clock.stats(self.num_envs, steps, waits)
        if reset:
            self._clock.restart_count(steps, waits)
        return stats

    # ------------------------------------------------------------ images

    @property
    def draws_beside(self) -> bool:
        """Whether images are drawn beside the steps (`render=`): `render` may be awaited while a step is in flight."""
        images = None if self._session is None else self._session.images
        return images is not None and images.draws

    @overload
    async def render(self, mode: Literal["arrays"] | None = None) -> Any: ...

    @overload
    async def render(self, mode: Literal["grid"]) -> npt.NDArray[np.uint8]: ...

    async def render(self, mode: Literal["arrays", "grid"] | None = None) -> Any:
        """Return images of the states that `reset` and `step` (or `recv`) returned last.

        With `render=` given to the constructor they are drawn from the states that were returned. Drawing begins with
        the reply, and a step may be in flight meanwhile. Without it, this is `call("render")`. With `pixels=` these are
        the images that the observations hold, several cameras side by side. Otherwise they are the images that the envs
        draw themselves if they were made with a `render_mode` such as "rgb_array", or None. If this is cancelled, the
        images are drawn all the same.

        Args:
            mode: None or "arrays": one image a slot (these two differ in the blocking API alone). "grid": one image of
                all slots, as square a grid as possible.

        Returns:
            uint8 of shape `(num_envs, height, width, 3)`, row by row from the top; a tuple if the images of the envs
            differ in shape. With `depth` or `segmentation` it is a tuple of that array and these: depth, float32
            `(num_envs, height, width)` in metres, and segmentation, int32 `(num_envs, height, width, 2)`. With a list
            of C cameras an axis of C comes second. The arrays are the same ones again if nothing was returned in
            between. With "grid" it is colours alone, `(rows * height, columns * width, 3)`.

        Raises:
            RenderError: if there is no state yet, or if an image could not be drawn (`slots`), with the others as
                `partial`. With "grid" also if the envs' images differ in shape. For a vector env (`NativeVectorEnv`)
                also if it has no render mode and `render=` was not given.
            StepTimeout: if `timeout_s` passed. The images are drawn all the same, by another render worker if this one
                hangs and `restart` allows it.
            ValueError: if `mode` is not one of its values.
        """
        self._check_running()
        return await self._images.render(mode)

    def render_stream(self, buffer: int = 8) -> ImageStream:
        """Iterate over the images of all results from now on, in order, while stepping goes on::

            async for step, images in envs.render_stream():
                video.append(images)

        Each result of `reset`, `step` or `recv`, and each of a group of `rollout`, gives one item: its number, counted
        from 0 at the first result of this vector env, and the images that `render()` would have returned then. There is
        no item before every slot has had a result. The arrays may be those that `render()` and other streams give, so
        copy those that you write to.

        Stepping never waits for the stream. If more than `buffer` items wait, because they are drawn or taken slower
        than steps are made, the oldest is dropped, which shows as a gap in the numbers. There may be several streams.
        It ends when the vector env is closed, without the items that are not drawn by then; `await stream.aclose()`
        ends it before. A cancelled iteration loses no item.

        Args:
            buffer: the number of items that may wait.

        Raises:
            RenderError: if `render=` was not given; while iterating, if an image could not be drawn: iterate again to
                go on with the next step.
            StepTimeout: while iterating, if a result's images are not drawn within `timeout_s` from when they are
                waited for: iterate again to go on waiting.
            ValueError: if `buffer` is not a positive int.
        """
        self._check_running()
        return self._images.stream(buffer)

    async def watch(self, slots: int | Iterable[int] = 16, port: int = 0, *, fps: float = 15.0) -> Viewer:
        """Serve a page that shows slots as they step, for a browser on this machine::

            envs = aioenv.make_vec("Ant-v5", num_envs=64, render=aioenv.RenderConfig(workers=0))
            async with envs:
                print((await envs.watch()).url)

        MuJoCo envs are shown in 3D, from the states that come with the results; other envs by the images that they
        draw. The label of each tile has the return and the length of the current episode, and the return of the last
        one. The page can't change the run, and only this machine can reach it.

        A process of its own serves the page, at low priority. An update for which it has no time is dropped: stepping
        never waits for it. Paused slots keep their last state, and slots whose worker is restarted go on. The page ends
        with `await watch.close()`, or when the vector env is closed. If this is cancelled, no process is left.

        It takes viser: `pip install viser`.

        Args:
            slots: how many are shown, from slot 0 on; or slot numbers.
            port: of the page; 0 for any that is free.
            fps: the most updates a second.

        Returns:
            The page; its `url` is the address.

        Raises:
            RenderError: if the vector env was made without `render=`; or if the page can't be served.
            ImportError: if viser is not installed.
            RuntimeError: if the vector env is being watched already.
            ValueError, IndexError: if an argument is not one of its values.
            OSError: if the port is taken, or not for this user.
        """
        self._check_running()
        numbers = check_watch(slots, port, fps, self.num_envs)
        while (before := self._watch) is not None:
            if not before.closed:
                raise RuntimeError(f"watch: this vector env is being watched already, by {before!r}")
            await before.close()  # its process may have died
            if self._watch is before:  # else another call was first
                self._watch = None
        backend = self._check_running()  # it may have been closed meanwhile
        clock, num_envs = self._clock, self.num_envs
        watch = self._watch = Viewer(
            backend,
            numbers,
            num_envs=num_envs,
            mode=self.autoreset_mode,
            stats=lambda: clock.stats(num_envs, backend.table.steps),
            fps=fps,
        )
        name = self.spec.id if self.spec is not None else "aioenv"
        await watch.start(f"{name}, {num_envs} slots", port)
        return watch

    # ------------------------------------------------------------ methods, attributes and states of the envs

    async def call(self, name: str, *args: Any, spares: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env (or read an attribute), through its wrappers.

        If this is cancelled, the envs run it all the same, and the results are dropped.

        Args:
            name: the name of the method or attribute, anywhere in the stack of wrappers.
            *args: positional arguments of the method.
            spares: with `spare_envs=True`, call both envs of each slot. The call of an env that is being reset is made
                after the reset. (`call_at` passes a keyword of this name to the method.)
            **kwargs: keyword arguments of the method.

        Returns:
            One result a slot: that of the env whose episode runs. With `spares` it is a pair: that of the slot's first
            env, and that of the one for which `is_spare_env()` was True, whichever runs the episode.

        Raises:
            ValueError: if `spares` is True and there are no spare envs.
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            EnvError: if an env raised; `error.partial` has the results of the others.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed. The envs run it all the same, and the results are dropped.
        """
        self._check_running()
        return await self._calls.call(name, args, kwargs, spares=spares)

    @overload
    async def call_at(self, slots: int, name: str, /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    async def call_at(self, slots: Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

    async def call_at(self, slots: int | Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one slot's env, or of some slots' envs (or read an attribute); otherwise as `call`.

        Args:
            slots: a slot number, or some. (It is positional, so that every keyword goes to the method.)
            name: the name of the method or attribute, anywhere in the stack of wrappers.
            *args: positional arguments of the method.
            **kwargs: keyword arguments of the method.

        Returns:
            For a number its result; else a tuple of one result for each of `slots`, in that order.

        Raises:
            ValueError, IndexError: if they are not slot numbers.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        self._check_running()
        return await self._calls.call_at(slots, name, args, kwargs)

    async def get_attr(self, name: str, *, spares: bool = False) -> tuple[Any, ...]:
        """Read an attribute of every env, or with `spares` of both envs of each slot; otherwise as `call`."""
        self._check_running()
        return await self._calls.get_attr(name, spares=spares)

    async def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env. If this is cancelled, it is set all the same.

        Args:
            name: the name of the attribute; it is set on the wrapper that has it, else on the env itself.
            values: a list or tuple with an element for each slot; any other object is the value of all.

        Raises:
            ValueError: if a list has another length than there are slots.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        self._check_running()
        await self._calls.set_attr(name, values)

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """Raise a ValueError; see `NativeVectorEnv.model_field`, a live field of the models of native MuJoCo slots.

        Raises:
            ValueError: always, since single envs have a model each; with `backend="native"` the slots share one.
        """
        raise ValueError(
            f'model_field({name!r}): only with backend="native"; of single envs, `call` a method that changes the model'
        )

    async def get_state(self, slots: Iterable[int] | None = None) -> list[EnvState]:
        """Return the states of envs; with `set_state` any env of the same kind goes on from there, bit for bit.

        A state has everything that the next steps and automatic resets depend on: MuJoCo's data, counters of wrappers,
        the random generator, and a pending reset. Where the env or a wrapper is not Gymnasium's, it also has the
        numbers of the MuJoCo model, which those may change: all fields up to 64 KiB but meshes, textures and the like.
        It has neither observations nor positions in `seed_plan` and `autoreset_options`. An env that is not MuJoCo's,
        or a wrapper that Gymnasium does not have, must have `get_state()` and `set_state(state)`. If this is cancelled,
        no state is changed.

        With `spare_envs=True` a state has both envs of its slot, and which of them runs the episode. It also has the
        first observation and info of the episode that the other one has begun, and its number in `seed_plan` and
        `autoreset_options`. A reset that is under way is waited for. Such a state is for vector envs with spare envs
        and the same observation space.

        Args:
            slots: slot numbers, None for all.

        Returns:
            One state for each of `slots`, in that order; `aioenv.save` writes them to a file.

        Raises:
            ResumeError: if an env's state can't be read; the message names the wrapper or env that has no such methods.
                If a slot's episode was lost with its worker, until the next step or reset. With spare envs also if a
                slot's next episode can't begin.
            PendingCallError, EnvError, WorkerDied: as for `call`.
        """
        self._check_running()
        return await self._calls.get_state(slots)

    async def set_state(self, states: Iterable[EnvState], slots: Iterable[int] | None = None) -> None:
        """Set the states of envs to those of `get_state` or `aioenv.load`, from any slot, worker or process.

        A slot that had failed, or whose episode was over, can be stepped again, and no reset is needed before. No
        observation is returned: until the slot was stepped, `rollout` raises a ResetNeededError, and a reset of other
        slots has zeros or an old observation in its row. Images show the new state after the next step, and episode
        statistics leave out the episode. If this is cancelled, the states are set all the same, but a slot that had
        failed must have its state set again.

        Args:
            states: one for each of `slots`, in that order.
            slots: slot numbers, None for all.

        Raises:
            ValueError: if there are more or fewer states than slots.
            TypeError: if one is not an `EnvState`.
            ResumeError: if one is of another kind of env; its slot keeps its state, and the others' states are set. If
                one is of a slot with spare envs and there are none here, or the reverse; then none is set.
            EnvError: if an env raised, whose state is not known then: reset its slot. The others' states are set.
            PendingCallError, WorkerDied: as for `call`.
        """
        self._check_running()
        await self._calls.set_state(states, slots)

    # ------------------------------------------------------------ envs of several actors

    async def actor_rewards(self) -> npt.NDArray[np.float32] | None:
        """Return the reward of each actor in the last whole step, one actor a row.

        It outlasts an autoreset: until its first whole step, a new episode has the rewards of the one before. If this
        is cancelled, no state is changed.

        Returns:
            float32 of shape `(n_actors, num_envs)`; None if an env has no such rewards.

        Raises:
            ValueError: if envs have different numbers of actors; with `spare_envs=True`.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        self._check_running()
        if self._config.spares:
            raise ValueError(
                "actor_rewards: not with spare_envs=True, so far: where an episode begins, the last rewards are the "
                "other env's"
            )
        return await self._calls.actor_rewards()

    async def actor_ids(self, *, same_step: bool = True) -> tuple[ActorID, ...]:
        """Return the actor whose turn it is in each slot. If this is cancelled, no state is changed.

        Args:
            same_step: whether all envs must be in the same part of their step, so that one policy serves them all.

        Returns:
            `(step_key, agent_id)`, one a slot.

        Raises:
            OutOfStepError: if `same_step` is True and they are in different ones.
            TypeError: if an env has no actors.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        self._check_running()
        return await self._calls.actor_ids(same_step=same_step)

    async def is_actor_done(self) -> npt.NDArray[np.bool_]:
        """Return whether the actor whose turn it is has ended, bool of shape `(num_envs,)`.

        If this is cancelled, no state is changed.

        Raises:
            TypeError: if an env has no actors.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        self._check_running()
        return await self._calls.is_actor_done()

    # ------------------------------------------------------------ the timeline

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Collect a timeline, from now until the end of a `with` block over it, its `stop()`, or `close`::

            with envs.trace("run.json"):
                ...

        It shows when each worker and render worker stepped, reset, drew and waited; and when the loop waited for envs
        or images, sent, handled replies, and, between these, ran the policy. A span has the number of its step: step n
        leads to state n, of which the images n are. Open the file at https://ui.perfetto.dev, or sum it up
        with `aioenv trace run.json`. It is written at the end, also after an error; after a million spans it ends by
        itself.

        With the variable `AIOENV_TRACE=run.json` every vector env and render pool of the process is traced from its
        start to its close, the second one to run-2.json, and so on.

        Args:
            path: the JSON file; an existing one is overwritten.

        Raises:
            RuntimeError: if a timeline is being collected already, or the vector env is not started.
            ClosedError: if it is closed.
            OSError: if the file can't be written.
        """
        return self._trace_backend(self._check_running(), path)

    def _trace_backend(self, backend: Backend, path: str | os.PathLike[str]) -> Trace:
        """Trace the backend, its workers, and the render workers."""
        assert self._session is not None
        workers, drawing = self._session.workers, self._session.render_workers
        names = [f"{w.label}: {_slots(w.slots)}" for w in workers] + [w.label for w in drawing]

        def attach(trace: Trace | None) -> None:
            self._clock.trace(trace)
            backend.attach_trace(trace)
            for index, worker in enumerate((*workers, *drawing)):
                worker.trace(trace.tracks[index] if trace is not None else None)

        return self._start_trace(path, names, attach)


def _slots(slots: tuple[int, ...]) -> str:
    return f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]}-{slots[-1]}"
