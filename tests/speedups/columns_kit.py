"""Infos of numbers and arrays on their way through the parent, for tests of what is done with them in C."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aioenv import speedups
from aioenv.core.requests import WorkerRequest, read_payload
from aioenv.core.worker_pool import WorkerSlots
from aioenv.ipc.messages import dump, dump_columns, load
from aioenv.spaces import infos as merging
from aioenv.spaces.infos import Columns, Gatherer, Schema, SchemaTable, merge_infos

compiled = pytest.mark.skipif(not speedups.compiled, reason=f"not compiled: {speedups.why_not}")


class Ends:
    """A worker with slots `start` to `stop`, and what the parent knows of its infos."""

    def __init__(self, start: int, stop: int, same: dict[Schema, Schema]) -> None:
        self.gatherer = Gatherer()
        self.member = WorkerSlots(None, start, stop, SchemaTable(same))  # type: ignore[arg-type]

    def tell(
        self, infos: Sequence[tuple[int, dict[Any, Any]]], rows: Sequence[int], start: int
    ) -> tuple[WorkerRequest, bytes]:
        """The part of some of its rows, from row `start` of the batch on, and the payload of its reply."""
        groups = self.gatherer.gather([(row, info) for row, info in infos if info], rows)
        self.member.schemas.update(load(dump(self.gatherer.take_new_schemas())))
        slots = np.array(rows, np.int64) + self.member.start
        batch: Any = SimpleNamespace(rows=lambda *args, **kwargs: [])
        return WorkerRequest(self.member, slots, start, batch), dump_columns(groups)


def a_step(*workers: Sequence[dict[str, Any]]) -> list[tuple[WorkerRequest, bytes]]:
    """Parts and payloads of a step of all slots, whose infos these are by worker."""
    same: dict[Schema, Schema] = {}
    told, start = [], 0
    for infos in workers:
        ends = Ends(start, start + len(infos), same)
        told.append(ends.tell(list(enumerate(infos)), range(len(infos)), start))
        start += len(infos)
    return told


def view(payload: bytes) -> memoryview:
    return memoryview(bytearray(payload))


def in_c(part: Any, payload: Any) -> Any:
    assert speedups.read_columns is not None
    return speedups.read_columns(part, payload, Columns)


def merged_in_c(parts: Any, size: Any, named: Any = merging._named) -> Any:
    assert speedups.merge_columns is not None
    return speedups.merge_columns(parts, size, named)


def in_python(part: WorkerRequest, payload: memoryview) -> Any:
    """What `read_payload` makes of a payload without C: columns, or the exception as text."""
    part.columns = ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speedups, "read_columns", None)
        try:
            read_payload(part, payload)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
    return part.columns


def merged_in_python(parts: Sequence[Columns], size: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speedups, "merge_columns", None)
        try:
            return merge_infos(parts, size)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"


def seen(found: Any) -> Any:
    """All that there is to see of columns or infos; schemas by their identity, as the parent tells them apart."""
    if isinstance(found, np.ndarray):
        if found.dtype.hasobject:
            return found.shape, [seen(item) for item in found.tolist()]
        return type(found), found.dtype.str, found.shape, found.flags.writeable, found.tobytes()
    if isinstance(found, Schema):
        return id(found)
    if isinstance(found, dict):
        return [(key, seen(value)) for key, value in found.items()]
    if isinstance(found, list | tuple):
        return type(found), [seen(item) for item in found]
    return repr(found) if isinstance(found, float | np.number) else found  # NaN is not NaN
