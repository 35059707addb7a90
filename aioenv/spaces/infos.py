"""Info dicts to columns and back: `Gatherer` in a worker, `SchemaTable` and `merge_infos` in the parent.

`gymnasium.vector` merges the info dicts of a batch key by key into arrays with a `_key` mask. Done one env at a time
that costs 2 to 6 µs an env and step; pickling the dicts costs more. So the worker gathers the dicts that have the same
keys and types into groups of typed columns. The schema of a group travels once, and the parent assigns whole columns.
The result is that of Gymnasium's `VectorEnv._add_info`, key by key and bit by bit. Where the type of a key changes from
env to env, that very function is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv

from aioenv import speedups
from aioenv.speedups import read_by_c

__all__ = [
    "MAX_SCHEMAS",
    "NO_RESULT",
    "NO_RESULT_KEY",
    "Column",
    "ColumnGroup",
    "Columns",
    "Gatherer",
    "Path",
    "RowDicts",
    "Schema",
    "SchemaTable",
    "column_of_objects",
    "has_buffer",
    "merge_infos",
    "merge_infos_or_rows",
    "merge_rows",
    "row_dicts",
    "shares_nothing",
]

Path: TypeAlias = tuple[Any, ...]

# A worker forgets its schemas when it has this many: else infos whose keys never repeat would use up memory.
MAX_SCHEMAS = 256


class Column(NamedTuple):
    """One key of an info dict: its path, and the type of its values."""

    path: Path
    dtype: np.dtype[Any] | None  # None: objects (or, if `is_dict`, a nested dict)
    shape: tuple[int, ...]
    is_dict: bool = False
    is_python: bool = False  # numbers of Python's own types, which they keep when they become objects
    as_objects: bool = False  # arrays of one dtype and shape that travel as one array and become an object each

    @property
    def is_object(self) -> bool:
        """Whether its values become elements of an array of objects."""
        return self.as_objects or (self.dtype is None and not self.is_dict)


def column_of_objects(path: Path, values: Sequence[Any]) -> Column:
    """Make the column of values that become objects; arrays of equal dtype and shape travel as one array."""
    first = values[0] if values else None
    if type(first) is not np.ndarray or not first.shape or first.dtype.hasobject:
        return Column(path, None, ())
    dtype, shape = first.dtype, first.shape
    if not all(type(value) is np.ndarray and value.dtype == dtype and value.shape == shape for value in values):
        return Column(path, None, ())
    return Column(path, dtype, shape, as_objects=True)


def has_buffer(column: Column) -> bool:
    """Return whether C can copy the values of a column: they have a dtype that supports the buffer protocol."""
    if column.dtype is None or column.as_objects:
        return False
    try:
        return np.empty(0, column.dtype).data is not None
    except (ValueError, TypeError):  # datetimes
        return False


class Schema(NamedTuple):
    """The columns of info dicts with the same keys and types, parents before their children."""

    columns: tuple[Column, ...]
    floats: bool  # all are float scalars: they travel as one float64 table, which represents narrower floats exactly
    by_row: bool  # a value needs Gymnasium's own merge, row by row


# A column that the parent adds for rows that have no result, since their envs have no further episode. In the merged
# infos it becomes "_active", which is False there.
NO_RESULT_KEY = "\0no result"  # no env uses it
NO_RESULT = Schema((Column((NO_RESULT_KEY,), np.dtype(np.bool_), (), is_python=True),), False, True)


class ColumnGroup(NamedTuple):
    """Info dicts of one schema, as they travel."""

    schema: int  # its id
    rows: tuple[int, ...] | None  # of the request; None: all, in order
    data: bytes | memoryview  # the typed columns, one after the other
    objects: list[list[Any]]  # the others


class Columns(NamedTuple):
    """A group as received: the positions of its rows in the batch, and its values by column."""

    positions: np.ndarray[Any, Any] | slice
    schema: Schema
    values: Sequence[Any]  # an array or a list for each column (None for nested dicts); for floats the table


# ------------------------------------------------------------ in the worker: dicts to columns

_SCALARS = (int, float, bool)
_FLOATS = tuple(np.dtype(name) for name in ("f8", "f4", "f2"))
_FLOAT_TYPES = frozenset({float, np.float64, np.float32, np.float16})
# C knows at most this many schemas that differ only in the shapes of arrays: where shapes vary all the time, it is no
# use.
_MAX_ALIKE = 4


class NumericSchema(NamedTuple):
    """A schema that C turns into columns: all values are numbers, or arrays of fixed dtypes and shapes.

    Attributes:
        schema_id: the schema's id.
        keys, types: of the dict, in its order.
        templates: arrays with the dtype and shape of each value.
        make_info: makes a dict of the bytes of its values.
    """

    schema_id: int
    keys: list[Any]
    types: list[Any]
    templates: list[np.ndarray[Any, Any]]
    make_info: Callable[[bytes], dict[Any, Any]]


class _KnownSchema(NamedTuple):
    """A schema that is recognised by the keys and types of a dict, those of nested dicts included."""

    schema_id: int
    schema: Schema
    keys: list[Any]
    types: list[Any]
    flat: bool  # it has no nested dicts
    arrays: tuple[Column, ...]  # their dtypes and shapes must be compared, too

    def fits(self, info: Mapping[Any, Any]) -> bool:
        """Return whether the arrays of a dict have the dtypes and shapes of the schema."""
        for column in self.arrays:
            array = _value(info, column)
            if array.dtype != column.dtype or array.shape != column.shape:
                return False
        return True


class Gatherer:
    """Gathers info dicts into groups of columns; remembers the schemas that the parent knows.

    Attributes:
        c_schemas: the schemas that C recognises (see `speedups.serve_steps`): known to the parent, with numbers and
            arrays as values. Each is a tuple: id, keys, types, arrays of the dtypes and shapes of its values, and a
            function that makes a dict from the bytes of its values.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, Any], _KnownSchema] = {}
        self._ids: dict[Schema, int] = {}
        self._new_schemas: list[tuple[int, Schema]] = []
        self.c_schemas: list[NumericSchema] = []
        self._expected: _KnownSchema | None = None  # all float scalars: a whole batch is compared with it first

    def gather(self, infos: Sequence[tuple[int, Mapping[Any, Any]]], rows: Sequence[int]) -> list[ColumnGroup]:
        """Group info dicts, which come in the order in which Gymnasium would add them.

        Args:
            infos: dicts that are not empty, with their rows.
            rows: all rows of the request.
        """
        all_rows = tuple(rows)
        if self._expected is not None and len(infos) == len(all_rows):
            group = self._gather_alike(self._expected, infos, all_rows)
            if group is not None:
                return [group]
        if len(self._ids) >= MAX_SCHEMAS:  # not later: no group may refer to an id that is forgotten
            self._ids.clear()
            self._known.clear()
            self.c_schemas.clear()
            self._expected = None
        try:
            return self._gather(infos, all_rows, self._known)
        except OverflowError:  # an int beyond 64 bits in a dict that was recognised by its types
            return self._gather(infos, all_rows, None)

    def _gather_alike(
        self, expected: _KnownSchema, infos: Sequence[tuple[int, Mapping[Any, Any]]], all_rows: tuple[int, ...]
    ) -> ColumnGroup | None:
        """Make one group of all rows if every dict has the expected schema: they are compared as a whole."""
        rows, dicts = zip(*infos, strict=True)
        n = len(all_rows)
        if rows != all_rows or set(map(type, dicts)) != {dict}:
            return None
        # no dict has a key twice: if all keys together are these, in this order, each dict has its share
        if list(chain.from_iterable(dicts)) != expected.keys * n:
            return None
        values = list(chain.from_iterable(map(dict.values, dicts)))
        if list(map(type, values)) != expected.types * n:
            return None
        return ColumnGroup(expected.schema_id, None, np.array(values, np.float64).reshape(n, -1).tobytes("F"), [])

    def _gather(
        self,
        infos: Sequence[tuple[int, Mapping[Any, Any]]],
        all_rows: tuple[int, ...],
        known_schemas: dict[tuple[Any, Any], _KnownSchema] | None,
    ) -> list[ColumnGroup]:
        groups: dict[int, tuple[Schema, list[int], list[Any]]] = {}
        keys: Any = None
        types: Any = None
        known: _KnownSchema | None = None
        for row, info in infos:
            last = keys, types
            keys, types = tuple(info), tuple(map(type, info.values()))
            if dict in types:
                types = _nested_types(info, types)
            if known_schemas is not None and (keys, types) != last:
                known = known_schemas.get((keys, types))
            if known is not None and (not known.arrays or known.fits(info)):
                schema_id, schema = known.schema_id, known.schema
                values: Iterable[Any] = info.values() if known.flat else _values(info, schema)
            else:
                schema_id, schema = self._lookup(info)
                if known_schemas is not None and _is_known_by_types(schema, info):
                    if len(known_schemas) >= MAX_SCHEMAS:
                        known_schemas.clear()
                        self.c_schemas.clear()
                    flat = not any(column.is_dict for column in schema.columns)
                    arrays = tuple(column for column in schema.columns if column.shape)
                    known = _KnownSchema(schema_id, schema, list(keys), list(types), flat, arrays)
                    known_schemas[keys, types] = known
                    self._add_c_schema(known)
                values = _values(info, schema)
                keys = None
            group = groups.get(schema_id)
            if group is None:
                group = groups[schema_id] = (schema, [], [])
            group[1].append(row)
            if schema.floats:
                group[2].extend(values)
            else:
                group[2].append(values)
        if len(groups) == 1 and known is not None and known.schema.floats:
            self._expected = known  # probably the schema of the next batch, too
        return [
            ColumnGroup(schema_id, None if tuple(rows) == all_rows else tuple(rows), *_pack(schema, rows, values))
            for schema_id, (schema, rows, values) in groups.items()
        ]

    def _add_c_schema(self, known: _KnownSchema) -> None:
        columns = known.schema.columns
        alike = [
            schema_id for schema_id, keys, types, *_ in self.c_schemas if (keys, types) == (known.keys, known.types)
        ]
        if not known.flat or known.schema_id in alike or len(alike) == _MAX_ALIKE:
            return
        if known.schema.floats and _FLOAT_TYPES.issuperset(known.types):
            templates = [np.empty(())] * len(columns)
        elif not known.schema.floats and all(map(_is_for_c, columns, known.types)):
            templates = [np.empty(column.shape, column.dtype) for column in columns]
        else:
            return
        make_info = partial(_info_of_bytes, known, templates)
        self.c_schemas.append(NumericSchema(known.schema_id, known.keys, known.types, templates, make_info))

    def take_new_schemas(self) -> list[tuple[int, Schema]]:
        """Return the schemas that were not sent to the parent yet, with their ids."""
        new, self._new_schemas = self._new_schemas, []
        return new

    def _lookup(self, info: Mapping[Any, Any]) -> tuple[int, Schema]:
        schema = _schema(info)
        schema_id = self._ids.get(schema)
        if schema_id is None:
            schema_id = len(self._ids)
            self._ids[schema] = schema_id
            self._new_schemas = [(n, s) for n, s in self._new_schemas if n != schema_id]
            self._new_schemas.append((schema_id, schema))
        return schema_id, schema


