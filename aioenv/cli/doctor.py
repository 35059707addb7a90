"""Report what works on this machine, and what to install for the rest."""

# It imports nothing at import time that may be missing, too old or broken: it reports these.

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aioenv.cli.processes import EndedBySignal, start_text_process
from aioenv.cli.terminal import STDOUT, progress, say, show_table, write_json
from aioenv.platform import cpu_quota, usable_cpus
from aioenv.requirements import problem_of

if TYPE_CHECKING:
    from aioenv.cli.opengl import ProbeResult

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say what works on this machine, and what to do about the rest"

REQUIRED = ("aioenv", "numpy", "gymnasium", "mujoco", "imageio", "packaging", "cloudpickle", "rich", "uvloop")
OPTIONAL = {
    "imageio-ffmpeg": "videos",
    "tqdm": "progress bars of evaluate and record",
    "matplotlib": "bench --plot",
    "stable-baselines3": "adapters, and a bench contender",
    "tianshou": "a bench contender",
    "envpool": "a bench contender",
}
# Without these, modules of aioenv that the rest of the report needs can't be imported.
_NEEDED_HERE = {"numpy", "gymnasium", "cloudpickle"}
_IMPORT_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--json", action="store_const", const=STDOUT, help="print the report as JSON, and nothing else, on stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if something required is missing or broken, else 0 (without OpenGL all but images works)."""
    report = examine()
    if args.json is not None:
        write_json(args.json, report)
    else:
        _show(report)
    return int(not report["works"])


def examine() -> dict[str, Any]:
    """Try all parts; an error in one is reported, and the others are still tried.

    Returns:
        The facts by name; "unknown": why a part could not be tried, by its title; "to_do": what to do, in order; and
        "works": whether all that is required does.
    """
    versions = {name: installed(name) for name in REQUIRED}
    unknown: dict[str, str] = {}
    report: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    to_do: list[str] = []
    with progress(1 + len(_PARTS)) as show:
        show("Packages")
        problems = _problems(versions)
        for title, (part, needed) in _PARTS.items():
            show(title)
            if needed & problems.keys():
                unknown[title] = "see Packages"
                continue
            try:
                report |= part()
            except EndedBySignal:
                raise
            except (Exception, SystemExit) as exc:  # the rest of the report is still worth having
                unknown[title] = f"{type(exc).__name__}: {exc}"
    wrong, advice = report.pop("wrong", None), report.pop("advice", [])
    if missing := [name for name in problems if versions[name] is None]:
        to_do.append(f"Missing: pip install {' '.join(missing)}")
    for name, problem in problems.items():
        if name not in missing:
            to_do.append(problem if problem == problem_of(name) else f"{name}: {problem}; install it again")
    to_do += [
        f"{title}: find out why it is not known: {why}" for title, why in unknown.items() if why != "see Packages"
    ]
    if wrong is not None:
        to_do.append(wrong)
    report["packages"] = {
        name: {"version": version, "required": True, "problem": problems.get(name)}
        for name, version in versions.items()
    } | {name: {"version": installed(name), "required": False, "problem": None} for name in OPTIONAL}
    works = not (problems or unknown or wrong)
    return {**report, "unknown": unknown, "to_do": to_do + advice, "works": works}


def _problems(versions: dict[str, str | None]) -> dict[str, str]:
    """Find the required packages that are missing, too old or can't be imported: name → problem."""
    problems: dict[str, str] = {}
    trials: dict[str, subprocess.Popen[str]] = {}
    environment = {
        key: value for key, value in os.environ.items() if key != "MUJOCO_GL"
    }  # the report on OpenGL covers it
    for name, version in versions.items():
        if version is None:
            if not (name == "uvloop" and sys.platform == "win32"):
                problems[name] = "missing"
        elif (problem := problem_of(name)) is not None:
            problems[name] = problem
        elif name != "aioenv":
            code = f"import sys; sys.path[:] = {sys.path!a}; import {name}"
            command = [sys.executable, "-W", "ignore", "-c", code]
            try:
                trials[name] = start_text_process(command, env=environment, stdout=subprocess.DEVNULL)
            except OSError as exc:
                problems[name] = f"its import can't be tried: {exc}"
    try:
        for name, trial in trials.items():
            if (why := _import_error(trial)) is not None:
                problems[name] = f"it can't be imported: {why}"
    finally:
        for trial in trials.values():  # Ctrl-C
            if trial.poll() is None:
                trial.kill()
                trial.communicate()
    return problems


