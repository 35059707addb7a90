"""Data that several processes of one machine read, each from the same memory: descriptors over a Unix socket.

A message has the number of the data, and where they are in a file. The reader maps that part privately: pages that it
writes to are copied, and no other process sees the change. If the memory is lent, a second descriptor, the end of a
pipe, stays open in the reader as long as it uses the data.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import stat
import struct
import weakref
from collections.abc import Sequence
from typing import Self

from aioenv.ipc.frame_io import receive_fds
from aioenv.ipc.frames import Buffer
from aioenv.ipc.memory import SharedMemory

__all__ = [
    "ALIGNMENT",
    "DataInbox",
    "MappedFile",
    "MemoryCopy",
    "give_data",
    "inbox_pair",
    "open_mapped",
    "refuse_data",
]

ALIGNMENT = 64  # of each part of a copy, in bytes
_HEAD = struct.Struct("<QQQ")  # number, offset, size


class MemoryCopy:
    """A copy of data in anonymous memory, whose descriptor is closed with the last reference to this object.

    Args:
        parts: the data.

    Attributes:
        fd: the descriptor.
        offsets: of each part, in bytes.
        parts: the copies.
        size: of all, in bytes.

    Raises:
        OSError: if the platform has no such memory, or too little of it.
    """

    def __init__(self, parts: Sequence[Buffer]) -> None:
        memory = SharedMemory.create()
        if memory is None:
            raise OSError("this platform has no anonymous memory to share")
        self.fd = memory.fd
        weakref.finalize(self, os.close, memory.fd)
        self.size, offsets = 0, []
        for part in parts:
            offsets.append(self.size)
            self.size += len(part) + -len(part) % ALIGNMENT
        self.offsets = tuple(offsets)
        view = memoryview(memory.allocate(max(1, self.size))).cast("B")
        self.parts = [view[offset : offset + len(part)] for offset, part in zip(offsets, parts, strict=True)]
        for ours, part in zip(self.parts, parts, strict=True):
            ours[:] = part


def inbox_pair() -> tuple[socket.socket, socket.socket]:
    """Return the giver's and the reader's end of a new connection.

    Raises:
        OSError: if there are no descriptors left.
    """
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        sock.setblocking(True)  # whatever `socket.setdefaulttimeout` says
    return pair


def give_data(sock: socket.socket, number: int, fd: int, offset: int, size: int, loan: int | None = None) -> None:
    """Let the reader map a part of a file.

    Args:
        sock: the giver's end.
        number: of the data; numbers ascend.
        fd: of the file.
        offset, size: of the part, in bytes.
        loan: the end of a pipe, which the reader closes once it does not use the memory any more; None: the memory
            lives as long as its mapping.

    Raises:
        OSError: if the reader has ended.
    """
    socket.send_fds(sock, [_HEAD.pack(number, offset, size)], [fd] if loan is None else [fd, loan])


def refuse_data(sock: socket.socket, number: int) -> None:
    """Tell the reader that it does not get the data of this number.

    Raises:
        OSError: if the reader has ended.
    """
    sock.send(_HEAD.pack(number, 0, 0))


class DataInbox:
    """The reader's end.

    Args:
        fd: its descriptor, which this owns.
    """

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)

    def take(self, number: int) -> memoryview | None:
        """Wait for the data of this number, and map them; data of other numbers that come before are dropped.

        Returns:
            The data, which may be written to; None if they can't be had.
        """
        while True:
            try:
                message, fds, complete = receive_fds(self._sock, _HEAD.size, 2)
            except OSError:
                return None
            try:
                if len(message) != _HEAD.size:  # the giver has ended
                    return None
                given, offset, size = _HEAD.unpack(message)
                if given == number:
                    return _map(fds, offset, size) if fds and complete else None
            finally:
                for fd in fds:
                    os.close(fd)


def _map(fds: Sequence[int], offset: int, size: int) -> memoryview | None:
    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        memory = mmap.mmap(
            fds[0], offset - begin + size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=begin
        )
    except (OSError, ValueError):
        return None
    for loan in fds[1:]:
        # the memory is unmapped when the last array over it is gone
        weakref.finalize(memory, os.close, os.dup(loan)).atexit = False
    return memoryview(memory)[offset - begin :]


class MappedFile:
    """A file that this process has mapped, opened for reading.

    Attributes:
        fd: its descriptor, which the `with` block closes.
        offset: where in the file the address is.
    """

    def __init__(self, fd: int, offset: int) -> None:
        self.fd = fd
        self.offset = offset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self.fd)


def open_mapped(address: int) -> MappedFile | None:
    """Open the file that is mapped at an address of this process, by a descriptor of it that the parent process has.

    So a process finds memory that its parent shares with it, even if it has closed its own descriptor. A child of Ray's
    node process finds the object store in this way.

    Returns:
        The file; None if there is none, or the parent process does not let it.
    """
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
            for line in maps:
                area, _, offset, device, inode, *_ = line.split()
                begin, end = (int(text, 16) for text in area.split("-"))
                if begin <= address < end:
                    break
            else:
                return None
        major, minor = (int(text, 16) for text in device.split(":"))
        wanted = os.makedev(major, minor), int(inode)
        descriptors = f"/proc/{os.getppid()}/fd"
        for name in os.listdir(descriptors):
            with contextlib.suppress(OSError):  # it is closed meanwhile
                about = os.stat(f"{descriptors}/{name}")
                if (about.st_dev, about.st_ino) == wanted and stat.S_ISREG(about.st_mode):
                    fd = os.open(f"{descriptors}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                    return MappedFile(fd, address - begin + int(offset, 16))
    except OSError:
        pass
    return None
