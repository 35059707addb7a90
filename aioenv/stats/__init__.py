"""Statistics that workers and parent share, and wrappers that normalize by them."""

from aioenv.stats.counter import CountEpisodes, EpisodeCounter
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
