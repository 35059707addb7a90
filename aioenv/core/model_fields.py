"""Fields of the models of a vector env over workers: arrays that are shared with them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.errors import WireError, WorkerDied
from aioenv.ipc.frames import Kind
from aioenv.ipc.memory import Shared
from aioenv.ipc.messages import CallRequest, dump, load
from aioenv.state.model_edits import FieldPlace

if TYPE_CHECKING:
    from aioenv.process.supervisor import Worker

__all__ = ["ModelFields"]

Array = npt.NDArray[Any]


class ModelFields:
    """Fields that lie in memory which the workers of a native vector env take them from.

    Args:
        defaults: of each worker, what its model says of its fields, pickled; None if its env has none.
        workers: these, in the order of slots.

    The memory is made with the first field. Workers open it as a descriptor of this process, and are told of a field
    by a call that nobody waits for: requests are answered in turn, so the next step is one with the field.
    """

    def __init__(self, defaults: Sequence[bytes | None], workers: Sequence[Worker]) -> None:
        self._pickled = defaults
        self._defaults: list[dict[str, Array]] = []  # as soon as a field is wanted
        self._workers = workers
        self._memory: Shared | None = None
        self._arrays: dict[str, tuple[Array, FieldPlace]] = {}

    def field(self, name: str) -> Array:
        """The live array of a field, `(num_envs, ...)`.

        Raises:
            ValueError: if there is no such field, or it can't be shared.
        """
        if name not in self._arrays:
            self._arrays[name] = self._make(self._read_defaults(name))
            for worker in self._workers:
                self._tell(worker, name)
        return self._arrays[name][0]

    def _read_defaults(self, name: str) -> list[Array]:
        if not self._defaults:
            if None in self._pickled:
                raise ValueError("model_field: the vector env is no NativeMujocoEnv")
            self._defaults = [load(data) for data in self._pickled if data is not None]
        values = []
        for worker, defaults in zip(self._workers, self._defaults, strict=True):
            if name not in defaults:
                raise ValueError(
                    f"model_field: {name!r} is no field of MjModel that can differ between simulations, or the env has "
                    "taken it itself"
                )
            values += [defaults[name]] * len(worker.slots)
        if len({(value.shape, value.dtype) for value in values}) > 1:
            raise ValueError(f"model_field: {name!r} has not the same shape in all workers")
        return values

    def _make(self, values: list[Array]) -> tuple[Array, FieldPlace]:
        if self._memory is None:
            self._memory = Shared.create() if os.path.exists("/proc/self/fd") else None
            if self._memory is None:
                raise ValueError(
                    "model_field: this platform has no memory without a name to share; leave out num_workers="
                )
        shape = (len(values), *values[0].shape)
        page = mmap.ALLOCATIONGRANULARITY
        count = int(np.prod(shape))
        size = max(1, -(-count * values[0].itemsize // page)) * page
        offset, memory = self._memory.extend(size)
        array = np.frombuffer(memory, values[0].dtype, count).reshape(shape)
        array[...] = values
        path = f"/proc/{os.getpid()}/fd/{self._memory.fd}"
        return array, FieldPlace(path, offset, size, shape, values[0].dtype.str)

    def _tell(self, worker: Worker, name: str) -> None:
        call = CallRequest("share_model_field", (name, self._arrays[name][1]), {})
        with suppress(WorkerDied, WireError):  # it is being started again, and will be told then
            worker.submit(Kind.CALL, (), dump(call, worker.definitions), on_reply=lambda _: None)

    async def restore(self, worker: Worker) -> None:
        """Tell a new process what the one before it was told.

        Raises:
            WorkerDied, EnvError: if it ends, or fails.
        """
        for name, (_, place) in list(self._arrays.items()):
            await worker.call("share_model_field", name, place)

    def close(self) -> None:
        """Let go of the memory; it lives as long as anybody has an array of it."""
        self._arrays = {}
        if self._memory is not None:
            self._memory.close()
            self._memory = None
