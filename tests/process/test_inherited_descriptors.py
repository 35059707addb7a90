"""No descriptor of ours reaches a foreign process: not the parent's other children, nor those of envs."""

from __future__ import annotations

import os

import pytest

from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import environment, run_alone

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")

KIT = """
import os, subprocess, sys
import gymnasium as gym, numpy as np

TELL = '''
import os
for name in sorted(os.listdir("/proc/self/fd")):
    try:
        link = os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # of the directory itself
        continue
    if int(name) > 2:
        print(name, link)
'''

def inherited():
    return subprocess.run([sys.executable, "-c", TELL], close_fds=False, capture_output=True, text=True).stdout

class Looks(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 255, (64, 64), np.uint8), gym.spaces.Discrete(2)

    def __init__(self):
        self.made = inherited()

    def reset(self, *, seed=None, options=None):
        return np.zeros((64, 64), np.uint8), {"made": self.made, "reset": inherited()}

    def step(self, action):
        return np.zeros((64, 64), np.uint8), 0.0, False, False, {"step": inherited()}
"""

PARENT = """
import asyncio, os, sys
import aioenv
from descriptors_kit import TELL, Looks, inherited

async def main(start, transport):
    with aioenv.SharedRunningStats((3,), num_slots=2):
        config = aioenv.RenderConfig(24, 16, quality="fast", workers=1)
        restart = aioenv.RestartPolicy(resume=True)
        async with (
            aioenv.make_vec("InvertedPendulum-v5", 2, start=start, render=config, restart=restart) as drawn,
            aioenv.make_vec(Looks, 2, start=start, transport=transport, num_workers=2) as envs,
        ):
            await drawn.reset()
            await drawn.step(drawn.action_space.sample())
            assert (await drawn.render()).shape == (2, 16, 24, 3)
            infos = [(await envs.reset()).info, (await envs.step([0, 1])).info]
            for info in infos:
                for name in ("made", "reset", "step"):
                    assert all(told == "" for told in info.get(name, ())), (name, info[name])
            now = inherited()
            assert now == before, f"{before!r} became {now!r}"
            if transport == "frames":  # the same process from its beginning: a program that starts itself anew
                os.execv(sys.executable, [sys.executable, "-c", TELL])

before = inherited()
for transport in ("shared", "frames"):
    asyncio.run(main(sys.argv[1], transport))
"""

PRELOADED = """
import os
import descriptors_kit

with open(os.environ["TOLD"], "w") as file:
    file.write(descriptors_kit.inherited() or "nothing")
"""


@pytest.fixture
def kit(tmp_path):
    """The directory of modules for the programs below, and the variables that they run with."""
    (tmp_path / "descriptors_kit.py").write_text(KIT)
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    return tmp_path, {**environment(), "PYTHONPATH": path, "TOLD": str(tmp_path / "told")}


@pytest.mark.parametrize("start", START_METHODS)
def test_children_of_the_program_and_of_envs_get_none(start, kit, own_fork_server):
    before = run_alone("import descriptors_kit; print(descriptors_kit.inherited(), end='')", env=kit[1]).stdout
    assert run_alone(PARENT, start, env=kit[1]).stdout == before


@pytest.mark.skipif("forkserver" not in START_METHODS, reason="takes a fork server")
def test_what_modules_start_when_they_are_preloaded_gets_none(kit, own_fork_server):
    folder, env = kit
    (folder / "starts_a_process.py").write_text(PRELOADED)
    code = """
    import asyncio, aioenv
    from descriptors_kit import Looks

    async def main():
        async with aioenv.make_vec(Looks, 1, preload=["starts_a_process"]) as envs:
            await envs.reset()

    asyncio.run(main())
    """
    run_alone(code, env=env)
    assert (folder / "told").read_text() == "nothing"
