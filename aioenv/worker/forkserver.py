"""The fork server: a single-threaded process that has imported what workers need, and forks them.

It is also the guardian: when its parent is gone, for any reason, it kills the process groups of all workers, spawned
ones too. It ends when its control socket does.

The parent starts `python -c` (see `bootstrap` in `process/environment.py`). A fork server that only guards spawned
workers preloads no module.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from aioenv.ipc.forkserver_messages import (
    SIZE,
    ExitedNotice,
    ForkedNotice,
    ForkRefused,
    ForkRequest,
    GuardRequest,
    ImportingNotice,
    ReleaseRequest,
    UnfitNotice,
    pack,
    unpack,
)
from aioenv.ipc.frame_io import receive_fds
from aioenv.platform import declare_worker_process
from aioenv.worker import boot
from aioenv.worker.boot import IGNORABLE, prepare_streams_for_pipes
from aioenv.worker.mujoco_setup import prepare_mujoco

__all__ = ["main"]

_MAX_FDS = 6
# How often a server checks that its parent is alive while it imports a module, in seconds.
_WATCH_S = 0.5
# How many bytes of modules' output to forward: the parent's stream takes them before the worker runs.
_MAX_OUTPUT = 1 << 15
# Prefixes of links in /proc/self/fd that are connections, or devices.
_CONNECTIONS = ("socket:", "/dev/dri/", "/dev/nvidia", "/dev/dxg", "/dev/kfd")


class WorkerDescriptors(NamedTuple):
    """A forked worker's descriptors."""

    read: int
    write: int
    output: int
    current_row: int | None  # see `ipc.memory.CurrentRow`
    memory: int | None  # see `ipc.memory.SharedMemory`


