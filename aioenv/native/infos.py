"""Columns of infos, merged as Gymnasium's `SyncVectorEnv` merges one dict a slot: arrays, and a mask `_key` of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["final_info", "leave_out", "merge_infos", "own", "whole"]

Array = npt.NDArray[Any]
Info = dict[str, Any]


def own(array: Array) -> Array:
    """The array, or a copy of what is a view: of a simulation, say, which must not change when the array does."""
    return array if array.base is None else array.copy()


def whole(columns: dict[str, Array], ones: npt.NDArray[np.bool_]) -> Info:
    """The infos of slots that all have all of these columns."""
    info: Info = {}
    for key, column in columns.items():
        info[key] = own(column)
        info[f"_{key}"] = ones.copy()
    return info


def merge_infos(
    columns: dict[str, Array], started: dict[str, Array], starts: npt.NDArray[np.int64], num_envs: int, first: int = 0
) -> Info:
    """The infos of slots some of which have begun an episode.

    Args:
        columns: of the step, one row a slot; those of `starts` are not used. Its arrays become the infos' own.
        started: of the resets, one row for each of `starts`.
        starts: which slots have begun an episode, ascending.
        num_envs: how many slots there are.
        first: the first slot that was stepped.
    """
    info: Info = {}
    begun = np.zeros(num_envs, np.bool_)
    begun[starts] = True
    first_has_begun = bool(begun[first])
    if len(starts) < num_envs:
        others = ~begun
        for key, given in columns.items():
            column = own(given)
            if key in started:
                rows = started[key]
                if first_has_begun and rows.dtype != column.dtype:  # the first slot's type is the column's
                    column = column.astype(rows.dtype)
                column[starts] = rows
                mask = np.ones(num_envs, np.bool_)
            else:
                column[starts] = _nothing(column)
                mask = others.copy()
            info[key], info[f"_{key}"] = column, mask
    for key, rows in started.items():
        if key not in info:
            info[key], info[f"_{key}"] = spread(rows, starts, num_envs), begun.copy()
    return info


def leave_out(info: Info, rest: npt.NDArray[np.bool_]) -> Info:
    """Infos without the rows of a mask: those of slots that were not stepped."""
    for key in [key for key in info if f"_{key}" in info]:
        column, mask = info[key], info[f"_{key}"]
        mask &= ~rest
        if not mask.any():
            del info[key], info[f"_{key}"]
        elif isinstance(column, np.ndarray):
            column[rest] = _nothing(column)
    return info


def spread(rows: Array, slots: npt.NDArray[np.int64], num_envs: int) -> Array:
    """A column with some rows set, the others zero."""
    column = np.zeros((num_envs, *rows.shape[1:]), rows.dtype)
    if rows.dtype.hasobject:
        column[...] = None
    column[slots] = rows
    return column


def _nothing(column: Array) -> Any:
    """What a column has where a slot says nothing: zero, an empty text, None."""
    return None if column.dtype.hasobject else np.zeros((), column.dtype)


def final_info(obs: Array, columns: dict[str, Array], ended: npt.NDArray[np.int64], num_envs: int) -> Info:
    """What an autoreset in the same step says of the episodes that it has ended: `final_obs` and `final_info`."""
    final_obs = np.full(num_envs, None, object)
    for slot in ended.tolist():
        final_obs[slot] = obs[slot].copy()
    mask = np.zeros(num_envs, np.bool_)
    mask[ended] = True
    inner: Info = {}
    for key, column in columns.items():
        inner[key], inner[f"_{key}"] = spread(column[ended], ended, num_envs), mask.copy()
    return {"final_obs": final_obs, "_final_obs": mask, "final_info": inner, "_final_info": mask.copy()}
