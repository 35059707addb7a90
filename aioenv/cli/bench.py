"""Compare vector envs: each in a process of its own, in turn, several rounds; medians and ratios."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aioenv
from aioenv.cli.arguments import SYNTHETIC, env_problem, json_file, picture_file, positive_float, positive_int
from aioenv.cli.contenders import CONTENDERS, Contender, Outcome, Workload, play_rounds
from aioenv.cli.doctor import installed
from aioenv.cli.processes import EndedBySignal
from aioenv.cli.terminal import STDOUT, closest, did_you_mean, progress, say, short_number, show_table, write_json
from aioenv.platform import usable_cpus
from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS

__all__ = [
    "BASELINES",
    "HELP",
    "JSON_HELP",
    "NOISY_CPUS",
    "add_arguments",
    "describe_machine",
    "load_mark",
    "median_load",
    "print_noise",
    "print_table",
    "ratios",
    "run",
    "summarize",
]

HELP = "compare with other vector envs, side by side"
JSON_HELP = "write every measurement there; without FILE to stdout, where nothing else is printed then"

# How many CPUs others may use before the results mean little.
NOISY_CPUS = 0.1
PACKAGES = "gymnasium mujoco numpy uvloop torch stable-baselines3 tianshou torchrl pufferlib envpool".split()

# Column → the contender that it compares with, and how often its rate is counted: one bare loop could run on each CPU.
BASELINES: dict[str, tuple[str, int]] = {
    "x\nasync": ("gymnasium-async", 1),
    "x\nsync": ("gymnasium-sync", 1),
    f"of {usable_cpus()}\nbare": ("bare", usable_cpus()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add = parser.add_argument
    add(
        "--env",
        nargs="+",
        default=["CartPole-v1"],
        help="ids (module:id imports the module first), noop, or pixels (84x84x4 uint8) (default: CartPole-v1)",
    )
    add("--num-envs", type=positive_int, default=64, help="(default: 64)")
    add("--rounds", type=positive_int, default=5, help="(default: 5)")
    add("--seconds", type=positive_float, default=1.0, help="with the clock running, a round (default: 1)")
    add("--start", choices=START_METHODS, help="how aioenv starts its workers")
    add("--channel", choices=("auto", *CHANNELS), default="auto", help="how aioenv talks to them")
    add("--only", nargs="+", metavar="NAME", help="only these contenders; --list shows them")
    add("--list", action="store_true", help="show the contenders, and which of them are installed")
    add("--json", nargs="?", const=STDOUT, type=json_file, metavar="FILE", help=JSON_HELP)
    add("--plot", type=picture_file, metavar="FILE", help="draw a plot there (takes matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Compare, and print a table an env; 1 if one of aioenv's own contenders could not be measured."""
    if args.list:
        rows = [(name, one.label, "" if one.installed else "not installed") for name, one in CONTENDERS.items()]
        show_table(("name", "contender", ""), rows, texts=3)
        return 0
    if problem := _problem(args):
        print(f"aioenv bench: {problem}", file=sys.stderr)
        return 2
    machine = describe_machine()
    title = f"{args.num_envs} envs, {machine['usable_cpus']} CPUs, median of {args.rounds} rounds of {args.seconds:g} s"
    say(title)
    names = [name for name, one in CONTENDERS.items() if one.installed and (not args.only or name in args.only)]
    measured: list[dict[str, Any]] = []
    broken = False
    try:
        for env in args.env:
            workload = Workload(env, args.num_envs, args.seconds, start=args.start, channel=args.channel)
            outcomes: dict[str, Outcome] = {}
            try:
                with progress(len(names) * args.rounds) as show:
                    play_rounds({name: (name, workload) for name in names}, args.rounds, show, outcomes=outcomes)
            except (KeyboardInterrupt, EndedBySignal):
                begun = {name: outcome for name, outcome in outcomes.items() if outcome.rounds or outcome.problem}
                measured += (new := summarize(env, begun))
                with contextlib.suppress(OSError):  # the terminal may be gone
                    print_table(env, new)
                raise
            measured += (new := summarize(env, outcomes))
            print_table(env, new)
            broken |= any(outcome.broken for name, outcome in outcomes.items() if name.startswith("aioenv"))
    finally:  # write the measurements, however the comparison ends
        if args.json is not None:
            settings = {name: getattr(args, name) for name in ("num_envs", "rounds", "seconds", "start", "channel")}
            write_json(args.json, {"machine": machine, "settings": settings, "results": measured})
    print_noise([result for row in measured for result in row["rounds"]])
    if args.plot is not None:
        _plot(args.plot, measured, title)
    return int(broken)


def _problem(args: argparse.Namespace) -> str | None:
    """Explain why the comparison can't be made; None if it can."""
    if unknown := [name for name in args.only or () if name not in CONTENDERS]:
        return f"no contenders {unknown}; there are {list(CONTENDERS)}{did_you_mean(closest(unknown[0], CONTENDERS))}"
    if absent := [CONTENDERS[name].package for name in args.only or () if not CONTENDERS[name].installed]:
        return f"not installed: {absent}"
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot takes matplotlib: pip install matplotlib"
    problems = (env_problem(env) for env in args.env)
    return next((f"--env {one}; besides ids there are {list(SYNTHETIC)}" for one in problems if one), None)


