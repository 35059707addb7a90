"""`TiledVideo`: images of many envs as one tiled video, encoded by ffmpeg off the event loop."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.errors import RenderError, describe_exit
from aioenv.rendering.images import tile

__all__ = ["LEAST_FPS", "MOST_FPS", "TiledVideo", "check_name", "fps_of", "is_fps"]

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
            message = f"videos take imageio-ffmpeg: pip install 'aioenv[video]' ({exc})"
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

    async def write(self, batches: Sequence[ImageArray]) -> None:
        """Append one picture for each batch of images; another thread tiles and writes them.

        Raises:
            RenderError: if images are not uint8 with three channels, or not of the size of those before.
            OSError: if ffmpeg has failed; the message is ffmpeg's.
        """
        await asyncio.to_thread(self._write, batches)

    def _write(self, batches: Sequence[ImageArray]) -> None:
        with self._lock:
            for images in batches:
                if not self._closed:
                    self._append(tile(images, self._grid))

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
        """Wait until ffmpeg has written everything. Idempotent.

        Raises:
            OSError: if ffmpeg has failed.
        """
        await asyncio.to_thread(self._close)

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
