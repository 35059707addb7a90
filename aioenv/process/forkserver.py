"""The parent's handle of fork servers: one for each set of variables that matter at import, shared, counted.

Variables that choose an OpenGL don't matter to a server as long as nothing that it has imported chooses.

What runs in such a process is `worker/forkserver.py`. A server without a set of variables of its own only guards
workers that were spawned.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import IO, Any, ClassVar

from aioenv.errors import WorkerStartError
from aioenv.ipc.forkserver_messages import GuardRequest, ReleaseRequest, pack
from aioenv.ipc.messages import readable_log_line
from aioenv.process.child import PIDFDS, Child
from aioenv.process.environment import bootstrap, graphics, identity

__all__ = ["AVAILABLE", "ForkServer", "LoadedModules"]

# It takes pidfds, and a fork that is safe after much was imported: not so on macOS.
AVAILABLE = PIDFDS

_FULL_S = 0.005  # how long to wait for room in the control socket, in seconds
_EXIT_S = 1.0  # how long a server may take to end, in seconds


def _nameless_file() -> IO[bytes]:
    """A file in memory; where there is none, in the directory for temporary files, and without a name there."""
    try:
        return open(os.memfd_create("aioenv-forkserver"), "w+b")
    except (AttributeError, OSError) as exc:  # the C library has none, or a sandbox denies it
        if getattr(exc, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise
        return tempfile.TemporaryFile()


class ForkServer:
    """A fork server, or mere guardian, for one set of import-time variables.

    Processes of this process hold on to it (`acquire`) and let go of it (`release`); with the last one it ends.
    Safe to use from the threads of several event loops.

    Args:
        environ: its environment variables.

    Attributes:
        importing: the module that it imports just now, as far as is known.
    """

    _lock = threading.RLock()
    _servers: ClassVar[dict[Any, ForkServer]] = {}

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._key: Any = None
        self._users = 0
        self._chooses = False  # whether a module that it has imported may have chosen an OpenGL
        self._loaded = LoadedModules()
        self.importing: str | None = None
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        theirs.setblocking(True)  # see `launch._socketpair`
        output = None
        try:
            # no pipe, which would fill: the server hands on what is in it to its next worker, an error quotes it
            self._output = output = _nameless_file()
            self._child = Child(
                subprocess.Popen(
                    bootstrap("forkserver", f"{os.getpid()}, {theirs.fileno()}"),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    env=dict(environ),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            )
        except BaseException:
            self._control.close()
            if output is not None:
                output.close()
            raise
        finally:
            theirs.close()

    @classmethod
    def acquire(cls, environ: Mapping[str, str] | None, *, chooses: bool = True) -> ForkServer:
        """Get the server for workers with these variables, or for None any one that guards; it may be new.

        Args:
            environ: the variables of a worker.
            chooses: whether it is to import modules that may choose an OpenGL at their import. A server that has none
                takes workers with any backend.

        Raises:
            OSError: if no process can be started.
        """
        with cls._lock:
            cls._servers = {key: server for key, server in cls._servers.items() if server.serves}
            if environ is None:
                key: Any = next(iter(cls._servers), (None, ()))
            else:
                same = identity(environ)
                for (other, _), server in list(cls._servers.items()):
                    if other == same and server._loaded.outdated():
                        server.retire()  # its workers would have the code of before
                key = same, graphics(environ)
                if key not in cls._servers and not chooses:
                    others = (known for known, server in cls._servers.items() if known[0] == same)
                    key = next((known for known in others if not cls._servers[known]._chooses), key)
            if key not in cls._servers:
                cls._servers[key] = cls(os.environ if environ is None else environ)
                cls._servers[key]._key = key
            server = cls._servers[key]
            server._chooses |= chooses and environ is not None
            server._users += 1
            return server

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return not self._child.ended

    @property
    def serves(self) -> bool:
        """Whether it can take orders: one that is just being killed still runs, but has let go of its end."""
        try:
            return self.alive and self._control.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # it never says anything there
            return True
        except OSError:
            return False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def output(self) -> str:
        """What it has printed, and logged."""
        size = os.fstat(self._output.fileno()).st_size  # read in its place: where it writes is shared
        text = os.pread(self._output.fileno(), size, 0).decode("utf-8", "replace")
        return "\n".join(map(readable_log_line, text.strip().split("\n")))

    def ended(self) -> WorkerStartError:
        """What to raise when the server has ended unasked."""
        where = f" while it imported {self.importing}" if self.importing is not None else ""
        return WorkerStartError(
            f"the fork server (pid {self.pid}) has ended{where}; "
            f'start="spawn" does without one. Its output:\n{self.output}'
        )

    def retire(self) -> None:
        """Let nobody acquire it any more; its workers live on."""
        with self._lock:
            if self._servers.get(self._key) is self:
                del self._servers[self._key]

    async def order(self, order: Any, fds: Sequence[int] = ()) -> None:
        """Send an order; waits while the server is busy and its socket full.

        Raises:
            WorkerStartError: if the server has ended.
        """
        data = pack(order)
        self.wake()
        while True:
            try:
                with self._lock:
                    sent = socket.send_fds(self._control, [data], fds)
                if sent < len(data):  # the kernel takes what is below 32 kB as a whole, or not at all
                    self.retire()
                    raise WorkerStartError(f"sys.path and preload are too long for a fork server: {len(data)} bytes")
                return
            except BlockingIOError:
                await asyncio.sleep(_FULL_S)
            except OSError as exc:
                raise self.ended() from exc

    async def guard(self, pid: int) -> None:
        """Let it kill this process group when this process is gone."""
        await self.order(GuardRequest(pid))

    def let_go(self, pid: int) -> None:
        """That group is gone."""
        with contextlib.suppress(OSError), self._lock:
            socket.send_fds(self._control, [pack(ReleaseRequest(pid))], ())

    async def release(self) -> None:
        """Let go of the server; if nobody else holds it, wait until it has ended."""
        if self._count_down():
            await self._ended()

    def abandon(self) -> None:
        """Let go of it without a loop to wait on; if nobody else holds it, it is killed, and its workers with it."""
        if self._count_down():
            self._bury()

    def wake(self) -> None:
        """Have it go on, if it was stopped: what waits for it would wait for long."""
        self._child.wake()

    def _bury(self) -> None:
        self._child.bury()  # with what modules have started when it imported them
        self._child.close()
        self._output.close()

    def _count_down(self) -> bool:
        with self._lock:
            self._users -= 1
            if self._users:
                return False
            self.retire()
            with contextlib.suppress(OSError):
                # not `close` alone: a fork of this process that is not ours may hold a copy
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self.wake()
            return True

    async def _ended(self) -> None:
        loop, pidfd = asyncio.get_running_loop(), self._child.pidfd
        if pidfd is None or not self.alive:
            self._bury()
            return
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            self._bury()


# IPython's extension puts new code into functions as they are: nothing but the file's time tells.
_PATCHER = "IPython.extensions.autoreload"


class LoadedModules:
    """The modules of this process as they are now, but for those of installed packages, and of main scripts."""

    def __init__(self) -> None:
        self._looked_at = {"__main__", "__mp_main__"}
        self._specs: dict[str, tuple[ModuleSpec, int | None]] = {}  # with the time of the file
        self._add_new()

    def outdated(self) -> bool:
        """Whether one of them has been loaded anew since: by `importlib.reload`, IPython's `%autoreload`, …"""
        patches = _PATCHER in sys.modules
        for name, (spec, changed) in self._specs.items():
            now = _spec(name)
            if now is None:  # it is gone; the next import says what it has become
                continue
            if now is not spec or (patches and _changed(spec) != changed):
                return True
        self._add_new()
        return False

    def _add_new(self) -> None:
        new = sys.modules.keys() - self._looked_at
        self._looked_at |= new
        for name in new:
            spec = _spec(name)
            if spec is not None and spec.has_location and spec.origin and not spec.origin.startswith(_INSTALLED):
                self._specs[name] = spec, _changed(spec)


def _spec(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if not issubclass(type(module), ModuleType):  # what stands in for one may import it if it is asked
        return None
    with contextlib.suppress(AttributeError):
        spec = ModuleType.__getattribute__(module, "__spec__")  # which loads no lazy one
        return spec if isinstance(spec, ModuleSpec) else None
    return None


def _changed(spec: ModuleSpec) -> int | None:
    with contextlib.suppress(OSError, TypeError, ValueError):
        return os.stat(spec.origin or "").st_mtime_ns
    return None


_INSTALLED = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
