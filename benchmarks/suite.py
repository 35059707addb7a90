"""Run the suite: row after row, kept in a file from which an interrupted run is resumed."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from aioenv.cli.bench import NOISY_CPUS, describe_machine, load_mark, print_table, summarize
from aioenv.cli.contenders import Outcome, Workload, play_rounds
from aioenv.cli.processes import foreign_load
from aioenv.cli.terminal import progress
from aioenv.tracing.timeline import atomic_write
from benchmarks import plots, tables
from benchmarks.contenders import BASELINES, CONTENDERS
from benchmarks.goals import print_goals
from benchmarks.metrics import METRICS, REGISTRY, print_metric, refuse_differing, summarize_metric
from benchmarks.rows import ROWS, Row, estimate_s

__all__ = ["ArgumentsRefused", "contender_names", "print_rows", "run_suite", "write_json"]

IDLE_CHECK_S = 3.0


class ArgumentsRefused(Exception):
    """The arguments can't be met; the message says why."""


def run_suite(args: argparse.Namespace) -> int:
    """Measure the rows that are not measured yet.

    Returns:
        1 if one of aioenv's own contenders could not be measured, or nothing was measured for the tables.

    Raises:
        ArgumentsRefused: if there is nothing to measure, or the suite did not write the file to resume from, or the
            tables are of another kind.
    """
    content: dict[str, Any] = {"machine": describe_machine(), "settings": _settings(args), "idle": [], "rows": {}}
    if args.resume is not None and args.resume.exists():
        content = _resumed(args.resume, content)
    if args.tables is not None:
        try:
            tables.check(args.tables)
        except ValueError as exc:
            raise ArgumentsRefused(f"--tables {exc}") from None
    files = [path for path in (args.json, args.resume) if path is not None]
    rows = _rows_with_contenders(args)
    todo = [row for row in rows if not _done(content, row, args.again_if_noisy)]
    left_s = {row.key: estimate_s(row, args.rounds, args.seconds) for row in todo}
    print(
        f"{len(rows)} rows, {len(rows) - len(todo)} of them measured already; the rest takes about "
        f"{sum(left_s.values()) / 60:.0f} minutes: {args.rounds} rounds of {args.seconds:g} s on "
        f"{content['machine']['usable_cpus']} CPUs"
    )
    if todo:
        _check_idle(content)
    elif args.json is not None:  # a copy of the resumed file
        write_json(args.json, content)
    broken = False
    for number, row in enumerate(todo, 1):
        minutes = sum(left_s[other.key] for other in todo[number - 1 :]) / 60
        print(f"\n[{number}/{len(todo)}, about {minutes:.0f} min left] {row.key}", flush=True)
        broken |= _measure(args, row, content)
        for path in files:
            write_json(path, content)
    print_goals(content)
    if args.tables is not None and not _anything(content):
        print(f"Nothing could be measured: {args.tables} is left as it is.")
        return 1
    if args.tables is not None:
        tables.update(args.tables, content)
    if args.plots is not None:
        plots.draw(args.plots, plots.from_directory(args.tables) if args.tables else tables.tables(content))
    return int(broken)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("rounds", "seconds", "start", "channel", "only")
    return {name: getattr(args, name) for name in names}


def _chosen(args: argparse.Namespace) -> list[Row]:
    chosen = set(ROWS)
    if args.rows:
        # "cost-4" is that row alone, without "cost-4096"; "cost" is all of them
        found = {name: [name] if name in ROWS else [key for key in ROWS if key.startswith(name)] for name in args.rows}
        if unknown := [name for name, keys in found.items() if not keys]:
            raise ArgumentsRefused(f"--rows: no rows {unknown}; there are {list(ROWS)}, or beginnings of these")
        chosen = {key for keys in found.values() for key in keys}
    return [row for row in ROWS.values() if row.key in chosen and (row.quick or not args.quick)]


def _rows_with_contenders(args: argparse.Namespace) -> list[Row]:
    chosen = _chosen(args)
    if not chosen:
        raise ArgumentsRefused(f"--rows: {args.rows} are none that --quick measures")
    rows = [row for row in chosen if _names(args, row)]
    if not rows:
        where = f"the rows {[row.key for row in chosen]}" if args.rows else "any row"
        raise ArgumentsRefused(f"--only: {args.only} take no part in {where}, or are not installed")
    return rows


def _anything(content: dict[str, Any]) -> bool:
    """Check whether anything was measured."""
    return any(result["rounds"] for row in content["rows"].values() for result in row["results"])


def _names(args: argparse.Namespace, row: Row) -> list[str]:
    return [name for name in row.entries if not args.only or name.rpartition(": ")[2] in args.only]


