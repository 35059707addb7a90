"""Launch workers: spawn a process, fork one from a fork server, or run a thread of this process.

*Spawn* starts a new interpreter; *forkserver* forks a process that has already imported what workers need. Spawned
processes are started on the loop's own thread, which lives as long as they do: the kernel ties "die with your parent"
to the thread. Each worker leads a process group of its own: Ctrl-C does not reach it, and everything that it starts can
be ended with it. A worker may also be a thread of this process.

Three questions about a worker have independent answers. This module answers how it is launched; `channel.py` by what
channel its frames travel; `ipc/memory.py` what memory it shares. To add a launch method (on this machine), write
a function like `_spawn` here and a class with the methods of `process.Process`. Then add a name to `START_METHODS`. A
method that can't pass descriptors on needs a channel that connects by other means, and shares no memory.
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
from aioenv.ipc.frame_io import receive_fds
from aioenv.ipc.memory import CurrentRow
from aioenv.platform import check_nested_start
from aioenv.process import forkserver
from aioenv.process.channel import PipeReader, open_channel_ends
from aioenv.process.child import Child, kill_group
from aioenv.process.environment import bootstrap, import_path
from aioenv.process.failures import LOG, cannot_start, oom_kills_at_start
from aioenv.process.forkserver import ForkServer
from aioenv.process.process import ForkedProcess, ParentEnds, Process, SpawnedProcess
from aioenv.process.thread_process import MakeServer, ThreadProcess

__all__ = ["START_METHODS", "LaunchResources", "check_start", "launch", "launch_thread"]

START_METHODS = ("spawn", "forkserver") if forkserver.AVAILABLE else ("spawn",)

# Modules that every worker needs, for any envs.
_PRELOAD = ("numpy", "gymnasium", "mujoco", "aioenv.worker.loop", "aioenv.worker.env_service")

# Packages that select an OpenGL when they draw, not when they are imported. (MuJoCo is made to by aioenv's worker.)
_SELECT_LATE = ("numpy", "gymnasium", "mujoco", "aioenv")

# The stream of a worker's output stops reading when it holds this much. A worker that floods it waits until its lines
# are logged, and its last lines are not far behind.
_OUTPUT_LIMIT = 1 << 14

# Windows is such a platform.
_NO_READV = (
    "worker processes take sockets that can be read into arrays, which this platform does not have (Linux, macOS and "
    'WSL do); backend="native" and num_workers=0 need none'
)

# Modules that start threads or connect when they are imported: fork servers don't import them again.
_unfit_modules: set[str] = set()


def check_start(start: str | None) -> str:
    """Return the launch method to use: for None "forkserver" where the platform has it, else "spawn".

    Raises:
        ValueError: if it is "fork", which is refused, or unknown on this platform.
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


def launch_thread(make_server: MakeServer, memory: int | None, name: str) -> ThreadProcess:
    """Launch a worker as a thread of this process; otherwise as `launch`.

    Args:
        make_server: makes what answers requests.
        memory: see `launch`.
        name: the name of the thread.
    """
    duplicate = None
    try:
        duplicate = None if memory is None else os.dup(memory)
        return ThreadProcess(make_server, duplicate, name)
    except (OSError, RuntimeError) as exc:  # RuntimeError: the thread can't be started
        if duplicate is not None:
            os.close(duplicate)
        raise cannot_start("a worker", exc) from exc


