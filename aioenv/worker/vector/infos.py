"""Infos of a vector env, merged already, taken apart into the columns that travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.spaces.infos import MAX_SCHEMAS, Column, ColumnGroup, Path, Schema, column_of_objects

__all__ = ["InfoPacker"]


class InfoPacker:
    """Takes the merged infos of a vector env apart into columns, so that those of all workers can be merged.

    What has no element for each slot is every slot's.
    """

    def __init__(self, num_envs: int) -> None:
        self._n = num_envs
        self._ids: dict[Schema, int] = {}
        self._new_schemas: list[tuple[int, Schema]] = []

    def pack(self, info: Mapping[Any, Any], rows: Sequence[int]) -> list[ColumnGroup]:
        """The groups of what an info dict says of some rows; keys whose masks are equal go together."""
        if len(self._ids) >= MAX_SCHEMAS:
            self._ids.clear()
        chosen = np.zeros(self._n, np.bool_)
        chosen[list(rows)] = True
        groups: list[ColumnGroup] = []
        run: list[tuple[Column, Any]] = []
        mask: Any = None
        for column, values, has in self._columns(info, ()):
            if mask is not None and (has != mask).any():
                groups += self._group(run, mask & chosen)
                run = []
            if not run:  # the dicts that it is in must be in its group
                run = [(Column(column.path[:i], None, (), is_dict=True), None) for i in range(1, len(column.path))]
            mask = has
            run.append((column, values))
        return groups + self._group(run, mask & chosen) if run else groups

    def take_new_schemas(self) -> list[tuple[int, Schema]]:
        """The schemas that the parent has not been told of yet."""
        new, self._new_schemas = self._new_schemas, []
        return new

    def _columns(self, info: Mapping[Any, Any], path: Path) -> list[tuple[Column, Any, npt.NDArray[np.bool_]]]:
        columns: list[tuple[Column, Any, npt.NDArray[np.bool_]]] = []
        for key, value in info.items():
            if isinstance(key, str) and key.startswith("_") and key[1:] in info:
                continue  # the mask of another
            mask = info.get(f"_{key}")
            if not (isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (self._n,)):
                mask = np.ones(self._n, np.bool_)
            here = (*path, key)
            if isinstance(value, Mapping):
                columns.append((Column(here, None, (), is_dict=True), None, mask))
                columns += self._columns(value, here)
                continue
            if isinstance(value, (int, float, np.number)) and not isinstance(value, np.timedelta64):
                value = np.full(self._n, value)
            if not (isinstance(value, np.ndarray) and value.ndim and len(value) == self._n):
                each = value if isinstance(value, (list, tuple)) and len(value) == self._n else [value] * self._n
                columns.append((Column(here, None, ()), each, mask))
            elif value.dtype.hasobject:
                columns.append((column_of_objects(here, value[mask].tolist()), list(value), mask))
            else:
                # as Gymnasium merges them, an array of bool was made of Python's own
                python = value.dtype == np.bool_ and value.ndim == 1
                columns.append((Column(here, value.dtype, value.shape[1:], is_python=python), value, mask))
        return columns

    def _group(self, run: list[tuple[Column, Any]], mask: npt.NDArray[np.bool_]) -> list[ColumnGroup]:
        rows = np.flatnonzero(mask)
        if not len(rows):
            return []
        columns = tuple(column for column, _ in run)
        floats = all(
            c.dtype == np.float64 and c.shape == () and len(c.path) == 1 for c in columns
        )  # dicts have no dtype
        schema = Schema(columns, floats, by_row=False)
        number = self._ids.get(schema)
        if number is None:
            number = self._ids[schema] = len(self._ids)
            self._new_schemas.append((number, schema))
        data: list[bytes] = []
        objects: list[list[Any]] = []
        for column, values in run:
            if column.as_objects:
                data += [values[row].tobytes() for row in rows.tolist()]
            elif column.dtype is not None:
                data.append(np.ascontiguousarray(values[rows]).tobytes())
            elif not column.is_dict:
                objects.append([values[row] for row in rows.tolist()])
        return [ColumnGroup(number, None if len(rows) == self._n else tuple(rows.tolist()), b"".join(data), objects)]
