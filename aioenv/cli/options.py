"""Types of command line arguments that more than one command has."""

from __future__ import annotations

import argparse

__all__ = ["positive_float", "positive_int", "size"]


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
