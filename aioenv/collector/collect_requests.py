"""Requests to collectors and their replies: the payloads of COLLECT frames, and rollouts as buffers.

A rollout travels as the raw buffers of its arrays, in the fixed part of the reply, and a pickle of what is around them.
The parent allocates the buffers before it asks, with the sizes that the rollout before had. If the rollout has others
(as the first one has: none are known before the policy was called), the reply names them, and has no fixed part. The
parent then fetches the buffers by another COLLECT.

A collector of this machine copies large buffers into a block of shared memory, which the request names. The arrays of
the rollout are those over the block. It is used again once none of them is left.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from aioenv.collector.weights import Spans
from aioenv.definitions.table import DefinitionTable
from aioenv.ipc.frames import Buffer
from aioenv.ipc.messages import Failure, dump, load
from aioenv.ipc.shared_data import ALIGNMENT
from aioenv.rollout.recorder import Infos, Rollout

__all__ = [
    "Begin",
    "CollectReply",
    "CollectRequest",
    "DumpedRollout",
    "block_size",
    "buffers_in",
    "dump_rollout",
    "load_rollout",
    "new_buffers",
]


class Begin(NamedTuple):
    """How the slots of a new process begin.

    Attributes:
        seed: of their first episodes, as `reset` takes it; None: no seeds, or those of the seed plan.
        episodes: by slot, the number of the episode in the plan of resets that it begins with; None: there is no plan,
            or it is the first one.
        restarts: how often the collector was replaced, since it has sent a rollout.
    """

    seed: int | list[int | None] | None
    episodes: list[int] | None
    restarts: int


class CollectRequest(NamedTuple):
    """COLLECT: collect a rollout, or send the buffers of one.

    Attributes:
        sizes: the sizes of the buffers that the reply is expected to have, in bytes; None: it is to have none.
        begin: resets the slots first; None: they go on.
        weights: a pickle of new weights, whose arrays have their data in the fixed part of the request, or in shared
            data; empty: the policy keeps its weights.
        weights_spans: see `DumpedWeights`.
        shared: the number of the shared data (see `worker_context.take_data`); None: there are none.
        fetch: the request whose rollout is to be sent; None: collect one.
        block: the offset and the size of a block of shared memory, to write buffers of `sizes` into; None: the reply is
            to have them.
    """

    sizes: tuple[int, ...] | None
    begin: Begin | None = None
    weights: bytes = b""
    weights_spans: Spans = ()
    shared: int | None = None
    fetch: int | None = None
    block: tuple[int, int] | None = None


class CollectReply(NamedTuple):
    """The payload of a RESULT to COLLECT.

    Attributes:
        rollout: its pickle; empty if there is none.
        sizes: the sizes of its buffers, in bytes.
        in_block: whether its buffers are in the block that the request names.
        infos: a pickle of the infos that are not empty, by step; empty if all are.
        has_final_obs: see `Rollout`.
        episodes: by slot, how many episodes of the plan of resets were begun; None: there is no plan.
        failures: exceptions of rows, or of the policy (no row); there is no rollout then.
        refused_weights: whether the policy raised when it was given weights.
        lacks_weights: whether the last weights could not be had, or were refused before; there is no rollout then.
        policy_s: the part of that which went to the policy.
        finished: whether no env has a further episode.
    """

    rollout: bytes = b""
    sizes: tuple[int, ...] = ()
    in_block: bool = False
    infos: bytes = b""
    has_final_obs: bool = True
    episodes: list[int] | None = None
    failures: Sequence[Failure] = ()
    refused_weights: bool = False
    lacks_weights: bool = False
    policy_s: float = 0.0
    finished: bool = False


class DumpedRollout(NamedTuple):
    """A rollout as it travels: the parts of a `CollectReply` of the same names, and the buffers."""

    rollout: bytes
    buffers: list[Buffer]
    infos: bytes
    has_final_obs: bool


def dump_rollout(rollout: Rollout, table: DefinitionTable | None) -> DumpedRollout:
    """Take a rollout apart.

    Args:
        rollout: the rollout.
        table: the definitions that the receiver has.

    Raises:
        Exception: if an object in it can't be pickled.
    """
    found: list[memoryview] = []
    fields = tuple(rollout[: rollout._fields.index("infos")]), rollout.extras
    try:
        data = pickle.dumps(fields, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda each: found.append(each.raw()))
    except Exception:
        data = None
    if data is None or b"main__" in data:  # definitions of the main module among objects
        found, data = [], dump(fields, table)
    infos = rollout.infos.not_empty()
    buffers: list[Buffer] = list(found)
    return DumpedRollout(data, buffers, dump(infos, table) if infos else b"", rollout._has_final_obs)


def new_buffers(sizes: Sequence[int]) -> list[memoryview]:
    """Allocate buffers of these sizes."""
    return [memoryview(np.empty(size, np.uint8)) for size in sizes]  # type: ignore[arg-type]


def block_size(sizes: Sequence[int]) -> int:
    """Return how many bytes buffers of these sizes take in shared memory."""
    return sum(size + -size % ALIGNMENT for size in sizes)


def buffers_in(memory: Any, sizes: Sequence[int]) -> list[memoryview]:
    """Return the buffers of these sizes in a block of shared memory; both sides find the same ones."""
    view, begin, buffers = memoryview(memory).cast("B"), 0, []
    for size in sizes:
        buffers.append(view[begin : begin + size])
        begin += size + -size % ALIGNMENT
    return buffers


def load_rollout(kind: type[Rollout], reply: CollectReply, buffers: Sequence[memoryview]) -> Rollout:
    """Put a rollout together again; its arrays are those over the buffers, and infos are unpickled on first access.

    Args:
        kind: the class to make.
        reply: describes it.
        buffers: of the sizes that the reply names.

    Raises:
        WireError: if an object in it does not unpickle.
    """
    if buffers:
        fields, extras = pickle.loads(reply.rollout, buffers=buffers)
    else:
        fields, extras = load(reply.rollout)
    steps = len(fields[kind._fields.index("reward")])
    pieces: list[list[Any]] = [[step] if reply.infos else [] for step in range(steps)]
    rollout = kind._make((*fields, Infos(pieces, partial(_infos_of, _LazyInfos(reply.infos))), extras))
    rollout._has_final_obs = reply.has_final_obs
    return rollout


class _LazyInfos:
    """Infos that are unpickled when they are asked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._infos: dict[int, dict[str, Any]] | None = None

    def at(self, step: int) -> dict[str, Any]:
        if self._infos is None:
            self._infos = load(self._data)
            self._data = b""
        return self._infos.get(step, {})


def _infos_of(infos: _LazyInfos, pieces: Sequence[int]) -> dict[str, Any]:
    """Merge the infos of a step for `Infos`."""
    return infos.at(pieces[0]) if pieces else {}
