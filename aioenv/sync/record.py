"""Recording, for blocking code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aioenv.loops import record as loops
from aioenv.loops.record import Recording
from aioenv.sync.portal import Portal
from aioenv.sync.vector_env import VectorEnv

__all__ = ["record"]


def record(env: Any, out: str | Path, **kwargs: Any) -> Recording:
    """Step envs and write a video of them (see `aioenv.record`); the policy runs on the loop's thread.

    Args:
        env: what `aioenv.sync.make_vec` takes, or a `VectorEnv` of it.
        out: the mp4 file.
        **kwargs: those of `aioenv.record`.
    """
    if isinstance(env, VectorEnv):
        return env._portal.call(loops.record, env._envs, out, **kwargs)
    portal = Portal()
    try:
        return portal.call(loops.record, env, out, **kwargs)
    finally:
        portal.close()
