"""What travels in the tails of frames: Python objects, by pickle.

The step path does not come here, except for infos that don't fit columns. Everything is written by our own two
ends of a private pipe; nothing here is fit for bytes from strangers.
"""

from __future__ import annotations

import logging
import pickle
import re
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle

from aioenv.definitions.restore import Code
from aioenv.definitions.table import DefinitionTable, current_table
from aioenv.errors import WireError
from aioenv.ipc.frames import Buffer

__all__ = [
    "WHERE",
    "CallRequest",
    "Failure",
    "LogLine",
    "LostRow",
    "ResetRequest",
    "Start",
    "StepReply",
    "StepRequest",
    "dump",
    "dump_code",
    "dump_columns",
    "dump_state",
    "dump_step",
    "is_new_warning",
    "load",
    "load_code",
    "load_columns",
    "load_step",
    "message_of",
    "pack_log_line",
    "readable_log_line",
    "reason_of",
    "traceback_of",
    "tried",
    "unpack_log_line",
]

# The signal that asks a worker to print where it is; None where there is none that nobody else uses.
WHERE = int(signal.SIGRTMAX) - 2 if hasattr(signal, "SIGRTMAX") else None


class Start(NamedTuple):
    """START: what a worker needs before it can unpickle its service, and the service."""

    sys_path: list[str]
    registry: tuple[bytes, bytes] | None  # Gymnasium's, as `host.registry` gives it
    preload: tuple[str, ...]  # modules to import first
    service: bytes  # a pickled callable that makes the service
    code: Code | None  # what its envs are made from
    environ: dict[str, str] | None  # all environment variables; None: they are as they should be
    directory: str | None  # the working directory; likewise
    poll_s: float  # how long to poll for a request before the process sleeps, in seconds
    cpus: tuple[int, ...] | None  # the CPUs to be pinned to; None: as it comes
    ignored: tuple[str, ...] = ()  # names of signals to ignore
    log_level: int = 30  # of what envs log, from here on it is told
    argv: tuple[str, ...] = ()  # the program's arguments, as multiprocessing's workers have them
    cpu_share: int | None = None  # how many CPUs to use at most, since other workers use the others; None: any
    authkey: bytes = b""  # the parent's, which the servers of its multiprocessing managers ask for; empty: as it is


