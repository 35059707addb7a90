"""Images of many envs as one tiled video, encoded by ffmpeg off the event loop."""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TiledVideo", "tile"]

ImageArray = npt.NDArray[np.uint8]


def tile(images: ImageArray) -> ImageArray:
    """The images of one step as one picture, as square a grid as it gets, row by row.

    Args:
        images: uint8 of shape `(n, height, width, 3)`.

    Returns:
        uint8 of shape `(rows * height, columns * width, 3)`; cells without an image are black.
    """
    n, height, width, channels = images.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    grid = np.zeros((rows * columns, height, width, channels), np.uint8)
    grid[:n] = images
    grid = grid.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return np.ascontiguousarray(grid.reshape(rows * height, columns * width, channels))


class TiledVideo:
    """An H.264 video, one tiled picture a step.

    Args:
        path: of the mp4 file; its directory is made. A file that is there is replaced.

    Attributes:
        fps: pictures a second when it is played; set it before the first `write`.

    Raises:
        ImportError: if imageio-ffmpeg is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._ffmpeg: Any = importlib.import_module("imageio_ffmpeg")
        self.path = path
        self.fps = 20.0
        self._writer: Generator[None, Any, None] | None = None

    async def write(self, batches: Sequence[ImageArray]) -> None:
        """Append one picture for each batch of images; they are tiled and handed over on another thread."""
        await asyncio.to_thread(self._write, batches)

    def _write(self, batches: Sequence[ImageArray]) -> None:
        for images in batches:
            picture = tile(images)
            if self._writer is None:
                self._writer = self._open(picture)
            self._writer.send(picture)

    def _open(self, picture: ImageArray) -> Generator[None, Any, None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        height, width = picture.shape[:2]
        writer: Generator[None, Any, None] = self._ffmpeg.write_frames(
            str(self.path),
            (width, height),
            fps=self.fps,
            codec="libx264",
            quality=None,
            macro_block_size=2,  # what yuv420p needs; more would scale the pictures
            output_params=["-preset", "veryfast", "-crf", "23", "-movflags", "+faststart"],
        )
        writer.send(None)
        return writer

    async def close(self) -> None:
        """Wait until ffmpeg has written everything. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await asyncio.to_thread(writer.close)
