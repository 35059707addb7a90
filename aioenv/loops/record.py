"""Recording: a tiled video of many envs, written while they are stepped."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.core.env_images import colours
from aioenv.loops.progress import no_bar, progress_bar
from aioenv.loops.video import LEAST_FPS, MOST_FPS, TiledVideo, fps_of, is_fps
from aioenv.make import make_vec
from aioenv.rendering.config import RenderConfig
from aioenv.rollout.rollout import Policy, is_pair_space, split_answer, takes_slots
from aioenv.vector_env import AsyncVectorEnv

__all__ = ["Recording", "record"]


class Recording(NamedTuple):
    """What was recorded.

    Attributes:
        path: the video.
        pictures: how many it has.
        episodes: how many episodes ended.
    """

    path: Path
    pictures: int
    episodes: int


async def record(
    env: AsyncVectorEnv | str | EnvSpec | Callable[..., Any],
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
    """Step envs and write a video of all of them, a picture a step: each is drawn while the next step is made.

    The first picture is of the states after a reset, so that there are `steps + 1`. It takes imageio-ffmpeg
    (`pip install 'aioenv[video]'`).

    If this is cancelled, or fails, the video is finished all the same, with the pictures until then; so it is if the
    process is killed.

    Args:
        env: what `make_vec` takes; or a vector env, which is reset, and left open.
        out: the mp4 file; its directory is made, and a file that is there replaced.
        steps: how many, of each env.
        policy: `policy(obs)` gives a batch of actions for a batch of observations, as for `AsyncVectorEnv.rollout`:
            what it gives beside them is dropped, `slots` are always all. None for actions at random, by `seed`.
        num_envs: how many envs to make.
        grid: how many rows and columns; None for as square a grid as holds all envs. Envs without room are left out of
            the picture.
        render: how to draw the envs that are made; None for 160x120, "fast".
        fps: pictures a second; None for what the env says, else 20.
        seed: of the reset and of the random actions.
        progress: whether to show a progress bar.
        **kwargs: more arguments of `make_vec`.

    Raises:
        ValueError: if a number is not positive, or `out` is named like another kind of file.
        ImportError: if imageio-ffmpeg is missing.
        RenderError: if images can't be drawn.
        OSError: if the video can't be written, or there is no ffmpeg.
        TypeError: if `env` is a vector env, and arguments are for one that is to be made, or one of another kind; if
            `policy` is no function.
        SlotError: if an env failed, or its worker; the video ends there.
    """
    if grid is not None and not (isinstance(grid, (tuple, list)) and len(grid) == 2):
        raise ValueError(f"record: grid: expected how many rows and columns, as (4, 4), got {grid!r}")
    for name, value in (("steps", steps), ("num_envs", num_envs), *zip(("rows", "columns"), grid or (), strict=False)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"record: {name}: expected a positive int, got {value!r}")
    if fps is not None and not is_fps(fps):
        raise ValueError(f"record: fps: expected a positive number, {LEAST_FPS:g} to {MOST_FPS:g}, got {fps!r}")
    if policy is not None and not callable(policy):
        raise TypeError(f"record: policy: expected a function of observations or None, got {policy!r}")
    video = TiledVideo(Path(out), grid)
    if isinstance(env, AsyncVectorEnv):
        if strange := [*["render"][: render is not None], *kwargs]:
            raise TypeError(f"record: {', '.join(strange)}: for envs that are made here; env is a vector env already")
        return await _record(await env, video, steps, policy, fps, seed, progress)
    if isinstance(env, VectorEnv):
        raise TypeError(
            f"record: expected a vector env of the async API, or what make_vec takes, got {env!r}; for one of "
            "aioenv.sync there is aioenv.sync.record"
        )
    render = render or RenderConfig(160, 120, quality="fast")
    async with make_vec(env, num_envs, render=render, **kwargs) as envs:
        return await _record(envs, video, steps, policy, fps, seed, progress)


async def _record(
    envs: AsyncVectorEnv,
    video: TiledVideo,
    steps: int,
    policy: Policy | None,
    fps: float | None,
    seed: int | None,
    progress: bool,
) -> Recording:
    video.fps = fps_of(envs.metadata) if fps is None else float(fps)
    envs.action_space.seed(seed)
    given = {"slots": np.arange(envs.num_envs)} if policy is not None and takes_slots(policy) else {}
    pairs = is_pair_space(envs.single_action_space)

    async def choose(obs: Any) -> Any:
        if policy is None:
            return envs.action_space.sample()
        answer = policy(obs, **given)
        return split_answer(await answer if inspect.isawaitable(answer) else answer, pairs)[0]

    bar = progress_bar(steps) if progress else no_bar()
    # what `render` asks of envs themselves can't be asked while they are stepped
    beside = envs.draws_beside
    step: asyncio.Future[Any] | None = None
    episodes = pictures = 0
    try:
        obs, _ = await envs.reset(seed=seed)
        for _ in range(steps):
            actions = await choose(obs)
            if beside:
                drawn = asyncio.ensure_future(envs.render())  # of the states that there are now …
                step = asyncio.ensure_future(envs.step(actions))  # … even if the next are made at once
                await video.write([colours(await drawn)])
                result = await step
            else:
                await video.write([colours(await envs.render())])
                result = await envs.step(actions)
            pictures += 1
            obs, ended = result.obs, result.terminated | result.truncated
            episodes += int(ended.sum())
            if envs.autoreset_mode is AutoresetMode.DISABLED and ended.any():
                obs, _ = await envs.reset(options={"reset_mask": ended})
            bar.update(1)
        await video.write([colours(await envs.render())])
        pictures += 1
    finally:
        try:
            if step is not None:
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)  # one that failed beside the video is told of once
        finally:  # also if this is cancelled once more
            bar.close()
            await video.close()
    return Recording(video.path, pictures, episodes)
