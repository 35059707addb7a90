"""Read a video."""

from __future__ import annotations

import subprocess

import numpy as np


def pictures(path, height, width):
    """The pictures of a video, as ffmpeg decodes them."""
    import imageio_ffmpeg

    exe = imageio_ffmpeg.get_ffmpeg_exe()
    command = [exe, "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)
