"""Rows of whole batches, and whole batches of rows: for results that some slots have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from aioenv.core.results import Ready, StepResult
from aioenv.spaces.layout import Layout
from aioenv.worker.vector_access import take_observations

__all__ = ["spread", "take_rows"]


def spread(space: Space[Any], ready: Ready, n: int) -> StepResult:
    """Put the rows of some slots into a whole batch; other rows have zeros, objects of one of these slots, or None.

    Args:
        space: the observation space of one slot.
        ready: the rows.
        n: the number of slots.
    """
    slots = ready.slots
    if len(slots) == n:
        return StepResult(*ready[1:])
    layout = Layout(space)
    arrays, columns = take_observations(layout, ready.obs, len(slots))
    objects = [[column[0]] * n if len(column) else [None] * n for column in columns]
    for whole, column in zip(objects, columns, strict=True):
        for slot, item in zip(slots.tolist(), column, strict=True):
            whole[slot] = item
    obs = layout.assemble([_spread(array, slots, n) for array in arrays], objects)
    reward, terminated, truncated = (_spread(array, slots, n) for array in ready[2:5])
    return StepResult(obs, reward, terminated, truncated, _spread_info(ready.info, slots, n))


def _spread(rows: npt.NDArray[Any], slots: npt.NDArray[np.int64], n: int) -> npt.NDArray[Any]:
    whole = np.full((n, *rows.shape[1:]), None if rows.dtype.hasobject else 0, rows.dtype)
    whole[slots] = rows
    return whole


def _spread_info(info: dict[str, Any], slots: npt.NDArray[np.int64], n: int) -> dict[str, Any]:
    return {
        key: _spread_info(value, slots, n)
        if isinstance(value, dict)
        else _spread(value, slots, n)
        if isinstance(value, np.ndarray) and value.shape[:1] == slots.shape
        else value
        for key, value in info.items()
    }


def take_rows(
    space: Space[Any], result: StepResult, slots: npt.NDArray[np.int64]
) -> tuple[Any, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
    """Return the rows of some slots of a whole batch: observations, reward, flags and infos."""
    n = len(result.reward)
    if len(slots) == n:
        return tuple(result)
    layout = Layout(space)
    arrays, columns = take_observations(layout, result.obs, n)
    obs = layout.assemble([array[slots] for array in arrays], [[c[slot] for slot in slots.tolist()] for c in columns])
    reward, terminated, truncated = (array[slots] for array in result[1:4])
    return obs, reward, terminated, truncated, _rows_of_info(result.info, slots, n)


def _rows_of_info(info: Any, slots: npt.NDArray[np.int64], n: int) -> Any:
    if isinstance(info, list):  # of DictInfoToList
        return [info[slot] for slot in slots.tolist()]
    return {
        key: _rows_of_info(value, slots, n)
        if isinstance(value, dict)
        else value[slots]
        if isinstance(value, np.ndarray) and value.shape[:1] == (n,)
        else value
        for key, value in info.items()
    }
