"""What the hooks of somebody's own task give: refused where it does not fit, naming the hook and what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from aioenv.native.task import Task

__all__ = ["check_columns", "check_controls", "check_obs", "check_outcome", "check_start"]

Array = npt.NDArray[Any]


def check_start(task: Task, start: Any, count: int) -> tuple[Array, Array]:
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


def check_controls(task: Task, controls: Any, shape: tuple[int, ...]) -> Array:
    """The controls of all slots.

    Raises:
        TypeError, ValueError: if they are no array, or of another shape.
    """
    if not isinstance(controls, np.ndarray):
        raise TypeError(f"{_name(task)}.controls: expected an array of shape {shape}, got {_told(controls)}")
    if controls.shape != shape:
        raise ValueError(f"{_name(task)}.controls: expected shape {shape}, got {controls.shape}")
    return controls


def check_obs(task: Task, obs: Any, count: int) -> Array:
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


def check_outcome(task: Task, outcome: Any) -> tuple[Array, Array | None, dict[str, Array]]:
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


def check_columns(task: Task, hook: str, columns: Any, count: int) -> dict[str, Array]:
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


def _name(task: Task) -> str:
    return type(task).__name__


def _told(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if value is None or isinstance(value, (bool, int, float)) else type(value).__name__
