"""The `aioenv` command: demo, record, watch, bench, tune, doctor, trace, completion."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import aioenv
from aioenv.cli.processes import EndedBySignal, signals_raise
from aioenv.cli.terminal import STDOUT, closest, did_you_mean, stdout_to_stderr

__all__ = ["exit_status", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None for those of this process.

    Returns:
        The exit status: 0 on success, 1 if something failed, 2 if the arguments can't be met. 130 after Ctrl-C, 143
        after SIGTERM, 129 after SIGHUP, and 141 if the reader of its output has ended
        (`aioenv bench --list | head -1`).

    Raises:
        SystemExit: if the arguments are wrong (status 2) or ask for help (0).
    """
    return exit_status(lambda: _run(argv))


def exit_status(command: Callable[[], int]) -> int:
    """Run a command; print errors that are messages for the user, and return the exit status (see `main`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`>&-`, pythonw): discard output
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal may lack a letter; a log file of a long command is to show its progress
            stream.reconfigure(errors="replace", line_buffering=True)
    try:
        with signals_raise():
            status = command()
            sys.stdout.flush()
    except EndedBySignal as exc:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\n{exc}", file=sys.stderr)
        return 128 + exc.signum
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # Python flushes the rest at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as exc:
        if not _our_error(exc):
            raise
        print(f"aioenv: {exc}", file=sys.stderr)
        return 1
    return status


class _Parser(argparse.ArgumentParser):
    """A parser of one command; an error names the closest option."""

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Print the usage and which arguments are not known, and exit with status 2."""
        options = re.findall(r"--[\w-]+", self.format_usage())
        wrong = next((word.partition("=")[0] for word in rest if word.startswith("--")), "")
        self.error(f"unrecognized arguments: {' '.join(rest)}{did_you_mean(closest(wrong, options))}")


def _run(argv: Sequence[str] | None) -> int:
    # imported here: Ctrl-C during the imports, which take a while, is handled too
    from aioenv.cli import doctor

    modules: dict[str, Any] = {"doctor": doctor}
    wrong: Exception | None = None
    asked = list(sys.argv[1:] if argv is None else argv)
    if asked[:1] != ["doctor"]:  # it reports broken parts, so it imports nothing that may be broken
        from aioenv.requirements import check_requirements

        check_requirements()
        from aioenv.worker.mujoco_gl import without_mujoco_gl

        wrong = without_mujoco_gl()  # raised once the arguments are parsed
        from aioenv.cli import bench, completion, demo, record, trace_view, tune, watch

        modules = {"demo": demo, "record": record, "watch": watch, "bench": bench, "tune": tune, **modules}
        modules["trace"] = trace_view
        modules["completion"] = completion
    parser = _Parser(prog="aioenv", description="Step many RL envs at once, from asyncio.")
    parser.add_argument("--version", action="version", version=f"aioenv {aioenv.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers: dict[str, _Parser] = {}
    for name, module in modules.items():
        parsers[name] = command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=name)
    if asked and not asked[0].startswith("-") and asked[0] not in parsers:
        close = closest(asked[0], parsers)
        (parsers[close] if close else parser).print_help(sys.stderr)
        parser.exit(2, f"\naioenv: error: there is no command {asked[0]!r}{did_you_mean(close)}\n")
    args, rest = parser.parse_known_args(asked)
    if rest:
        parsers[args.command].refuse(rest)
    if wrong is not None:
        raise wrong
    args.commands, args.helps = parsers, {name: module.HELP for name, module in modules.items()}
    if getattr(args, "json", None) != STDOUT:
        return int(args.run(args))
    with stdout_to_stderr() as args.json:
        return int(args.run(args))


def _our_error(exc: Exception) -> bool:
    """Check whether an exception is a message for the user, rather than a fault."""
    if isinstance(exc, OSError):
        return True
    errors = sys.modules.get("aioenv.errors")  # which imports Gymnasium
    return errors is not None and isinstance(exc, errors.AioenvError)