def _nested_types(info: Mapping[Any, Any], types: tuple[type, ...]) -> tuple[Any, ...]:
    """Return the types of an info's values; a nested dict is represented by its keys and types."""
    nested: list[Any] = list(types)
    for index, (key, value) in enumerate(info.items()):
        if types[index] is dict and value and key != "final_obs":
            nested[index] = (*value, _nested_types(value, tuple(map(type, value.values()))))
    return tuple(nested)


def _is_known_by_types(schema: Schema, info: Mapping[Any, Any]) -> bool:
    """Return whether keys and types determine the schema of a dict, except the dtypes and shapes of arrays."""
    if schema.by_row:
        return False
    for column in schema.columns:
        kind = type(_value(info, column, whole=True))
        if column.is_dict and kind is not dict:  # `_nested_types` does not look into other classes
            return False
        if not column.is_dict and column.dtype is None and kind is int:  # too large for a dtype; the next may not be
            return False
    return True


def _is_for_c(column: Column, kind: Any) -> bool:
    """Return whether C can copy values of this type into a column."""
    if not has_buffer(column):  # objects, say
        return False
    if column.shape:
        return kind is np.ndarray
    return kind in _SCALARS or (column.dtype is not None and kind is column.dtype.type)


def _info_of_bytes(known: _KnownSchema, templates: Sequence[np.ndarray[Any, Any]], data: bytes) -> dict[Any, Any]:
    """Make the dict of the values that C has copied into bytes."""
    info: dict[Any, Any] = {}
    offset = 0
    for key, kind, template in zip(known.keys, known.types, templates, strict=True):
        size = template.nbytes
        value: np.ndarray[Any, Any] = np.ndarray(template.shape, template.dtype, data[offset : offset + size]).copy()
        info[key] = value if kind is np.ndarray else kind(value[()])
        offset += size
    return info


