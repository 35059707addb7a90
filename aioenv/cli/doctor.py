"""Say what aioenv finds on this machine, and what to install for the rest."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence

from aioenv import speedups
from aioenv.cli.opengl import Probe, probe_all
from aioenv.machine import cpu_quota, usable_cpus
from aioenv.make import new_event_loop
from aioenv.rendering.backends import candidates, find_gpus, how_to_get, how_to_get_any, why_software
from aioenv.workers.channel import CHANNELS, check_channel
from aioenv.workers.launch import START_METHODS, check_start

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say what works on this machine, and what to install for the rest"

REQUIRED = ("aioenv", "numpy", "gymnasium", "mujoco", "imageio", "packaging", "cloudpickle", "uvloop")
OPTIONAL = {
    "imageio-ffmpeg": "videos: pip install 'aioenv[video]'",
    "tqdm": "progress bars: pip install 'aioenv[video]'",
    "matplotlib": "bench --plot, trace --png: pip install 'aioenv[bench]'",
    "stable-baselines3": "adapters, and a bench contender: pip install 'aioenv[adapters]'",
    "tianshou": "a bench contender: pip install tianshou",
    "envpool": "a bench contender: pip install envpool",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments: none."""


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if something required is missing, else 0 (without OpenGL all but images works)."""
    print(f"Python {platform.python_version()}, {platform.platform()}")
    cpus = usable_cpus()
    quota = cpu_quota()
    limit = "" if quota is None else f" (a quota of {quota:g})"
    print(f"CPUs: {cpus} usable of {os.cpu_count()}{limit}; so many workers are the default")
    loop = new_event_loop()
    print(f"Event loop: {type(loop).__module__.partition('.')[0]}")
    loop.close()
    print(f"Workers: {_choice(START_METHODS, check_start(None))}; channel: {_choice(CHANNELS, check_channel('auto'))}")
    print(f"Steps: in {'C' if speedups.compiled else f'Python ({speedups.why_not}); slower, otherwise the same'}")
    missing = []
    print("\nPackages")
    for name in REQUIRED:
        version = installed(name)
        print(f"  {name:<18}{version or 'MISSING'}")
        if version is None and not (name == "uvloop" and sys.platform == "win32"):
            missing.append(name)
    for name, use in OPTIONAL.items():
        print(f"  {name:<18}{installed(name) or f'not installed ({use})'}")
    _report_opengl(probe_all(), find_gpus())
    if missing:
        print(f"\nMissing: pip install {' '.join(missing)}")
        return 1
    return 0


def _report_opengl(probes: Sequence[Probe], gpus: Sequence[str]) -> None:
    """A line for each backend and device; what is used; what to install."""
    print(f"\nGPUs that the kernel knows of: {', '.join(gpus) or 'none'}")
    print("\nOpenGL, images of 84x84 a second and process")
    width = max(len(probe.renderer) for probe in probes)
    print(f"  {'backend':<9}{'device':<8}{'drawn by':<10}{'renderer':<{width + 2}}{'exact':>8}{'fast':>9}")
    for probe in probes:
        device = "" if probe.device is None else str(probe.device)
        if not probe.renderer:
            print(f"  {probe.backend:<9}{device:<8}does not work: {probe.problem}")
            if advice := how_to_get(probe.backend):
                print(f"  {'':<17}{advice}")
            continue
        drawn_by = "the CPU" if probe.software else "a GPU"
        rates = f"{probe.exact_per_s:>8,.0f}{probe.fast_per_s:>9,.0f}"
        print(f"  {probe.backend:<9}{device:<8}{drawn_by:<10}{probe.renderer:<{width + 2}}{rates}")
    used = next((p for name in candidates(None) for p in probes if p.backend == name and p.renderer), None)
    if used is None:
        works = [probe.backend for probe in probes if probe.renderer]
        if works and (chosen := os.environ.get("MUJOCO_GL")):
            print(f"\nNo images are drawn while MUJOCO_GL={chosen}: unset it, or say {works[0]}.")
        else:
            print(f"\nNo images can be drawn.\n{how_to_get_any()}")
        return
    print(f"  Images are drawn by {used.backend}, unless you say otherwise (MUJOCO_GL, or backend=).")
    if (why := why_software(used.renderer, gpus)) is not None:
        print(f"\nWARNING: {why}")
        better = [probe for probe in probes if probe.renderer and not probe.software]
        if better:
            print(f"backend={better[0].backend!r} does use it.")


def _choice(known: Sequence[str], default: str) -> str:
    """What is used unless told otherwise, and what else there is."""
    others = [name for name in known if name != default]
    return f"{default} (or {', '.join(others)})" if others else f"{default} (nothing else on this platform)"


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        # a source tree on the path is no distribution, but works
        return "from source" if importlib.util.find_spec(name.replace("-", "_")) is not None else None
