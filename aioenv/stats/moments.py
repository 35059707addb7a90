"""Mean and variance: the arithmetic, and the tables of them in memory that processes share.

The formulas are those of Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
Recommendations", The American Statistician 37 (1983). Sums of squares are of deviations from the mean, never of the
values, so nothing cancels when the mean is large.

In shared memory, moments lie in two buffers each: a writer that dies leaves the older one intact.
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy import add, multiply, subtract

from aioenv.stats.sharing import SharedBlock

__all__ = ["Cell", "Floats", "Moments", "MomentsTable", "combine", "denormalize", "merge", "moments_of", "normalize"]

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Moments:
    """Moments of samples of one shape.

    Attributes:
        count: how many samples there were.
        weight: their total weight: equal to `count` without decay, else less.
        mean: float64 of the samples' shape.
        m2: the sum of squared deviations from the mean, weighted; float64 of the samples' shape.
    """

    count: float
    weight: float
    mean: Floats
    m2: Floats

    @property
    def var(self) -> Floats:
        """The variance (of the population), float64 of the samples' shape; 1 where there are no samples yet."""
        return self.m2 / self.weight if self.weight else np.ones_like(self.m2)

    @property
    def std(self) -> Floats:
        """The standard deviation, float64 of the samples' shape; 1 where there are no samples yet."""
        std: Floats = np.sqrt(self.var)
        return std

    def normalize(self, x: Any, *, epsilon: float = 1e-8, clip: float | None = None) -> Floats:
        """`(x - mean) / sqrt(var + epsilon)`, in float64.

        Args:
            x: a sample, or an array `(..., *shape)` of them.
            epsilon: added to the variance.
            clip: clip to `-clip … clip`; None: don't.
        """
        return normalize(x, self.mean, self.var, epsilon, clip)

    def denormalize(self, y: Any, *, epsilon: float = 1e-8) -> Floats:
        """Invert `normalize`; float64. Clipped values stay clipped."""
        return denormalize(y, self.mean, self.var, epsilon)


def normalize(x: Any, mean: Floats, var: Floats, epsilon: float, clip: float | None) -> Floats:
    """See `Moments.normalize`."""
    y: Floats = (x - mean) / np.sqrt(var + epsilon)
    return y if clip is None else np.clip(y, -clip, clip)


def denormalize(y: Any, mean: Floats, var: Floats, epsilon: float) -> Floats:
    """See `Moments.denormalize`."""
    x: Floats = np.asarray(y) * np.sqrt(var + epsilon) + mean
    return x


def moments_of(samples: Any) -> Moments:
    """Return the moments of `samples`, an array `(n, *shape)` with n >= 1, all of the same weight."""
    array = np.asarray(samples, np.float64)
    if len(array) == 1:
        return Moments(1.0, 1.0, array[0, ...].copy(), np.zeros(array.shape[1:]))
    mean = np.add.reduce(array, 0) / len(array)
    deviations = array - mean
    return Moments(len(array), len(array), mean, np.add.reduce(deviations * deviations, 0))


def merge(counts: Floats, means: Floats, m2s: Floats) -> Moments:
    """Merge the moments of several groups of samples. The same groups in the same order give the same bits.

    Args:
        counts: how many samples each group has, float64 `(k,)`, all positive.
        means: float64 `(k, *shape)`.
        m2s: float64 `(k, *shape)`.
    """
    total = counts.sum()
    weights = counts.reshape(-1, *(1,) * (means.ndim - 1))
    # as deviations from the first group: a large mean costs no digits
    offsets = means - means[0]
    mean = (weights * offsets).sum(axis=0) / total
    m2 = m2s.sum(axis=0) + (weights * np.square(offsets - mean)).sum(axis=0)
    return Moments(float(total), float(total), means[0] + mean, m2)


def combine(old: Moments, new: Moments, decay: float = 1.0) -> Moments:
    """Return the moments after more samples, each of weight 1.

    Args:
        old: moments of the samples before.
        new: moments of the samples that are added.
        decay: the factor of a sample's weight for each later sample; 1 for infinite memory.
    """
    if not new.count:
        return old
    fading = decay**new.count
    before = old.weight * fading
    weight = before + new.weight
    delta = new.mean - old.mean
    mean = old.mean + delta * (new.weight / weight)
    m2 = old.m2 * fading + new.m2 + np.square(delta) * (before * new.weight / weight)
    return Moments(old.count + new.count, weight, mean, m2)


_HEAD = 3  # count, weight, epoch
# On CPUs with total store order a reader needs no lock.
_TOTAL_STORE_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_MAX_TRIES = 64  # a reader takes the lock after this many reads that a writer has disturbed


