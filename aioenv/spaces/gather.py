"""In the worker: info dicts to groups of columns (see `infos.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aioenv.spaces.infos import MAX_SCHEMAS, Column, ColumnGroup, Path, Schema, column_of_objects, has_buffer

__all__ = ["Gatherer"]

_SCALARS = (int, float, bool)
_FLOATS = tuple(np.dtype(name) for name in ("f8", "f4", "f2"))
_FLOAT_TYPES = frozenset({float, np.float64, np.float32, np.float16})
# So many sorts that differ in nothing but the shapes of arrays C knows: where these vary all the time, it is of no use.
_MAX_ALIKE = 4
# What C needs to know of one (see `Gatherer.sorts`).
Sort: TypeAlias = "tuple[int, list[Any], list[Any], list[np.ndarray[Any, Any]], Callable[[bytes], dict[Any, Any]]]"


class _KnownSchema(NamedTuple):
    """A sort of info dict, recognised by its keys and the types of its values, those of dicts in it included."""

    number: int
    schema: Schema
    keys: list[Any]
    types: list[Any]
    flat: bool  # there are no dicts in it
    arrays: tuple[Column, ...]  # whose dtypes and shapes must be looked at

    def fits(self, info: Mapping[Any, Any]) -> bool:
        """Whether the arrays are what they were."""
        for column in self.arrays:
            array = _value(info, column)
            if array.dtype != column.dtype or array.shape != column.shape:
                return False
        return True


class Gatherer:
    """Turns info dicts into groups of columns; remembers the schemas that the parent knows already.

    Attributes:
        sorts: what C recognises (see `speedups.serve_express`): sorts that the parent knows, of which all values are
            numbers, or arrays. Of each its number, keys and types, arrays that look like its values, and what makes a
            dict of the bytes of its values.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, Any], _KnownSchema] = {}
        self._ids: dict[Schema, int] = {}
        self._news: list[tuple[int, Schema]] = []
        self.sorts: list[Sort] = []
        self._usual: _KnownSchema | None = None  # all float scalars: what a whole batch is compared with first

    def gather(self, infos: Sequence[tuple[int, Mapping[Any, Any]]], rows: Sequence[int]) -> list[ColumnGroup]:
        """Group info dicts, given with their rows in the order in which Gymnasium would add them.

        Args:
            infos: dicts that are not empty, with their rows.
            rows: all rows of the request.
        """
        wanted = tuple(rows)
        if self._usual is not None and len(infos) == len(wanted):
            group = self._gather_alike(self._usual, infos, wanted)
            if group is not None:
                return [group]
        if len(self._ids) >= MAX_SCHEMAS:  # here, where no group has a number yet
            self._ids.clear()
            self._known.clear()
            self.sorts.clear()
            self._usual = None
        try:
            return self._gather(infos, wanted, self._known)
        except OverflowError:  # an int past 64 bits among dicts that are known by their types alone
            return self._gather(infos, wanted, None)

    def _gather_alike(
        self, usual: _KnownSchema, infos: Sequence[tuple[int, Mapping[Any, Any]]], wanted: tuple[int, ...]
    ) -> ColumnGroup | None:
        """One group of all rows, if every dict is of the usual sort: compared as a whole, and never one by one."""
        rows, dicts = zip(*infos, strict=True)
        n = len(wanted)
        if rows != wanted or set(map(type, dicts)) != {dict}:
            return None
        # no dict has a key twice: if they have all of these together, in this order, each has its share
        if list(chain.from_iterable(dicts)) != usual.keys * n:
            return None
        values = list(chain.from_iterable(map(dict.values, dicts)))
        if list(map(type, values)) != usual.types * n:
            return None
        return ColumnGroup(usual.number, None, np.array(values, np.float64).reshape(n, -1).tobytes("F"), [])

    def _gather(
        self,
        infos: Sequence[tuple[int, Mapping[Any, Any]]],
        wanted: tuple[int, ...],
        sorts: dict[tuple[Any, Any], _KnownSchema] | None,
    ) -> list[ColumnGroup]:
        groups: dict[int, tuple[Schema, list[int], list[Any]]] = {}
        keys: Any = None
        types: Any = None
        known: _KnownSchema | None = None
        for row, info in infos:
            last = keys, types
            keys, types = tuple(info), tuple(map(type, info.values()))
            if dict in types:
                types = _deep(info, types)
            if sorts is not None and (keys, types) != last:
                known = sorts.get((keys, types))
            if known is not None and (not known.arrays or known.fits(info)):
                number, schema = known.number, known.schema
                values: Iterable[Any] = info.values() if known.flat else _values(info, schema)
            else:
                number, schema = self._lookup(info)
                if sorts is not None and _is_known_by_types(schema, info):
                    if len(sorts) >= MAX_SCHEMAS:
                        sorts.clear()
                        self.sorts.clear()
                    flat = not any(column.is_dict for column in schema.columns)
                    arrays = tuple(column for column in schema.columns if column.shape)
                    known = sorts[keys, types] = _KnownSchema(number, schema, list(keys), list(types), flat, arrays)
                    self._show_to_c(known)
                values = _values(info, schema)
                keys = None
            group = groups.get(number)
            if group is None:
                group = groups[number] = (schema, [], [])
            group[1].append(row)
            if schema.floats:
                group[2].extend(values)
            else:
                group[2].append(values)
        if len(groups) == 1 and known is not None and known.schema.floats:
            self._usual = known  # the next batch will be of this sort, too
        return [
            ColumnGroup(number, None if tuple(rows) == wanted else tuple(rows), *_pack(schema, rows, values))
            for number, (schema, rows, values) in groups.items()
        ]

    def _show_to_c(self, known: _KnownSchema) -> None:
        columns = known.schema.columns
        shown = [number for number, keys, types, *_ in self.sorts if (keys, types) == (known.keys, known.types)]
        if not known.flat or known.number in shown or len(shown) == _MAX_ALIKE:
            return
        if known.schema.floats and _FLOAT_TYPES.issuperset(known.types):
            like = [np.empty(())] * len(columns)
        elif not known.schema.floats and all(map(_is_for_c, columns, known.types)):
            like = [np.empty(column.shape, column.dtype) for column in columns]
        else:
            return
        self.sorts.append((known.number, known.keys, known.types, like, partial(_info_of, known, like)))

    def take_news(self) -> list[tuple[int, Schema]]:
        """The schemas that the parent has not been told of yet."""
        news, self._news = self._news, []
        return news

    def _lookup(self, info: Mapping[Any, Any]) -> tuple[int, Schema]:
        schema = _schema(info)
        number = self._ids.get(schema)
        if number is None:
            number = len(self._ids)
            self._ids[schema] = number
            self._news = [(n, s) for n, s in self._news if n != number]
            self._news.append((number, schema))
        return number, schema