class Server:
    """Serves one process, its parent.

    Args:
        control: the socket that requests come from.
        parent_pid: the parent; the server cleans up and ends once it is gone.
    """

    def __init__(self, control: socket.socket, parent_pid: int) -> None:
        self._control = control
        self._parent_pid = parent_pid
        self._workers: dict[int, socket.socket] = {}  # pid → status socket
        self._guarded: set[int] = set()
        self._imported: set[str] = set()
        self._envs: list[str] = []  # classes of envs whose models were compiled last
        self._unfit: UnfitNotice | None = None
        self._on_child: Any = signal.SIG_DFL  # the handler of workers, which a module may have set
        self._forwarded = 0  # how many bytes of its output were forwarded with a worker

    def serve(self) -> WorkerDescriptors | None:
        """Serve until the end and return None; in a forked worker return the worker's descriptors."""
        parent = os.pidfd_open(self._parent_pid)
        wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wakeup fd needs a handler
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # the thread that has started this process may have blocked signals
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, signal.SIGALRM))
        poller = select.poll()
        for fd in (self._control.fileno(), parent, wake):
            poller.register(fd, select.POLLIN)
        while True:
            if os.getppid() != self._parent_pid:  # it died before the pidfd was there
                return None
            ready = [fd for fd, _ in poller.poll()]
            if parent in ready:
                return None
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._control.fileno() in ready:
                request, fds, complete = self._receive()
                if request is None:
                    return None
                descriptors = self._handle(request, fds, complete)
                if descriptors is not None:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, self._on_child)
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                    for fd in (parent, wake, wake_write):
                        os.close(fd)
                    return descriptors

    def _receive(self) -> tuple[Any, list[int], bool]:
        """Return the next request, its descriptors, and whether that is all of them; (None, …) at the end."""
        try:
            head, fds, complete = receive_fds(self._control, SIZE.size, _MAX_FDS)
            if len(head) < SIZE.size:
                return None, fds, True
            size = SIZE.unpack(head)[0]
            request = unpack(self._control.recv(size, socket.MSG_WAITALL))
            return request, fds, complete
        except ConnectionError:
            return None, [], True

    def _handle(self, request: Any, fds: list[int], complete: bool) -> WorkerDescriptors | None:
        match request:
            case GuardRequest(pid):
                self._guarded.add(pid)
            case ReleaseRequest(pid):
                self._guarded.discard(pid)
            case ForkRequest(preload, sys_path, marked, shares, log_level) if fds:
                status, *rest = fds
                if not complete:  # too many are open here; its workers live on
                    _refuse(ForkRefused(errno.EMFILE), socket.socket(fileno=status), rest)
                    return None
                sys.path[:] = sys_path
                status_socket = socket.socket(fileno=status)
                self._preload(preload, status_socket, log_level)
                return self._fork(status_socket, rest, marked, shares)
        return None

    def _preload(self, needed: Sequence[str], status_socket: socket.socket, log_level: int) -> None:
        """Import modules one by one, to know which one makes this process unfit to fork, or hangs."""
        new_modules = [name for name in needed if name not in self._imported]
        if new_modules:
            prepare_mujoco()  # for models that a module loads when it is imported
            importlib.import_module("aioenv.worker.process_setup").send_log_records(log_level)
        for name in new_modules:
            if self._unfit is not None:
                return
            self._imported.add(name)
            module = name.partition(":")[0]
            _send(status_socket, ImportingNotice(module))
            before = _count_threads()  # a debugger's threads, say, are not this module's
            connections = _open_connections()
            # an import error is raised again by the worker that needs the module
            with contextlib.suppress(BaseException), self._watch_processes():
                if module == "mujoco":
                    importlib.import_module("aioenv.worker.mujoco_gl").import_undecided()
                importlib.import_module(module)
            if _count_threads() > before or not _open_connections() <= connections:
                self._unfit = UnfitNotice(module)
        # once here, so that no worker has to
        self._compile([name for name in needed if ":" in name], modules_changed=bool(new_modules))
        if new_modules:
            boot.become_subreaper()
            if "gymnasium" in sys.modules:
                importlib.import_module("aioenv.worker.specs").read_registry()
            gc.collect()
            importlib.import_module("aioenv.worker.forkserver_warmup").fill_holes()
            gc.freeze()  # else the first full collection of each worker copies all of it

    def _compile(self, envs: list[str], *, modules_changed: bool) -> None:
        """Compile the models of these classes of envs if that was not done yet."""
        if modules_changed and "mujoco" in sys.modules:  # the first model takes 0.2 MiB and a millisecond more
            self._envs = []
            with contextlib.suppress(Exception):
                sys.modules["mujoco"].MjModel.from_xml_string("<mujoco/>")
        if envs and envs != self._envs:
            self._envs = envs
            with self._watch_processes():
                importlib.import_module("aioenv.worker.forkserver_warmup").compile_models(envs)

    @contextlib.contextmanager
    def _watch_processes(self) -> Iterator[None]:
        """Watch the parent and the workers while a module is imported, which may take forever."""

        def reap(*_: Any) -> None:
            for pid in list(self._workers):  # one by one: processes that a module starts are its own
                with contextlib.suppress(ChildProcessError):
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                        self._reap_worker(pid)

        def check_parent(*_: Any) -> None:
            if os.getppid() != self._parent_pid:
                self.end()
                os._exit(0)
            reap()

        before = signal.signal(signal.SIGALRM, check_parent)
        others = signal.signal(signal.SIGCHLD, reap)
        signal.setitimer(signal.ITIMER_REAL, _WATCH_S, _WATCH_S)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGALRM) is check_parent:  # else the module has set its own
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            # if a module's handler ignored the signal, this process would not learn of a worker's end
            if (on_child := signal.signal(signal.SIGCHLD, others)) is not reap:
                self._on_child = on_child

    def _fork(
        self, status: socket.socket, fds: list[int], has_current_row: bool, shares: bool
    ) -> WorkerDescriptors | None:
        """Fork a worker; return its descriptors in the worker, and None here."""
        rest = [*fds]
        memory = rest.pop() if shares else None
        current_row = rest.pop() if has_current_row else None
        *channel, output = rest
        if self._unfit is not None:
            _refuse(self._unfit, status, fds)
            return None
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a module may have replaced it
                stream.flush()
        self._forward_output(output)
        _reseed_generators()  # before the fork, so that workers copy no pages for it
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as exc:  # too many processes, or too little memory; its other workers live on
            _refuse(ForkRefused(exc.errno or errno.EAGAIN), status, fds)
            return None
        if pid == 0:
            status.close()
            self._become_worker(server_pid)
            return WorkerDescriptors(channel[0], channel[-1], output, current_row, memory)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here too, so that it is done before the parent knows the pid
        for fd in fds:
            os.close(fd)
        self._workers[pid] = status
        pidfd = os.pidfd_open(pid)
        _send(status, ForkedNotice(pid), pidfd)
        os.close(pidfd)
        return None

    def _forward_output(self, output: int) -> None:
        """Write new output of imported modules to the pipe of the next worker."""
        with contextlib.suppress(OSError):  # a module may have replaced the file
            end = os.fstat(2).st_size
            printed = os.pread(2, end - self._forwarded, self._forwarded)
            self._forwarded = end
            if (more := len(printed) - _MAX_OUTPUT) > 0:
                printed = b"[%d bytes before this]\n" % more + printed[more:]
            os.write(output, printed)

    def _become_worker(self, server_pid: int) -> None:
        """Leave the server's process group and close its descriptors, in the child."""
        os.setpgid(0, 0)
        boot.die_with_parent(server_pid)
        for name in IGNORABLE:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        self._control.close()
        for sibling in self._workers.values():
            sibling.close()

    def _reap(self) -> None:
        """Reap workers that have ended, and kill the rest of their process groups."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._reap_worker(ended.si_pid)

    def _reap_worker(self, pid: int) -> None:
        """Kill the group of a worker that has ended, reap it, and tell the parent."""
        if pid in self._workers:
            _kill_group(pid)  # before the pid can be reused
        try:
            code: int | None = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:  # a module that reaps all children was faster
            code = None
        worker = self._workers.pop(pid, None)
        if worker is not None:
            _send(worker, ExitedNotice(code))
            worker.close()

    def end(self) -> None:
        """Kill all workers, processes that modules have started when they were imported, and this process."""
        for pid in (*self._workers, *self._guarded):
            _kill_group(pid)
        self._reap()  # orphans of workers in other groups
        if os.getpgrp() == os.getpid():
            _kill_group(os.getpid())


def _count_threads() -> int:
    """Count all threads of this process; without /proc, those that Python knows."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _open_connections() -> set[str]:
    """Return open sockets and graphics devices: two processes that share one (to an X server, say) break it."""
    links = set()
    with contextlib.suppress(OSError):  # no /proc
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the directory itself
                links.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in links if link.startswith(_CONNECTIONS)}


