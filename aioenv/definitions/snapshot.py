"""`CodeSnapshot`: the code of one vector env, taken in the parent for its workers.

`DefinitionEmitter` is step 2 of a snapshot: it writes collected definitions as pickles that a worker loads one by one.
First come all definitions, empty; then the entries that they need, simple values before those whose unpickling runs
code. The pickles share one memo, so an object that several of them refer to is one object in the worker.

`ParentTable` is the parent's table of definitions. It sends those that messages mention later.
"""

from __future__ import annotations

import abc
import collections.abc
import contextlib
import enum
import io
import linecache
import numbers
import os
import pickle
import secrets
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Self

import cloudpickle
import numpy as np

from aioenv.definitions import rebuild
from aioenv.definitions.collect import DefinitionCollector, Entry, Namespace, Root, Selection, name_of
from aioenv.definitions.pickling import MAIN_NAMES, DefinitionPickler, LruCached, is_importable, main_module
from aioenv.definitions.rebuild import Unsendable
from aioenv.definitions.restore import (
    TOKEN_BYTES,
    Code,
    CodeMemory,
    CodePart,
    MainModule,
    ModuleLocation,
    load_late_definition,
    make_transient,
    namespace_module,
    namespace_values,
    worker_global,
)
from aioenv.definitions.table import DefinitionTable, LiveTable
from aioenv.errors import warn_caller

__all__ = ["CAN_SHARE", "CodeSnapshot", "DefinitionEmitter", "ParentTable", "SnapshotMemory", "source_lines"]


OnBuffer = Callable[[pickle.PickleBuffer], Any]


# Abstract base classes with which the classes of a script may be registered.
_STANDARD = [
    value
    for module in (collections.abc, numbers, os)
    for name in module.__all__
    if isinstance(value := getattr(module, name), abc.ABCMeta)
]


class _Reference:
    """Represents a namespace in a pickle."""

    def __init__(self, kind: str, namespace: Namespace) -> None:
        self._arguments = kind, namespace.name, namespace.number

    def __reduce__(self) -> Any:
        return namespace_values, self._arguments


