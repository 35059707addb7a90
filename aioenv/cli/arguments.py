"""Parse what several commands take as arguments: numbers, sizes, files to write."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

__all__ = ["out_file", "picture_file", "positive_float", "positive_int", "seed", "size"]

_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")


def out_file(text: str) -> Path:
    """Parse the path of a file to write, and check that it can be written before long work begins.

    Raises:
        argparse.ArgumentTypeError: if it can't.
    """
    path = Path(text)
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if there == path and there.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, but {text!r} is a directory")
    if there != path and not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} can't be written: {str(there)!r} is no directory")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} can't be written: {str(there)!r} is read-only for you")
    return path


def picture_file(text: str) -> Path:
    """Parse the path of a picture, whose format matplotlib takes from the name.

    Raises:
        argparse.ArgumentTypeError: if it can't be written, or is no picture's name.
    """
    path = out_file(text)
    if path.suffix.lower() not in _PICTURES:
        raise argparse.ArgumentTypeError(
            f"expected a file named {', '.join(f'*{one}' for one in _PICTURES)}; got {text!r}"
        )
    return path


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: if it is none; argparse turns it into a message and status 2.
    """
    try:
        value = int(text.replace(",", "").replace("_", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def seed(text: str) -> int:
    """Parse a whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """Parse a number above 0.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def size(text: str) -> tuple[int, int]:
    """Parse WIDTHxHEIGHT in pixels, as (width, height).

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    width, _, height = text.lower().partition("x")
    try:
        return positive_int(width), positive_int(height)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected WIDTHxHEIGHT, like 160x120, got {text!r}") from None
