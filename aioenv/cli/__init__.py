"""The `aioenv` command: demo, record, bench, tune, doctor, trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import aioenv
from aioenv.cli import bench, demo, doctor, record, trace_view, tune

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None for those of this process.

    Returns:
        The exit status: 0 if all went well, 1 if something failed, 130 after Ctrl-C.

    Raises:
        SystemExit: if the arguments are wrong (status 2), or help was asked for (0).
    """
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
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except aioenv.AioenvError as exc:
        print(f"aioenv: {exc}", file=sys.stderr)
        return 1
    return status