class DefinitionEmitter(DefinitionPickler):
    """Writes definitions as pickles: step 2 of a snapshot.

    Args:
        collector: has the definitions.
        on_buffer: takes large buffers out of band: see `pickle.Pickler`.
        after: an emitter whose memo this one starts with, so that it refers to objects which that one has written.
    """

    def __init__(
        self, collector: DefinitionCollector, on_buffer: OnBuffer | None, after: DefinitionEmitter | None = None
    ) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5, buffer_callback=on_buffer)
        self._collector = collector
        self._references: dict[int, _Reference] = {} if after is None else after._references
        if after is not None:
            self.memo: Any = after.memo

    def emit_definitions(self, selection: Selection, number: Callable[[Any], int]) -> list[tuple[str, str, str]]:
        """Write definitions and the entries that they need.

        Args:
            selection: the definitions and entries.
            number: gives the number of a definition.

        Returns:
            Kind, name and user of each entry that was written, for errors.
        """
        found = selection.definitions
        self.dump(found)
        registries = [(cls, self._registered(cls)) for cls in found if isinstance(cls, abc.ABCMeta)]
        if any(isinstance(value, type) for value in found):
            registries += [(cls, self._registered(cls, own=True)) for cls in _STANDARD]
        entries = [entry for entry in selection.entries if not self._is_imported(entry)]
        ordered = [e for e in entries if e.simple] + [e for e in entries if not e.simple]
        for entry in ordered:
            self.dump((entry.kind, self._target(entry), entry.name, self._value(entry)))
        hooked = [cls for cls in found if isinstance(cls, type) and is_importable(rebuild.hook_owner(cls.__bases__))]
        listed = [(number(value), value) for value in (*found, *selection.callables)]
        self.dump((listed, [(cls, registered) for cls, registered in registries if registered], hooked))
        return [(entry.kind, entry.name, entry.user) for entry in ordered]

    def _is_imported(self, entry: Entry) -> bool:
        """Return whether an entry is a global of a module that the worker imports."""
        return entry.kind == "global" and self._collector.kind_of(entry.target) == "import"

    def _target(self, entry: Entry) -> Any:
        return self._reference(entry.target) if isinstance(entry.target, Namespace) else entry.target

    def _value(self, entry: Entry) -> Any:
        if entry.error is not None:
            return Unsendable(f"{entry.describe()}, could not be sent to the worker: {entry.error}")
        return entry.value

    def _reference(self, namespace: Namespace) -> _Reference:
        return self._references.setdefault(namespace.number, _Reference(self._collector.kind_of(namespace), namespace))

    # ------------------------------------------------------------ definitions, empty

    def reduce_definition(self, obj: Any) -> Any:
        """Reduce a definition to an empty one; its entries follow later."""
        known = self._collector.known
        if known is not None and (reference := known.reduce_known(obj)) is not None:
            return reference
        if not self._collector.has(obj):
            raise pickle.PicklingError(f"{obj!r} was not there when its owner was pickled for trial")
        if isinstance(obj, type):
            return rebuild.make_class, self._class_arguments(obj)
        if type(obj) is LruCached:
            return rebuild.make_lru_cached, (obj.__wrapped__, *obj.cache_parameters().values())
        reference = self._reference(self._collector.namespace(obj.__globals__))
        names = obj.__name__, obj.__closure__, obj.__qualname__, obj.__module__, obj.__doc__
        return rebuild.make_function, (obj.__code__, reference, *names)

    def _class_arguments(self, cls: type) -> tuple[Any, ...]:
        meta: Any = type(cls)
        creator = next(kind for kind in meta.__mro__ if is_importable(kind))
        if issubclass(meta, enum.EnumMeta):
            creator = type
        attributes: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        if "__slots__" in vars(cls):
            attributes["__slots__"] = cls.__slots__  # type: ignore[attr-defined]
        return meta, creator, cls.__name__, cls.__bases__, attributes, "__orig_bases__" in vars(cls)

    def _registered(self, cls: Any, *, own: bool = False) -> list[type]:
        """Return the virtual subclasses of an abstract class that the worker has, too; with `own` only definitions."""
        registry = abc._get_dump(cls)[0]  # type: ignore[attr-defined]
        found = [reference() for reference in registry]
        return [
            kind
            for kind in found
            if kind is not None and (self._collector.has(kind) or (not own and is_importable(kind)))
        ]

    def reduce_module(self, obj: types.ModuleType) -> Any:
        """Reduce a module to a reference by its name."""
        namespace = self._collector.module_namespace(obj)
        return namespace_module, (namespace.kind, namespace.name)

    def reduce_by_name(self, obj: Any, name: str) -> Any:
        """Reduce an object to a reference by name if the receiver has it under this name already."""
        known = self._collector.known
        return None if known is None else known.reduce_known_global(obj, name)

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        if type(obj) is types.CellType:
            return rebuild.make_cell, ()
        return super().reducer_override(obj)


def source_lines(definitions: Iterable[Any]) -> dict[str, list[str]]:
    """Return the source of functions that is in no file, such as that of notebook cells, by file name."""
    found: dict[str, list[str]] = {}
    for value in definitions:
        code = getattr(value, "__code__", None)
        name = code.co_filename if isinstance(code, types.CodeType) else None
        if name is not None and name not in found and not os.path.exists(name):
            lines = linecache.getlines(name, getattr(value, "__globals__", None))
            if lines:
                found[name] = lines
    return found