def _schema(info: Mapping[Any, Any]) -> Schema:
    nonstandard: list[Any] = []
    columns = tuple(_columns(info, (), nonstandard))
    # not without `is not None`: numpy takes None for float64
    floats = all(c.dtype is not None and c.dtype in _FLOATS and not c.shape for c in columns)
    return Schema(columns, floats and not nonstandard, bool(nonstandard))


def _columns(info: Mapping[Any, Any], path: Path, nonstandard: list[Any]) -> Iterable[Column]:
    """Make a column for each key, parents first; keys that can't become whole columns go to `nonstandard`."""
    for key, value in info.items():
        key_path = (*path, key)
        kind = type(value)
        if isinstance(key, str) and key.startswith("_"):
            nonstandard.append(key)  # it may be the mask of another key
        if key == "final_obs":
            yield column_of_objects(key_path, [value])
        elif isinstance(value, dict):
            yield Column(key_path, None, (), is_dict=True)
            yield from _columns(value, key_path, nonstandard)
        elif kind in _SCALARS or issubclass(kind, np.number):
            dtype: np.dtype[Any] | None = np.dtype(kind)
            if kind is int and not -(2**63) <= value < 2**63:
                dtype = None  # too large for any integer dtype: it stays an int
            elif dtype.kind not in "biufc":  # type: ignore[union-attr]
                dtype = None  # a timedelta: its unit belongs to the value
                nonstandard.append(key)
            yield Column(key_path, dtype, (), is_python=kind in _SCALARS)
        elif isinstance(value, np.ndarray) and value.shape and not value.dtype.hasobject:
            yield Column(key_path, value.dtype, value.shape)
        else:
            if isinstance(value, np.ndarray):
                nonstandard.append(key)
            yield Column(key_path, None, ())


