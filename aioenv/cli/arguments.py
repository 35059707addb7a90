"""Parse the arguments of several commands: numbers, sizes, files to write, and envs.

An env is an id of Gymnasium, `module:id`, or the name of a synthetic env.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from aioenv.cli.processes import EndedBySignal, standard_library_end
from aioenv.cli.terminal import STDOUT
from aioenv.requirements import has_batch
from aioenv.worker.making import is_native_task, vector_entry_point

__all__ = [
    "SYNTHETIC",
    "NoOp",
    "Pixels",
    "Uneven",
    "env_factory",
    "env_problem",
    "import_here",
    "json_file",
    "native_problem",
    "not_registered",
    "out_file",
    "picture_file",
    "positive_float",
    "positive_int",
    "registered",
    "seed",
    "size",
]


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


def json_file(text: str) -> Path | str:
    """Parse the value of --json: a file, or "-" for stdout.

    Raises:
        argparse.ArgumentTypeError: if the file can't be written; or it is an env, which was meant as another argument.
    """
    if text in SYNTHETIC or text in gymnasium.registry:
        raise argparse.ArgumentTypeError(f"expected a file, but {text!r} is an env: name it before --json")
    return text if text == STDOUT else out_file(text)


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


MEAN_SLEEP_S = 2e-3


class NoOp(gymnasium.Env[Any, Any]):
    """An env that does nothing: a step costs only the vector env's own time."""

    observation_space: gymnasium.Space[Any] = spaces.Box(-1, 1, (4,), np.float32)
    action_space: gymnasium.Space[Any] = spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs: npt.NDArray[Any] = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return the one observation."""
        return self._obs, {}

    def step(self, action: Any) -> Any:
        """Return the same observation."""
        return self._obs, 0.0, False, False, {}


class Pixels(NoOp):
    """An env that does nothing, with observations of Atari's size: four stacked grey images, 28 kB."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)

    def __init__(self) -> None:
        self._obs = np.arange(84 * 84 * 4, dtype=np.uint8).reshape(84, 84, 4)


class Uneven(NoOp):
    """An env whose steps sleep for exponentially distributed times, 2 ms on average: a few steps are long."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return zeros; the seed decides how long the steps take."""
        gymnasium.Env.reset(self, seed=seed)
        return self._obs, {}

    def step(self, action: Any) -> Any:
        """Sleep, and return zeros."""
        time.sleep(self.np_random.exponential(MEAN_SLEEP_S))
        return super().step(action)


SYNTHETIC: dict[str, type[NoOp]] = {"noop": NoOp, "pixels": Pixels, "uneven": Uneven}


def env_factory(env: str) -> Callable[[], Any]:
    """Return a factory of an env."""
    return SYNTHETIC.get(env) or partial(gymnasium.make, env)


def import_here(module: str) -> ModuleType:
    """Import a module, also from the current directory, which is not on the path of the `aioenv` script.

    The directory comes behind the standard library: no file in it shadows a module that is imported later.

    Raises:
        ImportError: if there is no such module, or it imports one that does not exist.
    """
    if not module or module.startswith("."):
        raise ImportError(f"expected a module's full name, got {module!r}")
    if "" not in sys.path:
        sys.path.insert(standard_library_end(sys.path), "")
    return importlib.import_module(module)


def registered(env: str) -> EnvSpec:
    """Return the spec that is registered under an id, or under `module:id` once that module is imported.

    Raises:
        gymnasium.error.Error: if there is none.
        ImportError: if there is no such module, or it raises when it is imported.
    """
    module, colon, name = env.rpartition(":")
    if colon:
        try:
            import_here(module)
        except (ImportError, EndedBySignal):
            raise
        except (Exception, SystemExit) as exc:
            raise ImportError(f"importing {module}: {type(exc).__name__}: {exc}") from exc
    return gymnasium.spec(name)


def env_problem(env: str) -> str | None:
    """Explain why there is no env of this id or name; None if there is."""
    try:
        if env not in SYNTHETIC:
            registered(env)
    except (gymnasium.error.Error, ImportError) as exc:
        return not_registered(env, exc)
    return None


def not_registered(env: str, error: Exception) -> str:
    """Word the error of `registered`, and say how an env of one's own is named."""
    own = "" if ":" in env else f" (my_module:{env}, if a module of yours registers it)"
    return f"{env}: {str(error).removesuffix('.')}{own}"


def native_problem(env: str) -> str | None:
    """Explain why an env has no vectorised version here, ours or its authors'; None if it has one."""
    if env not in SYNTHETIC:
        spec = registered(env)
        if vector_entry_point(spec) is not None or (is_native_task(spec) and has_batch()):
            return None
        if is_native_task(spec):
            return "it needs mujoco >= 3.17 (mujoco.batch)"
    return f"there is no vectorised version of {env}"
