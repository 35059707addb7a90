"""Statistics: of samples and episode numbers that workers and parent share, and of the episodes of a vector env."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioenv.stats.counters import CountEpisodes, EpisodeCounter
    from aioenv.stats.episodes import EpisodeEvent, EpisodeStats, EpochStats, StatsWriter
    from aioenv.stats.moments import Moments
    from aioenv.stats.normalize import NormalizeObservation, NormalizeReward
    from aioenv.stats.running import SharedRunningStats, SlotStats

__all__ = [
    "CountEpisodes",
    "EpisodeCounter",
    "EpisodeEvent",
    "EpisodeStats",
    "EpochStats",
    "Moments",
    "NormalizeObservation",
    "NormalizeReward",
    "SharedRunningStats",
    "SlotStats",
    "StatsWriter",
]

_HOME = {
    **dict.fromkeys(("CountEpisodes", "EpisodeCounter"), "counters"),
    **dict.fromkeys(("EpisodeEvent", "EpisodeStats", "EpochStats", "StatsWriter"), "episodes"),
    "Moments": "moments",
    **dict.fromkeys(("NormalizeObservation", "NormalizeReward"), "normalize"),
    **dict.fromkeys(("SharedRunningStats", "SlotStats"), "running"),
}

if not TYPE_CHECKING:  # with it type checkers would accept any name

    def __getattr__(name: str) -> Any:
        # lazily: every worker imports this package, and most need only a part
        if name not in _HOME:
            raise AttributeError(f"module 'aioenv.stats' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"aioenv.stats.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
