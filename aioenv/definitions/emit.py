"""Step 2 of a snapshot: `DefinitionEmitter` writes collected definitions as pickles that a worker loads one by one.

First come all definitions, empty; then the entries that they need, simple values before those whose unpickling runs
code. The pickles share one memo, so an object that several of them refer to is one object in the worker.
"""

from __future__ import annotations

import abc
import collections.abc
import enum
import io
import linecache
import numbers
import os
import pickle
import types
from collections.abc import Callable, Iterable
from typing import Any

from aioenv.definitions import rebuild
from aioenv.definitions.collect import DefinitionCollector, Entry, Namespace, Selection
from aioenv.definitions.pickling import DefinitionPickler, LruCached, is_importable
from aioenv.definitions.rebuild import Unsendable
from aioenv.definitions.restore import namespace_module, namespace_values

__all__ = ["DefinitionEmitter", "source_lines"]

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
