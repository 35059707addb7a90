"""Descriptors that one process passes to another over a socket."""

from __future__ import annotations

import array
import socket

__all__ = ["receive"]


def receive(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int], bool]:
    """Read once, with the descriptors that come along: processes that others start here don't inherit these.

    Args:
        sock: where from.
        size: how many bytes at most.
        most: how many descriptors at most.

    Returns:
        The bytes, the descriptors, and whether those are all that were sent.
    """
    fds = array.array("i")
    # not `socket.recv_fds`, which passes no flags on: another thread may start a process at any moment
    data, beside, flags, _ = sock.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, sent in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(sent[: len(sent) - len(sent) % fds.itemsize])
    return data, list(fds), not flags & socket.MSG_CTRUNC
