"""Evaluation for blocking code; the policy runs on the caller's thread."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import gymnasium

from aioenv.errors import EpisodesDone, SlotError, StepTimeout
from aioenv.loops.evaluate import Evaluation, Progress, counted, set_partial, summary
from aioenv.rollout.numbered_episodes import Episode, episode_seeds
from aioenv.rollout.rollout import Policy
from aioenv.vector_env import AsyncVectorEnv

if TYPE_CHECKING:
    from aioenv.sync.vector_env import VectorEnv

__all__ = ["evaluate"]


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
