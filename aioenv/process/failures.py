"""Exceptions about a worker, and its output, whose last lines they quote.

They name the worker, its slots and the cause. The output of workers becomes log records.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import errno
import logging
import pickle
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from time import perf_counter
from typing import NamedTuple

from aioenv.errors import EnvError, WireError, WorkerDied, WorkerStartError, describe_exit
from aioenv.ipc.messages import Failure, is_new_warning, readable_log_line, reason_of, try_call, unpack_log_line
from aioenv.platform import oom_kills
from aioenv.process.process import Output

__all__ = [
    "LOG",
    "OutputLog",
    "WorkerIdentity",
    "cannot_start",
    "close_timeout_warning",
    "env_error",
    "oom_kills_at_start",
    "parent_env_error",
    "start_error",
    "start_failed",
    "worker_died",
]


_SIGKILL = 9
# Exceptions of envs that read from a terminal, which a worker does not have.
_NEEDS_TERMINAL = {"BdbQuit", "EOFError"}
# Advice when the system has no resources for a worker.
_HINTS = {
    errno.EMFILE: "; raise the limit (ulimit -n), or take fewer workers",
    errno.EAGAIN: "; so many processes are not allowed (ulimit -u, or a limit of the container's): take fewer workers",
    errno.ENOMEM: "; memory does not suffice: take fewer workers",
}


@cache
def oom_kills_at_start() -> int | None:
    """Return `platform.oom_kills()` as of the first call, which is made before the first worker is started."""
    return oom_kills()


class WorkerIdentity(NamedTuple):
    """The worker that an error is about."""

    label: str
    pid: int | None
    slots: tuple[int, ...]
    stderr: str  # the last lines that it printed
    node: str = ""  # the name of its machine; empty: this one

    @property
    def where(self) -> str:
        """Its process id, and its machine."""
        return f"pid {self.pid} on {self.node}" if self.node else f"pid {self.pid}"


def cannot_start(what: str, error: Exception) -> WorkerStartError:
    """Make the error for a process that the system could not start, with advice if resources are missing."""
    hint = _HINTS.get(getattr(error, "errno", None) or 0, "")
    return WorkerStartError(f"{what} can't be started: {error}{hint}")


def env_error(worker: WorkerIdentity, failure: Failure) -> EnvError:
    """Make the error for an exception of an env, or of the worker's service as a whole."""
    slots = worker.slots or (-1,)
    if failure.row is not None:
        slots = (slots[failure.row],)
    where = f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]}"
    error = EnvError(
        f"{where} ({worker.label}, {worker.where}): {_headline(failure)}\n{failure.traceback}",
        slots=slots,
        pid=worker.pid,
        traceback=failure.traceback,
        stderr=worker.stderr,
    )
    _add_cause(error, failure)
    if failure.type_name in _NEEDS_TERMINAL:
        error.add_note("A worker has no terminal: breakpoint() and input() work in envs with debug=True.")
    return error


def parent_env_error(worker: WorkerIdentity, message: str, slots: Sequence[int]) -> EnvError:
    """Make an error about some slots that the parent has found."""
    where = f"slot {slots[0]}" if len(slots) == 1 else f"slots {list(slots)}"
    text = f"{where} ({worker.label}, {worker.where}): {message}"
    return EnvError(text, slots=tuple(slots), pid=worker.pid, stderr=worker.stderr)


def close_timeout_warning(worker: WorkerIdentity, grace_s: float, running: int | None) -> str:
    """Return the warning for a worker that is killed since it did not close its envs within `grace_s` seconds."""
    where = "" if running is None else f", at slot {running}"
    return (
        f"{worker.label} ({worker.where}) has not ended within grace_s={grace_s:g}{where}: it is killed, and what "
        "envs had yet to save when they are closed is lost; give `close` more time if that matters"
    )


