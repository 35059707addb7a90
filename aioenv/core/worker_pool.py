"""The workers of one vector env: their code, how slots are spread over them, how they start, and their spaces.

The code is a snapshot of the factories and the modules that these need. All workers must agree on the spaces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Env, Space
from gymnasium.envs.registration import ENV_ID_RE, EnvSpec
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces

from aioenv.assign import spread
from aioenv.core.arguments import check_factories, check_seconds, check_worker_env
from aioenv.core.service_calls import ModelFields
from aioenv.definitions.restore import CommonReference, FactoryReference
from aioenv.definitions.snapshot import CodeSnapshot
from aioenv.errors import ResumeError, SpaceMismatchError, WorkerStartError
from aioenv.ipc.memory import SharedMemory
from aioenv.ipc.messages import dump_code, load
from aioenv.platform import INTERRUPTING, HeldSignals, usable_cpus
from aioenv.process.async_resource import gather_internal, internal_task, wait_through_cancel
from aioenv.process.failures import cannot_start
from aioenv.process.launch import check_start
from aioenv.process.remote import Cluster, Placements
from aioenv.process.restart_policy import RestartPolicy
from aioenv.process.supervisor import Worker
from aioenv.spaces.infos import Schema, SchemaTable
from aioenv.spaces.layout import Layout, Leaf, SharedBatch, SharedLayout, batch_space, choose_shared_layout, packed
from aioenv.spaces.seeding import spread_seeds
from aioenv.speedups import read_by_c
from aioenv.state.assets import Looks
from aioenv.state.render_source import MujocoSource
from aioenv.stats.counters import ResetPlan
from aioenv.stats.episodes import EpisodeStats
from aioenv.stats.running import SharedRunningStats
from aioenv.worker.description import EnvDescription, EnvMetadata, OneEnvService, describe_metadata
from aioenv.worker.env_service import EnvService
from aioenv.worker.loop import serve_on_thread
from aioenv.worker.specs import capture_registry, restore_values
from aioenv.worker.vector_service import VectorService
from aioenv.worker.worker_end import MAX_POLL_S

__all__ = [
    "WorkerCode",
    "WorkerPool",
    "WorkerPoolConfig",
    "WorkerSlots",
    "all_of",
    "describe_env",
    "make_program",
    "needed_by",
    "one_env_worker",
]


class WorkerCode(NamedTuple):
    """The code that the workers of a vector env are started with.

    Attributes:
        program: the factories, and the definitions that they refer to.
        spans: the first slot of each worker, and the one after its last.
        registry: the entries of Gymnasium's registry (see `worker.specs.capture_registry`); None where workers are
            threads, which have it.
    """

    program: CodeSnapshot
    spans: Sequence[tuple[int, int]]
    registry: tuple[bytes, bytes] | None


def make_program(
    factories: Sequence[Callable[..., Any]],
    num_workers: int,
    *,
    live: bool = False,
    portable: bool = False,
    autoreset_options: Any = None,
) -> WorkerCode:
    """Take a snapshot of factories and of the code that they refer to.

    Args:
        factories: one a slot.
        num_workers: the number of workers.
        live: whether the workers are threads of this process.
        portable: whether they may be on other machines.
        autoreset_options: the options of automatic resets, a dict or a function, which is sent like factories; None:
            there are none.

    Raises:
        TypeError: if a factory or the options can't be sent to a worker.
    """
    spans = spread(len(factories), num_workers)
    common = None if autoreset_options is None else ("autoreset_options", autoreset_options)
    # what a signal handler raises would seem to come from an object that does not pickle
    with HeldSignals(*INTERRUPTING, twice=False):
        if live:
            return WorkerCode(CodeSnapshot(factories, spans, live=True, common=common), spans, None)
        registry = capture_registry()
        program = CodeSnapshot(
            factories, spans, names=registry.names, specs=registry.specs, portable=portable, common=common
        )
        return WorkerCode(program, spans, registry.entries)


def needed_by(factories: Iterable[Callable[[], Any]]) -> tuple[str, ...]:
    """Guess which modules factories will import, so that a fork server can import them once for all workers.

    A wrong guess costs a little time, a missing one a little more: each worker then imports for itself.

    Args:
        factories: functions, partials, lambdas with an id among their constants, defaults or closed-over values.

    Returns:
        The modules of the factories, and entry points ("module:Class") of envs whose ids or specs they hold, each once;
        without those of the main script.
    """
    distinct = {id(factory): factory for factory in factories}.values()
    # factories made in a loop share their code, and the first of them differ as much as all do
    names = dict.fromkeys(name for factory in list(distinct)[:64] for name in _modules(factory))
    return tuple(name for name in names if name.partition(":")[0] not in ("__main__", "__mp_main__"))


def _modules(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        prefix, _, name = value.rpartition(":")
        if prefix.replace(".", "_").isidentifier() and ENV_ID_RE.fullmatch(name):  # not what "train: …" says
            yield prefix
        elif name in gymnasium.registry:
            yield from _modules(gymnasium.registry[name])
    elif isinstance(value, EnvSpec):
        if isinstance(value.entry_point, str):
            yield value.entry_point
        elif value.entry_point is not None:
            yield from _modules(value.entry_point)
    elif isinstance(value, partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _modules(part)
    elif callable(value):
        module = getattr(value, "__module__", None)
        if isinstance(module, str):
            yield module
        code = getattr(value, "__code__", None)
        cells = [_contents(cell) for cell in getattr(value, "__closure__", None) or ()]
        inner = getattr(value, "__wrapped__", None)  # of a decorated function, or of a creator
        if inner is not None and inner is not value:
            yield from _modules(inner)
        for seen in (*getattr(code, "co_consts", ()), *(getattr(value, "__defaults__", None) or ()), *cells):
            if isinstance(seen, (str, EnvSpec)):
                yield from _modules(seen)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


async def describe_env(
    factory: Callable[[], Env[Any, Any]],
    *,
    start: str | None = None,
    start_timeout_s: float = 60.0,
    preload: Iterable[str] = (),
    worker_env: Mapping[str, str] | None = None,
) -> EnvMetadata:
    """Get the metadata of a factory's env from a worker that makes one and ends.

    Args, Raises: as `EnvCreator.metadata`.
    """
    check_factories([factory])
    async with one_env_worker(
        factory,
        describe_metadata,
        start=check_start(start),
        env=check_worker_env(worker_env, 1)[0],
        preload=(preload,) if isinstance(preload, str) else tuple(preload),
        start_timeout_s=check_seconds("start_timeout_s", start_timeout_s),
    ) as worker:
        metadata: EnvMetadata = worker.description
    return metadata._replace(spec=restore_values(metadata.spec, factory))


@asynccontextmanager
async def one_env_worker(
    factory: Callable[[], Env[Any, Any]], examine: Callable[[Env[Any, Any]], Any], **how: Any
) -> AsyncIterator[Worker]:
    """Start a worker that makes an env, examines it and closes it, and end the worker after the block.

    Args:
        factory: makes the env.
        examine: a function of a module, which the worker calls with the env; the worker's `description` is its result.
        **how: arguments of `Worker`.

    Raises:
        WorkerStartError: if the env can't be made or examined.
    """
    code = make_program([factory], 1)
    worker = Worker(
        dump_code(partial(OneEnvService, FactoryReference(), examine)),
        index=0,
        slots=(0,),
        needed=needed_by([factory]),
        registry=code.registry,
        code=code.program.code(0),
        definitions=code.program.table,
        **how,
    )
    try:
        await worker.start()
        yield worker
        await worker.close()
    except BaseException:
        await worker.close_now()
        raise


ObservationMode = str | tuple[Space[Any], Space[Any]]
T = TypeVar("T")


@read_by_c
class WorkerSlots:
    """A worker and its slots, `start` to `stop`."""

    def __init__(self, worker: Worker, start: int, stop: int, schemas: SchemaTable) -> None:
        self.worker = worker
        self.start = start
        self.stop = stop
        self.schemas = schemas


class WorkerPoolConfig(NamedTuple):
    """The settings of a worker pool; see `AsyncVectorEnv`."""

    code: WorkerCode | None  # None: there are no workers
    num_workers: int
    start: str
    channel: str
    preload: tuple[str, ...]
    needed: tuple[str, ...]  # modules that the factories will import, guessed
    observation_mode: ObservationMode
    autoreset_mode: AutoresetMode
    start_timeout_s: float
    log_prefix: str | None
    worker_env: Sequence[Mapping[str, str] | None]  # one a worker
    find_sources: bool
    restart: RestartPolicy | None = None
    cpu_affinity: tuple[tuple[int, ...], ...] | None = None
    transport: str = "auto"
    num_shared_batches: int = 2  # for arrays in shared memory
    ignored: tuple[str, ...] = ()  # names of signals
    in_thread: bool = False  # workers are threads of this process
    inline: bool = False  # and their short steps run on the caller's thread
    inline_always: bool = False  # or all of their steps
    stats: Sequence[SharedRunningStats] = ()  # the statistics that the factories refer to
    episodes: EpisodeStats | None = None  # counts episodes
    seeds: npt.NDArray[np.int64] | None = None  # the seeds of a seed plan
    vectorized: bool = False  # a factory makes one vector env of all slots of a worker
    by_camera: bool = False  # see `find_source`
    looks: Looks = "each reset"  # see `RenderConfig.edits`
    cast: bool = False  # cast observations of single envs to their space's dtype and shape
    check_numerics: bool = False  # NaN and infinite numbers are errors
    lenient: bool = False  # accept all actions and numbers that Gymnasium accepts
    spares: bool = False  # each slot has a second env, in a worker of its own; `num_workers` is that of both
    clusters: Sequence[Cluster | None] = ()  # where each worker is placed, None: on this machine; empty: all are here
    first_slot: int = 0  # slots of a collector are a part of more: the number of the first one among them
    all_slots: int | None = None  # and how many these are; None: there are no others


class WorkerPool:
    """Starts the workers of a vector env, and holds the settings, memory and spaces that they share.

    Attributes:
        num_envs: the number of slots.
        members: the workers with their slots, in order.
        spares: the workers of the slots' second envs, in the same order; empty if there are none (see `SpareEnvs`).
        workers: all workers, in an order that does not change: those of the slots' second envs last.
        single_observation_space, observation_space, single_action_space, action_space: as in Gymnasium.
        metadata, render_mode, spec: of the first env.
        render_modes: the render mode of each slot.
        observations, actions: the layouts of the single spaces.
        received: the layout of observations as workers send them.
        replaced: the leaves of it that differ from those of `observations`, by number (see `replace_leaf`).
        sources: one MuJoCo source a slot, or None where a slot has none (or none were asked for).
        first_checkpoints: the checkpoints of new envs, by worker (see `EnvService.configure`), or None.
        drawn_by: the name of the OpenGL that workers draw observations with; empty if they draw none.
        checkpoint_size: float64 numbers of checkpoint that each reply has a row; 0 if slots are not resumed.
        reset_plan: the seeds of episodes that are given none, and the options of automatic resets; None if there are
            neither.
        shared_batches: the arrays in shared memory, by number of the batch; empty if there are none.
        vectorized: whether the slots of a worker are one vector env.
        steps_some: whether a slot can be stepped without the others of its worker.
        definitions: the table of the definitions that workers have.
        stats: the statistics that the factories refer to.
        episodes: counts episodes; None if they are not counted.
        model_fields: fields of the models of native slots; None before the start.
    """

    members: list[WorkerSlots]
    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    render_modes: list[str | None]
    spec: Any
    observations: Layout
    received: Layout
    replaced: dict[int, Leaf]
    actions: Layout
    sources: list[MujocoSource | None]
    drawn_by: str
    checkpoint_size: int
    first_checkpoints: dict[WorkerSlots, Any]
    steps_some: bool
    _alike: set[Worker]  # the workers whose first env has the spaces that were agreed on
    shared_batches: list[SharedBatch]

    def __init__(self, config: WorkerPoolConfig) -> None:
        self._config = config
        self.vectorized = config.vectorized
        self.members = []
        self.spares: list[WorkerSlots] = []
        self.shared_batches = []
        self.stats = config.stats
        self.episodes = config.episodes
        self.model_fields: ModelFields | None = None
        self._shared_layout: SharedLayout | None = None
        self._memory: SharedMemory | None = None
        self.reset_plan: ResetPlan | None = None
        assert config.code is not None
        spans, program = config.code.spans, config.code.program
        self.definitions = program.table
        self._stops = np.array([stop for _, stop in spans])
        self.num_envs = spans[-1][1]
        self._placements = Placements(config.clusters, config.start_timeout_s)
        same: dict[Schema, Schema] = {}
        seen_warnings: set[str] = set()
        # with fewer CPUs than workers, a worker that polls would take the CPU of another
        affinity = config.cpu_affinity
        cpus = usable_cpus() if affinity is None else len({*chain(*affinity[: config.num_workers])})
        poll_s = MAX_POLL_S if config.num_workers <= cpus else 0.0
        cpu_share = None if affinity is not None else max(1, cpus // config.num_workers)
        for spare in (False, True) if config.spares else (False,):
            for index, (start, stop) in enumerate(spans):
                worker = self._make_worker(index, start, stop, poll_s, cpu_share, seen_warnings, spare)
                (self.spares if spare else self.members).append(WorkerSlots(worker, start, stop, SchemaTable(same)))
        self.workers = [member.worker for member in (*self.members, *self.spares)]  # members change theirs

    def _make_worker(
        self,
        index: int,
        start: int,
        stop: int,
        poll_s: float,
        cpu_share: int | None,
        seen_warnings: set[str],
        spare: bool,
    ) -> Worker:
        """Make the handle of a worker for some successive slots.

        Args:
            index: its number among the workers of its kind.
            start, stop: its slots.
            poll_s, cpu_share, seen_warnings: see `Worker`.
            spare: whether it has the second envs of these slots.
        """
        config = self._config
        assert config.code is not None
        program, resume = config.code.program, config.restart is not None and config.restart.resume
        service: Any = partial(
            EnvService,
            FactoryReference(),
            config.autoreset_mode,
            config.find_sources,
            resume,
            config.cast,
            config.by_camera,
            config.looks,
            with_spec=index == 0 and not spare,
            lenient=config.lenient,
            numerics=config.check_numerics,
            has_spares=config.spares,
            spare=spare,
        )
        if config.vectorized:
            service = partial(
                VectorService,
                FactoryReference(),
                stop - start,
                config.find_sources,
                resume,
                with_spec=index == 0,
                numerics_from=start if config.check_numerics else None,
            )
        number = index + len(config.code.spans) if spare else index  # among the workers of both kinds
        affinity = config.cpu_affinity
        return Worker(
            dump_code(service),
            index=index,
            slots=tuple(range(start, stop)),
            role="spare worker" if spare else "worker",
            start=config.start,
            channel=config.channel,
            poll_s=poll_s,
            env=config.worker_env[number],
            log_prefix=config.log_prefix,
            seen_warnings=seen_warnings,
            preload=config.preload,
            needed=config.needed,
            registry=config.code.registry,
            code=program.code(index),
            definitions=program.table,
            start_timeout_s=config.start_timeout_s,
            cpus=affinity[number % len(affinity)] if affinity is not None else None,
            cpu_share=cpu_share,
            ignored_signals=config.ignored,
            thread_server=serve_on_thread if config.in_thread else None,
            placement=self._placements.of(number),
        )

    def forget_code(self) -> None:
        """Release the code that workers are made from: none is started any more."""
        self._config = self._config._replace(code=None)
        for worker in self.workers:
            worker.forget_code()

    async def start(self) -> None:
        """Start all workers at once, and agree on spaces. If anything fails, or is cancelled, none is left.

        Raises:
            WorkerStartError: if an env could not be made; the one of the lowest slot, if several. Or if two slots of
                a process have the same env.
            SpaceMismatchError: if the envs' spaces can't be batched.
        """
        try:
            self._share()
            await self._placements.start()
            await all_of(worker.start() for worker in self.workers)
            self._agree()
        except GeneratorExit:  # its loop was closed
            self.abandon()
            raise
        except BaseException:
            await wait_through_cancel(gather_internal(*(worker.close_now() for worker in self.workers)))
            await self._placements.close()
            self._free()
            raise

    def _share(self) -> None:
        """Make the memory that workers and this process share."""
        try:
            assert self._config.code is not None
            seeds, has_options = self._config.seeds, self._config.code.program.common is not None
            if seeds is not None or has_options:
                options = CommonReference() if has_options else None
                # with two envs a slot, the parent says which episode each of them begins
                shared = not self._config.spares and not self._placements
                self.reset_plan = ResetPlan(
                    self.num_envs,
                    seeds,
                    options,
                    counts_shared=shared,
                    first_slot=self._config.first_slot,
                    all_slots=self._config.all_slots,
                )
            if self._config.transport != "frames":
                self._memory = SharedMemory.create()
        except OSError as exc:
            raise cannot_start("workers", exc) from exc
        for worker in self.workers:
            worker.memory = self._memory

    def replace_leaf(self, key: str | None, space: Space[Any]) -> int:
        """Note that workers send another leaf than the user gets; to be called between `start` and `configure`.

        Args:
            key: the key of the leaf in a Dict of observations; None if it is the whole observation.
            space: the observation space that the user is given.

        Returns:
            The number of the leaf.
        """
        self.single_observation_space = space
        self.observation_space = batch_space(space, self.num_envs)
        self.observations = Layout(space)
        path = "" if key is None else f"[{key!r}]"
        (number,) = (i for i, leaf in enumerate(self.received.leaves) if leaf.path == path)
        self.replaced = {number: self.received.leaves[number]}
        return number

    async def configure(self, state_size: int, draws_late: bool) -> None:
        """Configure the replies of all workers (see `EnvService.configure`).

        Raises:
            WorkerStartError: if a worker ends, or takes longer than `start_timeout_s`.
        """
        self._lay_out_memory()
        self._configuration = (state_size, draws_late, self.checkpoint_size, self._shared_layout)
        each = (
            worker.finish_setup(self.configure_worker(worker, as_it_has=worker in self._alike))
            for worker in self.workers
        )
        checkpoints = await all_of(each)
        self.first_checkpoints = dict(zip(self.members, checkpoints, strict=False))  # spare envs have none

    def allow_inline(self) -> None:
        """Let short steps and resets of workers in this process, or all, run on the caller's thread."""
        for member in self.members:
            assert member.worker.thread_channel is not None
            member.worker.thread_channel.allow_inline(always=self._config.inline_always)

    async def configure_worker(self, worker: Worker, *, as_it_has: bool = False) -> Any:
        """Configure one worker, and return the first checkpoints of its envs.

        Args:
            worker: the worker.
            as_it_has: whether the spaces are those of its first env, so that they need not be sent.
        """
        spaces = (None, None) if as_it_has else (packed(self.received.space), packed(self.single_action_space))
        plan = () if self.reset_plan is None else (self.reset_plan,)
        return await worker.call("configure", *spaces, *self._configuration, worker.slots[0], *plan)

    def _lay_out_memory(self) -> None:
        """Decide which arrays lie in shared memory, and map them."""
        if self._memory is None:
            return
        observations, actions = self.received, self.actions
        num_envs, num_workers = self.num_envs, len(self.members)
        shared_layout = choose_shared_layout(
            self._config.transport, observations, actions, num_envs, num_workers, self._config.num_shared_batches
        )
        if shared_layout is not None and self.replaced:  # users don't get these
            shared_layout = shared_layout._replace(
                observations=tuple(i for i in shared_layout.observations if i not in self.replaced)
            )
        if shared_layout is None or not (shared_layout.observations or shared_layout.actions):
            self._free_memory()
            return
        try:
            memory = self._memory.allocate(shared_layout.size(observations, actions))
        except OSError as exc:  # no memory is left, or files may not be so large (`ulimit -f`)
            if self._config.transport == "shared":
                raise WorkerStartError(f'transport="shared": {exc}') from exc
            self._free_memory()
            return
        self._shared_layout = shared_layout
        self.shared_batches = shared_layout.batches(memory, observations, actions)

    def _free(self) -> None:
        """Release all resources that are shared with workers."""
        self._free_memory()
        if self.reset_plan is not None:
            self.reset_plan.close()
        if self.model_fields is not None:
            self.model_fields.close()

    def _free_memory(self) -> None:
        """Release the shared memory; it is freed when no array of it is left."""
        self.shared_batches = []
        if self._memory is not None:
            self._memory.close()
        for worker in self.workers:
            worker.memory = None  # or its next process would get a closed descriptor

    def seeds(self, seed: int | Sequence[int | None] | None, slots: npt.NDArray[np.int64]) -> list[int | None]:
        """Return one seed for each of `slots`.

        Args:
            seed: as of `AsyncVectorEnv.reset`.
            slots: the slots that are reset.

        Raises:
            ValueError: if a list has another length than there are slots.
        """
        return spread_seeds(seed, slots, int(self._stops[-1]))

    def shares(self, slots: npt.NDArray[np.int64]) -> list[tuple[WorkerSlots, npt.NDArray[np.int64]]]:
        """Return the workers that hold some of these slots, which are ascending, each with its own ones."""
        shares, start = [], 0
        for member, stop in zip(self.members, np.searchsorted(slots, self._stops).tolist(), strict=True):
            if stop > start:
                shares.append((member, slots[start:stop]))
            start = stop
        return shares

    async def close(self, grace_s: float) -> None:
        """End all workers, side by side."""
        try:
            await gather_internal(*(worker.close(grace_s) for worker in self.workers))
        finally:
            try:
                await self._placements.close()
            finally:
                self._free()

    def abandon(self) -> None:
        """Kill all workers without waiting."""
        for worker in self.workers:
            worker.abandon()
        self._placements.abandon()
        self._free()

    def _agree(self) -> None:
        """Find the spaces that all envs share, or say which ones differ."""
        descriptions: list[EnvDescription] = []
        loaded: dict[bytes | None, Any] = {None: None}  # equal ones once

        def read(data: bytes | None) -> Any:
            if data not in loaded:
                assert data is not None
                loaded[data] = load(data)
            return loaded[data]

        workers = [member.worker for member in self.members]
        self.model_fields = ModelFields([worker.description[0].model_fields for worker in workers], workers)
        _check_own_envs(workers)
        for worker in self.workers:
            first: EnvDescription = worker.description[0]
            for d in worker.description:
                if d.observation_space is None:
                    d = d._replace(observation_space=first.observation_space)
                if d.action_space is None:
                    d = d._replace(action_space=first.action_space)
                descriptions.append(d)
            worker.description = None
        first, spares = descriptions[0], descriptions[self.num_envs :]
        del descriptions[self.num_envs :]
        n = len(descriptions)
        self.metadata = {**first.metadata}
        if not self._config.vectorized:  # a vector env has a mode of its own
            self.metadata["autoreset_mode"] = self._config.autoreset_mode
        self.steps_some = all(d.stepped_alone for d in descriptions)
        self.render_modes = [d.render_mode for d in descriptions]
        self.render_mode = first.render_mode
        assert self._config.code is not None
        self.spec = restore_values(read(first.spec), self._config.code.program.factories[0])
        self.sources = [d.source for d in descriptions]
        self.drawn_by = next((d.drawn_by for d in descriptions if d.drawn_by), "")
        if self._config.restart is not None and self._config.restart.resume:
            _check_resumable(descriptions)
        self.checkpoint_size = max(d.checkpoint_size for d in descriptions)
        observation_spaces = [read(d.observation_space) for d in descriptions]
        action_spaces = [read(d.action_space) for d in descriptions]
        for slot, spare in enumerate(spares):
            _check_second_env(slot, "observation", read(spare.observation_space), observation_spaces[slot])
            _check_second_env(slot, "action", read(spare.action_space), action_spaces[slot])
        mode = self._config.observation_mode
        if isinstance(mode, tuple):
            self.observation_space, self.single_observation_space = mode
        else:
            self.single_observation_space = observation_spaces[0]
        whose = "observation_mode" if isinstance(mode, tuple) else "slot 0"
        _check_spaces(
            "observation", observation_spaces, self.single_observation_space, same=mode == "same", whose=whose
        )
        _check_spaces("action", action_spaces, action_spaces[0], same=True)
        if mode == "same":
            self.observation_space = batch_space(self.single_observation_space, n)
        elif mode == "different":
            self.observation_space = batch_differing_spaces(observation_spaces)
        self.single_action_space = action_spaces[0]
        self.action_space = batch_space(self.single_action_space, n)
        self.observations = self.received = Layout(self.single_observation_space)
        self.replaced = {}
        self.actions = Layout(self.single_action_space, bounded=not self._config.lenient)
        agreed = (self.single_observation_space, self.single_action_space)
        firsts = ((observation_spaces[m.start], action_spaces[m.start]) for m in self.members)
        self._alike = {worker for worker, own in zip(workers, firsts, strict=True) if all(map(is_, own, agreed))}


