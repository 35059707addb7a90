"""Launches that are cancelled, or that have too few descriptors: an error that says so, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import resource

import pytest

import aioenv
from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS, launch
from aioenv.testing import leak_check
from tests.kits.loop_kit import LOOPS, run_on


def limit_for(count):
    """What the limit must be so that so many descriptors are free."""
    free = (fd for fd in range(1 << 16) if not os.path.lexists(f"/proc/self/fd/{fd}"))
    return next(fd for number, fd in enumerate(free) if number == count)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="looks for free descriptors")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", START_METHODS)
@pytest.mark.parametrize("channel", CHANNELS)
def test_any_number_of_free_descriptors(channel, start, loop):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def make():
        return aioenv.make_vec(
            "CartPole-v1", 4, num_workers=2, start=start, channel=channel, transport="shared", seed_plan=range(8)
        )

    async def once(count):
        """Whether so many suffice."""
        envs = make()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(count), limits[1]))
            await envs
        except aioenv.WorkerStartError as exc:
            assert "Too many open files" in str(exc) and "; raise the limit (ulimit -n)" in str(exc)
            return False
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await envs.close()
        return True

    async def main():
        async with make() as envs:  # what is opened once is open, and the fork server there
            await envs.reset()
            for count in range(60):
                with leak_check():
                    enough = await once(count)
                if enough:
                    return count

    gc.disable()  # nothing waits for it
    try:
        assert run_on(loop, main()) > 8
    finally:
        gc.enable()


async def cancelled_launch(start: str, channel: str, turns: int) -> bool:
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
def test_a_launch_cancelled_twice_in_any_turn_of_the_loop(start, channel, loop):
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        found = [runner.run(cancelled_launch(start, channel, turns)) for turns in range(8)]
    assert any(found)
