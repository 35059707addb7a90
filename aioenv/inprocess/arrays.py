"""The arrays of an env's batches: which of them to copy, and how rows of several results become one batch."""

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

__all__ = ["clear_other_slots", "gather_infos", "gather_obs", "owned", "owned_info"]

Rows = npt.NDArray[np.int64]

_NUMERIC = "biufc"


# ---------------------------------------------------------------- ownership


def owned(value: Any) -> Any:
    """Return a batch in arrays that no other code holds: copied unless the env has dropped them.

    An array is returned as it is if it owns its memory and only the caller of this function has a reference. So is a
    value that is not an array.
    """
    if isinstance(value, np.ndarray):
        if value.flags.owndata and _ref_count(value) <= _UNSHARED:
            return value
        return value.copy()
    if isinstance(value, Mapping):
        return {key: owned(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(owned(item) for item in value)
    return value


def owned_info(info: Any) -> Any:
    """Return an info dict in arrays that no other code holds.

    If the env has dropped the dict, too, it is updated in place, array by array.
    """
    if type(info) is not dict or _ref_count(info) > _UNSHARED:
        return owned(info)
    for key in _shared_keys(info, _UNSHARED_IN_DICT):
        info[key] = owned(info[key])
    return info


def _ref_count(value: Any) -> int:
    return sys.getrefcount(value)


def _ref_count_in_owned(value: Any) -> int:
    return _ref_count(value)


def _unshared_count() -> int:
    """Return the reference count that `owned` sees of an array which its env has dropped.

    It depends on the Python version, so it is measured through the same sequence of calls.
    """
    value, _ = _new_array()
    return _ref_count_in_owned(value)


def _new_array() -> tuple[Any, Any]:
    return np.empty(0), None


def _shared_keys(values: dict[Any, Any], unshared: int) -> list[Any]:
    """Return the keys whose values are no arrays, are referenced elsewhere, or are views of other arrays."""
    return [
        key
        for key, value in values.items()
        if not (type(value) is np.ndarray and sys.getrefcount(value) <= unshared and value.flags.owndata)
    ]


_UNSHARED = _unshared_count()
_UNSHARED_IN_DICT = next(count for count in range(100) if not _shared_keys({"": np.empty(0)}, count))


# ---------------------------------------------------------------- rows


def clear_other_slots(result: StepResult, slots: Rows) -> StepResult:
    """Set reward 0 and flags False, in place, for all slots but these; an env may report anything for the others."""
    others = np.ones(len(result.reward), np.bool_)
    others[slots] = False
    for column in (result.reward, result.terminated, result.truncated):
        column[others] = 0
    return result


def gather_obs(single: Space[Any], batched: Space[Any], pieces: Sequence[tuple[Any, Rows]], order: Rows) -> Any:
    """Gather rows of several batches of observations into one batch.

    Args:
        single: the space of one observation.
        batched: the space of a whole batch.
        pieces: batches, and the rows that are taken from each.
        order: element i of the result is element `order[i]` of all pieces, one after the other.
    """
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
    pieces: Sequence[tuple[Mapping[Any, Any], Rows]], num_envs: int, targets: Sequence[Rows], n: int
) -> dict[Any, Any]:
    """Gather rows of several infos into the info of a batch of n, without keys that none of these rows has.

    Args:
        pieces: infos of batches of `num_envs`, and the rows that are taken from each.
        num_envs: the number of slots.
        targets: for each piece, the rows of the result that it fills.
        n: the number of rows of the result.
    """
    result: dict[Any, Any] = {}
    for (info, rows), target in zip(pieces, targets, strict=True):
        absent = {key for key, mask in info.items() if _is_mask(key, mask, info, num_envs) and not mask[rows].any()}
        absent.update([key[1:] for key in absent])
        for key, value in info.items():
            if key in absent:
                continue
            if isinstance(value, Mapping):
                earlier = result.get(key, {})
                inner = gather_infos([(value, rows)], num_envs, [target], n)
                result[key] = _put_rows(earlier, inner, target) if earlier else inner
            elif isinstance(value, np.ndarray) and value.ndim and len(value) == num_envs:
                array = result[key] = _column_for(result.get(key), value, n)
                if array.shape[1:] == value.shape[1:]:
                    array[target] = value[rows]
                else:
                    for row, item in zip(target.tolist(), value[rows], strict=True):
                        array[row] = item
            else:
                result[key] = value
    return result


def _is_mask(key: Any, mask: Any, info: Mapping[Any, Any], num_envs: int) -> bool:
    """Return whether a value is one of Gymnasium's masks, which tell the rows that have another key."""
    if not isinstance(key, str) or key[:1] != "_" or key[1:] not in info:
        return False
    return isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (num_envs,)


def _column_for(known: Any, value: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """Return a column of n rows that can hold rows of `value`, and holds the `known` ones."""
    shape, dtype = value.shape[1:], value.dtype
    if isinstance(known, np.ndarray):
        if known.dtype == dtype and known.shape[1:] == shape:
            return known
        if known.shape[1:] == shape:
            numeric = known.dtype.kind in _NUMERIC and dtype.kind in _NUMERIC
            dtype = np.result_type(known, value) if numeric else np.dtype(object)
        else:
            shape, dtype = (), np.dtype(object)
    array: npt.NDArray[Any] = np.full((n, *shape), None if dtype.hasobject else 0, dtype)
    if isinstance(known, np.ndarray):
        for row, item in enumerate(known):
            array[row] = item
    return array


def _put_rows(earlier: dict[Any, Any], later: dict[Any, Any], rows: Rows) -> dict[Any, Any]:
    """Put rows of `later` into `earlier`, in place."""
    for key, value in later.items():
        known = earlier.get(key)
        if isinstance(value, dict) and isinstance(known, dict):
            _put_rows(known, value, rows)
        elif isinstance(value, np.ndarray) and isinstance(known, np.ndarray) and known.shape == value.shape:
            known[rows] = value[rows]
        else:
            earlier[key] = value
    return earlier
