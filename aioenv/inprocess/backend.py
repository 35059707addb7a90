"""`InProcessBackend`: steps one `gymnasium.vector.VectorEnv` in this process, without workers and frames.

The env lives on a thread of its own. Steps and resets that take less than the time for which the loop may be blocked
run inline, on the loop. An inline step saves a task, a future and a thread switch. Only one thread at a time uses the
env.

Rollouts and numbered episodes step groups of its slots by turns.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from aioenv.assign import spread
from aioenv.core.backend import InitialState, StepOutcome
from aioenv.core.episode_tracker import InProcessEpisodeTracker
from aioenv.core.images import ResultPixelRenderer
from aioenv.core.results import Ready, ResetResult, StepResult
from aioenv.core.session import NO_PHYSICS, make_step_pool
from aioenv.core.slots import SlotState, SlotTable
from aioenv.core.timeouts import images_late
from aioenv.core.worker_pool import WorkerPoolConfig
from aioenv.errors import (
    ClosedError,
    EnvError,
    NoAsyncCallError,
    PendingCallError,
    RenderError,
    StepTimeout,
    WorkerStartError,
)
from aioenv.inprocess.owned_env import END_S, SINGLE_ARRAY, OwnedEnv, ends_program
from aioenv.inprocess.requests import InProcessRequest, InProcessRequests, gather_infos, owned
from aioenv.ipc.messages import reason_of, traceback_of
from aioenv.platform import INTERRUPTING, HeldSignals
from aioenv.process.async_resource import gather_internal
from aioenv.process.env_thread import YIELD_AFTER_S, RunTimes, yield_to_loop
from aioenv.rendering.pixels import PixelsRefused, PixelStates, replace_states
from aioenv.rendering.step_images import StepImages
from aioenv.spaces.infos import Columns, merge_infos
from aioenv.spaces.layout import Arrays, Layout, batch_space
from aioenv.spaces.seeding import normalize_seed
from aioenv.speedups import within
from aioenv.state.render_source import find_physics
from aioenv.worker.making import make_vector_env
from aioenv.worker.vector_access import (
    CheckedNumerics,
    VectorCalls,
    has_one_generator,
    refuse_some,
    steps_some,
    take_observations,
    with_rows,
)

if TYPE_CHECKING:
    from aioenv.core.backend import ResultObserver
    from aioenv.process.supervisor import Worker
    from aioenv.rendering.config import RenderConfig
    from aioenv.rendering.step_pool import StepRenderPool
    from aioenv.tracing.timeline import Trace

__all__ = ["RUN_IN", "InProcessBackend", "InProcessGroup", "InProcessRollout"]


Slots = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class InProcessRollout:
    """The backend of a rollout in this process (see `RolloutBackend`).

    Args:
        backend: the backend of the env.
    """

    def __init__(self, backend: InProcessBackend) -> None:
        self._backend = backend

    def split(self, groups: int, *, whole_workers: bool) -> list[InProcessGroup]:
        """Split the slots that are not paused into so many groups, or as many as there are slots.

        There is one group if the env steps all slots at once, or if a slot's results depend on the slots that are
        stepped with it.
        """
        live = self._backend.table.active
        groups = min(groups, len(live)) if self._backend.splits else 1
        return [self._backend.group(live[start:stop]) for start, stop in spread(len(live), groups)]

    async def look(self, *, pending_reset: bool) -> InitialState:
        """Get the latest observations from the env (see `RolloutBackend.look`)."""
        backend = self._backend
        await backend.drain()
        value = await backend.result(backend.start_read_obs("rollout"))
        slots = np.arange(backend.num_envs)
        resets = backend.last_ended() if pending_reset else np.zeros(len(slots), np.bool_)
        return InitialState(slots, *backend.split_obs(value.obs), resets)

    def sent(self) -> None:
        """Do nothing (see `RolloutBackend.sent`)."""

    def ended(self, state: InitialState | None) -> None:
        """Do nothing (see `RolloutBackend.ended`): asking this env is as fast as finding out whether to ask."""

    def merge(self, infos: Sequence[Any], *, by_slot: bool = False) -> dict[str, Any]:
        """Merge infos of groups (see `RolloutBackend.merge`); an info of all slots is given as it is."""
        n = self._backend.num_envs
        pieces = [piece for piece in infos if not isinstance(piece, Columns)]
        if len(pieces) == 1 and len(pieces[0][1]) == n:
            info = dict(pieces[0][0])
        else:
            info = gather_infos(pieces, n, [slots for _, slots in pieces], n)
        return {**info, **merge_infos([piece for piece in infos if isinstance(piece, Columns)], n)}


class InProcessGroup:
    """Some slots of an env in this process (see `SlotGroup`).

    Args:
        backend: the backend of the env.
        slots: ascending; all of them, if the env can't step some.
    """

    def __init__(self, backend: InProcessBackend, slots: Slots) -> None:
        self.slots = slots
        self.slots.flags.writeable = False
        self._backend = backend
        self._request: InProcessRequest | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a request was sent whose result was not received yet."""
        return self._request is not None

    def send(self, actions: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
        """Step all slots (see `SlotGroup.send`); a step that runs inline is over when this returns."""
        arrays, objects = self._backend.actions.take_apart(actions, len(self.slots))
        self.send_arrays(arrays, objects, "rollout")
        return arrays, objects

    def send_arrays(self, arrays: Arrays, objects: Sequence[Sequence[Any]], name: str) -> None:
        """Step all slots, with actions that were taken apart (see `SlotGroup.send_arrays`)."""
        backend = self._backend
        # the env gets arrays of its own: it may write to them
        whole = with_rows(backend.actions, backend.num_envs, self.slots.tolist(), arrays, objects)
        self._request = backend.start_step(whole, self.slots, name)

    def send_reset(
        self,
        slots: Slots,
        seeds: Mapping[int, int | None] | None = None,
        options: dict[str, Any] | None = None,
        name: str = "rollout",
        *,
        automatic: bool = False,
    ) -> None:
        """Reset some of the slots (see `SlotGroup.send_reset`); there are no options of automatic resets."""
        self._request = self._backend.start_reset(slots, self._backend.seeds_of(seeds or {}), options, name)

    async def recv(self) -> StepOutcome:
        """Wait for the result (see `SlotGroup.recv`); an exception of the env is an error of all slots asked."""
        request, self._request = self._request, None
        assert request is not None
        backend, slots = self._backend, request.slots
        n = len(slots)
        reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        try:
            value = await backend.result(request)
        except EnvError as error:
            layout = backend.observations
            valid = np.zeros(n, np.bool_)
            return StepOutcome(layout.zeros(n), layout.no_objects(n), reward, terminated, truncated, valid, [], error)
        if isinstance(value, StepResult):
            reward, terminated, truncated = value.reward[slots], value.terminated[slots], value.truncated[slots]
        obs, objects = backend.split_obs(value.obs)
        if n < backend.num_envs:
            obs = [array[slots] for array in obs]
            objects = [[column[slot] for slot in slots.tolist()] for column in objects]
        infos = [(value.info, slots)]
        return StepOutcome(obs, objects, reward, terminated, truncated, None, infos, None)

    def close(self) -> None:
        """Do nothing (see `SlotGroup.close`): a group keeps no memory."""

    def abandon(self) -> None:
        """Leave the request in flight, if any, to `recv` of the vector env (see `SlotGroup.abandon`)."""
        request, self._request = self._request, None
        if request is not None:
            self._backend.abandon_request(request)


Result = TypeVar("Result", StepResult, ResetResult)

_log = logging.getLogger("aioenv")

RUN_IN = ("auto", "inline", "thread")
_ALL = slice(None)
_NOTHING_LOST = (
    "nothing is lost: recv() takes it when it is there, and a later step() or reset() waits for it and drops it"
)


class InProcessBackend:
    """Start, step, call and close one vector env in this process.

    Args:
        factory: called with `num_envs`, makes the vector env.
        num_envs: the number of slots.
        run_in: "inline", "thread", or "auto" to choose by measured run times.
        copy: whether results must be in arrays of the caller's own.
        timeout_s: the limit of any wait, in seconds; None for no limit.
        config: how long the factory may take, and how render workers are started.
        render: how to draw images of every result; None to draw none.
        pixels: how to draw the states that `factory` gives as observations (see `PixelStates`); None if it gives none.

    Attributes:
        table: the states of the slots.
        images: draws images of results; None if no images were asked for.
        draws: whether images are drawn of results or observations.
        actions, observations: the layouts of the single spaces.
        episodes: counts episodes; None if they are not counted.
        steps_some: whether the env can step some of its slots.
        splits: whether a step of some slots gives them the same results as a step of all.
        any_thread: whether any thread may step the env.
        kind: the class name of the env, for messages.
    """

    history = None  # there is no worker whose slots could be resumed
    spares = None
    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
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
        self._pool: StepRenderPool | None = None
        self._pixels_pool: StepRenderPool | None = None
        self._all_slots = np.arange(num_envs)
        self._env = OwnedEnv(num_envs, inline=run_in == "inline")
        self._last_yield_s = 0.0  # when the loop could last run other tasks, by `perf_counter`
        self.table = SlotTable(num_envs, must_reset=False)
        self.images: StepImages | None = None
        self._requests = InProcessRequests(self.table, num_envs, self._error)
        self._closing = False
        self.episodes: InProcessEpisodeTracker | None = None
        self.backend: InProcessBackend | None = None  # itself, once it is started

    @property
    def env_info(self) -> Self:
        """The spaces and metadata of the env."""
        return self

    @property
    def workers(self) -> Sequence[Worker]:
        """The worker processes: there are none."""
        return ()

    # ------------------------------------------------------------ start and end

    async def start(self) -> None:
        """Make the env on its thread, and start the render workers. If that fails or is cancelled, nothing is left.

        Raises:
            WorkerStartError: if the factory raised, took too long, or made something else.
            RenderError: if images were asked for and can't be drawn.
            ValueError: if pixels were asked for that the env does not have.
        """
        try:
            await self._env.start(self._make_env, self._config.start_timeout_s)
        except WorkerStartError as exc:
            if isinstance(exc.__cause__, PixelsRefused):
                raise ValueError(str(exc.__cause__)) from None
            raise
        try:
            self._describe(self._env.env)
            if self._pixels is not None:
                await self._start_pixel_renderer(self._pixels)
            if self._render is not None:
                await self._start_images(self._render)
        except GeneratorExit:  # the loop was closed
            self.abandon()
            raise
        except BaseException:
            await self.close(END_S)
            raise
        self.backend = self

    def _make_env(self) -> Any:
        env = make_vector_env(self._factory, self.num_envs)
        if self._config.check_numerics:
            env = CheckedNumerics(env)
        if self.draws:
            self._env.physics = find_physics(env)
        return env

    def _describe(self, env: Any) -> None:
        """Read the spaces and abilities of the env."""
        self.single_observation_space, self.observation_space = env.single_observation_space, env.observation_space
        self.single_action_space, self.action_space = env.single_action_space, env.action_space
        self.metadata, self.spec, self.render_mode = dict(env.metadata), env.spec, env.render_mode
        mode = self.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self.table.must_reset = mode is AutoresetMode.DISABLED
        self.steps_some = steps_some(env)
        self.splits = self.steps_some and not has_one_generator(env)
        # an env that draws is tied to its thread, and only a thread can be waited for with a timeout
        adaptive = self._run_in == "auto" and self.render_mode is None and self._timeout_s is None
        self.any_thread = adaptive and not self.draws and getattr(env, "any_thread", False) is True
        while isinstance(env, (CheckedNumerics, PixelStates)):
            env = env.env
        self.kind = type(env).__name__
        if self._config.episodes is not None:
            self.episodes = InProcessEpisodeTracker(self._config.episodes, mode, self.num_envs)
            self._requests.episodes = self.episodes
        self.actions = Layout(self.single_action_space, bounded=True)
        plain = isinstance(self.single_action_space, SINGLE_ARRAY)
        self._action_dtype = self.actions.leaves[0].dtype if plain else None
        self._action_shape = (self.num_envs, *self.actions.leaves[0].shape) if plain else None
        inline = None if adaptive else self._run_in == "inline"
        self._env.configure(self.actions, inline=inline, checks_obs=self._pixels is not None)
        self.observations = self._env.layout

    async def _start_images(self, render: RenderConfig) -> None:
        """Start the render workers that draw every result from the states of the env."""
        if self._env.physics is None:
            raise RenderError(NO_PHYSICS)
        self._pool = make_step_pool([self._env.physics.source] * self.num_envs, render, self._config, self._timeout_s)
        await self._pool.start()
        table = self.table
        self.images = self._requests.images = StepImages(self.num_envs, self._pool, render.max_in_flight)
        self.images.paused = lambda: table.paused

    async def _start_pixel_renderer(self, pixels: RenderConfig) -> None:
        """Start the render workers that draw observations, and replace the observation spaces by the user's."""
        assert self._env.physics is not None
        sources = [self._env.physics.source] * self.num_envs
        self._pixels_pool = make_step_pool(sources, pixels, self._config, self._timeout_s)
        await self._pixels_pool.start()
        key, space = replace_states(self.single_observation_space, pixels)
        self.single_observation_space, self.observation_space = space, batch_space(space, self.num_envs)
        self.observations = Layout(space)
        self._requests.pixel_renderer = ResultPixelRenderer(
            self._pixels_pool, key, lambda exc: self._error(exc, f"it could not be drawn: {exc}")
        )

    @property
    def pools(self) -> list[StepRenderPool]:
        """The pools that draw states, for `render` and for observations."""
        return [pool for pool in (self._pool, self._pixels_pool) if pool is not None]

    @property
    def render_workers(self) -> Sequence[Worker]:
        """The workers of the pools."""
        return [worker for pool in self.pools for worker in pool.workers]

    async def close(self, grace_s: float) -> None:
        """Close the env, and end its thread; waits for results end with a ClosedError.

        Args:
            grace_s: how long the env may take for its current work and its close, in seconds. After that the thread
                is left running, since it can't be killed; it closes the env when its work is done.
        """
        try:
            self._closing = True
            self._requests.close()
            if self.images is not None:
                self.images.fail_all(ClosedError("the vector env was closed"))
        finally:  # an error above must leave neither a process nor a thread
            try:
                self._env.end()
            finally:
                await gather_internal(*(pool.close() for pool in self.pools))
            if not await self._env.join(grace_s):
                _log.warning(
                    "the vector env has not ended within grace_s=%s: a thread can't be killed, so it is left to itself "
                    "(it is a daemon, and does not keep the program from ending); with num_workers=1 the env lives in "
                    "a process, which can be killed",
                    grace_s,
                )

    def abandon(self) -> None:
        """Close the env without waiting for it."""
        self._closing = True
        self._env.end()
        for pool in self.pools:
            pool.abandon()
        self._env.detach()

    # ------------------------------------------------------------ whole batches

    def checked_actions(self, actions: Any) -> Any:
        """Return a checked copy of a batch of actions.

        Raises:
            ActionError: if they don't fit the action space.
        """
        if type(actions) is np.ndarray and actions.shape == self._action_shape and actions.dtype == self._action_dtype:
            layout, copied = self.actions, actions.copy()
            if layout.ranges and not (layout.fast_range and within(copied, *layout.fast_range)):  # type: ignore[misc]
                layout.check_ranges([copied])
            return copied
        return self.actions.assemble(*self.actions.take_apart(actions, self.num_envs))

    async def step(self, actions: Any, timeout_s: float | None = None) -> StepResult:
        """Step all slots that are not paused (see `AsyncVectorEnv.step`).

        A step that runs inline can't be cancelled while it runs. If it is cancelled while the loop runs other tasks
        afterwards, its result waits for `recv`, like any other.
        """
        if self.table.paused is not None:
            return await self._step_live(actions, timeout_s)
        checked = self.checked_actions(actions)
        if self._requests.abandoned:
            await self.drain(timeout_s)
        self.table.check_send(_ALL, "step", reset=False)
        self.table.note_steps(_ALL, self.num_envs)
        inline = self._runs_inline(self._env.step_times, timeout_s)
        if inline and not self.draws:
            value: StepResult | EnvError
            try:
                value = self._env.step(checked, self._copy, None)
            except BaseException as exc:
                value = self._failure(exc)
            if self.episodes is not None:
                self.episodes.note(self._all_slots, None, value)
            if self._env.last_step_s - self._last_yield_s > YIELD_AFTER_S:
                await self._yield_with_result(value)
            return self._value_of(value)
        request = self._requests.start(self._all_slots, awaited=True)
        self._run(request, inline, partial(self._env.step, checked, True, request.images))
        return await self.result(request, timeout_s)  # type: ignore[no-any-return]

    @property
    def steps_inline(self) -> bool:
        """Whether the next step is going to run on the loop."""
        return self._env.step_times.inline

    @property
    def can_step_inline(self) -> bool:
        """Whether `step_inline` may be called now."""
        thread = self._env.thread
        return self.any_thread and not self._requests.abandoned and (thread is None or not thread.jobs)

    def step_inline(self, actions: Any, done: list[StepResult]) -> None:
        """Step all slots on the caller's thread, while the loop is idle and can't run.

        Ctrl-C and other signals are held back until the step is over; then `recv` has the result, or `done`.

        Args:
            actions: a batch of actions.
            done: gets the result.
        """
        checked = self.checked_actions(actions)
        self.table.check_send(_ALL, "step", reset=False)
        self.table.note_steps(_ALL, self.num_envs)
        value: StepResult | EnvError | None = None
        try:
            with HeldSignals(*INTERRUPTING, twice=False):
                try:
                    value = self._env.step(checked, self._copy, None)
                except BaseException as exc:
                    value = self._failure(exc)
                if self.episodes is not None:
                    self.episodes.note(self._all_slots, None, value)
                if not isinstance(value, EnvError):
                    done.append(value)
        except BaseException:
            if value is not None:
                self._leave_to_recv(value)
            raise
        self._value_of(value)

    async def reset(
        self,
        seed: Any,
        mask: Bools | None,
        options: dict[str, Any] | None,
        timeout_s: float | None = None,
    ) -> ResetResult:
        """Reset all slots that are not paused, or those of a mask; the env gets seed and options as they are."""
        seed = normalize_seed(seed, self.num_envs, self.num_envs)
        if self.table.paused is not None:
            return await self._reset_live(seed, mask, options, timeout_s)
        if self._requests.abandoned:
            await self.drain(timeout_s)
        self.table.check_send(_ALL, "reset", reset=True)
        resets = self._all_slots if mask is None else np.flatnonzero(mask)
        self.table.note_reset(resets)
        request = self._requests.start(self._all_slots, awaited=True, resets=resets)
        inline = self._runs_inline(self._env.reset_times, timeout_s)
        self._run(request, inline, partial(self._env.reset, seed, mask, options, request.images))
        return await self.result(request, timeout_s)  # type: ignore[no-any-return]

    async def _step_live(self, actions: Any, timeout_s: float | None) -> StepResult:
        """Step the slots that are not paused; the env gives the last observations of the others."""
        whole = self.actions.assemble(*self.actions.take_apart(actions, self.num_envs, self.table.active))
        await self.drain(timeout_s)
        if not len(self.table.active):
            await asyncio.sleep(0)  # a loop of steps must let others run; later, the images would be shown already
        paused, live = self.table.paused, self.table.active
        request = self.start_step(whole, live, "step", shows_all=True, timeout_s=timeout_s)
        value: StepResult = await self.result(request, timeout_s)
        return value if paused is None else value._replace(info={**value.info, "_active": ~paused})

    async def _reset_live(
        self, seed: Any, mask: Bools | None, options: dict[str, Any] | None, timeout_s: float | None
    ) -> ResetResult:
        """Reset the slots that are not paused, or those of a mask."""
        await self.drain(timeout_s)
        paused, live = self.table.paused, self.table.active
        slots = live if mask is None else live[mask[live]]
        if len(slots):
            request = self.start_reset(slots, seed, options, "reset", asked=live, shows_all=True, timeout_s=timeout_s)
        else:
            self.table.check_send(live, "reset", reset=True)
            nothing = self.actions.assemble(self.actions.zeros(self.num_envs), self.actions.no_objects(self.num_envs))
            request = self.start_step(nothing, slots, "reset", shows_all=True, timeout_s=timeout_s)
        value = await self.result(request, timeout_s)
        return ResetResult(value.obs, value.info if paused is None else {**value.info, "_active": ~paused})

    # ------------------------------------------------------------ requests to some slots

    def check_steps_some(self, name: str, slots: Slots) -> None:
        """Raise if the env can't step these slots without the others (see `Backend.check_steps_some`)."""
        if len(slots) and not self.steps_some:
            raise refuse_some(name, self.kind)

    def group(self, slots: Slots) -> InProcessGroup:
        """Make a group of some slots, ascending."""
        return InProcessGroup(self, slots)

    def rollout_backend(self) -> InProcessRollout:
        """Make the backend of one rollout."""
        return InProcessRollout(self)

    def last_ended(self) -> Bools:
        """Return, as bool `(num_envs,)`, the slots whose last step ended an episode, with no reset since."""
        return self._env.last_results.ended()

    def start_step(
        self,
        actions: Any,
        slots: Slots,
        name: str,
        *,
        awaited: bool = True,
        shows_all: bool = False,
        timeout_s: float | None = None,
    ) -> InProcessRequest:
        """Step some slots; blocks for at most as long as the loop may be blocked.

        Args:
            actions: a checked batch of actions of all slots.
            slots: the slots that are stepped, ascending.
            name: the user's call, for errors.
            awaited: whether `result` will be called; otherwise `recv` takes the result.
            shows_all: whether the result also shows the other slots, as they were.
            timeout_s: the limit that `result` will get. With one the step runs on the thread, since only a wait for
                the thread can end early.
        """
        some = None if len(slots) == self.num_envs else slots
        if some is not None and not self.steps_some:
            raise refuse_some(name, self.kind)
        self.table.check_send(slots, name, reset=False)
        self.table.note_steps(slots, len(slots))
        inline = self._runs_inline(self._env.step_times, timeout_s)
        request = self._requests.start(slots, awaited=awaited, shows_all=shows_all)
        self._run(request, inline, partial(self._env.step, actions, True, request.images, some))
        return request

    def start_reset(
        self,
        slots: Slots,
        seed: Any,
        options: dict[str, Any] | None,
        name: str,
        *,
        asked: Slots | None = None,
        shows_all: bool = False,
        timeout_s: float | None = None,
    ) -> InProcessRequest:
        """Reset some slots; blocks for at most as long as the loop may be blocked.

        Args:
            slots: the slots that are reset, ascending.
            seed, options: passed to the env's `reset`.
            name: the user's call, for errors.
            asked: the slots whose results are asked for, ascending; None for those that are reset.
            shows_all, timeout_s: see `start_step`.
        """
        asked = slots if asked is None else asked
        self.table.check_send(asked, name, reset=True)
        inline = self._runs_inline(self._env.reset_times, timeout_s)
        self.table.note_reset(slots)
        request = self._requests.start(asked, awaited=True, resets=slots, shows_all=shows_all)
        work = partial(self._env.reset, seed, self._mask_of(slots), options, request.images)
        self._run(request, inline, work)
        return request

    def _mask_of(self, slots: Slots) -> Bools | None:
        """Return the reset mask of some slots; None if they are all."""
        if len(slots) == self.num_envs:
            return None
        mask = np.zeros(self.num_envs, np.bool_)
        mask[slots] = True
        return mask

    def start_read_obs(self, name: str) -> InProcessRequest:
        """Ask for the latest observations of all slots, which steps none of them."""
        self.table.check_send(self._all_slots, name, reset=True)
        request = self._requests.start(self._all_slots, awaited=True, resets=self._all_slots[:0], looks=True)
        self._run(request, self._runs_inline(self._env.step_times, None), self._env.read_obs)
        return request

    async def result(self, request: InProcessRequest, timeout_s: float | None = None) -> Any:
        """Wait for the result of a request. If that is cancelled or times out, the result waits for `recv`.

        Raises:
            EnvError: if the env raised.
            StepTimeout: if `timeout_s` passed.
            ClosedError: if the vector env was closed meanwhile.
        """
        try:
            if not request.done.done():
                # not shielded, which would take one more turn of the loop: `abandon` replaces a cancelled future
                if timeout_s is None and self._timeout_s is None:
                    await request.done
                else:
                    await self._within_timeout(request.done, timeout_s, _NOTHING_LOST)
                self._last_yield_s = perf_counter()
            elif perf_counter() - self._last_yield_s > YIELD_AFTER_S:  # it ran inline
                await yield_to_loop()
                self._last_yield_s = perf_counter()
        except BaseException:
            self._requests.abandon(request)
            raise
        self._check_open()
        self._requests.hand_out(request)
        return self._value_of(request.value)  # type: ignore[type-var]

    def abandon_request(self, request: InProcessRequest) -> None:
        """Leave the result of a request to `recv`, since no caller awaits it any more."""
        self._requests.abandon(request)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Wait for abandoned requests, then discard the results that were not taken."""
        if not self._requests.abandoned:
            return
        # searched again after each wait: other tasks take and abandon some meanwhile
        while (request := next((r for r in self._requests.abandoned if not r.done.done()), None)) is not None:
            await self._within_timeout(asyncio.shield(request.done), timeout_s, _NOTHING_LOST)
        self._check_open()
        if ended := self._requests.discard_abandoned():
            _log.warning(
                "the result of a cancelled or timed-out step was dropped, and with it the ends of the episodes in "
                "slots %s; recv() would have taken it",
                ended,
            )

    # ------------------------------------------------------------ send and recv

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to some slots; blocks for at most as long as the loop may be blocked."""
        numbers, paused = self.table.slot_numbers(slots), self.table.paused
        used = None if paused is None else np.flatnonzero(~paused[numbers])
        arrays, objects = self.actions.take_apart(actions, len(numbers), used)
        if not self.steps_some and len(numbers) < self.num_envs:
            raise refuse_some(f"send: slots {numbers.tolist()}", self.kind)
        keep = self.table.leave_out_paused(numbers, "send", by_name=slots is not None)
        if not len(keep):
            return
        keep = keep[np.argsort(numbers[keep])]
        rows, arrays = numbers[keep], [array[keep] for array in arrays]
        objects = [[column[i] for i in keep.tolist()] for column in objects]
        if len(rows) == self.num_envs:
            whole = self.actions.assemble(arrays, objects)
        else:
            whole = with_rows(self.actions, self.num_envs, rows.tolist(), arrays, objects)
        self.start_step(whole, rows, "send", awaited=False)

    def send_reset(
        self, slots: Iterable[int] | None, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> None:
        """Begin episodes in some slots; blocks for at most as long as the loop may be blocked."""
        named = self.table.slot_numbers(slots)
        keep = self.table.leave_out_paused(named, "send_reset", by_name=slots is not None)
        seed = normalize_seed(seed, len(named), self.num_envs)
        if not len(keep):
            return
        numbers = named[keep]
        if isinstance(seed, list):
            by_slot = {int(named[i]): seed[i] for i in keep.tolist()}
            seed = [by_slot.get(slot) for slot in range(self.num_envs)]
        self.table.check_send(numbers, "send_reset", reset=True)
        self.table.note_reset(numbers)
        request = self._requests.start(np.sort(numbers), awaited=False, resets=numbers)
        work = partial(self._env.reset, seed, self._mask_of(numbers), options, request.images)
        self._run(request, self._runs_inline(self._env.reset_times, None), work)

    async def recv(self, min_slots: int, max_slots: int | None, deadline_s: float | None) -> Ready:
        """Take results as they arrive (see `AsyncVectorEnv.recv`)."""
        if not self.outstanding:
            raise NoAsyncCallError("recv: nothing is in flight and nothing is ready; send() or send_reset() first")
        wanted = min_slots if max_slots is None else min(min_slots, max_slots)
        if perf_counter() - self._last_yield_s > YIELD_AFTER_S:
            self._last_yield_s = perf_counter()
            await yield_to_loop()
        if not self._requests.has_ready(wanted):
            arrivals = partial(self._requests.wait_ready, wanted)
            if deadline_s is None:
                await self._within_timeout(arrivals(), None, _NOTHING_LOST)
            else:
                try:
                    async with asyncio.timeout(deadline_s):
                        await self._within_timeout(arrivals(), None, _NOTHING_LOST)
                except TimeoutError as exc:
                    if isinstance(exc, StepTimeout):
                        raise
            self._last_yield_s = perf_counter()
        self._check_open()
        ready, errors = self._requests.take_ready(max_slots, self.single_observation_space, self.observation_space)
        self.table.note_ends(ready.slots, ready.terminated | ready.truncated)
        for error in errors:
            self.table.fail(error)
            self.table.note_taken(np.array(error.slots))
        self.table.note_taken(ready.slots)
        if errors:
            raise EnvError.join(list(errors), ready)
        return ready

    @property
    def outstanding(self) -> bool:
        """Whether a request is in flight or a result is ready."""
        return self._requests.outstanding

    def split_obs(self, obs: Any) -> tuple[Arrays, Any]:
        """Return the arrays and the objects of a batch of observations."""
        arrays, objects = take_observations(self.observations, obs, self.num_envs)
        return arrays, [list(column) for column in objects]

    def seeds_of(self, seeds: Mapping[int, int | None]) -> list[int | None] | None:
        """Return the seeds of some slots as the vector env's `reset` takes them."""
        if all(seed is None for seed in seeds.values()):
            return None
        return [seeds.get(slot) for slot in range(self.num_envs)]

    # ------------------------------------------------------------ calls

    async def call_service(
        self,
        slots: Iterable[int] | None,
        what: str,
        method: str,
        arguments: Callable[[list[int]], tuple[Any, ...]],
        *,
        spares: bool | Literal["living"] = False,
        on_sent: Callable[[], None] | None = None,
        on_result: Callable[[int, Any], None] | None = None,
    ) -> tuple[Any, ...]:
        """Call a method of `VectorCalls` (see `Backend.call_service`), on the env's thread if it has one.

        Raises:
            PendingCallError: if a slot has a request in flight.
            EnvError: if the env raised.
            StepTimeout: if it took too long; the result is dropped.
        """
        rows = np.sort(self.table.slot_numbers(slots)).tolist()
        self.table.check_call(self._all_slots, what)
        work = partial(self._call, method, rows, *arguments(rows))
        thread = self._env.thread

        def tell(values: Sequence[Any]) -> None:
            if on_result is not None:
                for slot, value in zip(rows, values, strict=True):
                    on_result(slot, value)

        def on_done(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                tell(future.result())

        if thread is None:
            values = tuple(work())
            tell(values)
            return values
        dropped = f"{what} goes on, but its result is dropped"
        running = thread.run(work)
        if on_result is not None:
            running.add_done_callback(on_done)
        return tuple(await self._within_timeout(asyncio.shield(running), None, dropped))

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(VectorCalls(self._env.env), method)(*args)
        except BaseException as exc:  # caught here, where a StopIteration or TimeoutError can only be the env's
            if self._env.thread is None and ends_program(exc):
                raise
            raise self._error(exc) from exc

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """Return the live array of a field of the models (see `NativeVectorEnv.model_field`).

        Raises:
            ValueError: if the env has no models of its slots, or there is no such field.
            PendingCallError: if the env is busy.
        """
        self.table.check_call(self._all_slots, "model_field")
        thread, env = self._env.thread, self._env.env
        if thread is not None and thread.jobs:  # a step that was cancelled
            raise PendingCallError(
                "model_field: the vector env is still busy with a step that was cancelled", "model_field"
            )
        if not hasattr(env.unwrapped, "model_field"):
            raise ValueError(f"model_field: {type(env.unwrapped).__name__} is no NativeMujocoEnv")
        return env.unwrapped.model_field(name)  # type: ignore[no-any-return]

    @property
    def observer(self) -> ResultObserver | None:
        """The object that is told of each result (see `Backend.observer`)."""
        return self._requests.observer

    def attach_observer(self, observer: ResultObserver | None) -> None:
        """Tell an object of each result from now on (see `Backend.attach_observer`)."""
        self._requests.observer = observer

    def attach_trace(self, trace: Trace | None) -> None:
        """Record images in a timeline from now on; None: no longer."""
        if self.images is not None:
            self.images.trace = trace

    def forget_code(self) -> None:
        """Do nothing (see `Session.forget_code`)."""

    async def wait_for_images(self, what: str, drawn: Callable[[], Awaitable[object]]) -> None:
        """Wait until images are drawn (see `ReplyTimeouts.wait_for_images`)."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await drawn()
        except TimeoutError:
            raise images_late(what, self.pools, self._timeout_s) from None

    # ------------------------------------------------------------ running work: on the loop or on the thread

    def _runs_inline(self, times: RunTimes, timeout_s: float | None) -> bool:
        """Return whether the next piece of work runs on the loop itself."""
        thread = self._env.thread
        if thread is not None:
            return times.inline and timeout_s is None and not thread.jobs
        if timeout_s is not None:
            raise ValueError('timeout_s: with run_in="inline" a wait for the env can\'t end early; use run_in="thread"')
        return True

    def _run(self, request: InProcessRequest, inline: bool, work: Callable[[], Any]) -> None:
        """Run the work of a request, inline or on the thread."""
        if not inline:
            assert self._env.thread is not None
            self._env.thread.submit(work, partial(self._on_done, request))
            return
        try:
            value = work()
        except BaseException as exc:
            error = self._error(exc)
            self._requests.complete(request, error)
            if not ends_program(exc):
                return
            self.table.fail(error)
            if request.awaited:
                self._requests.hand_out(request)
            raise
        self._requests.complete(request, value)

    def _on_done(self, request: InProcessRequest, value: Any, error: BaseException | None) -> None:
        """Complete a request that ran on the thread."""
        self._requests.complete(request, value if error is None else self._error(error))

    def _value_of(self, value: Result | EnvError) -> Result:
        """Return a result that the caller gets now, or raise the error, and note it in the slot table."""
        if isinstance(value, EnvError):
            self.table.fail(value)
            raise value
        if self.table.must_reset and isinstance(value, StepResult):
            self.table.note_ends(_ALL, value.terminated | value.truncated)
        return value

    # ------------------------------------------------------------ waits and errors

    async def _yield_with_result(self, value: StepResult | EnvError) -> None:
        """Let the loop run other tasks while a result is in hand; a cancellation leaves it to `recv`."""
        self.table.move(_ALL, SlotState.IN_FLIGHT)
        try:
            await yield_to_loop()
        except BaseException:
            self._leave_to_recv(value)
            raise
        finally:
            self._last_yield_s = perf_counter()
        self._check_open()
        self._requests.free_slots(_ALL)

    def _leave_to_recv(self, value: StepResult | EnvError) -> None:
        """Let `recv` take a result that the caller of `step` did not get."""
        request = self._requests.start(self._all_slots, awaited=False)
        if not self._copy and not isinstance(value, EnvError):  # the env may be stepped again before that
            value = StepResult(*map(owned, value))
        request.episodes_counted = True
        self._requests.abandon(request)
        self._requests.complete(request, value)

    def take_back(self, result: StepResult) -> None:
        """Leave the result of a step to `recv` that was handed out, but did not reach its caller.

        It stays lost if the slots were asked for something else since, if images are drawn, or if slots are paused.
        """
        if not (self.outstanding or self._closing or self.draws or self.table.paused is not None):
            self._leave_to_recv(result)

    async def _within_timeout(self, wait: Any, timeout_s: float | None, consequence: str) -> Any:
        """Await something for at most `timeout_s` seconds (None: the constructor's limit)."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if timeout_s is None:
            return await wait
        try:
            async with asyncio.timeout(timeout_s):
                return await wait
        except TimeoutError:
            slots = tuple(self._all_slots.tolist())
            renderer = self._requests.pixel_renderer
            drawing = renderer is not None and renderer.drawing
            late = "render workers, though the vector env has replied," if drawing else "the vector env"
            message = f"no result from {late} within timeout_s={timeout_s}; {consequence}"
            raise StepTimeout(message, slots=slots, running=slots) from None

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("the vector env was closed while this was in flight")

    def _failure(self, exc: BaseException) -> EnvError:
        """Return the error for an exception that a whole step has raised on the loop; raise Ctrl-C and the like."""
        error = self._error(exc)
        if ends_program(exc):
            self.table.fail(error)
            raise exc
        return error

    def _error(self, exc: BaseException, reason: str | None = None) -> EnvError:
        """Return the error of all slots for an exception."""
        text, pid = traceback_of(exc), os.getpid()
        where = f"slots 0 to {self.num_envs - 1}" if self.num_envs > 1 else "slot 0"
        reason = reason or f"{reason_of(exc)}\n{text}"
        error = EnvError(
            f"{where} (the vector env in this process, pid {pid}): {reason}",
            slots=tuple(self._all_slots.tolist()),
            pid=pid,
            traceback=text,
        )
        error.__cause__ = exc
        return error
