"""A worker that is being started, and whose start is cancelled, and once more: nothing is left of it."""

from __future__ import annotations

import asyncio
import os

import pytest

from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS, launch
from tests.conftest import LOOPS


async def cancelled(start: str, channel: str, turns: int) -> bool:
    """Start one, and cancel it after so many turns of the loop and in the next one; False if it had started."""
    task = asyncio.ensure_future(launch(start, channel, dict(os.environ), ()))
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    try:
        process = await task
    except asyncio.CancelledError:
        return True
    process.abandon()
    await process.reap()
    await process.release()
    return False


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize("channel", CHANNELS)
def test_cancelled_twice_in_any_turn(start, channel, loop):
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        found = [runner.run(cancelled(start, channel, turns)) for turns in range(8)]
    assert any(found)
