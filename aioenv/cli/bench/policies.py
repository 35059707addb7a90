"""A policy that takes time: what groups of a rollout are for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from aioenv.cli.bench.common import NotApplicable

__all__ = ["TwoLayers"]

HIDDEN = 512


class TwoLayers:
    """A policy of numpy with two hidden layers of 512, in float32, computed on the CPUs where the envs are stepped.

    Args:
        observations: the space of one.
        actions: likewise.

    Raises:
        NotApplicable: if observations are no Box, or actions no bounded one.
    """

    def __init__(self, observations: Any, actions: Any) -> None:
        if not (isinstance(observations, Box) and isinstance(actions, Box) and actions.is_bounded()):
            raise NotApplicable("takes observations that are a Box, and actions that are a bounded one")
        rng = np.random.default_rng(0)
        sizes = (int(np.prod(observations.shape)), HIDDEN, HIDDEN, int(np.prod(actions.shape)))
        self._weights = [(rng.standard_normal(size) / np.sqrt(size[0])).astype(np.float32) for size in pairwise(sizes)]
        self._shape = actions.shape
        self._middle = ((actions.high + actions.low) / 2).ravel()
        self._half = ((actions.high - actions.low) / 2).ravel()

    def __call__(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Actions `(k, ...)` for k observations."""
        values = obs.reshape(len(obs), -1).astype(np.float32)
        for weights in self._weights:
            values = np.tanh(values @ weights)
        return (values * self._half + self._middle).reshape(len(obs), *self._shape)
