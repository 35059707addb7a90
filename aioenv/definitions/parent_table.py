"""`ParentTable`: the parent's table of definitions, and how definitions travel that messages mention later."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from aioenv.definitions.collect import DefinitionCollector, Entry, Namespace, Selection, name_of
from aioenv.definitions.emit import DefinitionEmitter
from aioenv.definitions.pickling import MAIN_NAMES
from aioenv.definitions.restore import load_late_definition, make_transient, worker_global
from aioenv.definitions.table import DefinitionTable
from aioenv.errors import warn_caller

__all__ = ["ParentTable"]


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