async def launch(
    start: str,
    channel: str,
    environ: Mapping[str, str],
    preload: Sequence[str],
    memory: int | None = None,
    resources: LaunchResources | None = None,
) -> Process:
    """Launch a worker process.

    If this is cancelled, or its loop is closed, nothing is left of the process.

    Args:
        start: one of `START_METHODS`.
        channel: one of `channel.CHANNELS`.
        environ: the environment variables; a forked worker gets them in its START message.
        preload: modules for a fork server to import first, and env classes there ("module:Class").
        memory: a descriptor of shared memory (see `memory.SharedMemory`); None: the worker shares none.
        resources: holds everything that is opened meanwhile, for callers that may have to release it.

    Raises:
        WorkerStartError: if the process can't be started.
    """
    check_nested_start()
    if not hasattr(os, "readv"):
        raise WorkerStartError(_NO_READV)
    oom_kills_at_start()
    if resources is None:
        resources = LaunchResources()
    try:
        if start == "spawn":
            return await _spawn(channel, environ, memory, resources)
        while isinstance(answer := await _fork(channel, environ, preload, memory, resources), UnfitNotice):
            _unfit_modules.add(answer.module)
            await resources.release()
        return answer
    except GeneratorExit:  # the loop was closed: nothing can be awaited any more
        resources.abandon()
        raise
    except (OSError, ValueError) as exc:  # ValueError: environment variables that no process can have
        await resources.release()
        raise cannot_start("a worker", exc) from exc
    except BaseException:
        await resources.release()
        raise


class LaunchResources:
    """Everything that is opened for a worker while it is launched; its `Process` owns it afterwards.

    Attributes:
        server: the fork server that forks the worker, or guards it.
        spawned: the process, if it is a child of this one.
    """

    def __init__(self) -> None:
        self.server: ForkServer | None = None
        self.spawned: Child | None = None
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._parent_ends = ExitStack()
        self._worker_fds = ExitStack()

    def add_parent_end(self, close: Callable[[], object]) -> None:
        """Add an end of this side, by the function that closes it."""
        self._parent_ends.callback(close)

    def add_worker_fd(self, fd: int) -> int:
        """Add a descriptor that is closed once the worker has a copy; return it."""
        self._worker_fds.callback(os.close, fd)
        return fd

    def close_worker_fds(self) -> None:
        """Close the worker's descriptors: it has copies."""
        self._worker_fds.close()

    def transfer(self) -> Callable[[], None]:
        """Let a `Process` own everything; return the function that closes this side's ends."""
        self.server = self.spawned = None
        return self._parent_ends.pop_all().close

    async def release(self) -> None:
        """Release everything. Idempotent."""
        self._close()
        server, self.server = self.server, None
        if server is not None:
            await server.release()

    def abandon(self) -> None:
        """Release everything without a loop to wait on. While the loop runs, the launching task has to do it."""
        if self._loop.is_running() or self._pid != os.getpid():  # a forked copy owns nothing
            return
        self._close()
        server, self.server = self.server, None
        if server is not None:
            server.abandon()

    def _close(self) -> None:
        spawned, self.spawned = self.spawned, None
        if spawned is not None:
            spawned.kill_and_reap()
            spawned.close()
            if self.server is not None:
                self.server.unguard(spawned.pid)
        self._worker_fds.close()
        self._parent_ends.close()


# ------------------------------------------------------------ launch methods


async def _spawn(channel: str, environ: Mapping[str, str], memory: int | None, resources: LaunchResources) -> Process:
    guardian = resources.server = ForkServer.acquire(None) if forkserver.AVAILABLE else None
    ends, theirs = _open_ends(channel, resources)
    reads, writes = theirs.channel[0], theirs.channel[-1]
    if theirs.as_stdio:
        stdin, stdout, passed = reads, writes, []
        reads, writes = 0, 1
    else:
        stdin, stdout, passed = subprocess.DEVNULL, subprocess.DEVNULL, [*theirs.channel]
    process = subprocess.Popen(  # noqa: ASYNC220 (asyncio's own blocks for as long)
        bootstrap("boot", f"{os.getpid()}, {reads}, {writes}, {theirs.current_row}, {memory}"),
        stdin=stdin,
        stdout=stdout,
        stderr=theirs.output,
        env=environ,
        start_new_session=True,
        pass_fds=[*passed, *(fd for fd in (theirs.current_row, memory) if fd is not None)],
    )
    child = resources.spawned = Child(process)
    resources.close_worker_fds()
    if guardian is not None:
        await guardian.guard(child.pid)
    return SpawnedProcess(child, ends, guardian, resources.transfer())


