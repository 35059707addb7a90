"""In the worker: episodes counted beneath wrappers, where Stable-Baselines3 has its `Monitor`."""

from __future__ import annotations

from time import perf_counter
from typing import Any, SupportsFloat

from gymnasium import Env, Wrapper
from gymnasium.utils import RecordConstructorArgs

__all__ = ["CountInnerEpisodes"]


class CountInnerEpisodes(Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Tells an episode's return, length and seconds in the info of its last step, unless the env does so itself.

    What is around it may change rewards, and when an episode seems to be over.
    """

    # names that no env has: `get_attr` takes the outermost of a name
    def __init__(self, env: Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.counted_return = 0.0
        self.counted_length = 0
        self._counted_since = perf_counter()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin to count, however the episode before has ended."""
        result = self.env.reset(seed=seed, options=options)
        self.counted_return = 0.0
        self.counted_length = 0
        self._counted_since = perf_counter()
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Count a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.counted_return += float(reward)
        self.counted_length += 1
        if (terminated or truncated) and "episode" not in info:
            told = {
                "r": self.counted_return,
                "l": self.counted_length,
                "t": round(perf_counter() - self._counted_since, 6),
            }
            info = {**info, "episode": told}
        return obs, reward, terminated, truncated, info
