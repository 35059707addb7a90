"""Mean and variance, updated and merged: pure arithmetic.

The formulas are those of Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
Recommendations", The American Statistician 37 (1983): sums of squares are of deviations from the mean, never of the
values, so nothing cancels when the mean is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "Moments", "combine", "denormalize", "merge", "moments_of", "normalize"]

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Moments:
    """Moments of samples of one shape.

    Attributes:
        count: how many samples there were.
        weight: how much they weigh together; with infinite memory as much as there are, else less.
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
        """The standard deviation, likewise."""
        std: Floats = np.sqrt(self.var)
        return std

    def normalize(self, x: Any, *, epsilon: float = 1e-8, clip: float | None = None) -> Floats:
        """`(x - mean) / sqrt(var + epsilon)`, in float64.

        Args:
            x: a sample, or an array `(..., *shape)` of them.
            epsilon: added to the variance.
            clip: cut to `-clip … clip`; None: as it is.
        """
        return normalize(x, self.mean, self.var, epsilon, clip)

    def denormalize(self, y: Any, *, epsilon: float = 1e-8) -> Floats:
        """The inverse of `normalize`, float64; what was cut stays so."""
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
    """The moments of `samples`, an array `(n, *shape)` with n of at least 1; all weigh the same."""
    array = np.asarray(samples, np.float64)
    if len(array) == 1:
        return Moments(1.0, 1.0, array[0, ...].copy(), np.zeros(array.shape[1:]))
    mean = np.add.reduce(array, 0) / len(array)
    deviations = array - mean
    return Moments(len(array), len(array), mean, np.add.reduce(deviations * deviations, 0))


def merge(counts: Floats, means: Floats, m2s: Floats) -> Moments:
    """The moments of several groups of samples together. The same groups in the same order give the same bits.

    Args:
        counts: how many samples each group has, float64 `(k,)`, all positive.
        means: float64 `(k, *shape)`.
        m2s: likewise.
    """
    total = counts.sum()
    weights = counts.reshape(-1, *(1,) * (means.ndim - 1))
    # as deviations from the first group: a mean that is large does not cost digits
    offsets = means - means[0]
    mean = (weights * offsets).sum(axis=0) / total
    m2 = m2s.sum(axis=0) + (weights * np.square(offsets - mean)).sum(axis=0)
    return Moments(float(total), float(total), means[0] + mean, m2)


def combine(old: Moments, new: Moments, decay: float = 1.0) -> Moments:
    """Moments after more samples, which come with a weight of one each.

    Args:
        old: of the samples before.
        new: of the samples that are added.
        decay: what a sample's weight is multiplied by with each later one; 1 for infinite memory.
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
