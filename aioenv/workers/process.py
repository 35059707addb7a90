"""A running worker process as its parent sees it, whether it was spawned or forked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from asyncio.subprocess import Process as SubProcess
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from aioenv.memory import Marker
from aioenv.wire.messages import WHERE
from aioenv.wire.orders import SIZE, Exited, unpack
from aioenv.workers.channel import Channel, ScatterChannel, StreamsChannel
from aioenv.workers.forkserver import ForkServer
from aioenv.workers.requests import Requests

__all__ = ["ForkedProcess", "Output", "Process", "SpawnedProcess", "Streams", "kill_group"]

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
    marker: Marker | None

    @property
    def returncode(self) -> int | None:
        """Its exit code, `-N` for signal N; None while that is not known."""

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
        """Kill it without waiting."""


def kill_group(pid: int, sig: signal.Signals) -> None:
    """Send a signal to a worker and whatever it has started that is still in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(pid, sig)
        else:
            os.kill(pid, sig)


def _make_channel(ends: Streams, requests: Requests) -> Channel:
    if isinstance(ends, socket.socket):
        return ScatterChannel(ends, requests)
    return StreamsChannel(*ends, requests)


class _Watched:
    """A process whose end its pidfd tells."""

    def __init__(self, pid: int, pidfd: int | None, marker: Marker | None) -> None:
        self.pid = pid
        self.marker = marker
        self.exited = asyncio.Event()
        self._pidfd = pidfd
        self._loop = asyncio.get_running_loop()
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._on_exit)

    def signal(self, sig: signal.Signals) -> None:
        """See `Process`."""
        kill_group(self.pid, sig)
        if self._pidfd is not None:
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
        self._unwatch()

    def _unmark(self) -> None:
        marker, self.marker = self.marker, None
        if marker is not None:
            marker.close()

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _leave(self) -> None:
        """It is being killed, and nobody waits: what its loop would do, were it not closed, is done here."""
        if self._loop.is_closed():
            self._unwatch()


class SpawnedProcess(_Watched):
    """A process of its own, started by asyncio.

    Args:
        process: the process.
        ends: this side's ends of the channel.
        guardian: who kills its group when this process is gone; None where there is none.
        marker: see `Process`.
    """

    def __init__(self, process: SubProcess, ends: Streams, guardian: ForkServer | None, marker: Marker | None) -> None:
        assert process.stderr
        pidfd = None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(process.pid)
        super().__init__(process.pid, pidfd, marker)
        if pidfd is None:  # asyncio is told all the same, and tells its protocol; no public way leads there
            protocol: Any = process._protocol  # type: ignore[attr-defined]
            told = protocol.process_exited

            def process_exited() -> None:
                told()
                self._on_exit()

            protocol.process_exited = process_exited
            if process.returncode is not None:  # it has been told already
                self._on_exit()
        self.output = Output(process.stderr, self.exited)
        self._process = process
        self._ends = ends
        self._guardian = guardian

    @property
    def returncode(self) -> int | None:
        """See `Process`."""
        return self._process.returncode

    def channel(self, requests: Requests) -> Channel:
        """See `Process`."""
        return _make_channel(self._ends, requests)

    async def reap(self) -> None:
        """See `Process`. (asyncio's `wait` would wait for grandchildren that hold our pipes.)"""
        for _ in range(int(_REAP_S / 0.005)):
            if self._process.returncode is not None:
                return
            await asyncio.sleep(0.005)

    async def release(self) -> None:
        """See `Process`."""
        self._unwatch()
        self._unmark()
        kill_group(self.pid, signal.SIGKILL)
        # no public way to close the pipes when a stranger holds their other ends
        self._process._transport.close()  # type: ignore[attr-defined]
        guardian, self._guardian = self._guardian, None
        if guardian is not None:
            guardian.let_go(self.pid)
            await guardian.release()

    def abandon(self) -> None:
        """See `Process`."""
        self.signal(signal.SIGKILL)
        self._leave()
        guardian, self._guardian = self._guardian, None
        if guardian is not None:
            guardian.let_go(self.pid)
            guardian.abandon()


class ForkedProcess(_Watched):
    """A process that a fork server forked; the server reaps it and tells how it ended.

    Args:
        pid: its process id.
        pidfd: its process, as a descriptor.
        status: where the server tells of its end; closed here.
        ends: this side's ends of the channel.
        output: what it prints.
        close_streams: closes those of `ends` and `output` that are asyncio's.
        server: its server.
        marker: see `Process`.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int,
        status: socket.socket,
        ends: Streams,
        output: asyncio.StreamReader,
        close_streams: Callable[[], None],
        server: ForkServer,
        marker: Marker | None,
    ) -> None:
        super().__init__(pid, pidfd, marker)
        self.output = Output(output, self.exited)
        self.returncode: int | None = None
        self._ends = ends
        self._close_streams = close_streams
        self._server: ForkServer | None = server
        self._status = status
        self._reaped = asyncio.Event()
        asyncio.get_running_loop().add_reader(status.fileno(), self._on_status)

    def _on_status(self) -> None:
        message = None
        with contextlib.suppress(OSError):
            data = self._status.recv(4096)
            message = unpack(data[SIZE.size :]) if data else None
        if isinstance(message, Exited):
            self.returncode = message.returncode
        else:  # the server has ended: the kernel has killed its workers, and nobody what they had started
            kill_group(self.pid, signal.SIGKILL)
            self.returncode = -signal.SIGKILL
        self._reaped.set()
        self._close_status()

    def _close_status(self) -> None:
        if self._status.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._status.fileno())
            self._status.close()

    def channel(self, requests: Requests) -> Channel:
        """See `Process`."""
        return _make_channel(self._ends, requests)

    async def reap(self) -> None:
        """See `Process`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await self._reaped.wait()

    async def release(self) -> None:
        """See `Process`. The server has killed its group, when the number could not mean another yet."""
        self._unwatch()
        self._unmark()
        self._close_status()
        self._close_streams()
        server, self._server = self._server, None
        if server is not None:
            await server.release()

    def abandon(self) -> None:
        """See `Process`."""
        if not self.exited.is_set():
            self.signal(signal.SIGKILL)
        self._leave()
        server, self._server = self._server, None
        if server is not None:
            server.abandon()
