"""Images of many envs as one tiled video, encoded by ffmpeg off the event loop."""

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
# What an mp4 file can say.
LEAST_FPS, MOST_FPS = 0.001, 100_000.0
# What H.264 is put into, by the file's name; without any it is mp4.
_SUFFIXES = ("", ".mp4", ".m4v", ".mov", ".mkv")


def is_fps(fps: Any) -> bool:
    """Whether a video can be played so fast."""
    return isinstance(fps, (int, float, np.number)) and bool(LEAST_FPS <= float(fps) <= MOST_FPS)


def fps_of(metadata: Mapping[str, Any]) -> float:
    """How fast an env says that it is to be played, else 20."""
    fps: Any = metadata.get("render_fps")
    return float(fps) if is_fps(fps) else DEFAULT_FPS


def check_name(path: Path) -> None:
    """See that H.264 goes into a file of this name.

    Raises:
        ValueError: if the name is one of something else.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"out: expected a file named *.mp4 (or {', '.join(_SUFFIXES[2:])}), got {str(path)!r}")


class TiledVideo:
    """An H.264 video, one tiled picture a step.

    Args:
        path: of the mp4 file; its directory is made. A file that is there is replaced.
        grid: how many rows and columns; None for as square a grid as it gets.

    Attributes:
        fps: pictures a second when it is played; set it before the first `write`.

    Raises:
        ImportError: if imageio-ffmpeg is not installed.
        OSError: if it finds no ffmpeg.
        ValueError: if the path's name says that it is something else than H.264 goes into.
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
        except RuntimeError as exc:  # it brings no program of its own on this platform, and there is no other
            raise FileNotFoundError(f"videos take ffmpeg: {exc}") from exc
        self.path = path
        self._grid = grid
        self.fps = DEFAULT_FPS
        self._process: subprocess.Popen[bytes] | None = None
        self._shape: tuple[int, ...] | None = None  # of a picture
        self._lock = threading.Lock()  # a cancelled `write` goes on, on its thread
        self._closed = False

    async def write(self, batches: Sequence[ImageArray]) -> None:
        """Append one picture for each batch of images; they are tiled and handed over on another thread.

        Raises:
            RenderError: if they are no colours, uint8 with three channels, or of another size than those before.
            OSError: if ffmpeg has failed; the message is its own.
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
        even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"]  # what yuv420p needs
        kind = [] if self.path.suffix else ["-f", "mp4"]
        target = f"file:{self.path}"  # or a colon would end the name of a protocol, and a dash begin an option
        return subprocess.Popen(
            [self._exe, "-y", "-v", "error", *source, *even, *codec, "-movflags", "+faststart", *kind, target],
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
            # it closes stdin, too, and minds that ffmpeg may be gone
            _, errors = process.communicate()
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if process.returncode:
            why = errors.decode(errors="replace").strip() or f"ffmpeg {describe_exit(process.returncode)}"
            raise OSError(f"{self.path} could not be written: {why}")
