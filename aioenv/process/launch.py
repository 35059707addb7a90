"""Starting workers: how, and the ways to do it.

*Spawn* starts a new interpreter; *forkserver* forks a process that has already imported what workers need. Spawned
processes are started on the loop's own thread, which lives as long as what it started (the kernel ties "die with
your parent" to the thread). Every worker leads a process group of its own, so that Ctrl-C does not reach it and all
that it starts can be ended with it. For debugging a worker may be a thread of this process instead.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from aioenv.errors import WorkerStartError
from aioenv.ipc.forkserver_messages import (
    SIZE,
    ForkedNotice,
    ForkRefused,
    ForkRequest,
    ImportingNotice,
    UnfitNotice,
    unpack,
)
from aioenv.ipc.frame_io import receive
from aioenv.ipc.memory import CurrentRow
from aioenv.platform import check_nested_start
from aioenv.process import forkserver
from aioenv.process.channel import PipeReader, PipeWriter
from aioenv.process.child import Child, kill_group
from aioenv.process.environment import bootstrap, import_path
from aioenv.process.failures import not_started, oom_kills_before
from aioenv.process.forkserver import ForkServer
from aioenv.process.output import LOG
from aioenv.process.process import ForkedProcess, PipeEnds, Process, SpawnedProcess, Streams
from aioenv.process.thread_process import RunHere, ThreadProcess

__all__ = ["START_METHODS", "LaunchResources", "check_start", "launch", "launch_here"]

START_METHODS = ("spawn", "forkserver") if forkserver.AVAILABLE else ("spawn",)

# What every worker needs, whatever its envs import besides.
_PRELOAD = ("numpy", "gymnasium", "mujoco", "aioenv.worker.loop", "aioenv.worker.env_service")

# Packages that choose an OpenGL when they draw. (MuJoCo is made to: see `worker/mujoco_gl.py`.)
_CHOOSE_LATE = ("numpy", "gymnasium", "mujoco", "aioenv")

# How much the stream reader holds before it stops reading; one step's reply should fit.
_STREAM_LIMIT = 4 << 20
# And of what a worker prints: one that floods waits for us to log it, and its last lines are not far behind.
_OUTPUT_LIMIT = 1 << 14
# The buffers of both ends of a socket: as for pipes, one step's frame of images should fit. The kernel may allow less.
_SOCKET_BYTES = 1 << 20

# Windows is such a platform.
_NO_READV = (
    "worker processes take sockets that can be read into arrays, which this platform does not have (Linux, macOS and "
    'WSL do); backend="native" needs none'
)

# Modules that start threads or connect when they are imported: no fork server takes them a second time.
_unfit_modules: set[str] = set()


def check_start(start: str | None) -> str:
    """The launch policy to use: for None "forkserver" where the platform has it, else "spawn".

    Raises:
        ValueError: if it is "fork", which is refused, or not known here.
    """
    if start is None:
        return START_METHODS[-1]
    if start == "fork":
        raise ValueError(
            'start="fork" is refused: a forked copy of a process with threads, an event loop or OpenGL contexts '
            'can hang or corrupt either side. Use start="forkserver" or start="spawn".'
        )
    if start not in START_METHODS:
        known = ", ".join(repr(name) for name in START_METHODS)
        raise ValueError(f"start: expected one of {known} or None, got {start!r}")
    return start


def launch_here(run: RunHere, memory: int | None, name: str) -> Process:
    """Start a worker on a thread of this process; otherwise as `launch`.

    Args:
        run: what it does there.
        memory: see `launch`.
        name: of the thread.
    """
    if not hasattr(os, "readv"):
        raise WorkerStartError(f"debug=True: {_NO_READV}")
    mine = theirs = own = None
    try:
        own = None if memory is None else os.dup(memory)
        mine, theirs = _socketpair()
        return ThreadProcess(mine, theirs, own, run, name)
    except (OSError, RuntimeError) as exc:  # a RuntimeError: of a thread that can't be started
        for end in (mine, theirs):
            if end is not None:
                end.close()
        if own is not None:
            os.close(own)
        raise not_started("a worker", exc) from exc


async def launch(
    start: str,
    channel: str,
    environ: Mapping[str, str],
    preload: Sequence[str],
    memory: int | None = None,
    held: LaunchResources | None = None,
) -> Process:
    """Start a worker process.

    If this is cancelled, or its loop is closed, nothing is left of it.

    Args:
        start: one of `START_METHODS`.
        channel: one of `channel.CHANNELS`.
        environ: its environment variables; a forked worker must still be told (START).
        preload: modules for a fork server to import first, and classes of envs there ("module:Class").
        memory: a descriptor of memory that it shares (see `memory.Shared`); None: it shares none.
        held: knows what is held for it meanwhile.

    Raises:
        WorkerStartError: if it can't be started.
    """
    check_nested_start()
    if not hasattr(os, "readv"):
        raise WorkerStartError(_NO_READV)
    oom_kills_before()
    if held is None:
        held = LaunchResources()
    try:
        if start == "spawn":
            return await _spawn(channel, environ, memory, held)
        while isinstance(answer := await _fork(channel, environ, preload, memory, held), UnfitNotice):
            _unfit_modules.add(answer.module)
            await held.release()
        return answer
    except GeneratorExit:  # its loop was closed: nothing can be waited for any more
        held.abandon()
        raise
    except (OSError, ValueError) as exc:  # a ValueError: of variables that no process can have
        await held.release()
        raise not_started("a worker", exc) from exc
    except BaseException:
        await held.release()
        raise


async def _spawn(channel: str, environ: Mapping[str, str], memory: int | None, held: LaunchResources) -> Process:
    guardian = held.server = ForkServer.acquire(None) if forkserver.AVAILABLE else None
    wires, theirs = _wires(channel, held)
    reads, writes = theirs.channel[0], theirs.channel[-1]
    if channel == "streams":
        stdin, stdout, passed = reads, writes, []
        reads, writes = 0, 1
    else:
        stdin, stdout, passed = subprocess.DEVNULL, subprocess.DEVNULL, [reads]
    process = subprocess.Popen(  # noqa: ASYNC220 (asyncio's own blocks for as long)
        bootstrap("boot", f"{os.getpid()}, {reads}, {writes}, {theirs.marker}, {memory}"),
        stdin=stdin,
        stdout=stdout,
        stderr=theirs.output,
        env=environ,
        start_new_session=True,
        pass_fds=[*passed, *(fd for fd in (theirs.marker, memory) if fd is not None)],
    )
    child = held.spawned = Child(process)
    held.close_theirs()
    if guardian is not None:
        await guardian.guard(child.pid)
    return SpawnedProcess(child, wires, guardian, held.hand_over())


async def _fork(
    channel: str, environ: Mapping[str, str], preload: Sequence[str], memory: int | None, held: LaunchResources
) -> Process | UnfitNotice:
    needed = tuple(name for name in (*_PRELOAD, *preload) if name.partition(":")[0] not in _unfit_modules)
    server = held.server = ForkServer.acquire(environ, chooses=any(map(_may_choose, needed)))
    wires, theirs = _wires(channel, held)
    status, other = socket.socketpair(type=socket.SOCK_SEQPACKET)  # its few messages keep their bounds
    status.setblocking(False)
    held.mine(status.close)
    # its status first: where there is no room for all of them, it can be said
    fds = [held.theirs(other.detach()), *theirs.channel, theirs.output]
    if theirs.marker is not None:
        fds.append(theirs.marker)
    if memory is not None:
        fds.append(held.theirs(os.dup(memory)))
    level = LOG.getEffectiveLevel()
    try:
        await server.order(
            ForkRequest(needed, import_path(), theirs.marker is not None, memory is not None, level), fds
        )
        held.close_theirs()
        message, fds = await _answer(server, status)
    except asyncio.CancelledError as exc:
        if server.importing is not None:  # it may have taken too long
            exc.add_note(f"the fork server (pid {server.pid}) was importing {server.importing}")
        raise
    if isinstance(message, UnfitNotice):
        server.retire()
        return message
    return ForkedProcess(message.pid, fds[0], status, wires, server, held.hand_over())


def _may_choose(name: str) -> bool:
    """Whether importing a module, or the module of a class, may choose an OpenGL for good."""
    return name.partition(":")[0].partition(".")[0] not in _CHOOSE_LATE


class _Theirs(NamedTuple):
    """The worker's ends of what it and its parent talk by: descriptors."""

    channel: tuple[int, ...]  # one for both ways, or where it reads and where it writes
    output: int
    marker: int | None