async def _fork(
    channel: str, environ: Mapping[str, str], preload: Sequence[str], memory: int | None, resources: LaunchResources
) -> Process | UnfitNotice:
    modules = tuple(name for name in (*_PRELOAD, *preload) if name.partition(":")[0] not in _unfit_modules)
    server = resources.server = ForkServer.acquire(environ, selects_opengl=any(map(_may_select_opengl, modules)))
    ends, theirs = _open_ends(channel, resources)
    status, other = socket.socketpair(type=socket.SOCK_SEQPACKET)  # which keeps the bounds of its few messages
    status.setblocking(False)
    resources.add_parent_end(status.close)
    # the status socket first: over it the server can report that it has no room for all descriptors
    fds = [resources.add_worker_fd(other.detach()), *theirs.channel, theirs.output]
    if theirs.current_row is not None:
        fds.append(theirs.current_row)
    if memory is not None:
        fds.append(resources.add_worker_fd(os.dup(memory)))
    request = ForkRequest(
        modules, import_path(), theirs.current_row is not None, memory is not None, LOG.getEffectiveLevel()
    )
    try:
        await server.send(request, fds)
        resources.close_worker_fds()
        message, fds = await _receive_answer(server, status)
    except asyncio.CancelledError as exc:
        if server.importing is not None:  # the import may be the reason for a timeout
            exc.add_note(f"the fork server (pid {server.pid}) was importing {server.importing}")
        raise
    if isinstance(message, UnfitNotice):
        server.retire()
        return message
    return ForkedProcess(message.pid, fds[0], status, ends, server, resources.transfer())


def _may_select_opengl(name: str) -> bool:
    """Return whether importing a module, or the module of a class, may select an OpenGL backend permanently."""
    return name.partition(":")[0].partition(".")[0] not in _SELECT_LATE


class _WorkerEnds(NamedTuple):
    """The descriptors that a new worker gets.

    Attributes:
        channel, as_stdio: see `ChannelEnds`.
        output: its stderr, and its stdout unless the channel is there.
        current_row: memory for the row that it runs; None where the platform has no such memory.
    """

    channel: tuple[int, ...]
    as_stdio: bool
    output: int
    current_row: int | None


def _open_ends(kind: str, resources: LaunchResources) -> tuple[ParentEnds, _WorkerEnds]:
    """Open a channel, an output pipe and the current-row memory for a new worker; return both sides' ends."""
    channel = open_channel_ends(kind)
    resources.add_parent_end(channel.close)
    for fd in channel.worker_fds:
        resources.add_worker_fd(fd)
    fd, output_fd = os.pipe()
    resources.add_worker_fd(output_fd)
    output = PipeReader(fd, _OUTPUT_LIMIT)
    resources.add_parent_end(output.close)
    current_row = None
    row_fd = CurrentRow.create()
    if row_fd is not None:
        resources.add_worker_fd(row_fd)
        current_row = CurrentRow(row_fd)
        resources.add_parent_end(current_row.close)
    theirs = _WorkerEnds(channel.worker_fds, channel.as_stdio, output_fd, row_fd)
    return ParentEnds(channel.connect, output.stream, current_row), theirs


async def _receive_answer(server: ForkServer, status: socket.socket) -> tuple[ForkedNotice | UnfitNotice, list[int]]:
    """Wait for a fork server's answer to a request, and the worker's pidfd; it may have to import modules first.

    Raises:
        OSError: if it can't fork, or this process has no room for the descriptor.
        WorkerStartError: if the server has ended.
    """
    while True:
        data, fds = await _receive(asyncio.get_running_loop(), status)
        if not data:
            raise server.ended_error()
        message = unpack(data[SIZE.size :])
        if not isinstance(message, ImportingNotice):
            break
        server.importing = message.module
    server.importing = None
    if isinstance(message, ForkRefused):
        raise OSError(message.errno, os.strerror(message.errno))
    assert isinstance(message, (ForkedNotice, UnfitNotice))
    if isinstance(message, ForkedNotice) and not fds:  # the kernel drops a descriptor that exceeds the limit
        kill_group(message.pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return message, fds


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
        data, fds, _ = receive_fds(sock, 4096, 1)
    except ConnectionError:
        return b"", []
    return data, fds