class ParentTable(DefinitionTable):
    """The definitions of a snapshot, and those that messages mention after it was taken."""

    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self._common: set[int] | None = None  # numbers of the definitions that all workers have
        self._globals: dict[str, Any] | None = None  # globals of the main module that all workers have
        self._late_globals: dict[str, Any] = {}  # globals that came later: some workers may lack them
        self._names: set[str] = set()  # qualified names of definitions of the snapshot
        self._imports: dict[str, None] = {}
        self._late: dict[int, Any] = {}  # reductions of definitions that came later, by number

    def ensure_number(self, value: Any) -> int:
        """Return the number of a definition; a new one is added."""
        number = self.number_of(value)
        if number is None:
            number = self.size
            self.add(number, value)
        return number

    def record(self, selection: Selection, imports: Iterable[str]) -> None:
        """Record the definitions of some workers, and the values of their globals.

        Args:
            selection: the definitions, and the entries that they need.
            imports: modules that workers import.
        """
        self._imports.update(dict.fromkeys(imports))
        modules = [
            e.target.name.encode() for e in selection.entries if e.kind == "global" and e.target.kind == "module"
        ]
        self.name_markers = (*dict.fromkeys((*self.name_markers, *modules)),)
        self._names.update(name_of(value) for value in selection.definitions)
        numbers = {self.ensure_number(value) for value in (*selection.definitions, *selection.callables)}
        self._common = numbers if self._common is None else self._common & numbers
        values = {
            entry.name: _weakly_held(entry.value)
            for entry in selection.entries
            if entry.kind == "global" and entry.target.kind == "main"
        }
        known = self._globals
        self._globals = values if known is None else {name: known[name] for name in values if name in known}

    def reduce_known(self, value: Any) -> Any:
        """Reduce a definition that workers have; one that not all workers have travels with its code."""
        number = self.number_of(value)
        if number is None:
            return None
        if self._common is None or number in self._common:
            return super().reduce_known(value)
        return self._late.get(number)

    def reduce_known_global(self, value: Any, name: str) -> Any:
        """Reduce a global of the main module that workers have too; return None for anything else."""
        known = self._globals or {}
        return (worker_global, (name,)) if name in known and _is_same_value(known[name], value) else None

    def reduce_new(self, value: Any) -> Any:
        """Reduce a definition that not all workers have, with its code.

        Each worker makes a class or a top-level function once. A lambda or a local function is made for each message,
        and no table keeps it, since every message may bring a new one.
        """
        collector, selection = self._collect(value)
        if _is_local(value):
            for made in selection.definitions:
                if not _is_local(made):
                    self.reduce_new(made)
            reference = self.reduce_known(value)
            if reference is not None:  # it came with one of these
                return reference
            collector, selection = self._collect(value)
            code = self._emit(collector, selection, lambda _: -1)
            return make_transient, (self.token, selection.definitions.index(value), code)
        code = self._emit(collector, selection, self.ensure_number)
        for made in selection.definitions:
            number = self.ensure_number(made)
            self._late[number] = load_late_definition, (self.token, number, code)
        return self.reduce_known(value)

    def _collect(self, value: Any) -> tuple[DefinitionCollector, Selection]:
        collector = DefinitionCollector(self)
        collector.imports.update(self._imports)
        return collector, collector.select([collector.reach(value)])

    def _emit(
        self, collector: DefinitionCollector, selection: Selection, number: Callable[[Any], int]
    ) -> tuple[bytes, Any]:
        """Return the pickles of definitions, and a description of their entries."""
        definitions, entries = selection
        for name in map(name_of, filter(self._is_redefined, definitions)):
            warn_caller(
                f"{name} was defined anew after the vector env was made: its workers keep the one that they "
                "have, and the new one arrives there as a definition of its own; a new vector env has the new one",
                RuntimeWarning,
            )
        clash = any(self._differs_from_workers(entry) for entry in entries)
        for key, namespace in list(collector.namespaces.items()):
            if namespace.kind == "main" and clash:
                collector.namespaces[key] = namespace._replace(kind="private")
        entries = [entry for entry in entries if self._is_needed(entry, clash)]
        for entry in entries:
            entry.callables = ()
            if entry.kind == "global":
                entry.target = collector.namespaces[id(entry.target.values)]
                if entry.target.kind == "main":
                    self._late_globals[entry.name] = _weakly_held(entry.value)
        emitter = DefinitionEmitter(collector, None)
        described = emitter.emit_definitions(Selection(definitions, entries), number)
        return emitter.file.getvalue(), described

    def _is_redefined(self, value: Any) -> bool:
        """Return whether workers have another definition under this name in the main module."""
        name = name_of(value)
        return name in self._names and name.isidentifier() and value.__module__ in MAIN_NAMES

    def _is_needed(self, entry: Entry, clash: bool) -> bool:
        """Return whether an entry must travel, rather than be a reference to a global that workers have."""
        if entry.kind != "global" or entry.target.kind != "main":
            return True
        everywhere = self._globals is not None and entry.name in self._globals
        if not clash:
            return not everywhere
        if self._differs_from_workers(entry):
            return True
        if everywhere:
            entry.value, entry.error, entry.simple = _WorkerGlobal(entry.name), None, True
        elif entry.name in self._late_globals and entry.error is None:
            entry.value, entry.simple = _WorkerGlobal(entry.name, entry.value), False
        return True

    def _differs_from_workers(self, entry: Entry) -> bool:
        """Return whether a global of the main module has another value here now than in the workers."""
        if entry.kind != "global" or not isinstance(entry.target, Namespace) or entry.target.kind != "main":
            return False
        known = self._globals or {}
        then = known.get(entry.name, self._late_globals.get(entry.name, _MISSING))
        return then is not _MISSING and not _is_same_value(then, entry.value)


