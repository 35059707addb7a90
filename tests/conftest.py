"""Fixtures of all tests: nothing may be left behind; and the ways to start workers."""

from __future__ import annotations

import gc
import itertools
import os
import signal

import pytest
import uvloop

from aioenv.testing import leak_check

# a shell without job control starts what runs in the background with SIGINT ignored, and some tests are about Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)

# before numpy is imported: its threads would count as left behind, and fight the workers
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

from aioenv.core import dispatcher  # noqa: E402
from aioenv.process import channel as channels  # noqa: E402
from aioenv.process import launch  # noqa: E402
from aioenv.process.channel import CHANNELS  # noqa: E402
from aioenv.process.environment import worker_environment  # noqa: E402
from aioenv.process.forkserver import AVAILABLE, ForkServer  # noqa: E402
from aioenv.rendering.backends import backend_environment  # noqa: E402
from aioenv.spaces import layout  # noqa: E402
from aioenv.worker import worker_context  # noqa: E402
from tests.kits.sampling import sample  # noqa: E402
from tests.kits.version_kit import NO_BATCH, lacks_batch, version_of  # noqa: E402

uvloop.new_event_loop().close()  # libuv opens a pipe for signals, once for the process

# Every way to start a worker and to talk to it. Without the last, which is a stress run, each test still meets each
# start method, each channel, and small arrays in shared memory and in frames.
WAYS = [
    pytest.param(way, id="-".join(way), marks=[pytest.mark.stress] if way == ("spawn", "streams") else [])
    for way in itertools.product(launch.START_METHODS, CHANNELS)
]
# in these even small arrays go through shared memory: each way to start, and each channel, meets it once
SHARED = [("spawn", "scatter"), ("forkserver", "streams")]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Make each way the default, one after the other: for tests that must hold for all of them."""
    start, channel = request.param
    monkeypatch.setattr(launch, "START_METHODS", (*launch.START_METHODS, start))
    monkeypatch.setattr(channels, "CHANNELS", (*CHANNELS, channel))
    if (start, channel) in SHARED:
        monkeypatch.setattr(layout, "SHARED_BYTES", 1)
    return start, channel


@pytest.fixture
def no_wakeup_coalescing(monkeypatch):
    """Have the loop read the channels of all workers, however many CPUs there are."""
    monkeypatch.setattr(dispatcher, "usable_cpus", lambda: 1)


@pytest.fixture
def a_worker_within(monkeypatch):
    """Have a worker in this process treat the process as shared: it changes no setting and freezes no object."""
    monkeypatch.setattr(worker_context, "_context", worker_context._WorkerContext())
    worker_context.use_current_row_of_parent(memoryview(bytearray(4)).cast("I"))


def pytest_configure(config):
    if version_of("gymnasium") < (1, 3):  # its vector envs close themselves when they are collected, half made ones too
        ignored = "ignore:Exception ignored in. <function VectorEnv.__del__:pytest.PytestUnraisableExceptionWarning"
        config.addinivalue_line("filterwarnings", ignored)


def _skipped(report, path):
    """Have a test, or a module, whose native tasks an old MuJoCo does not have, count as skipped."""
    if lacks_batch(report):
        report.outcome, report.longrepr = "skipped", (str(path), 0, f"Skipped: {NO_BATCH}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    enabled = gc.isenabled()
    gc.disable()  # in Python 3.11 `ast.parse`, of pytest, fails if a finalizer formats a traceback meanwhile
    try:
        return _skipped((yield), item.path)
    finally:
        if enabled:
            gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _skipped((yield), getattr(collector, "path", ""))


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """Mark as stress runs the cells of sampled tests that the sample leaves out."""
    grids = {}
    for item in items:
        if (mark := item.get_closest_marker("sampled")) and item.get_closest_marker("stress") is None:
            grids.setdefault((item.path, item.originalname, mark.args), []).append(item)
    for (_, _, args), cells in grids.items():
        values = [{name: repr(value) for name, value in item.callspec.params.items()} for item in cells]
        kept = set(sample(values, *args))
        for number, item in enumerate(cells):
            if number not in kept:
                item.add_marker(pytest.mark.stress)


def pytest_collection_finish():
    """Thousands of tests are in memory from here on: a test that collects garbage shall not go through them all."""
    gc.freeze()


class KeptServers:
    """Fork servers that one test leaves to the next: to start one takes as long as all else that a test does."""

    def __init__(self) -> None:
        self._servers: dict[str | None, ForkServer] = {}

    def keep(self, backend: str | None = None) -> None:
        """Have one run, for render workers if there is a backend; there is a new one if a test has ended it."""
        server = self._servers.get(backend)
        if server is not None:
            if server.alive and server in ForkServer._servers.values():
                return
            self._servers.pop(backend).abandon()
        if AVAILABLE:
            environ = worker_environment(None if backend is None else backend_environment(backend))
            self._servers[backend] = ForkServer.acquire(environ, selects_opengl=backend is not None)

    def end(self) -> None:
        """Let go of them."""
        while self._servers:
            self._servers.popitem()[1].abandon()


@pytest.fixture(scope="session")
def fork_server():
    """The kept ones, of every test that does not ask for `own_fork_server`."""
    kept = KeptServers()
    yield kept
    kept.end()


@pytest.fixture
def own_fork_server():
    """None is kept: for tests about the beginning and the end of a fork server."""


@pytest.fixture(autouse=True)
def nothing_left_behind(request, fork_server, tmp_path, monkeypatch):
    """Fail a test that leaves a child, fd, thread or shared memory. MuJoCo writes its log into the cwd."""
    if "own_fork_server" in request.fixturenames:
        fork_server.end()
    else:
        fork_server.keep()
        if request.path.parent.name in ("rendering", "modders"):
            fork_server.keep("egl")
    monkeypatch.chdir(tmp_path)
    variables = set(os.environ)
    with leak_check():
        yield
        # MuJoCo sets PYOPENGL_PLATFORM when it first draws, and each later test would start a fork server of its own
        for name in os.environ.keys() - variables:
            del os.environ[name]


@pytest.fixture
def fifo(tmp_path):
    """The path of a fifo, at which an env waits until a test opens its other end."""
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    return path


@pytest.fixture
def gate(tmp_path):
    """A fifo that `Counter.WAIT` blocks on, and the function that lets it go."""
    path = str(tmp_path / "gate")
    os.mkfifo(path)

    def open_gate() -> None:
        os.close(os.open(path, os.O_WRONLY))

    return path, open_gate


@pytest.fixture
def keep():
    """A function that notes objects, such as shared statistics, to close them at the end."""
    kept = []

    def keep(stats):
        kept.append(stats)
        return stats

    yield keep
    for stats in kept:
        stats.close()