class CallRequest(NamedTuple):
    """CALL: a method of the service."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ResetRequest(NamedTuple):
    """RESET: which rows of the worker, with which seeds."""

    rows: tuple[int, ...]
    seeds: tuple[int | None, ...]
    options: dict[str, Any] | None
    whole: bool  # reply with the latest observations of all rows, not only of those that were reset
    shown: Sequence[int] | None = None  # reply with those of these rows instead
    each: bool = False  # the seeds are the rows' own, even if they happen to be one number and those after it


class StepRequest(NamedTuple):
    """STEP, when its tail is not empty: which rows, and the parts of their actions that are objects."""

    rows: Sequence[int] | None  # None: all
    objects: list[Any] | None
    given: list[Any] | None = None  # in place of all actions: one a row, which its env gets as it is


class StepReply(NamedTuple):
    """The tail of a RESULT to STEP or RESET, when there is anything to say beyond the arrays."""

    schemas: list[Any]  # (number, schema) of info dicts that are new to the parent
    infos: list[Any]  # groups of columns
    objects: list[list[Any]]  # the observations' object leaves
    failures: list[Failure]
    over: Sequence[int] = ()  # rows whose envs have no further episode
    beyond: Sequence[tuple[int, bytes]] = ()  # rows, and what did not fit into their checkpoints
    parcels: Sequence[tuple[int, Any]] = ()  # rows, and what images of them need besides (see `physics.subject`)


# A step of successive rows, whose actions are arrays, travels without a pickle: the first row, and how many.
_RUN = struct.Struct("<cII")
_RUN_TAG = b"R"  # no pickle begins with it


def dump_step(request: StepRequest, table: DefinitionTable | None = None) -> bytes:
    """The tail of a STEP of some rows.

    Raises:
        Exception: if an action can't be pickled.
    """
    rows = request.rows
    if isinstance(rows, range) and not request.objects and request.given is None:
        return _RUN.pack(_RUN_TAG, rows.start, len(rows))
    return dump(request, table)


def load_step(tail: Buffer) -> StepRequest:
    """What `dump_step` made; of all rows, if the tail is empty.

    Raises:
        WireError: if it can't be understood.
    """
    if not len(tail):
        return _EVERY_ROW
    if len(tail) != _RUN.size or tail[0] != _RUN_TAG[0]:
        request: StepRequest = load(tail)
        return request
    _, start, count = _RUN.unpack(tail)
    return StepRequest(range(start, start + count), None)


_EVERY_ROW = StepRequest(None, None)

# A reply whose infos are typed columns alone, of sorts known to the parent, travels without a pickle: the number of
# groups, and for each its sort, its rows and its bytes.
_COLUMNS = struct.Struct("<cI")
_COLUMNS_TAG = b"I"  # no pickle begins with it
_GROUP = struct.Struct("<IiQ")  # sort, how many rows (-1: all of the request), how many bytes
_ROW = struct.Struct("<I")


def dump_columns(groups: Sequence[tuple[int, Sequence[int] | None, Buffer, Any]]) -> bytes:
    """The tail of a reply that has nothing but typed columns."""
    parts: list[Buffer] = [_COLUMNS.pack(_COLUMNS_TAG, len(groups))]
    for sort, rows, data, _ in groups:
        if rows is None:
            parts.append(_GROUP.pack(sort, -1, len(data)))
        else:
            parts.append(_GROUP.pack(sort, len(rows), len(data)))
            parts.append(struct.pack(f"<{len(rows)}I", *rows))
        parts.append(data)
    return b"".join(parts)


def load_columns(tail: memoryview) -> list[tuple[int, tuple[int, ...] | None, memoryview]] | None:
    """Sorts, rows and bytes, if `dump_columns` made this tail.

    Raises:
        WireError: if it is cut short.
    """
    if tail[:1] != _COLUMNS_TAG:
        return None
    try:
        count = _COLUMNS.unpack_from(tail)[1]
        offset, groups = _COLUMNS.size, []
        for _ in range(count):
            sort, n, size = _GROUP.unpack_from(tail, offset)
            offset += _GROUP.size
            rows = None
            if n >= 0:
                rows = struct.unpack_from(f"<{n}I", tail, offset)
                offset += n * _ROW.size
            groups.append((sort, rows, tail[offset : offset + size]))
            offset += size
    except struct.error as exc:
        raise WireError(f"columns of infos are cut short: {exc}") from exc
    if offset != len(tail):
        raise WireError(f"columns of infos: expected {offset} bytes, got {len(tail)}")
    return groups


class LostRow(NamedTuple):
    """In a call of `reset_lost_rows`: a row whose env a process took with it, and which begins anew in another."""

    row: int
    seed: int | None  # for its next reset, unless that is given another
    obs: Any  # its last observation; None if nobody knows
    over: bool  # its episode had ended already: there is nothing to report, and the autoreset is due
    state: Any = None  # what images of that observation are drawn from; None if nobody draws them from states


class Failure(NamedTuple):
    """Why something failed in a worker: an exception, in a form that always travels."""

    row: int | None  # of the worker; None: the request as a whole
    type_name: str
    message: str
    traceback: str
    pickled: bytes | None  # the exception itself, if it can be pickled
    obstacle: str = ""  # why it can't be


def dump(value: Any, table: DefinitionTable | None = None) -> bytes:
    """Pickle data. Classes and functions that plain pickle refuses, or takes from `__main__` by name, go by number.

    Args:
        value: the data.
        table: of the definitions that sender and receiver have; None: that of the worker which this is. Where there
            is none, they go by value.

    Raises:
        Exception: if it can't be pickled.
    """
    table = current_table() if table is None else table
    if table is not None:
        return table.dumps(value)
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return dump_code(value)
    # a search costs far less than cloudpickle, and a string that only looks like it does no harm
    return dump_code(value) if b"main__" in data else data


def dump_state(value: Any) -> bytes:
    """Pickle data that may outlive both processes: classes go by name, and by value where they have none."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return dump_code(value)


