"""Moments in shared memory, each in two buffers: a writer that dies leaves the older one whole."""

from __future__ import annotations

import math
import platform
from math import isfinite
from typing import Any

import numpy as np
from numpy import add, multiply, subtract

from aioenv.stats.block import SharedBlock
from aioenv.stats.moments import Floats, Moments

__all__ = ["Cell", "Table"]

_HEAD = 3  # count, weight, epoch
# Where stores are seen in the order in which they were made, a reader needs no lock.
_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_TRIES = 64  # with writers all the time; then a reader waits for its turn


class Cell:
    """Moments; `sequence` counts how often they were written, and its last bit says which buffer holds them.

    Args:
        block: the memory, and its lock.
        sequence: an int64 memoryview of length 1.
        buffers: float64 `(2, 3 + 2 * size)` in it.
        shape: of the samples.
    """

    def __init__(self, block: SharedBlock, sequence: memoryview, buffers: Floats, shape: tuple[int, ...]) -> None:
        self._block = block
        self.sequence = sequence
        heads: list[Any] = [buffer[:_HEAD].data for buffer in buffers]
        states = [buffer[_HEAD:].reshape(2, *shape) for buffer in buffers]
        self._buffers = [(h, s, s[0, ...], s[1, ...]) for h, s in zip(heads, states, strict=True)]
        self._zeros = np.zeros((2, *shape))
        # for `add`: deviation and its square, what they are multiplied by
        self._change = np.zeros((2, *shape))
        self._delta, self._square = self._change[0, ...], self._change[1, ...]
        self._flat = self._change.reshape(2, -1)[0]
        self._dot = self._flat.dot
        self._factors = np.zeros((2, *(1,) * len(shape)))
        self._set_factors: Any = self._factors.reshape(2).data

    @property
    def epoch(self) -> float:
        """The epoch in which it was written; under the lock."""
        epoch: float = self._buffers[self.sequence[0] & 1][0][2]
        return epoch

    def add(self, sample: Any, decay: float, epoch: float) -> None:
        """Add one sample to the moments of this epoch; under the lock.

        Raises:
            ValueError: if it is not finite, nor its square; nothing has changed then.
        """
        now = self.sequence[0] & 1
        head, state, mean, m2 = self._buffers[now]
        new_head, new_state, _, new_m2 = self._buffers[now ^ 1]
        count, weight = head[0], head[1]
        if head[2] != epoch:
            count = weight = 0.0
            state = self._zeros
            mean, m2 = state[0, ...], state[1, ...]
        before = weight * decay
        after = before + 1.0
        delta, square, change, factors = self._delta, self._square, self._change, self._set_factors
        subtract(sample, mean, delta)  # (positional arguments and few of them: each costs as much as the sums)
        if not isfinite(self._dot(self._flat)):
            raise ValueError(f"expected finite numbers, got {np.asarray(sample)}: they would stay in the statistics")
        multiply(delta, delta, square)
        factors[0] = 1.0 / after
        factors[1] = before / after
        multiply(change, self._factors, change)
        add(state, change, new_state)
        if decay != 1.0:
            multiply(m2, decay, new_m2)
            add(new_m2, square, new_m2)
        new_head[0] = count + 1.0
        new_head[1] = after
        new_head[2] = epoch
        self.sequence[0] += 1

    def write(self, moments: Moments, epoch: float) -> None:
        """Put other moments in place; under the lock."""
        head, _, mean, m2 = self._buffers[self.sequence[0] & 1 ^ 1]
        mean[...] = moments.mean
        m2[...] = moments.m2
        head[0], head[1], head[2] = moments.count, moments.weight, epoch
        self.sequence[0] += 1

    def read(self) -> tuple[Moments, float]:
        """A copy of the moments, all of one moment in time, and their epoch. It does not wait for a writer."""
        if _ORDERED:
            for _ in range(_TRIES):
                sequence = self.sequence[0]
                copied = self.copy()
                if self.sequence[0] == sequence:
                    return copied
        if self._block.closed:
            return self.copy()
        with self._block.locked():
            return self.copy()

    def copy(self) -> tuple[Moments, float]:
        """As `read`, under the lock."""
        head, state, _, _ = self._buffers[self.sequence[0] & 1]
        state = state.copy()
        return Moments(head[0], head[1], state[0, ...], state[1, ...]), head[2]


class Table:
    """The layout of a block: a flag, one cell for all, one for each slot."""

    def __init__(self, shape: tuple[int, ...], num_slots: int, block: SharedBlock) -> None:
        n = num_slots + 1
        self._length = _HEAD + 2 * math.prod(shape)
        self.block = block
        self.flag = block.data[:8].cast("q")
        sequences = block.data[8 : 8 + 8 * n].cast("q")
        floats = np.frombuffer(block.data[8 + 8 * n :], np.float64)
        buffers = floats.reshape(n, 2, self._length)
        cells = [Cell(block, sequences[i : i + 1], buffers[i], shape) for i in range(n)]
        self.whole, self.slots = cells[0], cells[1:]
        self._shape = shape
        self._sequences = np.frombuffer(sequences, np.int64)[1:]
        self._buffers = buffers[1:]
        self._rows = np.arange(num_slots)

    @staticmethod
    def size(shape: tuple[int, ...], num_slots: int) -> int:
        """How many bytes it takes."""
        return 8 + (num_slots + 1) * 8 * (1 + 2 * (_HEAD + 2 * math.prod(shape)))

    def pending(self, epoch: float) -> tuple[Floats, Floats, Floats] | None:
        """Counts, means and sums of squares of the slots that have any in this epoch, in order; under the lock."""
        current = self._buffers[self._rows, self._sequences & 1]
        current = current[(current[:, 2] == epoch) & (current[:, 0] > 0)]
        if not len(current):
            return None
        states = current[:, _HEAD:].reshape(len(current), 2, *self._shape)
        return current[:, 0], states[:, 0], states[:, 1]
