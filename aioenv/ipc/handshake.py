"""The handshake of a connection between machines: each side proves that it knows a secret.

::

    agent                                     parent
      HELLO: magic, invitation, role, nonce ────▶
      ◀──── CHALLENGE: nonce, HMAC(secret, "parent", HELLO, nonce)
      PROOF: HMAC(secret, "agent", HELLO, CHALLENGE) ────▶

Nothing else is read before. All three have a fixed length, nothing in them is unpickled, and the secret is not sent.
The HMACs are HMAC-SHA256 (RFC 2104), with 32 random bytes of each side. Later bytes are neither encrypted nor
authenticated, unless all this travels in TLS: else the network has to be trusted, or to be a tunnel. With TLS both
sides prove a secret that depends on the parent's certificate, too (as "tls-server-end-point" of RFC 5929). So another
machine with a certificate of the same authority can't stand between them.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NamedTuple

__all__ = [
    "CHALLENGE_BYTES",
    "CONTROL",
    "FRAMES",
    "HELLO_BYTES",
    "PROOF_BYTES",
    "Hello",
    "Invitation",
    "bind",
    "challenge",
    "hello",
    "is_proof",
    "new_invitation",
    "parse_hello",
    "proof",
]

_MAGIC = b"aioenv\x00\x01"
_NONCE_BYTES = 32
_ID_BYTES = 16
_DIGEST_BYTES = 32
HELLO_BYTES = len(_MAGIC) + _ID_BYTES + 1 + _NONCE_BYTES
CHALLENGE_BYTES = _NONCE_BYTES + _DIGEST_BYTES
PROOF_BYTES = _DIGEST_BYTES

CONTROL, FRAMES = 0, 1  # the roles of the two connections of a worker


class Invitation(NamedTuple):
    """What an agent needs to connect to its parent. It must travel where no third party can read it.

    Attributes:
        host, port: where the parent listens.
        id: names the worker that is awaited.
        secret: 32 bytes, which both sides prove to know.
    """

    host: str
    port: int
    id: bytes
    secret: bytes

    def __repr__(self) -> str:  # no log shows the secret
        return f"<invitation to {self.host}:{self.port}>"


class Hello(NamedTuple):
    """A HELLO that was received.

    Attributes:
        id: of the invitation.
        role: `CONTROL` or `FRAMES`.
        data: all of its bytes.
    """

    id: bytes
    role: int
    data: bytes


def new_invitation(host: str, port: int, secret: bytes) -> Invitation:
    """Return an invitation for one more worker."""
    return Invitation(host, port, secrets.token_bytes(_ID_BYTES), secret)


def hello(invitation: Invitation, role: int) -> bytes:
    """Return the HELLO of an agent."""
    return _MAGIC + invitation.id + bytes([role]) + secrets.token_bytes(_NONCE_BYTES)


def parse_hello(data: bytes) -> Hello | None:
    """Read a HELLO; return None if it is none."""
    if len(data) != HELLO_BYTES or not data.startswith(_MAGIC):
        return None
    at = len(_MAGIC)
    role = data[at + _ID_BYTES]
    return Hello(data[at : at + _ID_BYTES], role, data) if role in (CONTROL, FRAMES) else None


def bind(secret: bytes, certificate: bytes) -> bytes:
    """Return the secret to prove in TLS with a parent that has this certificate (DER)."""
    return _digest(secret, b"certificate", certificate)


def challenge(secret: bytes, greeting: bytes) -> bytes:
    """Return the parent's CHALLENGE, which proves that it knows the secret."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + _digest(secret, b"parent", greeting, nonce)


def proof(secret: bytes, greeting: bytes, answer: bytes) -> bytes | None:
    """Return the agent's PROOF; None if the CHALLENGE does not come from a parent that knows the secret."""
    nonce, digest = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(digest, _digest(secret, b"parent", greeting, nonce)):
        return None
    return _digest(secret, b"agent", greeting, answer)


def is_proof(secret: bytes, greeting: bytes, answer: bytes, data: bytes) -> bool:
    """Return whether a PROOF comes from an agent that knows the secret."""
    return hmac.compare_digest(data, _digest(secret, b"agent", greeting, answer))


def _digest(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")
