"""A relay between the agents of a cluster and their parent: it delays what goes through, cuts it, or swallows it."""

from __future__ import annotations

import heapq
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aioenv.cluster.local import LocalCluster, LocalSession, ProcessAgent
from aioenv.ipc.handshake import Invitation


class Relay:
    """Forwards connections to ports of this machine, each way with a delay, on a thread.

    Attributes:
        delay_s: the delay each way, in seconds.
        frozen: whether nothing goes through any more, though all connections stay open.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.frozen = False
        self._targets: dict[int, int] = {}  # by port of the relay
        self._listeners: dict[int, socket.socket] = {}
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._queue: list[tuple[float, int, socket.socket, bytes]] = []
        self._number = 0
        self._due = 0.0  # of what was last delayed
        self._selector = selectors.SelectSelector()  # epoll rounds timeouts up to milliseconds
        self._wake, waker = socket.socketpair()
        self._waker = waker
        self._selector.register(self._wake, selectors.EVENT_READ, "wake")
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def port_to(self, port: int) -> int:
        """The port of the relay that leads to this port."""
        with self._lock:
            for own, target in self._targets.items():
                if target == port:
                    return own
            listener = socket.create_server(("127.0.0.1", 0), backlog=256)
            own = int(listener.getsockname()[1])
            self._targets[own], self._listeners[own] = port, listener
        self._waker.send(b"l")
        return own

    def cut(self) -> None:
        """Close all connections."""
        self._waker.send(b"c")

    def close(self) -> None:
        self._ended = True
        self._waker.send(b"e")
        self._thread.join()
        for sock in (self._wake, self._waker):
            sock.close()

    def _run(self) -> None:
        while not self._ended:
            timeout = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            for key, _ in self._selector.select(timeout):
                if key.data == "wake":
                    self._on_wake()
                elif key.data == "accept":
                    self._accept(key.fileobj)
                else:
                    self._forward(key.fileobj)
            while self._queue and self._queue[0][0] <= time.monotonic():
                _, _, sock, data = heapq.heappop(self._queue)
                self._send(sock, data)
        self._close_all()
        for listener in self._listeners.values():
            listener.close()
        self._selector.close()

    def _on_wake(self) -> None:
        if b"c" in self._wake.recv(256):
            self._close_all()
        with self._lock:
            for listener in self._listeners.values():
                if listener not in self._selector.get_map():
                    self._selector.register(listener, selectors.EVENT_READ, "accept")

    def _accept(self, listener: Any) -> None:
        sock, _ = listener.accept()
        try:
            other = socket.create_connection(("127.0.0.1", self._targets[listener.getsockname()[1]]))
        except OSError:
            sock.close()
            return
        for one, peer in ((sock, other), (other, sock)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[one] = peer
            self._selector.register(one, selectors.EVENT_READ, "data")

    def _forward(self, sock: Any) -> None:
        if sock not in self._pairs:
            return
        try:
            data = sock.recv(1 << 18)
        except OSError:
            data = b""
        if self.frozen:
            if not data:
                self._selector.unregister(sock)
            return
        if self.delay_s or self._queue:
            self._number += 1
            self._due = max(self._due, time.monotonic() + self.delay_s)  # a shorter delay lets nothing overtake
            heapq.heappush(self._queue, (self._due, self._number, self._pairs[sock], data))
            if not data:
                self._selector.unregister(sock)
        else:
            self._send(self._pairs[sock], data)

    def _send(self, sock: Any, data: bytes) -> None:
        if data:
            with suppress(OSError):
                sock.sendall(data)
        else:
            self._close_pair(sock)

    def _close_pair(self, sock: Any) -> None:
        other = self._pairs.pop(sock, None)
        for one in (sock, other):
            if one is not None:
                self._pairs.pop(one, None)
                with suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()

    def _close_all(self) -> None:
        for sock in [*self._pairs]:
            self._close_pair(sock)


class RelayedSession(LocalSession):
    def __init__(self, cluster: LocalCluster, num_workers: int, relay: Relay) -> None:
        super().__init__(cluster, num_workers)
        self._relay = relay

    def place(self, index: int, invitation: Invitation) -> ProcessAgent:
        return super().place(index, invitation._replace(port=self._relay.port_to(invitation.port)))


class RelayedCluster(LocalCluster):
    """Agents of this machine that reach the parent through a relay."""

    def __init__(self, relay: Relay, num_nodes: int = 1) -> None:
        super().__init__(num_nodes)
        self.relay = relay

    def session(self, num_workers: int, start_timeout_s: float) -> RelayedSession:
        return RelayedSession(self, num_workers, self.relay)


@contextmanager
def relayed(delay_s: float = 0.0, num_nodes: int = 1) -> Iterator[RelayedCluster]:
    relay = Relay(delay_s)
    try:
        yield RelayedCluster(relay, num_nodes)
    finally:
        relay.close()
