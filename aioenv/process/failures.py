"""What went wrong in a worker, as exceptions: who, which slots, how, and the worker's own last words."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from aioenv.errors import EnvError, WireError, WorkerDied, WorkerStartError, describe_exit
from aioenv.ipc.messages import Failure, reason_of, tried
from aioenv.platform import oom_kills

__all__ = [
    "WorkerIdentity",
    "env_error",
    "env_error_here",
    "late_to_close",
    "not_started",
    "oom_kills_before",
    "start_error",
    "start_failed",
    "worker_died",
]


_SIGKILL = 9
# What an env raises that asks somebody at the terminal, which a worker does not have.
_ASKS = {"BdbQuit", "EOFError"}
# What to do when the system has no room for a worker.
_HINTS = {
    errno.EMFILE: "; raise the limit (ulimit -n), or take fewer workers",
    errno.EAGAIN: "; so many processes are not allowed (ulimit -u, or a limit of the container's): take fewer workers",
    errno.ENOMEM: "; memory does not suffice: take fewer workers",
}


@cache
def oom_kills_before() -> int | None:
    """See `machine.oom_kills`: the number before the first worker was started, which is when to call this first."""
    return oom_kills()


class WorkerIdentity(NamedTuple):
    """Which worker an error is about."""

    label: str
    pid: int | None
    slots: tuple[int, ...]
    stderr: str  # the last lines that it printed


def not_started(what: str, error: Exception) -> WorkerStartError:
    """What could not be started at all, and what to do where the system has no room for it."""
    hint = _HINTS.get(getattr(error, "errno", None) or 0, "")
    return WorkerStartError(f"{what} can't be started: {error}{hint}")


def env_error(who: WorkerIdentity, failure: Failure) -> EnvError:
    """An exception of an env, or of the service as a whole."""
    slots = who.slots or (-1,)
    if failure.row is not None:
        slots = (slots[failure.row],)
    where = f"slot {slots[0]}" if len(slots) == 1 else f"slots {slots[0]} to {slots[-1]}"
    error = EnvError(
        f"{where} ({who.label}, pid {who.pid}): {_headline(failure)}\n{failure.traceback}",
        slots=slots,
        pid=who.pid,
        traceback=failure.traceback,
        stderr=who.stderr,
    )
    _add_cause(error, failure)
    if failure.type_name in _ASKS:
        error.add_note("A worker has no terminal: breakpoint() and input() work in envs with debug=True.")
    return error


def env_error_here(who: WorkerIdentity, message: str, slots: Sequence[int]) -> EnvError:
    """An error of some slots that the parent found."""
    where = f"slot {slots[0]}" if len(slots) == 1 else f"slots {list(slots)}"
    text = f"{where} ({who.label}, pid {who.pid}): {message}"
    return EnvError(text, slots=tuple(slots), pid=who.pid, stderr=who.stderr)


def late_to_close(who: WorkerIdentity, grace_s: float, running: int | None) -> str:
    """What to say of a worker that had so many seconds to close its envs, and is at the slot `running` still."""
    where = "" if running is None else f", at slot {running}"
    return (
        f"{who.label} (pid {who.pid}) has not ended within grace_s={grace_s:g}{where}: it is killed, and what envs had "
        "yet to save when they are closed is lost; give `close` more time if that matters"
    )


def worker_died(
    who: WorkerIdentity,
    returncode: int | None,
    fault: WireError | None,
    running: int | None,
    why: str | None,
    unborn: str | None = None,
) -> WorkerDied:
    """The end of a process, or of what could be understood of it.

    Args:
        running: the slot that it was running.
        why: why we killed it, if we did.
        unborn: why it did not come up, if it was started again and did not.
    """
    how = f"broke its stream: {fault}" if fault else describe_exit(returncode)
    if unborn is not None:
        how, running = f"could not be started again: {unborn}", None
    elif why is not None:
        how = f"was killed: {why}"
    elif returncode == -_SIGKILL and fault is None:
        how += f" ({_who_killed()})"
    where = "" if running is None else f" while it ran slot {running}"
    slots = f", slots {list(who.slots)}" if who.slots else ""  # a render worker has none
    message = _with_output(f"{who.label} (pid {who.pid}{slots}) {how}{where}", who)
    return WorkerDied(
        message, slots=who.slots or (-1,), pid=who.pid, stderr=who.stderr, returncode=returncode, running=running
    )


def _who_killed() -> str:
    before, now = oom_kills_before(), oom_kills()
    if before is None or now is None:
        return "by somebody, or by the kernel because memory ran out: see `dmesg`"
    if now > before:
        return (
            f"by the kernel, it seems: memory ran out, and it has killed {now - before} of this container's processes"
        )
    return "by somebody, and not by the kernel: memory did not run out"


def start_error(
    who: WorkerIdentity, message: str, traceback: str = "", *, kind: type[WorkerStartError] = WorkerStartError
) -> WorkerStartError:
    """A worker that did not come up."""
    return kind(_with_output(message, who), slots=who.slots, pid=who.pid, traceback=traceback, stderr=who.stderr)


def start_failed(who: WorkerIdentity, failure: Failure) -> WorkerStartError:
    """A worker whose service could not be made."""
    slots = who.slots if failure.row is None else (who.slots[failure.row],)
    where = "" if failure.row is None else f" for slot {slots[0]}"
    message = f"{who.label} could not start{where}: {_headline(failure)}\n{failure.traceback}"
    error = start_error(who._replace(slots=slots), message, failure.traceback)
    _add_cause(error, failure)
    return error


def _headline(failure: Failure) -> str:
    return f"{failure.type_name}: {failure.message}" if failure.message else failure.type_name


def _with_output(message: str, who: WorkerIdentity) -> str:
    return f"{message}\nIts last output:\n{who.stderr}" if who.stderr else message


def _add_cause(error: Exception, failure: Failure) -> None:
    """The exception itself, if it came across; its traceback is text by now."""
    if failure.pickled is None:
        if failure.obstacle:
            error.add_note(f"The {failure.type_name} itself can't be sent to this process: {failure.obstacle}")
        return
    original, exc = tried(pickle.loads, failure.pickled)
    if exc is not None:
        error.add_note(f"The {failure.type_name} itself does not unpickle in this process: {reason_of(exc)}")
        return
    if isinstance(original, BaseException):
        error.__cause__ = original
