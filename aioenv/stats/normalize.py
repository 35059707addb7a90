"""Wrappers that normalize observations and rewards by statistics of all envs; Gymnasium's use those of one env."""

from __future__ import annotations

from typing import Any, SupportsFloat

import numpy as np
from gymnasium import Env, ObservationWrapper, Wrapper, spaces

from aioenv.stats.moments import Moments
from aioenv.stats.running import SharedRunningStats, SlotStats

__all__ = ["NormalizeObservation", "NormalizeReward"]

Stats = SlotStats | SharedRunningStats | Moments


class _Statistics:
    """The statistics of a wrapper: of a slot, to which it adds samples, or frozen ones."""

    def __init__(self, stats: Stats, shape: tuple[int, ...], epsilon: float, clip: float | None) -> None:
        if isinstance(stats, SharedRunningStats):
            if not stats.live:
                raise ValueError(
                    "stats: expected those of a slot, got those of all; pass stats.at(slot), or use live=True"
                )
            stats = stats.at(0)
        if not isinstance(stats, (SlotStats, Moments)):
            raise TypeError(f"stats: expected SharedRunningStats.at(slot) or its frozen_copy(), got {stats!r}")
        has = stats.mean.shape if isinstance(stats, Moments) else stats.stats.shape
        if has != shape:
            raise ValueError(f"stats: expected those of samples of shape {shape}, got shape {has}")
        if not epsilon > 0:
            raise ValueError(f"epsilon: expected a positive number, got {epsilon!r}")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip: expected a positive number or None, got {clip!r}")
        self.slot = stats if isinstance(stats, SlotStats) else None
        self._frozen = stats if isinstance(stats, Moments) else None
        self.updates = self.slot is not None

    def update(self, x: Any) -> Moments:
        """Add a sample, unless updates are off; return the moments."""
        if self._frozen is not None:
            return self._frozen
        assert self.slot is not None
        if self.updates:
            self.slot.update(x)
        return self.slot.moments

    def take(self) -> Moments:
        """Remove and return the slot's samples (see `SlotStats.take`)."""
        if self.slot is None:
            raise ValueError("these statistics are a frozen copy: there is nothing to exchange")
        return self.slot.take()

    def load(self, state: dict[str, Any]) -> None:
        """Load a state (see `SharedRunningStats.load_state_dict`); a no-op for frozen statistics."""
        if self.slot is not None:
            self.slot.stats.load_state_dict(state)


class NormalizeObservation(ObservationWrapper[Any, Any, Any]):
    """Normalizes observations to mean 0 and variance 1, by the statistics of all envs; float32, as Gymnasium's wrapper.

    Each observation is counted first, as there. The statistics are not part of `get_state`.

    Args:
        env: its observation space has a shape.
        stats: `SharedRunningStats.at(slot)`, live statistics, or a `frozen_copy()`.
        epsilon: added to the variance.
        clip: the bound to which observations are clipped, or None.

    Attributes:
        update_running_mean: whether observations are counted, as in Gymnasium.

    Raises:
        ValueError: if the observation space has no shape, that of the statistics differs, or a number is out of range.
    """

    def __init__(self, env: Env[Any, Any], stats: Stats, *, epsilon: float = 1e-8, clip: float | None = None) -> None:
        super().__init__(env)
        shape = env.observation_space.shape
        if shape is None:
            raise ValueError(f"expected an observation space that has a shape, got {env.observation_space}")
        self._statistics = _Statistics(stats, shape, epsilon, clip)
        self._epsilon, self._clip = epsilon, clip
        bound = np.inf if clip is None else clip
        self.observation_space = spaces.Box(-bound, bound, shape, np.float32)

    @property
    def update_running_mean(self) -> bool:
        """Whether observations are counted."""
        return self._statistics.updates

    @update_running_mean.setter
    def update_running_mean(self, setting: bool) -> None:
        self._statistics.updates = bool(setting)

    def observation(self, observation: Any) -> Any:
        """Count and normalize an observation."""
        moments = self._statistics.update(observation)
        return moments.normalize(observation, epsilon=self._epsilon, clip=self._clip).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        """Return an empty state: the statistics belong to all envs."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Do nothing (see `get_state`)."""

    def take_observation_moments(self) -> Moments:
        """Remove and return the slot's samples, for `SharedRunningStats.exchange`."""
        return self._statistics.take()

    def load_observation_stats(self, state: dict[str, Any]) -> None:
        """Load a state, for `SharedRunningStats.exchange`."""
        self._statistics.load(state)


class NormalizeReward(Wrapper[Any, Any, Any, Any]):
    """Divides rewards by the standard deviation of the discounted returns of all envs; their mean stays.

    The return starts at 0 with each episode. (Gymnasium's wrapper carries it over a truncation.)

    Args:
        env: any env.
        stats: of shape `()`: `SharedRunningStats.at(slot)`, live statistics, or a `frozen_copy()`.
        gamma: the discount.
        epsilon: added to the variance.
        clip: the bound to which rewards are clipped, or None.

    Attributes:
        update_running_mean: whether returns are counted, as in Gymnasium.

    Raises:
        ValueError: if the shape of the statistics is not `()`, or a number is out of range.
    """

    def __init__(
        self,
        env: Env[Any, Any],
        stats: Stats,
        *,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        clip: float | None = None,
    ) -> None:
        super().__init__(env)
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma: expected a number from 0 to 1, got {gamma!r}")
        self._statistics = _Statistics(stats, (), epsilon, clip)
        self._gamma, self._epsilon, self._clip = gamma, epsilon, clip
        self._return = 0.0

    @property
    def update_running_mean(self) -> bool:
        """Whether returns are counted."""
        return self._statistics.updates

    @update_running_mean.setter
    def update_running_mean(self, setting: bool) -> None:
        self._statistics.updates = bool(setting)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._return = 0.0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step, and normalize the reward."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        value = float(reward)
        self._return = self._return * self._gamma + value
        moments = self._statistics.update(self._return)
        value /= float(np.sqrt(moments.var + self._epsilon))
        if self._clip is not None:
            value = min(max(value, -self._clip), self._clip)
        return obs, value, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """Return the discounted return so far."""
        return {"return": self._return}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        self._return = float(state["return"])

    def take_reward_moments(self) -> Moments:
        """Remove and return the slot's samples, for `SharedRunningStats.exchange`."""
        return self._statistics.take()

    def load_reward_stats(self, state: dict[str, Any]) -> None:
        """Load a state, for `SharedRunningStats.exchange`."""
        self._statistics.load(state)
