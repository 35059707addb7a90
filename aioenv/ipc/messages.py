"""The messages in frames' payloads, how they are pickled, and log records as lines of a worker's output.

A plain step does not use pickle, except for infos that don't fit columns. Both ends of a channel are this package and
the channel is private: nothing here is safe for untrusted bytes.

A value may pickle in the worker and still not unpickle in the parent: its `__setstate__` raises, or its module can't be
imported. One such value must not cost the rest of the message. So `load_partially` loads the message again by the
pure-Python unpickler, which is slow but can be extended to go on after an error. Each value that raises is replaced by
an `Unreadable`, and so is each object that would have been built from one.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import cloudpickle

from aioenv.definitions.restore import Code
from aioenv.definitions.table import DefinitionTable, current_table
from aioenv.errors import WireError
from aioenv.ipc.frames import Buffer

__all__ = [
    "STACK_SIGNAL",
    "CallRequest",
    "Failure",
    "LogLine",
    "LostRow",
    "ResetRequest",
    "Start",
    "StepReply",
    "StepRequest",
    "Unreadable",
    "dump",
    "dump_code",
    "dump_columns",
    "dump_state",
    "dump_step",
    "find_unreadable",
    "is_new_warning",
    "load",
    "load_code",
    "load_columns",
    "load_partially",
    "load_step",
    "message_of",
    "pack_log_line",
    "readable_log_line",
    "reason_of",
    "traceback_of",
    "try_call",
    "unpack_log_line",
]


# The signal that makes a worker print its stack; None if the platform has no real-time signals.
STACK_SIGNAL = int(signal.SIGRTMAX) - 2 if hasattr(signal, "SIGRTMAX") else None


class Start(NamedTuple):
    """START: the service, and the process state that a worker needs before it can unpickle the service."""

    sys_path: list[str]
    registry: tuple[bytes, bytes] | None  # Gymnasium's, from `worker.specs`
    preload: tuple[str, ...]  # modules to import first
    service: bytes  # a pickled callable that makes the service
    code: Code | None  # the definitions that its envs are made from
    environ: dict[str, str] | None  # all environment variables; None: they are inherited
    directory: str | None  # the working directory; None: it is inherited, or has been removed
    poll_s: float  # how long to poll for a request before sleeping, in seconds
    cpus: tuple[int, ...] | None  # the CPUs to pin to; None: any
    ignored: tuple[str, ...] = ()  # names of signals to ignore
    log_level: int = 30  # the lowest level of log records that are sent
    argv: tuple[str, ...] = ()  # the program's arguments, as in multiprocessing's workers
    cpu_share: int | None = None  # the most CPUs to use, since other workers use the rest; None: all
    authkey: bytes = b""  # the parent's, for its multiprocessing managers; empty: unchanged
    elsewhere: bool = False  # whether the worker may run on another machine, with paths of its own


class CallRequest(NamedTuple):
    """CALL: call a method of the service."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ResetRequest(NamedTuple):
    """RESET: reset rows of the worker."""

    rows: tuple[int, ...]
    seeds: tuple[int | None, ...]
    options: dict[str, Any] | None
    reply_all_rows: bool  # reply with the latest observations of all rows, not only of those that were reset
    reply_rows: Sequence[int] | None = None  # reply with the observations of these rows instead
    listed_seeds: bool = False  # the caller listed the seeds: don't take successive numbers for one seed of the batch
    automatic: bool = False  # take the options of automatic resets
    every_slot: bool = False  # all slots are reset: a plan of resets starts over
    episodes: tuple[int, ...] | None = None  # the number of each row's episode in that plan; None: the worker counts
    restored: bool = False  # reply with the first results that the state had which was set just before


class StepRequest(NamedTuple):
    """STEP, when its payload is not empty: the rows, and the parts of their actions that are objects."""

    rows: Sequence[int] | None  # None: all
    objects: list[Any] | None
    given: list[Any] | None = None  # replaces all actions: one per row, passed to its env unchanged


class StepReply(NamedTuple):
    """The payload of a RESULT to STEP or RESET, when the arrays are not all of the reply."""

    schemas: list[Any]  # (number, schema) of info dicts that are new to the parent
    infos: list[Any]  # groups of columns
    objects: list[list[Any]]  # the observations' object leaves
    failures: list[Failure]
    exhausted: Sequence[int] = ()  # rows whose envs have no further episode
    overflow: Sequence[tuple[int, bytes]] = ()  # rows, and the data that did not fit into their checkpoints
    render_updates: Sequence[tuple[int, Any]] = ()  # rows, and `state.render_source.RenderUpdate`s for their images


