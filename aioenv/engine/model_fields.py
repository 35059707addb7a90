"""Fields of the models of a vector env in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.errors import PendingCallError

if TYPE_CHECKING:
    from aioenv.engine.inline import Solo

__all__ = ["model_field"]


def model_field(solo: Solo | None, name: str) -> npt.NDArray[Any]:
    """The live array of a field of the model, `(num_envs, ...)` (see `NativeMujocoEnv.model_field`).

    Raises:
        ValueError: if the vector env is not in this process, or has no models of its slots.
        PendingCallError: if it is doing something.
    """
    if solo is None:
        raise ValueError("model_field: an array can't be live across processes; leave out num_workers=")
    solo.table.check_call(np.arange(solo.num_envs), "model_field")
    if solo._thread is not None and solo._thread.jobs:  # a step that nobody waits for any more
        raise PendingCallError(
            "model_field: the vector env is still busy with a step that was cancelled", "model_field"
        )
    find = getattr(solo._env.unwrapped, "model_field", None)
    if find is None:
        raise ValueError(f"model_field: {type(solo._env.unwrapped).__name__} is no NativeMujocoEnv")
    array: npt.NDArray[Any] = find(name)
    return array
