"""A worker that is no process but a thread of this one, for debugging: breakpoints in envs stop at this terminal."""

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
    from aioenv.process.connection import Requests

__all__ = ["RunHere", "ThreadProcess"]

_log = logging.getLogger("aioenv")

# The loop of a worker: called on the thread with its descriptor of the channel, the cell of its marker, and a
# descriptor of shared memory, which it closes; None if there is no such memory.
RunHere = Callable[[int, memoryview, int | None], None]

# How long a thread may take to see that its channel is closed, in seconds: longer if its env runs.
_END_S = 0.2
_JOIN_S = 1.0


class ThreadProcess:
    """A thread in the place of a process (see `Process`): the same frames, over a socketpair.

    Its end is the end of its channel. It can't be killed: one that hangs in an env is left to itself, as a daemon,
    which does not keep the program from ending.

    Args:
        mine, theirs: the two ends of the channel.
        memory: what is shared with it, a descriptor of its own.
        run: what it does.
        name: of the thread.
    """

    def __init__(self, mine: socket.socket, theirs: socket.socket, memory: int | None, run: RunHere, name: str) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.marker: CurrentRow | None = CurrentRow(None)
        self.exited = asyncio.Event()
        nothing = asyncio.StreamReader()  # what it prints goes where this process prints
        nothing.feed_eof()
        self.output = Output(nothing, self.exited)
        self._loop = asyncio.get_running_loop()
        self._mine = mine
        self._theirs = theirs
        self._name = name
        work = (run, theirs.fileno(), self.marker.cell, memory)
        self._thread = threading.Thread(target=self._work, args=work, name=f"aioenv-{name}", daemon=True)
        self._thread.start()

    def _work(self, run: RunHere, fd: int, mark: memoryview, memory: int | None) -> None:
        code: int | None = None
        try:
            run(fd, mark, memory)
            code = 0
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        finally:
            self._theirs.close()  # here alone, or somebody else's descriptor might have its number by then
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                self._loop.call_soon_threadsafe(self._end, code)

    def _end(self, code: int | None) -> None:
        if not self.exited.is_set():
            self.returncode = code
            self.exited.set()

    def channel(self, requests: Requests) -> Channel:
        """See `Process`."""
        return ScatterChannel(self._mine, requests)

    def signal(self, sig: signal.Signals) -> None:
        """See `Process`: whatever the signal, its channel is closed, which it sees when it next reads or writes."""
        self.abandon()

    def ask_where(self) -> bool:
        """See `Process`: a debugger can tell."""
        return False

    async def reap(self) -> None:
        """See `Process`. One that hangs in an env is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.exited.wait()
        if self.exited.is_set():
            return
        with contextlib.suppress(Exception):  # of a handler: its end must be told
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
