"""In the parent: groups of columns to the info dict of a batch (see `infos.py`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv

from aioenv import speedups
from aioenv.spaces.infos import MAX_SCHEMAS, NO_RESULT, NO_RESULT_KEY, Column, ColumnGroup, Columns, Schema, has_buffer

__all__ = ["RowDicts", "SchemaTable", "merge", "merge_or_rows"]

_log = logging.getLogger("aioenv")

_OBJECT = np.dtype(object)


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


# A key, that of its mask, its dtype if that is not float64 or there is a shape, and that.
_Name: TypeAlias = tuple[Any, str, Any, tuple[int, ...]]
# By the schema's identity: to hash one takes longer than its use. C merges those that have names.
_named: dict[int, tuple[Schema, tuple[_Name, ...] | None]] = {}


def _names(schema: Schema) -> tuple[_Name, ...] | None:
    """Those of all columns; None if C can't merge them."""
    known, names = _named.get(id(schema), (None, None))
    if known is not schema:
        if len(_named) > MAX_SCHEMAS:
            _named.clear()
        by_c = not schema.by_row and all(has_buffer(column) and len(column.path) == 1 for column in schema.columns)
        names = tuple(map(_name, schema.columns)) if by_c else None
        _named[id(schema)] = schema, names
    return names


def _name(column: Column) -> _Name:
    key = column.path[0]
    return key, f"_{key}", None if column.dtype == np.float64 and not column.shape else column.dtype, column.shape


def _name_rows(names: Iterable[_Name], table: np.ndarray[Any, Any], masks: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Rows of a float64 table and of its masks as the values and masks of keys."""
    infos: dict[str, Any] = {}
    for (key, mask_key, dtype, _), values, mask in zip(names, table, masks, strict=True):
        infos[key] = values if dtype is None else values.astype(dtype)
        infos[mask_key] = mask
    return infos


def _merge_floats(parts: Sequence[Columns], size: int) -> dict[str, Any] | None:
    """Tables into one, where some rows have other keys than others; None if a key has come with two dtypes."""
    keys: dict[Any, tuple[int, _Name]] = {}  # its row in the table
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