# A step of successive rows, whose actions are arrays, is sent without pickle: the first row, and the number of rows.
_RUN = struct.Struct("<cII")
_RUN_TAG = b"R"  # no pickle begins with this byte


def dump_step(request: StepRequest, table: DefinitionTable | None = None) -> bytes:
    """Encode the payload of a STEP of some rows.

    Raises:
        Exception: if an action can't be pickled.
    """
    rows = request.rows
    if isinstance(rows, range) and not request.objects and request.given is None:
        return _RUN.pack(_RUN_TAG, rows.start, len(rows))
    return dump(request, table)


def load_step(payload: Buffer) -> StepRequest:
    """Decode a payload of `dump_step`; an empty one is a step of all rows.

    Raises:
        WireError: if it can't be decoded.
    """
    if not len(payload):
        return _EVERY_ROW
    if len(payload) != _RUN.size or payload[0] != _RUN_TAG[0]:
        request: StepRequest = load(payload)
        return request
    _, start, count = _RUN.unpack(payload)
    return StepRequest(range(start, start + count), None)


_EVERY_ROW = StepRequest(None, None)

# A reply that has only typed columns of infos, with schemas that the parent knows, is sent without pickle. It has the
# number of groups, and for each group its schema id, its rows and its bytes.
_COLUMNS = struct.Struct("<cI")
_COLUMNS_TAG = b"I"  # no pickle begins with this byte
_GROUP = struct.Struct("<IiQ")  # schema id, number of rows (-1: all of the request), number of bytes
_ROW = struct.Struct("<I")


def dump_columns(groups: Sequence[tuple[int, Sequence[int] | None, Buffer, Any]]) -> bytes:
    """Encode the payload of a reply that has only typed columns."""
    parts: list[Buffer] = [_COLUMNS.pack(_COLUMNS_TAG, len(groups))]
    for schema_id, rows, data, _ in groups:
        if rows is None:
            parts.append(_GROUP.pack(schema_id, -1, len(data)))
        else:
            parts.append(_GROUP.pack(schema_id, len(rows), len(data)))
            parts.append(struct.pack(f"<{len(rows)}I", *rows))
        parts.append(data)
    return b"".join(parts)


def load_columns(payload: memoryview) -> list[tuple[int, tuple[int, ...] | None, memoryview]] | None:
    """Decode a payload of `dump_columns` to schema ids, rows and bytes; return None for any other payload.

    Raises:
        WireError: if it has the wrong length.
    """
    if payload[:1] != _COLUMNS_TAG:
        return None
    try:
        count = _COLUMNS.unpack_from(payload)[1]
        offset, groups = _COLUMNS.size, []
        for _ in range(count):
            schema_id, n, size = _GROUP.unpack_from(payload, offset)
            offset += _GROUP.size
            rows = None
            if n >= 0:
                rows = struct.unpack_from(f"<{n}I", payload, offset)
                offset += n * _ROW.size
            groups.append((schema_id, rows, payload[offset : offset + size]))
            offset += size
    except struct.error as exc:
        raise WireError(f"columns of infos are cut short: {exc}") from exc
    if offset != len(payload):
        raise WireError(f"columns of infos: expected {offset} bytes, got {len(payload)}")
    return groups


class LostRow(NamedTuple):
    """A row whose env was lost with its process, and begins a new episode in another one."""

    row: int
    seed: int | None  # of its next reset, unless the caller gives one
    obs: Any  # its last observation; None if unknown
    over: bool  # its episode had already ended: nothing to report, and an autoreset is pending
    state: Any = None  # the physics state for images of that observation; None if images are not drawn from states
    exhausted: bool = False  # it is over since there was no further episode: its next step resets in every mode


class Failure(NamedTuple):
    """An exception in a worker, in a form that can always be sent."""

    row: int | None  # the row of the worker; None: the request as a whole failed
    type_name: str
    message: str
    traceback: str
    pickled: bytes | None  # the exception itself; None if it can't be pickled
    obstacle: str = ""  # the reason why it can't be pickled


def dump(value: Any, table: DefinitionTable | None = None) -> bytes:
    """Pickle data, with definitions that plain pickle can't send, or finds in `__main__`, as numbers in a table.

    Args:
        value: the data.
        table: the definitions (classes and functions) that sender and receiver share; None: the table of the worker
            that this process is. Without a table, definitions are pickled by value.

    Raises:
        Exception: if the data can't be pickled.
    """
    table = current_table() if table is None else table
    if table is not None:
        return table.dumps(value)
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return dump_code(value)
    # a search costs far less than cloudpickle, and a false match does no harm
    return dump_code(value) if b"main__" in data else data


