"""`record`: write a tiled video of many envs while they are stepped; `TiledVideo` encodes it by ffmpeg off the loop."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from aioenv.core.images import colours
from aioenv.display import video
from aioenv.errors import RenderError, describe_exit
from aioenv.loops.evaluate import progress_bar
from aioenv.make import make_vec
from aioenv.process.async_resource import internal_task, wait_through_cancel
from aioenv.rendering.config import RenderConfig
from aioenv.rendering.images import side_by_side, tile
from aioenv.rollout.rollout import Policy, is_pair_space, split_answer, takes_slots
from aioenv.spaces.seeding import normalize_slot_seed
from aioenv.vector_env import AsyncVectorEnv
from aioenv.wrappers.vector_wrapper import VectorWrapper

__all__ = [
    "LEAST_FPS",
    "MOST_FPS",
    "Recording",
    "TiledVideo",
    "check_name",
    "draw_labels",
    "fps_of",
    "is_fps",
    "record",
]


ImageArray = npt.NDArray[np.uint8]

DEFAULT_FPS = 20.0
# The limits of an mp4 file.
LEAST_FPS, MOST_FPS = 0.001, 100_000.0
# Suffixes of file formats that can hold H.264; without a suffix the file is mp4.
_SUFFIXES = ("", ".mp4", ".m4v", ".mov", ".mkv")


def is_fps(fps: Any) -> bool:
    """Return whether a video can have this number of pictures a second."""
    return isinstance(fps, (int, float, np.number)) and bool(LEAST_FPS <= float(fps) <= MOST_FPS)


def fps_of(metadata: Mapping[str, Any]) -> float:
    """Return the pictures a second in an env's metadata, else 20."""
    fps: Any = metadata.get("render_fps")
    return float(fps) if is_fps(fps) else DEFAULT_FPS