class Cell:
    """Moments in shared memory, in two buffers; a sequence number, which every write changes, selects the valid one.

    Args:
        block: the memory, and its lock.
        sequence: an int64 memoryview of length 1; its bits from `shift` on count the writes.
        buffers: float64 `(2, 3 + 2 * size)` in the memory.
        shape: of the samples.
        shift: how many low bits of the sequence number have another use.
    """

    def __init__(
        self, block: SharedBlock, sequence: memoryview, buffers: Floats, shape: tuple[int, ...], shift: int = 0
    ) -> None:
        self._block = block
        self.sequence = sequence
        self._shift = shift
        heads: list[Any] = [buffer[:_HEAD].data for buffer in buffers]
        states = [buffer[_HEAD:].reshape(2, *shape) for buffer in buffers]
        self._buffers = [(h, s, s[0, ...], s[1, ...]) for h, s in zip(heads, states, strict=True)]

    @property
    def epoch(self) -> float:
        """The epoch of the last write; to be called under the lock."""
        epoch: float = self._buffers[self.sequence[0] >> self._shift & 1][0][2]
        return epoch

    def write(self, moments: Moments, epoch: float) -> None:
        """Replace the moments; to be called under the lock."""
        times = (self.sequence[0] >> self._shift) + 1
        head, _, mean, m2 = self._buffers[times & 1]
        mean[...] = moments.mean
        m2[...] = moments.m2
        head[0], head[1], head[2] = moments.count, moments.weight, epoch
        self.sequence[0] = times << self._shift

    def read(self) -> tuple[Moments, float]:
        """Return a consistent copy of the moments, and their epoch, without waiting for writers."""
        moments, epoch, samples = self._snapshot()
        return _merge_log(moments, samples), epoch

    def since(self, epoch: float) -> Moments | None:
        """Return a consistent copy of the moments; None if nothing was written in this epoch."""
        moments, last, samples = self._snapshot()
        return _merge_log(moments, samples) if last == epoch else None

    def copy(self) -> tuple[Moments, float]:
        """Return a copy as `read` does; to be called under the lock."""
        moments, epoch, samples = self._copy(self.sequence[0])
        return _merge_log(moments, samples), epoch

    def _snapshot(self) -> tuple[Moments, float, Floats | None]:
        if _TOTAL_STORE_ORDER:
            for _ in range(_MAX_TRIES):
                sequence = self.sequence[0]
                copied = self._copy(sequence)
                if self.sequence[0] == sequence:
                    return copied
        if self._block.closed:
            return self._copy(self.sequence[0])
        with self._block.locked():
            return self._copy(self.sequence[0])

    def _copy(self, sequence: int) -> tuple[Moments, float, Floats | None]:
        """Copy moments, their epoch, and samples that are not merged into them yet. The copy may be inconsistent."""
        head, state, _, _ = self._buffers[sequence >> self._shift & 1]
        state = state.copy()
        return Moments(head[0], head[1], state[0, ...], state[1, ...]), head[2], None


class WholeCell(Cell):
    """The moments of all slots; samples change them at once."""

    def __init__(self, block: SharedBlock, sequence: memoryview, buffers: Floats, shape: tuple[int, ...]) -> None:
        super().__init__(block, sequence, buffers, shape)
        # scratch: a deviation and its square, and their factors
        self._change = np.zeros((2, *shape))
        self._delta, self._square = self._change[0, ...], self._change[1, ...]
        self._flat = self._change.reshape(2, -1)[0]
        self._dot = self._flat.dot
        self._factors = np.zeros((2, *(1,) * len(shape)))
        self._set_factors: Any = self._factors.reshape(2).data

    def add(self, sample: Any, decay: float) -> None:
        """Add one sample; to be called under the lock.

        Raises:
            ValueError: if it, or its square, is not finite; nothing has changed then.
        """
        now = self.sequence[0] & 1
        head, state, mean, m2 = self._buffers[now]
        new_head, new_state, _, new_m2 = self._buffers[now ^ 1]
        before = head[1] * decay
        after = before + 1.0
        delta, square, change, factors = self._delta, self._square, self._change, self._set_factors
        subtract(sample, mean, delta)  # few, positional arguments: each costs as much as the sums
        if not isfinite(self._dot(self._flat)):
            raise _not_finite(sample)
        multiply(delta, delta, square)
        factors[0] = 1.0 / after
        factors[1] = before / after
        multiply(change, self._factors, change)
        add(state, change, new_state)
        if decay != 1.0:
            multiply(m2, decay, new_m2)
            add(new_m2, square, new_m2)
        new_head[0] = head[0] + 1.0
        new_head[1] = after
        new_head[2] = head[2]
        self.sequence[0] += 1