def describe_machine() -> dict[str, Any]:
    """Return the facts that results depend on: Python, the platform, the CPUs, versions of packages."""
    versions = {name: version for name in PACKAGES if (version := installed(name))}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "system": f"{platform.system()} {platform.machine()}",
        "usable_cpus": usable_cpus(),
        "packages": {"aioenv": aioenv.__version__, **versions},
    }


def summarize(env: str, outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """Make a row for each contender.

    Returns:
        For each: "env", "contender", "problem" and "rounds" (as measured). If there are rounds, also the median, least
        and most env-steps/s, the median start-up in seconds, how many CPUs others used (median; None if that is
        unknown), and the ratios to all contenders (see `ratios`).
    """
    rates = {name: [r["env_steps"] / r["seconds"] for r in o.rounds] for name, o in outcomes.items()}
    rows = []
    for name, outcome in outcomes.items():
        row: dict[str, Any] = {"env": env, "contender": name, "problem": outcome.problem, "rounds": outcome.rounds}
        if own := rates[name]:
            row |= {
                "env_steps_per_s": statistics.median(own),
                "min": min(own),
                "max": max(own),
                "start_s": statistics.median(r["start_s"] for r in outcome.rounds),
                "others_cpus": median_load(outcome.rounds),
                "ratios": ratios(own, rates),
            }
        rows.append(row)
    return rows


def ratios(own: Sequence[float], of_others: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median ratio to each contender that was measured.

    Ratios are taken within rounds: a machine whose speed changes between rounds does not distort them.
    """
    pairs = {other: list(zip(own, numbers, strict=False)) for other, numbers in of_others.items()}
    return {other: statistics.median(a / b for a, b in those) for other, those in pairs.items() if those}


def median_load(rounds: Sequence[dict[str, Any]]) -> float | None:
    """Return how many CPUs other processes used during these rounds (median); None if that is unknown."""
    known = [r["others_cpus"] for r in rounds if "others_cpus" in r]
    return statistics.median(known) if known else None


def load_mark(row: dict[str, Any]) -> str:
    """Return a star if this row was measured while others used the machine."""
    return " *" if (row.get("others_cpus") or 0.0) > NOISY_CPUS else ""


def print_table(
    title: str,
    rows: Sequence[dict[str, Any]],
    contenders: Mapping[str, Contender] = CONTENDERS,
    baselines: Mapping[str, tuple[str, int]] = BASELINES,
) -> None:
    """Print the rows of one env, and below the table which contenders were not measured, and why."""
    cells = []
    for row in rows:
        if "env_steps_per_s" in row:
            compared = [
                f"{row['ratios'][name] / times:.2f}" if name in row["ratios"] else "-"
                for name, times in baselines.values()
            ]
            spread = f"{short_number(row['min'])}-{short_number(row['max'])}"
            rate = f"{row['env_steps_per_s']:,.0f}{load_mark(row).strip()}"
            cells.append([contenders[row["contender"]].label, rate, spread, *compared, f"{row['start_s']:.2f}"])
    say()
    if cells:
        show_table(("", "env-steps/s", "min-max", *baselines, "start\ns"), cells, title=title)
    else:
        say(title, "bold")
    for row in rows:
        if row["problem"]:
            when = f"after {len(row['rounds'])} rounds: " if row["rounds"] else ""
            say(f"{contenders[row['contender']].label}: {when}{row['problem']}", "dim")


def print_noise(results: Sequence[dict[str, Any]]) -> None:
    """Print how busy other processes kept the machine, if that is known."""
    others = [result["others_cpus"] for result in results if "others_cpus" in result]
    if others:
        middle = statistics.median(others)
        again = " Not quiet: measure again." if middle > NOISY_CPUS else ""
        say(f"\nOther processes meanwhile used {middle:.2f} CPUs (median), {max(others):.2f} at most.{again}")
        if any(number > NOISY_CPUS for number in others):
            say(f"* others used more than {NOISY_CPUS} CPUs in half of these rounds", "dim")


def _plot(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Draw bars, one panel an env, with the spread over rounds; the file's suffix says which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    envs = list(dict.fromkeys(row["env"] for row in rows))
    figure, panels = plt.subplots(len(envs), squeeze=False, figsize=(8, 0.6 + 3.2 * len(envs)))
    for env, panel in zip(envs, panels[:, 0], strict=True):
        shown = [row for row in rows if row["env"] == env and "env_steps_per_s" in row][::-1]
        middles = [row["env_steps_per_s"] for row in shown]
        down = [row["env_steps_per_s"] - row["min"] for row in shown]
        up = [row["max"] - row["env_steps_per_s"] for row in shown]
        labels = [CONTENDERS[row["contender"]].label for row in shown]
        colors = ["C0" if row["contender"].startswith("aioenv") else "0.7" for row in shown]
        panel.barh(labels, middles, xerr=[down, up], color=colors, ecolor="0.3", capsize=2)
        panel.set_title(env)
        panel.set_xlabel("env-steps/s, median [min - max]")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
