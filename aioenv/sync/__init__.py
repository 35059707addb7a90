"""The same vector envs for blocking code: `gymnasium.vector.VectorEnv`s on a loop thread of their own."""

from __future__ import annotations

from aioenv.sync.gymnasium import AsyncVectorEnv
from aioenv.sync.vector_env import VectorEnv, make_vec

__all__ = ["AsyncVectorEnv", "VectorEnv", "make_vec"]
