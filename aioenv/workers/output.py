"""What workers print becomes log records, and the last of it goes into errors."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

__all__ = ["OutputLog"]

_log = logging.getLogger("aioenv.workers")

TAIL_LINES = 40
# A longer line is cut into several records: an env that prints 200 kB in one line shall not fill a terminal.
MAX_LINE_CHARS = 8192


class OutputLog:
    """Reads one worker's stdout and stderr (they share a stream) and logs it line by line.

    Records go to the logger "aioenv.workers" at level INFO, with `worker`, `pid` and `slots` as attributes, and
    read "worker 3 (pid 4711): …", after `prefix` if there is one.
    """

    def __init__(self, label: str, pid: int, slots: tuple[int, ...], prefix: str | None) -> None:
        self._label = f"{prefix}: {label}" if prefix else label
        self._extra = {"worker": label, "pid": pid, "slots": slots}
        self._pid = pid
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> str:
        """The last lines so far."""
        return "\n".join(self._tail)

    async def pump(self, reader: asyncio.StreamReader) -> None:
        """Read until the stream ends."""
        rest = ""
        while data := await reader.read(1 << 16):
            *lines, rest = (rest + data.decode("utf-8", "replace")).split("\n")
            for line in lines:
                self._record(line)
            while len(rest) > MAX_LINE_CHARS:
                self._record(rest[:MAX_LINE_CHARS])
                rest = rest[MAX_LINE_CHARS:]
        if rest:
            self._record(rest)

    def _record(self, line: str) -> None:
        line = line.rstrip("\r")
        for start in range(0, max(len(line), 1), MAX_LINE_CHARS):
            piece = line[start : start + MAX_LINE_CHARS]
            self._tail.append(piece)
            _log.info("%s (pid %d): %s", self._label, self._pid, piece, extra=self._extra)