def _is_local(value: Any) -> bool:
    """Return whether a value is a lambda, or a function within a function."""
    return not isinstance(value, type) and "<" in name_of(value)


_MISSING = object()
_ATOMS = (int, float, complex, str, bytes, bool)


class _WorkerGlobal:
    """Refers to a global of the workers' main module; where workers may lack it, with its value."""

    def __init__(self, name: str, *value: Any) -> None:
        self._arguments = name, *value

    def __reduce__(self) -> Any:
        return worker_global, self._arguments


def _weakly_held(value: Any) -> Any:
    """Return a weak reference to a value, to compare with later; the value itself if it can't have one."""
    if isinstance(value, type | types.FunctionType):
        return value
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _is_same_value(held: Any, value: Any) -> bool:
    """Return whether a value is the one that was held, or can't be told from it."""
    held = held() if isinstance(held, weakref.ref) else held
    if held is value or type(held) is not type(value):
        return held is value
    if type(held) is tuple:
        return len(held) == len(value) and all(map(_is_same_value, held, value))
    return type(held) in _ATOMS and bool(held == value)


CAN_SHARE = hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")
_ALIGN = 4096


class SnapshotMemory:
    """Memory for pickles and buffers that are too large for messages: written once, and mapped by every worker.

    Each buffer is in it once. The mappings of workers outlive it.

    Args:
        token: the memory begins with it.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._pieces: list[tuple[int, Any]] = []  # offset and bytes, until they are written
        self._known: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self._size = TOKEN_BYTES

    def add(self, view: memoryview) -> tuple[int, int, bool]:
        """Add a buffer; return its offset, its size, and whether it is read-only."""
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        key = address, view.nbytes
        if key not in self._known:
            self._known[key] = (*self.append(view), view.readonly)
        offset, size, _ = self._known[key]
        return offset, size, view.readonly

    def append(self, data: Any) -> tuple[int, int]:
        """Add bytes; return their offset and their size."""
        offset = -(-self._size // _ALIGN) * _ALIGN
        self._pieces.append((offset, data))
        self._size = offset + len(data)
        return offset, len(data)

    def finish(self) -> CodeMemory | None:
        """Write everything; return where it is, or None if there is nothing.

        Raises:
            OSError: if there is not enough memory.
        """
        if not self._pieces:
            return None
        fd = os.memfd_create("aioenv-code", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self._size)
        for offset, data in ((0, self._token), *self._pieces):
            _write(fd, data, offset)
        self._pieces, self._known = [], {}
        return CodeMemory(f"/proc/{os.getpid()}/fd/{fd}", self._size)


def _write(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[written:], offset + written


# Buffers and pickles of at least this many bytes lie in memory that workers map.
_LARGE_BUFFER = 1 << 16
_LARGE_PICKLE = 1 << 20


class CodeSnapshot:
    """A snapshot of the factories of a vector env, and of all definitions that they reach.

    The constructor takes it; later changes in the script do not affect it. It holds memory until the last reference to
    it is gone. Copies share that memory; unpickling takes a new snapshot.

    Args:
        factories: functions, one for each row of any worker; or other objects for workers (see `FactoryReference`).
        spans: the first row of each worker, and the one after its last.
        names: globals of the main module that workers need, too: registered specs name them.
        specs: registered specs that refer to definitions of the script, by id.
        live: whether workers are threads of this process, which get the objects themselves.
        portable: whether workers may be on other machines, which can't map memory of this one.
        common: an object that all workers get beside their factories, after its name for errors (see
            `CommonReference`); None if there is none.

    Attributes:
        table: the definitions that messages refer to.
        factories, common: as given.

    Raises:
        TypeError: if a factory, or the common object, can't be sent; the message names it.
    """

    def __init__(
        self,
        factories: Sequence[Any],
        spans: Sequence[tuple[int, int]],
        *,
        names: Iterable[str] = (),
        specs: Sequence[tuple[str, Any]] = (),
        live: bool = False,
        portable: bool = False,
        common: tuple[str, Any] | None = None,
    ) -> None:
        self.factories = list(factories)
        self.common = common
        self._spans, self._names, self._specs, self._portable = spans, tuple(names), tuple(specs), portable
        token = secrets.token_bytes(TOKEN_BYTES)
        if live:
            self.table: DefinitionTable = LiveTable(token, factories, None if common is None else common[1])
            _trial_pickle_live([*factories, common])
            return
        self.table = table = ParentTable(token)
        self._memory = SnapshotMemory(token) if CAN_SHARE and not portable else None
        self._codes = _SnapshotWriter(table, self._memory, self._names, self._specs).write(factories, spans, common)

    def code(self, worker: int) -> Code:
        """Return the code of a worker; it is valid as long as this snapshot exists."""
        if isinstance(self.table, LiveTable):
            return Code(self.table.token, slice(*self._spans[worker]))
        return self._codes[worker]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        live = isinstance(self.table, LiveTable)
        made_from = self.factories, self._spans, self._names, self._specs, live, self._portable, self.common
        return _retake, (_dump_by_value(made_from),)


def _trial_pickle_live(objects: Sequence[Any]) -> None:
    """Pickle live objects on trial, so that shared statistics among their arguments are recorded."""
    collector = DefinitionCollector()
    for value in {id(value): value for value in objects}.values():
        with contextlib.suppress(Exception):
            collector.reach(value)


class _SnapshotWriter:
    """Takes one snapshot.

    Args:
        table: gets the definitions.
        memory: for large pickles and buffers; None: they go into the messages.
        names, specs: see `CodeSnapshot`.
    """

    def __init__(
        self, table: ParentTable, memory: SnapshotMemory | None, names: Sequence[str], specs: Sequence[tuple[str, Any]]
    ) -> None:
        self._table, self._memory = table, memory
        self._main = _main()
        self._collector = DefinitionCollector()
        self._collected: dict[tuple[int, ...], _CollectedDefinitions] = {}
        self._factory_parts: dict[tuple[int, ...], CodePart] = {}
        self._registered, self._specs = self._reach_registered(names, specs)

    def write(
        self, factories: Sequence[Any], spans: Sequence[tuple[int, int]], common: tuple[str, Any] | None
    ) -> list[Code]:
        """Return the code of each worker."""
        named = [(f"env_fns[{index}]", factory) for index, factory in enumerate(factories)]
        shared = [] if common is None else [common]
        roots = self._reach([*named, *shared])
        codes = [self._code(named[start:stop], shared, roots) for start, stop in spans]
        place = None if self._memory is None else self._memory.finish()
        located = _module_locations(self._collector.imports)
        return [code._replace(place=place, located=located) for code in codes]

    def _reach_registered(
        self, names: Sequence[str], specs: Sequence[tuple[str, Any]]
    ) -> tuple[list[Root], list[tuple[str, Any]]]:
        """Collect the definitions that registered specs reach; a spec that can't be sent is replaced by the reason."""
        roots = [self._collector.reach_global(name) for name in names]
        sent = []
        for env_id, spec in specs:
            try:
                roots.append(self._collector.reach(spec))
                sent.append((env_id, spec))
            except Exception as exc:
                sent.append((env_id, f"{exc}"))
        return roots, sent

    def _reach(self, named: Sequence[tuple[str, Any]]) -> dict[int, Root]:
        """Collect the definitions that factories, and the common object, reach; return their roots by id."""
        roots: dict[int, Root] = {}
        for name, value in named:
            if id(value) in roots:
                continue
            try:
                roots[id(value)] = self._collector.reach(value)
            except Exception as exc:
                raise _unsendable(name, f"{exc}") from exc
            if isinstance(value, types.FunctionType):
                self._check_own_values(value, name)
        return roots

    def _check_own_values(self, function: types.FunctionType, name: str) -> None:
        """Raise a TypeError if a function's own closure can't be sent: it would fail as soon as it is called."""
        cells = function.__closure__ or ()
        for entry in self._collector.entries_of(function):
            if entry.error is not None and any(entry.target is cell for cell in cells):
                raise _unsendable(name, f"{entry.describe()}: {entry.error}")

    def _code(self, mine: Sequence[tuple[str, Any]], shared: Sequence[tuple[str, Any]], roots: dict[int, Root]) -> Code:
        """Return the code of one worker, which has these factories, by name, and the common object, if there is one."""
        distinct: dict[int, tuple[str, Any]] = {}
        for name, value in (*shared, *mine):
            distinct.setdefault(id(value), (name, value))
        collected = self._collect([roots[key] for key in distinct])
        number = {key: index for index, key in enumerate(distinct)}
        part = self._factory_parts.get(tuple(distinct))
        if part is None:
            emitter, large = self._emitter(after=collected.emitter)
            for name, value in distinct.values():
                try:
                    emitter.dump(value)
                except Exception as exc:
                    raise _unsendable(name, f"{exc}") from exc
            part = self._factory_parts[tuple(distinct)] = self._memory_part(emitter, large)
        return collected.code._replace(
            factories=part,
            pattern=tuple(number[id(factory)] for _, factory in mine),
            common=shared[0][0] if shared else None,
        )

    def _collect(self, roots: Sequence[Root]) -> _CollectedDefinitions:
        """Return the definitions that some factories need: written once for all workers with the same needs."""
        collector = self._collector
        key = tuple(sorted({*chain(*map(collector.direct_needs, roots))}))
        if key in self._collected:
            return self._collected[key]
        selection = collector.select([*roots, *self._registered])
        emitter, large = self._emitter()
        entries = emitter.emit_definitions(selection, self._table.ensure_number)
        part = self._memory_part(emitter, large)
        self._table.record(selection, collector.imports)
        code = Code(
            self._table.token,
            None,
            self._main,
            tuple(n.name for n in collector.namespaces.values() if n.kind == "module"),
            lines=[*source_lines(selection.definitions).items()],
            entries=entries,
            definitions=part,
            specs=[(env_id, self._spec_part(emitter, spec)) for env_id, spec in self._specs],
        )
        found = self._collected[key] = _CollectedDefinitions(emitter, code)
        return found

    def _spec_part(self, after: DefinitionEmitter, spec: Any) -> CodePart:
        emitter, large = self._emitter(after=after)
        emitter.dump(spec)
        return self._memory_part(emitter, large)

    def _emitter(self, after: DefinitionEmitter | None = None) -> tuple[DefinitionEmitter, list[pickle.PickleBuffer]]:
        large: list[pickle.PickleBuffer] = []
        share = self._memory is not None  # not `self` in the closure: a cycle would keep everything that was pickled

        def on_buffer(buffer: pickle.PickleBuffer) -> bool:
            if not share or buffer.raw().nbytes < _LARGE_BUFFER:
                return True  # it stays in the pickle
            large.append(buffer)
            return False

        return DefinitionEmitter(self._collector, on_buffer, after), large

    def _memory_part(self, emitter: DefinitionEmitter, large: list[pickle.PickleBuffer]) -> CodePart:
        memory = self._memory
        data = emitter.file.getvalue()
        if memory is None:
            return CodePart(data, [])
        buffers = [memory.add(buffer.raw()) for buffer in large]
        return CodePart(memory.append(data) if len(data) >= _LARGE_PICKLE else data, buffers)


