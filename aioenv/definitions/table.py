"""Definitions by number, and messages that refer to them: classes and functions keep their identity both ways.

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
from collections import ChainMap
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import cloudpickle

from aioenv.definitions.pickling import LruCached, is_definition, is_importable
from aioenv.definitions.rebuild import member_of, reduce_code

__all__ = ["DefinitionTable", "LiveTable", "current", "dump_by_reference", "find", "use"]

_tables: weakref.WeakValueDictionary[bytes, DefinitionTable] = weakref.WeakValueDictionary()
_local = threading.local()
_MAIN = b"main__"  # in a pickle that names something of `__main__` or `__mp_main__`
_PARTIAL = b"functools"  # in a pickle with a `functools.partial`


class DefinitionTable:
    """Definitions by number, in one process.

    Args:
        token: which table it is, in every process that has it.
        modules: names of modules, beside the main one, whose definitions are in the table.
    """

    def __init__(self, token: bytes, modules: Iterable[str] = ()) -> None:
        self.token = token
        self.marks = (_MAIN, _PARTIAL, *(name.encode() for name in modules))
        self._objects: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}  # by id: the objects are kept, so that no id is used again
        _tables[token] = self

    def add(self, number: int, value: Any) -> None:
        """Enter a definition."""
        self._objects[number] = value
        self._numbers[id(value)] = number

    def number_of(self, value: Any) -> int | None:
        """The number of a definition; None if the table does not have it."""
        return self._numbers.get(id(value))

    @property
    def size(self) -> int:
        """How many definitions there are."""
        return len(self._objects)

    def refer(self, value: Any) -> Any:
        """Reduce a definition that the receiver has; None if it does not have it, or if this is no definition."""
        number = self.number_of(value)
        return None if number is None else (definition, (self.token, number))

    def refer_global(self, value: Any, name: str) -> Any:
        """Reduce a global of the main module that the receiver has; None if it does not have it."""
        return None

    def has(self, number: int) -> bool:
        """Whether there is a definition of this number."""
        return number in self._objects

    def definition(self, number: int) -> Any:
        """The definition of this number."""
        return self._objects[number]

    def reduce(self, value: Any) -> Any:
        """Reduce a definition that the table does not have; NotImplemented leaves it to cloudpickle."""
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
        # a search costs far less than a second pickle, and a string that only looks like a name does no harm
        return dump_by_reference(value, self) if any(mark in data for mark in self.marks) else data


class LiveTable(DefinitionTable):
    """The table of workers that are threads of this process: every class and function is the process's own.

    Args:
        token: see `DefinitionTable`.
        factories: of all slots.
    """

    def __init__(self, token: bytes, factories: Iterable[Any]) -> None:
        super().__init__(token)
        self.factories = list(factories)
        self._objects: Any = weakref.WeakValueDictionary()  # a new function may come with every message
        self._count = itertools.count()

    def number_of(self, value: Any) -> int | None:
        """As `DefinitionTable`; a class, a function or a decorated callable enters the table by itself."""
        number = self._numbers.get(id(value))
        if number is not None and self._objects.get(number) is value:
            return number
        kind = type(value)
        if kind is types.FunctionType or issubclass(kind, type) or kind is LruCached:
            if is_importable(value):
                return None
        elif kind is not partial or not _is_global(value):
            return None
        number = next(self._count)
        self.add(number, value)
        return number


def _is_global(value: Any) -> bool:
    return any(value is other for other in list(vars(sys.modules["__main__"]).values()))


def find(token: bytes) -> DefinitionTable:
    """The table of this token in this process.

    Raises:
        LookupError: if there is none.
    """
    table = _tables.get(token)
    if table is None:
        raise LookupError("the vector env of these definitions is gone, or lives in another process")
    return table


def use(table: DefinitionTable | None) -> None:
    """Have this thread, which is a worker's, refer to these definitions in its messages."""
    _local.table = table


def current() -> DefinitionTable | None:
    """The table of the worker that this thread is; None if it is none."""
    table: DefinitionTable | None = getattr(_local, "table", None)
    return table


def definition(token: bytes, number: int) -> Any:
    """A definition, in messages."""
    return find(token).definition(number)


def dump_by_reference(value: Any, table: DefinitionTable) -> bytes:
    """Pickle a message with definitions as their numbers.

    Raises:
        Exception: if it can't be pickled.
    """
    file = io.BytesIO()
    _MessagePickler(file, table).dump(value)
    return file.getvalue()


class _MessagePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what is in a table as a reference, and other definitions by value."""

    dispatch_table: ClassVar[Any] = ChainMap({types.CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, table: DefinitionTable) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._table = table

    def reducer_override(self, obj: Any) -> Any:
        table = self._table
        reference = table.refer(obj)
        if reference is not None:
            return reference
        kind = type(obj)
        if isinstance(obj, enum.Enum) and kind._member_map_.get(obj._name_ or "") is obj and is_definition(kind):
            return member_of, (kind, obj._name_)  # by name: a value need not equal its copy
        if kind is types.FunctionType or issubclass(kind, type) or kind is LruCached:
            if is_importable(obj):
                return NotImplemented
            reduced = table.reduce(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced
        return NotImplemented