class SlotCell(Cell):
    """The moments of one slot since the last merge, and a log of its latest samples, which are merged into them later.

    So an update is one copy and one count; the arithmetic is done once for many samples. The lowest bits of the
    sequence number are the length of the log, so moments and log change atomically.

    Args:
        log: float64 `(2 ** shift - 1, size)` in the memory.
    """

    def __init__(
        self,
        block: SharedBlock,
        sequence: memoryview,
        buffers: Floats,
        log: Floats,
        shape: tuple[int, ...],
        shift: int,
    ) -> None:
        super().__init__(block, sequence, buffers, shape, shift)
        self._log = log
        self._samples = log.reshape(len(log), *shape)
        self._mask = len(log)
        self._rows: list[tuple[Floats, Floats, Any]] = []  # made on the first write

    def add(self, sample: Any, epoch: float) -> None:
        """Add one sample to the moments of this epoch; to be called under the lock.

        Raises:
            ValueError: if it, or its square, is not finite; nothing has changed then.
        """
        sequence = self.sequence[0]
        logged = sequence & self._mask
        if self._buffers[sequence >> self._shift & 1][0][2] != epoch:
            sequence, logged = self._start_epoch(epoch), 0
        elif logged == self._mask:
            self.write(self.copy()[0], epoch)
            sequence, logged = self.sequence[0], 0
        row, flat, dot = self._rows[logged] if self._rows else self._first_row()
        row[...] = sample
        if not isfinite(dot(flat)):
            raise _not_finite(sample)
        self.sequence[0] = sequence + 1

    def _start_epoch(self, epoch: float) -> int:
        """Start an epoch without samples; return the sequence number."""
        times = (self.sequence[0] >> self._shift) + 1
        head, state, _, _ = self._buffers[times & 1]
        state[...] = head[0] = head[1] = 0.0
        head[2] = epoch
        self.sequence[0] = sequence = times << self._shift
        return sequence

    def _first_row(self) -> tuple[Floats, Floats, Any]:
        flats = list(self._log)
        self._rows = [(self._samples[i, ...], flat, flat.dot) for i, flat in enumerate(flats)]
        return self._rows[self.sequence[0] & self._mask]

    def _copy(self, sequence: int) -> tuple[Moments, float, Floats | None]:
        moments, epoch, _ = super()._copy(sequence)
        logged = sequence & self._mask
        return moments, epoch, self._samples[:logged].copy() if logged else None


def _merge_log(moments: Moments, samples: Floats | None) -> Moments:
    """Merge moments and later samples `(n, *shape)`."""
    if samples is None:
        return moments
    return combine(moments, moments_of(samples)) if moments.count else moments_of(samples)


def _not_finite(sample: Any) -> ValueError:
    return ValueError(f"expected finite numbers, got {np.asarray(sample)}: they would stay in the statistics")


def _log_bits(size: int) -> int:
    """Return how many bits count a slot's log of `2 ** bits - 1` samples: fewer for larger samples."""
    return 5 if size <= 128 else 3 if size <= 1024 else 1


class MomentsTable:
    """The layout of a block: a flag (frozen), a cell for all slots, and a cell for each slot."""

    def __init__(self, shape: tuple[int, ...], num_slots: int, block: SharedBlock) -> None:
        n = num_slots + 1
        size = math.prod(shape)
        self._length = _HEAD + 2 * size
        self._shift = _log_bits(size)
        self.block = block
        self.flag = block.data[:8].cast("q")
        sequences = block.data[8 : 8 + 8 * n].cast("q")
        floats = np.frombuffer(block.data[8 + 8 * n :], np.float64)
        buffers = floats[: n * 2 * self._length].reshape(n, 2, self._length)
        self._logs = logs = floats[buffers.size :].reshape(num_slots, (1 << self._shift) - 1, size)
        self.whole = WholeCell(block, sequences[:1], buffers[0], shape)
        self.slots = [
            SlotCell(block, sequences[i + 1 : i + 2], buffers[i + 1], logs[i], shape, self._shift)
            for i in range(num_slots)
        ]
        self._shape = shape
        self._sequences = np.frombuffer(sequences, np.int64)[1:]
        self._buffers = buffers[1:]
        self._rows = np.arange(num_slots)

    @staticmethod
    def size(shape: tuple[int, ...], num_slots: int) -> int:
        """Return how many bytes a table takes."""
        size = math.prod(shape)
        logs = num_slots * ((1 << _log_bits(size)) - 1) * size
        return 8 + 8 * ((num_slots + 1) * (1 + 2 * (_HEAD + 2 * size)) + logs)

    def pending(self, epoch: float) -> tuple[Floats, Floats, Floats] | None:
        """Return counts, means and sums of squares of the slots that have samples in this epoch; under the lock."""
        current = self._buffers[self._rows, self._sequences >> self._shift & 1]
        logged = self._sequences & ((1 << self._shift) - 1)
        slots = ((current[:, 2] == epoch) & (current[:, 0] + logged > 0)).nonzero()[0]
        if not len(slots):
            return None
        counts = current[slots, 0]
        if (logged[slots] == 1).all() and not counts.any():  # the common case after a step: one sample each
            means = self._logs[slots, 0].reshape(len(slots), *self._shape)
            return np.ones(len(slots)), means, np.zeros_like(means)
        moments = [self.slots[i].copy()[0] for i in slots.tolist()]
        return (
            np.array([m.count for m in moments]),
            np.array([m.mean for m in moments]),
            np.array([m.m2 for m in moments]),
        )
