"""Compare vector envs: each in a process of its own, in turn, several rounds; medians and ratios.

With --all, everything that docs/performance.md shows."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioenv.cli.options import out_file, picture_file, positive_float, positive_int
from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS

if TYPE_CHECKING:
    from aioenv.cli.bench.figures import Figure
    from aioenv.cli.bench.tasks import Task

__all__ = ["HELP", "add_arguments", "run"]

HELP = "compare with other vector envs, side by side"

# The bar that a step must stay below, in milliseconds of the loop's thread (p99 at 64 envs).
LOOP_TIME_BAR_MS = 0.5
SUITE_ONLY = ("quick", "rows", "resume", "again-if-noisy", "markdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add = parser.add_argument
    add(
        "--env",
        nargs="+",
        help="ids (module:id imports the module first), noop, or pixels (84x84x4 uint8) (default: CartPole-v1)",
    )
    add("--num-envs", type=positive_int, help="(default: 64)")
    add("--rounds", type=positive_int, help="(default: 5; with --all 3, with --quick 1)")
    add(
        "--seconds",
        type=positive_float,
        help="with the clock running, a round (default: 1; with --all 0.6, with --quick 0.2)",
    )
    add("--start", choices=START_METHODS, help="how aioenv starts its workers")
    add("--channel", choices=("auto", *CHANNELS), default="auto", help="how aioenv talks to them")
    add("--only", nargs="+", metavar="NAME", help="these contenders; --list shows them")
    add("--list", action="store_true", help="show the contenders, and which of them are installed")
    add("--json", type=out_file, metavar="FILE", help="write every measurement there")
    add("--plot", type=picture_file, metavar="FILE", help="draw a plot there, with --all two (takes matplotlib)")
    suite = parser.add_argument_group("the whole suite").add_argument
    suite("--quick", action="store_true", help="with --all: fewer rows, and figures that are good for a look alone")
    suite("--rows", nargs="+", metavar="ROW", help="with --all: these rows, by their beginnings; --list shows them")
    suite(
        "--resume", type=out_file, metavar="FILE", help="with --all: as --json, but what it has is not measured again"
    )
    suite("--again-if-noisy", action="store_true", help="with --resume: but for rows measured under foreign load")
    suite("--markdown", type=out_file, metavar="FILE", help="with --all: write tables into it, between its markers")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--all", action="store_true", help="instead: all rows of the suite, which takes a while (it says how long)")
    add(
        "--loop-time",
        action="store_true",
        help="instead: how long a step in flight keeps the event loop busy (asyncio's own loop)",
    )
    for name, help in (
        ("latency", "the round trip of one step (default: of noop, with --num-envs 1)"),
        ("startup", "how long it takes until every env is built (default: HalfCheetah-v5)"),
        ("memory", "the private memory of a worker (default: HalfCheetah-v5, with --num-envs 8, which is the least)"),
        ("images", "images as observations (default: HalfCheetah-v5, with --num-envs 16)"),
        ("overlap", "physics and images at once, one worker each (default: Humanoid-v5, with --num-envs 16)"),
        ("pool-fast", "images of the quality fast: a RenderPool against bare loops (default: HalfCheetah-v5)"),
        ("pool-exact", "likewise, exact"),
        ("render-workers", "images by 1, 2, 4 and 8 render workers on one device, a GPU, say"),
        ("uneven", "steps that take unevenly long: recv against step (default: uneven, with --num-envs 32)"),
        ("stats", "an update of shared statistics, and their merge (default: --num-envs 64)"),
    ):
        add(f"--{name}", action="store_const", const=name, dest="figure", help=f"instead: {help}")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 1 if one of aioenv's own contenders could not be measured."""
    import gymnasium

    from aioenv.cli.bench import rounds
    from aioenv.cli.bench.contenders import CONTENDERS
    from aioenv.cli.bench.figures import FIGURES
    from aioenv.cli.bench.ours import registered
    from aioenv.cli.bench.tasks import SYNTHETIC

    if args.all:
        return _run_all(args)
    in_vain = [name for name in SUITE_ONLY if getattr(args, name.replace("-", "_"))]
    if in_vain:
        return _refuse(f"--{in_vain[0]} goes with --all")
    args.rounds, args.seconds = args.rounds or 5, args.seconds or 1.0
    figure = FIGURES.get(args.figure)
    names = list(figure.measures if figure else CONTENDERS)
    if args.list:
        for name in names:
            contender = None if figure else CONTENDERS[name]
            missing = contender is not None and not contender.installed
            print(f"{name:<22}{contender.label if contender else ''}{'  (not installed)' if missing else ''}".rstrip())
        return 0
    args.env = args.env or [figure.env if figure else "CartPole-v1"]
    args.num_envs = args.num_envs or (figure.num_envs if figure else 64)
    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        return _refuse(f"no contenders {unknown}; there are {names}")
    if args.figure in ("startup", "memory") and args.start is not None:
        return _refuse(f"--{args.figure} compares all ways to start: choose with --only, not with --start")
    if args.plot is not None and (figure or args.loop_time):
        return _refuse("--plot draws throughput alone; --json writes everything")
    absent = [name for name in args.only or () if figure is None and not CONTENDERS[name].installed]
    if absent:
        return _refuse(f"not installed: {[CONTENDERS[name].package for name in absent]}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return _refuse("--plot takes matplotlib: pip install 'aioenv[bench]'")
    for env in args.env:
        try:
            if env not in SYNTHETIC:
                registered(env)
        except (gymnasium.error.Error, ImportError) as exc:
            return _refuse(f"--env {env}: {exc}; besides ids there are {list(SYNTHETIC)}")
    if args.loop_time:
        return _run_loop_time(args, rounds)
    if figure:
        return _run_figure(args, figure)
    chosen = args.only or [name for name, contender in CONTENDERS.items() if not contender.aside]
    return _run_comparison(args, [n for n, c in CONTENDERS.items() if c.installed and n in chosen])


def _refuse(message: str) -> int:
    print(f"aioenv bench: {message}", file=sys.stderr)
    return 2


def _task(args: argparse.Namespace, env: str) -> Task:
    from aioenv.cli.bench.tasks import Task

    return Task(env, args.num_envs, args.seconds, start=args.start, channel=args.channel)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("num_envs", "rounds", "seconds", "start", "channel")}


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _run_comparison(args: argparse.Namespace, names: list[str]) -> int:
    from aioenv.cli.bench import report
    from aioenv.cli.bench.rounds import play

    machine = report.machine()
    cpus = machine["usable_cpus"]
    title = f"{args.num_envs} envs, {cpus} CPUs, median of {args.rounds} rounds of {args.seconds:g} s"
    print(title)
    rows: list[dict[str, Any]] = []
    broken = []
    for env in args.env:
        outcomes = play(_task(args, env), names, args.rounds, _progress)
        _progress("")
        rows += (new := report.summary(env, outcomes))
        report.print_table(env, new)
        broken += [name for name, outcome in outcomes.items() if outcome.broken]
    report.print_noise([result for row in rows for result in row["rounds"]])
    if args.json is not None:
        _write_json(args.json, {"machine": machine, "settings": _settings(args), "results": rows})
    if args.plot is not None:
        report.plot(args.plot, rows, title)
    return int(any(name.startswith("aioenv") for name in broken))


