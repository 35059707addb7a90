"""Info dicts to columns and back.

`gymnasium.vector` merges the info dicts of a batch key by key into arrays with a `_key` mask. Done one env at a
time that costs 2 to 6 µs an env and step; pickling the dicts costs more. So the worker gathers the dicts that have
the same keys and types into *groups* of typed columns (`gather`), a group's shape travels once as a `Schema`, and
the parent assigns whole columns (`merge`). What comes out is what Gymnasium's `VectorEnv._add_info` makes, key by
key and bit by bit; where a key's type changes from env to env, that very function is called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv

__all__ = ["NO_RESULT", "Columns", "Gatherer", "Group", "Schema", "SchemaTable", "merge"]

_log = logging.getLogger("aioenv")

Path: TypeAlias = tuple[Any, ...]
_SCALARS = (int, float, bool)
_FLOATS = tuple(np.dtype(name) for name in ("f8", "f4", "f2"))

# A worker stops remembering schemas here: infos whose keys never repeat would otherwise grow both sides for ever.
MAX_SCHEMAS = 256


class Column(NamedTuple):
    """One key of an info dict: where it stands, and what its values are."""

    path: Path
    dtype: np.dtype[Any] | None  # None: objects (or, if `is_dict`, a nested dict)
    shape: tuple[int, ...]
    is_dict: bool = False
    is_python: bool = False  # a number of Python's own: as an object, it must come out as one


class Schema(NamedTuple):
    """The columns of one sort of info dict, parents before their children."""

    columns: tuple[Column, ...]
    floats: bool  # all are float scalars: they travel as one float64 table, which holds narrower ones exactly
    by_row: bool  # something in it is merged row by row alone, by Gymnasium's own code


# A column that the parent adds for rows which were asked for a result and have none: their envs have no further
# episode. In the merged infos it becomes "_active", which is False there.
_NO_RESULT = "_no_result"
NO_RESULT = Schema((Column((_NO_RESULT,), np.dtype(np.bool_), (), is_python=True),), False, True)


class Group(NamedTuple):
    """Info dicts of one sort, as they travel."""

    schema: int
    rows: tuple[int, ...] | None  # of the request, None: all, in order
    data: bytes | memoryview  # the typed columns, one after the other
    objects: list[list[Any]]  # the others

    @property
    def is_usual(self) -> bool:
        """Whether there is nothing to it but typed columns of all rows."""
        return self.rows is None and not self.objects


class Columns(NamedTuple):
    """A group after the journey: where its rows stand in the batch, and its values by column."""

    positions: np.ndarray[Any, Any] | slice
    schema: Schema
    values: Sequence[Any]  # an array or a list for each column (None for nested dicts); for floats the table


# ---------------------------------------------------------------- in the worker


class _Known(NamedTuple):
    """A sort of flat info dict, recognised by its keys and the types of its values."""

    number: int
    schema: Schema
    keys: list[Any]
    types: list[type]
    arrays: tuple[tuple[Any, np.dtype[Any], tuple[int, ...]], ...]  # whose dtypes and shapes must be looked at

    def fits(self, info: Mapping[Any, Any]) -> bool:
        """Whether the arrays are what they were."""
        return all(info[key].dtype == dtype and info[key].shape == shape for key, dtype, shape in self.arrays)


class Gatherer:
    """Turns info dicts into groups of columns; remembers the schemas that the parent knows already."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, Any], _Known] = {}
        self._ids: dict[Schema, int] = {}
        self._news: list[tuple[int, Schema]] = []
        self._usual: _Known | None = None  # all float scalars: what a whole batch is compared with first

    def gather(self, infos: Sequence[tuple[int, Mapping[Any, Any]]], rows: Sequence[int]) -> list[Group]:
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
            self._usual = None
        try:
            return self._gather(infos, wanted, self._known)
        except OverflowError:  # an int past 64 bits among dicts that are known by their types alone
            return self._gather(infos, wanted, None)

    def _gather_alike(
        self, usual: _Known, infos: Sequence[tuple[int, Mapping[Any, Any]]], wanted: tuple[int, ...]
    ) -> Group | None:
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
        return Group(usual.number, None, np.array(values, np.float64).reshape(n, -1).tobytes("F"), [])

    def _gather(
        self,
        infos: Sequence[tuple[int, Mapping[Any, Any]]],
        wanted: tuple[int, ...],
        sorts: dict[tuple[Any, Any], _Known] | None,
    ) -> list[Group]:
        groups: dict[int, tuple[Schema, list[int], list[Any]]] = {}
        keys: Any = None
        types: Any = None
        known: _Known | None = None
        for row, info in infos:
            last = keys, types
            keys, types = tuple(info), tuple(map(type, info.values()))
            if sorts is not None and (keys, types) != last:
                known = sorts.get((keys, types))
            if known is not None and (not known.arrays or known.fits(info)):
                number, schema = known.number, known.schema
                values: Iterable[Any] = info.values()
            else:
                number, schema = self._lookup(info)
                if sorts is not None and _is_flat(schema, info):
                    arrays = tuple((c.path[0], c.dtype, c.shape) for c in schema.columns if c.shape)
                    known = sorts[keys, types] = _Known(number, schema, list(keys), list(types), arrays)  # type: ignore[arg-type]
                    if schema.floats:
                        self._usual = known
                values = [_value(info, column) for column in schema.columns]
                keys = None
            group = groups.get(number)
            if group is None:
                group = groups[number] = (schema, [], [])
            group[1].append(row)
            if schema.floats:
                group[2].extend(values)
            else:
                group[2].append(values)
        return [
            Group(number, None if tuple(rows) == wanted else tuple(rows), *_pack(schema, rows, values))
            for number, (schema, rows, values) in groups.items()
        ]

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


