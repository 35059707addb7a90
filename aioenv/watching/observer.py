"""`SlotObserver`: keeps the newest state of each slot that is watched, and the returns of its episodes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from aioenv.core.episode_tracker import rows_of
from aioenv.core.results import ResetResult, StepResult
from aioenv.spaces.infos import NO_RESULT

if TYPE_CHECKING:
    from aioenv.core.requests import BatchRequest, WorkerRequest

__all__ = ["SlotObserver"]

Slots = npt.NDArray[np.int64]

# The mean return is that of so many episodes.
_RECENT = 100


class SlotObserver:
    """Notes results as they arrive (see `ResultObserver`), in a few microseconds for each reply.

    Args:
        slots: the slots that are watched, ascending.
        num_envs: the number of all slots.
        state_size: float64 numbers of a state; 0 if there are none.
        mode: the autoreset mode.

    Attributes:
        states: float64 `(k, state_size)`, the newest state of each slot.
        known: bool `(k,)`: whether a slot had a result.
        returns, lengths: of the current episodes.
        last_returns: of the ones before; NaN if there is none.
        recent: the returns of the last 100 episodes that have ended.
        episodes: how many have ended.
        version: changes with each result.
    """

    def __init__(self, slots: Slots, num_envs: int, state_size: int, mode: AutoresetMode) -> None:
        k = len(slots)
        self._row = np.full(num_envs, -1)
        self._row[slots] = np.arange(k)
        self._last = int(slots[-1])
        self._mode = mode
        self._pending_reset = np.zeros(k, np.bool_)  # whether the next step resets instead
        self.states = np.zeros((k, state_size))
        self.known = np.zeros(k, np.bool_)
        self.returns, self.lengths = np.zeros(k), np.zeros(k, np.int64)
        self.last_returns = np.full(k, np.nan)
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.episodes = 0
        self.version = 0

    def note_reply(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Note a worker's reply (see `ResultObserver`)."""
        slots = part.slots
        if not len(slots) or slots[0] > self._last:  # a slot's own worker, of which most are not watched
            return
        rows = self._row[slots]
        mine = rows >= 0
        for error in part.errors:
            mine &= ~np.isin(slots, error.slots)
        for columns in part.columns:
            if columns.schema is NO_RESULT:
                mine[rows_of(columns, part)] = False
        index = np.flatnonzero(mine)
        rows, batch, start = rows[index], request.batch, part.start
        if self.states.shape[1]:
            self._keep(rows, batch.state[start : part.stop][index])
        if request.stepped:
            over = batch.terminated[start : part.stop] | batch.truncated[start : part.stop]
            self._step(rows, batch.reward[start : part.stop][index], over[index])
        elif part.sent is not None:
            begun = self._row[part.sent.slots]
            self._begin(begun[begun >= 0])

    def note_result(
        self, slots: Slots, resets: Slots | None, value: Any, states: npt.NDArray[np.float64] | None
    ) -> None:
        """Note a result of a vector env in this process (see `ResultObserver`)."""
        rows = self._row[slots]
        index = np.flatnonzero(rows >= 0)
        rows = rows[index]
        if states is not None and self.states.shape[1]:
            self._keep(rows, states[index])
        if isinstance(value, StepResult):
            asked = slots[index]
            self._step(rows, value.reward[asked], value.terminated[asked] | value.truncated[asked])
        elif isinstance(value, ResetResult) and resets is not None:
            begun = self._row[resets]
            self._begin(begun[begun >= 0])

    def _keep(self, rows: Slots, states: npt.NDArray[np.float64]) -> None:
        self.states[rows, : states.shape[1]] = states
        self.known[rows] = True

    def _begin(self, rows: Slots) -> None:
        self.returns[rows] = 0
        self.lengths[rows] = 0
        self._pending_reset[rows] = False
        self.version += 1

    def _step(self, rows: Slots, rewards: npt.NDArray[np.float64], over: npt.NDArray[np.bool_]) -> None:
        self.version += 1
        pending = self._pending_reset[rows]
        if pending.any():  # this step was a reset
            self._begin(rows[pending])
            rows, rewards, over = rows[~pending], rewards[~pending], over[~pending]
        self.returns[rows] += rewards
        self.lengths[rows] += 1
        if not over.any():
            return
        ended = rows[over]
        self.last_returns[ended] = self.returns[ended]
        self.recent.extend(self.returns[ended].tolist())
        self.episodes += len(ended)
        if self._mode is AutoresetMode.SAME_STEP:
            self._begin(ended)
        else:
            self._pending_reset[ended] = self._mode is AutoresetMode.NEXT_STEP
