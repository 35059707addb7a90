"""Types of command line arguments that more than one command has."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from aioenv.cli.children import after_standard_library

__all__ = ["import_here", "out_file", "picture_file", "positive_float", "positive_int", "seed", "size"]

_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")


def import_here(module: str) -> ModuleType:
    """Import a module, of the current directory too: `aioenv` alone would not find it, as `python -m aioenv` does.

    The directory comes after the standard library: modules that are not imported yet, here and in workers, are its.

    Raises:
        ImportError: if there is none, or one that it imports.
    """
    if not module or module.startswith("."):
        raise ImportError(f"expected a module's full name, got {module!r}")
    if "" not in sys.path:
        sys.path.insert(after_standard_library(sys.path), "")
    return importlib.import_module(module)


def out_file(text: str) -> Path:
    """Where a file can be written: found out before what comes of long work is lost.

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
    """As `out_file`, for what matplotlib draws: it takes the format from the name, and would say so at the end.

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
    """A whole number of at least 1.

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
    """A whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """A number above 0.

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
    """WIDTHxHEIGHT in pixels, as (width, height).

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    width, _, height = text.lower().partition("x")
    try:
        return positive_int(width), positive_int(height)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected WIDTHxHEIGHT, like 160x120, got {text!r}") from None