def dump_code(value: Any) -> bytes:
    """Pickle with functions and classes of `__main__` by value, so that the receiver need not import it.

    In a process that multiprocessing has spawned (a rank of a training, say) they are `__mp_main__`'s.
    """
    main = sys.modules.get("__mp_main__")  # elsewhere another name of `__main__`
    if main is None or main.__name__ != "__mp_main__":
        return _dumps(value)
    with _by_value:
        if main.__name__ in cloudpickle.list_registry_pickle_by_value():
            return _dumps(value)
        cloudpickle.register_pickle_by_value(main)  # not for good: what others pickle is theirs
        try:
            return _dumps(value)
        finally:
            cloudpickle.unregister_pickle_by_value(main)


_by_value = threading.RLock()  # a `__reduce__` may come here again


def _dumps(value: Any) -> bytes:
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def load(data: Buffer) -> Any:
    """Unpickle what `dump` or `dump_code` made.

    Raises:
        WireError: if it does not unpickle, whatever the reason; the reason is the error's cause.
    """
    value, exc = tried(pickle.loads, data)
    if exc is not None:
        raise WireError(f"a message does not unpickle: {reason_of(exc)}") from exc
    return value


def tried(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    """Call what may run anybody's code, as unpickling does: gives what it returns, and what it raises.

    That is whatever it may be, since a module that is imported may call `sys.exit`; but Ctrl-C goes on.
    """
    try:
        return function(*args), None
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        return None, exc


def reason_of(exc: BaseException) -> str:
    """The type and message of an exception, whatever its `__str__` does."""
    return f"{type(exc).__name__}: {message_of(exc)}"


def message_of(exc: BaseException) -> str:
    """The message of an exception, whatever its `__str__` does."""
    try:
        return str(exc)
    except BaseException:  # what is wrong with it is no reason for the process to end
        return "(its __str__ raised)"


def traceback_of(exc: BaseException) -> str:
    """The traceback of an exception as text, whatever it is made of."""
    try:
        return "".join(traceback.format_exception(exc))
    except Exception as why:  # a SyntaxError whose line is no text, say
        frames = "".join(traceback.format_tb(exc.__traceback__))
        return f"Traceback (most recent call last):\n{frames}{reason_of(exc)}\n(no more: {reason_of(why)})\n"


def load_code(data: Buffer) -> Any:
    """Unpickle a factory or a service; what its modules raise when they are imported comes out as it is."""
    return pickle.loads(data)


# ------------------------------------------------------------ log records

# Of ASCII's separators, which nobody prints: one before a record and between its parts, one in place of line ends.
_PART, _LINE = "\x1e", "\x1d"

_MAX_SAID = 100  # who has something new to warn of in every step is not heard for ever
_MAX_CHARS = 8000  # as the parent cuts longer lines


class LogLine(NamedTuple):
    """A log record: what travels of it."""

    level: int
    logger: str
    text: str  # the message, and the traceback if there is one


def pack_log_line(record: LogLine) -> bytes:
    """A record as a line."""
    text = record.text.replace("\r", "").replace("\n", _LINE)
    half = _MAX_CHARS // 2
    if len(text) > _MAX_CHARS:
        text = f"{text[:half]} [...] {text[-half:]}"
    line = f"{_PART}{record.level}{_PART}{record.logger.replace(chr(10), ' ')}{_PART}{text}\n"
    return line.encode("utf-8", "replace")


def unpack_log_line(line: str) -> LogLine | None:
    """The record of a line, without its end; None if it is none."""
    if not line.startswith(_PART):
        return None
    try:
        _, level, logger, text = line.split(_PART, 3)
        return LogLine(int(level), logger, text.replace(_LINE, "\n"))
    except ValueError:
        return None


def readable_log_line(line: str) -> str:
    """A line as people read it."""
    match unpack_log_line(line):
        case LogLine(level, logger, text):
            return f"{logging.getLevelName(level)}:{logger}:{text}"
    return line


def is_new_warning(line: str, said: set[str]) -> bool:
    """Whether this has not been said yet, numbers aside; from now on it has."""
    text = re.sub(r"\d+", "", line)
    if text in said or len(said) >= _MAX_SAID:
        return False
    said.add(text)
    return True
