"""The fork server: a process without threads that has imported what workers need, and forks them.

It is the guardian too: when the process that it serves is gone, in whatever way, it kills the process groups of all
workers, its own and those that were spawned. It ends when its control socket does.

The parent starts `python -c` (see `bootstrap` in `process/environment.py`). A mere guardian imports next to nothing.
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
from aioenv.ipc.frame_io import receive
from aioenv.platform import declare_worker_process
from aioenv.worker import boot
from aioenv.worker.boot import IGNORABLE, prepare_streams_for_pipes
from aioenv.worker.mujoco_setup import prepare_mujoco

__all__ = ["main"]

_MAX_FDS = 6
# How often a server that is importing a module looks whether its parent is alive, in seconds.
_WATCH_S = 0.5
# So many bytes of what modules print are told: the parent's stream takes them before there is a worker to read of.
_MAX_SAID = 1 << 15
# What links in /proc/self/fd of open connections begin with.
_CONNECTIONS = ("socket:", "/dev/dri/", "/dev/nvidia", "/dev/dxg", "/dev/kfd")


class WorkerDescriptors(NamedTuple):
    """A forked worker's descriptors."""

    read: int
    write: int
    output: int
    marker: int | None  # see `memory.Marker`
    memory: int | None  # see `memory.Shared`


class Server:
    """Serves one process.

    Args:
        control: orders come from here.
        parent_pid: the process to outlive by no more than it takes to clear up.
    """

    def __init__(self, control: socket.socket, parent_pid: int) -> None:
        self._control = control
        self._parent_pid = parent_pid
        self._workers: dict[int, socket.socket] = {}  # pid → status socket
        self._guarded: set[int] = set()
        self._imported: set[str] = set()
        self._envs: list[str] = []  # whose models were compiled last
        self._unfit: UnfitNotice | None = None
        self._on_child: Any = signal.SIG_DFL  # what workers do at SIGCHLD: what a module has set
        self._said = 0  # how many bytes of what it has printed some worker has handed on

    def serve(self) -> WorkerDescriptors | None:
        """Serve until the end; returns None then. In a forked worker it returns too, with the worker's descriptors."""
        parent = os.pidfd_open(self._parent_pid)
        wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # the thread that has started this may have kept signals to itself
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
                order, fds, complete = self._receive()
                if order is None:
                    return None
                ends = self._obey(order, fds, complete)
                if ends is not None:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, self._on_child)
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                    for fd in (parent, wake, wake_write):
                        os.close(fd)
                    return ends

    def _receive(self) -> tuple[Any, list[int], bool]:
        """The next order, the descriptors beside it, and whether that is all of them; (None, …) at the end."""
        try:
            head, fds, complete = receive(self._control, SIZE.size, _MAX_FDS)
            if len(head) < SIZE.size:
                return None, fds, True
            size = SIZE.unpack(head)[0]
            order = unpack(self._control.recv(size, socket.MSG_WAITALL))
            return order, fds, complete
        except ConnectionError:
            return None, [], True

    def _obey(self, order: Any, fds: list[int], complete: bool) -> WorkerDescriptors | None:
        match order:
            case GuardRequest(pid):
                self._guarded.add(pid)
            case ReleaseRequest(pid):
                self._guarded.discard(pid)
            case ForkRequest(preload, sys_path, marked, shares, log_level) if fds:
                status, *rest = fds
                if not complete:  # this process may have no more open: its workers live on
                    _refuse(ForkRefused(errno.EMFILE), socket.socket(fileno=status), rest)
                    return None
                sys.path[:] = sys_path
                asker = socket.socket(fileno=status)
                self._preload(preload, asker, log_level)
                return self._fork(asker, rest, marked, shares)
        return None

    def _preload(self, needed: Sequence[str], asker: socket.socket, log_level: int) -> None:
        """Import modules, one by one, to know which one it is that must not be copied, or takes for ever."""
        news = [name for name in needed if name not in self._imported]
        if news:
            prepare_mujoco()  # of models that a module loads when it is imported
            importlib.import_module("aioenv.worker.process_setup").tell_records(log_level)
        for name in news:
            if self._unfit is not None:
                return
            self._imported.add(name)
            module = name.partition(":")[0]
            _tell(asker, ImportingNotice(module))
            before = _count_threads()  # a debugger's, say, or of `sitecustomize`: no module is to blame for those
            connections = _connections()
            # whoever needs it will be told why it can't be imported
            with contextlib.suppress(BaseException), self._watching():
                if module == "mujoco":
                    importlib.import_module("aioenv.worker.mujoco_gl").import_undecided()
                importlib.import_module(module)
            if _count_threads() > before or not _connections() <= connections:
                self._unfit = UnfitNotice(module)
        # once here, so that no worker has to
        self._compile([name for name in needed if ":" in name], anew=bool(news))
        if news:
            boot.become_subreaper()
            if "gymnasium" in sys.modules:
                importlib.import_module("aioenv.worker.registry").read_registry()
            gc.collect()
            importlib.import_module("aioenv.worker.forkserver_warmup").fill_holes()
            gc.freeze()  # or the first full collection of each worker copies all of it

    def _compile(self, envs: list[str], *, anew: bool) -> None:
        """Have the models of these classes of envs ready, if they are not."""
        if anew and "mujoco" in sys.modules:  # what the first model needs is 0.2 MiB, and a millisecond
            self._envs = []
            with contextlib.suppress(Exception):
                sys.modules["mujoco"].MjModel.from_xml_string("<mujoco/>")
        if envs and envs != self._envs:
            self._envs = envs
            with self._watching():
                importlib.import_module("aioenv.worker.forkserver_warmup").compile_models(envs)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """While a module is imported, which may take for ever: see whether the parent ends, or workers do."""

        def reap(*_: Any) -> None:
            for pid in list(self._workers):  # alone: what a module starts when it is imported is its own
                with contextlib.suppress(ChildProcessError):
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                        self._take_leave(pid)

        def look(*_: Any) -> None:
            if os.getppid() != self._parent_pid:
                self.end()
                os._exit(0)
            reap()

        before = signal.signal(signal.SIGALRM, look)
        others = signal.signal(signal.SIGCHLD, reap)
        signal.setitimer(signal.ITIMER_REAL, _WATCH_S, _WATCH_S)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGALRM) is look:  # else the module has one of its own
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            # a module may have set another: this process would hear of no worker's end if that ignored the signal
            if (on_child := signal.signal(signal.SIGCHLD, others)) is not reap:
                self._on_child = on_child

    def _fork(self, status: socket.socket, fds: list[int], marked: bool, shares: bool) -> WorkerDescriptors | None:
        """Fork a worker; returns its descriptors in it, and None here."""
        rest = [*fds]
        memory = rest.pop() if shares else None
        marker = rest.pop() if marked else None
        *channel, output = rest
        if self._unfit is not None:
            _refuse(self._unfit, status, fds)
            return None
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a module may have put something else in its place
                stream.flush()
        self._hand_on(output)
        _draw_anew()  # here, where the pages that this takes are no copies
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as exc:  # too many processes, or too little memory: its other workers live on
            _refuse(ForkRefused(exc.errno or errno.EAGAIN), status, fds)
            return None
        if pid == 0:
            status.close()
            self._become_worker(server_pid)
            return WorkerDescriptors(channel[0], channel[-1], output, marker, memory)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here too, so that it is done when the parent hears of it
        for fd in fds:
            os.close(fd)
        self._workers[pid] = status
        pidfd = os.pidfd_open(pid)
        _tell(status, ForkedNotice(pid), pidfd)
        os.close(pidfd)
        return None

    def _hand_on(self, output: int) -> None:
        """Have a worker's pipe begin with what modules have printed when they were imported, once."""
        with contextlib.suppress(OSError):  # a module may have put something else in the place of that file
            end = os.fstat(2).st_size
            said = os.pread(2, end - self._said, self._said)
            self._said = end
            if (more := len(said) - _MAX_SAID) > 0:
                said = b"[%d bytes before this]\n" % more + said[more:]
            os.write(output, said)

    def _become_worker(self, server_pid: int) -> None:
        """In the child: leave the server's group, and let go of what is the server's."""
        os.setpgid(0, 0)
        boot.die_with_parent(server_pid)
        for name in IGNORABLE:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        self._control.close()
        for sibling in self._workers.values():
            sibling.close()

    def _reap(self) -> None:
        """Take leave of workers that have ended, and of what they left behind in their groups."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._take_leave(ended.si_pid)

    def _take_leave(self, pid: int) -> None:
        if pid in self._workers:
            _kill_group(pid)  # while the number can't have become anybody else's
        try:
            code: int | None = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:  # a module that reaps all children has been faster
            code = None
        worker = self._workers.pop(pid, None)
        if worker is not None:
            _tell(worker, ExitedNotice(code))
            worker.close()

    def end(self) -> None:
        """Kill whatever is left, what modules have started when they were imported, and this process, among it."""
        for pid in (*self._workers, *self._guarded):
            _kill_group(pid)
        self._reap()  # what workers have left behind, and is in no group of theirs
        if os.getpgrp() == os.getpid():
            _kill_group(os.getpid())


def _count_threads() -> int:
    """All threads of this process; where there is no /proc, those that Python knows."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def _connections() -> set[str]:
    """Sockets and graphics devices that are open: two processes that talk over one (to an X server, say) break it."""
    links = set()
    with contextlib.suppress(OSError):  # no /proc
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one of the directory itself
                links.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in links if link.startswith(_CONNECTIONS)}


