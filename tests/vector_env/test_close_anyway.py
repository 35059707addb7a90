"""`close()` ends every process and thread, though something goes wrong before; what did is raised."""

from __future__ import annotations

import os

import numpy as np
import pytest

import aioenv
from aioenv.rendering.queue import RenderQueue
from aioenv.rendering.step_images import StepImages
from tests.kits.render_pool_kit import SMALL, pool_of, some_states

CONFIG = aioenv.RenderConfig(24, 18, quality="fast", workers=1)


def fails(*args):
    raise ZeroDivisionError("by a bug of ours")


def ended(pids) -> bool:
    """Whether there are no such processes any more."""
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.asyncio
@pytest.mark.parametrize("where", [{"num_workers": 1}, {"backend": "native"}])
async def test_a_vector_env(where, monkeypatch):
    envs = await aioenv.make_vec("InvertedPendulum-v5", 2, render=CONFIG, **where)
    await envs.reset(seed=0)
    pids = [worker.pid for worker in envs.workers] + [pid for pool in envs._session.pools for pid in pool.pids]
    thread = getattr(envs._session, "_thread", None)
    monkeypatch.setattr(StepImages, "fail_all", fails)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await envs.close()
    assert pids and ended(pids)
    assert thread is None or thread.ended
    with pytest.raises(aioenv.ClosedError):
        await envs.step(np.zeros((2, 1), np.float32))


@pytest.mark.asyncio
async def test_a_pool(monkeypatch):
    pool = await pool_of()
    await pool.render(some_states(pool, 2), **SMALL)
    pids = pool.pids
    monkeypatch.setattr(RenderQueue, "close", fails)
    with pytest.raises(ZeroDivisionError):
        await pool.close()
    assert ended(pids)
