"""From rounds to medians and ratios, as a table, as JSON and as a plot."""

from __future__ import annotations

import platform
import statistics
from importlib import metadata
from pathlib import Path
from typing import Any

import aioenv
from aioenv.cli.bench.contenders import CONTENDERS
from aioenv.cli.bench.figures import Figure
from aioenv.cli.bench.rounds import Outcomes
from aioenv.platform import usable_cpus

__all__ = [
    "BASELINES",
    "NOISY_CPUS",
    "figure_summary",
    "load",
    "load_mark",
    "machine",
    "plot",
    "print_figures",
    "print_noise",
    "print_table",
    "summary",
]

# How many CPUs others may use before figures mean little.
NOISY_CPUS = 0.1

# Column → the contender that it compares with, and how often that is counted. One bare loop could run on each CPU; how
# fast they are at once, when CPUs share a core, is what the next says, and the last what they reach in lock-step.
BASELINES: dict[str, tuple[str, int]] = {
    "x async": ("gymnasium-async", 1),
    "x sync": ("gymnasium-sync", 1),
    f"of {usable_cpus()} bare": ("bare", usable_cpus()),
    "of all": ("bare-all", 1),
    "of lock-step": ("bare-lockstep", 1),
}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    packages = (
        "gymnasium", "mujoco", "numpy", "uvloop",
        "stable-baselines3", "tianshou", "torchrl", "pufferlib", "envpool",
    )  # fmt: skip
    versions = {"aioenv": aioenv.__version__}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "system": f"{platform.system()} {platform.machine()}",
        "usable_cpus": usable_cpus(),
        "packages": versions,
    }


def summary(env: str, outcomes: dict[str, Outcomes]) -> list[dict[str, Any]]:
    """A row for each contender.

    Returns:
        For each: "env", "contender", "problem", "rounds" (as measured) and, if there are any, the median, least and
        most env-steps/s, the median start-up in seconds, how many CPUs others used (median; None if that is unknown),
        and the ratios to all contenders: the median over rounds of the ratio within a round, so that a machine that
        changes its speed between rounds does not show.
    """
    rates = {name: [r["env_steps"] / r["seconds"] for r in o.rounds] for name, o in outcomes.items()}
    rows = []
    for name, outcome in outcomes.items():
        row: dict[str, Any] = {
            "env": env, "contender": name, "problem": outcome.problem, "rounds": outcome.rounds,
        }  # fmt: skip
        own = rates[name]
        if own:
            row |= {
                "env_steps_per_s": statistics.median(own),
                "min": min(own),
                "max": max(own),
                "start_s": statistics.median(r["start_s"] for r in outcome.rounds),
                "others_cpus": load(outcome.rounds),
                "ratios": _ratios(own, rates),
            }
        rows.append(row)
    return rows


def _ratios(own: list[float], of_others: dict[str, list[float]]) -> dict[str, float]:
    ratios = {}
    for other, numbers in of_others.items():
        pairs = list(zip(own, numbers, strict=False))
        if pairs:
            ratios[other] = statistics.median(a / b for a, b in pairs)
    return ratios


def load(rounds: list[dict[str, Any]]) -> float | None:
    """How many CPUs other processes used during these rounds (median); None if that is unknown."""
    known = [r["others_cpus"] for r in rounds if "others_cpus" in r]
    return statistics.median(known) if known else None


def load_mark(row: dict[str, Any]) -> str:
    """A star if this row was measured while others used the machine."""
    return " *" if (row.get("others_cpus") or 0.0) > NOISY_CPUS else ""


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """The rows of one env."""
    heads = "".join(f"{head:>13}" for head in BASELINES)
    print(f"\n{title}\n{'':<27}{'env-steps/s':>12}{'[min - max]':>25}{heads}{'start s':>9}")
    for row in rows:
        label = CONTENDERS[row["contender"]].label
        if "env_steps_per_s" not in row:
            print(f"{label:<27}{row['problem']}")
            continue
        spread = f"[{row['min']:,.0f} - {row['max']:,.0f}]"
        ratios = "".join(
            f"{row['ratios'][name] / times:>13.2f}" if name in row["ratios"] else f"{'-':>13}"
            for name, times in BASELINES.values()
        )
        print(f"{label:<27}{row['env_steps_per_s']:>12,.0f}{spread:>25}{ratios}{row['start_s']:>9.2f}{load_mark(row)}")
        if row["problem"]:
            print(f"{'':<27}after {len(row['rounds'])} rounds: {row['problem']}")


def figure_summary(env: str, figure: Figure, outcomes: dict[str, Outcomes]) -> list[dict[str, Any]]:
    """A row for each contender.

    Returns:
        For each: "env", "contender", "problem", "rounds" (as measured) and, if there are any, the medians of the
        figure's numbers, and the "ratios" of the first of them to its baselines', medians over rounds as in `summary`.
    """
    own = {name.partition(": ")[2]: [r[figure.keys[0]] for r in o.rounds] for name, o in outcomes.items()}
    rows = []
    for name, outcome in zip(own, outcomes.values(), strict=True):
        row: dict[str, Any] = {
            "env": env, "contender": name, "problem": outcome.problem, "rounds": outcome.rounds,
        }  # fmt: skip
        if outcome.rounds:
            row |= {key: statistics.median(r[key] for r in outcome.rounds) for key in figure.keys}
            row["others_cpus"] = load(outcome.rounds)
            ratios = _ratios(own[name], own)
            row["ratios"] = {base: ratios[base] for base in figure.baselines.values() if base in ratios}
        rows.append(row)
    return rows


def print_figures(title: str, figure: Figure, rows: list[dict[str, Any]]) -> None:
    """The rows of one env."""
    heads = "".join(f"{key:>12}" for key in figure.keys) + "".join(f"{head:>13}" for head in figure.baselines)
    print(f"\n{title:<27}{heads}")
    for row in rows:
        if "ratios" not in row:
            print(f"{row['contender']:<27}{row['problem']}")
            continue
        numbers = "".join(f"{row[key]:>12,.2f}" for key in figure.keys)
        ratios = row["ratios"]
        columns = (f"{ratios[b]:>13.3f}" if b in ratios else f"{'-':>13}" for b in figure.baselines.values())
        print(f"{row['contender']:<27}{numbers}{''.join(columns)}{load_mark(row)}")
        if row["problem"]:
            print(f"{'':<27}after {len(row['rounds'])} rounds: {row['problem']}")


def print_noise(results: list[dict[str, Any]]) -> None:
    """How busy other processes kept the machine, if that is known."""
    others = [result["others_cpus"] for result in results if "others_cpus" in result]
    if others:
        middle = statistics.median(others)
        print(f"\nOther processes meanwhile used {middle:.2f} CPUs (median), {max(others):.2f} at most.", end="")
        print(" Not quiet: measure again." if middle > NOISY_CPUS else "")
        if any(number > NOISY_CPUS for number in others):
            print(f"* others used more than {NOISY_CPUS} CPUs in half of these rounds")


def plot(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Bars, one panel an env, with the spread over rounds; the file's suffix says which format."""
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