def check_name(path: Path) -> None:
    """Raise unless a file of this name can hold H.264.

    Raises:
        ValueError: if the suffix is that of another format.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"out: expected a file named *.mp4 (or {', '.join(_SUFFIXES[2:])}), got {str(path)!r}")


class TiledVideo:
    """An H.264 video, one tiled picture a step.

    Args:
        path: the mp4 file; its directory is made. An existing file is replaced.
        grid: the numbers of rows and columns; None for a grid that is as square as possible.

    Attributes:
        fps: pictures a second when it is played; set it before the first `write`.

    Raises:
        ImportError: if imageio-ffmpeg is not installed.
        OSError: if it finds no ffmpeg.
        ValueError: if the suffix of the path is that of another format (see `check_name`).
    """

    def __init__(self, path: Path, grid: tuple[int, int] | None = None) -> None:
        check_name(path)
        try:
            ffmpeg = importlib.import_module("imageio_ffmpeg")
        except ImportError as exc:
            message = f"videos take imageio-ffmpeg: pip install 'imageio[ffmpeg]' ({exc})"
            raise ImportError(message, name=exc.name) from exc
        try:
            self._exe: str = ffmpeg.get_ffmpeg_exe()
        except RuntimeError as exc:  # the package has no binary for this platform, and none is installed
            raise FileNotFoundError(f"videos take ffmpeg: {exc}") from exc
        self.path = path
        self._grid = grid
        self.fps = DEFAULT_FPS
        self._process: subprocess.Popen[bytes] | None = None
        self._shape: tuple[int, ...] | None = None  # of a picture
        self._lock = threading.Lock()  # a cancelled `write` goes on, on its thread
        self._closed = False

    async def write(self, batches: Sequence[ImageArray], labels: Sequence[str] = ()) -> None:
        """Append one picture for each batch of images; another thread tiles and writes them.

        Args:
            batches: batches of images.
            labels: a text for each image of a batch, drawn at its top; empty for none.

        Raises:
            RenderError: if images are not uint8 with three channels, or not of the size of those before.
            OSError: if ffmpeg has failed; the message is ffmpeg's.
        """
        await asyncio.to_thread(self._write, batches, labels)

    def _write(self, batches: Sequence[ImageArray], labels: Sequence[str]) -> None:
        with self._lock:
            for images in batches:
                if not self._closed:
                    self._append(tile(draw_labels(images, labels) if labels else images, self._grid))

    def _append(self, picture: ImageArray) -> None:
        if picture.dtype != np.uint8 or picture.shape[2] != 3:
            raise RenderError(
                f"a video takes images of uint8 with three channels, red, green and blue; got {picture.dtype} with "
                f"{picture.shape[2]}"
            )
        if self._process is None:
            self._process, self._shape = self._open(picture), picture.shape
        if picture.shape != self._shape:
            raise RenderError(f"a video's pictures are of one size: expected {self._shape}, got {picture.shape}")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(picture.tobytes())
        except BrokenPipeError:
            self._finish()
            raise

    def _open(self, picture: ImageArray) -> subprocess.Popen[bytes]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        height, width = picture.shape[:2]
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self.fps:g}", "-i", "-"]
        codec = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-pix_fmt", "yuv420p"]
        even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]  # yuv420p needs even sizes
        kind = [] if self.path.suffix else ["-f", "mp4"]
        target = f"file:{self.path}"  # else a colon would end a protocol name, and a dash start an option
        return subprocess.Popen(
            [self._exe, "-y", "-v", "error", *source, *even, *codec, "-movflags", "+faststart", *kind, target],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C goes to this process alone, which closes the video properly
        )

    async def close(self) -> None:
        """Wait until ffmpeg has written everything, also if this is cancelled. Idempotent.

        Raises:
            OSError: if ffmpeg has failed.
        """
        closing = internal_task(asyncio.to_thread(self._close))
        await wait_through_cancel(closing)
        closing.result()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._finish()

    def _finish(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            # it also closes stdin, and copes with an ffmpeg that has ended
            _, errors = process.communicate()
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode:
            why = errors.decode(errors="replace").strip() or f"ffmpeg {describe_exit(process.returncode)}"
            raise OSError(f"{self.path} could not be written: {why}")


def draw_labels(images: ImageArray, labels: Sequence[str]) -> ImageArray:
    """Return images with a text at the top of each, white with a black outline.

    Args:
        images: of shape `(n, height, width, 3)`; or `(n, C, height, width, 3)`, whose C images get one text.
        labels: n texts.
    """
    # needed here alone, and installed with imageio
    from PIL import Image, ImageDraw, ImageFont

    images = side_by_side(images) if images.ndim == 5 else images
    if images.dtype != np.uint8 or images.shape[3] != 3:
        return images  # which the video refuses
    size = max(10, images.shape[1] // 18)
    font = ImageFont.load_default(size)
    labelled = []
    for image, text in zip(images, labels, strict=True):
        picture = Image.fromarray(image)
        place = (size // 2, size // 3)
        ImageDraw.Draw(picture).text(place, text, "white", font, stroke_width=max(1, size // 12), stroke_fill="black")
        labelled.append(np.asarray(picture))
    return np.stack(labelled)


class Recording(NamedTuple):
    """The result of a recording.

    Attributes:
        path: the video's file.
        pictures: the number of its pictures.
        episodes: the number of episodes that ended.
    """

    path: Path
    pictures: int
    episodes: int

    def _repr_html_(self) -> str:
        return video(self.path, f"{self.pictures:,} pictures, {self.episodes:,} episodes ended")


async def record(
    env: AsyncVectorEnv | VectorWrapper | str | EnvSpec | Callable[..., Any],
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
    """Step envs and write a video of all of them, a picture a step. Each is drawn while the next step runs.

    The first picture is of the states after a reset, so that there are `steps + 1`. It needs imageio-ffmpeg
    (`pip install 'imageio[ffmpeg]'`).

    If this is cancelled or fails, or if the process is killed, the video still ends properly, with the pictures until
    then.

    Args:
        env: an argument of `make_vec`; or a vector env, or a wrapper of one, which is reset, and left open.
        out: the mp4 file; its directory is made, and an existing file is replaced.
        steps: the number of steps of each env.
        policy: `policy(obs)` returns a batch of actions for a batch of observations, as for `AsyncVectorEnv.rollout`.
            Its other results are dropped, and `slots` are always all. None for random actions, by `seed`.
        num_envs: the number of envs to make.
        grid: the numbers of rows and columns; None for a grid of all envs that is as square as possible. Envs without
            room are left out of the picture.
        render: how to draw the envs that are made; None for 160x120, "fast".
        fps: pictures a second; None for those in the env's metadata, else 20.
        seed: the seed of the reset and of the random actions.
        labels: whether to draw the slot and the return of the episode so far into each image.
        progress: True shows a bar, if `tqdm` is installed; a function is called with the number of steps after each.
        **kwargs: more arguments of `make_vec`.

    Raises:
        ValueError: if a number is not positive, `seed` is negative, or the suffix of `out` is that of another format.
        ImportError: if imageio-ffmpeg is missing.
        RenderError: if images can't be drawn.
        OSError: if the video can't be written, or there is no ffmpeg.
        TypeError: if `env` is a vector env and there are arguments of `make_vec`, or it is not of the async API; if
            `policy` is no function, `seed` no int, or `progress` a coroutine function.
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
    if inspect.iscoroutinefunction(progress):
        raise TypeError(
            f"record: progress: expected a bool or a plain function, got {progress!r}, which is never awaited"
        )
    if (seed := normalize_slot_seed(seed)) is not None and seed < 0:
        raise ValueError(f"record: seed: expected an int from 0, or None, got {seed}")
    video = TiledVideo(Path(out), grid)
    if isinstance(env, (AsyncVectorEnv, VectorWrapper)):
        if strange := [*["render"][: render is not None], *kwargs]:
            raise TypeError(f"record: {', '.join(strange)}: for envs that are made here; env is a vector env already")
        return await _record(await env, video, steps, policy, fps, seed, labels, progress)
    if isinstance(env, VectorEnv):
        raise TypeError(
            f"record: expected a vector env of the async API, or what make_vec takes, got {env!r}; for one of "
            "aioenv.sync there is aioenv.sync.record"
        )
    render = render or RenderConfig(160, 120, quality="fast")
    async with make_vec(env, num_envs, render=render, **kwargs) as envs:
        return await _record(envs, video, steps, policy, fps, seed, labels, progress)


