"""When the parent is killed, nothing of it is left after a second, whatever its workers are doing."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from aioenv.process.channel import CHANNELS
from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import kill_all, processes_with

# Says "x" on the fifo when it is as it shall be: each worker once it loops or hangs, else the parent after a step.
PARENT = """
import asyncio, ctypes, subprocess, sys
import gymnasium as gym, numpy as np
import aioenv

start, channel, what, fifo = sys.argv[1:]
DEAF = '''
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print(flush=True)
time.sleep(600)
'''

def say():
    with open(fifo, "w") as f:
        f.write("x")

class Mine(gym.Env):
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        if what == "child":
            self.child = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
            self.child.stdout.readline()

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if what in ("loop", "gil"):
            say()
        while what == "loop":
            pass
        if what == "gil":
            ctypes.PyDLL(None).sleep(600)
        return np.zeros(1, np.float32), 0.0, False, False, {}

async def main():
    envs = await aioenv.AsyncVectorEnv([Mine] * 2, num_workers=2, start=start, channel=channel)
    await envs.reset()
    await envs.step([0, 0])
    say()
    await asyncio.sleep(600)

asyncio.run(main())
"""

# what it does → how often "x" is said, and how many processes are there then: workers, guardian, children of envs
CASES = {"idle": (1, 3), "loop": (2, 3), "gil": (2, 3), "child": (1, 5)}
ALL = list(itertools.product(START_METHODS, CHANNELS, CASES))
# any two of these three meet in each combination
SAMPLE = [
    (start, CHANNELS[(place + number) % len(CHANNELS)], what)
    for place, start in enumerate(START_METHODS)
    for number, what in enumerate(CASES)
]


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"


def wait_for(count: int, fifo: int, parent: int) -> None:
    while count:
        ready = select.select([fifo, parent], [], [], 60)[0]
        assert parent not in ready, "the parent has ended by itself: see what it printed"
        assert fifo in ready, "the parent or its workers did not get that far"
        count -= len(os.read(fifo, count))


@pytest.fixture
def killed_parent(tmp_path):
    """Start a parent, kill it, and see what is left after a second; whatever is left is killed too."""
    with contextlib.ExitStack() as stack:

        def kill_and_watch(start: str, channel: str, what: str) -> None:
            path = str(tmp_path / "fifo")
            os.mkfifo(path)
            fifo = os.open(path, os.O_RDWR)  # for writing too, so that it has no end
            stack.callback(os.close, fifo)
            mark = f"AIOENV_TEST={uuid.uuid4()}"
            env = {**os.environ, **dict([mark.split("=")]), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            parent = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", PARENT, start, channel, what, path], env=env)
            )
            stack.callback(kill_all, mark)
            parent_fd = os.pidfd_open(parent.pid)
            stack.callback(os.close, parent_fd)
            said, processes = CASES[what]
            wait_for(said, fifo, parent_fd)
            started = processes_with(mark) - {parent.pid}
            assert len(started) == processes
            while what == "gil" and not all(map(sleeps, started)):
                pass  # from "x" on, sleeping is all that it does
            pidfds = {os.pidfd_open(pid): pid for pid in started}
            for fd in pidfds:
                stack.callback(os.close, fd)
            deadline = time.monotonic() + 1.0
            parent.kill()
            left = dict(pidfds)
            while left and (rest := deadline - time.monotonic()) > 0:
                for fd in select.select(list(left), [], [], rest)[0]:
                    del left[fd]
            assert not left, f"still there: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in left.values()]}"
            parent.wait()
            assert not processes_with(mark), "started after it was killed"

        yield kill_and_watch


@pytest.mark.parametrize(("start", "channel", "what"), SAMPLE)
def test_nothing_is_left(start, channel, what, killed_parent):
    killed_parent(start, channel, what)


@pytest.mark.stress
@pytest.mark.parametrize("run", range(25))  # times two channels: fifty for each way to start
@pytest.mark.parametrize(("start", "channel", "what"), ALL)
def test_nothing_is_left_fifty_times(start, channel, what, run, killed_parent):
    killed_parent(start, channel, what)
