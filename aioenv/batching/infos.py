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

__all__ = ["MAX_SCHEMAS", "NO_RESULT", "NO_RESULT_KEY", "Column", "Columns", "Group", "Path", "Schema"]

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


class Schema(NamedTuple):
    """The columns of one sort of info dict, parents before their children."""

    columns: tuple[Column, ...]
    floats: bool  # all are float scalars: they travel as one float64 table, which holds narrower ones exactly
    by_row: bool  # something in it is merged row by row alone, by Gymnasium's own code


# A column that the parent adds for rows which were asked for a result and have none: their envs have no further
# episode. In the merged infos it becomes "_active", which is False there.
NO_RESULT_KEY = "\0no result"  # which no env uses
NO_RESULT = Schema((Column((NO_RESULT_KEY,), np.dtype(np.bool_), (), is_python=True),), False, True)


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
