"""What a process and its fork server tell each other: small pickles, with descriptors beside them.

An order is its length (4 bytes, little-endian) and its pickle. Both ends are the same interpreter and the sockets
are private, like those of the workers.
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
    """To the server: fork a worker. With descriptors: status, channel (one or two), output, marker, memory."""

    preload: tuple[str, ...]  # modules to import first, if they can be, and classes of envs there: "module:Class"
    sys_path: tuple[str, ...]  # where from
    marked: bool  # whether there is a marker (see `memory.Marker`)
    shares: bool  # whether there is memory to share (see `memory.Shared`)
    log_level: int  # what modules log on their import is told from this level on


class GuardRequest(NamedTuple):
    """To the server: kill this process group too, when the parent is gone."""

    pid: int


class ReleaseRequest(NamedTuple):
    """To the server: that group is gone."""

    pid: int


class ForkedNotice(NamedTuple):
    """On the status socket of a worker: it runs. Beside it: its pidfd."""

    pid: int


class ForkRefused(NamedTuple):
    """From the server, about a worker: the system would not have it forked."""

    errno: int  # of the OSError


class ImportingNotice(NamedTuple):
    """On the status socket, before anything else: the server begins to import this module for it."""

    module: str


class UnfitNotice(NamedTuple):
    """On the status socket: nothing was forked, since the server has imported this module.

    It has threads, or connections, that no copy of it may have.
    """

    module: str


class ExitedNotice(NamedTuple):
    """On the status socket: it has ended."""

    returncode: int | None  # its exit code, or -N for signal N; None: a module has taken it, and the kernel knows


def pack(order: Any) -> bytes:
    """An order as bytes."""
    data = pickle.dumps(order)
    return SIZE.pack(len(data)) + data


def unpack(data: bytes) -> Any:
    """What `pack` packed, without the length before it."""
    return pickle.loads(data)
