"""Envs in the place of others that were lost with their worker: resumed where those were, or begun anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from aioenv.ipc.messages import LostRow
from aioenv.state.wrapper_stack import REMEDY
from aioenv.stats.sharing import uncounted
from aioenv.worker.single.calls import EnvCalls
from aioenv.worker.single.rows import ResultRows

__all__ = ["Beyond", "EnvResume"]

# Of a row, what did not fit into its checkpoint before an operation, and after it.
Beyond: TypeAlias = "tuple[bytes | None, bytes | None]"


class EnvResume(EnvCalls):
    """What `EnvService` does in the place of a worker that died."""

    _rows: ResultRows
    _state: npt.NDArray[np.float64]

    def resume(
        self,
        rows: Sequence[int],
        before: npt.NDArray[np.float64],
        operations: Sequence[tuple[Any, ...] | None],
        after: npt.NDArray[np.float64],
        beyond: Sequence[Beyond] = (),
        states: npt.NDArray[np.float64] | None = None,
    ) -> list[str | None]:
        """Bring new envs to where others were: go to the state before their last operation, and replay it.

        Args:
            rows: whose.
            before: checkpoints before the operations, float64 of shape `(len(rows), checkpoint_size)`. Zeros before
                a reset mean that there was nothing.
            operations: `("step", action)`, an action as its env takes it, `("reset", seed, options)`, or
                `("set_state", state)`; None if there was no operation yet: then `after` is restored.
            after: checkpoints after the operations.
            beyond: for each row what did not fit into these two; empty if all did.
            states: what images of the rows were drawn from last, float64 `(len(rows), state_size)`.

        Returns:
            For each row None if it is where the other was, else what differs; such an env must be reset.
        """
        if self._checkpoints is None:
            raise ValueError("configure this service with a checkpoint_size first")
        outcomes: list[str | None] = []
        if states is not None:
            self._state[list(rows)] = states
        beyond = beyond or [(None, None)] * len(rows)
        for row, start, operation, end, rest in zip(rows, before, operations, after, beyond, strict=True):
            try:
                with uncounted():  # what statistics have seen, they have seen
                    outcomes.append(self._resume(row, start, operation, end, rest))
            except Exception as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
        return outcomes

    def _resume(
        self,
        row: int,
        before: npt.NDArray[np.float64],
        operation: Any,
        after: npt.NDArray[np.float64],
        beyond: Beyond,
    ) -> str | None:
        assert self._checkpoints is not None
        checkpoint = self._row_checkpoints[row]
        due = self._stepper.due
        match operation:
            case None:
                due[row] = checkpoint.restore(after, beyond[1])
            case ("set_state", state):
                self._set_state(row, state)
            case ("reset", seed, options):
                if np.array(before).view(np.uint64).any():  # as bits: small integers are subnormal floats
                    due[row] = checkpoint.restore(before, beyond[0])
                obs, _ = self._stepper.reset(row, seed, options)
                self._rows.keep(0, row, obs)
            case ("step", action):
                due[row] = checkpoint.restore(before, beyond[0])
                out = self._stepper.step([row], [action])
                self._rows.store(0, out)
                if out.failures:
                    exc = out.failures[0][1]
                    raised = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
                    return f"{raised}, when its last step was made again; if it remembers more than MuJoCo, {REMEDY}"
        if not checkpoint.replays:
            due[row] = checkpoint.restore(after, beyond[1])
        self._checkpoints.capture([row])
        return checkpoint.difference(self._checkpoints.array[row], after)

    def begin_anew(self, rows: Sequence[LostRow]) -> None:
        """Another process had these rows and died: say so in their next step, and reset them then as the mode wants."""
        for row, seed, obs, over, state in rows:
            if obs is not None:
                self._rows.keep(0, row, obs)  # a reset of other rows tells it once more
            if state is not None:
                self._state[row] = state  # and what images of it are drawn from
            self._stepper.begin_anew(row, seed, None if over else obs)

    def show_again(self, rows: Sequence[tuple[int, Any]]) -> None:
        """What rows of another process that must be reset observed last: a reset of other rows tells it once more."""
        for row, obs in rows:
            self._rows.keep(0, row, obs)
