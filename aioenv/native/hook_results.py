"""Results of a task's hooks: check them, and merge their columns into info dicts as `SyncVectorEnv` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from aioenv.native.mujoco_env import NativeMujocoEnv

__all__ = [
    "check_columns",
    "check_controls",
    "check_obs",
    "check_outcome",
    "check_start",
    "final_info",
    "leave_out",
    "merge_reset_infos",
    "own",
    "whole",
]

Array = npt.NDArray[Any]


def check_start(task: NativeMujocoEnv, start: Any, count: int) -> tuple[Array, Array]:
    """Positions and velocities of `count` new episodes.

    Raises:
        TypeError, ValueError: if they are none, or of another shape.
    """
    if not isinstance(start, (tuple, list)) or len(start) != 2:
        raise TypeError(f"{_name(task)}.draw_start: expected (qpos, qvel), got {_told(start)}")
    model = task.pool.model
    expected = (("qpos", (count, model.nq)), ("qvel", (count, model.nv)))
    for value, (name, shape) in zip(start, expected, strict=True):
        if np.shape(value) != shape:
            raise ValueError(f"{_name(task)}.draw_start: expected {name} of shape {shape}, got {_told(value)}")
    return start[0], start[1]


def check_controls(task: NativeMujocoEnv, controls: Any, shape: tuple[int, ...]) -> Array:
    """The controls of all slots.

    Raises:
        TypeError, ValueError: if they are no array, or of another shape.
    """
    if not isinstance(controls, np.ndarray):
        raise TypeError(f"{_name(task)}.controls: expected an array of shape {shape}, got {_told(controls)}")
    if controls.shape != shape:
        raise ValueError(f"{_name(task)}.controls: expected shape {shape}, got {controls.shape}")
    return controls


def check_obs(task: NativeMujocoEnv, obs: Any, count: int) -> Array:
    """Observations of `count` slots, in the dtype of the space.

    Raises:
        TypeError, ValueError: if they are no array, or of another shape.
    """
    space = getattr(task, "single_observation_space", None)
    if space is None:
        raise ValueError(f"{_name(task)}: call set_observation_size (or set_observation_space) in __init__")
    shape = (count, *space.shape)
    if not isinstance(obs, np.ndarray):
        raise TypeError(f"{_name(task)}.observe: expected an array of shape {shape}, got {_told(obs)}")
    if obs.shape != shape:
        raise ValueError(f"{_name(task)}.observe: expected shape {shape} for these slots, got {obs.shape}")
    return obs if obs.dtype == space.dtype else obs.astype(space.dtype)


def check_outcome(task: NativeMujocoEnv, outcome: Any) -> tuple[Array, Array | None, dict[str, Array]]:
    """Rewards, terminations and columns of all slots: copies, since a task may keep what it gives (in `remember`ed
    arrays, say), which are written to later: by the task when episodes begin, by us for slots that were not stepped.

    Raises:
        TypeError, ValueError: if it is something else, or of another shape.
    """
    name, n = f"{_name(task)}.outcome", task.num_envs
    if not isinstance(outcome, tuple) or len(outcome) != 3:
        raise TypeError(f"{name}: expected (rewards, terminations or None, columns of infos), got {_told(outcome)}")
    reward, terminated, columns = outcome
    if not isinstance(reward, np.ndarray) or reward.shape != (n,) or reward.dtype.kind not in "biuf":
        raise ValueError(f"{name}: expected rewards as an array of {n} numbers, got {_told(reward)}")
    if terminated is not None and (
        not isinstance(terminated, np.ndarray) or terminated.shape != (n,) or terminated.dtype != np.bool_
    ):
        raise ValueError(f"{name}: expected terminations as bool of shape ({n},), or None, got {_told(terminated)}")
    columns = {key: column.copy() for key, column in check_columns(task, "outcome", columns, n).items()}
    return reward.copy(), None if terminated is None else terminated.copy(), columns


def check_columns(task: NativeMujocoEnv, hook: str, columns: Any, count: int) -> dict[str, Array]:
    """Columns of infos with a row for each of `count` slots.

    Raises:
        TypeError, ValueError: if they are no dict of arrays, or one has another number of rows.
    """
    if not isinstance(columns, dict):
        raise TypeError(f"{_name(task)}.{hook}: expected a dict of columns of infos, got {_told(columns)}")
    for key, column in columns.items():
        if not isinstance(key, str):
            raise TypeError(f"{_name(task)}.{hook}: expected strings as keys of infos, got {key!r}")
        if not isinstance(column, np.ndarray) or column.shape[:1] != (count,):
            expected = f"expected an array with a row for each of {count} slots"
            raise ValueError(f"{_name(task)}.{hook}: info {key!r}: {expected}, got {_told(column)}")
    return columns


def _name(task: NativeMujocoEnv) -> str:
    return type(task).__name__


def _told(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else type(value).__name__


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


def merge_reset_infos(
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
