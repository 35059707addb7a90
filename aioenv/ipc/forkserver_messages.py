"""The messages between a process and its fork server: small pickles, with descriptors passed beside them.

A request is its length (4 bytes, little-endian) and its pickle. Both ends run the same interpreter, and the sockets are
private, like those of the workers.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, NamedTuple

__all__ = [
    "SIZE",
    "ExitedNotice",
    "ForkRefused",
    "ForkRequest",
    "ForkedNotice",
    "GuardRequest",
    "ImportingNotice",
    "ReleaseRequest",
    "UnfitNotice",
    "pack",
    "unpack",
]

SIZE = struct.Struct("<I")


class ForkRequest(NamedTuple):
    """A message to the server: fork a worker.

    Descriptors passed along, in this order: the status socket, the channel (one or two), the output, and, if there are
    such, the current-row memory and the shared memory.
    """

    preload: tuple[str, ...]  # modules to import first, if possible, and env classes there ("module:Class")
    sys_path: tuple[str, ...]  # where to import from
    has_current_row: bool  # whether `memory.CurrentRow` memory is passed
    has_shared_memory: bool  # whether `memory.SharedMemory` is passed
    log_level: int  # the lowest level of log records that modules emit while they are imported


class GuardRequest(NamedTuple):
    """A message to the server: kill this process group too when the parent is gone."""

    pid: int


class ReleaseRequest(NamedTuple):
    """A message to the server: this process group is gone."""

    pid: int


class ForkedNotice(NamedTuple):
    """A message on a worker's status socket: it runs. Its pidfd is passed along."""

    pid: int


class ForkRefused(NamedTuple):
    """A message from the server about a worker: the system refused the fork."""

    errno: int  # of the OSError


class ImportingNotice(NamedTuple):
    """A first message on the status socket: the server begins to import this module for the worker."""

    module: str


class UnfitNotice(NamedTuple):
    """On the status socket: nothing was forked, since the server has imported this module.

    The module has started threads, or opened connections, which no forked copy may have.
    """

    module: str


class ExitedNotice(NamedTuple):
    """On the status socket: the worker has ended."""

    returncode: int | None  # its exit code, -N for signal N; None if a module reaped it and the kernel can't tell


def pack(message: Any) -> bytes:
    """Pickle a message, with its length before it."""
    data = pickle.dumps(message)
    return SIZE.pack(len(data)) + data


def unpack(data: bytes) -> Any:
    """Unpickle a message of `pack`, without the length before it."""
    return pickle.loads(data)
