"""`AsyncVectorEnv`: many Gymnasium envs in worker processes, stepped with `await`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gymnasium import Env, Space
from gymnasium.vector import AutoresetMode

from aioenv.core.actors import Actors
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
from aioenv.core.calls import Calls
from aioenv.core.episodes import Episodes, check_episode_stats
from aioenv.core.images.pictures import Pictures
from aioenv.core.imports import needed_by
from aioenv.core.lifecycle import Lifecycle
from aioenv.core.programs import make_program
from aioenv.core.requests import BATCHES_IN_TURN, BATCHES_KEPT
from aioenv.core.results import Ready, ResetResult, StepResult, WorkerInfo
from aioenv.core.states import States
from aioenv.core.waits import Clock
from aioenv.core.worker_pool import WorkerPoolConfig
from aioenv.creator import place_creators
from aioenv.process.channel import check_channel
from aioenv.process.launch import check_start
from aioenv.rendering.pixels import with_pixels
from aioenv.rollout.episodes import Numbered
from aioenv.rollout.one_slot import OneSlot
from aioenv.rollout.pausing import Pausing
from aioenv.rollout.rollout import Rollouts
from aioenv.rollout.worker_backend import RememberedState
from aioenv.spaces.autoreset import parse_mode
from aioenv.spaces.seeding import check_options, split_reset_options
from aioenv.stats.episodes import EpisodeStats
from aioenv.stats.sharing import collected
from aioenv.worker.boot import IGNORABLE

if TYPE_CHECKING:
    from aioenv.process.restart import RestartPolicy
    from aioenv.rendering.config import RenderConfig

__all__ = ["AsyncVectorEnv", "WorkerInfo"]


class AsyncVectorEnv(Pictures, Rollouts, Numbered, Pausing, OneSlot, Calls, States, Actors, Episodes, Lifecycle):
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
        self._remembered = RememberedState()
        with collected() as stats:
            code = make_program(env_fns, workers, live=debug)
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
        schedule = self._running
        mask, rest = split_reset_options(options, self.num_envs)
        wait = self._clock.envs.begin()
        try:
            if schedule.table.paused is not None:
                return await self._live_of(schedule).reset(seed, mask, rest, check_timeout(timeout_s))
            return await schedule.reset(seed, mask, rest, check_timeout(timeout_s))
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
        schedule, wait = self._running, self._clock.envs.begin()
        try:
            if schedule.table.paused is not None:
                return await self._live_of(schedule).step(actions, check_timeout(timeout_s))
            return await schedule.step(actions, timeout_s=check_timeout(timeout_s))
        finally:
            wait.end()

    # ------------------------------------------------------------ some slots, whoever is first

    def send(self, actions: Any, slots: Iterable[int] | None = None) -> None:
        """Send actions to some slots; never blocks, and returns nothing: `recv` or `ready` give the results.

        Args:
            actions: a batch of actions, one for each of `slots` in that order.
            slots: slot numbers, None for all.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied: as for `step`. Nothing was sent.
        """
        schedule = self._running
        if isinstance(slots, Iterable) and not isinstance(slots, np.ndarray):
            slots = list(slots)
        with self._clock.envs:  # a vector env in this process may step here and now
            schedule.send(actions, slots)

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
        schedule = self._running
        check_options(options)
        if options is not None and "reset_mask" in options:
            raise ValueError('send_reset: name the slots instead of options["reset_mask"]')
        with self._clock.envs:
            schedule.send_reset(slots, seed, options)

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
        schedule = self._running
        wait = self._clock.envs.begin()
        try:
            return await schedule.recv(min_slots, max_slots, deadline_s)
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
        return self._running.outstanding