def worker_died(
    worker: WorkerIdentity,
    returncode: int | None,
    fault: WireError | None,
    running: int | None,
    kill_reason: str | None,
    restart_failure: str | None = None,
    lost: str | None = None,
) -> WorkerDied:
    """Make the error for the end of a worker's process, or of its stream.

    Args:
        worker: the worker.
        returncode: its exit code, or `-N` for signal N; None if unknown.
        fault: the error that broke its stream; None if it was whole.
        running: the slot that it was running; None if none, or unknown.
        kill_reason: the reason why this process killed it; None if it did not.
        restart_failure: the reason why it could not be started again; None if it was not tried.
        lost: why nothing more can be heard of it; None if that is not so.
    """
    how = f"broke its stream: {fault}" if fault else describe_exit(returncode)
    if lost is not None:
        how = f"is lost: {lost}"
    if restart_failure is not None:
        how, running = f"could not be started again: {restart_failure}", None
    elif kill_reason is not None:
        how = f"was killed: {kill_reason}"
    elif returncode == -_SIGKILL and fault is None:
        how += f" ({_sigkill_sender(worker.node)})"
    where = "" if running is None else f" while it ran slot {running}"
    slots = f", slots {list(worker.slots)}" if worker.slots else ""  # a render worker has none
    message = _with_output(f"{worker.label} ({worker.where}{slots}) {how}{where}", worker)
    return WorkerDied(
        message,
        slots=worker.slots or (-1,),
        pid=worker.pid,
        stderr=worker.stderr,
        returncode=returncode,
        running=running,
    )


def _sigkill_sender(node: str) -> str:
    """Return the probable sender of a SIGKILL, from the kernel's counter of out-of-memory kills on this machine."""
    before, now = (None, None) if node else (oom_kills_at_start(), oom_kills())
    if before is None or now is None:
        return "by a process, or by the kernel because memory ran out: see `dmesg`" + (" there" if node else "")
    if now > before:
        return (
            f"by the kernel, it seems: memory ran out, and it has killed {now - before} of this container's processes"
        )
    return "by a process, and not by the kernel: memory did not run out"


def start_error(
    worker: WorkerIdentity, message: str, traceback: str = "", *, kind: type[WorkerStartError] = WorkerStartError
) -> WorkerStartError:
    """Make the error for a worker that did not start."""
    return kind(
        _with_output(message, worker), slots=worker.slots, pid=worker.pid, traceback=traceback, stderr=worker.stderr
    )


def start_failed(worker: WorkerIdentity, failure: Failure) -> WorkerStartError:
    """Make the error for a worker whose service could not be made."""
    slots = worker.slots if failure.row is None else (worker.slots[failure.row],)
    where = "" if failure.row is None else f" for slot {slots[0]}"
    message = f"{worker.label} could not start{where}: {_headline(failure)}\n{failure.traceback}"
    error = start_error(worker._replace(slots=slots), message, failure.traceback)
    _add_cause(error, failure)
    return error


def _headline(failure: Failure) -> str:
    return f"{failure.type_name}: {failure.message}" if failure.message else failure.type_name


def _with_output(message: str, worker: WorkerIdentity) -> str:
    return f"{message}\nIts last output:\n{worker.stderr}" if worker.stderr else message


def _add_cause(error: Exception, failure: Failure) -> None:
    """Set the original exception as cause, if it could be sent; its traceback is text."""
    if failure.pickled is None:
        if failure.obstacle:
            error.add_note(f"The {failure.type_name} itself can't be sent to this process: {failure.obstacle}")
        return
    original, exc = try_call(pickle.loads, failure.pickled)
    if exc is not None:
        error.add_note(f"The {failure.type_name} itself does not unpickle in this process: {reason_of(exc)}")
        return
    if isinstance(original, BaseException):
        if isinstance(original, ModuleNotFoundError) and original.name in sys.modules:
            original.add_note(
                f"This process has a module {original.name!r}, but workers can't import it: "
                "after cloudpickle.register_pickle_by_value(module) it is sent to them"
            )
        error.__cause__ = original


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

    Records go to the logger "aioenv.workers" at level INFO, with `worker`, `pid` and `slots` as attributes. They read
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
