"""Batches that a vector env has made: whose arrays they are, and taking some slots out of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from aioenv.core.results import StepResult
from aioenv.spaces.layout import Layout

__all__ = ["gather_infos", "gather_obs", "only", "own", "own_info"]

Rows = npt.NDArray[np.int64]


def own(value: Any) -> Any:
    """The same batch in arrays that nobody else holds: copied, unless the env has let go of them.

    An array that owns its memory, and that nobody but our caller refers to, is the caller's. What is no array is handed
    out as it is.
    """
    if isinstance(value, np.ndarray):
        if value.flags.owndata and _holders(value) <= _FREE:
            return value
        return value.copy()
    if isinstance(value, Mapping):
        return {key: own(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(own(item) for item in value)
    return value


def own_info(info: Any) -> Any:
    """The same infos, likewise; where the env has let go of the dict too, arrays in it are looked at one by one."""
    if type(info) is not dict or _holders(info) > _FREE:
        return own(info)
    for key in _not_free(info, _FREE_IN_DICT):
        info[key] = own(info[key])
    return info


def _holders(value: Any) -> int:
    return sys.getrefcount(value)


def _own_of_nobody(value: Any) -> int:
    return _holders(value)


def _count_free() -> int:
    """How many references an array has in `own` if its env has none: counted in calls that are alike."""
    value, _ = _fresh()
    return _own_of_nobody(value)


def _fresh() -> tuple[Any, Any]:
    return np.empty(0), None


def _not_free(values: dict[Any, Any], free: int) -> list[Any]:
    """The keys of what is no array, or one that others refer to, or a view of another."""
    return [
        key
        for key, value in values.items()
        if not (type(value) is np.ndarray and sys.getrefcount(value) <= free and value.flags.owndata)
    ]


_FREE = _count_free()
_FREE_IN_DICT = next(free for free in range(100) if not _not_free({"": np.empty(0)}, free))
_NUMBERS = "biufc"


def only(result: StepResult, slots: Rows) -> StepResult:
    """The same result, with reward 0 and flags False for all slots but these, whatever the env has said of others."""
    rest = np.ones(len(result.reward), np.bool_)
    rest[slots] = False
    for column in (result.reward, result.terminated, result.truncated):
        column[rest] = 0
    return result


def gather_obs(single: Space[Any], batched: Space[Any], pieces: Sequence[tuple[Any, Rows]], order: Rows) -> Any:
    """Some rows of some batches of observations, as one batch; element i of it is element `order[i]` of the pieces."""
    elements: list[Any] = []
    for obs, rows in pieces:
        each = list(iterate(batched, obs))
        elements += [each[row] for row in rows.tolist()]
    if not elements:
        layout = Layout(single)
        return layout.assemble(layout.empty(0), layout.no_objects(0))
    elements = [elements[i] for i in order.tolist()]
    return concatenate(single, elements, create_empty_array(single, n=len(elements)))  # type: ignore[arg-type]


def gather_infos(
    pieces: Sequence[tuple[Mapping[Any, Any], Rows]], num_envs: int, place: Sequence[Rows], n: int
) -> dict[Any, Any]:
    """Some rows of some infos, as the info of a batch of n: without keys that none of these rows has.

    Args:
        pieces: infos of batches of `num_envs`, and which rows of each.
        place: where those rows stand in the result.
    """
    result: dict[Any, Any] = {}
    for (info, rows), target in zip(pieces, place, strict=True):
        others = {key for key, mask in info.items() if _is_mask(key, mask, info, num_envs) and not mask[rows].any()}
        others.update([key[1:] for key in others])
        for key, value in info.items():
            if key in others:
                continue
            if isinstance(value, Mapping):
                earlier = result.get(key, {})
                inner = gather_infos([(value, rows)], num_envs, [target], n)
                result[key] = _overlay(earlier, inner, target) if earlier else inner
            elif isinstance(value, np.ndarray) and value.ndim and len(value) == num_envs:
                array = result[key] = _room(result.get(key), value, n)
                if array.shape[1:] == value.shape[1:]:
                    array[target] = value[rows]
                else:
                    for row, item in zip(target.tolist(), value[rows], strict=True):
                        array[row] = item
            else:
                result[key] = value
    return result


def _is_mask(key: Any, mask: Any, info: Mapping[Any, Any], num_envs: int) -> bool:
    """Whether this says which rows have another key, as Gymnasium's masks do."""
    if not isinstance(key, str) or key[:1] != "_" or key[1:] not in info:
        return False
    return isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (num_envs,)


def _room(known: Any, value: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """A column of n rows like those of `value`, with what is known already in it."""
    shape, dtype = value.shape[1:], value.dtype
    if isinstance(known, np.ndarray):
        if known.dtype == dtype and known.shape[1:] == shape:
            return known
        if known.shape[1:] == shape:
            numbers = known.dtype.kind in _NUMBERS and dtype.kind in _NUMBERS
            dtype = np.result_type(known, value) if numbers else np.dtype(object)
        else:
            shape, dtype = (), np.dtype(object)
    array: npt.NDArray[Any] = np.full((n, *shape), None if dtype.hasobject else 0, dtype)
    if isinstance(known, np.ndarray):
        for row, item in enumerate(known):
            array[row] = item
    return array


def _overlay(earlier: dict[Any, Any], later: dict[Any, Any], rows: Rows) -> dict[Any, Any]:
    """`earlier`, with the rows of `later` put in."""
    for key, value in later.items():
        known = earlier.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            _overlay(known, value, rows)
        elif isinstance(value, np.ndarray) and isinstance(known, np.ndarray) and known.shape == value.shape:
            known[rows] = value[rows]
        else:
            earlier[key] = value
    return earlier
