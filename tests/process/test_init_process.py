"""A program that adopts orphans, such as the first process of a container, reaps those of workers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap

import pytest

from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import environment, run_alone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process adopts another's children")


def _unshare():
    """The command that runs a program as process 1; None where that is not permitted."""
    for options in ("-pf", "-rpf"):
        command = ["unshare", options, "--mount-proc", "--kill-child"]
        if shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True).returncode:
            return command
    return None


UNSHARE = _unshare()
SUBREAPER = "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)"

SCRIPT = """
import asyncio, ctypes, gc, os, signal, subprocess, sys, time
import gymnasium as gym, numpy as np
import aioenv

{adopt}
START, WHAT = sys.argv[1:]

def children(state=None):
    '''Processes whose parent this one is, as "pid name": all, or those in a state.'''
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/stat" % name) as file:
                head, _, rest = file.read().rpartition(")")
        except OSError:
            continue
        if int(rest.split()[1]) == os.getpid() and rest.split()[0] == (state or rest.split()[0]):
            found.append(head.replace(" (", " "))
    return found

class Starts(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(3)

    def __init__(self):
        self.kept = [
            subprocess.Popen(["sleep", "1000"]),  # killed with the worker
            subprocess.Popen(["sh", "-c", "sleep 1000 & exec sleep 1001"]),
            subprocess.Popen(["true"]),  # waited for by none
            subprocess.Popen(["true"], process_group=0),
        ]
        if START == "forkserver" and WHAT in ("close", "restart"):  # a fork server that is not killed adopts those
            self.kept.append(subprocess.Popen(["true"], start_new_session=True))
        for process in self.kept[2:]:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {{}}

    def step(self, action):
        if action == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(1, np.float32), 0.0, False, False, {{}}

async def close(envs):
    await envs.close()

async def restart(envs):
    for _ in range(2):
        await envs.step([0, 1])
        await envs.step([0, 0])
        assert children("Z") == ["%d sh" % own.pid], children("Z")
    await envs.close()

async def cancelled(envs):
    task = asyncio.ensure_future(envs.close())
    await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    await envs.close()

async def forgotten(envs):
    pass

async def killed_server(envs):
    from aioenv.process.forkserver import ForkServer
    for server in ForkServer._servers.values():
        os.kill(server.pid, signal.SIGKILL)
    await envs.close()

async def main():
    envs = await aioenv.make_vec(Starts, 2, start=START, num_workers=2, restart=aioenv.RestartPolicy())
    await envs.reset()
    await envs.step([0, 0])
    await globals()[WHAT](envs)

own = subprocess.Popen(["sh", "-c", "exit 5"])
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
asyncio.run(main())
gc.collect()  # what was forgotten with its loop is part of a circle
assert own.wait() == 5
left = children()
assert not left, left
"""


ENDS = ["close", "restart", "cancelled", "forgotten", "killed_server"]


@pytest.mark.parametrize(
    ("command", "adopt", "what"), [(UNSHARE, "", what) for what in ENDS] + [([], SUBREAPER, "restart")]
)
@pytest.mark.parametrize("start", START_METHODS)
def test_no_zombie_is_left_and_no_exit_code_stolen(command, adopt, start, what, own_fork_server):
    if command is None:
        pytest.skip("no PID namespaces are permitted here")
    script = textwrap.dedent(SCRIPT).format(adopt=adopt)
    command = [*command, sys.executable, "-c", script, start, what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_orphan_that_ends_while_orphans_are_reaped_leaves_none():
    """Its own children become orphans after the children of this process were listed."""
    child = "import os, signal, subprocess\nended = subprocess.Popen(['true'], process_group=0)\n"
    child += "os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)\nprint(os.getpid(), flush=True)\nsignal.pause()"
    leader = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], process_group=0)"
    run_alone(
        f"""
        import contextlib, ctypes, os, signal, subprocess, sys
        from aioenv.process.child import Child

        {SUBREAPER}
        leader = subprocess.Popen([sys.executable, "-c", {leader!r}], stdout=subprocess.PIPE, start_new_session=True)
        orphan = int(leader.stdout.readline())
        own = subprocess.Popen(["sh", "-c", "exit 5"])
        waitpid = os.waitpid

        def ends_meanwhile(pid, options):
            if pid == orphan:
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            return waitpid(pid, options)

        os.waitpid = ends_meanwhile
        process = Child(leader)
        process.kill_and_reap()
        process.close()
        os.waitpid = waitpid
        assert own.wait() == 5
        with contextlib.suppress(ChildProcessError):
            raise AssertionError(waitpid(-1, os.WNOHANG))
        """
    )
