"""Wrappers that normalize by statistics of all envs, as Gymnasium's do by those of one."""

from __future__ import annotations

from typing import Any, SupportsFloat

import numpy as np
from gymnasium import Env, ObservationWrapper, Wrapper, spaces

from aioenv.stats.moments import Moments
from aioenv.stats.running import SharedRunningStats, SlotStats

__all__ = ["NormalizeObservation", "NormalizeReward"]

Stats = SlotStats | SharedRunningStats | Moments


class _Statistics:
    """Whose statistics a wrapper uses, and whether it adds to them."""

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

    def see(self, x: Any) -> Moments:
        """Add a sample, if that is wanted; what is known then."""
        if self._frozen is not None:
            return self._frozen
        assert self.slot is not None
        if self.updates:
            self.slot.update(x)
        return self.slot.moments

    def take(self) -> Moments:
        """See `SlotStats.take`; nothing of frozen ones."""
        if self.slot is None:
            raise ValueError("these statistics are a frozen copy: there is nothing to exchange")
        return self.slot.take()

    def load(self, state: dict[str, Any]) -> None:
        """See `SharedRunningStats.load_state_dict`."""
        if self.slot is not None:
            self.slot.stats.load_state_dict(state)


class NormalizeObservation(ObservationWrapper[Any, Any, Any]):
    """Observations with mean 0 and variance 1, by the statistics of all envs; float32, as Gymnasium's wrapper.

    Each observation is counted first, as there. The statistics are no part of `get_state`.

    Args:
        env: its observation space has a shape.
        stats: `SharedRunningStats.at(slot)`, live statistics, or a `frozen_copy()`.
        epsilon: added to the variance.
        clip: what observations are cut to, if that is wanted.

    Attributes:
        update_running_mean: whether observations are counted; as in Gymnasium.

    Raises:
        ValueError: if the observation space has no shape, the statistics are of another, or a number is out of range.
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
        """Count and normalize it."""
        moments = self._statistics.see(observation)
        return moments.normalize(observation, epsilon=self._epsilon, clip=self._clip).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        """Nothing of it is this env's own."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `get_state`."""

    def take_observation_moments(self) -> Moments:
        """For `SharedRunningStats.exchange`."""
        return self._statistics.take()

    def load_observation_stats(self, state: dict[str, Any]) -> None:
        """For `SharedRunningStats.exchange`."""
        self._statistics.load(state)


class NormalizeReward(Wrapper[Any, Any, Any, Any]):
    """Rewards divided by the standard deviation of discounted returns of all envs; their mean stays.

    The return begins at 0 with each episode. (Gymnasium's wrapper carries it over a truncation.)

    Args:
        env: any env.
        stats: of shape (): `SharedRunningStats.at(slot)`, live statistics, or a `frozen_copy()`.
        gamma: the discount.
        epsilon: added to the variance.
        clip: what rewards are cut to, if that is wanted.

    Attributes:
        update_running_mean: whether returns are counted; as in Gymnasium.

    Raises:
        ValueError: if the statistics are of another shape than (), or a number is out of range.
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
        moments = self._statistics.see(self._return)
        value /= float(np.sqrt(moments.var + self._epsilon))
        if self._clip is not None:
            value = min(max(value, -self._clip), self._clip)
        return obs, value, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """The discounted return so far."""
        return {"return": self._return}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of `get_state`."""
        self._return = float(state["return"])

    def take_reward_moments(self) -> Moments:
        """For `SharedRunningStats.exchange`."""
        return self._statistics.take()

    def load_reward_stats(self, state: dict[str, Any]) -> None:
        """For `SharedRunningStats.exchange`."""
        self._statistics.load(state)