def _check_own_envs(workers: Iterable[Worker]) -> None:
    """Raise if two slots of a process have the same env, at any depth of their wrappers: each would step the other's.

    Args:
        workers: just started, in the order of their slots, with the descriptions of their services.

    Raises:
        WorkerStartError: naming both slots.
    """
    owners: dict[tuple[str, int | None, int], int] = {}  # slots by process and `id`
    for worker in workers:
        for slot, description in zip(worker.slots, worker.description, strict=True):
            for number, name in description.layers:
                owner = owners.setdefault((worker.node, worker.pid, number), slot)
                if owner != slot:
                    raise WorkerStartError(
                        f"slots {owner} and {slot} have the same env, a {name}: each step of one slot would also be a "
                        "step of the other. A factory must make a new env in each call, but one returned, or wrapped, "
                        "an env that was made before (by functools.lru_cache, a global or a singleton)",
                        slots=(owner, slot),
                        pid=worker.pid,
                    )


def _check_resumable(descriptions: list[EnvDescription]) -> None:
    """Raise unless all envs can go on in another process."""
    for slot, description in enumerate(descriptions):
        if description.checkpoint_obstacle is not None:
            raise ResumeError(
                f"RestartPolicy(resume=True): the env of slot {slot} can't be resumed: "
                f"{description.checkpoint_obstacle}. Use resume=False, and its episodes are truncated instead"
            )


