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
    "full_infos",
    "merge_reset_infos",
    "owned",
    "remove_rows",
]

Array = npt.NDArray[Any]


def check_start(task: NativeMujocoEnv, start: Any, count: int) -> tuple[Array, Array]:
    """Return positions and velocities of `count` new episodes, checked.

    Raises:
        TypeError, ValueError: if they are not a pair, or have another shape.
    """
    if not isinstance(start, (tuple, list)) or len(start) != 2:
        raise TypeError(f"{_name(task)}.draw_start: expected (qpos, qvel), got {_describe(start)}")
    model = task.pool.model
    expected = (("qpos", (count, model.nq)), ("qvel", (count, model.nv)))
    for value, (name, shape) in zip(start, expected, strict=True):
        if np.shape(value) != shape:
            raise ValueError(f"{_name(task)}.draw_start: expected {name} of shape {shape}, got {_describe(value)}")
    return start[0], start[1]


def check_controls(task: NativeMujocoEnv, controls: Any, shape: tuple[int, ...]) -> Array:
    """Return the controls of all slots, checked.

    Raises:
        TypeError, ValueError: if they are no array, or of another shape.
    """
    if not isinstance(controls, np.ndarray):
        raise TypeError(f"{_name(task)}.controls: expected an array of shape {shape}, got {_describe(controls)}")
    if controls.shape != shape:
        raise ValueError(f"{_name(task)}.controls: expected shape {shape}, got {controls.shape}")
    return controls


def check_obs(task: NativeMujocoEnv, obs: Any, count: int) -> Array:
    """Return observations of `count` slots, checked, in the dtype of the space.

    Raises:
        TypeError, ValueError: if they are no array, or of another shape.
    """
    space = getattr(task, "single_observation_space", None)
    if space is None:
        raise ValueError(f"{_name(task)}: call set_observation_size (or set_observation_space) in __init__")
    shape = (count, *space.shape)
    if not isinstance(obs, np.ndarray):
        raise TypeError(f"{_name(task)}.observe: expected an array of shape {shape}, got {_describe(obs)}")
    if obs.shape != shape:
        raise ValueError(f"{_name(task)}.observe: expected shape {shape} for these slots, got {obs.shape}")
    return obs if obs.dtype == space.dtype else obs.astype(space.dtype)


def check_outcome(task: NativeMujocoEnv, outcome: Any) -> tuple[Array, Array | None, dict[str, Array]]:
    """Return rewards, terminations and columns of all slots, checked and copied.

    A task may keep its arrays (in `remember`, say) and write to them when episodes begin; we write to the copies.

    Raises:
        TypeError, ValueError: if they have another type or shape.
    """
    name, n = f"{_name(task)}.outcome", task.num_envs
    if not isinstance(outcome, tuple) or len(outcome) != 3:
        raise TypeError(f"{name}: expected (rewards, terminations or None, columns of infos), got {_describe(outcome)}")
    reward, terminated, columns = outcome
    if not isinstance(reward, np.ndarray) or reward.shape != (n,) or reward.dtype.kind not in "biuf":
        raise ValueError(f"{name}: expected rewards as an array of {n} numbers, got {_describe(reward)}")
    if terminated is not None and (
        not isinstance(terminated, np.ndarray) or terminated.shape != (n,) or terminated.dtype != np.bool_
    ):
        raise ValueError(f"{name}: expected terminations as bool of shape ({n},), or None, got {_describe(terminated)}")
    columns = {key: column.copy() for key, column in check_columns(task, "outcome", columns, n).items()}
    return reward.copy(), None if terminated is None else terminated.copy(), columns


