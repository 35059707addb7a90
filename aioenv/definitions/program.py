"""In the parent: the code of one vector env, as a snapshot for its workers, and the messages between them."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Self

import cloudpickle
import numpy as np

from aioenv.definitions.collect import Collector, Entry, Namespace, Root, Selection, name_of
from aioenv.definitions.emit import Emitter, source_lines
from aioenv.definitions.inspection import MAIN_NAMES, main_module
from aioenv.definitions.restore import HEAD, Code, Located, MainModule, Part, Place, late, worker_global
from aioenv.definitions.table import LiveTable, Table
from aioenv.errors import warn_caller

__all__ = ["Program"]

# Buffers of so many bytes lie in memory that workers map, as do pickles of so many.
_LARGE_BUFFER = 1 << 16
_LARGE_PICKLE = 1 << 20
_ALIGN = 4096
_CAN_SHARE = hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


class Program:
    """What workers are made from: the factories of a vector env, and what they reach.

    The snapshot is taken here; what the script changes later changes nothing.

    Args:
        factories: functions, one a row of any worker; or other objects that workers are to have (see `Shipped`).
        spans: the first row of each worker, and the one after its last.
        names: globals of the main module that workers need besides: what registered specs name.
        specs: registered specs that refer to definitions of the script, by id.
        live: workers are threads of this process, and get the very objects.

    It holds memory, which is gone with the last reference to it. Copies share it; pickled, the snapshot is taken anew.

    Attributes:
        table: the definitions that messages refer to.
        factories: as given.

    Raises:
        TypeError: if a factory can't be sent; the message has its number.
    """

    def __init__(
        self,
        factories: Sequence[Any],
        spans: Sequence[tuple[int, int]],
        *,
        names: Iterable[str] = (),
        specs: Sequence[tuple[str, Any]] = (),
        live: bool = False,
    ) -> None:
        self.factories = list(factories)
        self._spans, self._names, self._specs = spans, tuple(names), tuple(specs)
        token = secrets.token_bytes(HEAD)
        if live:
            self.table: Table = LiveTable(token, factories)
            self._look_through(factories)
            return
        self.table = self._definitions = _ParentTable(token)
        self._main = _main()
        self._memory = _Memory(token)
        self._collector = Collector()
        self._collected: dict[tuple[int, ...], _Collected] = {}
        self._factory_parts: dict[tuple[int, ...], Part] = {}
        try:
            self._registered, self._sent_specs = self._reach_registered()
            roots = self._reach(factories)
            codes = [self._code(factories, roots, start, stop) for start, stop in spans]
        finally:
            imports = self._collector.imports
            del self._collected, self._factory_parts, self._collector, self._registered, self._sent_specs
        place, located = self._memory.finish(), _located(imports)
        self._codes = [code._replace(place=place, located=located) for code in codes]

    def code(self, worker: int) -> Code:
        """What a worker is made from. It is of use as long as this program is kept."""
        if isinstance(self.table, LiveTable):
            return Code(self.table.token, slice(*self._spans[worker]))
        return self._codes[worker]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        made_from = self.factories, self._spans, self._names, self._specs, isinstance(self.table, LiveTable)
        return _made_anew, (_dump_by_value(made_from),)

    # ------------------------------------------------------------ the snapshot

    def _look_through(self, factories: Sequence[Any]) -> None:
        """Pickle live factories for trial: shared statistics among their arguments make themselves known then."""
        collector = Collector()
        for factory in {id(f): f for f in factories}.values():
            try:
                collector.reach(factory)
            except Exception:
                continue

    def _reach_registered(self) -> tuple[list[Root], list[tuple[str, Any]]]:
        """Collect what registered specs reach; in place of one that can't be sent stands the reason."""
        roots = [self._collector.reach_global(name) for name in self._names]
        sent = []
        for env_id, spec in self._specs:
            try:
                roots.append(self._collector.reach(spec))
                sent.append((env_id, spec))
            except Exception as exc:
                sent.append((env_id, f"{exc}"))
        return roots, sent

    def _reach(self, factories: Sequence[Any]) -> dict[int, Root]:
        """Collect what factories reach: their roots, by id."""
        roots: dict[int, Root] = {}
        for index, factory in enumerate(factories):
            if id(factory) in roots:
                continue
            try:
                roots[id(factory)] = self._collector.reach(factory)
            except Exception as exc:
                raise _unsendable(index, f"{exc}") from exc
            if isinstance(factory, types.FunctionType):
                self._check_own_values(factory, roots[id(factory)], index)
        return roots

    def _check_own_values(self, factory: types.FunctionType, root: Root, index: int) -> None:
        """Raise if a factory's own closure or defaults can't be sent: it would fail as soon as it is called."""
        cells = factory.__closure__ or ()
        for entry in self._collector.needed_by(factory):
            own = entry.target is factory or any(entry.target is cell for cell in cells)
            if entry.error is not None and own:
                raise _unsendable(index, f"{entry.describe()}: {entry.error}")

    def _code(self, factories: Sequence[Any], roots: dict[int, Root], start: int, stop: int) -> Code:
        mine = factories[start:stop]
        distinct = {id(factory): factory for factory in mine}
        collected = self._collect([roots[key] for key in distinct])
        number = {key: index for index, key in enumerate(distinct)}
        part = self._factory_parts.get(tuple(distinct))
        if part is None:
            emitter, large = self._emitter(after=collected.emitter)
            for key, factory in distinct.items():
                try:
                    emitter.dump(factory)
                except Exception as exc:
                    raise _unsendable([id(f) for f in factories].index(key), f"{exc}") from exc
            part = self._factory_parts[tuple(distinct)] = self._memory_part(emitter, large)
        return collected.code._replace(factories=part, pattern=tuple(number[id(factory)] for factory in mine))

    def _collect(self, roots: Sequence[Root]) -> _Collected:
        """The definitions that some factories need: once for all workers whose factories name the same."""
        collector = self._collector
        key = tuple(sorted({*chain(*map(collector.direct, roots))}))
        if key in self._collected:
            return self._collected[key]
        selection = collector.select([*roots, *self._registered])
        emitter, large = self._emitter()
        entries = emitter.emit_definitions(selection, self._definitions.enter)
        part = self._memory_part(emitter, large)
        self._definitions.note(selection)
        code = Code(
            self.table.token,
            None,
            self._main,
            tuple(n.name for n in collector.namespaces.values() if n.kind == "module"),
            lines=[*source_lines(selection.definitions).items()],
            entries=entries,
            definitions=part,
            specs=[(env_id, self._spec_part(emitter, spec)) for env_id, spec in self._sent_specs],
        )
        found = self._collected[key] = _Collected(emitter, code)
        return found

    def _spec_part(self, after: Emitter, spec: Any) -> Part:
        emitter, large = self._emitter(after=after)
        emitter.dump(spec)
        return self._memory_part(emitter, large)

    def _emitter(self, after: Emitter | None = None) -> tuple[Emitter, list[pickle.PickleBuffer]]:
        large: list[pickle.PickleBuffer] = []

        def on_buffer(buffer: pickle.PickleBuffer) -> bool:
            if not _CAN_SHARE or buffer.raw().nbytes < _LARGE_BUFFER:
                return True  # it stays in the pickle
            large.append(buffer)
            return False

        return Emitter(self._collector, on_buffer, after), large

    def _memory_part(self, emitter: Emitter, large: list[pickle.PickleBuffer]) -> Part:
        memory = self._memory
        data = emitter.file.getvalue()
        buffers = [memory.add(buffer.raw()) for buffer in large]
        return Part(memory.append(data) if _CAN_SHARE and len(data) >= _LARGE_PICKLE else data, buffers)


