"""The same things for blocking code: vector envs as `gymnasium.vector.VectorEnv`s, and a render pool.

Each runs on a loop thread of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aioenv.requirements import check_requirements

check_requirements()

from aioenv.sync.creator import env_metadata  # noqa: E402
from aioenv.sync.evaluate import evaluate  # noqa: E402
from aioenv.sync.gymnasium import AsyncVectorEnv  # noqa: E402
from aioenv.sync.vector_env import VectorEnv, make_vec  # noqa: E402
from aioenv.worker.mujoco_gl import check_mujoco_gl  # noqa: E402

if TYPE_CHECKING:
    from aioenv.sync.recording import record as record
    from aioenv.sync.render_pool import RenderPool as RenderPool

__all__ = ["AsyncVectorEnv", "RenderPool", "VectorEnv", "env_metadata", "evaluate", "make_vec", "record"]


if not TYPE_CHECKING:  # else type checkers would take every name for one that is there

    def __getattr__(name: str) -> Any:
        home = {"RenderPool": "aioenv.sync.render_pool", "record": "aioenv.sync.recording"}.get(name)
        if home is None:
            raise AttributeError(f"module 'aioenv.sync' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(home), name)  # it imports MuJoCo, which not everybody needs
        except RuntimeError:  # of that import, which says less
            check_mujoco_gl()
            raise


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