def _wires(channel: str, held: LaunchResources) -> tuple[PipeEnds, _Theirs]:
    """What a new worker and its parent are to talk by: this side's ends, and the other's."""
    ends: Streams
    if channel == "scatter":
        ends, other = _socketpair()
        held.mine(ends.close)
        theirs: tuple[int, ...] = (held.theirs(other.detach()),)
    else:
        reads, fd = os.pipe()
        held.theirs(reads)
        writer = PipeWriter(fd)
        held.mine(writer.close)
        reader, writes = _pipe(_STREAM_LIMIT, held)
        ends, theirs = (writer.stream, reader), (reads, writes)
    output, prints = _pipe(_OUTPUT_LIMIT, held)
    marker = None
    shared = CurrentRow.create()
    if shared is not None:
        held.theirs(shared)
        marker = CurrentRow(shared)
        held.mine(marker.close)
    return PipeEnds(ends, output, marker), _Theirs(theirs, prints, shared)


def _pipe(limit: int, held: LaunchResources) -> tuple[asyncio.StreamReader, int]:
    """A pipe from a worker: what comes of it here, and the worker's end."""
    fd, other = os.pipe()
    held.theirs(other)
    reader = PipeReader(fd, limit)
    held.mine(reader.close)
    return reader.stream, other


