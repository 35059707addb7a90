"""At the end of a program, exit hooks may use open vector envs and statistics, and the end takes no time."""

from __future__ import annotations

import subprocess
import sys

_UNCLOSED = """
from aioenv import sync
envs = sync.make_vec("CartPole-v1", 3, backend="native")
envs.reset(seed=0)
for _ in range(100):
    envs.step([0, 0, 1])
"""

_STATISTICS = """
import atexit
import aioenv

def save():
    print("saved", seen.state_dict()["count"])

atexit.register(save)
seen = aioenv.SharedRunningStats(4, num_slots=2)
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_an_unclosed_native_vector_env_ends_in_silence():
    done = run(_UNCLOSED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_statistics_are_saved_by_an_exit_hook_of_before():
    done = run(_STATISTICS)
    assert done.returncode == 0 and done.stdout.startswith("saved") and not done.stderr, done.stderr