def _value(info: Mapping[Any, Any], column: Column, whole: bool = False) -> Any:
    """Return the value of a column in an info; None for a nested dict, unless it is wanted as a whole."""
    if column.is_dict and not whole:
        return None
    value: Any = info
    for key in column.path:
        value = value[key]
    return value


def _values(info: Mapping[Any, Any], schema: Schema) -> list[Any]:
    return [_value(info, column) for column in schema.columns]


def _pack(schema: Schema, rows: list[int], values: list[Any]) -> tuple[bytes, list[list[Any]]]:
    """Return the typed columns as bytes, one after the other, and the others as lists."""
    if schema.floats:
        return np.array(values, np.float64).reshape(len(rows), -1).tobytes("F"), []
    data: list[bytes] = []
    objects: list[list[Any]] = []
    for column, items in zip(schema.columns, zip(*values, strict=True), strict=True):
        if column.as_objects:
            data += [item.tobytes() for item in items]
        elif column.dtype is not None:
            data.append(np.array(list(items), column.dtype).tobytes())  # numpy would make a record of a tuple
        elif not column.is_dict:
            objects.append(list(items))
    return b"".join(data), objects


# ------------------------------------------------------------ in the parent: columns to dicts

_log = logging.getLogger("aioenv")

_OBJECT = np.dtype(object)
_IMMUTABLE = frozenset({*_SCALARS, np.bool_, str, bytes, type(None)})


