"""Images of slots whose worker was started again: those of the observations that are told of them."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from tests.kits.balls import SIZE, Ball, Balls, Painted, Reference, paint
from tests.kits.version_kit import needs_mujoco_batch

WAYS = {"workers": Ball, "themselves": Painted, "native": Balls}
CONFIG = aioenv.RenderConfig(**SIZE, camera="front", quality="fast", workers=1)


def made(way: str, mode: AutoresetMode, resume: bool):
    restart = aioenv.RestartPolicy(backoff_s=1e-6, resume=resume)
    kwargs = {"num_workers": 1, "restart": restart, "autoreset_mode": mode}
    if way == "native":
        return aioenv.make_vec(Balls, 3, backend="native", render=CONFIG, **kwargs)
    config = CONFIG if way == "workers" else aioenv.RenderConfig()
    return aioenv.AsyncVectorEnv([WAYS[way]] * 3, render=config, **kwargs)


@pytest.mark.sampled(2)
@pytest.mark.asyncio
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=str)
@pytest.mark.parametrize("resume", [False, True], ids=["lose", "resume"])
@pytest.mark.parametrize("way", ["workers", "themselves", pytest.param("native", marks=needs_mujoco_batch)])
async def test_images_are_of_what_is_observed(way, resume, mode):
    """Also where other slots are reset, of which some had lost their episode: they show what they did."""
    reference, actions = Reference(way == "themselves"), np.full((3, 3), 0.5, np.float32) * [1, -1, 0]
    await reference.start()
    try:
        async with made(way, mode, resume) as envs:

            async def check(obs):
                images = await envs.render()
                for slot in range(3):
                    assert np.array_equal(images[slot], await reference.of(obs[slot])), slot

            def kill():
                os.kill(envs.workers[0].pid, signal.SIGKILL)

            await check((await envs.reset(seed=0)).obs)
            before = (await envs.step(actions.astype(np.float32))).obs
            await check(before)
            kill()
            result = await envs.step(actions.astype(np.float32))
            assert "restarted" in result.info or resume
            if not resume and mode is not AutoresetMode.SAME_STEP:
                assert np.array_equal(result.obs, before)
            await check(result.obs)
            kill()
            mask = np.array([True, False, False])
            again = (await envs.reset(options={"reset_mask": mask})).obs
            assert np.array_equal(again[1:], result.obs[1:])
            await check(again)
            if mode is not AutoresetMode.DISABLED:
                for _ in range(3):
                    await check((await envs.step(actions.astype(np.float32))).obs)
            await check((await envs.reset(options={"reset_mask": ~mask})).obs)
            await check((await envs.step(actions.astype(np.float32))).obs)
    finally:
        await reference.close()


class Fatal(Painted):
    """Ends its process in the middle of a picture, if it is told to."""

    fatal = False

    def render(self):
        if self.fatal:
            os._exit(9)
        return super().render()


@pytest.mark.asyncio
async def test_an_image_that_was_lost_with_its_worker_is_not_an_older_one():
    restart, config, actions = aioenv.RestartPolicy(backoff_s=1e-6), aioenv.RenderConfig(), np.zeros((2, 3), np.float32)
    async with aioenv.AsyncVectorEnv([Fatal] * 2, num_workers=1, restart=restart, render=config) as envs:
        await envs.reset(seed=0)
        await envs.render()
        await envs.set_attr("fatal", True)
        last = (await envs.step(actions)).obs
        with pytest.raises(aioenv.RenderError):
            await envs.render()
        assert np.array_equal((await envs.step(actions)).obs, last)
        with pytest.raises(aioenv.RenderError, match="its last image was lost with its worker"):
            await envs.render()
        obs = (await envs.step(actions)).obs
        assert np.array_equal(await envs.render(), [paint(row) for row in obs])
