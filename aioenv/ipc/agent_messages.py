"""Messages between a parent and the agent of a worker on another machine: JSON or raw bytes, no pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

from aioenv.errors import WireError

__all__ = ["ALIVE_S", "AgentMessage", "MessageReader", "pack", "pack_json"]

_HEAD = struct.Struct("<BI")  # kind, length
# How often an agent tells that its machine is there, in seconds.
ALIVE_S = 2.0
_MAX_BYTES = 1 << 20  # no message of either side is larger


class AgentMessage(IntEnum):
    """The kinds of messages, with their content."""

    # of the agent
    VERSIONS = 1  # JSON: the versions of its libraries, its node and its process id
    STARTED = 2  # JSON: the worker's process id
    OUTPUT = 3  # bytes that the worker has printed
    ROW = 4  # JSON: the row that the worker has been running for some time, or null
    ENDED = 5  # JSON: the worker's exit code, and the row that it ran
    FAILED = 6  # JSON: why the worker could not be started
    ALIVE = 7  # empty: sent every `ALIVE_S` seconds
    # of the parent
    START = 10  # JSON: the worker's environment variables
    SIGNAL = 11  # JSON: the number of a signal to the worker and its process group
    PRINT_STACK = 12  # empty: let the worker print its stack
    REFUSED = 13  # JSON: why the agent is not wanted


def pack(kind: AgentMessage, data: bytes = b"") -> bytes:
    """Return a message with raw bytes."""
    return _HEAD.pack(kind, len(data)) + data


def pack_json(kind: AgentMessage, value: Any) -> bytes:
    """Return a message with a JSON value."""
    return pack(kind, json.dumps(value).encode())


class MessageReader:
    """Divides a stream into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[AgentMessage, Any]]:
        """Yield the messages that are complete with these bytes: kind, and content (bytes of OUTPUT, else JSON's).

        Raises:
            WireError: if it is no stream of messages.
        """
        self._data += data
        while len(self._data) >= _HEAD.size:
            number, size = _HEAD.unpack_from(self._data)
            if size > _MAX_BYTES:
                raise WireError(f"a message of {size} bytes: at most {_MAX_BYTES} are allowed")
            end = _HEAD.size + size
            if len(self._data) < end:
                return
            body = bytes(self._data[_HEAD.size : end])
            del self._data[:end]
            try:
                kind = AgentMessage(number)
                yield kind, body if kind is AgentMessage.OUTPUT else json.loads(body or b"null")
            except ValueError as exc:
                raise WireError(f"not a message: kind {number}, {size} bytes: {exc}") from exc