async def _answer(server: ForkServer, status: socket.socket) -> tuple[ForkedNotice | UnfitNotice, list[int]]:
    """What a fork server says to an order, with the descriptor of a worker; it may have to import something first.

    Raises:
        OSError: if it can't fork, or there is no room for the descriptor.
        WorkerStartError: if it has ended.
    """
    while True:
        data, fds = await _receive(asyncio.get_running_loop(), status)
        if not data:
            raise server.ended()
        message = unpack(data[SIZE.size :])
        if not isinstance(message, ImportingNotice):
            break
        server.importing = message.module
    server.importing = None
    if isinstance(message, ForkRefused):
        raise OSError(message.errno, os.strerror(message.errno))
    assert isinstance(message, (ForkedNotice, UnfitNotice))
    if isinstance(message, ForkedNotice) and not fds:  # the kernel drops a descriptor that there is no room for
        kill_group(message.pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return message, fds


def _socketpair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(True)  # with a timeout by default (`socket.setdefaulttimeout`) neither end would block
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
    return pair


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for one message with its descriptors; (b"", []) at the end of the stream."""
    readable = asyncio.Event()
    fd = sock.fileno()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        if not loop.is_closed():
            loop.remove_reader(fd)
    try:
        data, fds, _ = receive(sock, 4096, 1)
    except ConnectionError:
        return b"", []
    return data, fds


class LaunchResources:
    """All that is opened for a worker that is being started, until its `Process` has it.

    Attributes:
        server: the fork server that forks it, or guards it.
        spawned: its process, where that is a child of this one.
    """

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self.spawned: Child | None = None
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._mine = ExitStack()
        self._theirs = ExitStack()

    def mine(self, close: Callable[[], object]) -> None:
        """Keep something of this side, which this closes."""
        self._mine.callback(close)

    def theirs(self, fd: int) -> int:
        """Keep a descriptor for the worker, until it has a copy."""
        self._theirs.callback(os.close, fd)
        return fd

    def close_theirs(self) -> None:
        """The worker has its own."""
        self._theirs.close()

    def hand_over(self) -> Callable[[], None]:
        """A `Process` has all of it now; gives what closes this side's."""
        self.server = self.spawned = None
        return self._mine.pop_all().close

    async def release(self) -> None:
        """Let go of all of it."""
        self._close()
        server, self.server = self.server, None
        if server is not None:
            await server.release()

    def abandon(self) -> None:
        """Let go of all of it without a loop to wait on; where that runs, whoever starts the worker is to do it."""
        if self._loop.is_running() or self._pid != os.getpid():  # a forked copy has nothing to end
            return
        self._close()
        server, self.server = self.server, None
        if server is not None:
            server.abandon()

    def _close(self) -> None:
        spawned, self.spawned = self.spawned, None
        if spawned is not None:
            spawned.bury()
            spawned.close()
            if self.server is not None:
                self.server.let_go(spawned.pid)
        self._theirs.close()
        self._mine.close()
