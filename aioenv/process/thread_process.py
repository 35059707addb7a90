"""A worker that is a thread of this process, for debugging: breakpoints in envs stop at this terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioenv.ipc.memory import CurrentRow
from aioenv.process.channel import Channel, ScatterChannel
from aioenv.process.process import Output

if TYPE_CHECKING:
    from aioenv.process.connection import OutstandingRequests

__all__ = ["ThreadProcess", "ThreadTarget"]

_log = logging.getLogger("aioenv")

# The main function of a worker. It is called on the thread with the descriptor of the channel, the cell of its current
# row, and a descriptor of shared memory (or None), which it closes.
ThreadTarget = Callable[[int, memoryview, int | None], None]

# How long a thread may take to notice that its channel is closed, in seconds. It takes longer while its env runs.
_END_S = 0.2
_JOIN_S = 1.0


class ThreadProcess:
    """A thread in place of a process (see `Process`): the same frames, over a socketpair.

    It ends when its channel ends. It can't be killed: a thread that hangs in an env is left running, as a daemon, which
    does not keep the program from ending.

    Args:
        ours, theirs: the two ends of the channel.
        memory: a descriptor of shared memory that the thread owns; None: it shares none.
        target: the function that it runs.
        name: the name of the thread.
    """

    def __init__(
        self, ours: socket.socket, theirs: socket.socket, memory: int | None, target: ThreadTarget, name: str
    ) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.current_row: CurrentRow | None = CurrentRow(None)
        self.exited = asyncio.Event()
        no_output = asyncio.StreamReader()  # a thread prints where this process prints
        no_output.feed_eof()
        self.output = Output(no_output, self.exited)
        self._loop = asyncio.get_running_loop()
        self._ours = ours
        self._theirs = theirs
        self._name = name
        args = (target, theirs.fileno(), self.current_row.cell, memory)
        self._thread = threading.Thread(target=self._run, args=args, name=f"aioenv-{name}", daemon=True)
        self._thread.start()

    def _run(self, target: ThreadTarget, fd: int, current_row: memoryview, memory: int | None) -> None:
        code: int | None = None
        try:
            target(fd, current_row, memory)
            code = 0
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        finally:
            self._theirs.close()  # only here: closed elsewhere, its number might belong to another file by now
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._on_end, code)

    def _on_end(self, code: int | None) -> None:
        if not self.exited.is_set():
            self.returncode = code
            self.exited.set()

    def open_channel(self, requests: OutstandingRequests) -> Channel:
        """See `Process`."""
        return ScatterChannel(self._ours, requests)

    def signal(self, sig: signal.Signals) -> None:
        """See `Process`. Any signal closes the channel, which the thread notices at its next read or write."""
        self.abandon()

    def request_stack_dump(self) -> bool:
        """See `Process`: a debugger shows the stack."""
        return False

    async def reap(self) -> None:
        """See `Process`. A thread that hangs in an env is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.exited.wait()
        if self.exited.is_set():
            return
        with contextlib.suppress(Exception):  # of a log handler: the end must be reported
            _log.warning(
                "%s has not ended: a thread can't be killed, so it is left to itself (it is a daemon, and does not "
                "keep the program from ending); without debug=True envs live in processes, which can be killed",
                self._name,
            )
        self.returncode = -signal.SIGKILL
        self.exited.set()

    async def release(self) -> None:
        """See `Process`."""
        if self._theirs.fileno() < 0:  # it has ended
            self._thread.join(_JOIN_S)

    def abandon(self) -> None:
        """See `Process`."""
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)
