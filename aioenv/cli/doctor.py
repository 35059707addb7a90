"""Say what aioenv finds on this machine, and what to install for the rest."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from aioenv.make import new_event_loop
from aioenv.rendering.backends import INSTALL_HINT, candidates, environment
from aioenv.workers.channel import CHANNELS, check_channel
from aioenv.workers.environment import usable_cpus
from aioenv.workers.launch import START_METHODS, check_start

__all__ = ["HELP", "Probe", "add_arguments", "probe_opengl", "run"]

HELP = "say what works on this machine, and what to install for the rest"

REQUIRED = ("aioenv", "numpy", "gymnasium", "mujoco", "cloudpickle", "uvloop")
OPTIONAL = {
    "imageio-ffmpeg": "videos: pip install 'aioenv[video]'",
    "tqdm": "progress bars: pip install 'aioenv[video]'",
    "matplotlib": "bench --plot: pip install 'aioenv[bench]'",
    "stable-baselines3": "adapters, and a bench contender: pip install 'aioenv[adapters]'",
    "tianshou": "a bench contender: pip install tianshou",
    "envpool": "a bench contender: pip install envpool",
}

# Makes a context, draws one image in it, and says who drew: a context alone does not show that drawing works.
_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><light pos='0 0 3'/><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 32, 32)
renderer.update_scene(data)
assert renderer.render().any(), "the image is black"
from OpenGL import GL
print((GL.glGetString(GL.GL_RENDERER) or b"?").decode())
renderer.close()
"""
PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Probe:
    """What came of trying an OpenGL backend.

    Attributes:
        backend: its name.
        renderer: who draws, as OpenGL names it; empty if the backend does not work.
        problem: why it does not work; empty if it does.
    """

    backend: str
    renderer: str
    problem: str


def probe_opengl(backend: str, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
    """Draw one image with a backend, in a process of its own: a broken driver may crash or hang it.

    Args:
        backend: "egl", "osmesa" or "glfw".
        timeout_s: how long that may take, in seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, **environment(backend)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Probe(backend, "", f"no image after {timeout_s:g} s")
    if done.returncode == 0:
        return Probe(backend, done.stdout.strip(), "")
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    ended = f"ended with status {done.returncode}"
    # what is printed while the interpreter shuts down comes after the error itself
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return Probe(backend, "", (errors or lines or [ended])[0])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments: none."""


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if something required is missing, else 0 (without OpenGL all but images works)."""
    print(f"Python {platform.python_version()}, {platform.platform()}")
    cpus = usable_cpus()
    print(f"CPUs: {cpus} usable of {os.cpu_count()}; so many workers are the default")
    loop = new_event_loop()
    print(f"Event loop: {type(loop).__module__.partition('.')[0]}")
    loop.close()
    print(f"Workers: {_choice(START_METHODS, check_start(None))}; channel: {_choice(CHANNELS, check_channel('auto'))}")
    missing = []
    print("\nPackages")
    for name in REQUIRED:
        version = installed(name)
        print(f"  {name:<18}{version or 'MISSING'}")
        if version is None and not (name == "uvloop" and sys.platform == "win32"):
            missing.append(name)
    for name, use in OPTIONAL.items():
        print(f"  {name:<18}{installed(name) or f'not installed ({use})'}")
    print("\nOpenGL")
    backends = candidates(None)
    probes = [probe_opengl(backend) for backend in backends]
    for probe in probes:
        print(f"  {probe.backend:<8}{probe.renderer or f'does not work: {probe.problem}'}")
    working = [probe for probe in probes if probe.renderer]
    if not working:
        print(f"\nNo images can be drawn.\n{INSTALL_HINT}")
    elif "pipe" in working[0].renderer:
        print(f"  Images are drawn on the CPU. {working[0].renderer.split(' ')[0]} is Mesa's software OpenGL.")
    if missing:
        print(f"\nMissing: pip install {' '.join(missing)}")
        return 1
    return 0


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