def check_columns(task: NativeMujocoEnv, hook: str, columns: Any, count: int) -> dict[str, Array]:
    """Return columns of infos, checked to have a row for each of `count` slots.

    Raises:
        TypeError, ValueError: if they are no dict of arrays, or one has another number of rows.
    """
    if not isinstance(columns, dict):
        raise TypeError(f"{_name(task)}.{hook}: expected a dict of columns of infos, got {_describe(columns)}")
    for key, column in columns.items():
        if not isinstance(key, str):
            raise TypeError(f"{_name(task)}.{hook}: expected strings as keys of infos, got {key!r}")
        if not isinstance(column, np.ndarray) or column.shape[:1] != (count,):
            expected = f"expected an array with a row for each of {count} slots"
            raise ValueError(f"{_name(task)}.{hook}: info {key!r}: {expected}, got {_describe(column)}")
    return columns


def _name(task: NativeMujocoEnv) -> str:
    return type(task).__name__


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else type(value).__name__


Info = dict[str, Any]


def owned(array: Array) -> Array:
    """Return the array if it owns its memory, else a copy: live arrays of simulations are views."""
    return array if array.base is None else array.copy()


def full_infos(columns: dict[str, Array], ones: npt.NDArray[np.bool_]) -> Info:
    """Make the infos of slots that all have all of these columns."""
    info: Info = {}
    for key, column in columns.items():
        info[key] = owned(column)
        info[f"_{key}"] = ones.copy()
    return info


def merge_reset_infos(
    columns: dict[str, Array], started: dict[str, Array], starts: npt.NDArray[np.int64], num_envs: int, first: int = 0
) -> Info:
    """Merge the infos of a step in which some slots have begun an episode.

    Args:
        columns: those of the step, one row a slot; rows of `starts` are not used. Its arrays become part of the infos.
        started: those of the resets, one row for each of `starts`.
        starts: slots that have begun an episode, ascending.
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
            column = owned(given)
            if key in started:
                rows = started[key]
                if first_has_begun and rows.dtype != column.dtype:  # the first slot decides the dtype
                    column = column.astype(rows.dtype)
                column[starts] = rows
                mask = np.ones(num_envs, np.bool_)
            else:
                column[starts] = _empty_value(column)
                mask = others.copy()
            info[key], info[f"_{key}"] = column, mask
    for key, rows in started.items():
        if key not in info:
            info[key], info[f"_{key}"] = scatter_rows(rows, starts, num_envs), begun.copy()
    return info


def remove_rows(info: Info, skipped: npt.NDArray[np.bool_]) -> Info:
    """Remove the rows of a mask from infos: those of slots that were not stepped."""
    for key in [key for key in info if f"_{key}" in info]:
        column, mask = info[key], info[f"_{key}"]
        mask &= ~skipped
        if not mask.any():
            del info[key], info[f"_{key}"]
        elif isinstance(column, np.ndarray):
            column[skipped] = _empty_value(column)
    return info


def scatter_rows(rows: Array, slots: npt.NDArray[np.int64], num_envs: int) -> Array:
    """Make a column with some rows set, the others zero."""
    column = np.zeros((num_envs, *rows.shape[1:]), rows.dtype)
    if rows.dtype.hasobject:
        column[...] = None
    column[slots] = rows
    return column


def _empty_value(column: Array) -> Any:
    """Return the value of a column in a slot without the key: zero, an empty text, None."""
    return None if column.dtype.hasobject else np.zeros((), column.dtype)


def final_info(obs: Array, columns: dict[str, Array], ended: npt.NDArray[np.int64], num_envs: int) -> Info:
    """Make the `final_obs` and `final_info` of episodes that ended in a step under SAME_STEP."""
    final_obs = np.full(num_envs, None, object)
    for slot in ended.tolist():
        final_obs[slot] = obs[slot].copy()
    mask = np.zeros(num_envs, np.bool_)
    mask[ended] = True
    inner: Info = {}
    for key, column in columns.items():
        inner[key], inner[f"_{key}"] = scatter_rows(column[ended], ended, num_envs), mask.copy()
    return {"final_obs": final_obs, "_final_obs": mask, "final_info": inner, "_final_info": mask.copy()}
