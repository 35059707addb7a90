"""Info dicts to columns and back.

`gymnasium.vector` merges the info dicts of a batch key by key into arrays with a `_key` mask. Done one env at a
time that costs 2 to 6 µs an env and step; pickling the dicts costs more. So the worker gathers the dicts that have
the same keys and types into *groups* of typed columns (`Gatherer`), a group's shape travels once as a `Schema`, and
the parent assigns whole columns (`merge`). The result is equal, key by key and bit by bit, to that of Gymnasium's
`VectorEnv._add_info`; where a key's type changes from env to env, that very function is called.
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
from aioenv.speedups.attributes import read_by_c

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
    "merge",
    "merge_or_rows",
]

Path: TypeAlias = tuple[Any, ...]

# A worker stops remembering schemas here: infos whose keys never repeat would otherwise grow both sides for ever.
MAX_SCHEMAS = 256


class Column(NamedTuple):
    """One key of an info dict: where it stands, and what its values are."""

    path: Path
    dtype: np.dtype[Any] | None  # None: objects (or, if `is_dict`, a nested dict)
    shape: tuple[int, ...]
    is_dict: bool = False
    is_python: bool = False  # a number of Python's own: as an object, it must come out as one
    apart: bool = False  # arrays of one dtype and shape, which come out as objects: each row's is its own

    @property
    def is_object(self) -> bool:
        """Whether its values come to stand in an array of objects."""
        return self.apart or (self.dtype is None and not self.is_dict)


def column_of_objects(path: Path, values: Sequence[Any]) -> Column:
    """The column of values that are objects to those who see them: if they are arrays alike, they travel as such."""
    first = values[0] if values else None
    if type(first) is not np.ndarray or not first.shape or first.dtype.hasobject:
        return Column(path, None, ())
    dtype, shape = first.dtype, first.shape
    if not all(type(value) is np.ndarray and value.dtype == dtype and value.shape == shape for value in values):
        return Column(path, None, ())
    return Column(path, dtype, shape, apart=True)


def has_buffer(column: Column) -> bool:
    """Whether C can copy its values: they have a dtype, of which numpy lets others see the memory."""
    if column.dtype is None or column.apart:
        return False
    try:
        return np.empty(0, column.dtype).data is not None
    except (ValueError, TypeError):  # datetimes
        return False


class Schema(NamedTuple):
    """The columns of one sort of info dict, parents before their children."""

    columns: tuple[Column, ...]
    floats: bool  # all are float scalars: they travel as one float64 table, which holds narrower ones exactly
    by_row: bool  # something in it is merged row by row alone, by Gymnasium's own code


# A column that the parent adds for rows which were asked for a result and have none: their envs have no further
# episode. In the merged infos it becomes "_active", which is False there.
NO_RESULT_KEY = "\0no result"  # which no env uses
NO_RESULT = Schema((Column((NO_RESULT_KEY,), np.dtype(np.bool_), (), is_python=True),), False, True)


class ColumnGroup(NamedTuple):
    """Info dicts of one sort, as they travel."""

    schema: int
    rows: tuple[int, ...] | None  # of the request, None: all, in order
    data: bytes | memoryview  # the typed columns, one after the other
    objects: list[list[Any]]  # the others


class Columns(NamedTuple):
    """A group after the journey: where its rows stand in the batch, and its values by column."""

    positions: np.ndarray[Any, Any] | slice
    schema: Schema
    values: Sequence[Any]  # an array or a list for each column (None for nested dicts); for floats the table


_SCALARS = (int, float, bool)
_FLOATS = tuple(np.dtype(name) for name in ("f8", "f4", "f2"))
_FLOAT_TYPES = frozenset({float, np.float64, np.float32, np.float16})
# So many sorts that differ in nothing but the shapes of arrays C knows: where these vary all the time, it is of no use.
_MAX_ALIKE = 4


class NumericSchema(NamedTuple):
    """A kind of info dict that C turns into columns: all values are numbers, or arrays of fixed dtypes and shapes.

    Attributes:
        number: the schema's id.
        keys, types: of the dict, in its order.
        like: arrays with the dtype and shape of each value.
        make: makes a dict of the bytes of its values.
    """

    number: int
    keys: list[Any]
    types: list[Any]
    like: list[np.ndarray[Any, Any]]
    make: Callable[[bytes], dict[Any, Any]]


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
        self.sorts: list[NumericSchema] = []
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
        make = partial(_info_of, known, like)
        self.sorts.append(NumericSchema(known.number, known.keys, known.types, like, make))

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


_log = logging.getLogger("aioenv")

_OBJECT = np.dtype(object)


@read_by_c
class SchemaTable:
    """What the parent knows of one worker's schemas.

    Args:
        same: schemas of all workers of a fleet, so that equal ones are the same object.
    """

    def __init__(self, same: dict[Schema, Schema]) -> None:
        self._schemas: dict[int, Schema] = {}
        self._same = same

    def learn(self, news: Iterable[tuple[int, Schema]]) -> None:
        """Take note of schemas that came with a reply; a number may be given anew."""
        for number, schema in news:
            if len(self._same) > 4 * MAX_SCHEMAS:
                self._same.clear()  # costs a slower merge of a few steps, nothing else
            self._schemas[number] = self._same.setdefault(schema, schema)

    def of(self, group: ColumnGroup) -> Schema:
        """What a group's columns are."""
        return self._schemas[group.schema]

    def unpack(self, group: ColumnGroup, positions: np.ndarray[Any, Any] | slice, count: int) -> Columns:
        """A group's columns.

        Args:
            group: as it came.
            positions: where the group's rows stand in the batch, ascending.
            count: how many rows the group has.
        """
        schema = self._schemas[group.schema]
        if schema.floats:
            table: np.ndarray[Any, Any] = np.ndarray((len(schema.columns), count), np.float64, group.data)
            return Columns(positions, schema, table)  # type: ignore[arg-type]
        values: list[Any] = []
        offset = 0
        objects = iter(group.objects)
        for _, dtype, shape, is_dict, _, apart in schema.columns:
            if dtype is not None:
                array: np.ndarray[Any, Any] = np.ndarray((count, *shape), dtype, group.data, offset)
                offset += array.nbytes
                values.append([row.copy() for row in array] if apart else array)
            else:
                values.append(None if is_dict else next(objects))
        return Columns(positions, schema, values)