@read_by_c
class SchemaTable:
    """The schemas of one worker, by the ids that it uses.

    Args:
        interned: schemas of all workers of a pool, so that equal ones are the same object.
    """

    def __init__(self, interned: dict[Schema, Schema]) -> None:
        self._schemas: dict[int, Schema] = {}
        self._interned = interned

    def update(self, new_schemas: Iterable[tuple[int, Schema]]) -> None:
        """Add the schemas that came with a reply; an id may be given to another schema."""
        for schema_id, schema in new_schemas:
            if len(self._interned) > 4 * MAX_SCHEMAS:
                self._interned.clear()  # costs a slower merge of a few steps, nothing else
            self._schemas[schema_id] = self._interned.setdefault(schema, schema)

    def schema_of(self, group: ColumnGroup) -> Schema:
        """Return the schema of a group."""
        return self._schemas[group.schema]

    def unpack(self, group: ColumnGroup, positions: np.ndarray[Any, Any] | slice, count: int) -> Columns:
        """Return the columns of a group.

        Args:
            group: as received.
            positions: the positions of its rows in the batch, ascending.
            count: how many rows the group has.
        """
        schema = self._schemas[group.schema]
        if schema.floats:
            table: np.ndarray[Any, Any] = np.ndarray((len(schema.columns), count), np.float64, group.data)
            return Columns(positions, schema, table)  # type: ignore[arg-type]
        values: list[Any] = []
        offset = 0
        objects = iter(group.objects)
        for _, dtype, shape, is_dict, _, as_objects in schema.columns:
            if dtype is not None:
                array: np.ndarray[Any, Any] = np.ndarray((count, *shape), dtype, group.data, offset)
                offset += array.nbytes
                values.append([row.copy() for row in array] if as_objects else array)
            else:
                values.append(None if is_dict else next(objects))
        return Columns(positions, schema, values)