def _dump_by_value(value: Any) -> bytes:
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def _retake(data: bytes) -> CodeSnapshot:
    factories, spans, names, specs, live, portable, common = pickle.loads(data)
    return CodeSnapshot(factories, spans, names=names, specs=specs, live=live, portable=portable, common=common)


class _CollectedDefinitions:
    """Definitions that some workers share."""

    def __init__(self, emitter: DefinitionEmitter, code: Code) -> None:
        self.emitter, self.code = emitter, code


def _unsendable(name: str, reason: str) -> TypeError:
    return TypeError(f"{name} can't be sent to a worker, something that it refers to does not pickle: {reason}")


def _main() -> MainModule:
    module = main_module()
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    return MainModule(
        str(getattr(module, "__name__", "__main__")),
        file if isinstance(file, str) else None,
        getattr(module, "__package__", None),
        None if spec is None else (spec.name, spec.origin),
    )


def _module_locations(names: Iterable[str]) -> list[tuple[str, ModuleLocation]]:
    """Return the places of modules that are not found below `sys.path`, and of the packages above them."""
    found: dict[str, ModuleLocation] = {}
    for name in names:
        module = sys.modules.get(name)
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if not isinstance(file, str) or not file.endswith(".py") or _is_below_path(name, file):
            continue
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            prefix = ".".join(parts[:end])
            above = sys.modules.get(prefix)
            origin = getattr(getattr(above, "__spec__", None), "origin", None)
            inside = getattr(above, "__path__", None)
            package = tuple(map(str, inside)) if inside is not None else (() if end < len(parts) else None)
            found[prefix] = ModuleLocation(
                origin if isinstance(origin, str) and origin.endswith(".py") else None, package
            )
    return [*found.items()]


def _is_below_path(name: str, file: str) -> bool:
    relative = name.replace(".", os.sep)
    where = os.path.abspath(file)
    for entry in sys.path:
        if isinstance(entry, str):
            base = os.path.join(os.path.abspath(entry or "."), relative)
            if where in (f"{base}.py", os.path.join(base, "__init__.py")):
                return True
    return False
