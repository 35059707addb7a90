"""Keep the measurements of all runs as CSV files: one file a table, one row a measurement."""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aioenv.cli.arguments import out_file
from aioenv.cli.bench import load_mark
from aioenv.tracing.timeline import atomic_write
from benchmarks.contenders import CONTENDERS
from benchmarks.goals import judge
from benchmarks.metrics import METRICS, Metric
from benchmarks.rows import AWAITED, POLICY

__all__ = [
    "AUTO",
    "COLUMNS",
    "GOALS",
    "RUNS",
    "check",
    "choice_of_auto",
    "newest",
    "out_directory",
    "read",
    "tables",
    "update",
]

Row = dict[str, str]

# Columns of a table of measurements. `noisy` is "yes" if other processes used the CPUs meanwhile.
COLUMNS = ("task", "num_envs", "contender", "median", "low", "high", "unit", "date", "machine", "noisy")
# `ratio` is the rate of `chosen`, the choice of `backend="auto"`, over that of `fastest`, the best other contender.
AUTO = ("task", "num_envs", "chosen", "fastest", "ratio", "date", "machine", "noisy")
GOALS = ("goal", "floor", "target", "found", "verdict", "date", "machine", "noisy")
RUNS = ("first", "last", "machine", "rounds", "seconds", "others_cpus", "packages")

# Two rows with equal keys are one measurement, made again.
KEYS = ("task", "num_envs", "contender", "unit", "date", "machine")
KEYS_OF = {
    "auto": ("task", "num_envs", "date", "machine"),
    "goals": ("goal", "date", "machine"),
    "runs": ("first", "machine"),
}
COLUMNS_OF = {"auto": AUTO, "goals": GOALS, "runs": RUNS}


def out_directory(text: str) -> Path:
    """Parse the path of a directory to write files to; it is made if it is missing.

    Raises:
        argparse.ArgumentTypeError: if no file can be written there.
    """
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no directory")
    out_file(str(path / "a.csv"))
    return path


def check(directory: Path) -> None:
    """Check that the files of a directory are tables of this module.

    Raises:
        ValueError: if a file of a table's name has other columns.
    """
    for name in ("throughput", "throughput-ratios", "policy", "cost", "cheap", *METRICS, *KEYS_OF):
        if (path := directory / f"{name}.csv").exists():
            read(path)


def read(path: Path) -> list[Row]:
    """Read a table.

    Raises:
        ValueError: if it has other columns.
    """
    expected = COLUMNS_OF.get(path.stem, COLUMNS)
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != expected:
            raise ValueError(f"{path}: expected the columns {','.join(expected)}")
        return list(reader)


