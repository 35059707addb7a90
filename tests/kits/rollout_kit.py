"""What the tests of rollouts share, wherever the envs are."""

from __future__ import annotations

import asyncio


async def after_cancellations(envs, policy, most: int):
    """Rollouts that were cancelled after 0, 1, … turns of the loop: two steps of each one that follows."""
    for turns in range(most):
        rollout = asyncio.ensure_future(envs.rollout(policy, 4, 3))
        for _ in range(turns):
            await asyncio.sleep(0)
        rollout.cancel()
        await asyncio.wait([rollout])
        yield await envs.rollout(policy, 2)