def _tell(status: socket.socket, message: Any, *fds: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked is gone
        socket.send_fds(status, [pack(message)], fds)


def _refuse(why: UnfitNotice | ForkRefused, status: socket.socket, fds: Sequence[int]) -> None:
    """Tell that there is no worker, and let go of what it was to have."""
    _tell(status, why)
    status.close()
    for fd in fds:
        os.close(fd)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _draw_anew() -> None:
    """Seed the global generators of what was imported, or all workers would draw the same (`random` does it itself)."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:  # 128 bits, as it does itself
        numpy.random.seed(numpy.frombuffer(os.urandom(16), numpy.uint32))
    generator = getattr(torch, "default_generator", None)  # it may have failed to import
    if generator is not None:
        generator.seed()


def main(parent_pid: int, control_fd: int) -> None:
    """Be a fork server until the control socket ends or the parent does; or the worker that was forked."""
    declare_worker_process()
    variables = dict(os.environ)
    for name in ("SIGINT", *IGNORABLE):  # what is told to every process of a job, say: it ends with its parent
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    prepare_streams_for_pipes()
    os.set_inheritable(control_fd, False)  # it was, to get here
    server = Server(socket.socket(fileno=control_fd), parent_pid)
    ends = server.serve()
    if ends is None:
        server.end()
        os._exit(0)
    os.dup2(ends.output, 2)
    os.close(ends.output)
    boot.run_worker(ends.read, ends.write, ends.marker, ends.memory, variables)