def update(directory: Path, content: dict[str, Any]) -> None:
    """Add a run of the suite to the tables; rows of the same day and machine are replaced.

    Raises:
        ValueError: if a file of a table's name has other columns.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in tables(content).items():
        path = directory / f"{name}.csv"
        keys = KEYS_OF.get(name, KEYS)
        old = read(path) if path.exists() else []
        merged = {tuple(row[key] for key in keys): row for row in [*old, *rows]}
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS_OF.get(name, COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged.values())
        with atomic_write(path) as file:
            file.write(text.getvalue())


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the last measurement of each task, number of envs, contender and unit."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in KEYS[:4])
        if key not in found or found[key]["date"] <= row["date"]:
            found[key] = row
    return list(found.values())


# ---------------------------------------------------------------- the tables of one run


def tables(content: dict[str, Any]) -> dict[str, list[Row]]:
    """Return the tables of a run by their names, those without a row left out."""
    machine = _machine(content)
    found: dict[str, list[Row]] = {}
    for row in content["rows"].values():
        date = row["at"].split()[0]
        for name, measured in _tables_of(row, content["machine"]["usable_cpus"]):
            measured |= {"task": row["env"], "num_envs": str(row["num_envs"]), "date": date, "machine": machine}
            found.setdefault(name, []).append({column: measured[column] for column in COLUMNS_OF.get(name, COLUMNS)})
    if found:
        last = max(row["at"] for row in content["rows"].values()).split()[0]
        found["goals"] = [_goal(goal, last, machine) for goal in judge(content)]
        found["runs"] = [_run(content, machine)]
    return {name: rows for name, rows in found.items() if rows}


def _tables_of(row: dict[str, Any], cpus: int) -> Iterator[tuple[str, Row]]:
    """Yield the measurements of a row of the suite, each with the name of its table."""
    results = {result["contender"]: result for result in row["results"] if result["rounds"]}
    for name, result in results.items():
        mark = load_mark(result)
        if row["metric"] in METRICS:
            for measured in _of_metric(METRICS[row["metric"]], name, result):
                yield row["metric"], measured
            continue
        label = CONTENDERS[name].label
        rates = (result["env_steps_per_s"], result.get("min"), result.get("max"))
        if row["metric"] == "cost":
            median, most, least = (1e6 / rate if rate else None for rate in rates)
            yield "cost", _measured(label, "µs", (median, least, most), mark)
            continue
        yield row["metric"], _measured(label, "env-steps/s", rates, mark)
        for other in _baselines(row["metric"], name, results):
            ratio = result["ratios"][other] / (cpus if other == "bare" else 1)
            either = mark or load_mark(results[other])
            table = "throughput-ratios" if row["metric"] == "throughput" else row["metric"]
            yield table, _measured(label, _ratio_unit(other, cpus), (ratio, None, None), either)
    if row["metric"] == "cheap" and (choice := choice_of_auto(row["results"])) is not None:
        chosen, fastest, ratio = choice
        mark = load_mark(results["aioenv-auto"]) or load_mark(results[fastest])
        columns = {"chosen": chosen, "fastest": CONTENDERS[fastest].label, "ratio": _number(ratio)}
        yield "auto", {**columns, "noisy": "yes" if mark else ""}


def choice_of_auto(results: Iterable[dict[str, Any]]) -> tuple[str, str, float] | None:
    """Return what `backend="auto"` chose, the fastest of aioenv's other awaited contenders, and the ratio to that one.

    None if either was not measured. If the choice differed between rounds, all choices are named.
    """
    for result in results:
        if result["contender"] == "aioenv-auto" and result["rounds"]:
            chosen = ", ".join(dict.fromkeys(each["backend"] for each in result["rounds"]))
            others = [(ratio, name) for name, ratio in result["ratios"].items() if name in AWAITED]
            if others:
                ratio, fastest = min(others)
                return chosen, fastest, ratio
    return None


def _baselines(metric: str, name: str, results: dict[str, Any]) -> list[str]:
    """Name the contenders that a contender of aioenv is compared with."""
    if not name.startswith("aioenv"):
        return []
    others = [other for other in results[name]["ratios"] if other in results and other != name]
    if metric == "policy":
        return [other for other in others if other == POLICY[0]]
    return [other for other in others if not other.startswith("aioenv")]


def _ratio_unit(other: str, cpus: int) -> str:
    units = {"bare": f"of {cpus} x bare loop", "bare-all": "of bare loops at once", "bare-lockstep": "of lock-step"}
    return units.get(other, f"x {CONTENDERS[other].label}")


def _of_metric(metric: Metric, contender: str, result: dict[str, Any]) -> Iterator[Row]:
    for key in metric.keys:
        rounds = [each[key] for each in result["rounds"] if key in each]
        spread = (min(rounds), max(rounds)) if rounds else (None, None)
        yield _measured(contender, key, (result[key], *spread), load_mark(result))
    for base in metric.baselines.values():
        if base in result["ratios"]:
            yield _measured(contender, f"x {base}", (result["ratios"][base], None, None), load_mark(result))


def _measured(contender: str, unit: str, numbers: Iterable[float | None], mark: str) -> Row:
    """Return some columns of a measurement; `numbers` are its median, and the least and most of its rounds."""
    median, low, high = map(_number, numbers)
    noisy = "yes" if mark else ""
    return {"contender": contender, "median": median, "low": low, "high": high, "unit": unit, "noisy": noisy}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _goal(goal: dict[str, Any], date: str, machine: str) -> Row:
    noisy = "yes" if goal["mark"] else ""
    row = {name: goal[name] for name in ("goal", "floor", "target", "verdict")}
    return row | {"found": f"{goal['found']:.2f}", "date": date, "machine": machine, "noisy": noisy}


def _run(content: dict[str, Any], machine: str) -> Row:
    dates = sorted(row["at"] for row in content["rows"].values())
    idle = [check["others_cpus"] for check in content["idle"] if check["others_cpus"] is not None]
    settings = content["settings"]
    return {
        "first": dates[0],
        "last": dates[-1],
        "machine": machine,
        "rounds": str(settings["rounds"]),
        "seconds": f"{settings['seconds']:g}",
        "others_cpus": f"{max(idle):.2f}" if idle else "",
        "packages": ", ".join(f"{name} {version}" for name, version in content["machine"]["packages"].items()),
    }


def _machine(content: dict[str, Any]) -> str:
    machine = content["machine"]
    return f"{machine['usable_cpus']} CPUs, {machine['system']}, Python {machine['python']}"
