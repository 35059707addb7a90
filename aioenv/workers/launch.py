"""Starting processes: the only file that does.

Processes are started on the loop's own thread, which lives as long as what it started (the kernel ties "die with
your parent" to the thread), each in a session of its own, so that Ctrl-C does not reach it and its whole process
group can be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

from aioenv.errors import WorkerStartError

__all__ = ["START_METHODS", "check_start", "kill_group", "spawn", "usable_cpus"]

START_METHODS = ("spawn",)

# How much the stream reader holds before it stops reading; one step's reply should fit.
_STREAM_LIMIT = 4 << 20

# Several envs step in several workers: threads inside each would only fight for the same CPUs.
_THREAD_LIMITS = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    ),
    "1",
)

# Where the package lies.
_HOME = str(Path(__file__).resolve().parents[2])

# Works from any directory and for a package that is on no path but the parent's.
_BOOTSTRAP = "import sys; sys.path.insert(0, {home!r}); from aioenv.host.boot import main; main({parent})"


def check_start(start: str | None) -> str:
    """The launch policy to use: "spawn" unless something else is asked for.

    Raises:
        ValueError: if it is "fork", which is refused, or not known.
    """
    if start is None:
        return "spawn"
    if start == "fork":
        raise ValueError(
            'start="fork" is refused: a forked copy of a process with threads, an event loop or OpenGL contexts '
            'can hang or corrupt either side. Use start="spawn".'
        )
    if start not in START_METHODS:
        known = ", ".join(repr(name) for name in START_METHODS)
        raise ValueError(f"start: expected one of {known} or None, got {start!r}")
    return start


def usable_cpus() -> int:
    """How many CPUs this process may use (its affinity, where the platform has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a worker: the parent's, one thread a numeric library, and `extra` over all."""
    return {**os.environ, **_THREAD_LIMITS, **(extra or {})}


async def spawn(env: Mapping[str, str] | None) -> Process:
    """Start a worker process: frames on its stdin and stdout, what its envs print on its stderr.

    Raises:
        WorkerStartError: if there is no interpreter to start, or the system can't start one more process.
    """
    if not sys.executable:
        raise WorkerStartError("sys.executable is empty: no Python interpreter to start a worker with")
    code = _BOOTSTRAP.format(home=_HOME, parent=os.getpid())
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            code,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=worker_environment(env),
            limit=_STREAM_LIMIT,
            start_new_session=True,
        )
    except OSError as exc:
        raise WorkerStartError(f"a worker process can't be started: {exc}") from exc


def kill_group(pid: int, sig: signal.Signals) -> None:
    """Send a signal to a worker and whatever it has started that is still in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(pid, sig)
        else:
            os.kill(pid, sig)
