"""The service of a collector: a vector env and a policy in one process, which collect a rollout at each request."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from aioenv.collector.collect_requests import (
    Begin,
    CollectReply,
    CollectRequest,
    DumpedRollout,
    buffers_in,
    dump_rollout,
)
from aioenv.collector.weights import load_weights
from aioenv.creator import EnvCreator
from aioenv.definitions.table import current_table
from aioenv.errors import EnvError, SlotError, WorkerDied, WorkerStartError
from aioenv.ipc.frames import Buffer, Frame, Header, Kind
from aioenv.ipc.messages import Failure, dump, load
from aioenv.make import make_vec, new_event_loop
from aioenv.native_vector_env import NativeVectorEnv
from aioenv.rollout.recorder import Rollout
from aioenv.rollout.rollout import Policy, has_parameter, is_torch_module
from aioenv.spaces.layout import packed
from aioenv.vector_env import AsyncVectorEnv
from aioenv.worker.service import PartialStep, Reply, StartFailed, describe_failure
from aioenv.worker.worker_context import BlockMapper, take_data

__all__ = ["CollectorService", "CollectorSpaces", "Recipe", "make_share"]

_log = logging.getLogger("aioenv.collector")

T = TypeVar("T")

_TERMINATED = 128 + signal.SIGTERM


class Recipe(NamedTuple):
    """What all collectors make their vector envs and policies of.

    Attributes:
        env: as `make_vec` takes it.
        policy: a factory of policies.
        num_envs: the number of slots of all collectors.
        steps, groups: of a rollout, see `AsyncVectorEnv.rollout`.
        entropy: the source of the generators that policies are given.
        settings: the arguments of `make_vec`.
    """

    env: Any
    policy: Callable[[], Any]
    num_envs: int
    steps: int
    groups: int
    entropy: int
    settings: Mapping[str, Any]


class CollectorSpaces(NamedTuple):
    """The description of a collector: the spaces of one slot (see `packed`)."""

    observation_space: Any
    action_space: Any


class _PlacedCreator(EnvCreator):
    """A creator whose slots are the last ones of another creator's, from `first` on."""

    def __init__(self, creator: EnvCreator, first: int) -> None:
        super().__init__(creator)
        self._creator, self._first = creator, first

    def at(self, slot: int) -> Any:
        """Return the variant of a slot."""
        return self._creator.at(self._first + slot)


def make_share(recipe: Recipe, first: int, stop: int) -> AsyncVectorEnv:
    """Make the vector env of some successive slots; it is not started."""
    env = recipe.env
    if isinstance(env, EnvCreator) and first:
        env = _PlacedCreator(env, first)
    envs = make_vec(env, stop - first, **recipe.settings)
    # the process does nothing else meanwhile: a thread of the envs' own would cost two thread switches a step
    envs._config = envs._config._replace(first_slot=first, all_slots=recipe.num_envs, inline_always=True)
    if isinstance(envs, NativeVectorEnv) and envs._pixels_config is None and envs._timeout_s is None:
        envs._run_in = "inline"
    return envs


