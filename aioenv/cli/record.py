"""Step envs and write a tiled video of them, while stepping goes on."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium

import aioenv
from aioenv.cli.arguments import (
    import_here,
    not_registered,
    out_file,
    positive_float,
    positive_int,
    registered,
    seed,
    size,
)
from aioenv.cli.processes import EndedBySignal
from aioenv.cli.terminal import STDOUT, progress, say, write_json
from aioenv.loops.record import record
from aioenv.make import BACKENDS
from aioenv.native_vector_env import vector_env_factory
from aioenv.rendering.config import TRACKING
from aioenv.rendering.images import parse_grid

__all__ = ["HELP", "add_arguments", "run"]

HELP = "step envs and write a tiled video of them"

PICTURE = (1280, 720)  # of all images together, unless their size is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("env", metavar="ENV", help="an id of Gymnasium, or module:id")
    parser.add_argument("--steps", type=positive_int, default=200, help="steps of every env (default: 200)")
    parser.add_argument("--out", type=out_file, default=Path("out/record.mp4"), help="(default: out/record.mp4)")
    parser.add_argument(
        "--policy", metavar="MODULE:FUNCTION", type=policy, help="gives actions for observations (default: at random)"
    )
    parser.add_argument("--grid", metavar="RxC", type=grid, default=(2, 2), help="rows and columns (default: 2x2)")
    parser.add_argument("--num-envs", type=positive_int, help="how many envs (default: as many as the grid has cells)")
    parser.add_argument(
        "--size", type=size, metavar="WxH", help="of one image, in pixels (default: a picture of 1280x720 for all)"
    )
    parser.add_argument(
        "--camera",
        default=TRACKING,
        help="a camera of the model, by name or number; -1 for the free camera (default: one that follows a body, if "
        "the model has one, else the env's own view)",
    )
    parser.add_argument("--no-labels", action="store_true", help="leave out the slot and the return in each image")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="workers",
        help="single envs in worker processes, or the env's version as one vector env (default: workers)",
    )
    parser.add_argument("--quality", choices=("exact", "fast", "coarse"), default="fast", help="(default: fast)")
    parser.add_argument("--fps", type=positive_float, help="pictures a second (default: as in the env's metadata)")
    parser.add_argument("--seed", type=seed, default=0, help="of the envs and of random actions (default: 0)")
    parser.add_argument(
        "--json", action="store_const", const=STDOUT, help="print the result as JSON, and nothing else, on stdout"
    )


def policy(text: str) -> Callable[[Any], Any]:
    """Import the function that "module:function" names, from the current directory too.

    Raises:
        argparse.ArgumentTypeError: if there is none, or the module ends the program when it is imported.
        RuntimeError: if the module raises when it is imported.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"expected MODULE:FUNCTION, got {text!r}")
    try:
        found: Any = import_here(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise argparse.ArgumentTypeError(f"there is no {text!r}: {exc}") from None
    except EndedBySignal:
        raise
    except SystemExit as exc:  # a script whose last line is sys.exit(main())
        raise argparse.ArgumentTypeError(f"importing {module}: SystemExit: {exc}") from None
    except (TypeError, ValueError) as exc:  # argparse would hide the reason
        raise RuntimeError(f"--policy {text}: the module can't be imported") from exc
    if not callable(found):
        raise argparse.ArgumentTypeError(f"expected a function, but {text!r} is {found!r}")
    function: Callable[[Any], Any] = found
    return function


def grid(text: str) -> tuple[int, int]:
    """Parse rows and columns.

    Raises:
        argparse.ArgumentTypeError: if they are none.
    """
    try:
        return parse_grid(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def run(args: argparse.Namespace) -> int:
    """Record; 0 on success."""
    rows, columns = args.grid
    width, height = args.size or (max(1, PICTURE[0] // columns), max(1, PICTURE[1] // rows))
    camera = int(args.camera) if re.fullmatch(r"-?\d+", args.camera) else args.camera
    try:
        registered(args.env)
    except (gymnasium.error.Error, ImportError) as exc:
        print(f"aioenv record: {not_registered(args.env, exc)}", file=sys.stderr)
        return 2
    if args.backend == "native":
        try:
            vector_env_factory(args.env, {})
        except (ValueError, gymnasium.error.Error) as exc:
            print(f"aioenv record: {exc}", file=sys.stderr)
            return 1
    before = _written(args.out)
    try:
        config = aioenv.RenderConfig(width, height, camera, args.quality)
        with progress(args.steps) as show:
            done = aioenv.run(
                record(
                    args.env,
                    args.out,
                    steps=args.steps,
                    policy=args.policy,
                    num_envs=args.num_envs or rows * columns,
                    grid=args.grid,
                    render=config,
                    fps=args.fps,
                    seed=args.seed,
                    backend=args.backend,
                    labels=not args.no_labels,
                    progress=lambda step: show(f"step {step} of {args.steps}"),
                )
            )
    except ImportError as exc:
        if exc.name != "imageio_ffmpeg":
            raise
        print("aioenv record: this takes imageio-ffmpeg: pip install imageio-ffmpeg", file=sys.stderr)
        return 1
    except BaseException as exc:
        # a policy's own ValueError keeps its traceback
        if isinstance(exc, OSError) or (isinstance(exc, ValueError) and args.policy is None):
            print(f"aioenv record: {exc}", file=sys.stderr)
            return 1
        if _written(args.out) not in (None, before):
            print(f"\nThe video ends where the run was interrupted: {args.out.resolve()}", file=sys.stderr)
        raise
    if args.json is not None:
        write_json(args.json, {"path": str(done.path.resolve()), "pictures": done.pictures, "episodes": done.episodes})
    else:
        say(f"{done.pictures} pictures, {done.episodes} episodes ended.")
        say(f"Video: {done.path.resolve()}", "bold", wrap=False)
    return 0


def _written(path: Path) -> int | None:
    """Return when a file was written, in nanoseconds; None if there is none."""
    return path.stat().st_mtime_ns if path.is_file() else None
