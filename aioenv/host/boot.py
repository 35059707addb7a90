"""The first thing that a worker process runs: take the descriptors into safety, then import the rest.

The parent starts `python -c BOOTSTRAP` (see `workers/launch.py`), which imports this module and nothing else.
"""

from __future__ import annotations

import os
import sys

_HIGH_FD = 100  # out of the way of code that closes "all" low descriptors


def secure_descriptors() -> tuple[int, int]:
    """Move the channel from fds 0 and 1 to private ones, and point those at /dev/null and at stderr.

    From here on nothing that an env prints, reads, or does to fds 0, 1 and 2 can touch the frames.

    Returns:
        The private descriptors to read frames from and to write frames to; neither survives an exec.
    """
    read_fd = _move(0)
    write_fd = _move(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return read_fd, write_fd


def _move(fd: int) -> int:
    try:
        import fcntl

        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    except (ImportError, OSError):  # no fcntl on Windows; a low `ulimit -n`
        return os.dup(fd)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux).

    Elsewhere, and besides, the end of the stream ends the worker at its next read.
    """
    if sys.platform != "linux":
        return
    import ctypes

    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the request
        os._exit(1)


def main(parent_pid: int) -> None:
    """Run a worker until its parent closes it."""
    read_fd, write_fd = secure_descriptors()
    die_with_parent(parent_pid)
    from aioenv.host.worker import run

    run(read_fd, write_fd)
