"""Which arrays of a batch lie in memory that the parent and all workers share, and where.

Such a *plane* has several lanes, each with room for one batch. A request names its lane in one byte before the rest
of its fixed part; the worker finds its slots' actions there and puts their observations there, and neither travels.
Both sides map the same memory and make the same views of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from aioenv.spaces.layout import Layout, Leaf

__all__ = ["COPIED", "LANE_BYTES", "SHARED_BYTES", "SharedBatch", "SharedLayout", "choose_plane"]

# From so many bytes a worker and step on an array is shared. Below, a socket is as fast, and the parent's memory stays
# its own (docs/performance.md has the measurement).
SHARED_BYTES = 1 << 15
# The lane whose rows belong to one request a slot: the parent copies out of it what has arrived. The others are
# handed to the caller as they are, once the whole batch is there.
COPIED = 0
# What names each lane on the wire.
LANE_BYTES = [bytes([number]) for number in range(256)]
_ALIGNMENT = 64  # of each array, in bytes: a cache line


class SharedBatch(NamedTuple):
    """One batch: arrays of shape `(num_envs, *shape)` by the number of their leaf."""

    observations: dict[int, np.ndarray[Any, Any]]
    actions: dict[int, np.ndarray[Any, Any]]


class SharedLayout(NamedTuple):
    """What both sides must know to find the arrays."""

    num_envs: int
    num_lanes: int
    observations: tuple[int, ...]  # the numbers of the array leaves that are shared
    actions: tuple[int, ...]

    def size(self, observations: Layout, actions: Layout) -> int:
        """How many bytes of memory it takes."""
        leaves = self._leaves(observations, actions)
        return self.num_lanes * sum(_room(leaf, self.num_envs) for leaf in leaves)

    def lanes(self, memory: Any, observations: Layout, actions: Layout) -> list[SharedBatch]:
        """Views of the memory: what is written into them, the other processes see."""
        offset = 0
        lanes = []
        for _ in range(self.num_lanes):
            arrays = []
            for leaf in self._leaves(observations, actions):
                arrays.append(np.ndarray((self.num_envs, *leaf.shape), leaf.dtype, memory, offset))
                offset += _room(leaf, self.num_envs)
            split = len(self.observations)
            lanes.append(
                SharedBatch(
                    dict(zip(self.observations, arrays[:split], strict=True)),
                    dict(zip(self.actions, arrays[split:], strict=True)),
                )
            )
        return lanes

    def _leaves(self, observations: Layout, actions: Layout) -> list[Leaf]:
        return [observations.leaves[i] for i in self.observations] + [actions.leaves[i] for i in self.actions]


def choose_plane(
    transport: str, observations: Layout, actions: Layout, num_envs: int, num_workers: int, num_lanes: int
) -> SharedLayout | None:
    """The plane for a transport: with "auto" large arrays, with "shared" all; None if there is nothing to share."""

    def chosen(layout: Layout) -> tuple[int, ...]:
        least = 1 if transport == "shared" else SHARED_BYTES
        share = -(-num_envs // num_workers)
        return tuple(i for i, leaf in enumerate(layout.leaves) if _row_bytes(leaf) * share >= least)

    if transport == "frames":
        return None
    plane = SharedLayout(num_envs, num_lanes, chosen(observations), chosen(actions))
    return plane if plane.observations or plane.actions else None


def _row_bytes(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize


def _room(leaf: Leaf, num_envs: int) -> int:
    return -(-_row_bytes(leaf) * num_envs // _ALIGNMENT) * _ALIGNMENT
