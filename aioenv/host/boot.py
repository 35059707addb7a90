"""The first thing that a worker process runs: take the descriptors into safety, then import the rest.

The parent starts `python -c` (see `bootstrap` in `workers/environment.py`), which imports this and nothing else. A
forked worker comes here too, from `forkserver.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from functools import cache
from typing import Any

# What workers ignore if they are told to, and a fork server always (SIGINT they both ignore).
IGNORABLE = tuple(name for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name))

# In a forked worker: the variables of its fork server, before that imported anything for it.
variables_before: dict[str, str] = {}

_HIGH_FD = 100  # out of the way of code that closes "all" low descriptors


def secure_descriptors(read_fd: int, write_fd: int) -> tuple[int, int]:
    """Move the channel to private descriptors, and point 0 at /dev/null and 1 at stderr.

    From here on nothing that an env prints, reads, or does to fds 0, 1 and 2 can touch the frames.

    Args:
        read_fd: where frames come from.
        write_fd: where they go; the same one if the channel is a socket.

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
        _settle(name)
    return private_read, private_write


def expect_pipes() -> None:
    """In a fork server, once: have its streams take their descriptors for the pipes that they will be in workers.

    Each worker would do it otherwise, which dirties 0.1 MiB of its memory.
    """
    fds: list[int] = []
    try:
        with contextlib.suppress(OSError):  # too many are open: workers see to it
            fds += os.pipe()
            fds += os.dup(1), os.dup(2)
        if len(fds) == 4:
            _, pipe, *own = fds
            for fd in (1, 2):
                os.dup2(pipe, fd)
            for name in ("stdout", "stderr"):
                _settle(name)
            for fd, was in zip((1, 2), own, strict=True):
                os.dup2(was, fd)
    finally:
        for fd in fds:
            os.close(fd)


def _settle(name: str) -> None:
    """Have `sys.stdout` (or `stderr`) write line by line, to what its descriptor is now.

    It was opened on another file, and remembers whether one can seek in that: in the file of a fork server one can. As
    long as it thinks so of a pipe, `reconfigure(encoding=…)` fails.
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
    # what a fork server has imported may have put something else there
    for stream in (getattr(sys, f"__{name}__"), getattr(sys, name)):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)


def move_high(fd: int) -> int:
    """A copy of a descriptor, out of the way."""
    try:
        import fcntl

        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    except (ImportError, OSError):  # no fcntl on Windows; a low `ulimit -n`
        return os.dup(fd)


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


def work(read_fd: int, write_fd: int, marker_fd: int | None, memory_fd: int | None) -> None:
    """Be a worker on a channel until the parent closes it, then end the process.

    The other descriptors are of a `memory.Marker` and a `memory.Shared`.

    Exit handlers run, but the interpreter is not taken down piece by piece: that would copy what a forked worker
    shares, and wait for threads that envs have left behind.
    """
    fds = secure_descriptors(read_fd, write_fd)
    from aioenv import nested
    from aioenv.host.worker import run

    nested.declare()
    run(*fds, marker_fd, memory_fd)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an env may have closed it, or put something else in its place
            stream.flush()
    os._exit(0)


def main(parent_pid: int, read_fd: int, write_fd: int, marker_fd: int | None, memory_fd: int | None) -> None:
    """What a spawned worker does."""
    die_with_parent(parent_pid)
    work(read_fd, write_fd, marker_fd, memory_fd)
