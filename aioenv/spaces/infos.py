"""Info dicts to columns and back: what both sides know.

`gymnasium.vector` merges the info dicts of a batch key by key into arrays with a `_key` mask. Done one env at a
time that costs 2 to 6 µs an env and step; pickling the dicts costs more. So the worker gathers the dicts that have
the same keys and types into *groups* of typed columns (`gather.py`), a group's shape travels once as a `Schema`, and
the parent assigns whole columns (`merge.py`). What comes out is what Gymnasium's `VectorEnv._add_info` makes, key by
key and bit by bit; where a key's type changes from env to env, that very function is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

__all__ = [
    "MAX_SCHEMAS",
    "NO_RESULT",
    "NO_RESULT_KEY",
    "Column",
    "ColumnGroup",
    "Columns",
    "Path",
    "Schema",
    "column_of_objects",
    "has_buffer",
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