async def _record(
    envs: AsyncVectorEnv | VectorWrapper,
    video: TiledVideo,
    steps: int,
    policy: Policy | None,
    fps: float | None,
    seed: int | None,
    labels: bool,
    progress: bool | Callable[[int], object],
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

    bar = progress_bar(steps) if progress and not callable(progress) else None
    # envs that draw themselves can't be asked for images while they are stepped
    beside = envs.draws_beside
    step: asyncio.Future[Any] | None = None
    episodes = pictures = 0
    returns, ended = np.zeros(envs.num_envs), np.zeros(envs.num_envs, bool)

    def texts() -> list[str]:
        return [f"slot {slot}  return {total:.1f}" for slot, total in enumerate(returns)] if labels else []

    try:
        obs, _ = await envs.reset(seed=seed)
        for number in range(1, steps + 1):
            actions = await choose(obs)
            if beside:
                drawn = asyncio.ensure_future(envs.render())  # of the current states, even if the next ones come first
                step = asyncio.ensure_future(envs.step(actions))
                await video.write([colours(await drawn)], texts())
                result = await step
            else:
                await video.write([colours(await envs.render())], texts())
                result = await envs.step(actions)
            pictures += 1
            returns[ended] = 0.0  # their episodes have begun with this step, or with the reset before it
            returns += result.reward
            obs, ended = result.obs, result.terminated | result.truncated
            episodes += int(ended.sum())
            if envs.autoreset_mode is AutoresetMode.DISABLED and ended.any():
                obs, _ = await envs.reset(options={"reset_mask": ended})
            if envs.autoreset_mode is not AutoresetMode.NEXT_STEP:
                returns[ended] = 0.0  # the image is that of the next episode
            if bar is not None:
                bar.update(1)
            elif callable(progress):
                progress(number)
        await video.write([colours(await envs.render())], texts())
        pictures += 1
    finally:
        try:
            if step is not None:
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)  # its error is logged nowhere else
        finally:  # also if this is cancelled a second time
            if bar is not None:
                bar.close()
            await video.close()
    return Recording(video.path, pictures, episodes)
