"""The observations that the steps of a rollout led to, of what it has collected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["next_observations"]

Bools = npt.NDArray[np.bool_]


def next_observations(
    obs: Any,
    last_obs: Any,
    taken: npt.NDArray[np.int64],
    ended: Bools | None,
    infos: Sequence[Mapping[str, Any]],
) -> Any:
    """Make the observations after each step, in new arrays.

    Args:
        obs: before each step: arrays `(steps, num_envs, …)`, in dicts and tuples.
        last_obs: of each slot after its last step.
        taken: for each slot how many steps there are results of; rows after these are zeros, or None.
        ended: bool `(steps, num_envs)`, steps that have ended an episode whose last observation is in `infos`. None:
            last observations are in `obs`, since a reset takes a step of its own.
        infos: by step.
    """
    following = _shifted(obs, last_obs, taken)
    if ended is None:
        return following
    for step in np.flatnonzero(ended.any(axis=1)).tolist():
        last = infos[step].get("final_obs")
        if last is not None:
            told = infos[step].get("_final_obs", ended[step])
            for slot in np.flatnonzero(ended[step] & told).tolist():
                _put(following, (step, slot), _of_slot(last, slot))
    return following


def _shifted(obs: Any, last_obs: Any, taken: npt.NDArray[np.int64]) -> Any:
    if isinstance(obs, dict):
        return {key: _shifted(part, last_obs[key], taken) for key, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_shifted(part, last, taken) for part, last in zip(obs, last_obs, strict=True))
    following = np.empty_like(obs)
    if len(obs):
        following[:-1] = obs[1:]
        following[-1] = None if obs.dtype.hasobject else 0
    rows = np.flatnonzero(taken)
    if obs.dtype.hasobject:
        for slot in rows.tolist():
            following[taken[slot] - 1, slot] = last_obs[slot]
    else:
        following[taken[rows] - 1, rows] = last_obs[rows]
    return following


def _of_slot(last: Any, slot: int) -> Any:
    """The last observation of one slot: of an array of them, or of a batch in a dict, as some vector envs give it."""
    return {key: _of_slot(part, slot) for key, part in last.items()} if isinstance(last, dict) else last[slot]


def _put(tree: Any, where: tuple[int, int], value: Any) -> None:
    if isinstance(tree, dict):
        for key, part in tree.items():
            _put(part, where, value[key])
    elif isinstance(tree, tuple):
        for part, item in zip(tree, value, strict=True):
            _put(part, where, item)
    elif tree.dtype.hasobject:
        tree[where] = value
    else:  # as many numbers in another shape are cast, where observations are
        tree[where] = np.reshape(value, tree.shape[2:])
