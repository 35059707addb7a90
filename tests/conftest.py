"""What every test gets: nothing may be left behind, and a choice of event loops."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import uvloop

from aioenv.testing import leak_check

# a shell without job control starts what runs in the background with SIGINT ignored, and some tests are about Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)

# before numpy is imported: its threads would count as left behind, and fight the workers
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

# workers, and scripts that tests start, find the package and the tests whatever directory they run in
sys.path.insert(0, str(Path(__file__).parent))

from aioenv.batching import plane  # noqa: E402
from aioenv.workers import channel as channels  # noqa: E402
from aioenv.workers import launch  # noqa: E402
from aioenv.workers.channel import CHANNELS  # noqa: E402
from aioenv.workers.environment import server_environment, worker_environment  # noqa: E402
from aioenv.workers.forkserver import AVAILABLE, ForkServer  # noqa: E402

uvloop.new_event_loop().close()  # libuv opens a pipe for signals, once for the process

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


# every way to start a worker and to talk to it
WAYS = [(start, channel) for start in launch.START_METHODS for channel in CHANNELS]
# in these even small arrays go through shared memory: each way to start, and each channel, meets it once
SHARED = [("spawn", "scatter"), ("forkserver", "streams")]


@pytest.fixture(params=WAYS, ids="-".join)
def way(request, monkeypatch):
    """Make each way the default, one after the other: for tests that must hold for all of them."""
    start, channel = request.param
    monkeypatch.setattr(launch, "START_METHODS", (*launch.START_METHODS, start))
    monkeypatch.setattr(channels, "CHANNELS", (*CHANNELS, channel))
    if (start, channel) in SHARED:
        monkeypatch.setattr(plane, "SHARED_BYTES", 1)
    return start, channel


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """Fail a test that leaves a child, fd, thread or shared memory. MuJoCo writes its log into the cwd."""
    monkeypatch.chdir(tmp_path)
    with leak_check():
        yield


@pytest.fixture(scope="module")
def fork_server():
    """Keeps the fork server through a module's tests, which then need not start one each."""
    if not AVAILABLE:
        yield
        return
    server = ForkServer.acquire(server_environment(worker_environment(None)))
    yield
    server.abandon()


def run_on(loop: str, coroutine):
    """Run a coroutine on a new event loop of this kind."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(coroutine)


@pytest.fixture
def keep():
    """Closes at the end what it was given: shared statistics, say."""
    kept = []

    def keep(stats):
        kept.append(stats)
        return stats

    yield keep
    for stats in kept:
        stats.close()
