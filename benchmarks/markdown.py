"""Write a run of the suite as Markdown tables, between two markers of a page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from aioenv.cli.bench import NOISY_CPUS, load_mark
from aioenv.tracing.timeline import atomic_write
from benchmarks.contenders import CONTENDERS
from benchmarks.goals import judge
from benchmarks.metrics import METRICS
from benchmarks.rows import COST_ENVS, POLICY

__all__ = ["BEGIN", "END", "check", "render", "write"]

BEGIN = "<!-- begin of what `python -m benchmarks` measured -->"
END = "<!-- end of what `python -m benchmarks` measured -->"

Results = dict[str, dict[str, Any]]


def check(path: Path) -> None:
    """Check that a page has the markers.

    Raises:
        ValueError: if the file is there, but without the two markers.
    """
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
            raise ValueError(f"{path}: expected one line {BEGIN} and, below it, one line {END}")


def write(path: Path, content: dict[str, Any], images: Iterable[Path]) -> None:
    """Replace the text between the markers of a page, or make a page of that text alone.

    Args:
        path: the page.
        content: a run of the suite.
        images: plots to show.
    """
    check(path)
    page = path.read_text(encoding="utf-8") if path.exists() else f"{BEGIN}\n{END}\n"
    shown = [f"![{image.stem}]({Path(os.path.relpath(image, path.parent)).as_posix()})" for image in images]
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    text = "\n\n".join([render(content), *shown])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")


def render(content: dict[str, Any]) -> str:
    """Return the tables of a run."""
    rows: dict[str, dict[str, Any]] = content["rows"]
    parts = [_preamble(content)]
    timed = [row for row in rows.values() if row["metric"] == "throughput"]
    cpus = content["machine"]["usable_cpus"]
    if timed:
        parts += ["### Throughput", _ratios(timed, cpus), "Env-steps/s of all contenders:", _rates(timed)]
    if any(row["metric"] == "policy" for row in rows.values()):
        text = "Env-steps/s with numpy's two layers of 512 between observations and actions, on the same CPUs:"
        parts += ["### With a policy", text, _policies(rows)]
    if any(row["metric"] == "cost" for row in rows.values()):
        parts += ["### Cost per env", "Microseconds of an env-step, CartPole-v1:", _costs(rows)]
    for name, metric in METRICS.items():
        if name in rows:
            row = rows[name]
            parts += [f"### {metric.title}", f"{row['env']} x {row['num_envs']}:", _metric(row, name)]
    if goals := judge(content):
        parts += ["### Goals", _goals(goals)]
    return "\n\n".join(parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _preamble(content: dict[str, Any]) -> str:
    machine, settings = content["machine"], content["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    dates = sorted(row["at"] for row in content["rows"].values())
    idle = [check["others_cpus"] for check in content["idle"] if check["others_cpus"] is not None]
    noisy = [key for key, row in content["rows"].items() if row["foreign_load"]]
    text = (
        f"Measured {dates[0] if dates else 'never'}{f' to {dates[-1]}' if len(dates) > 1 else ''}: "
        f"{machine['usable_cpus']} CPUs, {machine['system']}, Python {machine['python']}; {versions}. "
        f"Medians of {settings['rounds']} rounds of {settings['seconds']:g} s."
    )
    if idle:
        text += f" Before it, others used {max(idle):.2f} CPUs."
    if noisy:
        text += f" A star marks what was measured while others used more than {NOISY_CPUS} CPUs."
    return text


def _by_contender(row: dict[str, Any]) -> Results:
    return {result["contender"]: result for result in row["results"]}


def _present(rows: Iterable[dict[str, Any]], wanted: Callable[[str], bool]) -> list[str]:
    """Name the contenders that were measured in any of the rows, in the order of `CONTENDERS`."""
    measured = {r["contender"] for row in rows for r in row["results"] if r["rounds"]}
    return [name for name in CONTENDERS if name in measured and wanted(name)]


def _ours(name: str) -> bool:
    return name.startswith("aioenv")


def _ratios(rows: list[dict[str, Any]], cpus: int) -> str:
    others = _present(rows, lambda name: not _ours(name))
    heads = {"bare": f"of {cpus} x bare loop", "bare-all": "of bare loops at once", "bare-lockstep": "of lock-step"}
    columns = [heads.get(name, f"x {CONTENDERS[name].label}") for name in others]
    lines = []
    for row in rows:
        results = _by_contender(row)
        for name in filter(_ours, results):
            own = results[name]
            if not own["rounds"]:
                continue
            what = f"{row['env']} x {row['num_envs']}" + ("" if name == "aioenv" else f", {CONTENDERS[name].label}")
            cells = [f"{own['env_steps_per_s']:,.0f}{load_mark(own)}"]
            for other in others:
                ratio = own["ratios"].get(other)
                ratio = ratio / cpus if ratio and other == "bare" else ratio
                cells.append("" if ratio is None else f"{ratio:.2f}{load_mark(results[other])}")
            lines.append([what, *cells])
    return _table(["aioenv, and how often the others", "env-steps/s", *columns], lines)


def _rates(rows: list[dict[str, Any]]) -> str:
    names = _present(rows, lambda name: True)
    lines = []
    for row in rows:
        results = _by_contender(row)
        lines.append([f"{row['env']} x {row['num_envs']}", *(_rate(results.get(name)) for name in names)])
    return _table(["", *(CONTENDERS[name].label for name in names)], lines)


def _rate(result: dict[str, Any] | None) -> str:
    return f"{result['env_steps_per_s']:,.0f}{load_mark(result)}" if result and result["rounds"] else ""


def _costs(rows: dict[str, dict[str, Any]]) -> str:
    measured = {n: rows[f"cost-{n}"] for n in COST_ENVS if f"cost-{n}" in rows}
    lines = []
    for name in _present(measured.values(), lambda name: True):
        cells = []
        for row in measured.values():
            result = _by_contender(row).get(name)
            cost = f"{1e6 / result['env_steps_per_s']:.2f}{load_mark(result)}" if result and result["rounds"] else ""
            cells.append(cost)
        lines.append([CONTENDERS[name].label, *cells])
    return _table(["envs", *(f"{n:,}" for n in measured)], lines)


def _policies(rows: dict[str, dict[str, Any]]) -> str:
    lines = []
    for row in rows.values():
        if row["metric"] != "policy":
            continue
        results = _by_contender(row)
        cells = []
        for name in POLICY[1:]:
            result = results.get(name)
            ratio = result["ratios"].get(POLICY[0]) if result and result["rounds"] else None
            cells.append(f"{ratio:.2f}{load_mark(result)}" if result and ratio is not None else "")
        lines.append([f"{row['env']} x {row['num_envs']}", _rate(results.get(POLICY[0])), *cells])
    return _table(["", "one step after the other", "two groups, x that", "two groups of whole workers"], lines)


def _metric(row: dict[str, Any], name: str) -> str:
    metric = METRICS[name]
    lines = []
    for result in row["results"]:
        if not result["rounds"]:
            lines.append(
                [result["contender"], result["problem"], *[""] * (len(metric.keys) + len(metric.baselines) - 1)]
            )
            continue
        cells = [f"{result[key]:,.2f}{load_mark(result)}" for key in metric.keys]
        ratios = (result["ratios"].get(base) for base in metric.baselines.values())
        lines.append([result["contender"], *cells, *("" if r is None else f"{r:.2f}" for r in ratios)])
    return _table(["", *metric.keys, *metric.baselines], lines)


def _goals(goals: list[dict[str, Any]]) -> str:
    lines = [
        [goal["goal"], goal["floor"], goal["target"], f"{goal['found']:.2f}{goal['mark']}", goal["verdict"]]
        for goal in goals
    ]
    return _table(["", "floor", "target", "found", ""], lines)