def _deep(info: Mapping[Any, Any], types: tuple[type, ...]) -> tuple[Any, ...]:
    """The types of an info's values, with keys and types in the place of dicts."""
    deep: list[Any] = list(types)
    for index, (key, value) in enumerate(info.items()):
        if types[index] is dict and value and key != "final_obs":
            deep[index] = (*value, _deep(value, tuple(map(type, value.values()))))
    return tuple(deep)


def _is_known_by_types(schema: Schema, info: Mapping[Any, Any]) -> bool:
    """Whether dicts with the same keys and types have the same schema, but for the dtypes and shapes of arrays."""
    if schema.by_row:
        return False
    for column in schema.columns:
        kind = type(_value(info, column, whole=True))
        if column.is_dict and kind is not dict:  # one of another class is not looked into
            return False
        if not column.is_dict and column.dtype is None and kind is int:  # too large for a number; the next may not be
            return False
    return True


def _is_for_c(column: Column, kind: Any) -> bool:
    """Whether C can copy values of this type into a column."""
    if not has_buffer(column):  # an object, say, whatever its type
        return False
    if column.shape:
        return kind is np.ndarray
    return kind in _SCALARS or (column.dtype is not None and kind is column.dtype.type)


def _info_of(known: _KnownSchema, like: Sequence[np.ndarray[Any, Any]], data: bytes) -> dict[Any, Any]:
    """The dict that C has copied these values of."""
    info: dict[Any, Any] = {}
    offset = 0
    for key, kind, column in zip(known.keys, known.types, like, strict=True):
        size = column.nbytes
        value: np.ndarray[Any, Any] = np.ndarray(column.shape, column.dtype, data[offset : offset + size]).copy()
        info[key] = value if kind is np.ndarray else kind(value[()])
        offset += size
    return info


def _schema(info: Mapping[Any, Any]) -> Schema:
    odd: list[Any] = []
    columns = tuple(_columns(info, (), odd))
    # not without `is not None`: numpy takes None for float64
    floats = all(c.dtype is not None and c.dtype in _FLOATS and not c.shape for c in columns)
    return Schema(columns, floats and not odd, bool(odd))


def _columns(info: Mapping[Any, Any], path: Path, odd: list[Any]) -> Iterable[Column]:
    """A column for each key, parents first; `odd` gets what whole columns can't be made of."""
    for key, value in info.items():
        here = (*path, key)
        kind = type(value)
        if isinstance(key, str) and key.startswith("_"):
            odd.append(key)  # it may be the mask of another key
        if key == "final_obs":
            yield column_of_objects(here, [value])
        elif isinstance(value, dict):
            yield Column(here, None, (), is_dict=True)
            yield from _columns(value, here, odd)
        elif kind in _SCALARS or issubclass(kind, np.number):
            dtype: np.dtype[Any] | None = np.dtype(kind)
            if kind is int and not -(2**63) <= value < 2**63:
                dtype = None  # too large for any integer dtype: it stays what it is
            elif dtype.kind not in "biufc":  # type: ignore[union-attr]
                dtype = None  # a timedelta, whose unit is its value's
                odd.append(key)
            yield Column(here, dtype, (), is_python=kind in _SCALARS)
        elif isinstance(value, np.ndarray) and value.shape and not value.dtype.hasobject:
            yield Column(here, value.dtype, value.shape)
        else:
            if isinstance(value, np.ndarray):
                odd.append(key)
            yield Column(here, None, ())


def _value(info: Mapping[Any, Any], column: Column, whole: bool = False) -> Any:
    """What a column has of an info; of a dict nothing, since its keys have columns of their own, or all."""
    if column.is_dict and not whole:
        return None
    value: Any = info
    for key in column.path:
        value = value[key]
    return value


def _values(info: Mapping[Any, Any], schema: Schema) -> list[Any]:
    return [_value(info, column) for column in schema.columns]


def _pack(schema: Schema, rows: list[int], values: list[Any]) -> tuple[bytes, list[list[Any]]]:
    """The typed columns as bytes, one after the other, and the others as lists."""
    if schema.floats:
        return np.array(values, np.float64).reshape(len(rows), -1).tobytes("F"), []
    data: list[bytes] = []
    objects: list[list[Any]] = []
    for column, items in zip(schema.columns, zip(*values, strict=True), strict=True):
        if column.apart:
            data += [item.tobytes() for item in items]
        elif column.dtype is not None:
            data.append(np.array(list(items), column.dtype).tobytes())  # of a tuple it would make a record
        elif not column.is_dict:
            objects.append(list(items))
    return b"".join(data), objects
