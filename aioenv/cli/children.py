"""Python processes that commands start: where they import from."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import aioenv
from aioenv.process.environment import import_path

__all__ = ["after_standard_library", "python"]


def after_standard_library(path: Sequence[str]) -> int:
    """Where in an import path a directory stands in for no module of the standard library, but for installed ones."""
    here = os.path.dirname(os.__file__)
    own = [i for i, entry in enumerate(path) if entry == here or os.path.basename(entry) == "lib-dynload"]
    return max(own, default=-1) + 1


def python(code: str, *args: str) -> list[str]:
    """The command that runs code, with arguments, which imports from where this process does.

    The working directory of this process is found too, wherever the other one runs, but after the standard library.
    Nothing of it is in the environment: what the code starts in turn has the path from it, or need not have it.
    """
    path = list(import_path())
    more = [home] if (home := str(Path(aioenv.__file__).resolve().parents[1])) not in path else []
    try:
        here = os.getcwd()
    except OSError:  # it has been removed
        pass
    else:
        path = [entry for entry in path if entry != here]
        more = list(dict.fromkeys([*more, here]))
    index = after_standard_library(path)
    path[index:index] = more
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!a}\n{code}", *args]