def _dump_by_value(value: Any) -> bytes:
    data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return data


def _made_anew(data: bytes) -> Program:
    factories, spans, names, specs, live = pickle.loads(data)
    return Program(factories, spans, names=names, specs=specs, live=live)


class _Collected:
    """Definitions that some workers have in common."""

    def __init__(self, emitter: Emitter, code: Code) -> None:
        self.emitter, self.code = emitter, code


def _unsendable(index: int, reason: str) -> TypeError:
    return TypeError(
        f"env_fns[{index}] can't be sent to a worker, something that it refers to does not pickle: {reason}"
    )


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


def _located(names: Iterable[str]) -> list[tuple[str, Located]]:
    """Where modules are that are not where their names say, below `sys.path`, with the packages above them."""
    found: dict[str, Located] = {}
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
            found[prefix] = Located(origin if isinstance(origin, str) and origin.endswith(".py") else None, package)
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


# ------------------------------------------------------------ memory


class _Memory:
    """Memory for what is too large for messages; each buffer is in it once. What workers have mapped outlives it.

    Args:
        token: what it begins with.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._pieces: list[tuple[int, Any]] = []  # offset and bytes, until they are written
        self._known: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self._size = HEAD

    def add(self, view: memoryview) -> tuple[int, int, bool]:
        """Take in a buffer; gives its offset, its size, and whether it is read-only."""
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        key = address, view.nbytes
        if key not in self._known:
            self._known[key] = (*self.append(view), view.readonly)
        offset, size, _ = self._known[key]
        return offset, size, view.readonly

    def append(self, data: Any) -> tuple[int, int]:
        """Take in bytes; gives their offset and their size."""
        offset = -(-self._size // _ALIGN) * _ALIGN
        self._pieces.append((offset, data))
        self._size = offset + len(data)
        return offset, len(data)

    def finish(self) -> Place | None:
        """Write everything; None if there is nothing.

        Raises:
            OSError: if there is not so much memory.
        """
        if not self._pieces:
            return None
        fd = os.memfd_create("aioenv-code", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self._size)
        for offset, data in ((0, self._token), *self._pieces):
            _write(fd, data, offset)
        self._pieces, self._known = [], {}
        return Place(f"/proc/{os.getpid()}/fd/{fd}", self._size)


def _write(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[written:], offset + written


# ------------------------------------------------------------ definitions after the snapshot


class _ParentTable(Table):
    """The definitions of a snapshot, and those that messages mention later."""

    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self._everywhere: set[int] | None = None  # numbers of what all workers have
        self._globals: dict[str, Any] | None = None  # of the main module, that all workers have
        self._names: set[str] = set()  # qualified names of definitions of the snapshot
        self._late: dict[int, Any] = {}  # by number: how what came later is pickled, with all that came with it

    def enter(self, value: Any) -> int:
        """The number of a definition, which may be new."""
        number = self.number_of(value)
        if number is None:
            number = self.size
            self.add(number, value)
        return number

    def note(self, selection: Selection) -> None:
        """Remember what some workers have."""
        modules = [
            e.target.name.encode() for e in selection.entries if e.kind == "global" and e.target.kind == "module"
        ]
        self.marks = (*dict.fromkeys((*self.marks, *modules)),)
        self._names.update(name_of(value) for value in selection.definitions)
        numbers = {self.enter(value) for value in (*selection.definitions, *selection.callables)}
        self._everywhere = numbers if self._everywhere is None else self._everywhere & numbers
        values = {
            entry.name: _held(entry.value)
            for entry in selection.entries
            if entry.kind == "global" and entry.target.kind == "main"
        }
        known = self._globals
        self._globals = values if known is None else {name: known[name] for name in values if name in known}

    def refer(self, value: Any) -> Any:
        """As `Table`; what only some workers have travels with what it takes to make it."""
        number = self.number_of(value)
        if number is None:
            return None
        if self._everywhere is None or number in self._everywhere:
            return super().refer(value)
        return self._late.get(number)

    def reduce(self, value: Any) -> Any:
        """Pickle a definition that not all workers have, so that each of them makes it once."""
        if name_of(value) in self._names and self.number_of(value) is None and value.__module__ in MAIN_NAMES:
            warn_caller(
                f"{name_of(value)} was defined anew after the vector env was made: its workers keep the one that they "
                "have, and the new one arrives there as a definition of its own; a new vector env has the new one",
                RuntimeWarning,
            )
        collector = Collector(self)
        definitions, entries = collector.select([collector.reach(value)])
        clash = any(self._is_other(entry) for entry in entries)
        for key, namespace in list(collector.namespaces.items()):
            if namespace.kind == "main" and clash:
                collector.namespaces[key] = namespace._replace(kind="private")
        entries = [entry for entry in entries if self._is_needed(entry, clash)]
        for entry in entries:
            entry.callables = ()
            if entry.kind == "global":
                entry.target = collector.namespaces[id(entry.target.values)]
        emitter = Emitter(collector, None)
        told = emitter.emit_definitions(Selection(definitions, entries), self.enter)
        code = emitter.file.getvalue(), told
        for made in definitions:
            number = self.enter(made)
            self._late[number] = late, (self.token, number, code)
        return self.refer(value)

    def _is_needed(self, entry: Entry, clash: bool) -> bool:
        """Whether what comes later has to bring a value, rather than refer to the one that workers have."""
        known = self._globals or {}
        if entry.kind != "global" or entry.target.kind != "main" or entry.name not in known:
            return True
        if clash and not self._is_other(entry):
            entry.value, entry.error, entry.simple = _WorkerGlobal(entry.name), None, True
        return clash

    def _is_other(self, entry: Entry) -> bool:
        """Whether a global of the main module is another one here now than in the workers."""
        if entry.kind != "global" or not isinstance(entry.target, Namespace) or entry.target.kind != "main":
            return False
        if self._globals is None or entry.name not in self._globals:
            return False
        then = self._globals[entry.name]
        then = then() if isinstance(then, weakref.ref) else then
        if then is entry.value:
            return False
        atoms = (int, float, complex, str, bytes, bool, tuple)
        return not (type(then) is type(entry.value) and type(then) in atoms and then == entry.value)


class _WorkerGlobal:
    """Stands for a global of the workers' main module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        return worker_global, (self._name,)


def _held(value: Any) -> Any:
    """A value to compare with later, which need not live for that."""
    if isinstance(value, type | types.FunctionType):
        return value
    try:
        return weakref.ref(value)
    except TypeError:
        return value
