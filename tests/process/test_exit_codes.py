"""How workers ended, where other code takes the exit codes of all children, or the kernel does."""

from __future__ import annotations

import os
import sys

import pytest

from aioenv.process import child
from aioenv.process.launch import START_METHODS
from tests.kits.process_kit import environment, run_alone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="takes pidfds")

KIT = """
    import asyncio, os, signal, sys, threading
    import gymnasium as gym, numpy as np
    import aioenv

    class Ends(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(9)

        def __init__(self, early=None):
            if early is not None:
                self.step(early)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            if action == 1:
                os._exit(7)
            if action > 1:
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                os.kill(os.getpid(), {2: signal.SIGKILL, 3: signal.SIGSEGV}[action])
            return np.zeros(1, np.float32), 0.0, False, False, {}

    async def main(start, expected):
        for action in (1, 2, 3, 0):
            async with aioenv.make_vec(Ends, 1, start=start) as envs:
                await envs.reset()
                try:
                    await envs.step([action])
                except aioenv.WorkerDied as exc:
                    assert exc.returncode == expected[action], (action, exc)
                    how = {7: "exited with code 7", -9: "SIGKILL", -11: "SIGSEGV", None: "ended (how is not known)"}
                    assert how[exc.returncode] in str(exc), exc
        try:
            async with aioenv.make_vec(Ends, 1, start=start, early=1):
                pass
        except aioenv.WorkerStartError as exc:
            assert {7: "exited with code 7", None: "ended (how is not known)"}[expected[1]] in str(exc), exc
        else:
            raise AssertionError
"""
KNOWN = "{1: 7, 2: -9, 3: -11}"
UNKNOWN = "{1: None, 2: None, 3: None}"
REAPERS = {
    "ignored": """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)""",
    "handler": """
    def reap(*_):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
    signal.signal(signal.SIGCHLD, reap)""",
    "thread": """
    def reap():
        while not over.wait(0.0005):
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pass
    over = threading.Event()
    threading.Thread(target=reap, daemon=True).start()""",
}


@pytest.mark.parametrize("reaper", [*REAPERS])
@pytest.mark.parametrize("start", START_METHODS)
def test_the_kernel_knows_how_a_worker_ended(start, reaper, own_fork_server):
    expected = KNOWN if start == "forkserver" or child.KERNEL_TELLS else UNKNOWN
    run_alone(KIT + REAPERS[reaper] + f"\n    asyncio.run(main({start!r}, {expected}))\n    os._exit(0)")


def test_where_it_tells_nothing_nothing_is_made_up(own_fork_server):
    code = f"""
    from aioenv.process import child
    child.KERNEL_TELLS = False
    {REAPERS["ignored"]}
    asyncio.run(main("spawn", {UNKNOWN}))
    """
    run_alone(KIT + code)


def test_exit_codes_are_as_ever_where_none_takes_them(own_fork_server):
    code = f"""
    from aioenv.process import child
    child.KERNEL_TELLS = False
    asyncio.run(main("spawn", {KNOWN}))
    """
    run_alone(KIT + code)


@pytest.mark.skipif("forkserver" not in START_METHODS, reason="takes a fork server")
@pytest.mark.parametrize("reaper", ["ignored", "handler"])
def test_a_module_that_reaps_all_children_in_the_fork_server(reaper, tmp_path, own_fork_server):
    """It is preloaded, and there it waits for what it has not started."""
    lines = "\n".join(line[4:] if line.startswith("    ") else line for line in REAPERS[reaper].splitlines())
    (tmp_path / "reaps.py").write_text(f"import os, signal, threading\n{lines}\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    code = f"""
    from functools import partial
    plain = aioenv.make_vec
    aioenv.make_vec = partial(plain, preload=["reaps"])
    asyncio.run(asyncio.wait_for(main("forkserver", {KNOWN}), 50))
    """
    run_alone(KIT + code, env={**environment(), "PYTHONPATH": path})
