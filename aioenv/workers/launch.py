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
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aioenv import nested
from aioenv.errors import WorkerStartError
from aioenv.memory import Marker
from aioenv.wire.orders import SIZE, Fork, Forked, Importing, Refused, Unfit, unpack
from aioenv.workers import forkserver
from aioenv.workers.environment import bootstrap, import_path, server_environment
from aioenv.workers.faults import oom_kills_before
from aioenv.workers.forkserver import ForkServer
from aioenv.workers.output import LOG
from aioenv.workers.process import ForkedProcess, Process, SpawnedProcess, Streams, kill_group
from aioenv.workers.tasks import hiding_tasks, own_task, to_the_end
from aioenv.workers.thread import RunHere, ThreadProcess

__all__ = ["START_METHODS", "check_start", "launch", "launch_here"]

START_METHODS = ("spawn", "forkserver") if forkserver.AVAILABLE else ("spawn",)

# What every worker needs, whatever its envs import besides.
_PRELOAD = ("numpy", "gymnasium", "mujoco", "aioenv.host.worker", "aioenv.host.single.service")

# How much the stream reader holds before it stops reading; one step's reply should fit.
_STREAM_LIMIT = 4 << 20
# And of what a worker prints: one that floods waits for us to log it, and its last lines are not far behind.
_OUTPUT_LIMIT = 1 << 14
# The buffers of both ends of a socket: as for pipes, one step's frame of images should fit. The kernel may allow less.
_SOCKET_BYTES = 1 << 20

# What to do when the system has no room for a worker.
_HINTS = {
    errno.EMFILE: "; raise the limit (ulimit -n), or take fewer workers",
    errno.EAGAIN: "; so many processes are not allowed (ulimit -u, or a limit of the container's): take fewer workers",
    errno.ENOMEM: "; memory does not suffice: take fewer workers",
}

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
        raise _not_started(exc) from exc


async def launch(
    start: str, channel: str, environ: Mapping[str, str], preload: Sequence[str], memory: int | None = None
) -> Process:
    """Start a worker process.

    If this is cancelled, nothing is left of it.

    Args:
        start: one of `START_METHODS`.
        channel: one of `channel.CHANNELS`.
        environ: its environment variables; a forked worker must still be told (START).
        preload: modules for a fork server to import first, and classes of envs there ("module:Class").
        memory: a descriptor of memory that it shares (see `memory.Shared`); None: it shares none.

    Raises:
        WorkerStartError: if it can't be started.
    """
    nested.check()
    if not hasattr(os, "readv"):
        raise WorkerStartError(_NO_READV)
    oom_kills_before()
    try:
        if start == "spawn":
            return await _spawn(channel, environ, memory)
        while True:
            process = await _fork(channel, environ, preload, memory)
            if isinstance(process, Unfit):
                _unfit_modules.add(process.module)
                continue
            return process
    except (OSError, ValueError) as exc:  # a ValueError: of variables that no process can have
        raise _not_started(exc) from exc


def _not_started(exc: Exception) -> WorkerStartError:
    hint = _HINTS.get(getattr(exc, "errno", None) or 0, "")
    return WorkerStartError(f"a worker can't be started: {exc}{hint}")


async def _spawn(channel: str, environ: Mapping[str, str], memory: int | None) -> Process:
    guardian = ForkServer.acquire(None) if forkserver.AVAILABLE else None
    worker = mine = theirs = marker = None
    shared = Marker.create()
    try:
        if shared is not None:
            marker = Marker(shared)
        read_fd, write_fd = 0, 1
        if channel == "scatter":
            mine, theirs = _socketpair()
            read_fd = write_fd = theirs.fileno()
        creating = asyncio.create_subprocess_exec(
            *bootstrap("boot", f"{os.getpid()}, {read_fd}, {write_fd}, {shared}, {memory}"),
            stdin=DEVNULL if theirs else PIPE,
            stdout=DEVNULL if theirs else PIPE,
            stderr=PIPE,
            env=environ,
            limit=_OUTPUT_LIMIT if theirs else _STREAM_LIMIT,  # asyncio has one for both streams
            start_new_session=True,
            pass_fds=[fd for fd in (theirs.fileno() if theirs else None, shared, memory) if fd is not None],
        )
        starting = own_task(hiding_tasks(creating))
        try:  # also if this is cancelled: uvloop would not wait for what it has started, and nobody else knows of it
            await to_the_end(starting)
        finally:
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                process = starting.result()
                ends: Any = mine if mine is not None else (process.stdin, process.stdout)
                worker = SpawnedProcess(process, ends, guardian, marker)
        starting.result()  # or its error
        assert worker is not None
        if guardian is not None:
            await guardian.guard(worker.pid)
        return worker
    except BaseException:
        if mine is not None:
            mine.close()
        if worker is not None:
            worker.abandon()
            try:
                await to_the_end(own_task(worker.reap()))
            finally:
                await worker.release()
        else:
            if marker is not None:
                marker.close()
            if guardian is not None:
                await guardian.release()
        raise
    finally:
        if theirs is not None:
            theirs.close()
        if shared is not None:
            os.close(shared)