def dump_state(value: Any) -> bytes:
    """Pickle data that may outlive both processes: classes by name, or by value if plain pickle can't."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return dump_code(value)


def dump_code(value: Any) -> bytes:
    """Pickle with functions and classes of `__main__` by value, so that the receiver need not import it.

    In a process that multiprocessing has spawned (a rank of a training, say) the main module is `__mp_main__`.
    """
    main = sys.modules.get("__mp_main__")  # in other processes an alias of `__main__`
    if main is None or main.__name__ != "__mp_main__":
        return _dumps(value)
    with _by_value:
        if main.__name__ in cloudpickle.list_registry_pickle_by_value():
            return _dumps(value)
        cloudpickle.register_pickle_by_value(main)  # only for this call: cloudpickle has other users
        try:
            return _dumps(value)
        finally:
            cloudpickle.unregister_pickle_by_value(main)


_by_value = threading.RLock()  # reentrant: a `__reduce__` may call `dump_code`


def _dumps(value: Any) -> bytes:
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def load(data: Buffer) -> Any:
    """Unpickle data of `dump` or `dump_code`.

    Raises:
        WireError: if it does not unpickle; the reason is the error's cause.
    """
    value, exc = try_call(pickle.loads, data)
    if exc is not None:
        raise WireError(f"a message does not unpickle: {reason_of(exc)}") from exc
    return value


def try_call(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    """Call a function that may run user code, as unpickling does; return its result and the exception it raised.

    All exceptions but KeyboardInterrupt are caught, since an imported module may call `sys.exit`.
    """
    try:
        return function(*args), None
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        return None, exc


def reason_of(exc: BaseException) -> str:
    """Return the type and message of an exception, even if its `__str__` raises."""
    return f"{type(exc).__name__}: {message_of(exc)}"


def message_of(exc: BaseException) -> str:
    """Return the message of an exception, even if its `__str__` raises."""
    try:
        return str(exc)
    except BaseException:  # even SystemExit: a broken `__str__` must not end the process
        return "(its __str__ raised)"


def traceback_of(exc: BaseException) -> str:
    """Return the traceback of an exception as text, even if Python can't format it."""
    try:
        return "".join(traceback.format_exception(exc))
    except Exception as why:  # for example a SyntaxError whose line is no text
        frames = "".join(traceback.format_tb(exc.__traceback__))
        return f"Traceback (most recent call last):\n{frames}{reason_of(exc)}\n(no more: {reason_of(why)})\n"


def load_code(data: Buffer) -> Any:
    """Unpickle a factory or a service; exceptions of modules that it imports propagate unchanged."""
    return pickle.loads(data)


# ------------------------------------------------------------ log records

# ASCII separators, which envs don't print: one before a record and between its parts, one in place of line ends.
_PART, _LINE = "\x1e", "\x1d"

_MAX_WARNINGS = 100  # so an env with a new warning in every step does not flood the log
_MAX_CHARS = 8000  # less than the length at which the parent splits lines


class LogLine(NamedTuple):
    """The parts of a log record that are sent to the parent."""

    level: int
    logger: str
    text: str  # the message, and the traceback if there is one


def pack_log_line(record: LogLine) -> bytes:
    """Encode a record as one line of output."""
    text = record.text.replace("\r", "").replace("\n", _LINE)
    half = _MAX_CHARS // 2
    if len(text) > _MAX_CHARS:
        text = f"{text[:half]} [...] {text[-half:]}"
    line = f"{_PART}{record.level}{_PART}{record.logger.replace(chr(10), ' ')}{_PART}{text}\n"
    return line.encode("utf-8", "replace")


def unpack_log_line(line: str) -> LogLine | None:
    """Decode a line without its end; return None if it is no record."""
    if not line.startswith(_PART):
        return None
    try:
        _, level, logger, text = line.split(_PART, 3)
        return LogLine(int(level), logger, text.replace(_LINE, "\n"))
    except ValueError:
        return None


def readable_log_line(line: str) -> str:
    """Return a line as text for people, whether it is a record or not."""
    match unpack_log_line(line):
        case LogLine(level, logger, text):
            return f"{logging.getLevelName(level)}:{logger}:{text}"
    return line


def is_new_warning(line: str, seen: set[str]) -> bool:
    """Return whether a warning is new, numbers aside, and add it to the warnings seen."""
    text = re.sub(r"\d+", "", line)
    if text in seen or len(seen) >= _MAX_WARNINGS:
        return False
    seen.add(text)
    return True


_CONTAINERS = (list, tuple, dict, set, frozenset)


class Unreadable:
    """Stands for a value that does not unpickle.

    Attributes:
        exc: the exception that was raised.
        target: the first argument of the call that raised, which the call would have modified; None if there is none.
    """

    def __init__(self, exc: BaseException, target: Any = None) -> None:
        self.exc = exc
        self.target = target