def _resumed(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        old = {name: content[name] for name in ("machine", "settings")}
        assert all(isinstance(part, dict) for part in (*old.values(), content["rows"], *content["rows"].values()))
        assert isinstance(content["idle"], list)
        assert all(isinstance(row["results"], list) and "foreign_load" in row for row in content["rows"].values())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise ArgumentsRefused(f"--resume {path}: no file that `python -m benchmarks` wrote") from None
    for part, now in (("machine", fresh["machine"]), ("settings", fresh["settings"])):
        differing = {key: (old[part].get(key), now[key]) for key in now if old[part].get(key) != now[key]}
        if differing:
            changes = "; ".join(f"{key} was {was} and is {is_} now" for key, (was, is_) in differing.items())
            raise ArgumentsRefused(f"--resume {path}: measured with another {part}: {changes}. Begin a new file")
    try:
        _check_whole(content)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
        problem = f"{type(exc).__name__}: {exc}"
        raise ArgumentsRefused(
            f"--resume {path}: no whole file of `python -m benchmarks` ({problem}). Begin a new file"
        ) from None
    return content


def _check_whole(content: dict[str, Any]) -> None:
    """Check that a file holds everything that is shown in the end, by making its tables.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, IndexError: if not.
    """
    for key, row in content["rows"].items():
        if key not in ROWS or row["metric"] != ROWS[key].metric:
            raise ValueError(f"there is no row {key!r} of {row['metric']}")
        names = ROWS[key].contenders
        if unknown := [result["contender"] for result in row["results"] if result["contender"] not in names]:
            raise ValueError(f"{key!r} has no contenders {unknown}")
        for result in row["results"]:
            if result["rounds"] and row["metric"] not in METRICS:
                for number in (result["env_steps_per_s"], *result["ratios"].values()):
                    float(number)
    tables.tables(content)


def _done(content: dict[str, Any], row: Row, again_if_noisy: bool) -> bool:
    measured = content["rows"].get(row.key)
    return measured is not None and not (again_if_noisy and measured["foreign_load"])


def _check_idle(content: dict[str, Any]) -> None:
    used = foreign_load(IDLE_CHECK_S)
    content["idle"].append({"at": _now(), "others_cpus": used})
    if used is None:
        print("Whether other processes use this machine can't be known here.")
    elif used > NOISY_CPUS:
        print(f"NOT idle: others use {used:.2f} CPUs. Rows are marked, and worth little, while they do.")
    else:
        print(f"Idle: others use {used:.2f} CPUs.")


def _measure(args: argparse.Namespace, row: Row, content: dict[str, Any]) -> bool:
    """Measure a row, print it, and add it to the content; returns whether one of aioenv's contenders failed."""
    workload = Workload(row.env, row.num_envs, args.seconds, start=args.start, channel=args.channel)
    began = time.perf_counter()
    entries = {name: (name, workload) for name in _names(args, row)}
    with progress(len(entries) * args.rounds) as show:
        outcomes = play_rounds(entries, args.rounds, show, registry=REGISTRY, once=row.entries_once)
    outcomes |= {name: Outcome(problem="not installed") for name in row.missing if not args.only or name in args.only}
    title = f"{row.env} x {row.num_envs}"
    if row.timed:
        results = summarize(row.env, outcomes)
        print_table(title, results, CONTENDERS, BASELINES)
        if row.metric == "cheap" and (choice := tables.choice_of_auto(results)) is not None:
            chosen, fastest, ratio = choice
            print(f'backend="auto" chose {chosen}: {ratio:.2f} x {CONTENDERS[fastest].label}, the fastest of aioenv')
    else:
        refuse_differing(METRICS[row.metric], outcomes)
        results = summarize_metric(row.env, METRICS[row.metric], outcomes)
        print_metric(title, METRICS[row.metric], results)
    content["rows"][row.key] = {
        "env": row.env,
        "num_envs": row.num_envs,
        "metric": row.metric,
        "at": _now(),
        "took_s": round(time.perf_counter() - began, 1),
        "foreign_load": any(load_mark(result) for result in results),
        "results": results,
    }
    return any(outcome.broken and "aioenv" in name for name, outcome in outcomes.items())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write measurements to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:  # so that it is never half written
        file.write(json.dumps(content, indent=1) + "\n")


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime()) + " UTC"


def print_rows() -> None:
    """Print the names of all rows."""
    for row in ROWS.values():
        print(f"{row.key:<28}{row.env} x {row.num_envs}, {row.metric}")


def contender_names() -> set[str]:
    """Return the names of all rows' contenders."""
    return {name for row in ROWS.values() for name in row.contenders}
