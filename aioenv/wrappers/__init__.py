"""Vector wrappers of asynchronous vector envs: Gymnasium's own code, on what `await envs.step()` returns."""

from aioenv.wrappers.frame_stack import FrameStackObservation
from aioenv.wrappers.gymnasium_wrappers import (
    ClipAction,
    ClipReward,
    DtypeObservation,
    FlattenObservation,
    FrameStack,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    RescaleAction,
    TransformAction,
    TransformObservation,
    TransformReward,
)
from aioenv.wrappers.vector_wrapper import VectorWrapper

__all__ = [
    "ClipAction",
    "ClipReward",
    "DtypeObservation",
    "FlattenObservation",
    "FrameStack",
    "FrameStackObservation",
    "NormalizeObservation",
    "NormalizeReward",
    "RecordEpisodeStatistics",
    "RescaleAction",
    "TransformAction",
    "TransformObservation",
    "TransformReward",
    "VectorWrapper",
]
