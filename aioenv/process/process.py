"""A running worker process as its parent sees it, whether it was spawned or forked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aioenv.ipc.forkserver_messages import SIZE, ExitedNotice, unpack
from aioenv.ipc.memory import CurrentRow
from aioenv.ipc.messages import WHERE
from aioenv.process.channel import Channel, ScatterChannel, StreamsChannel
from aioenv.process.child import Child, exit_code, kill_group
from aioenv.process.forkserver import ForkServer

if TYPE_CHECKING:
    from aioenv.process.connection import Requests

__all__ = ["ForkedProcess", "Output", "PipeEnds", "Process", "SpawnedProcess", "Streams"]

_REAP_S = 2.0  # how long the exit code may take to become known after the exit

# What a channel is made of, on this side.
Streams = tuple[asyncio.StreamWriter, asyncio.StreamReader] | socket.socket


class Output(NamedTuple):
    """What a process prints, and whether there is an end to it: set when the process has ended."""

    reader: asyncio.StreamReader
    ended: asyncio.Event


class Process(Protocol):
    """A worker process.

    Attributes:
        pid: its process id, and that of its process group.
        output: what it prints.
        exited: set when it has ended. Where the platform can't tell, the end of its channel does.
        marker: which row it runs; None once it is released, or where the platform has no such memory.
    """

    pid: int
    output: Output
    exited: asyncio.Event
    marker: CurrentRow | None

    @property
    def returncode(self) -> int | None:
        """Its exit code, `-N` for signal N; None while, or if, that is not known."""

    def channel(self, requests: Requests) -> Channel:
        """Its channel; to be called once."""

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to it, and to whatever it has started that is still in its process group."""

    def ask_where(self) -> bool:
        """Have it print where it is; False if it can't be asked. What it has started is not."""

    async def reap(self) -> None:
        """Once it has ended: wait until the exit code is known."""

    async def release(self) -> None:
        """Once it has ended: kill what it left behind in its process group, and free all that belongs to it."""

    def abandon(self) -> None:
        """Kill it without waiting; where its loop does not run, free all that belongs to it, too. Idempotent."""


class PipeEnds(NamedTuple):
    """This side's ends of what a process and its parent talk by.

    Attributes:
        ends: those of its channel.
        output: what it prints.
        marker: which row it runs; None where the platform has no such memory.
    """

    ends: Streams
    output: asyncio.StreamReader
    marker: CurrentRow | None


class _WatchedProcess:
    """A process whose end its pidfd tells.

    Args:
        pid: its process id.
        pidfd: its process, as a descriptor; None where there are none.
        wires: what it is talked to by.
        server: the fork server that forked it, or guards it; None where there is none.
        close: closes the wires, also when the loop is closed.
    """

    def __init__(
        self, pid: int, pidfd: int | None, wires: PipeEnds, server: ForkServer | None, close: Callable[[], None]
    ) -> None:
        self.pid = pid
        self.marker = wires.marker
        self.exited = asyncio.Event()
        self.output = Output(wires.output, self.exited)
        self._ends = wires.ends
        self._close_wires = close
        self._server = server
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._on_exit)

    def channel(self, requests: Requests) -> Channel:
        """See `Process`."""
        ends = self._ends
        return ScatterChannel(ends, requests) if isinstance(ends, socket.socket) else StreamsChannel(*ends, requests)

    def signal(self, sig: signal.Signals) -> None:
        """See `Process`."""
        kill_group(self.pid, sig)
        if self._pidfd is not None and not self.exited.is_set():
            with contextlib.suppress(OSError):  # it has ended
                if os.getpgid(self.pid) != self.pid:  # an env has moved it into another group
                    signal.pidfd_send_signal(self._pidfd, sig)

    def ask_where(self) -> bool:
        """See `Process`."""
        if WHERE is None or self._pidfd is None:
            return False
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, WHERE)
            return True
        return False

    def _on_exit(self) -> None:
        self.exited.set()
        if self._pidfd is not None:  # the kernel may yet be asked how it ended
            self._stop_reading(self._pidfd)

    def _unwatch(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._stop_reading(pidfd)
            os.close(pidfd)

    def _stop_reading(self, fd: int) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)

    def _close(self) -> None:
        """Close all descriptors and memory of this side."""
        self._unwatch()
        self.marker = None
        self._close_wires()

    def _forsake(self) -> None:
        """Do what would be done on its loop, if that does not run any more."""
        if not self._loop.is_running():
            self._close()
            if not self._loop.is_closed():  # if it runs again, nobody waits there
                self.exited.set()

    def _take_server(self) -> ForkServer | None:
        server, self._server = self._server, None
        return server


