"""A running worker process as its parent sees it: spawned, or forked by the fork server."""

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
from aioenv.ipc.messages import STACK_SIGNAL
from aioenv.process.channel import Channel
from aioenv.process.child import Child, exit_code, kill_group
from aioenv.process.forkserver import ForkServer

if TYPE_CHECKING:
    from aioenv.process.connection import OutstandingRequests

__all__ = ["ForkedProcess", "Output", "ParentEnds", "Process", "SpawnedProcess"]


_REAP_S = 2.0  # how long the exit code may take to become known after the exit


class Output(NamedTuple):
    """The output of a process.

    Attributes:
        reader: the stream of everything that it prints.
        ended: set when the process has ended: no more output will come.
    """

    reader: asyncio.StreamReader
    ended: asyncio.Event


class RunningRow(Protocol):
    """The row that a worker runs."""

    @property
    def row(self) -> int | None:
        """The row; None while no env runs."""


class Process(Protocol):
    """A worker process. Each launch method returns one (see `launch.py`).

    Attributes:
        pid: the process id, which is also the id of its process group.
        output: everything that it prints.
        exited: set when it has ended. Where the platform can't tell, the end of its channel does.
        node: the name of its machine; empty: this one.
        fault: why nothing more can be heard of it although it may not have ended; None if that is not so.
    """

    pid: int
    output: Output
    exited: asyncio.Event
    node: str
    fault: str | None

    @property
    def current_row(self) -> RunningRow | None:
        """The row that it runs; None once it is released, or where the platform has no such memory."""

    @property
    def returncode(self) -> int | None:
        """The exit code, or `-N` for signal N; None while it runs, or if it is unknown."""

    def open_channel(self, requests: OutstandingRequests) -> Channel:
        """Return the channel; to be called once."""

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to the process, and to everything that it has started in its process group."""

    def request_stack_dump(self) -> bool:
        """Make the process, not its children, print its stack; return False if it can't be asked."""

    async def reap(self) -> None:
        """Wait until the exit code is known. The process must have ended."""

    async def release(self) -> None:
        """Kill the rest of its process group, and free all of its resources. The process must have ended."""

    def abandon(self) -> None:
        """Kill the process without waiting; if its loop does not run, free its resources too. Idempotent."""


class ParentEnds(NamedTuple):
    """This side's ends of the connections to a process.

    Attributes:
        connect: makes the channel (see `ChannelEnds`).
        output: the stream of everything that it prints.
        current_row: the row that it runs; None where the platform has no such memory.
    """

    connect: Callable[[OutstandingRequests], Channel]
    output: asyncio.StreamReader
    current_row: CurrentRow | None


class _WatchedProcess:
    """A process whose end is reported by its pidfd.

    Args:
        pid: the process id.
        pidfd: a descriptor of the process; None where the platform has none.
        ends: this side's ends of the connections.
        server: the fork server that forked it, or guards it; None where the platform has none.
        close: closes the ends, even if the loop is closed.
    """

    def __init__(
        self, pid: int, pidfd: int | None, ends: ParentEnds, server: ForkServer | None, close: Callable[[], None]
    ) -> None:
        self.pid = pid
        self.current_row = ends.current_row
        self.node = ""
        self.fault: str | None = None
        self.exited = asyncio.Event()
        self.output = Output(ends.output, self.exited)
        self._connect = ends.connect
        self._close_ends = close
        self._server = server
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._on_exit)

    def open_channel(self, requests: OutstandingRequests) -> Channel:
        """See `Process`."""
        return self._connect(requests)

    def signal(self, sig: signal.Signals) -> None:
        """See `Process`."""
        kill_group(self.pid, sig)
        if self._pidfd is not None and not self.exited.is_set():
            with contextlib.suppress(OSError):  # it has ended
                if os.getpgid(self.pid) != self.pid:  # an env has moved it into another group
                    signal.pidfd_send_signal(self._pidfd, sig)

    def request_stack_dump(self) -> bool:
        """See `Process`."""
        if STACK_SIGNAL is None or self._pidfd is None:
            return False
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, STACK_SIGNAL)
            return True
        return False

    def _on_exit(self) -> None:
        self.exited.set()
        if self._pidfd is not None:  # it stays open: the kernel may be asked for the exit code
            self._stop_reading(self._pidfd)

    def _close_pidfd(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._stop_reading(pidfd)
            os.close(pidfd)

    def _stop_reading(self, fd: int) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)

    def _close(self) -> None:
        """Close all descriptors and memory of this side."""
        self._close_pidfd()
        self.current_row = None
        self._close_ends()

    def _free_if_loop_stopped(self) -> None:
        """Free everything here if the loop, which would do it later, does not run any more."""
        if not self._loop.is_running():
            self._close()
            if not self._loop.is_closed():  # if it runs again, no task must wait there
                self.exited.set()

    def _take_server(self) -> ForkServer | None:
        server, self._server = self._server, None
        return server


class SpawnedProcess(_WatchedProcess):
    """A child of this process.

    Args:
        child: the process.
        ends, close: see `_WatchedProcess`.
        guardian: the fork server that kills its group when this process is gone; None where the platform has none.
    """

    def __init__(self, child: Child, ends: ParentEnds, guardian: ForkServer | None, close: Callable[[], None]) -> None:
        super().__init__(child.pid, child.pidfd, ends, guardian, close)
        self._child = child
        if child.pidfd is None:
            threading.Thread(target=self._wait, name=f"aioenv-wait-{self.pid}", daemon=True).start()

    def _wait(self) -> None:
        self._child.reap()
        kill_group(self.pid)  # at once: the number may be reused from now on
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._on_exit)

    @property
    def returncode(self) -> int | None:
        """See `Process`."""
        return self._child.returncode

    def _close_pidfd(self) -> None:
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
            self._child.kill_and_reap()

    async def release(self) -> None:
        """See `Process`."""
        self._close()
        if (guardian := self._take_server()) is not None:
            guardian.unguard(self.pid)
            await guardian.release()

    def abandon(self) -> None:
        """See `Process`."""
        if not self._child.reaped:
            self.signal(signal.SIGKILL)
        if (guardian := self._take_server()) is not None:
            guardian.unguard(self.pid)
            guardian.abandon()
        if not self._loop.is_running():
            self._child.kill_and_reap()
        self._free_if_loop_stopped()


class ForkedProcess(_WatchedProcess):
    """A process that a fork server forked; the server reaps it and reports how it ended.

    Args:
        pid, pidfd, ends, server, close: see `_WatchedProcess`.
        status: the socket on which the server reports its end.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        status: socket.socket,
        ends: ParentEnds,
        server: ForkServer,
        close: Callable[[], None],
    ) -> None:
        super().__init__(pid, pidfd, ends, server, close)
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
        else:  # the server has ended: the kernel has killed its workers, but not the processes that they had started
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
        """See `Process`. The server has killed its group before the number could be reused."""
        self._close()
        if (server := self._take_server()) is not None:
            await server.release()

    def abandon(self) -> None:
        """See `Process`."""
        if not self.exited.is_set():
            self.signal(signal.SIGKILL)
        if (server := self._take_server()) is not None:
            server.abandon()
        self._free_if_loop_stopped()
