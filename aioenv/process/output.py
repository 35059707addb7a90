"""The output of workers: it becomes log records, and its last lines become part of errors."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from aioenv.ipc.messages import is_new_warning, readable_log_line, unpack_log_line
from aioenv.process.process import Output

__all__ = ["LOG", "OutputLog"]

LOG = logging.getLogger("aioenv.workers")

LAST_LINES = 40
# A longer line is split into several records: an env that prints 200 kB in one line must not fill a terminal.
MAX_LINE_CHARS = 8192
# How long to log before the loop gets a turn, in seconds: one env's flood must not delay the others.
_TURN_S = 1e-3
# Warnings of Python (Gymnasium's among them) and of MuJoCo, except that a model uses deprecated syntax.
_WARNING = re.compile(r".+:\d+: \w*Warning: |MuJoCo: (?!.*\bdeprecated\b)")


class OutputLog:
    """Reads one worker's stdout and stderr (they share a stream) and logs them line by line.

    Records go to the logger "aioenv.workers" at level INFO, with `worker`, `pid` and `slots` as attributes, and read
    "worker 3 (pid 4711): …", after `prefix` if there is one. Records that envs log keep their level, and go to the
    logger "aioenv.workers." plus the name of their logger. Lines that are warnings have level WARNING, so that they
    show even if the user has not configured logging. Warnings that differ only in numbers have that level once.

    Args:
        label: the name of the worker.
        pid: its process id.
        slots: the slots that it holds.
        prefix: text before each line; None: no text.
        seen_warnings: warnings of workers so far, without numbers; the workers of a vector env share the set. None: an
            empty set.

    Attributes:
        listener: called with all new lines too; None: not called.
    """

    def __init__(
        self, label: str, pid: int, slots: tuple[int, ...], prefix: str | None, seen_warnings: set[str] | None = None
    ) -> None:
        self._label = f"{prefix}: {label}" if prefix else label
        self._extra = {"worker": label, "pid": pid, "slots": slots}
        self._pid = pid
        self._seen_warnings = set() if seen_warnings is None else seen_warnings
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reported_failure = False  # of a log handler that raises: reported once
        self.listener: Callable[[Sequence[str]], object] | None = None

    @property
    def last_lines(self) -> str:
        """The last lines so far."""
        return "\n".join(self._last_lines)

    async def pump(self, output: Output) -> None:
        """Read and log until the stream ends.

        Once the process has ended, this logs without yielding to the loop: an error may wait for the last lines.
        """
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        rest = ""
        turn_ends = perf_counter() + _TURN_S
        while data := await output.reader.read(1 << 16):
            *lines, rest = (rest + decode(data)).split("\n")
            if len(rest) > MAX_LINE_CHARS:
                whole = (len(rest) - 1) // MAX_LINE_CHARS * MAX_LINE_CHARS
                lines.append(rest[:whole])
                rest = rest[whole:]
            pieces = list(_split_long_lines(lines))
            # before any of them is logged: an error that is about to be raised quotes them
            self._last_lines.extend(map(readable_log_line, pieces))
            if self.listener is not None:
                self.listener(pieces)
            for piece in pieces:
                self._log(piece)
                if perf_counter() > turn_ends and not output.ended.is_set():
                    await asyncio.sleep(0)
                    turn_ends = perf_counter() + _TURN_S
        rest += decode(b"", True)
        if rest:
            self._last_lines.append(readable_log_line(rest))
            self._log(rest)

    def _log(self, line: str) -> None:
        try:
            self._log_record(line)
        except Exception as exc:  # of a log handler; if reading stopped, the worker would soon block when it prints
            if not self._reported_failure:
                self._reported_failure = True
                message = f"a line that {self._label} (pid {self._pid}) has printed could not be logged"
                with contextlib.suppress(Exception):  # the loop's exception handler logs, too
                    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": exc})

    def _log_record(self, line: str) -> None:
        record = unpack_log_line(line)
        if record is None:
            is_warning = _WARNING.match(line) and is_new_warning(line, self._seen_warnings)
            level = logging.WARNING if is_warning else logging.INFO
            LOG.log(level, "%s (pid %d): %s", self._label, self._pid, line, extra=self._extra)
        else:
            log = LOG if record.logger == "root" else LOG.getChild(record.logger)
            log.log(record.level, "%s (pid %d): %s", self._label, self._pid, record.text, extra=self._extra)


def _split_long_lines(lines: list[str]) -> Iterator[str]:
    """Yield the lines, the longest ones in several pieces."""
    for line in lines:
        line = line.rstrip("\r")
        for start in range(0, max(len(line), 1), MAX_LINE_CHARS):
            yield line[start : start + MAX_LINE_CHARS]
