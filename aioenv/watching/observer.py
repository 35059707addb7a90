"""`SlotObserver`: keeps the newest state of each slot that is watched, and the returns of its episodes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

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
Rows: TypeAlias = "Slots | slice"

# The mean return is that of so many episodes.
_RECENT = 100


class SlotObserver:
    """Notes results as they arrive (see `ResultObserver`), in a few microseconds for each reply.

    Args:
        slots: the slots that are watched, ascending.
        num_envs: the number of all slots.
        state_size: float64 numbers of a state; 0 if there are none.
        mode: the autoreset mode.
        whole: whether no slot has been stepped yet, so that all of the current episodes are seen.
        restarts: whether workers are restarted; else an info "restarted" is the env's own.

    Attributes:
        states: float64 `(k, state_size)`, the newest state of each slot.
        known: bool `(k,)`: whether a slot had a result.
        whole: bool `(k,)`: whether the current episode was seen from its beginning; only such episodes count.
        returns, lengths: of the current episodes.
        last_returns: of the ones before; NaN if there is none that counts.
        recent: the returns of the last 100 episodes that have ended.
        episodes: how many have ended.
        version: changes with each result.
    """

    def __init__(
        self,
        slots: Slots,
        num_envs: int,
        state_size: int,
        mode: AutoresetMode,
        *,
        whole: bool = False,
        restarts: bool = False,
    ) -> None:
        k = len(slots)
        self._row = np.full(num_envs, -1)
        self._row[slots] = np.arange(k)
        self._last = int(slots[-1])
        self._mode = mode
        self._restarts = restarts
        self._pending_reset = np.zeros(k, np.bool_)  # whether the next step resets instead
        self._any_pending = False
        self._plans: dict[tuple[int, int], tuple[Rows, Rows]] = {}  # by the first slot and that after the last
        self.states = np.zeros((k, state_size))
        self.known = np.zeros(k, np.bool_)
        self.whole = np.full(k, whole)
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
        rows, places = self._plan(slots)
        for error in part.errors:
            rows, places = self._without(rows, places, np.isin(slots, error.slots))
        lost: npt.NDArray[np.bool_] | None = None
        for columns in part.columns:
            if columns.schema is NO_RESULT:
                held = np.zeros(len(slots), np.bool_)
                held[rows_of(columns, part)] = True
                rows, places = self._without(rows, places, held)
            elif self._restarts and any(column.path == ("restarted",) for column in columns.schema.columns):
                lost = np.zeros(len(slots), np.bool_) if lost is None else lost
                lost[rows_of(columns, part)] = True
        batch, start, stop = request.batch, part.start, part.stop
        if self.states.shape[1]:
            self._keep(rows, batch.state[start:stop][places])
        if request.stepped:
            over = batch.terminated[start:stop] | batch.truncated[start:stop]
            self._step(rows, batch.reward[start:stop][places], over[places], None if lost is None else lost[places])
        elif part.sent is not None:
            begun = self._row[part.sent.slots]
            self._begin(begun[begun >= 0])
        if part.exhausted:  # their next step resets instead
            waiting = self._row[list(part.exhausted)]
            self._pending_reset[waiting[waiting >= 0]] = self._any_pending = True

    def _plan(self, slots: Slots) -> tuple[Rows, Rows]:
        """Return the rows of the slots among these that are watched, and their places there: slices if possible."""
        first, stop = int(slots[0]), int(slots[-1]) + 1
        if stop - first != len(slots):
            rows = self._row[slots]
            places = np.flatnonzero(rows >= 0)
            return rows[places], places
        plan = self._plans.get((first, stop))
        if plan is None:
            rows = self._row[first:stop]
            places = np.flatnonzero(rows >= 0)
            plan = _as_slice(rows[places]), _as_slice(places)
            self._plans[first, stop] = plan
        return plan

    def _without(self, rows: Rows, places: Rows, left_out: npt.NDArray[np.bool_]) -> tuple[Slots, Slots]:
        """Return rows and places without those that are left out."""
        some = np.arange(len(left_out))[places]
        keep = ~left_out[some]
        return np.arange(len(self.known))[rows][keep], some[keep]

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

    def note_state(self, slot: int, *, awaits_reset: bool) -> None:
        """Note that a slot was put into a state (see `ResultObserver`): its episode did not begin there."""
        if (row := int(self._row[slot])) >= 0:
            self.version += 1
            self.whole[row] = False
            self._pending_reset[row] = awaits_reset
            self._any_pending = bool(self._pending_reset.any())

    def _keep(self, rows: Rows, states: npt.NDArray[np.float64]) -> None:
        self.states[rows, : states.shape[1]] = states
        self.known[rows] = True

    def _begin(self, rows: Rows) -> None:
        self.version += 1
        self.returns[rows] = 0
        self.lengths[rows] = 0
        self.whole[rows] = True
        self._pending_reset[rows] = False

    def _step(
        self,
        rows: Rows,
        rewards: npt.NDArray[np.float64],
        over: npt.NDArray[np.bool_],
        lost: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self.version += 1
        stepped = rows
        if self._any_pending:
            pending = self._pending_reset[rows].copy()  # `rows` may be a slice
            if pending.any():  # this step was a reset
                numbers = np.arange(len(self.known))[rows]
                self._begin(numbers[pending])
                self._any_pending = bool(self._pending_reset.any())
                stepped, rewards = numbers[~pending], rewards[~pending]
        self.returns[stepped] += rewards
        self.lengths[stepped] += 1
        if not over.any():
            return
        ended = np.arange(len(self.known))[rows][over]
        counts = self.whole[ended]
        if lost is not None:  # with its process
            counts &= ~lost[over]
        returns = np.where(counts, self.returns[ended], np.nan)
        self.last_returns[ended] = returns
        self.recent.extend(returns[counts].tolist())
        self.episodes += int(counts.sum())
        if self._mode is AutoresetMode.SAME_STEP:
            self._begin(ended)
        elif self._mode is AutoresetMode.NEXT_STEP:
            self._pending_reset[ended] = self._any_pending = True


def _as_slice(numbers: Slots) -> Rows:
    """Return ascending numbers as a slice if they are successive: numpy then makes views, not copies."""
    n = len(numbers)
    if n and numbers[-1] - numbers[0] + 1 == n:
        return slice(int(numbers[0]), int(numbers[0]) + n)
    return numbers
