"""`NativeVectorEnv`: a `gymnasium.vector.VectorEnv`, be it Gymnasium's or yours, behind the API of `AsyncVectorEnv`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.engine.arguments import (
    check_num_workers,
    check_on_timeout,
    check_seconds,
    check_timeout,
    check_worker_env,
    pickle_factories,
)
from aioenv.engine.calls import in_order
from aioenv.engine.fleet import FleetConfig
from aioenv.engine.images import stack_images
from aioenv.engine.imports import modules_needed
from aioenv.engine.inline import RUN_IN, Solo
from aioenv.engine.pictures import as_grid, check_mode
from aioenv.engine.record import Rollout
from aioenv.engine.results import ResetResult, StepResult
from aioenv.engine.rollout import Policy
from aioenv.engine.seeds import split_reset_options
from aioenv.engine.session import Session
from aioenv.engine.snapshot import EnvState
from aioenv.engine.waits import Clock
from aioenv.errors import ResumeError
from aioenv.host.vector_access import is_native_task, make_registered
from aioenv.vector_env import AsyncVectorEnv
from aioenv.workers.channel import check_channel
from aioenv.workers.launch import check_start

__all__ = ["NativeVectorEnv", "vector_env_factory"]


class NativeVectorEnv(AsyncVectorEnv):
    """A vector env that steps all of its slots itself, behind the methods and the contract of `AsyncVectorEnv`.

    It lives in this process, on a thread of its own; steps that are shorter than a hop to that thread, or than 200 µs,
    are made on the loop. Or it is split over worker processes, each with one vector env of its share of the slots.

        async with NativeVectorEnv(CartPoleVectorEnv, 64) as envs:
            obs, info = await envs.reset(seed=0)
            obs, reward, terminated, truncated, info = await envs.step(actions)

    What it is made of decides how episodes are reset (`metadata["autoreset_mode"]`), and what a seed does to each slot:
    seed and options of `reset` are passed on as they are. (Over workers an int seeds each share with `seed` plus its
    first slot.) Infos come as the env gives them, rewards as float64, flags as bool.

    The env is used by one thread at a time. With `run_in="auto"` these may be two in turn: the loop's, and its own,
    where it is made, called and closed. An env with a `render_mode` stays on its own thread, since what draws is tied
    to it; so does one with a `timeout_s`. Give `run_in="thread"` to others that must not change threads.

    The slots are one env, so what happens to it happens to all of them: `send` takes whole vector envs (of a worker),
    an exception fails all of its slots until they are reset, and what hangs on the thread can't be killed: `close`
    leaves the thread to itself then, after `grace_s`, with a warning. A process can be killed.

    Args:
        make_vector_env: called with `num_envs`, gives a `gymnasium.vector.VectorEnv` of so many slots.
        num_envs: how many slots.
        num_workers: over how many processes to split it; 0: it lives in this one.
        run_in: without workers, where steps are made: "inline" (on the loop, whatever it takes), "thread", or "auto".
        copy: whether results are arrays of your own; with False they are what the env gives (or, with workers, views
            into two batches used in turn), valid until the next step.
        timeout_s: how long `reset`, `step`, `recv`, `render` and calls may wait, in seconds; None for ever.
        on_timeout: with workers, see `AsyncVectorEnv`: "raise" or "kill".
        start: with workers, see `AsyncVectorEnv`; likewise `channel`, `preload`, `log_prefix`, `worker_env`.
        start_timeout_s: how long it may take to make it, in seconds.

    Attributes:
        num_envs: how many slots there are.
        autoreset_mode: the env's own, once it is started.

    Raises:
        ValueError: if an argument is none of the values it may have, or makes no sense without (or with) workers.
        TypeError: if `make_vector_env` is not callable; with workers, if it can't be pickled.
    """

    _solo: Solo | None = None

    def __init__(
        self,
        make_vector_env: Callable[..., VectorEnv[Any, Any, Any]],
        num_envs: int,
        *,
        num_workers: int = 0,
        run_in: str = "auto",
        copy: bool = True,
        timeout_s: float | None = None,
        on_timeout: str = "raise",
        start: str | None = None,
        channel: str = "auto",
        preload: Iterable[str] = (),
        start_timeout_s: float = 60.0,
        log_prefix: str | None = None,
        worker_env: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise ValueError(f"num_envs: expected a positive int, got {num_envs!r}")
        if not callable(make_vector_env):
            raise TypeError(
                f"make_vector_env: expected a function that makes a vector env, got {type(make_vector_env).__name__}; "
                "pass `lambda num_envs: ...`, not the env itself"
            )
        if run_in not in RUN_IN:
            raise ValueError(f"run_in: expected one of {', '.join(map(repr, RUN_IN))}, got {run_in!r}")
        self._timeout_s = check_timeout(timeout_s)
        self._on_timeout = check_on_timeout(on_timeout, None)
        split = not (isinstance(num_workers, int) and num_workers == 0)  # False is no number of workers, but 0
        if split and run_in != "auto":
            raise ValueError(f"run_in={run_in!r}: with num_workers={num_workers} it runs in the workers")
        if not split and on_timeout != "raise":
            raise ValueError(f"on_timeout={on_timeout!r}: a thread can't be killed; use num_workers=1 or more")
        if run_in == "inline" and timeout_s is not None:
            raise ValueError('timeout_s: with run_in="inline" nobody can stop waiting for the env; use run_in="thread"')
        self.num_envs = int(num_envs)
        self.closed = False
        self.copy = copy
        self._make_vector_env = make_vector_env
        self._run_in = run_in
        self._render_config = None
        self._must_reset = False
        self._clock = Clock()
        workers = check_num_workers(num_workers, self.num_envs) if split else 0
        self._config = FleetConfig(
            factories=pickle_factories([make_vector_env]) * self.num_envs if split else [],
            num_workers=workers,
            start=check_start(start),
            channel=check_channel(channel),
            preload=(preload,) if isinstance(preload, str) else tuple(preload),
            needed=modules_needed([make_vector_env]) if split else (),
            observation_mode="same",
            autoreset_mode=AutoresetMode.NEXT_STEP,  # not used: the vector env has its own
            start_timeout_s=check_seconds("start_timeout_s", start_timeout_s),
            log_prefix=log_prefix,
            worker_env=check_worker_env(worker_env, workers),
            find_sources=False,
            transport="frames",
            vectorized=True,
        )

    def _make_session(self) -> Session:
        if self._config.num_workers:
            return super()._make_session()
        self._solo = Solo(
            self._make_vector_env,
            self.num_envs,
            run_in=self._run_in,
            copy=self.copy,
            timeout_s=self._timeout_s,
            start_timeout_s=self._config.start_timeout_s,
        )
        return cast(Session, self._solo)  # which it stands in for, as well as for a fleet and a schedule

    async def _ensure_started(self) -> Self:
        await super()._ensure_started()
        self.autoreset_mode = self.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        return self

    @property
    def runs(self) -> str:
        """Where the next step will be made: "inline" (on the loop), "thread" or "workers"."""
        if self._solo is None:
            return "workers" if self._config.num_workers else self._run_in
        return "inline" if self._solo.schedule is not None and self._solo.steps.inline else "thread"

    # ------------------------------------------------------------ whole batches

    async def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> ResetResult:
        """Begin an episode in every slot, or in those that `options["reset_mask"]` names, if the env knows of masks.

        If this is cancelled, or times out, the env does reset all the same; `recv` takes the result.

        Args:
            seed: passed to the vector env.
            options: likewise.
            timeout_s: instead of the constructor's, in seconds.

        Raises:
            PendingCallError: if a slot has a request in flight. Nothing was done.
            EnvError: if the env raised, or if it did not look at the mask and so has reset every slot.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed.
        """
        if (solo := self._here) is None:
            return await super().reset(seed=seed, options=options, timeout_s=timeout_s)
        mask, rest = split_reset_options(options, self.num_envs)
        wait = self._clock.envs.begin()
        try:
            return await solo.reset(seed, mask, rest, check_timeout(timeout_s))
        finally:
            wait.end()

    async def step(self, actions: Any, *, timeout_s: float | None = None) -> StepResult:
        """Step every slot; see `AsyncVectorEnv.step`.

        A step that is made on the loop can't be cancelled while it is made; one that is cancelled in the loop's turn
        after it waits for `recv`, as any other. An exception of the env is an EnvError of all of its slots.
        """
        solo = self._solo
        if solo is None:
            return await super().step(actions, timeout_s=timeout_s)
        self._running  # noqa: B018 (checks who calls, and when)
        clock = self._clock
        wait = clock.envs.begin()
        try:
            result = solo.step_now(actions) if timeout_s is None else None
            if result is None:
                result = await solo.step(actions, timeout_s=check_timeout(timeout_s))
            elif solo.is_due():
                await solo.turn(result)
            clock.env_steps += self.num_envs
            return result
        finally:
            wait.end()

    async def render(self, mode: str | None = None) -> Any:
        """What the env draws of the state that it is in; other than `AsyncVectorEnv` nothing is drawn beforehand.

        If this is cancelled, it is drawn all the same.

        Args:
            mode: "grid" for one picture of all.

        Returns:
            uint8 of shape `(num_envs, height, width, 3)`, or a tuple where the env's images differ in shape.

        Raises:
            RenderError: if the env has no render mode.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        if (solo := self._here) is None:
            return await super().render(mode)
        check_mode(mode)
        wait = self._clock.images.begin()
        try:
            images = await solo.render()
        finally:
            wait.end()
        images = images if isinstance(images, np.ndarray) else stack_images(images)
        return images if mode is None else as_grid(images)

    # ------------------------------------------------------------ some slots, whoever is first

    def send(self, actions: Any, slots: Iterable[int] | None = None) -> None:
        """Send actions to whole vector envs: `slots` are all there are, or all of some workers.

        Never blocks for longer than the loop may be kept (see the class). Otherwise as `AsyncVectorEnv.send`.

        Raises:
            ValueError: if some slots of a vector env are missing. Nothing was sent.
            ActionError, PendingCallError, EnvError, WorkerDied: as for `step`. Nothing was sent.
        """
        if (solo := self._here) is not None:
            solo.send(actions, slots)
            self._clock.env_steps += self.num_envs
            return
        if slots is not None:
            slots = self._running.table.named(slots)
            for member, order in self._running.fleet.shares(slots):
                if len(order) < member.stop - member.start:
                    raise ValueError(
                        f"send: slots {member.start} to {member.stop - 1} are one vector env, which steps all of them "
                        f"at once, got {np.sort(slots[order]).tolist()} of them; send to all, use more workers, "
                        'or use backend="workers", which steps slots alone'
                    )
        super().send(actions, slots)

    def send_reset(
        self,
        slots: Iterable[int] | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin episodes; some slots of a vector env only if it knows of `options["reset_mask"]` (see `reset`).

        Never blocks for longer than the loop may be kept. Otherwise as `AsyncVectorEnv.send_reset`.
        """
        if (solo := self._here) is None:
            super().send_reset(slots, seed=seed, options=options)
            return
        if options is not None and "reset_mask" in options:
            raise ValueError('send_reset: name the slots instead of options["reset_mask"]')
        solo.send_reset(slots, seed, options)

    # recv, ready, outstanding and stats are AsyncVectorEnv's

    async def rollout(self, policy: Policy, steps: int, groups: int = 2) -> Rollout:
        """Not to be had: its slots can't be split into groups that step while the others' policy runs.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            'rollout: a vector env steps all of its slots at once; step() it in a loop, or use backend="workers"'
        )

    def pause(self, slots: int | Iterable[int]) -> None:
        """Not to be had: none of its slots is stepped without the others.

        Raises:
            ValueError: always.
        """
        self._refuse_one("pause")

    async def step_at(self, slot: int, action: Any) -> StepResult:
        """Not to be had, as `pause`."""
        self._refuse_one("step_at")

    async def reset_at(
        self, slot: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult:
        """Not to be had, as `pause`."""
        self._refuse_one("reset_at")

    def _refuse_one(self, name: str) -> NoReturn:
        raise ValueError(f'{name}: a vector env steps all of its slots at once; backend="workers" steps them alone')

    # ------------------------------------------------------------ calls

    async def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of the vector env, or read an attribute: one result a slot.

        If it has a method `call`, as Gymnasium's SyncVectorEnv, that is asked. Otherwise the method or attribute is the
        vector env's own: an array, list or tuple of `num_envs` has one result a slot, anything else is every slot's.

        If this is cancelled, it is called all the same; the result is dropped.

        Raises:
            PendingCallError: if a slot has a request in flight. Nothing was called.
            EnvError: if it raised.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed. The call goes on; the result is dropped.
        """
        if (solo := self._here) is None:
            return await super().call(name, *args, **kwargs)
        return await solo.call(None, name, args, kwargs)

    async def call_at(self, slots: int | Iterable[int], name: str, *args: Any, **kwargs: Any) -> Any:
        """Read an attribute of one slot, or of some; a method only if the vector env has a list `envs`. See `call`."""
        if (solo := self._here) is None:
            return await super().call_at(slots, name, *args, **kwargs)
        if isinstance(slots, (int, np.integer)):
            return (await solo.call([int(slots)], name, args, kwargs))[0]
        numbers = solo.table.named(slots)
        return in_order(numbers, await solo.call(numbers.tolist(), name, args, kwargs))

    async def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute: by the vector env's own `set_attr`, if it has one, else one value for all slots.

        Raises:
            ValueError: if a list has another length than there are slots.
            EnvError: if the env raised, or has one such attribute for all slots and the values differ.
            PendingCallError, WorkerDied: as for `call`.
        """
        if (solo := self._here) is None:
            await super().set_attr(name, values)
        else:
            await solo.set_attr(name, values)

    async def get_state(self, slots: Iterable[int] | None = None) -> list[EnvState]:
        """Not to be had.

        Raises:
            ResumeError: always.
        """
        self._refuse_states()

    async def set_state(self, states: Iterable[EnvState], slots: Iterable[int] | None = None) -> None:
        """Not to be had.

        Raises:
            ResumeError: always.
        """
        self._refuse_states()

    def _refuse_states(self) -> NoReturn:
        raise ResumeError(f'{self!r}: a vector env does not tell the states of its slots; use backend="workers"')

    @property
    def _here(self) -> Solo | None:
        """The vector env in this process, if that is where it is, started, open, and used from its own loop."""
        self._running  # noqa: B018 (checks it)
        return self._solo


def vector_env_factory(
    env: str | EnvSpec | Callable[..., Any], env_kwargs: Mapping[str, Any]
) -> Callable[..., VectorEnv[Any, Any, Any]]:
    """The factory of `make_vec(..., backend="native")`, its arguments checked.

    Raises:
        ValueError: if the env has no vectorized version.
    """
    if isinstance(env, EnvSpec) or (isinstance(env, str) and ":" not in env):
        spec = gymnasium.spec(env) if isinstance(env, str) else env
        if spec.vector_entry_point is None and not is_native_task(spec):
            raise ValueError(
                f'backend="native": {spec.id} has no vector_entry_point, nobody has written it as one vector env; use '
                'backend="workers", or pass a function that makes a gymnasium.vector.VectorEnv'
            )
    elif not isinstance(env, str):
        if not callable(env):
            raise TypeError(f"env: expected an id, an EnvSpec or a function that makes a vector env, got {env!r}")
        return partial(env, **env_kwargs) if env_kwargs else env
    return partial(make_registered, env, dict(env_kwargs))