def find_unreadable(value: Any) -> Unreadable | None:
    """Return the first `Unreadable` in a value and its nested lists, tuples, dicts and sets; None if there is none."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if type(item) is Unreadable:
            return item
        if type(item) in _CONTAINERS and id(item) not in seen:
            seen.add(id(item))
            todo.extend(reversed([*item.keys(), *item.values()] if type(item) is dict else list(item)))
    return None


def load_partially(data: Buffer, containers: Iterable[type]) -> Any:
    """Unpickle the readable parts of a message.

    Args:
        data: a pickle.
        containers: classes, besides lists, tuples, dicts and sets, whose objects are kept although a part of them is
            unreadable. An object of any other class is then unreadable as a whole.

    Raises:
        WireError: if the message as a whole can't be unpickled.
    """
    value, exc = try_call(_PartialUnpickler(io.BytesIO(data), frozenset(containers)).load)
    if exc is not None:
        raise WireError(f"a message does not unpickle: {reason_of(exc)}") from exc
    return value


_Python: Any = pickle._Unpickler


class _PartialUnpickler(_Python):  # type: ignore[misc]
    """An unpickler that goes on after an error."""

    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]

    def __init__(self, file: io.BytesIO, containers: frozenset[type]) -> None:
        super().__init__(file)
        self._containers = containers

    def find_class(self, module: str, name: str) -> Any:
        value, exc = try_call(super().find_class, module, name)
        return value if exc is None else _unreadable(exc)

    def _make(self, opcode: Callable[[Any], None], operands: int) -> None:
        """Run an opcode that replaces operands on the stack by an object made of them."""
        base = len(self.stack) - operands
        maker, *_, last = taken = self.stack[base:]
        found = None if isinstance(maker, type) and maker in self._containers else find_unreadable(taken)
        if found is None:
            _, exc = try_call(opcode, self)
            if exc is None:
                return
            found = _unreadable(exc, last[0] if type(last) is tuple and last else None)
        self.stack[base:] = [found]

    def _change(self, opcode: Callable[[Any], None], operands: int | None) -> None:
        """Run an opcode that puts operands into the object below them: that many, or (None) those after the mark."""
        if operands is None:
            below, given = self.metastack[-1], list(self.stack)
        else:
            below, given = self.stack, self.stack[-operands:]
        base = len(below) - (operands or 0)
        changed = below[base - 1]
        found = changed if type(changed) is Unreadable else None
        if found is None and type(changed) not in _CONTAINERS:
            found = find_unreadable(given)
        if found is None:
            _, exc = try_call(opcode, self)
            if exc is None:
                return
            found = _unreadable(exc)
        if self.stack is not below:
            self.pop_mark()
        del below[base:]
        self._mark_unreadable(changed, found)

    def _mark_unreadable(self, value: Any, found: Unreadable) -> None:
        """Replace a half-made object, wherever it is referred to, by its `Unreadable`."""
        for items in (self.stack, *self.metastack):
            items[:] = [found if item is value else item for item in items]
        for key, item in self.memo.items():
            if item is value:
                self.memo[key] = found

    def _pop(self, opcode: Callable[[Any], None]) -> None:
        """Run POP: if a call for its side effect failed, the argument that it should have modified is unreadable."""
        top = self.stack[-1] if self.stack else None
        opcode(self)
        if type(top) is Unreadable and top.target is not None:
            self._mark_unreadable(top.target, top)


def _unreadable(exc: BaseException, target: Any = None) -> Unreadable:
    if exc.__traceback__ is not None:
        exc.__traceback__ = exc.__traceback__.tb_next  # this module's frame would keep the whole message alive
    return Unreadable(exc, target)


def _extended_opcodes() -> dict[int, Callable[[Any], None]]:
    table: dict[int, Callable[[Any], None]] = dict(_Python.dispatch)

    def made(code: bytes, operands: int) -> None:
        opcode = table[code[0]]
        table[code[0]] = lambda self: self._make(opcode, operands)

    def changed(code: bytes, operands: int | None) -> None:
        opcode = table[code[0]]
        table[code[0]] = lambda self: self._change(opcode, operands)

    for code, operands in ((pickle.REDUCE, 2), (pickle.NEWOBJ, 2), (pickle.NEWOBJ_EX, 3)):
        made(code, operands)
    for code in (pickle.BUILD, pickle.APPEND):
        changed(code, 1)
    changed(pickle.SETITEM, 2)
    for code in (pickle.APPENDS, pickle.SETITEMS, pickle.ADDITEMS):
        changed(code, None)
    pop = table[pickle.POP[0]]
    table[pickle.POP[0]] = lambda self: self._pop(pop)
    return table


_PartialUnpickler.dispatch = _extended_opcodes()
