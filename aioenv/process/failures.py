"""Exceptions about a worker: they name the worker, its slots and the cause, and quote its last output."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from aioenv.errors import EnvError, WireError, WorkerDied, WorkerStartError, describe_exit
from aioenv.ipc.messages import Failure, reason_of, try_call
from aioenv.platform import oom_kills

__all__ = [
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
        f"{where} ({worker.label}, pid {worker.pid}): {_headline(failure)}\n{failure.traceback}",
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
    text = f"{where} ({worker.label}, pid {worker.pid}): {message}"
    return EnvError(text, slots=tuple(slots), pid=worker.pid, stderr=worker.stderr)


def close_timeout_warning(worker: WorkerIdentity, grace_s: float, running: int | None) -> str:
    """Return the warning for a worker that is killed since it did not close its envs within `grace_s` seconds."""
    where = "" if running is None else f", at slot {running}"
    return (
        f"{worker.label} (pid {worker.pid}) has not ended within grace_s={grace_s:g}{where}: it is killed, and what "
        "envs had yet to save when they are closed is lost; give `close` more time if that matters"
    )


def worker_died(
    worker: WorkerIdentity,
    returncode: int | None,
    fault: WireError | None,
    running: int | None,
    kill_reason: str | None,
    restart_failure: str | None = None,
) -> WorkerDied:
    """Make the error for the end of a worker's process, or of its stream.

    Args:
        worker: the worker.
        returncode: its exit code, or `-N` for signal N; None if unknown.
        fault: the error that broke its stream; None if it was whole.
        running: the slot that it was running; None if none, or unknown.
        kill_reason: the reason why this process killed it; None if it did not.
        restart_failure: the reason why it could not be started again; None if it was not tried.
    """
    how = f"broke its stream: {fault}" if fault else describe_exit(returncode)
    if restart_failure is not None:
        how, running = f"could not be started again: {restart_failure}", None
    elif kill_reason is not None:
        how = f"was killed: {kill_reason}"
    elif returncode == -_SIGKILL and fault is None:
        how += f" ({_sigkill_sender()})"
    where = "" if running is None else f" while it ran slot {running}"
    slots = f", slots {list(worker.slots)}" if worker.slots else ""  # a render worker has none
    message = _with_output(f"{worker.label} (pid {worker.pid}{slots}) {how}{where}", worker)
    return WorkerDied(
        message,
        slots=worker.slots or (-1,),
        pid=worker.pid,
        stderr=worker.stderr,
        returncode=returncode,
        running=running,
    )


def _sigkill_sender() -> str:
    """Return the probable sender of a SIGKILL, from the kernel's counter of out-of-memory kills."""
    before, now = oom_kills_at_start(), oom_kills()
    if before is None or now is None:
        return "by a process, or by the kernel because memory ran out: see `dmesg`"
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
        error.__cause__ = original
