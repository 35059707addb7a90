"""The descriptors of a worker: the channel out of the reach of envs, and their output where the parent reads it."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

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
