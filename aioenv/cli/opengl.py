"""Try out OpenGL backends and their devices, each in a process of its own: which draw, and how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

from aioenv.cli.processes import run_in_group
from aioenv.rendering.backends import backend_environment, is_software, platform_backends

__all__ = ["ProbeResult", "probe_all", "probe_opengl"]

PROBE_TIMEOUT_S = 60.0
# At most so many devices are tried.
MAX_DEVICES = 16

_MARK = "aioenv-probe:"  # before the result: drivers print, too

# Draws with a model's own quality and with the least: making a context does not show that drawing works. Prints the
# renderer, the images a second, and the number of devices.
_PROBE = """
import json, os, time
import mujoco
XML = '''<mujoco><worldbody><light pos="0 0 3"/><geom type="plane" size="2 2 .1" rgba=".3 .5 .3 1"/>
<geom type="capsule" pos="0 0 .5" size=".1 .3"/><geom type="box" pos=".4 0 .3" size=".1 .2 .3" rgba="1 0 0 1"/>
</worldbody></mujoco>'''
rates = []
for fast in (False, True):
    model = mujoco.MjModel.from_xml_string(XML)
    if fast:
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = 84
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, 84, 84)
    if fast:
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
    renderer.update_scene(data)
    assert renderer.render().any(), "the image is black"
    count, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < 0.15 or count < 2:
        renderer.update_scene(data)
        renderer.render()
        count += 1
    rates.append(count / taken)
    if not fast:
        from OpenGL import GL
        name = (GL.glGetString(GL.GL_RENDERER) or b"?").decode()
    renderer.close()
devices = 1
if os.environ["MUJOCO_GL"] == "egl":
    from mujoco.egl import egl_ext
    devices = len(egl_ext.eglQueryDevicesEXT())
print("MARK" + json.dumps([name, *rates, devices]))
""".replace("MARK", _MARK)


@dataclass(frozen=True)
class ProbeResult:
    """The result of trying an OpenGL backend.

    Attributes:
        backend: its name.
        renderer: the renderer, as OpenGL names it; empty if the backend does not work.
        problem: why it does not work; empty if it does.
        device: which of its devices; None for the one that MuJoCo chooses.
        devices: how many it has.
        exact_per_s, fast_per_s: images of a small scene that one process draws a second, 84x84: as `mujoco.Renderer`
            draws them, and without shadows, reflections and multisampling.
    """

    backend: str
    renderer: str
    problem: str
    device: int | None = field(default=None, kw_only=True)
    devices: int = field(default=0, kw_only=True)
    exact_per_s: float = field(default=0.0, kw_only=True)
    fast_per_s: float = field(default=0.0, kw_only=True)

    @property
    def software(self) -> bool:
        """Whether the CPU draws."""
        return is_software(self.renderer)


def probe_opengl(backend: str, timeout_s: float = PROBE_TIMEOUT_S, device: int | None = None) -> ProbeResult:
    """Draw with a backend, in a process of its own, which a broken driver may crash or hang.

    Args:
        backend: its name.
        timeout_s: how long that may take, in seconds.
        device: the GPU that draws; None for the one that MuJoCo chooses.
    """
    try:
        # -P: no file in the working directory shadows a module
        command = [sys.executable, "-P", "-c", _PROBE]
        done = run_in_group(command, timeout_s, env={**os.environ, **backend_environment(backend, device)})
    except subprocess.TimeoutExpired:
        return ProbeResult(backend, "", f"no image after {timeout_s:g} s", device=device)
    if done.returncode == 0:
        found = next(line for line in reversed(done.stdout.splitlines()) if line.startswith(_MARK))
        name, exact, fast, devices = json.loads(found.removeprefix(_MARK))
        return ProbeResult(backend, name, "", device=device, devices=devices, exact_per_s=exact, fast_per_s=fast)
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    ended = f"ended with status {done.returncode}"
    # the error itself comes before messages of the interpreter's shutdown
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return ProbeResult(backend, "", (errors or lines or [ended])[0], device=device)


def probe_all(timeout_s: float = PROBE_TIMEOUT_S) -> list[ProbeResult]:
    """Try every backend that MuJoCo has here; each device of EGL if there are several."""
    best, *others = platform_backends()
    probes = [first := probe_opengl(best, timeout_s)]
    if first.devices > 1:
        probes = [probe_opengl(best, timeout_s, number) for number in range(min(first.devices, MAX_DEVICES))]
    return [*probes, *(probe_opengl(name, timeout_s) for name in others)]
