"""What envs are, asked of a worker that makes one and ends: no env is built in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from gymnasium import Env

from aioenv.core.arguments import check_factories, check_seconds, check_worker_env
from aioenv.core.imports import needed_by
from aioenv.core.programs import make_program
from aioenv.definitions.restore import FactoryReference
from aioenv.ipc.messages import dump_code
from aioenv.process.launch import check_start
from aioenv.process.supervisor import Worker
from aioenv.worker.description import EnvMetadata, MetadataService
from aioenv.worker.specs import restore_values

__all__ = ["describe_env"]


async def describe_env(
    factory: Callable[[], Env[Any, Any]],
    *,
    start: str | None = None,
    start_timeout_s: float = 60.0,
    preload: Iterable[str] = (),
    worker_env: Mapping[str, str] | None = None,
) -> EnvMetadata:
    """What the envs of a factory are. Arguments and errors are those of `EnvCreator.metadata`."""
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
        await worker.kill()
        raise
    return metadata._replace(spec=restore_values(metadata.spec, factory))