def _run_all(args: argparse.Namespace) -> int:
    from aioenv.cli.bench import marathon
    from aioenv.cli.bench.contenders import CONTENDERS

    if args.list:
        marathon.print_rows()
        return 0
    if args.env or args.num_envs:
        return _refuse("--all has envs of its own: choose with --rows, not with --env or --num-envs")
    if unknown := [name for name in args.only or () if name not in marathon.contender_names()]:
        return _refuse(f"no contenders {unknown}; there are {list(CONTENDERS)}, and those of the figures")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return _refuse("--plot takes matplotlib: pip install 'aioenv[bench]'")
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.seconds = args.seconds or (0.2 if args.quick else 0.6)
    try:
        return marathon.run_all(args, _progress)
    except marathon.Unusable as exc:
        return _refuse(str(exc))


def _run_loop_time(args: argparse.Namespace, rounds: Any) -> int:
    from aioenv.cli.bench import report
    from aioenv.cli.bench.contender import LOOP_TIME

    print(
        f"Loop time of one step, {args.num_envs} envs, median of {args.rounds} rounds of {args.seconds:g} s.\n"
        "CPU time in milliseconds: of callbacks (tasks and the step's own coroutine included), and of the loop's "
        f"whole thread.\n\n{'':<18}{'callbacks p50':>14}{'p99':>8}{'thread p50':>12}{'p99':>8}{'step takes':>12}"
    )
    rows: list[dict[str, Any]] = []
    for env in args.env:
        outcome = rounds.play(_task(args, env), [LOOP_TIME], args.rounds, _progress)[LOOP_TIME]
        _progress("")
        if outcome.broken or not outcome.rounds:
            print(f"{env:<18}{outcome.problem}")
            return 1
        keys = ("callbacks_p50", "callbacks_p99", "thread_p50", "thread_p99", "wall_p50")
        middle = {key: statistics.median(r[key] for r in outcome.rounds) for key in keys}
        rows.append({"env": env, **middle, "rounds": outcome.rounds})
        widths = (14, 8, 12, 8, 12)
        print(f"{env:<18}" + "".join(f"{middle[k]:>{w}.3f}" for k, w in zip(keys, widths, strict=True)))
    print(f"\nThe bar, for 64 envs: callbacks' p99 of at most {LOOP_TIME_BAR_MS} ms.")
    report.print_noise([result for row in rows for result in row["rounds"]])
    if args.json is not None:
        _write_json(args.json, {"machine": report.machine(), "settings": _settings(args), "loop_time": rows})
    return 0


def _run_figure(args: argparse.Namespace, figure: Figure) -> int:
    from aioenv.cli.bench import report
    from aioenv.cli.bench.rounds import play

    print(f"{figure.title}: {args.num_envs} envs, median of {args.rounds} rounds")
    rows: list[dict[str, Any]] = []
    broken = False
    for env in args.env:
        contenders = [f"{args.figure}: {name}" for name in figure.measures if name in (args.only or figure.measures)]
        outcomes = play(_task(args, env), contenders, args.rounds, _progress)
        _progress("")
        rows += (new := report.figure_summary(env, figure, outcomes))
        report.print_figures(env, figure, new)
        broken |= any(outcome.broken for contender, outcome in outcomes.items() if "aioenv" in contender)
    report.print_noise([result for row in rows for result in row["rounds"]])
    if args.json is not None:
        _write_json(args.json, {"machine": report.machine(), "settings": _settings(args), args.figure: rows})
    return int(broken)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
