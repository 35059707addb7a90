"""`NativeVectorEnv`: a `gymnasium.vector.VectorEnv`, Gymnasium's or yours, with the API of `AsyncVectorEnv`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.core.arguments import (
    check_cpu_affinity,
    check_num_envs,
    check_num_workers,
    check_on_timeout,
    check_preload,
    check_render,
    check_seconds,
    check_timeout,
    check_worker_env,
)
from aioenv.core.backend import Backend, Session
from aioenv.core.episode_tracker import check_episode_stats
from aioenv.core.results import StepResult
from aioenv.core.waits import Clock
from aioenv.core.worker_pool import WorkerPoolConfig, make_program, needed_by
from aioenv.inprocess.backend import RUN_IN, InProcessBackend
from aioenv.process.channel import check_channel
from aioenv.process.launch import check_start
from aioenv.rendering.pixels import with_pixel_states
from aioenv.requirements import require_batch
from aioenv.stats.episodes import EpisodeStats
from aioenv.vector_env import AsyncVectorEnv
from aioenv.worker.making import is_native_task, make_registered, refuse_wrappers, vector_entry_point, with_num_envs

if TYPE_CHECKING:
    from aioenv.process.restart_policy import RestartPolicy
    from aioenv.rendering.config import RenderConfig

__all__ = ["NativeVectorEnv", "vector_env_factory"]


class NativeVectorEnv(AsyncVectorEnv):
    """A vector env that steps all of its slots itself, behind the methods and the contract of `AsyncVectorEnv`.

    It lives in this process, on a thread of its own; steps that take less than 200 µs run on the loop. Or it is split
    over worker processes, each with one vector env of its share of the slots::

        async with NativeVectorEnv(CartPoleVectorEnv, 64) as envs:
            obs, info = await envs.reset(seed=0)
            obs, reward, terminated, truncated, info = await envs.step(actions)

    The vector env decides how episodes are reset (`metadata["autoreset_mode"]`), and how a seed affects each slot. The
    seed (an int, or a list of one a slot) and options of `reset` are passed on as they are. (Over workers an int seeds
    each share with `seed` plus its first slot.) Infos are returned as the env gives them, rewards as float64, flags as
    bool.

    The env is used by one thread at a time. With `run_in="auto"` two threads use it in turn: that of the loop, and its
    own, on which it is made, called and closed. An env with a `render_mode` stays on its own thread, since OpenGL
    contexts are tied to a thread; so does one with a `timeout_s`. Pass `run_in="thread"` for other envs that must not
    change threads.

    The slots are one env, so an exception fails all slots that were asked, until they are reset. A thread can't be
    killed: if the env hangs, `close` gives up after `grace_s`, with a warning. A worker process can be killed.

    Slots are stepped without others if the env has `step_some(actions, slots)`, as `NativeMujocoEnv` has (see the
    how-to page on vector envs of your own). If it has not, these methods raise a ValueError when they would step only
    some of its slots:

    - `send` takes all slots; over workers, all slots of some workers.
    - `pause` and `resume` take all slots of a worker together.
    - `step_at` and `episodes` take only envs of one slot a worker.

    `reset_at` is for an env that reads `options["reset_mask"]`; its seed stands in a list with one element a slot, None
    for the others. `episodes` is for an env whose `reset` takes such a mask and such a list. `render` without `render=`
    returns the images that the env draws itself, and raises a RenderError if the env has no render mode.

    In this process, a `rollout` has groups if the env has `step_some`: they step in turn while the policy runs. Else
    all slots are one group. Over workers a group is the slots of some workers. If the env has no `step_some` and keeps
    no copy, a rollout in this process begins with the arrays that the last `step` returned: don't write to them before.

    Args:
        make_vector_env: a function that is called with `num_envs` and returns a `gymnasium.vector.VectorEnv`.
        num_envs: the number of slots.
        num_workers: the number of processes to split it over; 0: it lives in this one.
        run_in: without workers, where steps run: "inline" (on the loop, however long they take), "thread", or "auto".
        copy: whether results are arrays of your own. With False they are the env's, valid until the next step (with
            workers: views into two batches used in turn).
        timeout_s: how long `reset`, `step`, `recv`, `render` and calls may wait, in seconds; None: without limit.
        on_timeout: with workers, see `AsyncVectorEnv`: "raise", "kill" or "restart".
        start: with workers, see `AsyncVectorEnv`; likewise `channel`, `preload`, `log_prefix`, `worker_env`,
            `cpu_affinity`.
        restart: with workers: start a worker again that died. Its slots come back truncated; with `resume` they go on
            as if it had not died, if the vector env has methods for its state.
        start_timeout_s: how long it may take to make the env, in seconds.
        render: draw images of every returned state while the next steps run. The vector env must have a MuJoCo `model`
            and `physics_states()` (see the how-to page on their images).
        pixels: make such images the observations, or one key of them.
        episode_stats, stats_prefix, check_numerics: see `AsyncVectorEnv`.

    Attributes:
        num_envs: the number of slots.
        autoreset_mode: the env's own, once it is started.

    Raises:
        ValueError: if an argument is not one of its values, or makes no sense without (or with) workers.
        TypeError: if `make_vector_env` is not callable; with workers, if it can't be pickled.
    """

    _inprocess: InProcessBackend | None = None

    def __init__(
        self,
        make_vector_env: Callable[..., VectorEnv[Any, Any, Any]],
        num_envs: int,
        *,
        num_workers: int = 0,
        run_in: Literal["auto", "inline", "thread"] = "auto",
        copy: bool = True,
        timeout_s: float | None = None,
        on_timeout: Literal["raise", "kill", "restart"] = "raise",
        start: Literal["forkserver", "spawn"] | None = None,
        channel: Literal["auto", "scatter", "streams"] = "auto",
        preload: Iterable[str] = (),
        restart: RestartPolicy | None = None,
        start_timeout_s: float = 60.0,
        log_prefix: str | None = None,
        worker_env: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
        render: RenderConfig | None = None,
        pixels: RenderConfig | None = None,
        cpu_affinity: Literal["spread"] | Sequence[int | Iterable[int]] | None = None,
        episode_stats: bool | EpisodeStats = False,
        stats_prefix: str | None = None,
        check_numerics: bool = False,
    ) -> None:
        self.num_envs = check_num_envs(num_envs)
        if not callable(make_vector_env):
            raise TypeError(
                f"make_vector_env: expected a function that makes a vector env, got {type(make_vector_env).__name__}; "
                "pass `lambda num_envs: ...`, not the env itself"
            )
        if run_in not in RUN_IN:
            raise ValueError(f"run_in: expected one of {', '.join(map(repr, RUN_IN))}, got {run_in!r}")
        self._timeout_s = check_timeout(timeout_s)
        self._on_timeout = check_on_timeout(on_timeout, restart)
        is_int = isinstance(num_workers, (int, np.integer)) and not isinstance(num_workers, bool)
        split = not (is_int and num_workers == 0)
        if split and run_in != "auto":
            raise ValueError(f"run_in={run_in!r}: with num_workers={num_workers} it runs in the workers")
        if not split and on_timeout != "raise":
            raise ValueError(f"on_timeout={on_timeout!r}: a thread can't be killed; use num_workers=1 or more")
        for name, given in (("restart", restart), ("cpu_affinity", cpu_affinity), ("worker_env", worker_env)):
            if not split and given is not None:
                raise ValueError(f"{name}: it is about worker processes; use num_workers=1 or more")
        if run_in == "inline" and timeout_s is not None:
            raise ValueError('timeout_s: with run_in="inline" a wait for the env can\'t end early; use run_in="thread"')
        self.closed = False
        self.copy = copy
        check_render(render, pixels)
        if pixels is not None:
            make_vector_env = with_pixel_states(make_vector_env, pixels)
        self._make_vector_env = make_vector_env
        self._run_in = run_in
        self._render_config, self._pixels_config = render, pixels
        self._must_reset = False
        self._clock = Clock()
        workers = check_num_workers(num_workers, self.num_envs) if split else 0
        self._config = WorkerPoolConfig(
            code=make_program([make_vector_env] * self.num_envs, workers) if split else None,
            num_workers=workers,
            start=check_start(start),
            channel=check_channel(channel),
            preload=check_preload(preload),
            needed=needed_by([make_vector_env]) if split else (),
            observation_mode="same",
            autoreset_mode=AutoresetMode.NEXT_STEP,  # not used: the vector env has its own
            start_timeout_s=check_seconds("start_timeout_s", start_timeout_s),
            log_prefix=log_prefix,
            worker_env=check_worker_env(worker_env, workers),
            find_sources=render is not None or pixels is not None,
            restart=restart,
            cpu_affinity=check_cpu_affinity(cpu_affinity),
            transport="frames",
            vectorized=True,
            check_numerics=bool(check_numerics),
            # last, see `AsyncVectorEnv`; the mode is set when the env is started
            episodes=check_episode_stats(episode_stats, stats_prefix, self.num_envs, AutoresetMode.NEXT_STEP),
        )
        self._episode_stats = self._config.episodes

    def _make_session(self) -> Session:
        if self._config.num_workers:
            return super()._make_session()
        self._inprocess = InProcessBackend(
            self._make_vector_env,
            self.num_envs,
            run_in=self._run_in,
            copy=self.copy,
            timeout_s=self._timeout_s,
            config=self._config,
            render=self._render_config,
            pixels=self._pixels_config,
        )
        return self._inprocess

    def _make_parts(self, session: Session, backend: Backend) -> None:
        info = session.env_info
        if self._config.num_workers:
            info.spec = with_num_envs(info.spec, self.num_envs)
        self.autoreset_mode = info.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        super()._make_parts(session, backend)

    @property
    def backend(self) -> Literal["auto", "workers", "in_process", "native"]:
        """ "native": the slots are one vector env, in this process or split over workers (see `runs`)."""
        return "native"

    @property
    def runs(self) -> str:
        """The place where the next step will run: "inline" (on the loop), "thread" or "workers"."""
        if self._inprocess is None:
            return "workers" if self._config.num_workers else self._run_in
        return "inline" if self._backend is not None and self._inprocess.steps_inline else "thread"

    def _step_inline(self, actions: Any, done: list[StepResult]) -> None:
        """Step on the thread of a blocking caller, while the loop is idle, into `done`; or leave it to the loop."""
        backend = self._inprocess
        if backend is None or self.closed or not backend.can_step_inline or backend.table.paused is not None:
            return
        wait = self._clock.envs.begin()
        try:
            backend.step_inline(actions, done)
        finally:
            wait.end()

    def _checked_actions(self, actions: Any) -> Any:
        """Return a checked copy of actions, for a vector env in this process that steps later."""
        assert self._inprocess is not None
        return self._inprocess.checked_actions(actions)

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """Return a live field of MuJoCo's model with values for each slot; write to it to change them::

            envs.model_field("body_mass")[[3, 5]] *= 1.5

        Each step and reset takes the field from this array, also in workers, which share its memory, and images that
        are drawn from states show it. So write while no request is in flight. A worker that is started again uses it as
        it is.

        Args:
            name: the name of a field of `MjModel` that can differ between slots; also "opt.gravity" and the like.

        Returns:
            `(num_envs, ...)`, of the field's own dtype.

        Raises:
            ValueError: if the vector env is not a `NativeMujocoEnv`, or there is no such field; in workers, if the env
                has taken the field itself.
            PendingCallError: if a slot has a request in flight.
            WorkerDied: if a worker is gone.
        """
        field = self._check_running().model_field(name)
        assert self._session is not None
        for pool in self._session.pools:
            pool.show_field(name, field)
        return field


def vector_env_factory(
    env: str | EnvSpec | Callable[..., Any], env_kwargs: Mapping[str, Any]
) -> Callable[..., VectorEnv[Any, Any, Any]]:
    """Check arguments of `make_vec(..., backend="native")`, and return the factory of the vector env.

    Raises:
        ValueError: if the env has no vectorized version.
    """
    if isinstance(env, EnvSpec) or (isinstance(env, str) and ":" not in env):
        spec = gymnasium.spec(env) if isinstance(env, str) else env
        refuse_wrappers(spec)
        if is_native_task(spec):
            require_batch()
        elif vector_entry_point(spec) is None:
            raise ValueError(
                f'backend="native": {spec.id} has no vector_entry_point: there is no vector env of it; use '
                'backend="workers", or pass a function that makes a gymnasium.vector.VectorEnv'
            )
    elif not isinstance(env, str):
        if not callable(env):
            raise TypeError(f"env: expected an id, an EnvSpec or a function that makes a vector env, got {env!r}")
        return partial(env, **env_kwargs) if env_kwargs else env
    return partial(make_registered, env, dict(env_kwargs))
