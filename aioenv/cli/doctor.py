"""Report what works on this machine, and what to install for the rest.

This module imports nothing at import time that may be missing, too old or broken: it reports these.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aioenv.cli.processes import start_text_process
from aioenv.platform import cpu_quota, usable_cpus
from aioenv.requirements import problem_of

if TYPE_CHECKING:
    from aioenv.cli.opengl import ProbeResult

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say what works on this machine, and what to install for the rest"

REQUIRED = ("aioenv", "numpy", "gymnasium", "mujoco", "imageio", "packaging", "cloudpickle", "uvloop")
OPTIONAL = {
    "imageio-ffmpeg": "videos: pip install 'aioenv[video]'",
    "tqdm": "progress bars: pip install 'aioenv[video]'",
    "matplotlib": "bench --plot: pip install 'aioenv[bench]'",
    "stable-baselines3": "adapters, and a bench contender: pip install 'aioenv[adapters]'",
    "tianshou": "a bench contender: pip install tianshou",
    "envpool": "a bench contender: pip install envpool",
}
# Without these, modules of aioenv that the rest of the report needs can't be imported.
_NEEDED_HERE = {"numpy", "gymnasium", "cloudpickle"}
_IMPORT_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments: none."""


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if something required is missing or broken, else 0 (without OpenGL all but images works)."""
    print(f"Python {platform.python_version()}, {platform.platform()}")
    cpus = usable_cpus()
    quota = cpu_quota()
    limit = "" if quota is None else f" (a quota of {quota:g})"
    print(f"CPUs: {cpus} usable of {os.cpu_count()}{limit}; so many workers are the default")
    versions = {name: installed(name) for name in REQUIRED}
    problems = _problems(versions)
    works = not _NEEDED_HERE & problems.keys()
    wrong: list[Exception] = []
    parts = [("Event loop", _report_loop), ("Workers", _report_workers), ("Steps", _report_steps)]
    reported = [_report(title, part, works) for title, part in parts]
    print("\nPackages")
    for name, version in versions.items():
        print(f"  {name:<18}{version or 'MISSING'}")
        if version is not None and name in problems:
            print(f"  {'':<18}{problems[name]}")
    for name, use in OPTIONAL.items():
        print(f"  {name:<18}{installed(name) or f'not installed ({use})'}")
    reported.append(_report("\nOpenGL", lambda: wrong.extend(_report_images()), works))
    missing = [name for name in problems if versions[name] is None]
    if missing:
        print(f"\nMissing: pip install {' '.join(missing)}")
    elif problems or not all(reported):
        print("\naioenv does not work here: see the lines above")
    for exc in wrong:
        print(f"\n{exc}")
    return int(bool(problems or wrong) or not all(reported))


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
            trials[name] = start_text_process(command, env=environment, stdout=subprocess.DEVNULL)
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


def _report(title: str, report: Callable[[], None], works: bool) -> bool:
    """Print a part of the report, or why there is none; returns whether there is one."""
    if not works:
        print(f"{title}: not known, see Packages")
        return False
    try:
        report()
    except Exception as exc:  # the rest of the report is still worth having
        print(f"{title}: not known ({type(exc).__name__}: {exc})")
        return False
    return True


def _report_loop() -> None:
    from aioenv.make import new_event_loop

    loop = new_event_loop()
    print(f"Event loop: {type(loop).__module__.partition('.')[0]}")
    loop.close()


def _report_workers() -> None:
    from aioenv.process.channel import CHANNELS, check_channel
    from aioenv.process.launch import START_METHODS, check_start

    print(f"Workers: {_choice(START_METHODS, check_start(None))}; channel: {_choice(CHANNELS, check_channel('auto'))}")


def _report_steps() -> None:
    from aioenv import speedups

    print(f"Steps: in {'C' if speedups.compiled else f'Python ({speedups.why_not}); slower, otherwise the same'}")


def _report_images() -> list[Exception]:
    """Report on OpenGL; return the errors."""
    from aioenv.cli.opengl import probe_all
    from aioenv.rendering.backends import find_gpus
    from aioenv.worker.mujoco_gl import without_mujoco_gl

    wrong = without_mujoco_gl()
    _report_opengl(probe_all(), find_gpus())
    return [] if wrong is None else [wrong]


def _report_opengl(probes: Sequence[ProbeResult], gpus: Sequence[str]) -> None:
    """Print a line for each backend and device, which of them is used, and what to install."""
    from aioenv.rendering.backends import candidate_backends, general_install_hint, install_hint, software_warning

    print(f"\nGPUs that the kernel knows of: {', '.join(gpus) or 'none'}")
    print("\nOpenGL, images of 84x84 a second and process")
    width = max(len(probe.renderer) for probe in probes)
    print(f"  {'backend':<9}{'device':<8}{'drawn by':<10}{'renderer':<{width + 2}}{'exact':>8}{'fast':>9}")
    for probe in probes:
        device = "" if probe.device is None else str(probe.device)
        if not probe.renderer:
            print(f"  {probe.backend:<9}{device:<8}does not work: {probe.problem}")
            if advice := install_hint(probe.backend):
                print(f"  {'':<17}{advice}")
            continue
        drawn_by = "the CPU" if probe.software else "a GPU"
        rates = f"{probe.exact_per_s:>8,.0f}{probe.fast_per_s:>9,.0f}"
        print(f"  {probe.backend:<9}{device:<8}{drawn_by:<10}{probe.renderer:<{width + 2}}{rates}")
    used = next((p for name in candidate_backends(None) for p in probes if p.backend == name and p.renderer), None)
    if used is None:
        works = [probe.backend for probe in probes if probe.renderer]
        if works and (chosen := os.environ.get("MUJOCO_GL")):
            print(f"\nNo images are drawn while MUJOCO_GL={chosen}: unset it, or say {works[0]}.")
        else:
            print(f"\nNo images can be drawn.\n{general_install_hint()}")
        return
    print(f"  Images are drawn by {used.backend}, unless you say otherwise (MUJOCO_GL, or backend=).")
    if (why := software_warning(used.renderer, gpus)) is not None:
        print(f"\nWARNING: {why}")
        better = [probe for probe in probes if probe.renderer and not probe.software]
        if better:
            print(f"backend={better[0].backend!r} does use it.")


def _choice(known: Sequence[str], default: str) -> str:
    """Name the default, and the alternatives."""
    others = [name for name in known if name != default]
    return f"{default} (or {', '.join(others)})" if others else f"{default} (nothing else on this platform)"


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name) or "of an unknown version"
    except Exception:  # not only PackageNotFoundError: a half removed package has broken metadata
        # a source tree on the path has no metadata, but works
        return "from source" if importlib.util.find_spec(name.replace("-", "_")) is not None else None
