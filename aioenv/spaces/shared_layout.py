"""`SharedLayout`: which arrays of a batch lie in memory that the parent and all workers share, and where.

The memory holds several *shared batches*. A request names one of them in one byte before the rest of its fixed part.
The worker reads its slots' actions there and writes their observations there, so neither travels. Both sides map the
same memory and make the same views of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from aioenv.spaces.layout import Layout, Leaf

__all__ = ["BATCH_INDEX_BYTES", "COPIED", "SHARED_BYTES", "SharedBatch", "SharedLayout", "choose_shared_layout"]

# An array is shared from this many bytes a worker and step on. Below, a socket is as fast, and the parent's memory
# stays private (docs/performance.md has the measurement).
SHARED_BYTES = 1 << 15
# The shared batch whose rows the parent copies as they arrive: each belongs to one request a slot. The others are
# handed to the caller without a copy, once the whole batch is there.
COPIED = 0
# The byte that names each shared batch in a frame.
BATCH_INDEX_BYTES = [bytes([number]) for number in range(256)]
_ALIGNMENT = 64  # bytes, of each array: a cache line


class SharedBatch(NamedTuple):
    """One batch in shared memory: arrays of shape `(num_envs, *shape)` by number of leaf."""

    observations: dict[int, np.ndarray[Any, Any]]
    actions: dict[int, np.ndarray[Any, Any]]


class SharedLayout(NamedTuple):
    """The layout of the shared memory, which parent and workers know."""

    num_envs: int
    num_batches: int
    observations: tuple[int, ...]  # the numbers of the array leaves that are shared
    actions: tuple[int, ...]

    def size(self, observations: Layout, actions: Layout) -> int:
        """Return how many bytes of memory it takes."""
        leaves = self._leaves(observations, actions)
        return self.num_batches * sum(_aligned_bytes(leaf, self.num_envs) for leaf in leaves)

    def batches(self, memory: Any, observations: Layout, actions: Layout) -> list[SharedBatch]:
        """Make views of the memory, which all processes share."""
        offset = 0
        batches = []
        for _ in range(self.num_batches):
            arrays = []
            for leaf in self._leaves(observations, actions):
                arrays.append(np.ndarray((self.num_envs, *leaf.shape), leaf.dtype, memory, offset))
                offset += _aligned_bytes(leaf, self.num_envs)
            split = len(self.observations)
            batches.append(
                SharedBatch(
                    dict(zip(self.observations, arrays[:split], strict=True)),
                    dict(zip(self.actions, arrays[split:], strict=True)),
                )
            )
        return batches

    def _leaves(self, observations: Layout, actions: Layout) -> list[Leaf]:
        return [observations.leaves[i] for i in self.observations] + [actions.leaves[i] for i in self.actions]


def choose_shared_layout(
    transport: str, observations: Layout, actions: Layout, num_envs: int, num_workers: int, num_batches: int
) -> SharedLayout | None:
    """Choose the arrays that a transport shares: large ones for "auto", all for "shared"; None if there are none."""

    def chosen(layout: Layout) -> tuple[int, ...]:
        least = 1 if transport == "shared" else SHARED_BYTES
        share = -(-num_envs // num_workers)
        return tuple(i for i, leaf in enumerate(layout.leaves) if _row_bytes(leaf) * share >= least)

    if transport == "frames":
        return None
    shared = SharedLayout(num_envs, num_batches, chosen(observations), chosen(actions))
    return shared if shared.observations or shared.actions else None


def _row_bytes(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize


def _aligned_bytes(leaf: Leaf, num_envs: int) -> int:
    return -(-_row_bytes(leaf) * num_envs // _ALIGNMENT) * _ALIGNMENT
