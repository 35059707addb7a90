"""What every test gets: nothing may be left behind, and a choice of event loops."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import uvloop

from aioenv.testing import leak_check

# before numpy is imported: its threads would count as left behind, and fight the workers
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

# workers, and scripts that tests start, find the package and the tests whatever directory they run in
sys.path.insert(0, str(Path(__file__).parent))

uvloop.new_event_loop().close()  # libuv opens a pipe for signals, once for the process

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """Fail a test that leaves a child, fd, thread or shared memory. MuJoCo writes its log into the cwd."""
    monkeypatch.chdir(tmp_path)
    with leak_check():
        yield


def run_on(loop: str, coroutine):
    """Run a coroutine on a new event loop of this kind."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(coroutine)
