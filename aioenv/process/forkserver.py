"""The parent's handle of fork servers, which are shared and counted: one for each set of import-time variables.

Environment variables that select an OpenGL don't distinguish servers until one has imported a module that selects.

The server process itself runs `worker/forkserver.py`. Any server also guards workers that were spawned: it kills their
process groups when this process is gone.
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

# A fork server needs pidfds, and a platform where forking after imports is safe, which macOS is not.
AVAILABLE = PIDFDS

_FULL_S = 0.005  # pause between attempts to write to a full control socket, in seconds
_EXIT_S = 1.0  # how long a server may take to end, in seconds


def _anonymous_file() -> IO[bytes]:
    """Open an anonymous file: in memory, or in the directory for temporary files where memory files are denied."""
    try:
        return open(os.memfd_create("aioenv-forkserver"), "w+b")
    except (AttributeError, OSError) as exc:  # not in this C library, or denied by a sandbox
        if getattr(exc, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise
        return tempfile.TemporaryFile()


class ForkServer:
    """A fork server, or mere guardian, for one set of import-time variables.

    Each worker acquires it (`acquire`) and releases it (`release`); it ends with the last release. It may be used from
    the threads of several event loops.

    Args:
        environ: the server's environment variables.

    Attributes:
        importing: the module that it imports at the moment, as far as it has reported; None if none.
    """

    _lock = threading.RLock()
    _servers: ClassVar[dict[Any, ForkServer]] = {}

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._key: Any = None
        self._users = 0
        self._selects_opengl = False  # whether a module that it has imported may have selected an OpenGL
        self._loaded = LoadedModules()
        self.importing: str | None = None
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        theirs.setblocking(True)  # see `channel.stream_socketpair`
        output = None
        try:
            # a file and no pipe, which would fill up: errors quote it, and the next worker prints it
            self._output = output = _anonymous_file()
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
    def acquire(cls, environ: Mapping[str, str] | None, *, selects_opengl: bool = True) -> ForkServer:
        """Get the server for workers with these variables, or any server as guardian; start one if there is none.

        Args:
            environ: the environment variables of a worker; None: the server is needed as a guardian only.
            selects_opengl: whether it shall import modules that may select an OpenGL when they are imported. A server
                without such modules forks workers with any backend.

        Raises:
            OSError: if no process can be started.
        """
        with cls._lock:
            cls._servers = {key: server for key, server in cls._servers.items() if server.usable}
            if environ is None:
                key: Any = next(iter(cls._servers), (None, ()))
            else:
                same = identity(environ)
                for (other, _), server in list(cls._servers.items()):
                    if other == same and server._loaded.reloaded():
                        server.retire()  # its workers would run the old code
                key = same, graphics(environ)
                if key not in cls._servers and not selects_opengl:
                    others = (known for known, server in cls._servers.items() if known[0] == same)
                    key = next((known for known in others if not cls._servers[known]._selects_opengl), key)
            if key not in cls._servers:
                cls._servers[key] = cls(os.environ if environ is None else environ)
                cls._servers[key]._key = key
            server = cls._servers[key]
            server._selects_opengl |= selects_opengl and environ is not None
            server._users += 1
            return server

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return not self._child.ended

    @property
    def usable(self) -> bool:
        """Whether it can take requests: one that is being killed still runs, but has closed its end."""
        try:
            return self.alive and self._control.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:  # open: it never writes to this socket
            return True
        except OSError:
            return False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def output(self) -> str:
        """The text that it has printed and logged."""
        size = os.fstat(self._output.fileno()).st_size  # not `read`: the file offset is shared with the server
        text = os.pread(self._output.fileno(), size, 0).decode("utf-8", "replace")
        return "\n".join(map(readable_log_line, text.strip().split("\n")))

    def ended_error(self) -> WorkerStartError:
        """Return the error for a server that has ended without being asked to."""
        where = f" while it imported {self.importing}" if self.importing is not None else ""
        return WorkerStartError(
            f"the fork server (pid {self.pid}) has ended{where}; "
            f'start="spawn" does without one. Its output:\n{self.output}'
        )

    def retire(self) -> None:
        """Exclude it from `acquire`; its workers live on."""
        with self._lock:
            if self._servers.get(self._key) is self:
                del self._servers[self._key]

    async def send(self, request: Any, fds: Sequence[int] = ()) -> None:
        """Send a request; wait while the server is busy and its socket is full.

        Raises:
            WorkerStartError: if the server has ended.
        """
        data = pack(request)
        self.wake()
        while True:
            try:
                with self._lock:
                    sent = socket.send_fds(self._control, [data], fds)
                if sent < len(data):  # impossible below 32 kB, which the kernel takes as a whole or not at all
                    self.retire()
                    raise WorkerStartError(f"sys.path and preload are too long for a fork server: {len(data)} bytes")
                return
            except BlockingIOError:
                await asyncio.sleep(_FULL_S)
            except OSError as exc:
                raise self.ended_error() from exc

    async def guard(self, pid: int) -> None:
        """Make it kill this process group when this process is gone."""
        await self.send(GuardRequest(pid))

    def unguard(self, pid: int) -> None:
        """Stop guarding this process group: it is gone."""
        with contextlib.suppress(OSError), self._lock:
            socket.send_fds(self._control, [pack(ReleaseRequest(pid))], ())

    async def release(self) -> None:
        """Release the server; after the last release, wait until it has ended."""
        if self._remove_user():
            await self._wait_ended()

    def abandon(self) -> None:
        """Release it without a loop to wait on; after the last release it is killed, and its workers with it."""
        if self._remove_user():
            self._kill_and_free()

    def wake(self) -> None:
        """Continue the process if it was stopped (SIGSTOP): a request to it would wait long."""
        self._child.wake()

    def _kill_and_free(self) -> None:
        self._child.kill_and_reap()  # and the processes that imported modules have started
        self._child.close()
        self._output.close()

    def _remove_user(self) -> bool:
        """Count a release down; return whether it was the last, after telling the server to end."""
        with self._lock:
            self._users -= 1
            if self._users:
                return False
            self.retire()
            with contextlib.suppress(OSError):
                # not `close` alone: a process that other code has forked may hold a copy
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self.wake()
            return True

    async def _wait_ended(self) -> None:
        loop, pidfd = asyncio.get_running_loop(), self._child.pidfd
        if pidfd is None or not self.alive:
            self._kill_and_free()
            return
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_S):
                    await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            self._kill_and_free()


# IPython's extension patches functions in place: only the time of the file tells.
_PATCHER = "IPython.extensions.autoreload"


class LoadedModules:
    """The modules of this process at the moment, without installed packages and main scripts.

    A fork server must not be used after one of them was reloaded: it has imported the older code.
    """

    def __init__(self) -> None:
        self._known = {"__main__", "__mp_main__"}
        self._specs: dict[str, tuple[ModuleSpec, int | None]] = {}  # and the time of the file
        self._add_new()

    def reloaded(self) -> bool:
        """Return whether a module was reloaded since: by `importlib.reload`, IPython's `%autoreload`, …"""
        patches = _PATCHER in sys.modules
        for name, (spec, changed) in self._specs.items():
            now = _spec(name)
            if now is None:  # it was removed; the next import will load it
                continue
            if now is not spec or (patches and _changed(spec) != changed):
                return True
        self._add_new()
        return False

    def _add_new(self) -> None:
        new = sys.modules.keys() - self._known
        self._known |= new
        for name in new:
            spec = _spec(name)
            if spec is not None and spec.has_location and spec.origin and not spec.origin.startswith(_INSTALLED):
                self._specs[name] = spec, _changed(spec)


def _spec(name: str) -> ModuleSpec | None:
    module = sys.modules.get(name)
    if not issubclass(type(module), ModuleType):  # a stand-in may import the module when it is accessed
        return None
    with contextlib.suppress(AttributeError):
        spec = ModuleType.__getattribute__(module, "__spec__")  # does not load a lazy module
        return spec if isinstance(spec, ModuleSpec) else None
    return None


def _changed(spec: ModuleSpec) -> int | None:
    with contextlib.suppress(OSError, TypeError, ValueError):
        return os.stat(spec.origin or "").st_mtime_ns
    return None


_INSTALLED = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
