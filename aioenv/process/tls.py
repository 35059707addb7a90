"""TLS between machines: the certificates of one side, and a relay that makes a plain socket of a TLS connection.

Workers, and C in this process, read and write frames on descriptors. So a thread encrypts and decrypts: each connection
ends in a socketpair, whose other end takes the place of the TCP connection.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from aioenv.process.channel import stream_socketpair

__all__ = ["TlsFiles", "TlsRelay"]

_READ_BYTES = 1 << 16
# Bytes that wait for one side: from here on, no more are read from the other.
_MAX_WAITING = 1 << 20
# How long a peer may take to take the last bytes, in seconds.
_LINGER_S = 1.0


class TlsFiles(NamedTuple):
    """PEM files. Each side shows its certificate, and takes only peers whose certificate the authority has signed.

    Names of hosts are not compared. Instead, the proof of the secret binds the certificate (see `ipc/handshake.py`).

    Attributes:
        certificate: of this side, with the chain up to the authority.
        key: its private key.
        authority: the certificates of the authority.
    """

    certificate: str
    key: str
    authority: str

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Read the files.

        Raises:
            OSError: if one can't be read, or has something else.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except OSError as exc:
            raise OSError(f"{self}: {exc}") from exc
        return context

    def own_certificate(self) -> bytes:
        """Return the certificate of this side (DER), without the chain.

        Raises:
            OSError: if the file can't be read.
        """
        with open(self.certificate, encoding="ascii", errors="replace") as file:
            _, begin, rest = file.read().partition(ssl.PEM_HEADER)
        return ssl.PEM_cert_to_DER_cert(begin + rest.partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER)


class TlsRelay:
    """Encrypts and decrypts for some connections, on a thread that lives as long as any of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[_Connection] = []
        self._waker: socket.socket | None = None  # there is a thread, which sleeps until it is woken

    def plain(self, sock: ssl.SSLSocket, on_refused: Callable[[str], object] | None = None) -> socket.socket:
        """Return a socket for what the peer has encrypted, and for what is to be encrypted for it.

        If one of both ends, the other does.

        Args:
            sock: the connection, which belongs to the relay from now on. Its TLS handshake may be yet to come.
            on_refused: called on the thread, with the reason, if the handshake fails.

        Raises:
            OSError: if there are no descriptors left; the connection is closed then.
        """
        with contextlib.ExitStack() as opened:
            opened.enter_context(sock)
            ours, theirs = stream_socketpair()
            opened.enter_context(ours)
            opened.enter_context(theirs)
            for one in (sock, theirs):
                one.setblocking(False)
            with self._lock:
                if self._waker is None:
                    wake, self._waker = socket.socketpair()
                    threading.Thread(target=self._run, args=(wake,), name="aioenv TLS", daemon=True).start()
                self._new.append(_Connection(sock, theirs, on_refused))
                self._waker.send(b"n")
            opened.pop_all()
        return ours

    def _run(self, wake: socket.socket) -> None:
        with wake, selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            lingering: set[_Connection] = set()
            while True:
                with self._lock:
                    ready = {*self._new}
                    self._new.clear()
                    if not ready and len(selector.get_map()) == 1:
                        assert self._waker is not None
                        self._waker.close()
                        self._waker = None
                        return
                for connection in ready:
                    connection.register(selector)
                for key, _ in selector.select(0 if ready else _LINGER_S / 4 if lingering else None):
                    if key.data is None:
                        wake.recv(256)
                    else:
                        ready.add(key.data)
                for connection in ready | lingering:
                    connection.advance(selector)
                lingering = {one for one in ready | lingering if one.lingers}


class _Connection:
    """A connection, and the end of its socketpair.

    Attributes:
        lingers: whether nothing is to come for the peer, but it has not taken everything.
    """

    def __init__(self, sock: ssl.SSLSocket, plain: socket.socket, on_refused: Callable[[str], object] | None) -> None:
        self._sock = sock
        self._plain = plain
        self._on_refused = on_refused
        self._shaken = False
        self._received = bytearray()  # for the socketpair
        self._given = bytearray()  # for the peer
        self._sock_ended = self._plain_ended = False
        self._sock_wants_write = False
        self._linger_until = math.inf
        self.lingers = False

    def register(self, selector: selectors.BaseSelector) -> None:
        for one in (self._sock, self._plain):
            selector.register(one, selectors.EVENT_READ, self)

    def advance(self, selector: selectors.BaseSelector) -> None:
        """Do everything that is possible without waiting."""
        try:
            self._shake_hands()
            while self._pass_on():
                pass
        except OSError as exc:  # TLS errors are
            if not self._shaken and self._on_refused is not None:
                self._on_refused(str(exc))
            self._close(selector)
            return
        if self._plain_ended and not self.lingers:
            self.lingers, self._linger_until = True, time.monotonic() + _LINGER_S
        late = time.monotonic() > self._linger_until
        if late or (self._sock_ended and not self._received) or (self._plain_ended and not self._given):
            self._close(selector)
            return
        _watch(
            selector,
            self._sock,
            self,
            not self._sock_ended and len(self._received) < _MAX_WAITING,
            self._sock_wants_write,
        )
        reads = not self._plain_ended and len(self._given) < _MAX_WAITING
        _watch(selector, self._plain, self, reads, bool(self._received))

    def _shake_hands(self) -> None:
        if not self._shaken:
            try:
                self._sock.do_handshake()
                self._shaken = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLWantWriteError:
                self._sock_wants_write = True

    def _pass_on(self) -> bool:
        """Read from both sides, and write to both; return whether anything went through."""
        progress = False
        if self._shaken and not self._sock_ended and len(self._received) < _MAX_WAITING:
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                data = self._sock.recv(_READ_BYTES)
                self._received += data
                self._sock_ended = not data
                progress = bool(data)
        if not self._plain_ended and len(self._given) < _MAX_WAITING:
            with contextlib.suppress(BlockingIOError):
                data = self._read_plain()
                self._given += data
                self._plain_ended = not data
                progress |= bool(data)
        if self._received:
            with contextlib.suppress(BlockingIOError):
                del self._received[: self._write_plain()]
                progress = True
        if self._shaken and self._given:
            self._sock_wants_write = False
            try:
                del self._given[: self._sock.send(self._given)]
                progress = True
            except ssl.SSLWantWriteError:
                self._sock_wants_write = True
            except ssl.SSLWantReadError:
                pass
        return progress

    def _read_plain(self) -> bytes:
        try:
            return self._plain.recv(_READ_BYTES)
        except ConnectionError:  # closed before everything was read there
            return b""

    def _write_plain(self) -> int:
        try:
            return self._plain.send(self._received)
        except ConnectionError:  # nothing is read there any more
            return len(self._received)

    def _close(self, selector: selectors.BaseSelector) -> None:
        self.lingers = False
        for one in (self._sock, self._plain):
            with contextlib.suppress(KeyError):
                selector.unregister(one)
            one.close()


def _watch(selector: selectors.BaseSelector, sock: socket.socket, data: object, reads: bool, writes: bool) -> None:
    """Let a selector watch a socket for these events alone."""
    events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes
    known = selector.get_map().get(sock.fileno())
    if known is None and events:
        selector.register(sock, events, data)
    elif known is not None and not events:
        selector.unregister(sock)
    elif known is not None and known.events != events:
        selector.modify(sock, events, data)
