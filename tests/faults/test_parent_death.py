"""When the parent is killed, nothing of it is left after a second, whatever its workers are doing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from aioenv.workers.channel import CHANNELS
from aioenv.workers.launch import START_METHODS

# Prints the pids of all that it has started, then does what it is told; each worker says "x" on the fifo when it does.
PARENT = """
import asyncio, ctypes, os, subprocess, sys
import gymnasium as gym, numpy as np
import aioenv
from aioenv.workers.forkserver import ForkServer

start, channel, what, fifo = sys.argv[1:]

class Mine(gym.Env):
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    child = 0

    def __init__(self):
        if what == "child":
            deaf = "import signal, time\\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\\ntime.sleep(600)"
            self.child = subprocess.Popen([sys.executable, "-c", deaf]).pid

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        with open(fifo, "w") as f:
            f.write("x")
        while what == "loop":
            pass
        if what == "gil":
            ctypes.PyDLL(None).sleep(600)
        return np.zeros(1, np.float32), 0.0, False, False, {}

async def main():
    envs = await aioenv.AsyncVectorEnv([Mine] * 2, num_workers=2, start=start, channel=channel)
    await envs.reset()
    children = [pid for pid in await envs.get_attr("child") if pid]
    servers = [server.pid for server in ForkServer._servers.values()]
    print(*[w.pid for w in envs.workers], *children, *servers, flush=True)
    await envs.step([0, 0])
    await asyncio.sleep(600)

asyncio.run(main())
"""

CASES = [
    pytest.param(start, channel, what, id=f"{start}-{channel}-{what}")
    for start in START_METHODS
    for channel in CHANNELS
    for what in ("idle", "loop", "gil", "child")
]


def kill_and_watch(start: str, channel: str, what: str, fifo: str) -> None:
    os.mkfifo(fifo)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    args = [sys.executable, "-c", PARENT, start, channel, what, fifo]
    with subprocess.Popen(args, env=env, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == (5 if what == "child" else 3), "two workers, their children, and the guardian"
        pidfds = {os.pidfd_open(pid): pid for pid in pids}
        try:
            said = ""
            while len(said) < 2:
                with open(fifo) as f:
                    said += f.read()
            parent.send_signal(signal.SIGKILL)
            deadline = time.monotonic() + 1.0
            left = dict(pidfds)
            while left and (rest := deadline - time.monotonic()) > 0:
                for fd in select.select(list(left), [], [], rest)[0]:
                    del left[fd]
            assert not left, f"still there: {[open(f'/proc/{pid}/cmdline').read() for pid in left.values()]}"
        finally:
            parent.kill()
            for fd in pidfds:
                signal.pidfd_send_signal(fd, signal.SIGKILL) if fd in left else None
                os.close(fd)


@pytest.mark.parametrize(("start", "channel", "what"), CASES)
def test_nothing_is_left(start, channel, what, tmp_path):
    kill_and_watch(start, channel, what, str(tmp_path / "fifo"))


@pytest.mark.stress
@pytest.mark.parametrize("run", range(20))
@pytest.mark.parametrize(("start", "channel", "what"), CASES)
def test_nothing_is_left_twenty_times(start, channel, what, run, tmp_path):
    kill_and_watch(start, channel, what, str(tmp_path / "fifo"))
