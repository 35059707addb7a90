"""What Gymnasium's AsyncVectorEnv makes of arguments, spaces, actions and errors, where the engine goes another way."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, logger, spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import create_shared_memory

from aioenv.errors import SlotError, WorkerStartError
from aioenv.process.launch import START_METHODS

__all__ = ["check_max_concurrency", "check_shareable", "fits", "original", "start_method"]


def original(error: SlotError | WorkerStartError) -> Exception:
    """The exception that was raised in the worker, with the traceback there; the error itself, if that did not come."""
    original = error.__cause__
    if not isinstance(original, Exception):
        return error
    original.add_note(f"in the env of slot {error.slots[0]}, in worker process {error.pid}:\n{error.traceback}")
    return original


def fits(space: Space[Any], batch: Any) -> bool:
    """Whether a batch is made of arrays of the very shapes and dtypes of its space; what is no array fits as it is."""
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return isinstance(batch, np.ndarray) and batch.dtype == space.dtype and batch.shape == space.shape
    if isinstance(space, spaces.Dict):
        return (
            isinstance(batch, dict)
            and batch.keys() == space.spaces.keys()
            and all(fits(child, batch[key]) for key, child in space.spaces.items())
        )
    if isinstance(space, spaces.Tuple):
        return (
            isinstance(batch, (tuple, list)) and len(batch) == len(space.spaces) and all(map(fits, space.spaces, batch))
        )
    return True


def check_max_concurrency(value: int | None) -> None:
    """Gymnasium's checks, and its words."""
    if value is None:
        return
    if not isinstance(value, (int, np.integer)):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(value)}.")
    if value < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {value}.")


def start_method(context: str | None) -> str | None:
    """The launch policy that stands for one of multiprocessing's start methods."""
    if context is None:
        return None
    if context not in ("fork", "forkserver", "spawn"):
        raise ValueError(f"cannot find context for {context!r}")
    start = "spawn" if context == "spawn" or "forkserver" not in START_METHODS else "forkserver"
    if context == "fork":
        logger.warn(
            'context="fork" is not used: a forked copy of a process with threads, an event loop or OpenGL contexts can '
            f"hang. Workers are started by {start!r}; they need no `if __name__ == '__main__'` guard."
        )
    return start


def check_shareable(space: Space[Any]) -> None:
    """Refuse what Gymnasium refuses with `shared_memory=True`, in its words.

    Raises:
        ValueError: if a space is of a kind that Gymnasium does not know, and nothing was registered for it.
        TypeError: if a space's elements have no fixed size.
    """
    create = create_shared_memory.dispatch(type(space))
    if create in (create_shared_memory.dispatch(object), create_shared_memory.dispatch(spaces.Graph)):
        try:
            create(space)  # which does nothing but raise
        except CustomSpaceError as exc:
            raise ValueError(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature with "
                "`shared_memory=False` however this is slower."
            ) from exc
    if isinstance(space, (spaces.Dict, spaces.Tuple, spaces.OneOf)):
        children = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for child in children:
            check_shareable(child)
