"""The first thing that a worker process runs: take the descriptors into safety, then import the rest.

The parent starts `python -c` (see `bootstrap` in `process/environment.py`), which imports this and nothing else. A
forked worker comes here too, from `forkserver.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from aioenv.worker.descriptors import secure_descriptors

# What workers ignore if they are told to, and a fork server always (SIGINT they both ignore).
IGNORABLE = tuple(name for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))


@cache
def libc() -> Any:
    """The C library; a fork server loads it once for its workers, which saves each of them 1.6 MiB."""
    import ctypes

    return ctypes.CDLL(None)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux).

    Elsewhere, and besides, the end of the stream ends the worker at its next read.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    libc().prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request
        os._exit(1)


def adopt_orphans() -> None:
    """Have processes that workers of this one leave behind become children of this one, which reaps them (Linux)."""
    PR_SET_CHILD_SUBREAPER = 36
    libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def work(
    read_fd: int,
    write_fd: int,
    marker_fd: int | None,
    memory_fd: int | None,
    variables_before: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Be a worker on a channel until the parent closes it, then end the process.

    Args:
        read_fd: where frames come from.
        write_fd: where they go.
        marker_fd: of a `memory.Marker`, or None.
        memory_fd: of a `memory.Shared`, or None.
        variables_before: of a forked worker's fork server, before that imported anything for it.

    Exit handlers run, but the interpreter is not taken down piece by piece: that would copy what a forked worker
    shares, and wait for threads that envs have left behind.
    """
    fds = secure_descriptors(read_fd, write_fd)
    from aioenv.platform import declare_worker_process
    from aioenv.worker.loop import run

    declare_worker_process()
    run(*fds, marker_fd, memory_fd, variables_before)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an env may have closed it, or put something else in its place
            stream.flush()
    os._exit(0)


def main(parent_pid: int, read_fd: int, write_fd: int, marker_fd: int | None, memory_fd: int | None) -> None:
    """What a spawned worker does."""
    die_with_parent(parent_pid)
    work(read_fd, write_fd, marker_fd, memory_fd)
