"""Start a worker process: move the channel out of the reach of envs, then import the rest and run the loop.

The parent starts `python -c` (see `bootstrap` in `process/environment.py`), which imports this module first. A worker
that the fork server has forked starts here too, in `run_worker`.
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

from aioenv.worker.worker_context import move_high

# Signals that a worker ignores on request and a fork server always. (Both always ignore SIGINT.)
IGNORABLE = tuple(name for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def main(
    parent_pid: int,
    read_fd: int,
    write_fd: int,
    current_row_fd: int | None,
    memory_fd: int | None,
    inbox_fd: int | None = None,
) -> None:
    """Run a worker that was spawned; the arguments are those of `run_worker`."""
    die_with_parent(parent_pid)
    run_worker(read_fd, write_fd, current_row_fd, memory_fd, inbox_fd=inbox_fd)


def run_worker(
    read_fd: int,
    write_fd: int,
    current_row_fd: int | None,
    memory_fd: int | None,
    variables_before: Mapping[str, str] = MappingProxyType({}),
    inbox_fd: int | None = None,
) -> None:
    """Serve requests on a channel until the parent closes it, then end the process.

    Args:
        read_fd: the descriptor that frames are read from.
        write_fd: the descriptor that frames are written to.
        current_row_fd: of the memory of a `CurrentRow`, or None.
        memory_fd: of the memory of a `SharedMemory`, or None.
        variables_before: the environment variables that a forked worker's fork server had before its imports.
        inbox_fd: of a `DataInbox`, or None.

    Exit handlers run, but the interpreter is not finalized. Finalizing would copy pages that a forked worker shares,
    and wait for threads that envs have left running.
    """
    fds = secure_descriptors(read_fd, write_fd)
    from aioenv.platform import declare_worker_process
    from aioenv.worker.loop import run

    declare_worker_process()
    run(*fds, current_row_fd, memory_fd, variables_before, inbox_fd)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an env may have closed or replaced it
            stream.flush()
    os._exit(0)


@cache
def libc() -> Any:
    """Load the C library; a fork server loads it once for its workers, which saves each of them 1.6 MiB."""
    import ctypes

    return ctypes.CDLL(None)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux).

    On other platforms a worker ends at its next read, since the stream has ended.
    """
    if sys.platform != "linux":
        return
    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    libc().prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request
        os._exit(1)


def become_subreaper() -> None:
    """Make orphans of this process's workers its own children, so that it reaps them (Linux)."""
    PR_SET_CHILD_SUBREAPER = 36
    libc().prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# ------------------------------------------------------------ descriptors and streams


def secure_descriptors(read_fd: int, write_fd: int) -> tuple[int, int]:
    """Move the channel to private descriptors, and point 0 at /dev/null and 1 at stderr.

    From here on nothing that an env prints, reads, or does to fds 0, 1 and 2 can touch the frames.

    Args:
        read_fd: the descriptor that frames are read from.
        write_fd: the descriptor that frames are written to; the same one if the channel is a socket.

    Returns:
        The private descriptors of both; neither survives an exec.
    """
    private_read = move_high(read_fd)
    private_write = move_high(write_fd) if write_fd != read_fd else private_read
    for fd in {read_fd, write_fd} - {0, 1}:
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    for name in ("stdout", "stderr"):
        _reopen_line_buffered(name)
    return private_read, private_write


def prepare_streams_for_pipes() -> None:
    """Reopen a fork server's streams as if they wrote to pipes, as they will in its workers.

    Each worker would do it otherwise, which dirties 0.1 MiB of its memory.
    """
    fds: list[int] = []
    try:
        with contextlib.suppress(OSError):  # too many are open: each worker does it then
            fds += os.pipe()
            fds += os.dup(1), os.dup(2)
        if len(fds) == 4:
            _, pipe, *own = fds
            for fd in (1, 2):
                os.dup2(pipe, fd)
            for name in ("stdout", "stderr"):
                _reopen_line_buffered(name)
            for fd, was in zip((1, 2), own, strict=True):
                os.dup2(was, fd)
    finally:
        for fd in fds:
            os.close(fd)


def _reopen_line_buffered(name: str) -> None:
    """Make `sys.stdout` or `sys.stderr` line-buffered, and reopen it if it believes that it can seek.

    A stream remembers whether the file that it was opened on is seekable: that of a fork server is, a worker's pipe is
    not. As long as a pipe's stream believes it, `reconfigure(encoding=…)` fails.
    """
    stream: Any = getattr(sys, f"__{name}__")
    with contextlib.suppress(AttributeError, ValueError):
        if stream.seekable():
            fresh: Any = open(stream.fileno(), "w", encoding=stream.encoding, errors=stream.errors, closefd=False)
            fresh.buffer.raw.name = stream.name
            fresh.reconfigure(write_through=stream.write_through)
            if getattr(sys, name) is stream:
                setattr(sys, name, fresh)
            setattr(sys, f"__{name}__", fresh)
    # a module that the fork server has imported may have replaced the stream
    for stream in (getattr(sys, f"__{name}__"), getattr(sys, name)):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)
