"""Run the project's own benchmark suite, every table of docs/data; or one METRIC, of any env.

Each contender is measured in a process of its own, in turn, for several rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from aioenv.cli import exit_status
from aioenv.cli.arguments import SYNTHETIC, env_problem, out_file, positive_float, positive_int
from aioenv.cli.bench import describe_machine, print_noise
from aioenv.cli.contenders import Workload, play_rounds
from aioenv.cli.terminal import progress
from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS
from benchmarks import suite
from benchmarks.metrics import METRICS, REGISTRY, Metric, print_metric, refuse_differing, summarize_metric
from benchmarks.tables import out_directory

__all__ = ["main"]

# Arguments without an effect on a metric alone, and on the suite.
SUITE_ONLY = ("quick", "rows", "resume", "again_if_noisy", "tables", "plots")
METRIC_ONLY = ("env", "num_envs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite, or measure one metric.

    Args:
        argv: the arguments; None for those of this process.

    Returns:
        The exit status: 0 on success, 1 if one of aioenv's own contenders failed, or nothing could be measured, 2 if
        the arguments can't be met, and after signals as `aioenv`.
    """
    args = _parser().parse_args(argv)
    return exit_status(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        return _run_metric(args, METRICS[args.metric]) if args.metric else _run_suite(args)
    except suite.ArgumentsRefused as exc:
        print(f"benchmarks: {exc}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("metric", nargs="?", metavar="METRIC", choices=METRICS, help=f"one of {', '.join(METRICS)}")
    add("--rounds", type=positive_int, help="(default: 3, with --quick 1, of a metric 5)")
    add(
        "--seconds", type=positive_float, help="the clock runs, a round (default: 0.6, with --quick 0.2, of a metric 1)"
    )
    add("--start", choices=START_METHODS, help="how aioenv starts its workers")
    add("--channel", choices=("auto", *CHANNELS), default="auto", help="how aioenv talks to them")
    add("--only", nargs="+", metavar="NAME", help="only these contenders")
    add("--list", action="store_true", help="show the rows, or the metric's contenders")
    add("--json", type=out_file, metavar="FILE", help="write every measurement there")
    add = parser.add_argument_group("the suite").add_argument
    add("--quick", action="store_true", help="fewer rows, measured too shortly for results to rely on")
    add("--rows", nargs="+", metavar="ROW", help="only these rows, by their beginnings; --list shows them")
    add("--resume", type=out_file, metavar="FILE", help="as --json, but rows that it has are not measured again")
    add("--again-if-noisy", action="store_true", help="with --resume: except rows measured under foreign load")
    add("--tables", type=out_directory, metavar="DIR", help="add the measurements to the CSV files there (docs/data)")
    add("--plots", type=out_directory, metavar="DIR", help="draw plots there: of --tables, or of this run (matplotlib)")
    add = parser.add_argument_group("a metric").add_argument
    add("--env", nargs="+", help="ids (module:id imports the module first), noop, pixels, or uneven")
    add("--num-envs", type=positive_int)
    return parser


def _refuse(args: argparse.Namespace, names: Sequence[str], advice: str) -> None:
    """Refuse arguments that would have no effect.

    Raises:
        suite.ArgumentsRefused: if one of them is given.
    """
    for name in names:
        if getattr(args, name):
            raise suite.ArgumentsRefused(f"--{name.replace('_', '-')} {advice}")


def _run_suite(args: argparse.Namespace) -> int:
    if args.list:
        suite.print_rows()
        return 0
    _refuse(args, METRIC_ONLY, "goes with a METRIC: the suite has envs of its own, which --rows chooses")
    known = suite.contender_names()
    if unknown := [name for name in args.only or () if name not in known]:
        raise suite.ArgumentsRefused(f"no contenders {unknown}; there are {sorted(known)}")
    if args.plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise suite.ArgumentsRefused("--plots takes matplotlib: pip install 'aioenv[bench]'")
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.seconds = args.seconds or (0.2 if args.quick else 0.6)
    return suite.run_suite(args)


def _run_metric(args: argparse.Namespace, metric: Metric) -> int:
    if args.list:
        print("\n".join(metric.measures))
        return 0
    _refuse(args, SUITE_ONLY, f"goes with the suite, not with {args.metric}")
    if unknown := [name for name in args.only or () if name not in metric.measures]:
        raise suite.ArgumentsRefused(f"no contenders {unknown}; there are {list(metric.measures)}")
    if args.metric in ("startup", "memory") and args.start is not None:
        raise suite.ArgumentsRefused(f"{args.metric} compares all ways to start: choose with --only, not with --start")
    for env in args.env or ():
        if problem := env_problem(env):
            raise suite.ArgumentsRefused(f"--env {problem}; besides ids there are {list(SYNTHETIC)}")
    num_envs, rounds, seconds = args.num_envs or metric.num_envs, args.rounds or 5, args.seconds or 1.0
    print(f"{metric.title}: {num_envs} envs, median of {rounds} rounds")
    names = [f"{args.metric}: {name}" for name in metric.measures if not args.only or name in args.only]
    rows: list[dict[str, Any]] = []
    broken = False
    for env in args.env or [metric.env]:
        workload = Workload(env, num_envs, seconds, start=args.start, channel=args.channel)
        with progress(len(names) * rounds) as show:
            outcomes = play_rounds({name: (name, workload) for name in names}, rounds, show, registry=REGISTRY)
        refuse_differing(metric, outcomes)
        rows += (new := summarize_metric(env, metric, outcomes))
        print_metric(env, metric, new)
        broken |= any(outcome.broken for name, outcome in outcomes.items() if "aioenv" in name)
    print_noise([result for row in rows for result in row["rounds"]])
    if args.json is not None:
        settings = {
            "num_envs": num_envs,
            "rounds": rounds,
            "seconds": seconds,
            "start": args.start,
            "channel": args.channel,
        }
        content = {"machine": describe_machine(), "settings": settings, args.metric: rows}
        suite.write_json(args.json, content)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
