"""The code that workers are started with: snapshots of factories, the modules they need, and a look at one env."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
from gymnasium import Env
from gymnasium.envs.registration import ENV_ID_RE, EnvSpec

from aioenv.assign import spread
from aioenv.core.arguments import check_factories, check_seconds, check_worker_env
from aioenv.definitions.restore import FactoryReference
from aioenv.definitions.snapshot import CodeSnapshot
from aioenv.ipc.messages import dump_code
from aioenv.process.launch import check_start
from aioenv.process.supervisor import Worker
from aioenv.worker.description import EnvMetadata, MetadataService
from aioenv.worker.registry import capture_registry
from aioenv.worker.specs import restore_values

__all__ = ["WorkerCode", "describe_env", "make_program", "needed_by"]


class WorkerCode(NamedTuple):
    """The code that the workers of a vector env are started with.

    Attributes:
        program: the factories, and the definitions that they refer to.
        spans: the first slot of each worker, and the one after its last.
        registry: the entries of Gymnasium's registry (see `worker.registry.capture_registry`); None where workers are
            threads, which have it.
    """

    program: CodeSnapshot
    spans: Sequence[tuple[int, int]]
    registry: tuple[bytes, bytes] | None


def make_program(factories: Sequence[Callable[..., Any]], num_workers: int, *, live: bool = False) -> WorkerCode:
    """Take a snapshot of factories and of the code that they refer to.

    Args:
        factories: one a slot.
        num_workers: the number of workers.
        live: whether the workers are threads of this process.

    Raises:
        TypeError: if a factory can't be sent to a worker.
    """
    spans = spread(len(factories), num_workers)
    if live:
        return WorkerCode(CodeSnapshot(factories, spans, live=True), spans, None)
    registry = capture_registry()
    program = CodeSnapshot(factories, spans, names=registry.names, specs=registry.specs)
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
    code = make_program([factory], 1)
    worker = Worker(
        dump_code(partial(MetadataService, FactoryReference())),
        index=0,
        slots=(0,),
        start=check_start(start),
        env=check_worker_env(worker_env, 1)[0],
        preload=(preload,) if isinstance(preload, str) else tuple(preload),
        needed=needed_by([factory]),
        registry=code.registry,
        code=code.program.code(0),
        definitions=code.program.table,
        start_timeout_s=check_seconds("start_timeout_s", start_timeout_s),
    )
    try:
        await worker.start()
        metadata: EnvMetadata = worker.description
        await worker.close()
    except BaseException:
        await worker.close_now()
        raise
    return metadata._replace(spec=restore_values(metadata.spec, factory))
