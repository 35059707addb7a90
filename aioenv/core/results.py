"""What a vector env gives back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.process.child import ProcessMemory, process_memory

__all__ = ["Ready", "ResetResult", "SlotStep", "StepResult", "WorkerInfo"]


class ResetResult(NamedTuple):
    """The outcome of a `reset`; unpacks as Gymnasium's.

    Attributes:
        obs: a batch of the batched observation space.
        info: arrays of shape `(num_envs,)` by key, with a bool mask under `_key`.
    """

    obs: Any
    info: dict[str, Any]


class StepResult(NamedTuple):
    """The outcome of a `step`; unpacks as Gymnasium's.

    Attributes:
        obs: a batch of the batched observation space.
        reward: float64, shape `(num_envs,)`.
        terminated: bool, shape `(num_envs,)`.
        truncated: bool, shape `(num_envs,)`.
        info: arrays of shape `(num_envs,)` by key, with a bool mask under `_key`.
    """

    obs: Any
    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    info: dict[str, Any]


class SlotStep(NamedTuple):
    """The outcome of `step_at`: of one env, no batch; unpacks as that of its `step`.

    Attributes:
        obs: an observation of the single observation space.
        reward: a float.
        terminated: a bool.
        truncated: a bool.
        info: the env's own dict.
    """

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Ready(NamedTuple):
    """Slots whose results are in; always in arrays that are the caller's.

    Attributes:
        slots: int64, shape `(k,)`, ascending.
        obs: a batch of k observations.
        reward: float64, shape `(k,)`; 0 after a reset.
        terminated: bool, shape `(k,)`.
        truncated: bool, shape `(k,)`.
        info: arrays of shape `(k,)` by key, with a bool mask under `_key`.
    """

    slots: npt.NDArray[np.int64]
    obs: Any
    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    info: dict[str, Any]


class WorkerInfo(NamedTuple):
    """What is known of one worker process.

    Attributes:
        pid: the process id; None before the start.
        state: "new", "starting", "ready", "busy", "draining" (busy, but nobody waits for the result any more),
            "restarting", "dead", "closing" or "closed".
        slots: the slots that it holds.
        cpus: the CPUs that it is pinned to (`cpu_affinity`); None if it is not.
    """

    pid: int | None
    state: str
    slots: tuple[int, ...]
    cpus: tuple[int, ...] | None = None

    @property
    def memory(self) -> ProcessMemory | None:
        """How much memory it holds, in bytes, looked up now; None if it is gone, or the platform does not tell.

        A worker takes some milliseconds, in which the loop waits. Where that matters, ask from a thread:
        `await asyncio.to_thread(lambda: [worker.memory for worker in envs.workers])`.
        """
        if self.pid is None or self.state in ("dead", "closed"):  # the number may be another process's by now
            return None
        return process_memory(self.pid)