def _import_error(trial: subprocess.Popen[str]) -> str | None:
    """Wait for an import; return a line that says why it failed, None if it did not."""
    try:
        said = trial.communicate(timeout=_IMPORT_TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
        return f"it is not done after {_IMPORT_TIMEOUT_S:g} s"
    if trial.returncode == 0:
        return None
    lines = [line for line in said.splitlines() if line and not line.startswith(" ")]
    how = f"signal {-trial.returncode}" if trial.returncode < 0 else f"status {trial.returncode}"
    return lines[-1] if lines and trial.returncode == 1 else f"the process ended with {how}"


# ---------------------------------------------------------------- the parts: each returns facts of the report


def _find_cpus() -> dict[str, Any]:
    return {"usable_cpus": usable_cpus(), "cpus": os.cpu_count(), "cpu_quota": cpu_quota()}


def _find_loop() -> dict[str, Any]:
    from aioenv.make import new_event_loop

    loop = new_event_loop()
    loop.close()
    return {"event_loop": type(loop).__module__.partition(".")[0]}


def _find_workers() -> dict[str, Any]:
    from aioenv.process.channel import CHANNELS, check_channel
    from aioenv.process.launch import START_METHODS, check_start

    start, channel = check_start(None), check_channel("auto")  # the defaults, which come first
    return {
        "start": [start, *(name for name in START_METHODS if name != start)],
        "channels": [channel, *(name for name in CHANNELS if name != channel)],
    }


def _find_steps() -> dict[str, Any]:
    from aioenv import speedups

    return {"steps": "C" if speedups.compiled else f"Python ({speedups.why_not}); slower, otherwise the same"}


def _find_opengl() -> dict[str, Any]:
    from aioenv.cli.opengl import probe_all
    from aioenv.rendering.backends import find_gpus
    from aioenv.worker.mujoco_gl import without_mujoco_gl

    wrong = without_mujoco_gl()
    return {"wrong": None if wrong is None else str(wrong), **judge_opengl(probe_all(), find_gpus())}


def judge_opengl(probes: Sequence[ProbeResult], gpus: Sequence[str]) -> dict[str, Any]:
    """Return which backends draw, which of them is used ("images_by"), and what to install or to set ("advice")."""
    from aioenv.rendering.backends import candidate_backends, general_install_hint, install_hint, software_warning

    found = [
        {**dataclasses.asdict(probe), "software": probe.software, "install": install_hint(probe.backend)}
        for probe in probes
    ]
    used = next((p for name in candidate_backends(None) for p in probes if p.backend == name and p.renderer), None)
    advice = []
    if used is None:
        works = [probe.backend for probe in probes if probe.renderer]
        if works and (chosen := os.environ.get("MUJOCO_GL")):
            advice.append(f"No images are drawn while MUJOCO_GL={chosen}: unset it, or say {works[0]}.")
        else:
            advice.append(f"No images can be drawn.\n{general_install_hint()}")
    elif (why := software_warning(used.renderer, gpus)) is not None:
        better = next((f"\nbackend={p.backend!r} does use it." for p in probes if p.renderer and not p.software), "")
        advice.append(f"WARNING: {why}{better}")
    return {"gpus": list(gpus), "opengl": found, "images_by": used and used.backend, "advice": advice}


# Title → the function, and the packages without which it can't run.
_PARTS: dict[str, tuple[Callable[[], dict[str, Any]], set[str]]] = {
    "CPUs": (_find_cpus, set()),
    "Event loop": (_find_loop, {*_NEEDED_HERE, "uvloop"}),
    "Workers": (_find_workers, _NEEDED_HERE),
    "Steps": (_find_steps, _NEEDED_HERE),
    "OpenGL": (_find_opengl, _NEEDED_HERE),
}


# ---------------------------------------------------------------- the report as text


def _show(report: dict[str, Any]) -> None:
    """Print a report, and at its end what to do."""
    unknown = report["unknown"]
    quota = f" (a quota of {report['cpu_quota']:g})" if report.get("cpu_quota") else ""
    lines = {
        "CPUs": "{usable_cpus} usable of {cpus}" + quota + "; so many workers are the default",
        "Event loop": "{event_loop}",
        "Workers": "{workers}",
        "Steps": "in {steps}",
    }
    workers = "; channel: ".join(_choice(report[name]) for name in ("start", "channels") if name in report)
    say(f"Python {report['python']}, {report['platform']}")
    for title, line in lines.items():
        say(f"{title}: {_not_known(unknown[title]) if title in unknown else line.format(**report, workers=workers)}")
    rows = []
    for name, package in report["packages"].items():
        remark = package["problem"] or ""
        if package["version"] is None:
            remark = "" if package["required"] else f"for {OPTIONAL[name]}: pip install {name}"
        rows.append((name, package["version"] or ("MISSING" if package["required"] else "not installed"), remark))
    say()
    show_table(("", "", ""), rows, title="Packages", texts=3, indent=2)
    say()
    if "OpenGL" in unknown:
        say(f"OpenGL: {_not_known(unknown['OpenGL'])}")
    else:
        _show_opengl(report)
    say()
    state, style = ("works", "bold green") if report["works"] else ("does not work", "bold red")
    if not report["to_do"]:
        say(f"aioenv {state} here. There is nothing to do.", style)
        return
    say(f"aioenv {state} here. What to do{' for more' if report['works'] else ''}:", style)
    for text in report["to_do"]:
        say(text, indent=2)


def _not_known(why: str) -> str:
    return "not known, see Packages" if why == "see Packages" else f"not known ({why})"


def _show_opengl(report: dict[str, Any]) -> None:
    """Print a line for each backend and device, why some don't work, and which is used."""
    say(f"GPUs that the kernel knows of: {', '.join(report['gpus']) or 'none'}")
    say()
    rows = []
    for probe in report["opengl"]:
        device = "" if probe["device"] is None else str(probe["device"])
        row = ["does not work", "", "", ""]
        if probe["renderer"]:
            drawn_by = "the CPU" if probe["software"] else "a GPU"
            row = [drawn_by, probe["renderer"], f"{probe['exact_per_s']:,.0f}", f"{probe['fast_per_s']:,.0f}"]
        rows.append([probe["backend"], device, *row])
    heads = ("backend", "device", "drawn by", "renderer", "exact", "fast")
    show_table(heads, rows, title="OpenGL, images of 84x84 a second and process", texts=4, indent=2)
    for probe in report["opengl"]:
        if not probe["renderer"]:
            say(f"{probe['backend']} does not work: {probe['problem']}", indent=2)
            if probe["install"]:
                say(probe["install"], indent=4)
    if report["images_by"]:
        say(f"Images are drawn by {report['images_by']}, unless you say otherwise (MUJOCO_GL, or backend=).", indent=2)


def _choice(names: Sequence[str]) -> str:
    """Name the default, which is the first, and the alternatives."""
    default, *others = names
    return f"{default} (or {', '.join(others)})" if others else f"{default} (nothing else on this platform)"


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name) or "of an unknown version"
    except Exception:  # not only PackageNotFoundError: a half removed package has broken metadata
        # a source tree on the path has no metadata, but works
        return "from source" if importlib.util.find_spec(name.replace("-", "_")) is not None else None