class SpawnedProcess(_WatchedProcess):
    """A process of its own: a child of this one.

    Args:
        child: the process.
        wires, close: see `_WatchedProcess`.
        guardian: who kills its group when this process is gone; None where there is none.
    """

    def __init__(self, child: Child, wires: PipeEnds, guardian: ForkServer | None, close: Callable[[], None]) -> None:
        super().__init__(child.pid, child.pidfd, wires, guardian, close)
        self._child = child
        if child.pidfd is None:
            threading.Thread(target=self._wait, name=f"aioenv-wait-{self.pid}", daemon=True).start()

    def _wait(self) -> None:
        self._child.reap()
        kill_group(self.pid)  # at once: nothing keeps its number any more
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._on_exit)

    @property
    def returncode(self) -> int | None:
        """See `Process`."""
        return self._child.returncode

    def _unwatch(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._stop_reading(pidfd)
            self._child.close()

    async def reap(self) -> None:
        """See `Process`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await self.exited.wait()
        if self.exited.is_set():
            self._child.bury()

    async def release(self) -> None:
        """See `Process`."""
        self._close()
        if (guardian := self._take_server()) is not None:
            guardian.let_go(self.pid)
            await guardian.release()

    def abandon(self) -> None:
        """See `Process`."""
        if not self._child.reaped:
            self.signal(signal.SIGKILL)
        if (guardian := self._take_server()) is not None:
            guardian.let_go(self.pid)
            guardian.abandon()
        self._forsake()

    def _forsake(self) -> None:
        if not self._loop.is_running():
            self._child.bury()
        super()._forsake()


class ForkedProcess(_WatchedProcess):
    """A process that a fork server forked; the server reaps it and tells how it ended.

    Args:
        pid, pidfd, wires, server, close: see `_WatchedProcess`.
        status: where the server tells of its end.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        status: socket.socket,
        wires: PipeEnds,
        server: ForkServer,
        close: Callable[[], None],
    ) -> None:
        super().__init__(pid, pidfd, wires, server, close)
        self.returncode: int | None = None
        self._status = status
        self._reaped = asyncio.Event()
        self._loop.add_reader(status.fileno(), self._on_status)

    def _on_status(self) -> None:
        message = None
        with contextlib.suppress(OSError):
            data = self._status.recv(4096)
            message = unpack(data[SIZE.size :]) if data else None
        if isinstance(message, ExitedNotice):
            self.returncode = message.returncode
        else:  # the server has ended: the kernel has killed its workers, and nobody what they had started
            kill_group(self.pid)
            self.returncode = -signal.SIGKILL
        self._reaped.set()
        self._close_status()

    def _close_status(self) -> None:
        if self._status.fileno() >= 0:
            self._stop_reading(self._status.fileno())
            self._status.close()

    async def reap(self) -> None:
        """See `Process`."""
        if self._server is not None and not self._reaped.is_set():
            self._server.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await self._reaped.wait()
        if self.returncode is None and self.exited.is_set() and self._pidfd is not None:
            self.returncode = exit_code(self._pidfd)

    def _close(self) -> None:
        self._close_status()
        super()._close()

    async def release(self) -> None:
        """See `Process`. The server has killed its group, when the number could not mean another yet."""
        self._close()
        if (server := self._take_server()) is not None:
            await server.release()

    def abandon(self) -> None:
        """See `Process`."""
        if not self.exited.is_set():
            self.signal(signal.SIGKILL)
        if (server := self._take_server()) is not None:
            server.abandon()
        self._forsake()
