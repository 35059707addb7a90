"""`RolloutCollector`: processes that each hold a vector env and a policy, and send whole rollouts.

The class documents and checks; `CollectorPool` does the work.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Literal, Self

import numpy as np
from gymnasium import Space

from aioenv.assign import spread
from aioenv.collector.collected import CollectedRollout, CollectorStats
from aioenv.collector.collector_pool import Collector, CollectorPool
from aioenv.collector.collector_service import CollectorService, CollectorSpaces, Recipe, make_share
from aioenv.core.arguments import (
    check_clusters,
    check_grace,
    check_num_envs,
    check_preload,
    check_restart,
    check_seconds,
    check_seed_plan,
    check_timeout,
    check_worker_env,
)
from aioenv.core.session import CLOSE_GRACE_S
from aioenv.core.worker_pool import make_program, needed_by
from aioenv.definitions.restore import FactoryReference
from aioenv.ipc.messages import dump_code
from aioenv.platform import usable_cpus
from aioenv.process.async_resource import AsyncResource
from aioenv.process.channel import check_channel
from aioenv.process.launch import check_start
from aioenv.process.remote import Cluster, Placements
from aioenv.process.restart_policy import RestartPolicy
from aioenv.process.supervisor import Worker
from aioenv.rollout.rollout import is_torch_module
from aioenv.spaces.seeding import normalize_seed
from aioenv.stats.episodes import EpisodeStats
from aioenv.stats.sharing import record_pickled

__all__ = ["RolloutCollector"]

_MODES = ("sync", "async")


class RolloutCollector(AsyncResource):
    """Collectors: processes that each hold a vector env of some slots and a policy, and send whole rollouts::

        async with RolloutCollector("CartPole-v1", 64, policy=make_policy, num_collectors=8) as collector:
            async for rollout in collector:
                weights = learn(rollout)
                await collector.update(weights)

    It is for envs that are far away, or that step so fast that a process a step costs too much: the policy runs beside
    the envs, and one message a rollout is sent. Slots are spread over the collectors evenly, in their order.

    The iteration yields rollouts (`CollectedRollout`) in the order in which they are complete. It does not end by
    itself, unless all envs have no further episode, or the collector is closed. If it is cancelled or left, no rollout
    is lost: iterate again to go on.

    A collector does not begin a rollout before its last one was handed out, except for `prefetch` of them. So at most
    `num_collectors * (1 + prefetch)` rollouts exist. A collector begins with the newest weights that `update` was given
    by then. Collecting begins with the first iteration.

    A collector that dies is replaced, as `restart` says. The new process gets the newest weights, and begins new
    episodes: with a seed plan those that its slots were at. A rollout that was not complete is lost, and collected
    again (`CollectedRollout.restarted`).

    Args:
        env: an id, an `EnvSpec`, a function that makes an env, or an `EnvCreator`, as for `make_vec`.
        num_envs: the number of slots of all collectors.
        policy: a function without arguments that makes a policy in each collector. It is sent there as env factories
            are. The policy is a callable, as for `AsyncVectorEnv.rollout`: it gets a batch of observations, and returns
            a batch of actions, or these and a dict of arrays that become part of the rollout. A parameter named `slots`
            gets the slot numbers; one named `generators` gets a list of `numpy.random.Generator`s, one of each slot's
            own. A `torch.nn.Module` is called with tensors, without gradients. The policy may have `update(weights)`,
            or else `load_state_dict(weights)`, for the weights of `update`.
        steps: the number of steps of each slot in a rollout.
        num_collectors: the number of processes. None: the number of CPUs that this process may use, at most one a slot.
            With a list of clusters, a list of how many there are on each.
        mode: "async": a collector begins its next rollout when its last one is handed out. "sync": all collectors
            collect one rollout each with the same weights, and wait then until `update` is called and all rollouts were
            handed out. So in sync mode the rollouts of a slot do not depend on `num_collectors`. An iteration that
            waits 5 s for `update` logs a warning. After an error, `update` also gives its weights to the rollouts of
            this round that are collected again.
        max_weight_lag: in async mode, the greatest number of updates by which a rollout's weights may be older than the
            newest ones when it is handed out. Older rollouts are dropped, and counted in `stats()`. None: any number.
        prefetch: in async mode, the number of rollouts that a collector may begin before its last one was handed out.
            More than 0 hides the time that messages take to far machines; weights are older by as many rollouts.
        groups: the groups of slots of a rollout (see `AsyncVectorEnv.rollout`). None: 1 without workers, else 2.
        num_workers: the number of worker processes of each collector. None: 0, its envs live in its own process (with
            `backend="auto"` it is chosen as by `make_vec`).
        seed: an int seeds the first episode of slot i with `seed + i`; a list has a seed for each slot. None: no seeds.
        seed_plan: see `AsyncVectorEnv`: seeds by slot, among all, and episode.
        restart: the policy by which collectors that died, and their workers, are started again. None: an error ends the
            iteration.
        timeout_s: how long a rollout may take, in seconds. A collector that takes longer is killed, and replaced as if
            it had died. None: without limit.
        start, channel, preload, start_timeout_s, log_prefix: of the collectors, see `AsyncVectorEnv`.
        worker_env: environment variables of the collectors, see `AsyncVectorEnv`; a list has one mapping for each.
        cluster: the machines on which collectors are placed, with the workers that they have (see `RayCluster`); None:
            this one. A list, `[None, RayCluster()]`, goes with a list of `num_collectors`.
        **settings: more arguments of `make_vec`, for the vector env of each collector, and of the envs.

    Attributes:
        num_envs: the number of slots.
        num_collectors: the number of collectors.
        steps: the number of steps of a rollout.
        closed: whether `close` has been called.

    Raises:
        ValueError: if an argument is not one of its values.
        TypeError: if `env`, `policy` or `restart` has a wrong type, or the first two can't be sent.
    """

    _noun = "collector"

    def __init__(
        self,
        /,  # envs may have any argument
        env: Any,
        num_envs: int,
        *,
        policy: Callable[[], Any],
        steps: int = 128,
        num_collectors: int | Sequence[int] | None = None,
        mode: Literal["sync", "async"] = "async",
        max_weight_lag: int | None = None,
        prefetch: int = 0,
        groups: int | None = None,
        num_workers: int | None = None,
        seed: int | Sequence[int | None] | None = None,
        seed_plan: Sequence[int] | None = None,
        restart: RestartPolicy | None = RestartPolicy(),  # noqa: B008 (it is frozen)
        timeout_s: float | None = None,
        start: Literal["forkserver", "spawn"] | None = None,
        channel: Literal["auto", "scatter", "streams"] = "auto",
        preload: Iterable[str] = (),
        start_timeout_s: float = 60.0,
        log_prefix: str | None = None,
        worker_env: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
        cluster: Cluster | Sequence[Cluster | None] | None = None,
        **settings: Any,
    ) -> None:
        self.num_envs = check_num_envs(num_envs)
        cpus = usable_cpus()
        wanted, clusters = check_clusters(cluster, num_collectors, self.num_envs, "num_collectors")
        self.num_collectors = min(cpus if wanted is None else _at_least("num_collectors", wanted, 1), self.num_envs)
        _check_factory(policy)
        if mode not in _MODES:
            raise ValueError(f"mode: expected one of {', '.join(map(repr, _MODES))}, got {mode!r}")
        if mode == "sync" and (prefetch or max_weight_lag is not None):
            raise ValueError('prefetch, max_weight_lag: not with mode="sync", in which no rollout is begun ahead')
        self.steps = _at_least("steps", steps, 1)
        self.mode = mode
        spans = spread(self.num_envs, self.num_collectors)
        seeds = normalize_seed(seed, self.num_envs, self.num_envs)
        check_restart(restart)
        check_seed_plan(seed_plan, self.num_envs, restart)
        settings = _checked_settings(settings, num_workers, seed_plan, restart, log_prefix)
        workers = settings.get("num_workers")
        default_groups = 2 if workers else 1
        recipe = Recipe(
            env,
            policy,
            self.num_envs,
            self.steps,
            default_groups if groups is None else _at_least("groups", groups, 1),
            _entropy(seeds),
            settings,
        )
        make_share(recipe, *spans[0])  # refuses wrong arguments here
        with record_pickled() as stats:
            code = make_program([recipe], 1, portable=bool(clusters))  # type: ignore[list-item]  # any object can be sent so
        if stats:
            raise ValueError(
                "RolloutCollector: not with SharedRunningStats, so far: nothing merges those of collectors"
            )
        placements = Placements(clusters, check_seconds("start_timeout_s", start_timeout_s))
        variables = check_worker_env(worker_env, self.num_collectors)
        seen_warnings: set[str] = set()
        there: Any = FactoryReference(0)  # unpickles as the recipe
        collectors = [
            Collector(
                Worker(
                    dump_code(partial(CollectorService, there, first, stop)),
                    index=index,
                    slots=tuple(range(first, stop)),
                    role="collector",
                    start=check_start(start),
                    channel=check_channel(channel),
                    env=variables[index],
                    log_prefix=log_prefix,
                    seen_warnings=seen_warnings,
                    preload=check_preload(preload),
                    needed=(*needed_by([env, policy]), "aioenv.collector.collector_service"),
                    registry=code.registry,
                    code=code.program.code(0),
                    definitions=code.program.table,
                    start_timeout_s=check_seconds("start_timeout_s", start_timeout_s),
                    cpu_share=max(1, cpus // self.num_collectors),
                    placement=placements.of(index),
                ),
                seeds[first:stop] if isinstance(seeds, list) else None if seeds is None else seeds + first,
            )
            for index, (first, stop) in enumerate(spans)
        ]
        self._pool = CollectorPool(
            collectors,
            code.program,
            placements,
            sync=mode == "sync",
            max_weight_lag=None if max_weight_lag is None else _at_least("max_weight_lag", max_weight_lag, 0),
            prefetch=_at_least("prefetch", prefetch, 0),
            timeout_s=check_timeout(timeout_s),
            restart=restart,
        )
        self.closed = False

    # ------------------------------------------------------------ start and close

    def _start(self) -> Coroutine[Any, Any, None]:
        return self._pool.start()

    async def close(self, *, grace_s: float = CLOSE_GRACE_S) -> None:
        """End the collectors. Idempotent; if this is cancelled, they are killed at once.

        A collector in the middle of a rollout is told to end at once (SIGTERM), closes its envs, and is killed a second
        later. Rollouts that were not handed out are dropped.

        Args:
            grace_s: how long a collector that waits may take to close its envs, in seconds.

        Raises:
            ValueError: if `grace_s` is no number. Nothing has been closed then.
        """
        await self._close_once(partial(self._pool.close, check_grace("grace_s", grace_s)))

    def _abandon(self) -> None:
        """Kill every process without waiting."""
        self._pool.abandon()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "not started" if self._loop is None else "running"
        how = f"num_collectors={self.num_collectors} mode={self.mode!r}"
        return f"<{type(self).__name__} num_envs={self.num_envs} {how} {state}>"

    # ------------------------------------------------------------ attributes

    @property
    def single_observation_space(self) -> Space[Any]:
        """The observation space of one slot; known from the start on."""
        space: Space[Any] = self._known_spaces.observation_space
        return space

    @property
    def single_action_space(self) -> Space[Any]:
        """The action space of one slot; known from the start on."""
        space: Space[Any] = self._known_spaces.action_space
        return space

    @property
    def _known_spaces(self) -> CollectorSpaces:
        if not hasattr(self._pool, "spaces"):
            raise RuntimeError(f"{self!r}: start it first, with `async with`; spaces come from the collectors")
        return self._pool.spaces

    @property
    def version(self) -> int:
        """How often `update` was called."""
        return self._pool.version

    @property
    def pids(self) -> tuple[int | None, ...]:
        """The process ids of the collectors."""
        return tuple(worker.pid for worker in self._pool.workers)

    def stats(self) -> CollectorStats:
        """Return how long collectors and learner waited for each other, and counts, since the first iteration."""
        return self._pool.stats()

    # ------------------------------------------------------------ weights

    async def update(self, weights: Any = None) -> int:
        """Hand weights to all collectors: each takes them before its next rollout begins.

        They are copied before this returns, and it does not wait for the collectors. If it is cancelled, it has done
        nothing or all.

        Args:
            weights: the argument of the policy's `update` or `load_state_dict`: a state dict of torch, a dict of numpy
                arrays, or anything else that pickles. Arrays and tensors are copied, but not pickled. None: policies
                keep their weights; in sync mode the next round begins.

        Returns:
            The number of this update, from 1: the `weights_version` of the rollouts that they make.

        Raises:
            Exception: if they can't be pickled. Nothing is changed then.
        """
        self._check_running()
        return self._pool.update(weights)

    # ------------------------------------------------------------ rollouts

    def __aiter__(self) -> Self:
        self._check_running()
        return self

    async def __anext__(self) -> CollectedRollout:
        """Wait for the next rollout.

        Raises:
            EnvError: if an env raised; its slots are reset before the next rollout, if the iteration goes on.
            PolicyError: if a policy raised. Its slots go on where they are; the steps of this rollout are lost.
            WorkerDied: if a collector died, and is not restarted any more.
        """
        rollout = await self._next_rollout()
        if rollout is None:
            raise StopAsyncIteration
        return rollout

    async def _next_rollout(self) -> CollectedRollout | None:
        """Wait for the next rollout; None at the end of the iteration."""
        self._check_running()
        return await self._pool.next_rollout()

    def _check_running(self) -> None:
        self._check_open()
        if self._loop is None or self._starting is None or not self._starting.done():
            raise RuntimeError(f"{self!r}: start it first, with `async with`")
        self._check_loop()


def _check_factory(policy: Any) -> None:
    """Raise a TypeError unless this can be called without arguments; a policy itself, or its class, is a usual slip."""
    if not callable(policy):
        raise TypeError(f"policy: expected a function that makes a policy, got {policy!r}")
    made = is_torch_module(policy)  # its signature takes anything
    with contextlib.suppress(ValueError):  # a function of C without a signature
        try:
            inspect.signature(policy, follow_wrapped=False).bind()
        except TypeError:
            made = True
    if made:
        raise TypeError(
            f"policy: expected a function without arguments that makes a policy, got {policy!r}; for a policy that "
            "exists already, lambda: policy"
        )


def _checked_settings(
    settings: dict[str, Any], num_workers: int | None, seed_plan: Any, restart: RestartPolicy | None, prefix: str | None
) -> dict[str, Any]:
    """Return the arguments of `make_vec`.

    Raises:
        ValueError: if one can't be used in collectors.
    """
    for name in ("render", "stats_prefix"):
        if settings.get(name) is not None:
            raise ValueError(f"{name}: not with collectors: nothing takes it out of their processes")
    if isinstance(settings.get("episode_stats"), EpisodeStats):
        raise ValueError("episode_stats: expected True or False: each collector counts its own, in the infos")
    if num_workers is None and settings.get("backend", "workers") != "auto":
        if settings.get("spare_envs"):
            raise ValueError(
                "num_workers: expected two for each slot of a collector with spare_envs=True, got None, which is 0 here"
            )
        num_workers = 0
    chosen = {**settings}
    if num_workers is not None:
        chosen["num_workers"] = num_workers
    if num_workers and restart is not None:
        chosen["restart"] = restart
    elif restart is not None and restart.resume:
        raise ValueError("RestartPolicy(resume=True): it is for the workers of collectors; use num_workers=1 or more")
    if num_workers and prefix is not None:
        chosen["log_prefix"] = prefix
    if seed_plan is not None:
        chosen["seed_plan"] = seed_plan
    if settings.get("spare_envs") and (seed_plan is not None or settings.get("autoreset_options") is not None):
        raise ValueError("spare_envs: not with seed_plan or autoreset_options in collectors, so far")
    return chosen


def _entropy(seeds: int | list[int | None] | None) -> int:
    """Return the source of the generators of policies.

    Raises:
        ValueError: if a seed is negative.
    """
    if any(seed is not None and seed < 0 for seed in (seeds if isinstance(seeds, list) else [seeds])):
        raise ValueError(f"seed: expected ints from 0, got {seeds!r}")
    if isinstance(seeds, list):
        given = [seed for seed in seeds if seed is not None]
        seeds = int(np.random.SeedSequence(given).generate_state(1, np.uint64)[0]) if given else None
    entropy: Any = np.random.SeedSequence(seeds).entropy
    return int(entropy)


def _at_least(name: str, value: Any, least: int) -> int:
    """Return an int; raise a ValueError if it is none, or less than `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}: expected an int from {least}, got {value!r}")
    return int(value)
