"""The code of a vector env, as its workers get it: factories, what they reach, and Gymnasium's registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aioenv.assign import spread
from aioenv.definitions.snapshot import CodeSnapshot
from aioenv.worker.registry import capture_registry

__all__ = ["WorkerCode", "make_program"]


class WorkerCode(NamedTuple):
    """All that the workers of a vector env are started with.

    Attributes:
        program: the factories, and what they reach.
        spans: the first slot of each worker, and the one after its last.
        registry: Gymnasium's (see `host.registry.Registry.entries`); None: as it is.
    """

    program: CodeSnapshot
    spans: Sequence[tuple[int, int]]
    registry: tuple[bytes, bytes] | None


def make_program(factories: Sequence[Callable[..., Any]], num_workers: int, *, live: bool = False) -> WorkerCode:
    """Take the snapshot.

    Args:
        factories: one a slot.
        num_workers: how many workers there will be.
        live: they are threads of this process.

    Raises:
        TypeError: if a factory can't be sent to a worker.
    """
    spans = spread(len(factories), num_workers)
    if live:
        return WorkerCode(CodeSnapshot(factories, spans, live=True), spans, None)
    registry = capture_registry()
    program = CodeSnapshot(factories, spans, names=registry.names, specs=registry.specs)
    return WorkerCode(program, spans, registry.entries)
