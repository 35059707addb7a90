"""Fields of MuJoCo's models that a native vector env shares with its parent, where they are written."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv

from aioenv.ipc.memory import map_shared
from aioenv.ipc.messages import dump

__all__ = ["FieldPlace", "SharedFields", "unchanged_fields"]


class FieldPlace(NamedTuple):
    """Where the values of a field lie, `shape` with all slots first.

    Attributes:
        path: of the memory, as a descriptor of the parent's.
        offset, size: of the part that is mapped, in bytes.
    """

    path: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str


class SharedFields:
    """The fields of one worker's vector env.

    Args:
        env: the vector env, with its wrappers.
        num_envs: how many slots it has.
        start: the number of the first of them among all workers' slots.

    Attributes:
        error: why a field is not live, for the next step to say: nobody waits for `share`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], num_envs: int, start: int) -> None:
        self._pool: Any = getattr(env.unwrapped, "pool", None)
        self._slots = slice(start, start + num_envs)
        self._shared: set[str] = set()
        self.error: Exception | None = None

    def share(self, name: str, place: FieldPlace) -> None:
        """From now on a field is what its parent writes; sharing it again does nothing.

        Args:
            name: of the field.
            place: where its values lie.
        """
        if name in self._shared:
            return
        try:
            assert self._pool is not None
            fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = map_shared(fd, place.size, place.offset)
            finally:
                os.close(fd)
            array = np.frombuffer(memory, place.dtype, int(np.prod(place.shape))).reshape(place.shape)
            self._pool.share_model_field(name, array[self._slots])
        except Exception as exc:
            self.error = exc
            raise
        self._shared.add(name)


def unchanged_fields(env: VectorEnv[Any, Any, Any]) -> bytes | None:
    """What the model says of the fields that can be shared; None if the env is no `NativeMujocoEnv`.

    It is a pickle of a dict of arrays, since few ask for it.
    """
    pool: Any = getattr(env.unwrapped, "pool", None)
    return dump(pool.unchanged_fields()) if hasattr(pool, "unchanged_fields") else None
