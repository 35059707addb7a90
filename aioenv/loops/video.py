"""Images of many envs as one tiled video, encoded by ffmpeg off the event loop."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aioenv.rendering.tiles import tile

__all__ = ["TiledVideo"]

ImageArray = npt.NDArray[np.uint8]


class TiledVideo:
    """An H.264 video, one tiled picture a step.

    Args:
        path: of the mp4 file; its directory is made. A file that is there is replaced.
        grid: how many rows and columns; None for as square a grid as it gets.

    Attributes:
        fps: pictures a second when it is played; set it before the first `write`.

    Raises:
        ImportError: if imageio-ffmpeg is not installed.
    """

    def __init__(self, path: Path, grid: tuple[int, int] | None = None) -> None:
        self._exe: str = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
        self.path = path
        self._grid = grid
        self.fps = 20.0
        self._process: subprocess.Popen[bytes] | None = None

    async def write(self, batches: Sequence[ImageArray]) -> None:
        """Append one picture for each batch of images; they are tiled and handed over on another thread.

        Raises:
            OSError: if ffmpeg has failed; the message is its own.
        """
        await asyncio.to_thread(self._write, batches)

    def _write(self, batches: Sequence[ImageArray]) -> None:
        for images in batches:
            picture = tile(images, self._grid)
            if self._process is None:
                self._process = self._open(picture)
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
        even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]  # what yuv420p needs
        return subprocess.Popen(
            [self._exe, "-y", "-v", "error", *source, *even, *codec, "-movflags", "+faststart", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for us: we then close the video properly
        )

    async def close(self) -> None:
        """Wait until ffmpeg has written everything. Idempotent.

        Raises:
            OSError: if ffmpeg has failed.
        """
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            # it closes stdin, too, and minds that ffmpeg may be gone
            _, errors = process.communicate()
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode:
            raise OSError(f"{self.path} could not be written: {errors.decode(errors='replace').strip()}")