def _check_spaces(kind: str, each: list[Any], single: Space[Any], *, same: bool, whose: str = "slot 0") -> None:
    """Raise unless all spaces go together; worded as Gymnasium's."""
    for slot, space in enumerate(each):
        # a custom space without an `__eq__` equals itself alone, of which each worker has a copy
        if space is single or space == single or dump_code(space) == dump_code(single):
            continue
        if not same and is_space_dtype_shape_equiv(space, single):
            continue
        if kind == "action":
            problem = (
                f"Some environments have an action space different from `{single}`. In order to batch actions, the "
                "action spaces from all environments must be equal"
            )
        elif same:
            problem = (
                "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation spaces "
                "are not equivalent. If this is intentional, use `observation_mode='different'` instead"
            )
        else:
            problem = (
                "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's "
                "observation spaces do not share a common shape and dtype"
            )
        raise SpaceMismatchError(f"{problem}. Slot {slot} has {space}, but {whose} has {single}")


def _check_second_env(slot: int, kind: str, space: Any, expected: Any) -> None:
    """Raise unless the second env of a slot has the space of the first."""
    if space != expected and dump_code(space) != dump_code(expected):
        raise SpaceMismatchError(
            f"spare_envs: both envs of slot {slot} must have the same spaces: got the {kind} spaces {expected} and "
            f"{space}"
        )


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Gather all results. If one raises, or this is cancelled, cancel the others; raise the first of several errors."""
    tasks = [internal_task(coroutine) for coroutine in coroutines]
    cancelled = None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as exc:
        cancelled = exc
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    if cancelled is not None:
        raise cancelled
    for kind in (Exception, BaseException):  # tasks were cancelled because of another's error
        for outcome in outcomes:
            if isinstance(outcome, kind):
                raise outcome
    return [task.result() for task in tasks]
