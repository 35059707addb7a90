"""Numbered episodes and evaluation for blocking code; the policy runs on the caller's thread."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from aioenv.engine.runs.numbered import Episode, episode_seeds
from aioenv.engine.runs.rollout import Policy
from aioenv.errors import EpisodesDone, SlotError, StepTimeout
from aioenv.loops.evaluate import Evaluation, Progress, counted, set_partial, summary
from aioenv.sync.portal import Portal
from aioenv.sync.rollout import Asked
from aioenv.vector_env import AsyncVectorEnv

if TYPE_CHECKING:
    from aioenv.sync.vector_env import VectorEnv

__all__ = ["evaluate", "run_episodes"]


def run_episodes(
    portal: Portal, envs: AsyncVectorEnv, policy: Policy, n: int, seed: int | Sequence[int | None] | None
) -> Generator[Episode, None, None]:
    """Iterate over `envs.episodes`, whose steps run on the loop thread."""
    asked = Asked(portal, envs, policy, "episodes")
    running = portal.run_soon(lambda: envs.episodes(asked.ask if callable(policy) else policy, n, seed=seed))

    async def following() -> Episode | None:
        return await anext(running, None)

    def iterate() -> Generator[Episode, None, None]:
        try:
            while (episode := asked.run(following)) is not None:
                yield episode
        finally:
            if not envs.closed:
                portal.call(running.aclose)

    return iterate()


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
        raise TypeError(
            f"evaluate: expected an aioenv.sync.VectorEnv, as aioenv.sync.make_vec gives it, got {envs!r}; for the "
            "async API there is aioenv.evaluate"
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