def _send(status: socket.socket, message: Any, *fds: int) -> None:
    with contextlib.suppress(OSError):  # the asker is gone
        socket.send_fds(status, [pack(message)], fds)


def _refuse(why: UnfitNotice | ForkRefused, status: socket.socket, fds: Sequence[int]) -> None:
    """Send why there is no worker, and close the descriptors that were meant for it."""
    _send(status, why)
    status.close()
    for fd in fds:
        os.close(fd)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _reseed_generators() -> None:
    """Seed the global generators of imported packages, or all workers would draw the same numbers.

    Python's `random` reseeds itself after a fork.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:  # 128 bits, as numpy does itself
        numpy.random.seed(numpy.frombuffer(os.urandom(16), numpy.uint32))
    generator = getattr(torch, "default_generator", None)  # it may have failed to import
    if generator is not None:
        generator.seed()


def main(parent_pid: int, control_fd: int) -> None:
    """Run a fork server until the control socket or the parent ends; in a forked process, run the worker."""
    declare_worker_process()
    variables = dict(os.environ)
    for name in ("SIGINT", *IGNORABLE):  # signals to a whole job, say: the server ends with its parent
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    prepare_streams_for_pipes()
    os.set_inheritable(control_fd, False)  # it was, to get here
    server = Server(socket.socket(fileno=control_fd), parent_pid)
    descriptors = server.serve()
    if descriptors is None:
        server.end()
        os._exit(0)
    os.dup2(descriptors.output, 2)
    os.close(descriptors.output)
    boot.run_worker(descriptors.read, descriptors.write, descriptors.current_row, descriptors.memory, variables)
