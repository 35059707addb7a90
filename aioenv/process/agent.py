"""The agent of a worker on another machine: it starts the worker there, watches it, and connects it to the parent.

An agent is a process (an actor of Ray, say) with an `Invitation`. It opens two TCP connections to the parent. The
worker, which is a child of the agent, gets one of them as its channel. So frames go through no other process, unless
they are encrypted: then the agent does that. The other
connection is the agent's own: over it go the worker's output, its end, signs of life, and signals to the worker. When
that connection ends, the agent kills the worker with its process group. The kernel finds out within 10 s that the
parent's machine is gone. The agent expects no signs of life of the parent itself, whose loop may be blocked for long.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from aioenv.errors import WireError
from aioenv.ipc import handshake
from aioenv.ipc.agent_messages import ALIVE_S, AgentMessage, MessageReader, pack, pack_json
from aioenv.ipc.handshake import Invitation
from aioenv.ipc.memory import CurrentRow
from aioenv.ipc.messages import STACK_SIGNAL
from aioenv.process.child import Child, kill_group
from aioenv.process.environment import bootstrap, worker_environment
from aioenv.process.tls import TlsFiles, TlsRelay

__all__ = ["main", "run_agent", "set_socket_options", "versions"]

# Seconds in which the parent has to accept a connection and prove itself.
_CONNECT_S = 20.0
# The kernel asks a silent peer after 3 s, every 2 s, three times; data that is not acknowledged may take 9 s.
_IDLE_S, _INTERVAL_S, _PROBES, _UNACKNOWLEDGED_MS = 3, 2, 3, 9000
# How often the agent looks which row the worker runs; it reports a row that it has seen twice.
_ROW_S = 0.5
# Time between the end of the worker and the end of its output (see `connection.py`).
_LAST_BYTES_S = 0.25
# The agent stops reading the worker's output while the parent has not taken this much.
_UNSENT_BYTES = 1 << 20

_COMPARED = ("aioenv", "numpy", "gymnasium", "mujoco")


def versions() -> dict[str, str]:
    """Return the versions that must be equal in a worker and its parent.

    That of aioenv has a digest of its source: two checkouts may have the same version, and other messages.
    """
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in _COMPARED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["aioenv"] += f" {_source_digest(Path(__file__).parents[1])}"
    return found


@cache
def _source_digest(package: Path) -> str:
    """Return a digest of the Python files of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def set_socket_options(sock: socket.socket) -> None:
    """Prepare a connection between machines: no delay of small writes, and an end within 10 s if the other is gone.

    Buffers are left to the kernel. It fits them to the connection, and lets them grow further than it allows us to ask.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _INTERVAL_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, name):  # TCP_USER_TIMEOUT is Linux's
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def main(node: str = "") -> None:
    """Run an agent whose invitation comes in one line of stdin: host, port, id and secret, in hexadecimal.

    After them come the descriptor of the worker's inbox, and the files for TLS, in JSON.
    """
    host, port, id, secret, inbox, tls = sys.stdin.readline().split(maxsplit=5)
    invitation = Invitation(host, int(port), bytes.fromhex(id), bytes.fromhex(secret))
    files = json.loads(tls)
    run_agent(invitation, node, socket.socket(fileno=int(inbox)), files and TlsFiles(*files))


def run_agent(invitation: Invitation, node: str, inbox: socket.socket, tls: TlsFiles | None = None) -> None:
    """Start a worker for a parent, and serve it until the worker or the connection to the parent has ended.

    Args:
        invitation: the parent's.
        node: the name of this machine, for errors and logs.
        inbox: where the worker reads data of this machine (see `ipc/shared_data.py`); closed here.
        tls: the certificates of this machine; None: without TLS.

    Raises:
        OSError: if the parent can't be reached, or its certificate is refused, or refuses this one (`ssl.SSLError`).
        WireError: if it does not know the secret, or does not keep to the protocol.
    """
    with inbox, contextlib.closing(_Agent(_Door(invitation, tls), inbox)) as agent:
        agent.send_json(AgentMessage.VERSIONS, {"versions": versions(), "node": node, "pid": os.getpid()})
        agent.run()


class _Door:
    """Opens connections to the parent."""

    def __init__(self, invitation: Invitation, tls: TlsFiles | None) -> None:
        self._invitation = invitation
        self._tls = None if tls is None else tls.context(server=False)
        self._relay = TlsRelay()

    def connect(self, role: int) -> socket.socket:
        """Open a connection, and prove to each other that both sides know the secret."""
        invitation = self._invitation
        sock = socket.create_connection((invitation.host, invitation.port), _CONNECT_S)
        try:
            set_socket_options(sock)
            secret = invitation.secret
            if self._tls is not None:
                sock = encrypted = self._tls.wrap_socket(sock)
                secret = handshake.bind(secret, encrypted.getpeercert(binary_form=True) or b"")
            greeting = handshake.hello(invitation, role)
            with contextlib.suppress(ConnectionError, ssl.SSLEOFError):  # an alert of TLS says why
                sock.sendall(greeting)
            answer = _receive_exactly(sock, handshake.CHALLENGE_BYTES)
            proof = handshake.proof(secret, greeting, answer)
            if proof is None:
                raise WireError("the parent does not know the secret of the invitation")
            sock.sendall(proof)
            sock.settimeout(None)
            return self._relay.plain(sock) if isinstance(sock, ssl.SSLSocket) else sock
        except BaseException:
            sock.close()
            raise


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the parent has closed the connection: it does not wait for this worker")
        data += more
    return data


class _Agent:
    """See `run_agent`."""

    def __init__(self, door: _Door, inbox: socket.socket) -> None:
        self._door = door
        self._inbox = inbox
        self._control = door.connect(handshake.CONTROL)
        self._reader = MessageReader()
        self._unsent = bytearray()
        self._child: Child | None = None
        self._row: CurrentRow | None = None
        self._seen_row: int | None = None  # when it was looked at last
        self._told_row: int | None = None
        self._output: int | None = None  # the descriptor that the worker's output is read from
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
        self._control.setblocking(False)
        self._connected = True

    def close(self) -> None:
        """Kill the worker if it is still there, with everything in its process group, and close everything."""
        child, self._child = self._child, None
        if child is not None:
            child.kill_and_reap()
            child.close()
        self._close_output()
        self._control.close()
        self._selector.close()

    def run(self) -> None:
        """Handle events until the connection to the parent ends."""
        next_look, next_sign = time.monotonic() + _ROW_S, time.monotonic() + ALIVE_S
        while self._connected:
            for key, _ in self._selector.select(max(0.0, next_look - time.monotonic())):
                handle: Callable[[], object] = key.data
                handle()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _ROW_S
                self._look_at_row()
            if now >= next_sign and not self._unsent:
                next_sign = now + ALIVE_S
                self._send(pack(AgentMessage.ALIVE))

    # ------------------------------------------------------------ the connection to the parent

    def send_json(self, kind: AgentMessage, value: Any) -> None:
        """Send a message with a JSON value."""
        self._send(pack_json(kind, value))

    def _send(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._control.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._connected = False
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._control, events, self._on_control)
        self._watch_output(len(self._unsent) < _UNSENT_BYTES)

    def _on_control(self) -> None:
        if self._unsent:
            self._flush()
        try:
            data = self._control.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._connected = False
        for kind, value in self._reader.feed(data):
            if kind is AgentMessage.START:
                self._start(value)
            elif kind is AgentMessage.SIGNAL:
                self._signal(signal.Signals(value))
            elif kind is AgentMessage.PRINT_STACK:
                self._print_stack()
            elif kind is AgentMessage.REFUSED:
                sys.stderr.write(f"{value}\n")
                self._connected = False

    # ------------------------------------------------------------ the worker

    def _start(self, environ: Mapping[str, str]) -> None:
        try:
            self._spawn(environ)
        except (OSError, ValueError, WireError) as exc:
            self.send_json(AgentMessage.FAILED, f"{type(exc).__name__}: {exc}")
            return
        assert self._child is not None
        self.send_json(AgentMessage.STARTED, self._child.pid)

    def _spawn(self, environ: Mapping[str, str]) -> None:
        with ExitStack() as theirs:
            frames = theirs.enter_context(self._door.connect(handshake.FRAMES))
            row_fd = CurrentRow.create()
            if row_fd is not None:
                theirs.callback(os.close, row_fd)
                self._row = CurrentRow(row_fd)
            self._output, output = os.pipe()
            theirs.callback(os.close, output)
            os.set_blocking(self._output, False)
            fd, inbox_fd = frames.fileno(), theirs.enter_context(self._inbox).fileno()
            process = subprocess.Popen(
                bootstrap("boot", f"{os.getpid()}, {fd}, {fd}, {row_fd}, None, {inbox_fd}"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env=worker_environment(environ),
                start_new_session=True,
                pass_fds=[fd, inbox_fd, *(one for one in (row_fd,) if one is not None)],
            )
            self._child = Child(process)
        assert self._child.pidfd is not None  # Ray runs on Linux; other agents check it
        self._selector.register(self._child.pidfd, selectors.EVENT_READ, self._on_end)
        self._watch_output(True)

    def _signal(self, sig: signal.Signals) -> None:
        child = self._child
        if child is not None and not child.reaped:
            kill_group(child.pid, sig)
            if child.pidfd is not None:
                with contextlib.suppress(OSError):  # an env has moved it into another group, or it has ended
                    signal.pidfd_send_signal(child.pidfd, sig)

    def _print_stack(self) -> None:
        if self._child is not None and self._child.pidfd is not None and STACK_SIGNAL is not None:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self._child.pidfd, STACK_SIGNAL)

    def _look_at_row(self) -> None:
        """Tell the parent which row the worker has been running for some time, if any: a timeout will name it."""
        if self._row is None:
            return
        row = self._row.row
        stays = row if row == self._seen_row else None
        self._seen_row = row
        if stays != self._told_row:
            self._told_row = stays
            self.send_json(AgentMessage.ROW, stays)

    def _on_end(self) -> None:
        child = self._child
        assert child is not None
        assert child.pidfd is not None
        self._selector.unregister(child.pidfd)
        deadline = time.monotonic() + _LAST_BYTES_S
        while self._output is not None and time.monotonic() < deadline:
            if not self._read_output():  # a child of the worker may hold it open
                time.sleep(0.005)
        child.kill_and_reap()
        row = self._row.row if self._row is not None else None
        self.send_json(AgentMessage.ENDED, {"returncode": child.returncode, "row": row})

    # ------------------------------------------------------------ the worker's output

    def _watch_output(self, watched: bool) -> None:
        if self._output is None:
            return
        registered = self._output in self._selector.get_map()
        if watched and not registered:
            self._selector.register(self._output, selectors.EVENT_READ, self._read_output)
        elif registered and not watched:
            self._selector.unregister(self._output)

    def _read_output(self) -> bool:
        """Pass on what the worker has printed; return whether there was anything."""
        assert self._output is not None
        try:
            data = os.read(self._output, 1 << 16)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            self._close_output()
            return True
        self._send(pack(AgentMessage.OUTPUT, data))
        return True

    def _close_output(self) -> None:
        if self._output is not None:
            self._watch_output(False)
            os.close(self._output)
            self._output = None
