"""The API for blocking code: vector envs as `gymnasium.vector.VectorEnv`s, a render pool, rollout
collectors, evaluation and recording.

Each object runs on a loop thread of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioenv.requirements import check_requirements

check_requirements()

from aioenv.sync.gymnasium import AsyncVectorEnv, SyncVectorEnv  # noqa: E402
from aioenv.sync.loops import env_metadata, evaluate, record  # noqa: E402
from aioenv.sync.rollout_collector import RolloutCollector  # noqa: E402
from aioenv.sync.vector_env import VectorEnv, make_vec  # noqa: E402
from aioenv.worker.mujoco_gl import check_mujoco_gl  # noqa: E402

if TYPE_CHECKING:
    from aioenv.sync.render_pool import RenderPool as RenderPool

__all__ = [
    "AsyncVectorEnv",
    "RenderPool",
    "RolloutCollector",
    "SyncVectorEnv",
    "VectorEnv",
    "env_metadata",
    "evaluate",
    "make_vec",
    "record",
]


if not TYPE_CHECKING:  # type checkers would take any name for an existing one

    def __getattr__(name: str) -> Any:
        if name != "RenderPool":
            raise AttributeError(f"module 'aioenv.sync' has no attribute {name!r}")
        try:  # imported on first use: it imports MuJoCo
            return importlib.import_module("aioenv.sync.render_pool").RenderPool
        except RuntimeError:  # MuJoCo's own error says less
            check_mujoco_gl()
            raise


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