class CollectorService:
    """Collects rollouts of some slots.

    Args:
        recipe: what to make.
        first, stop: the slots, among all.
    """

    def __init__(self, recipe: Recipe, first: int, stop: int) -> None:
        self._table = current_table()  # before the vector env in this process, if it is one, has another
        self._first, self._num_envs = first, stop - first
        self._recipe = recipe
        self._failed: set[int] = set()  # rows whose envs have raised since, so that they must be reset
        self._begin_next: Begin | None = None  # the resets before the next rollout
        self._lacks_weights = False  # whether the last weights could not be had, or were refused
        self._held: dict[int, DumpedRollout] = {}  # rollouts that are yet to be fetched, by request
        self._blocks = BlockMapper()
        self._loop = new_event_loop()
        self._envs: AsyncVectorEnv | None = None
        self._task: asyncio.Task[Rollout | None] | None = None  # the rollout that is being collected
        self._policy_s = 0.0
        self._finished = False  # whether no env has a further episode
        self._takes_generators = False
        self._generators: list[np.random.Generator] = []
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._envs = make_share(recipe, first, stop)
            self._run(self._envs._ensure_started())
            self._policy = recipe.policy()
            self._call_policy = self._bound_policy(self._policy)
        except SystemExit:
            raise
        except BaseException as exc:
            self.close()
            if isinstance(exc, (SlotError, WorkerStartError)):
                raise StartFailed(_failures(exc)[0]) from exc
            raise

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """End the process, in the middle of a rollout too; the envs are closed."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._task is None:
            raise SystemExit(_TERMINATED)
        self._loop.call_soon_threadsafe(self._task.cancel)

    def _run_rollout(self) -> Rollout | None:
        """Collect a rollout; None: no env has a further episode.

        Raises:
            SystemExit: if the process was told to end.
        """
        self._task = task = self._loop.create_task(self._collect())
        try:
            return self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise SystemExit(_TERMINATED) from None
        finally:
            self._task = None

    def describe(self) -> CollectorSpaces:
        """Return the spaces."""
        envs = self._started
        return CollectorSpaces(packed(envs.single_observation_space), packed(envs.single_action_space))

    @property
    def _started(self) -> AsyncVectorEnv:
        assert self._envs is not None
        return self._envs

    def request_buffers(self, header: Header) -> Sequence[memoryview] | None:
        """Return None: weights are read into new memory, which the policy may keep."""
        return None

    def expected_buffers(self) -> None:
        """Return None: nothing is known about the next request."""

    def fast_path(self) -> None:
        """Return None: no request is a plain step."""

    def after_reply(self) -> None:
        """Do nothing: no work is put off."""

    def close(self) -> None:
        """Close the vector env, and end its workers."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if self._envs is not None:
                self._run(self._envs.close())
        finally:
            self._loop.close()

    # ------------------------------------------------------------ requests

    def handle(self, frame: Frame | PartialStep) -> Reply:
        """Answer a COLLECT frame.

        Raises:
            ValueError: if it is another request.
            SystemExit: if a worker of the vector env has died, and is not started again: this process ends, too. Or if
                it was told to end.
        """
        if isinstance(frame, PartialStep) or frame.kind is not Kind.COLLECT:
            raise ValueError(f"a collector has no answer to {frame.kind.name}")
        request: CollectRequest = load(frame.payload)
        if request.fetch is not None:
            return Reply(self._held.pop(request.fetch).buffers, dump(CollectReply()))
        if self._finished:
            return Reply((), dump(CollectReply(finished=True)))
        self._policy_s = 0.0
        self._begin_next = request.begin or self._begin_next
        received: Sequence[memoryview] = frame.fixed
        if request.shared is not None:
            memory = take_data(request.shared)
            received = () if memory is None else (memory,)
        if request.weights:
            self._lacks_weights = request.shared is not None and not received
        if self._lacks_weights:
            return Reply((), dump(CollectReply(lacks_weights=True)))
        try:
            if request.weights:
                self._update(load_weights(request.weights, request.weights_spans, received))
        except Exception as exc:
            self._lacks_weights = True  # a rollout that was asked for meanwhile must not say that it was made with them
            return Reply((), dump(CollectReply(failures=_failures(exc), refused_weights=True), self._table))
        try:
            rollout = self._run_rollout()
            if rollout is None:
                return Reply((), dump(CollectReply(finished=True)))
            dumped = dump_rollout(rollout, self._table)
        except WorkerDied as exc:
            _log.error("%s", str(exc).partition("\n")[0])
            raise SystemExit(1) from exc
        except Exception as exc:
            return Reply((), dump(CollectReply(failures=self._note_failures(exc)), self._table))
        sizes = tuple(map(len, dumped.buffers))
        reply = CollectReply(
            dumped.rollout,
            sizes,
            infos=dumped.infos,
            has_final_obs=dumped.has_final_obs,
            episodes=self._episodes(),
            policy_s=self._policy_s,
            finished=self._finished,
        )
        block = request.block
        fixed: Sequence[Buffer] = dumped.buffers if sizes == request.sizes and block is None else ()
        if sizes == request.sizes and block is not None and self._write(dumped.buffers, sizes, block):
            reply = reply._replace(in_block=True)
        elif sizes and not fixed:
            self._held[frame.request] = dumped
        return Reply(fixed, dump(reply, self._table))

    def _write(self, buffers: Sequence[Buffer], sizes: Sequence[int], block: tuple[int, int]) -> bool:
        """Copy buffers into a block of shared memory; return False if it can't be mapped."""
        try:
            memory = self._blocks.map(*block)
        except OSError:
            return False
        for there, buffer in zip(buffers_in(memory, sizes), buffers, strict=True):
            there[:] = buffer
        return True

    async def _collect(self) -> Rollout | None:
        begin, self._begin_next = self._begin_next, None
        if begin is not None:
            await self._begin(begin)
        elif self._failed:
            await self._reset_failed()
        envs = self._started
        rollout = None
        if not self._is_exhausted:
            rollout = await envs.rollout(self._call_policy, self._recipe.steps, self._recipe.groups)
        self._finished = self._is_exhausted
        return rollout

    @property
    def _is_exhausted(self) -> bool:
        """Whether no env has a further episode."""
        return len(self._started.exhausted) == self._num_envs

    def _note_failures(self, exc: Exception) -> list[Failure]:
        failures = _failures(exc)
        self._failed.update(failure.row for failure in failures if failure.row is not None)
        return failures

    # ------------------------------------------------------------ resets

    async def _begin(self, begin: Begin) -> None:
        """Begin an episode in every slot."""
        envs, plan = self._started, self._plan
        if self._takes_generators:
            self._make_generators(begin.restarts)
        if begin.episodes is None or plan is None:
            await envs.reset(seed=begin.seed)
            return
        # without seeds of its own, a slot takes that of the plan for the episode that it is at
        for row, episode in enumerate(begin.episodes):
            plan.start_at(row, episode)
        if plan.has_seeds:
            await envs.reset(seed=[None] * self._num_envs)
            return
        await envs.reset(seed=begin.seed)
        for row, episode in enumerate(begin.episodes):
            plan.start_at(row, episode + 1)

    async def _reset_failed(self) -> None:
        """Reset the slots whose envs have raised."""
        envs, mask = self._started, np.zeros(self._num_envs, np.bool_)
        mask[list(self._failed)] = True
        await envs.reset(options=None if self._envs_are_one and mask.all() else {"reset_mask": mask})
        self._failed.clear()

    @property
    def _envs_are_one(self) -> bool:
        return self._started._config.vectorized

    @property
    def _plan(self) -> Any:
        """The plan of the seeds and options of resets; None if there is none."""
        return getattr(self._started._env_info, "reset_plan", None)

    def _episodes(self) -> list[int] | None:
        """Return how many episodes of the plan each slot has begun; None if there is no plan."""
        plan = self._plan
        return None if plan is None else [plan.begun(row) for row in range(self._num_envs)]

    # ------------------------------------------------------------ the policy

    def _update(self, weights: Any) -> None:
        """Hand weights to the policy.

        Raises:
            TypeError: if it does not take any.
        """
        for name in ("update", "load_state_dict"):
            method = getattr(self._policy, name, None)
            if callable(method):
                method(weights)
                return
        raise TypeError(
            f"update: expected a policy with update(weights) or load_state_dict(weights), got {self._policy!r}"
        )

    def _bound_policy(self, policy: Any) -> Policy:
        """Return the policy as a rollout calls it: with the numbers of slots among all, and generators if it takes any.

        Raises:
            TypeError: if it can't be called.
        """
        if not callable(policy):
            raise TypeError(
                f"policy: expected a factory of functions of observations, got one that returned {policy!r}"
            )
        call = partial(_call_module, sys.modules["torch"], policy) if is_torch_module(policy) else policy
        takes_slots, takes_generators = (has_parameter(policy, name) for name in ("slots", "generators"))
        self._takes_generators = takes_generators
        first = self._first

        def timed(obs: Any, slots: Any) -> Any:
            more: dict[str, Any] = {"slots": slots + first} if takes_slots else {}
            if takes_generators:
                more["generators"] = [self._generators[row] for row in slots.tolist()]
            started = perf_counter()
            try:
                answer = call(obs, **more)
            finally:
                self._policy_s += perf_counter() - started
            return self._timed_await(answer) if inspect.isawaitable(answer) else answer

        return timed

    async def _timed_await(self, answer: Any) -> Any:
        started = perf_counter()
        try:
            return await answer
        finally:
            self._policy_s += perf_counter() - started

    def _make_generators(self, restarts: int) -> None:
        """Make a generator for each slot, which depends on the seed, the number of the slot, and that of restarts."""
        slots = range(self._first, self._first + self._num_envs)
        keys = [(slot, restarts) for slot in slots]
        sources = [np.random.SeedSequence(self._recipe.entropy, spawn_key=key) for key in keys]
        self._generators = [np.random.default_rng(source) for source in sources]


def _call_module(torch: Any, module: Any, obs: Any, **more: Any) -> Any:
    """Call a module of torch with tensors for arrays."""
    with torch.no_grad():  # in `inference_mode`, a buffer that it assigns could not take the next weights
        return module(_tensors(torch, obs), **more)


def _tensors(torch: Any, obs: Any) -> Any:
    if isinstance(obs, dict):
        return {key: _tensors(torch, part) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_tensors(torch, part) for part in obs)
    return torch.as_tensor(obs)


def _failures(exc: Exception) -> list[Failure]:
    """Describe an exception of a rollout, one failure for each slot, with the tracebacks of workers."""
    if isinstance(exc, EnvError):
        return [_failure(error, row) for error in exc.errors for row in error.slots]
    if isinstance(exc, WorkerStartError) and exc.slots:
        return [_failure(exc, exc.slots[0])]
    return [describe_failure(exc)]


def _failure(error: Any, row: int) -> Failure:
    """Describe the exception of an env, from the error that this process has made of it."""
    cause = error.__cause__
    if not isinstance(cause, Exception):
        return describe_failure(error, row)
    failure = describe_failure(cause, row)
    return failure._replace(traceback=error.traceback or failure.traceback)