def merge_infos(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    """Merge columns into the info dict of a batch, as `gymnasium.vector` gives it.

    Args:
        parts: the groups of all workers.
        size: how many rows the batch has.

    Returns:
        For each key an array of `size` rows: zero, or None for objects, where a row has no such key. Under `_key` a
        bool array of shape `(size,)` says which rows have it. Dicts nest.
    """
    infos = _merge_columns(parts, size)
    return _merge_by_row(parts, size) if infos is None else infos


class RowDicts(dict[Any, Any]):
    """The info dicts by row, in place of the info dict of a batch."""


def merge_infos_or_rows(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    """Merge as `merge_infos` does, but return `RowDicts` where the values of a key have several types.

    An array would cast them to one.
    """
    infos = _merge_columns(parts, size)
    if infos is None and any(part.schema is NO_RESULT for part in parts):
        return merge_infos(parts, size)
    return row_dicts(_by_row(parts, size)) if infos is None else infos


def row_dicts(rows: Iterable[tuple[int, dict[str, Any]]]) -> RowDicts:
    """Merge info dicts, with their rows, row by row."""
    infos = RowDicts()
    for position, info in rows:
        infos.setdefault(position, {}).update(info)
    return infos


def _merge_columns(parts: Sequence[Columns], size: int) -> dict[str, Any] | None:
    """Merge whole columns at once; return None if the result would differ from that of a merge row by row."""
    if not parts:
        return {}
    if speedups.merge_columns is not None:
        merged = speedups.merge_columns(parts, size, _named)
        if merged is not None:
            return merged
        for part in parts:
            _names(part.schema)
    if any(part.schema.by_row for part in parts):
        return None
    if _have_one_schema(parts, size):
        return _join(parts, size)
    if all(part.schema.floats for part in parts) and (floats := _merge_floats(parts, size)) is not None:
        return floats
    infos: dict[str, Any] = {}
    for part in parts:
        if not _assign(infos, part, size):
            return None
    return infos


def _have_one_schema(parts: Sequence[Columns], size: int) -> bool:
    """Return whether all rows have the same keys and types, and no objects: the common case."""
    schema = parts[0].schema
    covered = 0
    for part in parts:
        if part.schema is not schema or not isinstance(part.positions, slice) or part.positions.start != covered:
            return False
        covered = part.positions.stop
    return covered == size and not any(column.is_object for column in schema.columns)


def _join(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    schema = parts[0].schema
    if schema.floats:
        table = np.concatenate([part.values for part in parts], axis=1)
        return _name_rows(_names(schema) or (), table, np.ones(table.shape, np.bool_))
    for index, column in enumerate(parts[0].schema.columns):
        target = infos
        for key in column.path[:-1]:
            target = target[key]
        target[column.path[-1]] = {} if column.is_dict else np.concatenate([part.values[index] for part in parts])
        target[f"_{column.path[-1]}"] = np.ones(size, np.bool_)
    return infos


class ColumnName(NamedTuple):
    """The keys of a column in the merged info dict, and its dtype (None: float64 scalars) and shape."""

    key: Any
    mask_key: str
    dtype: Any
    shape: tuple[int, ...]


# By the identity of the schema: hashing it takes longer than its use. C merges schemas that have names here.
_named: dict[int, tuple[Schema, tuple[ColumnName, ...] | None]] = {}


def _names(schema: Schema) -> tuple[ColumnName, ...] | None:
    """Return the names of all columns; None if C can't merge them."""
    known, names = _named.get(id(schema), (None, None))
    if known is not schema:
        if len(_named) > MAX_SCHEMAS:
            _named.clear()
        by_c = not schema.by_row and all(has_buffer(column) and len(column.path) == 1 for column in schema.columns)
        names = tuple(map(_name, schema.columns)) if by_c else None
        _named[id(schema)] = schema, names
    return names


def _name(column: Column) -> ColumnName:
    key = column.path[0]
    dtype = None if column.dtype == np.float64 and not column.shape else column.dtype
    return ColumnName(key, f"_{key}", dtype, column.shape)


def _name_rows(names: Iterable[ColumnName], table: np.ndarray[Any, Any], masks: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Name the rows of a float64 table and its masks: the values and masks of keys."""
    infos: dict[str, Any] = {}
    for (key, mask_key, dtype, _), values, mask in zip(names, table, masks, strict=True):
        infos[key] = values if dtype is None else values.astype(dtype)
        infos[mask_key] = mask
    return infos


def _merge_floats(parts: Sequence[Columns], size: int) -> dict[str, Any] | None:
    """Merge tables whose rows have different keys; return None if a key has two dtypes."""
    keys: dict[Any, tuple[int, ColumnName]] = {}  # with its row in the table
    places: dict[int, Any] = {}  # by schema: the rows of its columns
    for part in parts:
        schema = part.schema
        if id(schema) in places:
            continue
        rows = []
        for name in _names(schema) or ():
            row, known = keys.setdefault(name[0], (len(keys), name))
            if known[2] != name[2]:
                return None
            rows.append(row)
        # the columns of the first schema are the first rows
        places[id(schema)] = np.array(rows, np.int64)[:, None] if places else slice(len(rows))
    table = np.zeros((len(keys), size))
    masks = np.zeros(table.shape, np.bool_)
    for part in parts:
        rows = places[id(part.schema)]
        positions = part.positions
        if isinstance(positions, slice) and not isinstance(rows, slice):
            rows = rows[:, 0]
        table[rows, positions] = part.values
        masks[rows, positions] = True
    return _name_rows([name for _, name in keys.values()], table, masks)


def _assign(infos: dict[str, Any], part: Columns, size: int) -> bool:
    """Assign whole columns; return False if a key had another type before."""
    positions = part.positions
    for column, values in zip(part.schema.columns, part.values, strict=True):
        target = infos
        for key in column.path[:-1]:
            target = target[key]
        key = column.path[-1]
        array: Any = target.get(key)
        if array is None:
            if column.is_dict:
                array = {}
            elif column.is_object:
                array = np.full(size, None, dtype=object)
            else:
                array = np.zeros((size, *column.shape), column.dtype)
            target[key] = array
            target[f"_{key}"] = np.zeros(size, np.bool_)
        elif isinstance(array, dict) is not column.is_dict:
            return False
        if not column.is_dict:
            dtype, shape = (_OBJECT, ()) if column.is_object else (column.dtype, column.shape)
            if array.dtype != dtype or array.shape[1:] != shape:
                return False
            if column.is_object:
                indices = range(size)[positions] if isinstance(positions, slice) else positions
                for index, value in zip(indices, values, strict=True):
                    array[index] = value
            else:
                array[positions] = values
        target[f"_{key}"][positions] = True
    return True


class _InfoMerger:
    """The part of a VectorEnv that `_add_info` needs."""

    _add_info = VectorEnv._add_info

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


def _by_row(parts: Sequence[Columns], size: int) -> list[tuple[int, dict[str, Any]]]:
    """Return all dicts in the order of their rows."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for part in parts:
        positions = range(size)[part.positions] if isinstance(part.positions, slice) else part.positions
        rows.extend((int(position), _info(part, i)) for i, position in enumerate(positions))
    rows.sort(key=lambda item: item[0])  # stable: dicts of one row stay in order
    return rows


def _merge_by_row(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    return merge_rows(_by_row(parts, size), size)


def merge_rows(rows: Sequence[tuple[int, dict[str, Any]]], size: int) -> dict[str, Any]:
    """Merge as Gymnasium does, one dict at a time in the order of rows: the first value of a key decides its dtype."""
    merger = _InfoMerger(size)
    infos: dict[str, Any] = {}
    try:
        with np.errstate(invalid="raise", over="raise"):  # NaN as an integer, or a number too large for its array
            for position, info in rows:
                infos = merger._add_info(infos, info, position)  # type: ignore[misc]
    except (ValueError, TypeError, AttributeError, ArithmeticError, Warning) as exc:  # warnings may be errors
        # Gymnasium would lose the whole step here, or the value; as objects, nothing is lost
        _log.warning("infos do not fit one array a key (%s); they are given as objects", exc)
        infos, masks = {}, {}
        for position, info in rows:
            for key, value in info.items():
                if key not in infos:
                    infos[key] = np.full(size, None, dtype=object)
                    masks[f"_{key}"] = np.zeros(size, np.bool_)
                infos[key][position] = value
                masks[f"_{key}"][position] = True
        infos = {**masks, **infos}  # a key of the env wins over the mask of another key
    if infos.pop(NO_RESULT_KEY, None) is not None:
        infos["_active"] = ~infos.pop(f"_{NO_RESULT_KEY}")
    return infos


def shares_nothing(value: Any) -> bool:
    """Return whether an info whose containers were copied (`copy_containers`) has no object that its env may change."""
    kind = type(value)
    if kind is dict:
        return all(map(shares_nothing, value.values()))
    if kind is list or kind is tuple:
        return all(map(shares_nothing, value))
    if kind is np.ndarray:
        return not value.dtype.hasobject
    return kind in _IMMUTABLE or issubclass(kind, np.number)


def _info(part: Columns, index: int) -> dict[str, Any]:
    """Rebuild the dict of row `index` of a group."""
    info: dict[str, Any] = {}
    for column, values in zip(part.schema.columns, part.values, strict=True):
        target = info
        for key in column.path[:-1]:
            target = target[key]
        target[column.path[-1]] = {} if column.is_dict else _original_value(values[index], column)
    return info


def _original_value(value: Any, column: Column) -> Any:
    """Return a value of a typed column as a type that Gymnasium treats like the original."""
    if column.dtype is None or column.shape:
        return value
    return value.item() if column.is_python else column.dtype.type(value)
