"""In the parent: the definitions that workers have, and those that messages mention after the snapshot was taken."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from aioenv.definitions.collect import DefinitionCollector, Entry, Namespace, Selection, name_of
from aioenv.definitions.emit import DefinitionEmitter
from aioenv.definitions.pickling import MAIN_NAMES
from aioenv.definitions.restore import late, make_transient, worker_global
from aioenv.definitions.table import DefinitionTable
from aioenv.errors import warn_caller

__all__ = ["ParentTable"]


class ParentTable(DefinitionTable):
    """The definitions of a snapshot, and those that messages mention later."""

    def __init__(self, token: bytes) -> None:
        super().__init__(token)
        self._everywhere: set[int] | None = None  # numbers of what all workers have
        self._globals: dict[str, Any] | None = None  # of the main module, that all workers have
        self._late_globals: dict[str, Any] = {}  # of the main module, that only some workers may have
        self._names: set[str] = set()  # qualified names of definitions of the snapshot
        self._imports: dict[str, None] = {}
        self._late: dict[int, Any] = {}  # by number: how what came later is pickled, with all that came with it

    def enter(self, value: Any) -> int:
        """The number of a definition, which may be new."""
        number = self.number_of(value)
        if number is None:
            number = self.size
            self.add(number, value)
        return number

    def note(self, selection: Selection, imports: Iterable[str]) -> None:
        """Remember the definitions of some workers, and the values of their globals.

        Args:
            selection: the definitions, and what they need.
            imports: modules that workers import.
        """
        self._imports.update(dict.fromkeys(imports))
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
        """As `DefinitionTable`; a definition that only some workers have travels with its code."""
        number = self.number_of(value)
        if number is None:
            return None
        if self._everywhere is None or number in self._everywhere:
            return super().refer(value)
        return self._late.get(number)

    def refer_global(self, value: Any, name: str) -> Any:
        """As `DefinitionTable`."""
        known = self._globals or {}
        return (worker_global, (name,)) if name in known and _is_held(known[name], value) else None

    def reduce(self, value: Any) -> Any:
        """Pickle a definition that not all workers have.

        Each worker makes a class, or a top-level function, once. A lambda or a local function is made for each message
        and kept by no table, since every message may bring a new one.
        """
        collector, selection = self._collect(value)
        if _is_local(value):
            for made in selection.definitions:
                if not _is_local(made):
                    self.reduce(made)
            reference = self.refer(value)
            if reference is not None:  # one of these has brought it
                return reference
            collector, selection = self._collect(value)
            code = self._emit(collector, selection, lambda _: -1)
            return make_transient, (self.token, selection.definitions.index(value), code)
        code = self._emit(collector, selection, self.enter)
        for made in selection.definitions:
            number = self.enter(made)
            self._late[number] = late, (self.token, number, code)
        return self.refer(value)

    def _collect(self, value: Any) -> tuple[DefinitionCollector, Selection]:
        collector = DefinitionCollector(self)
        collector.imports.update(self._imports)
        return collector, collector.select([collector.reach(value)])

    def _emit(
        self, collector: DefinitionCollector, selection: Selection, number: Callable[[Any], int]
    ) -> tuple[bytes, Any]:
        """The pickles of definitions, and the descriptions of their entries."""
        definitions, entries = selection
        for name in map(name_of, filter(self._is_anew, definitions)):
            warn_caller(
                f"{name} was defined anew after the vector env was made: its workers keep the one that they "
                "have, and the new one arrives there as a definition of its own; a new vector env has the new one",
                RuntimeWarning,
            )
        clash = any(self._is_other(entry) for entry in entries)
        for key, namespace in list(collector.namespaces.items()):
            if namespace.kind == "main" and clash:
                collector.namespaces[key] = namespace._replace(kind="private")
        entries = [entry for entry in entries if self._is_needed(entry, clash)]
        for entry in entries:
            entry.callables = ()
            if entry.kind == "global":
                entry.target = collector.namespaces[id(entry.target.values)]
                if entry.target.kind == "main":
                    self._late_globals[entry.name] = _held(entry.value)
        emitter = DefinitionEmitter(collector, None)
        told = emitter.emit_definitions(Selection(definitions, entries), number)
        return emitter.file.getvalue(), told

    def _is_anew(self, value: Any) -> bool:
        """Whether workers have another definition under this name in the main module."""
        name = name_of(value)
        return name in self._names and name.isidentifier() and value.__module__ in MAIN_NAMES

    def _is_needed(self, entry: Entry, clash: bool) -> bool:
        """Whether what comes later has to bring a value, rather than refer to the one that workers have."""
        if entry.kind != "global" or entry.target.kind != "main":
            return True
        everywhere = self._globals is not None and entry.name in self._globals
        if not clash:
            return not everywhere
        if self._is_other(entry):
            return True
        if everywhere:
            entry.value, entry.error, entry.simple = _WorkerGlobal(entry.name), None, True
        elif entry.name in self._late_globals and entry.error is None:
            entry.value, entry.simple = _WorkerGlobal(entry.name, entry.value), False
        return True

    def _is_other(self, entry: Entry) -> bool:
        """Whether a global of the main module is another one here now than in the workers."""
        if entry.kind != "global" or not isinstance(entry.target, Namespace) or entry.target.kind != "main":
            return False
        known = self._globals or {}
        then = known.get(entry.name, self._late_globals.get(entry.name, _NEVER))
        return then is not _NEVER and not _is_held(then, entry.value)


def _is_local(value: Any) -> bool:
    """Whether it is a lambda, or a function within a function."""
    return not isinstance(value, type) and "<" in name_of(value)


_NEVER = object()
_ATOMS = (int, float, complex, str, bytes, bool)


class _WorkerGlobal:
    """Stands for a global of the workers' main module; those that may not have it get the value, too."""

    def __init__(self, name: str, *value: Any) -> None:
        self._arguments = name, *value

    def __reduce__(self) -> Any:
        return worker_global, self._arguments


def _held(value: Any) -> Any:
    """A value to compare with later, which need not live for that."""
    if isinstance(value, type | types.FunctionType):
        return value
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _is_held(held: Any, value: Any) -> bool:
    """Whether a value is the one that was held, or one that nothing tells apart from it."""
    held = held() if isinstance(held, weakref.ref) else held
    if held is value or type(held) is not type(value):
        return held is value
    if type(held) is tuple:
        return len(held) == len(value) and all(map(_is_held, held, value))
    return type(held) in _ATOMS and bool(held == value)
