"""Blocking twins of functions around a vector env: `evaluate`, `record` and `env_metadata`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
from gymnasium.envs.registration import EnvSpec

from aioenv.creator import EnvCreator
from aioenv.errors import EpisodesDone, SlotError, StepTimeout
from aioenv.loops.evaluate import Evaluation, Progress, counted, set_partial, summary
from aioenv.loops.record import Recording
from aioenv.loops.record import record as record_async
from aioenv.rendering.config import RenderConfig
from aioenv.rollout.numbered_episodes import Episode, episode_seeds
from aioenv.rollout.rollout import Policy
from aioenv.sync.portal import Portal
from aioenv.sync.vector_env import VectorEnv
from aioenv.vector_env import AsyncVectorEnv

if TYPE_CHECKING:
    from aioenv.worker.description import EnvMetadata

__all__ = ["env_metadata", "evaluate", "record"]


def env_metadata(
    creator: EnvCreator,
    *,
    start: Literal["forkserver", "spawn"] | None = None,
    start_timeout_s: float = 60.0,
    preload: Iterable[str] = (),
    worker_env: Mapping[str, str] | None = None,
) -> EnvMetadata:
    """Return spaces, spec and the like of a creator's envs, from a worker (see `EnvCreator.metadata`).

    Ctrl-C kills that worker. It may be called while an event loop runs on this thread, which then waits.

    Args:
        creator: makes the envs.
        start, start_timeout_s, preload, worker_env: as for `EnvCreator.metadata`.
    """
    portal = Portal()
    try:
        how: dict[str, Any] = {"start": start, "preload": preload, "worker_env": worker_env}
        return portal.call(creator.metadata, start_timeout_s=start_timeout_s, **how)
    finally:
        portal.close()


def evaluate(
    envs: VectorEnv,
    policy: Policy,
    episodes: int = 100,
    *,
    seed: int | Sequence[int | None] | None = None,
    progress: Progress = False,
) -> Evaluation:
    """Run episodes 0 … n-1, each exactly once and to its end, and sum them up (see `aioenv.evaluate`).

    The policy, a plain function, runs on the caller's thread.
    """
    if not (hasattr(envs, "_portal") and hasattr(envs, "episodes")):
        other = isinstance(envs, (AsyncVectorEnv, gymnasium.vector.VectorEnv))
        raise TypeError(
            f"evaluate: expected an aioenv.sync.VectorEnv, as aioenv.sync.make_vec gives it, got {envs!r}"
            + "; for the async API there is aioenv.evaluate" * other
        )
    entropy, seeds = episode_seeds(episodes, seed)
    done: list[Episode] = []
    with counted(progress, len(seeds)) as count:
        try:
            with contextlib.closing(envs.episodes(policy, len(seeds), seed=seeds)) as running:
                for episode in running:
                    done.append(episode)
                    count(episode)
        except (EpisodesDone, SlotError, StepTimeout) as error:
            set_partial(error, summary(done, entropy))
            raise
    return summary(done, entropy)


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
    labels: bool = False,
    progress: bool | Callable[[int], object] = False,
    **kwargs: Any,
) -> Recording:
    """Step envs and write a video of them (see `aioenv.record`); the policy runs on the loop's thread.

    Args:
        env: what `aioenv.sync.make_vec` takes, or a `VectorEnv` of it.
        out: the mp4 file.
        steps, policy, num_envs, grid, render, fps, seed, labels, progress: as for `aioenv.record`.
        **kwargs: more arguments of `aioenv.make_vec`.

    Raises:
        TypeError: if `env` is a vector env of the async API, or another one, such as a wrapper around ours.
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
            record_async,
            env._envs if isinstance(env, VectorEnv) else env,
            out,
            steps=steps,
            policy=policy,
            num_envs=num_envs,
            grid=grid,
            render=render,
            fps=fps,
            seed=seed,
            labels=labels,
            progress=progress,
            **kwargs,
        )
    finally:
        if not isinstance(env, VectorEnv):
            portal.close()
