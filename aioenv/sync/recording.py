"""Recording, for blocking code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aioenv.loops import record as loops
from aioenv.loops.record import Recording
from aioenv.rendering.config import RenderConfig
from aioenv.rollout.rollout import Policy
from aioenv.sync.portal import Portal
from aioenv.sync.vector_env import VectorEnv
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["record"]


def record(
    env: VectorEnv | str | EnvSpec | Callable[..., Any],
    out: str | Path,
    *,
    steps: int,
    policy: Policy | None = None,
    num_envs: int = 4,
    grid: tuple[int, int] | None = None,
    render: RenderConfig | None = None,
    fps: float | None = None,
    seed: int | None = 0,
    progress: bool = False,
    **kwargs: Any,
) -> Recording:
    """Step envs and write a video of them (see `aioenv.record`); the policy runs on the loop's thread.

    Args:
        env: what `aioenv.sync.make_vec` takes, or a `VectorEnv` of it.
        out: the mp4 file.
        steps, policy, num_envs, grid, render, fps, seed, progress: as for `aioenv.record`.
        **kwargs: more arguments of `aioenv.make_vec`.

    Raises:
        TypeError: if `env` is a vector env of the async API, or another one, a wrapper around ours say.
        ValueError, ImportError, RenderError, OSError, SlotError: as `aioenv.record`.
    """
    if isinstance(env, AsyncVectorEnv):
        raise TypeError(f"record: expected a vector env of aioenv.sync, got {env!r}; for that there is aioenv.record")
    if isinstance(env, gymnasium.vector.VectorEnv) and not isinstance(env, VectorEnv):
        raise TypeError(
            f"record: expected an aioenv.sync.VectorEnv itself, or what make_vec takes, got {env!r}; around others "
            "goes Gymnasium's own wrapper, gymnasium.wrappers.vector.RecordVideo"
        )
    portal = env._portal if isinstance(env, VectorEnv) else Portal()
    try:
        return portal.call(
            loops.record,
            env._envs if isinstance(env, VectorEnv) else env,
            out,
            steps=steps,
            policy=policy,
            num_envs=num_envs,
            grid=grid,
            render=render,
            fps=fps,
            seed=seed,
            progress=progress,
            **kwargs,
        )
    finally:
        if not isinstance(env, VectorEnv):
            portal.close()