def merge(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    """Merge columns into the info dict of a batch, as `gymnasium.vector` gives it.

    Args:
        parts: the groups of all workers.
        size: how many rows the batch has.

    Returns:
        For each key an array of `size` rows (zero, or None for objects, where a row has no such key) and under
        `_key` a bool array of shape `(size,)` that says which rows have it; dicts nest.
    """
    infos = _merge_columns(parts, size)
    return _merge_by_row(parts, size) if infos is None else infos


class RowDicts(dict[Any, Any]):
    """Instead of an info dict of a batch: `{row: the info dict that it was}`."""


def merge_or_rows(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    """As `merge`, but with `RowDicts` where a key's values have several types, which an array would cast to one."""
    infos = _merge_columns(parts, size)
    if infos is None and any(part.schema is NO_RESULT for part in parts):
        return merge(parts, size)
    if infos is None:
        infos = RowDicts()
        for position, info in _by_row(parts, size):
            infos.setdefault(position, {}).update(info)
    return infos


def _merge_columns(parts: Sequence[Columns], size: int) -> dict[str, Any] | None:
    """Whole columns at once; None if that gives something else than row by row."""
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
    if _all_alike(parts, size):
        return _join(parts, size)
    if all(part.schema.floats for part in parts) and (floats := _merge_floats(parts, size)) is not None:
        return floats
    infos: dict[str, Any] = {}
    for part in parts:
        if not _assign(infos, part, size):
            return None
    return infos


def _all_alike(parts: Sequence[Columns], size: int) -> bool:
    """Whether every row of the batch has the same keys and types, none of them an object: the usual step."""
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


# By the schema's identity: to hash one takes longer than its use. C merges those that have names.
_named: dict[int, tuple[Schema, tuple[ColumnName, ...] | None]] = {}


def _names(schema: Schema) -> tuple[ColumnName, ...] | None:
    """Those of all columns; None if C can't merge them."""
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
    """Rows of a float64 table and of its masks as the values and masks of keys."""
    infos: dict[str, Any] = {}
    for (key, mask_key, dtype, _), values, mask in zip(names, table, masks, strict=True):
        infos[key] = values if dtype is None else values.astype(dtype)
        infos[mask_key] = mask
    return infos


def _merge_floats(parts: Sequence[Columns], size: int) -> dict[str, Any] | None:
    """Tables into one, where some rows have other keys than others; None if a key has come with two dtypes."""
    keys: dict[Any, tuple[int, ColumnName]] = {}  # its row in the table
    places: dict[int, Any] = {}  # by schema, the rows of its columns
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
        # the first one's are all that there are until then
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
    """Assign whole columns; False if a key has come with another type before."""
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


class _Holder:
    """As much of a VectorEnv as `_add_info` needs."""

    _add_info = VectorEnv._add_info

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


def _by_row(parts: Sequence[Columns], size: int) -> list[tuple[int, dict[str, Any]]]:
    """All dicts, in the order of rows."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for part in parts:
        positions = range(size)[part.positions] if isinstance(part.positions, slice) else part.positions
        rows.extend((int(position), _info(part, i)) for i, position in enumerate(positions))
    rows.sort(key=lambda item: item[0])  # stable: within a row, the order in which they came
    return rows


def _merge_by_row(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    """Gymnasium's own way, one dict at a time in the order of rows: the first value of a key decides its dtype."""
    rows = _by_row(parts, size)
    holder = _Holder(size)
    infos: dict[str, Any] = {}
    try:
        with np.errstate(invalid="raise", over="raise"):  # NaN as an integer, or a number too large for its array
            for position, info in rows:
                infos = holder._add_info(infos, info, position)  # type: ignore[misc]
    except (ValueError, TypeError, AttributeError, ArithmeticError, Warning) as exc:  # if warnings are errors
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
        infos = {**masks, **infos}  # an env's own key, if it is called as another's mask
    if infos.pop(NO_RESULT_KEY, None) is not None:
        infos["_active"] = ~infos.pop(f"_{NO_RESULT_KEY}")
    return infos


def _info(part: Columns, index: int) -> dict[str, Any]:
    """Row `index` of a group as the dict that it was."""
    info: dict[str, Any] = {}
    for column, values in zip(part.schema.columns, part.values, strict=True):
        target = info
        for key in column.path[:-1]:
            target = target[key]
        target[column.path[-1]] = {} if column.is_dict else _as_it_was(values[index], column)
    return info


def _as_it_was(value: Any, column: Column) -> Any:
    """A value of a typed column, of a type that Gymnasium treats as the original's."""
    if column.dtype is None or column.shape:
        return value
    return value.item() if column.is_python else column.dtype.type(value)
