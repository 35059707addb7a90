"""What workers print becomes log records, and the last of it goes into errors."""

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

TAIL_LINES = 40
# A longer line is cut into several records: an env that prints 200 kB in one line shall not fill a terminal.
MAX_LINE_CHARS = 8192
# How long to log before others have a turn of the loop, in seconds: what one env floods shall not hold up the rest.
_TURN_S = 1e-3
# Python's warnings, Gymnasium's among them, and MuJoCo's; not that a model is written in an old way
_WARNS = re.compile(r".+:\d+: \w*Warning: |MuJoCo: (?!.*\bdeprecated\b)")


class OutputLog:
    """Reads one worker's stdout and stderr (they share a stream) and logs it line by line.

    Records go to the logger "aioenv.workers" at level INFO, with `worker`, `pid` and `slots` as attributes, and
    read "worker 3 (pid 4711): …", after `prefix` if there is one. What envs log themselves keeps its level, and goes
    to "aioenv.workers." and the name of their logger. What is a warning has level WARNING, so that somebody who has set
    up no logging sees it too: of those that differ in numbers alone only the first, whichever worker says it.

    Args:
        label: which worker it is.
        pid: its process id.
        slots: the slots that it holds.
        prefix: goes before each line.
        said: what workers have warned of, numbers aside; those of one vector env share it. None: nothing yet.

    Attributes:
        listener: is given all lines too; None: nobody listens.
    """

    def __init__(
        self, label: str, pid: int, slots: tuple[int, ...], prefix: str | None, said: set[str] | None = None
    ) -> None:
        self._label = f"{prefix}: {label}" if prefix else label
        self._extra = {"worker": label, "pid": pid, "slots": slots}
        self._pid = pid
        self._said = set() if said is None else said
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._complained = False  # of a handler that raises: once is enough
        self.listener: Callable[[Sequence[str]], object] | None = None

    @property
    def tail(self) -> str:
        """The last lines so far."""
        return "\n".join(self._tail)

    async def pump(self, output: Output) -> None:
        """Read until the stream ends; without a break once the process has, since its last lines are waited for."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        rest = ""
        turn = perf_counter() + _TURN_S
        while data := await output.reader.read(1 << 16):
            *lines, rest = (rest + decode(data)).split("\n")
            if len(rest) > MAX_LINE_CHARS:
                whole = (len(rest) - 1) // MAX_LINE_CHARS * MAX_LINE_CHARS
                lines.append(rest[:whole])
                rest = rest[whole:]
            pieces = list(_pieces(lines))
            # all of them first: an error that is about to be raised wants them
            self._tail.extend(map(readable_log_line, pieces))
            if self.listener is not None:
                self.listener(pieces)
            for piece in pieces:
                self._log(piece)
                if perf_counter() > turn and not output.ended.is_set():
                    await asyncio.sleep(0)
                    turn = perf_counter() + _TURN_S
        rest += decode(b"", True)
        if rest:
            self._tail.append(readable_log_line(rest))
            self._log(rest)

    def _log(self, line: str) -> None:
        try:
            self._hand_on(line)
        except Exception as exc:  # of a handler; what nobody reads would soon keep the worker from printing
            if not self._complained:
                self._complained = True
                message = f"a line that {self._label} (pid {self._pid}) has printed could not be logged"
                with contextlib.suppress(Exception):  # the loop's own goes to the log, too
                    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": exc})

    def _hand_on(self, line: str) -> None:
        record = unpack_log_line(line)
        if record is None:
            level = logging.WARNING if _WARNS.match(line) and is_new_warning(line, self._said) else logging.INFO
            LOG.log(level, "%s (pid %d): %s", self._label, self._pid, line, extra=self._extra)
        else:
            log = LOG if record.logger == "root" else LOG.getChild(record.logger)
            log.log(record.level, "%s (pid %d): %s", self._label, self._pid, record.text, extra=self._extra)


def _pieces(lines: list[str]) -> Iterator[str]:
    """Lines, the longest ones cut."""
    for line in lines:
        line = line.rstrip("\r")
        for start in range(0, max(len(line), 1), MAX_LINE_CHARS):
            yield line[start : start + MAX_LINE_CHARS]