def _is_flat(schema: Schema, info: Mapping[Any, Any]) -> bool:
    """Whether dicts with the same keys and types have the same schema, but for the dtypes and shapes of arrays."""
    return not schema.by_row and not any(
        column.is_dict or (column.dtype is None and type(info[column.path[0]]) is int) for column in schema.columns
    )


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
            yield Column(here, None, ())
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


def _value(info: Mapping[Any, Any], column: Column) -> Any:
    if column.is_dict:
        return None
    value: Any = info
    for key in column.path:
        value = value[key]
    return value


def _pack(schema: Schema, rows: list[int], values: list[Any]) -> tuple[bytes, list[list[Any]]]:
    """The typed columns as bytes, one after the other, and the others as lists."""
    if schema.floats:
        return np.array(values, np.float64).reshape(len(rows), -1).tobytes("F"), []
    data: list[bytes] = []
    objects: list[list[Any]] = []
    for column, items in zip(schema.columns, zip(*values, strict=True), strict=True):
        if column.dtype is not None:
            data.append(np.array(list(items), column.dtype).tobytes())  # of a tuple it would make a record
        elif not column.is_dict:
            objects.append(list(items))
    return b"".join(data), objects


# ---------------------------------------------------------------- in the parent


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

    def unpack(self, group: Group, positions: np.ndarray[Any, Any] | slice, count: int) -> Columns:
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
        for _, dtype, shape, is_dict, _ in schema.columns:
            if dtype is not None:
                array: np.ndarray[Any, Any] = np.ndarray((count, *shape), dtype, group.data, offset)
                offset += array.nbytes
                values.append(array)
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
    if not parts:
        return {}
    if any(part.schema.by_row for part in parts):
        return _merge_by_row(parts, size)
    if _all_alike(parts, size):
        return _join(parts, size)
    infos: dict[str, Any] = {}
    for part in parts:
        if not _assign(infos, part, size):
            return _merge_by_row(parts, size)
    return infos


def _all_alike(parts: Sequence[Columns], size: int) -> bool:
    """Whether every row of the batch has the same keys and types, none of them an object: the usual step."""
    schema = parts[0].schema
    covered = 0
    for part in parts:
        if part.schema is not schema or not isinstance(part.positions, slice) or part.positions.start != covered:
            return False
        covered = part.positions.stop
    return covered == size and all(c.dtype is not None or c.is_dict for c in schema.columns)


def _join(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    schema = parts[0].schema
    if schema.floats:
        table = np.concatenate([part.values for part in parts], axis=1)
        masks = np.ones(table.shape, np.bool_)
        for column, values, mask in zip(schema.columns, table, masks, strict=True):
            key = column.path[0]
            infos[key] = values if column.dtype == np.float64 else values.astype(column.dtype)
            infos[f"_{key}"] = mask
        return infos
    for index, column in enumerate(parts[0].schema.columns):
        target = infos
        for key in column.path[:-1]:
            target = target[key]
        target[column.path[-1]] = {} if column.is_dict else np.concatenate([part.values[index] for part in parts])
        target[f"_{column.path[-1]}"] = np.ones(size, np.bool_)
    return infos


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
            elif column.dtype is not None:
                array = np.zeros((size, *column.shape), column.dtype)
            else:
                array = np.full(size, None, dtype=object)
            target[key] = array
            target[f"_{key}"] = np.zeros(size, np.bool_)
        elif isinstance(array, dict) is not column.is_dict:
            return False
        if not column.is_dict:
            # not `dtype or object`: a numpy dtype without fields counts as false
            dtype = np.dtype(object) if column.dtype is None else column.dtype
            if array.dtype != dtype or array.shape[1:] != column.shape:
                return False
            if column.dtype is None:
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


def _merge_by_row(parts: Sequence[Columns], size: int) -> dict[str, Any]:
    """Gymnasium's own way, one dict at a time in the order of rows: the first value of a key decides its dtype."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for part in parts:
        positions = range(size)[part.positions] if isinstance(part.positions, slice) else part.positions
        rows.extend((int(position), _info(part, i)) for i, position in enumerate(positions))
    rows.sort(key=lambda item: item[0])  # stable: within a row, the order in which they came
    holder = _Holder(size)
    infos: dict[str, Any] = {}
    try:
        for position, info in rows:
            infos = holder._add_info(infos, info, position)  # type: ignore[misc]
    except (ValueError, TypeError, AttributeError, OverflowError) as exc:
        # Gymnasium would lose the whole step here; as objects, nothing is lost
        _log.warning("infos do not fit one array a key (%s); they are given as objects", exc)
        infos = {}
        for position, info in rows:
            for key, value in info.items():
                if key not in infos:
                    infos[key] = np.full(size, None, dtype=object)
                    infos[f"_{key}"] = np.zeros(size, np.bool_)
                infos[key][position] = value
                infos[f"_{key}"][position] = True
    if infos.pop(_NO_RESULT, None) is not None:
        infos["_active"] = ~infos.pop(f"_{_NO_RESULT}")
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
