"""The `aioenv` command: demo, record, bench, tune, doctor, trace."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import aioenv
from aioenv.cli.ending import CommandEnded, raised

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None for those of this process.

    Returns:
        The exit status: 0 if all went well, 1 if something failed, 2 if it was asked for what can't be, 130 after
        Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, 141 if nobody reads its output any more
        (`aioenv bench --list | head -1`).

    Raises:
        SystemExit: if the arguments are wrong (status 2), or help was asked for (0).
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`, pythonw): all that is printed goes nowhere
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal may lack a letter, and who reads a log of something long wants to see how far it is
            stream.reconfigure(errors="replace", line_buffering=True)
    try:
        with raised():
            status = _run(argv)
            sys.stdout.flush()
    except CommandEnded as exc:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\n{exc}", file=sys.stderr)
        return 128 + exc.signum
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is left is flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as exc:
        if not _our_error(exc):
            raise
        print(f"aioenv: {exc}", file=sys.stderr)
        return 1
    return status


def _run(argv: Sequence[str] | None) -> int:
    # imported here, since that takes a while, in which Ctrl-C shall be one, too
    from aioenv.cli import doctor

    modules: dict[str, Any] = {"doctor": doctor}
    wrong: Exception | None = None
    asked = list(sys.argv[1:] if argv is None else argv)
    if asked[:1] != ["doctor"]:  # which imports nothing that may be broken, and says what is
        from aioenv.requirements import check_requirements

        check_requirements()
        from aioenv.worker.mujoco_gl import without_mujoco_gl

        wrong = without_mujoco_gl()  # for whoever draws
        from aioenv.cli import bench, demo, record, trace_view, tune

        modules = {"demo": demo, "record": record, "bench": bench, "tune": tune, **modules, "trace": trace_view}
    parser = argparse.ArgumentParser(prog="aioenv", description="Step many RL envs at once, from asyncio.")
    parser.add_argument("--version", action="version", version=f"aioenv {aioenv.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    if wrong is not None:
        raise wrong
    status: int = args.run(args)
    return status


def _our_error(exc: Exception) -> bool:
    """Whether an exception is for the user to read, rather than a fault."""
    if isinstance(exc, OSError):
        return True
    errors = sys.modules.get("aioenv.errors")  # which imports Gymnasium
    return errors is not None and isinstance(exc, errors.AioenvError)
