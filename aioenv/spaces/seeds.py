"""Seeds and reset masks, as Gymnasium's vector envs take them, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "check_options",
    "checked_seed",
    "is_listed",
    "listed_seeds",
    "one_seed",
    "split_reset_options",
    "spread_seeds",
]


def spread_seeds(
    seed: int | Sequence[int | None] | None, slots: npt.NDArray[np.int64], num_envs: int
) -> list[int | None]:
    """One seed for each of `slots`: `seed + slot` for an int, the elements of a list, or None.

    Raises:
        ValueError: if a list has another length than there are slots.
        TypeError: if it is none of these, or an element is no int.
    """
    checked = checked_seed(seed, len(slots), num_envs)
    if checked is None:
        return [None] * len(slots)
    return checked if isinstance(checked, list) else [checked + slot for slot in slots.tolist()]


def is_listed(seed: Any) -> bool:
    """Whether this is a seed for each slot, rather than one for all of them, or None."""
    return seed is not None and not isinstance(seed, (int, np.integer))


def checked_seed(seed: Any, n: int, num_envs: int) -> int | list[int | None] | None:
    """A seed of n of all slots: an int, a list of one for each (None: no seed), or None for none at all.

    Raises:
        ValueError, TypeError: as `spread_seeds`.
    """
    if not is_listed(seed):
        return None if seed is None else int(seed)
    seeds = listed_seeds(seed)
    if len(seeds) != n:
        what = f"num_envs={num_envs}" if n == num_envs else f"the number of slots, {n},"
        raise ValueError(f"If seeds are passed as a list the length must match {what} but got length={len(seeds)}.")
    return seeds


def listed_seeds(seed: Any) -> list[int | None]:
    """The elements of a sequence of seeds.

    Raises:
        TypeError: if it is none, or an element is no int.
    """
    try:
        if isinstance(seed, (str, Set, Mapping)):  # of which the last two have no order, or no seeds
            raise TypeError("no sequence")
        if isinstance(seed, list) and set(map(type, seed)) == {int}:  # of which there may be millions
            return [*seed]
        return [None if s is None else index(s) for s in seed]
    except TypeError:
        raise TypeError(f"seed: expected an int, a sequence of ints or None, got {seed!r}") from None


def one_seed(seed: Any) -> int | None:
    """The seed of one slot, as an int.

    Raises:
        TypeError: if it is neither an int nor None.
    """
    try:
        return None if seed is None else index(seed)
    except TypeError:
        raise TypeError(f"seed: expected an int or None, got {seed!r}") from None


def check_options(options: Any) -> None:
    """Raise a TypeError unless reset options are a dict or None."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options: expected a dict or None, got {options!r}")


def split_reset_options(
    options: dict[str, Any] | None, num_envs: int
) -> tuple[npt.NDArray[np.bool_] | None, dict[str, Any] | None]:
    """Take Gymnasium's `reset_mask` out of reset options; the caller's dict stays as it is.

    Raises:
        TypeError: if the options are no dict, or the mask is not a numpy array of bool.
        ValueError: if its shape is not `(num_envs,)`, or nothing in it is True.
    """
    check_options(options)
    if options is None or "reset_mask" not in options:
        return None, options
    mask = options["reset_mask"]
    name = "`options['reset_mask']`"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{name} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(f"{name} must contain a boolean array with at least one True value, got reset_mask={mask}")
    return mask, {key: value for key, value in options.items() if key != "reset_mask"}
