"""Launch a worker on another machine: invite its agent, take its connections in, and show it as a `Process`.

A `Cluster` places the agent (see `agent.py`). This module listens for it, but only while agents are awaited. Each
connection has to prove within seconds that it knows the secret of an invitation (see `ipc/handshake.py`). Before that
nothing but bytes of a fixed length is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioenv.errors import WireError, WorkerStartError
from aioenv.ipc import handshake
from aioenv.ipc.agent_messages import ALIVE_S, AgentMessage, MessageReader, pack, pack_json
from aioenv.ipc.handshake import Invitation
from aioenv.process.agent import set_socket_options, versions
from aioenv.process.async_resource import internal_task, wait_through_cancel
from aioenv.process.channel import Channel, ScatterChannel
from aioenv.process.failures import cannot_start
from aioenv.process.launch import LaunchResources
from aioenv.process.process import Output
from aioenv.process.tls import TlsFiles, TlsRelay

if TYPE_CHECKING:
    from aioenv.process.connection import OutstandingRequests

__all__ = [
    "Agent",
    "Cluster",
    "ClusterSession",
    "Listener",
    "Placement",
    "Placements",
    "RemoteProcess",
    "SharedData",
    "launch_remote",
]

_log = logging.getLogger("aioenv")

# Seconds in which a connection has to prove that it knows the secret.
_HANDSHAKE_S = 10.0
# Connections that have not proved it; the oldest is closed for one more.
_MAX_UNPROVEN = 512
_BACKLOG = 1024
# Connections that are accepted before the loop goes on. Those that come next may close the oldest, so each has time to
# show which worker it belongs to.
_ACCEPTS = 64
# How long an agent may take to confirm that the worker was killed, in seconds.
_KILL_S = 1.0
# So many checks in a row without a message mean that an agent is lost; between two of them pass so many seconds.
_SILENT_CHECKS, _CHECK_S = 3, 1.5 * ALIVE_S
# How long a cluster may take to say why an agent is lost, in seconds; `connection.py` waits a second for an end.
_REASON_S = 0.75
_REAP_S = 2.0  # see `process.py`
_OUTPUT_LIMIT = 1 << 14  # see `launch.py`


class SharedData(NamedTuple):
    """Data that a cluster has put where the workers of one session can read them. They are freed with this.

    Attributes:
        number: of the data in the session; numbers ascend.
        parts: the data, as this process sees them.
        offsets: of each part, from the first one, in bytes.
        source: the session's own.
    """

    number: int
    parts: Sequence[memoryview]
    offsets: tuple[int, ...]
    source: Any


class Agent(Protocol):
    """An agent that a cluster has placed, or is placing.

    Attributes:
        ended: done when it has ended, or could not be placed: its result says how.
    """

    ended: asyncio.Future[str]

    def kill(self) -> None:
        """Kill it without waiting, with or without a loop. Idempotent."""

    async def release(self) -> None:
        """Kill it if it has not ended, and wait until nothing of it is left. Idempotent."""

    def give(self, data: SharedData) -> None:
        """Let the worker take data of its session, by their number; never blocks. Data that can't be had are refused.

        The worker maps them (see `worker_context.take_data`); they are not copied for each worker, where that can be.
        """


class ClusterSession(Protocol):
    """The room that a cluster has reserved for the workers of one vector env."""

    @property
    def address(self) -> tuple[str, Sequence[int]]:
        """The address of this machine that agents can reach, and the ports to listen on; none: any port."""

    @property
    def tls(self) -> TlsFiles | None:
        """The certificates of this process, for TLS with agents; None: without TLS."""

    async def start(self) -> None:
        """Reserve the room. If this fails, or is cancelled, nothing is reserved.

        Raises:
            WorkerStartError: if there is not enough room.
        """

    def place(self, index: int, invitation: Invitation) -> Agent:
        """Start an agent for a worker.

        Args:
            index: the number of the worker among those of this session, from 0.
            invitation: what the agent needs.
        """

    def share(self, parts: Sequence[memoryview]) -> SharedData | None:
        """Copy data to where all workers of this session can read them; None: frames carry so few bytes faster."""

    async def close(self) -> None:
        """Release the room. Idempotent."""

    def abandon(self) -> None:
        """Release the room without waiting, with or without a loop. Idempotent."""


class Cluster(Protocol):
    """Machines on which workers can be placed."""

    def session(self, num_workers: int, start_timeout_s: float) -> ClusterSession:
        """Return a session for the workers of one vector env; it is not started."""


class _Awaited(NamedTuple):
    """The connections of an agent that is awaited, by role."""

    invitation: Invitation
    connections: tuple[asyncio.Future[socket.socket], asyncio.Future[socket.socket]]


class Listener:
    """Accepts the connections of agents of one vector env. It listens only while agents are awaited.

    Args:
        session: tells where to listen.
    """

    def __init__(self, session: ClusterSession) -> None:
        self._session = session
        self._secret = self._proven = secrets.token_bytes(32)
        self._sock: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop  # since the first invitation
        self._awaited: dict[bytes, _Awaited] = {}
        self._unproven: OrderedDict[socket.socket, asyncio.Task[None]] = OrderedDict()
        self._tls: ssl.SSLContext | None = None
        self._relay = TlsRelay()
        self._refusals: set[str] = set()  # the reasons so far

    @property
    def listening(self) -> bool:
        """Whether it listens."""
        return self._sock is not None

    def invite(self) -> _Awaited:
        """Return an invitation, and the futures of its connections; `withdraw` must follow.

        Raises:
            OSError: if it can't listen.
        """
        host, ports = self._session.address
        if self._sock is None:
            self._loop = asyncio.get_running_loop()
            files = self._session.tls
            self._proven = self._secret
            if files is not None:
                self._tls = files.context(server=True)
                self._proven = handshake.bind(self._secret, files.own_certificate())
            self._sock = _listen(host, ports or (0,))
            self._loop.add_reader(self._sock.fileno(), self._accept)
        invitation = handshake.new_invitation(host, self._sock.getsockname()[1], self._secret)
        connections = self._loop.create_future(), self._loop.create_future()
        awaited = self._awaited[invitation.id] = _Awaited(invitation, connections)
        return awaited

    def forget(self, awaited: _Awaited) -> None:
        """Wait for this agent no longer: its connections have owners."""
        self._awaited.pop(awaited.invitation.id, None)
        if not self._awaited:
            self.close()

    def withdraw(self, awaited: _Awaited) -> None:
        """Wait for this agent no longer; close its connections without an owner. Idempotent."""
        for future in awaited.connections:
            if future.done() and not future.cancelled():
                with contextlib.suppress(OSError):
                    future.result().close()
            elif not self._loop.is_closed():
                future.cancel()
        self.forget(awaited)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(sock.fileno())
            for task in self._unproven.values():
                task.cancel()
        for connection in self._unproven:
            connection.close()
        self._unproven.clear()
        sock.close()

    def _accept(self) -> None:
        assert self._sock is not None
        for _ in range(_ACCEPTS):
            try:
                sock, _ = self._sock.accept()
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE):  # a descriptor is free when the loop comes back here
                    self._close_oldest()
                return
            if len(self._unproven) >= _MAX_UNPROVEN:
                self._close_oldest()
            try:
                sock = self._prepare(sock)
            except OSError:  # it has ended, or there are no descriptors left
                sock.close()
                continue
            self._unproven[sock] = internal_task(self._admit(sock), name="handshake with an agent")

    def _prepare(self, sock: socket.socket) -> socket.socket:
        """Return a connection without TLS in the place of one that was accepted.

        Raises:
            OSError: if there are no descriptors left, or the connection has ended.
        """
        sock.setblocking(False)
        set_socket_options(sock)
        if self._tls is None:
            return sock
        peer = sock.getpeername()[0]
        encrypted = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        plain = self._relay.plain(encrypted, partial(self._note_refusal, peer))
        plain.setblocking(False)
        return plain

    def _note_refusal(self, peer: str, why: str) -> None:
        """Log why a connection was refused, once for each reason; called on the relay's thread."""
        if why not in self._refusals:
            self._refusals.add(why)
            _log.warning("a connection of %s was refused, and others like it may have been: %s", peer, why)

    def _close_oldest(self) -> None:
        """Close the oldest connection that has not proved itself, if there is one."""
        if self._unproven:
            oldest, task = self._unproven.popitem(last=False)
            task.cancel()
            oldest.close()

    async def _admit(self, sock: socket.socket) -> None:
        """Let a connection prove itself, and hand it to the worker that waits for it; or close it."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                connection = await self._prove(sock)
        except (OSError, TimeoutError):
            connection = None
        finally:
            if self._unproven.pop(sock, None) is None:  # it was closed meanwhile
                connection = None
        if connection is None or connection.done():
            sock.close()
        else:
            connection.set_result(sock)

    async def _prove(self, sock: socket.socket) -> asyncio.Future[socket.socket] | None:
        greeting = handshake.parse_hello(await self._receive(sock, handshake.HELLO_BYTES))
        awaited = self._awaited.get(greeting.id) if greeting is not None else None
        if greeting is None or awaited is None:
            return None
        self._unproven.move_to_end(sock)  # it knows the id of an invitation: connections of others are closed before
        answer = handshake.challenge(self._proven, greeting.data)
        await self._loop.sock_sendall(sock, answer)
        data = await self._receive(sock, handshake.PROOF_BYTES)
        if not handshake.is_proof(self._proven, greeting.data, answer, data):
            return None
        return awaited.connections[greeting.role]

    async def _receive(self, sock: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = await self._loop.sock_recv(sock, count - len(data))
            if not more:
                break
            data += more
        return data


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens on the first of these ports that is free."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    error: OSError | None = None
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except OSError as exc:
            sock.close()
            error = exc
        else:
            return sock
    assert error is not None
    raise OSError(error.errno, f"can't listen on {host}, ports {list(ports)}: {os.strerror(error.errno or 0)}")


class _Control:
    """The connection to an agent: its messages, and the worker's output.

    Args:
        sock: the connection.
        on_message: called with each message but the worker's output.
        on_end: called once, with why the connection has ended.

    Attributes:
        output: the stream of the worker's output.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[AgentMessage, Any], None], on_end: Callable[[str], None]
    ) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._reader = MessageReader()
        self._on_message = on_message
        self._on_end = on_end
        self._unsent = bytearray()
        self.output = asyncio.StreamReader(_OUTPUT_LIMIT)
        self._silent_checks = 0
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._read)
        self._check = self._loop.call_later(_CHECK_S, self._check_alive)

    def _check_alive(self) -> None:
        """Count the checks in a row that found no message. A loop that was blocked reads before it checks again."""
        self._silent_checks += 1
        if self._silent_checks == _SILENT_CHECKS:
            self._end(f"no sign of life for {(_SILENT_CHECKS - 1) * _CHECK_S:g} s")
        else:
            self._check = self._loop.call_later(_CHECK_S, self._check_alive)

    def send(self, data: bytes) -> None:
        """Send a message; after the end of the connection this is a no-op."""
        if self._sock.fileno() < 0:
            return
        waiting = bool(self._unsent)
        self._unsent += data
        if not waiting:
            self._write()
            if self._unsent and self._sock.fileno() >= 0:
                self._loop.add_writer(self._sock.fileno(), self._write_more)

    def _write(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # reading finds out how it ended
            self._unsent.clear()

    def _write_more(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
            self._silent_checks = 0
            if not data:
                self._end("it has closed the connection")
                return
            for kind, value in self._reader.feed(data):
                if kind is AgentMessage.OUTPUT:
                    self.output.feed_data(value)
                else:
                    self._on_message(kind, value)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as exc:
            self._end(exc.strerror or str(exc))
        except WireError as exc:
            self._end(str(exc))

    def _end(self, why: str) -> None:
        self.close()
        self._on_end(why)

    def close(self) -> None:
        """Close the connection, even if the loop is closed. Idempotent."""
        fd = self._sock.fileno()
        if fd < 0:
            return
        self._check.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            self.output.feed_eof()
        self._sock.close()


class RemoteRow:
    """The row that a worker on another machine runs, as far as its agent has told (see `memory.CurrentRow`)."""

    def __init__(self) -> None:
        self.row: int | None = None


class RemoteProcess:
    """A worker on another machine (see `Process`).

    Args:
        sock: the connection to its agent.
        agent: its agent.

    Attributes:
        node: the name of its machine.
        fault: why the connection to its agent has ended before the worker has; None if that is not so.
    """

    def __init__(self, sock: socket.socket, agent: Agent) -> None:
        self.pid = 0
        self.node = ""
        self.returncode: int | None = None
        self.fault: str | None = None
        self.exited = asyncio.Event()
        self.current_row: RemoteRow | None = RemoteRow()
        self._agent = agent
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Any] = self._loop.create_future()  # of the agent, to what it was last asked
        self._frames: socket.socket | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self._loss_timer: asyncio.TimerHandle | None = None
        self._control = _Control(sock, self._on_message, self._on_end)
        self.output = Output(self._control.output, self.exited)

    async def start(self, environ: Mapping[str, str], frames: asyncio.Future[socket.socket]) -> None:
        """Check the versions of the other side, and let the agent start the worker.

        Args:
            environ: environment variables of the worker, which override those of its agent.
            frames: the connection for frames, once it is there.

        Raises:
            WorkerStartError: if the versions differ, or the worker can't be started there.
        """
        about = await self._ask()
        self.node = str(about["node"])
        if about["versions"] != versions():
            table = _version_table(about["versions"])
            self._control.send(
                pack_json(AgentMessage.REFUSED, f"its versions differ from those of its parent:\n{table}")
            )
            raise WorkerStartError(f"a worker on {self.node} has other versions than this process:\n{table}")
        self._answer = self._loop.create_future()
        self._control.send(pack_json(AgentMessage.START, dict(environ)))
        self.pid = await self._ask()
        self._frames = await _unless_ended(frames, self._agent)

    async def _ask(self) -> Any:
        """Wait for the agent's answer to what it was asked."""
        return await _unless_ended(self._answer, self._agent)

    def _on_message(self, kind: AgentMessage, value: Any) -> None:
        if kind is AgentMessage.ENDED:
            self.returncode = value["returncode"]
            self._set_row(value["row"])
            self._finish()
        elif kind is AgentMessage.ROW:
            self._set_row(value)
        elif kind is AgentMessage.FAILED:
            self._fail_answer(f"it could not start the worker: {value}")
        elif kind in (AgentMessage.VERSIONS, AgentMessage.STARTED) and not self._answer.done():
            self._answer.set_result(value)

    def _set_row(self, row: int | None) -> None:
        if self.current_row is not None:
            self.current_row.row = row

    def _fail_answer(self, why: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(WorkerStartError(f"the agent on {self.node or 'another machine'}: {why}"))
            self._answer.exception()  # no caller may wait for it any more

    def _on_end(self, why: str) -> None:
        """Note that the connection has ended. The agent's cluster has a moment to say more, a dead node, say."""
        if self._loss_timer is None:
            self._loss_timer = self._loop.call_later(_REASON_S, self._lose, why)
            self._agent.ended.add_done_callback(
                lambda ended: self._lose(f"{why}; its agent has ended: {ended.result()}")
            )

    def _lose(self, why: str) -> None:
        """Give up the worker and its agent, of which nothing more can be heard. Idempotent."""
        self._fail_answer(why)
        if not self.exited.is_set():
            self.fault = f"the connection to its agent has ended: {why}"
            self._finish()

    def _finish(self) -> None:
        """Note that the worker has ended, or that nothing more can be heard of it."""
        self.exited.set()
        self._cancel_timers()
        if self._frames is not None and self.fault is not None:
            with contextlib.suppress(
                OSError
            ):  # the channel reads its end: no answer comes over a connection that hangs
                self._frames.shutdown(socket.SHUT_RDWR)

    def give(self, data: SharedData) -> None:
        """Let the worker take data (see `Agent.give`)."""
        self._agent.give(data)

    def _cancel_timers(self) -> None:
        for timer in (self._kill_timer, self._loss_timer):
            if timer is not None:
                timer.cancel()

    def open_channel(self, requests: OutstandingRequests) -> Channel:
        """See `Process`."""
        assert self._frames is not None
        return ScatterChannel(self._frames, requests)

    def signal(self, sig: signal.Signals) -> None:
        """See `Process`. If a kill is not confirmed in time, the worker counts as lost: the machine may be gone."""
        self._control.send(pack_json(AgentMessage.SIGNAL, int(sig)))
        if sig == signal.SIGKILL and self._kill_timer is None and not self.exited.is_set():
            self._kill_timer = self._loop.call_later(_KILL_S, self._lose, f"no answer within {_KILL_S:g} s")

    def request_stack_dump(self) -> bool:
        """See `Process`."""
        self._control.send(pack(AgentMessage.PRINT_STACK))
        return True

    async def reap(self) -> None:
        """See `Process`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await self.exited.wait()

    def close(self) -> None:
        """Close the connections of this side: the agent kills the worker then. Idempotent."""
        self._cancel_timers()
        self.current_row = None
        self._control.close()
        if self._frames is not None:  # the channel closes it too
            self._frames.close()

    async def release(self) -> None:
        """See `Process`."""
        self.close()
        await self._agent.release()

    def abandon(self) -> None:
        """See `Process`."""
        self._agent.kill()
        if not self._loop.is_running():
            self.close()
            if not self._loop.is_closed():
                self.exited.set()
        else:
            self.signal(signal.SIGKILL)


def _version_table(theirs: Mapping[str, str]) -> str:
    lines = [f"  {'':10} {'there':16} here"]
    for name, here in versions().items():
        there = theirs.get(name, "unknown")
        lines.append(f"  {name:10} {there:16} {here}{'  <-' if there != here else ''}")
    return "\n".join(lines)


async def _unless_ended(future: asyncio.Future[Any], agent: Agent) -> Any:
    """Wait for a future; raise WorkerStartError if the agent ends first."""
    await asyncio.wait([future, agent.ended], return_when=asyncio.FIRST_COMPLETED)
    if not future.done():
        raise WorkerStartError(f"the agent of the worker has ended: {agent.ended.result()}")
    return future.result()


class Placement(NamedTuple):
    """Where a worker is placed.

    Attributes:
        session: the room of its vector env.
        listener: admits agents.
        number: the number of the worker in the session.
    """

    session: ClusterSession
    listener: Listener
    number: int


class Placements:
    """The workers that are on other machines, and the room for them.

    Args:
        clusters: the cluster of each worker, None for this machine; empty: all are here.
        start_timeout_s: how long a cluster may take to reserve room, in seconds.
    """

    def __init__(self, clusters: Sequence[Cluster | None], start_timeout_s: float) -> None:
        self._sessions: list[ClusterSession] = []
        self._by_worker: dict[int, Placement] = {}
        for cluster in dict.fromkeys(one for one in clusters if one is not None):
            numbers = [number for number, one in enumerate(clusters) if one is cluster]
            session = cluster.session(len(numbers), start_timeout_s)
            self._sessions.append(session)
            listener = Listener(session)
            self._by_worker.update((number, Placement(session, listener, i)) for i, number in enumerate(numbers))

    def __bool__(self) -> bool:
        return bool(self._sessions)

    def share(self, parts: Sequence[memoryview]) -> dict[ClusterSession, SharedData]:
        """Copy data to where workers can read them, by session (see `ClusterSession.share`)."""
        shared = {session: session.share(parts) for session in self._sessions}
        return {session: data for session, data in shared.items() if data is not None}

    def of(self, worker: int) -> Placement | None:
        """Return the placement of a worker, by its number; None if it is on this machine."""
        return self._by_worker.get(worker)

    async def start(self) -> None:
        """Reserve the room. If this fails, or is cancelled, `close` must follow.

        Raises:
            WorkerStartError: if there is not enough room.
        """
        for session in self._sessions:
            await session.start()

    async def close(self) -> None:
        """Release the room, even if cancelled; no worker may be left there. Idempotent."""
        if self._sessions:
            closing = asyncio.gather(*(internal_task(session.close()) for session in self._sessions))
            await wait_through_cancel(closing)

    def abandon(self) -> None:
        """Release the room without waiting. Idempotent."""
        for session in self._sessions:
            session.abandon()


async def launch_remote(placement: Placement, environ: Mapping[str, str], resources: LaunchResources) -> RemoteProcess:
    """Launch a worker on another machine (see `launch.launch`).

    If this is cancelled, nothing is left of the worker.

    Args:
        placement: where.
        environ: environment variables of the worker, which override those of its agent.
        resources: holds everything that is opened meanwhile, for callers that may have to release it.

    Raises:
        WorkerStartError: if it can't be started.
    """
    agent: Agent | None = None
    listener = placement.listener
    try:
        awaited = listener.invite()
        resources.add_parent_end(partial(listener.withdraw, awaited))
        agent = placement.session.place(placement.number, awaited.invitation)
        resources.add_parent_end(agent.kill)
        control, frames = awaited.connections
        process = RemoteProcess(await _unless_ended(control, agent), agent)
        resources.add_parent_end(process.close)
        await process.start(environ, frames)
    except OSError as exc:
        raise cannot_start("a worker on another machine", exc) from exc
    except GeneratorExit:  # the loop was closed: nothing can be awaited any more
        resources.abandon()
        raise
    except BaseException:
        await resources.release()
        if agent is not None:
            await wait_through_cancel(internal_task(agent.release()))
        raise
    listener.forget(awaited)
    resources.transfer()
    return process
