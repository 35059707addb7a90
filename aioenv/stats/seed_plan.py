"""`SeedPlan`: the seeds of all episodes to come, the same for any number of workers and whatever the timing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.stats.block import SharedBlock, can_share

__all__ = ["SeedPlan"]


class SeedPlan:
    """A list of seeds, of which slot i's episode k gets number `i + k * num_envs`, and from the start again at its end.

    How many episodes a slot has begun is in memory that all processes share, so that a worker that is started again
    goes on. Where memory can't be shared it begins anew.

    Args:
        seeds: int64.
        num_envs: how many slots there are.
    """

    def __init__(self, seeds: npt.NDArray[np.int64], num_envs: int) -> None:
        self._set_up(seeds, num_envs, SharedBlock(8 * num_envs, shared=can_share()))

    def _set_up(self, seeds: npt.NDArray[np.int64], num_envs: int, block: SharedBlock) -> None:
        self._seeds = seeds
        self._num_envs = num_envs
        self._block = block
        self._begun: Any = block.data.cast("q")  # by slot; each is written by one worker alone, so without a lock

    def first(self, slots: Iterable[int]) -> list[int | None]:
        """The seeds that slots begin with."""
        return [int(self._seeds[slot]) for slot in slots]

    def next(self, slot: int) -> int:
        """The seed of a slot's next episode."""
        begun = self._begun[slot]
        self._begun[slot] = begun + 1
        return int(self._seeds[(slot + begun * self._num_envs) % len(self._seeds)])

    def begin(self, slot: int) -> None:
        """A slot has been given a seed, in place of its first one."""
        self._begun[slot] = 1

    def close(self) -> None:
        """Let go of the memory in this process. Idempotent."""
        if not self._block.closed:
            self._begun.release()
            self._block.close()
            self._block.data.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._seeds, self._num_envs, self._block if self._block.shared else None)


def _rebuild(seeds: npt.NDArray[np.int64], num_envs: int, block: SharedBlock | None) -> SeedPlan:
    plan = SeedPlan.__new__(SeedPlan)
    plan._set_up(seeds, num_envs, block or SharedBlock(8 * num_envs, shared=False))
    return plan
