"""The `aioenv` command: demo, record, bench, tune, doctor, trace."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import aioenv
from aioenv.cli.ending import Ended, raised
from aioenv.errors import AioenvError, RenderError

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
    except Ended as exc:
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
    except (AioenvError, OSError) as exc:
        print(f"aioenv: {exc}", file=sys.stderr)
        return 1
    return status


def _run(argv: Sequence[str] | None) -> int:
    # imported here, since that takes a while, in which Ctrl-C shall be one, too
    from aioenv.host.mujoco_gl import check_mujoco_gl

    wrong: RenderError | None = None
    try:
        check_mujoco_gl()
    except RenderError as exc:  # for whoever draws; `doctor` says it beside what it finds
        wrong = exc
        del os.environ["MUJOCO_GL"]  # or MuJoCo could not be imported

    from aioenv.cli import bench, demo, doctor, record, trace_view, tune

    parser = argparse.ArgumentParser(prog="aioenv", description="Step many RL envs at once, from asyncio.")
    parser.add_argument("--version", action="version", version=f"aioenv {aioenv.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    modules = {
        "demo": demo,
        "record": record,
        "bench": bench,
        "tune": tune,
        "doctor": doctor,
        "trace": trace_view,
    }
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    if wrong is not None and args.run is not doctor.run:
        raise wrong
    status: int = args.run(args)
    if wrong is not None:
        print(f"\n{wrong}")
        return 1
    return status