async def _fork(
    channel: str, environ: Mapping[str, str], preload: Sequence[str], memory: int | None
) -> Process | Unfit:
    server = ForkServer.acquire(server_environment(environ))
    closers: list[Callable[[], object]] = []  # of this side, should anything fail
    theirs: list[int] = []
    try:
        if channel == "scatter":
            mine, other = _socketpair()
            closers.append(mine.close)
            theirs.append(other.detach())
            ends: Streams = mine
        else:
            child_reads, parent_writes = os.pipe()
            theirs.append(child_reads)
            writer = await _writer(parent_writes, closers)
            parent_reads, child_writes = os.pipe()
            theirs.append(child_writes)
            ends = writer, await _reader(parent_reads, _STREAM_LIMIT, closers)
        parent_reads, child_writes = os.pipe()
        theirs.append(child_writes)
        output = await _reader(parent_reads, _OUTPUT_LIMIT, closers)
        shared = Marker.create()
        marker = None
        if shared is not None:
            theirs.append(shared)
            marker = Marker(shared)
            closers.append(marker.close)
        if memory is not None:
            theirs.append(os.dup(memory))
        status, other = socket.socketpair(type=socket.SOCK_SEQPACKET)  # its few messages keep their bounds
        status.setblocking(False)
        closers.append(status.close)
        theirs.insert(0, other.detach())  # where there is no room for all of them, it can be said
        needed = tuple(name for name in (*_PRELOAD, *preload) if name.partition(":")[0] not in _unfit_modules)
        level = LOG.getEffectiveLevel()
        await server.order(Fork(needed, import_path(), marker is not None, memory is not None, level), theirs)
        for fd in theirs:
            os.close(fd)
        theirs = []
        message, fds = await _answer(server, status)
        if isinstance(message, Unfit):
            server.retire()
            for close in closers:
                close()
            await server.release()
            return message

        def close_streams() -> None:
            for close in closers:
                if close not in (status.close, marker and marker.close):
                    close()

        return ForkedProcess(message.pid, fds[0], status, ends, output, close_streams, server, marker)
    except BaseException as exc:
        if server.importing is not None and isinstance(exc, asyncio.CancelledError):  # it may have taken too long
            exc.add_note(f"the fork server (pid {server.pid}) was importing {server.importing}")
        for close in closers:
            close()
        for fd in theirs:
            os.close(fd)
        await server.release()
        raise


async def _answer(server: ForkServer, status: socket.socket) -> tuple[Forked | Unfit, list[int]]:
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
        if not isinstance(message, Importing):
            break
        server.importing = message.module
    server.importing = None
    if isinstance(message, Refused):
        raise OSError(message.errno, os.strerror(message.errno))
    assert isinstance(message, (Forked, Unfit))
    if isinstance(message, Forked) and not fds:  # the kernel drops a descriptor that there is no room for
        kill_group(message.pid, signal.SIGKILL)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return message, fds


def _socketpair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(True)  # with a timeout by default (`socket.setdefaulttimeout`) neither end would block
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
    return pair


async def _reader(fd: int, limit: int, closers: list[Callable[[], object]]) -> asyncio.StreamReader:
    """A stream reader of a pipe, as those of asyncio's subprocesses."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit)
    pipe = os.fdopen(fd, "rb", 0)
    await _connected(loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe), closers)
    return reader


async def _writer(fd: int, closers: list[Callable[[], object]]) -> asyncio.StreamWriter:
    """A stream writer of a pipe, likewise."""
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(fd, "wb", 0)
    transport, protocol = await _connected(loop.connect_write_pipe(asyncio.streams.FlowControlMixin, pipe), closers)
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _connected(connecting: Coroutine[Any, Any, Any], closers: list[Callable[[], object]]) -> tuple[Any, Any]:
    """Connect a pipe to the end, which takes a few turns of the loop, even if this is cancelled.

    A cancelled uvloop would close the descriptor itself, and the pipe's file object would close whatever has its
    number by then.
    """
    task = own_task(connecting)
    try:
        transport, protocol = await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda task: task.cancelled() or task.exception() or task.result()[0].close())
        await asyncio.wait([task])
        raise
    closers.append(transport.close)
    return transport, protocol


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for one message with its descriptors; (b"", []) at the end of the stream."""
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock.fileno())
    try:
        data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
    except ConnectionError:
        return b"", []
    return data, fds
