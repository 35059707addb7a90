"""`DefinitionTable`: definitions by number. Messages refer to them, so classes and functions keep their identity.

A parent and its workers number the same definitions alike. In a message a definition travels as its number; other
instances travel by value.
"""

from __future__ import annotations

import enum
import io
import itertools
import pickle
import sys
import threading
import types
import weakref
from collections import ChainMap, defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import cloudpickle

from aioenv.definitions.pickling import LruCached, is_definition, is_importable
from aioenv.definitions.rebuild import member_of, reduce_code

__all__ = ["DefinitionTable", "LiveTable", "current_table", "dump_by_reference", "find_table", "set_current_table"]

_tables: weakref.WeakValueDictionary[bytes, DefinitionTable] = weakref.WeakValueDictionary()
_local = threading.local()
_MAIN = b"main__"  # a pickle has it that names something of `__main__` or `__mp_main__`
_PARTIAL = b"functools"  # a pickle has it that contains a `functools.partial`


class DefinitionTable:
    """Definitions by number, in one process.

    Args:
        token: identifies the table in every process that has it.
        modules: names of modules, beside the main one, whose definitions are in the table.

    Attributes:
        name_markers: bytes of which a pickle has at least one if it names a definition of the table.
    """

    def __init__(self, token: bytes, modules: Iterable[str] = ()) -> None:
        self.token = token
        self.name_markers = (_MAIN, _PARTIAL, *(name.encode() for name in modules))
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # by id; the objects are kept, so no id is used again
        _tables[token] = self

    def add(self, number: int, value: Any) -> None:
        """Add a definition."""
        self._objects[number] = value
        self._numbers[id(value)] = number

    def number_of(self, value: Any) -> int | None:
        """Return the number of a definition; None if the table does not have it."""
        return self._numbers.get(id(value))

    @property
    def size(self) -> int:
        """The number of definitions."""
        return len(self._objects)

    def reduce_known(self, value: Any) -> Any:
        """Reduce a definition that the receiver has; return None for anything else."""
        number = self.number_of(value)
        return None if number is None else (load_definition, (self.token, number))

    def reduce_known_global(self, value: Any, name: str) -> Any:
        """Reduce a global of the main module that the receiver has; return None if it does not have it."""
        return None

    def has(self, number: int) -> bool:
        """Return whether there is a definition of this number."""
        return number in self._objects

    def get(self, number: int) -> Any:
        """Return the definition of this number."""
        return self._objects[number]

    def take_recent(self) -> list[Any]:
        """Return definitions of messages that this thread has pickled lately, for a table that would forget them."""
        return []

    def reduce_new(self, value: Any) -> Any:
        """Reduce a definition that the receiver does not have; NotImplemented leaves it to cloudpickle."""
        return NotImplemented

    def dumps(self, value: Any) -> bytes:
        """Pickle a message.

        Raises:
            Exception: if it can't be pickled.
        """
        try:
            data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            return dump_by_reference(value, self)
        # a search costs far less than a second pickle; a false match costs only time
        return dump_by_reference(value, self) if any(mark in data for mark in self.name_markers) else data


class LiveTable(DefinitionTable):
    """The table of workers that are threads of this process: every class and function is the process's own.

    Its references are weak. Each message therefore keeps `take_recent()` until it is read: nothing else may refer to a
    class that an env has defined in its `step`, say.

    Args:
        token: see `DefinitionTable`.
        factories: of all slots.
        common: the object that all workers have.
    """

    def __init__(self, token: bytes, factories: Iterable[Any], common: Any = None) -> None:
        super().__init__(token)
        self.factories = list(factories)
        self.common = common
        self._objects: Any = weakref.WeakValueDictionary()  # a new function may come with every message
        self._count = itertools.count()
        self._recent: defaultdict[int, list[Any]] = defaultdict(list)  # by thread

    def take_recent(self) -> list[Any]:
        """Return the definitions of the messages that this thread has pickled since the last call."""
        return self._recent.pop(threading.get_ident(), [])

    def number_of(self, value: Any) -> int | None:
        """Return the number of a definition; add a class, function or decorated callable that is new to the table."""
        number = self._numbers.get(id(value))
        if number is not None and self._objects.get(number) is value:
            self._recent[threading.get_ident()].append(value)
            return number
        kind = type(value)
        if kind is types.FunctionType or issubclass(kind, type) or kind is LruCached:
            if is_importable(value):
                return None
        elif kind is not partial or not _is_global(value):
            return None
        number = next(self._count)
        self.add(number, value)
        self._recent[threading.get_ident()].append(value)
        return number


def _is_global(value: Any) -> bool:
    return any(value is other for other in list(vars(sys.modules["__main__"]).values()))


def find_table(token: bytes) -> DefinitionTable:
    """Return the table of this token in this process.

    Raises:
        LookupError: if there is no such table.
    """
    table = _tables.get(token)
    if table is None:
        raise LookupError("the vector env of these definitions is gone, or lives in another process")
    return table


def set_current_table(table: DefinitionTable | None) -> None:
    """Make this thread, which is a worker's, refer to the definitions of a table in its messages."""
    _local.table = table


def current_table() -> DefinitionTable | None:
    """Return the table of the worker whose thread this is; None in any other thread."""
    table: DefinitionTable | None = getattr(_local, "table", None)
    return table


def load_definition(token: bytes, number: int) -> Any:
    """Return a definition by number; messages call it when they are unpickled."""
    return find_table(token).get(number)


def dump_by_reference(value: Any, table: DefinitionTable) -> bytes:
    """Pickle a message; definitions are pickled as their numbers.

    Raises:
        Exception: if it can't be pickled.
    """
    file = io.BytesIO()
    _MessagePickler(file, table).dump(value)
    return file.getvalue()


class _MessagePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the definitions of a table as references, and other definitions by value."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, table: DefinitionTable) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._table = table

    def reducer_override(self, obj: Any) -> Any:
        table = self._table
        reference = table.reduce_known(obj)
        if reference is not None:
            return reference
        kind = type(obj)
        if isinstance(obj, enum.Enum) and kind._member_map_.get(obj._name_ or "") is obj and is_definition(kind):
            return member_of, (kind, obj._name_)  # by name: a value need not equal its copy
        if kind is types.FunctionType or issubclass(kind, type) or kind is LruCached:
            if is_importable(obj):
                return NotImplemented
            reduced = table.reduce_new(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced
        return NotImplemented
