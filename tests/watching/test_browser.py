"""The page of a run in a browser: 16 slots that move, also after the restart of a worker."""

import asyncio
import os
import signal

import pytest

import aioenv

pytest.importorskip("viser")
pytest.importorskip("playwright")

from tests.watching.browser_kit import CHROMIUM, Tiles, open_page, picture

if not CHROMIUM.exists():
    pytest.skip("no Chromium here", allow_module_level=True)

WITHIN_S = 90


@pytest.mark.timeout(300)
@pytest.mark.asyncio
async def test_the_page_shows_16_moving_slots_and_survives_the_restart_of_a_worker():
    render, restart = aioenv.RenderConfig(workers=0), aioenv.RestartPolicy()
    tiles, errors, everyone = Tiles("HalfCheetah-v5", 16), [], set(range(16))
    async with aioenv.make_vec("HalfCheetah-v5", 20, num_workers=2, render=render, restart=restart) as envs:
        watch = await envs.watch()
        assert watch.slots == tuple(range(16))
        await envs.reset(seed=0)
        stepping = True

        async def step():
            while stepping:
                await envs.step(envs.action_space.sample())
                await asyncio.sleep(0.02)

        steps = asyncio.ensure_future(step())
        async with open_page(watch.url, errors) as page:

            async def wait_for(moving):
                before = await picture(page)
                async with asyncio.timeout(WITHIN_S):
                    while True:
                        after = await picture(page)
                        if (now := tiles.changed(before, after)) == moving:
                            return
                        before = after
                        assert not steps.done() or steps.exception() is None, now

            await wait_for(everyone)
            assert watch.visitors == 1
            envs.pause(range(8))  # the control: these stand still
            await wait_for(everyone - set(range(8)))
            envs.resume()
            await wait_for(everyone)
            first = envs.workers[0].pid
            os.kill(first, signal.SIGKILL)
            while envs.workers[0].pid == first or envs.workers[0].state == "dead":
                await asyncio.sleep(0.05)
            envs.pause(range(10, 20))  # slots of the other worker
            await wait_for(set(range(10)))
            envs.resume()
            await wait_for(everyone)
            stepping = False
            await steps
            await envs.close()
            assert watch.closed
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", int(watch.url.rpartition(":")[2]))
    assert [error for error in errors if "WebSocket" not in error and "ERR_CONNECTION" not in error] == []


@pytest.mark.timeout(200)
@pytest.mark.asyncio
async def test_envs_that_draw_themselves_are_shown_by_their_images():
    errors = []
    render = aioenv.RenderConfig(workers=0)
    async with aioenv.make_vec("CartPole-v1", 4, num_workers=2, render=render) as envs:
        watch = await envs.watch(slots=[1, 3])
        await envs.reset(seed=0)
        async with open_page(watch.url, errors) as page:
            before = await picture(page)
            async with asyncio.timeout(WITHIN_S):
                while True:  # a cart is black, and its image white; the page is neither
                    await envs.step(envs.action_space.sample())
                    after = await picture(page)
                    white = (after > 240).all(2)
                    moved = (abs(after - before).max(2) > 100) & white
                    if white.mean() > 0.2 and moved.any():
                        break
                    before = after
    assert [error for error in errors if "WebSocket" not in error] == []
