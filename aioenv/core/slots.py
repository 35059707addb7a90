"""The state of every slot, and which calls are refused in it.

    IDLE ──send──▶ IN_FLIGHT ──reply──▶ READY ──recv──▶ IDLE
      ▲               │
      └──step, reset──┘

The results of `step` and `reset` are handed out at once, without the state READY. A slot whose worker has died for good
is DEAD, whatever its state was. FAILED is a mark of its own, beside the state: it is reported of an idle slot whose env
has raised. With autoreset disabled, a slot whose episode has ended may have to be reset. Both last until a reset of the
slot is sent.

A slot may be paused in any state: it keeps its state, and is left out of whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.errors import EnvError, PausedError, PendingCallError, ResetNeededError, SlotError, WorkerDied

__all__ = ["SlotState", "SlotTable"]

Slots = npt.NDArray[np.int64]


class SlotState(IntEnum):
    """The state of a slot."""

    IDLE = 0
    IN_FLIGHT = 1
    READY = 2
    FAILED = 3
    DEAD = 4


class SlotTable:
    """The states of all slots, and the errors of those that can't be stepped.

    Args:
        num_envs: the number of slots.
        must_reset: whether a slot whose episode has ended must be reset before it is stepped (autoreset disabled).

    Attributes:
        must_reset: as given.
        can_go_on: tells whether a slot whose worker has died has another one, so that a reset is enough; None: never.
        paused: bool `(num_envs,)`, which slots are paused, a new array after each change; None if none is.
        exhausted: the slots that were paused because their envs have no further episode.
        steps: the number of steps of single slots that were sent.
        resets: the number of times that slots were reset, or put into states.
        resumes: the number of times that slots were resumed; then the known observations of paused slots are out of
            date.
    """

    def __init__(self, num_envs: int, *, must_reset: bool) -> None:
        self._states = np.zeros(num_envs, np.uint8)
        self.must_reset = must_reset
        self._ended = np.zeros(num_envs, np.bool_)
        self._failed = np.zeros(num_envs, np.bool_)
        self.can_go_on: Callable[[int], bool] | None = None
        self._any_failed = False
        self._errors: dict[int, SlotError] = {}
        self._any_dead = False
        # the slots whose observation is not known: they were never reset, or were put into a state
        self._unseen = np.ones(num_envs, np.bool_)
        self._any_unseen = True
        # the slots that were put into a state while they were READY: that result does not count any more
        self._overtaken: set[int] = set()
        self.paused: npt.NDArray[np.bool_] | None = None
        self.exhausted: set[int] = set()
        self.steps = self.resets = self.resumes = 0

    def state(self, slot: int) -> SlotState:
        """Return the state of one slot."""
        state = SlotState(int(self._states[slot]))
        return SlotState.FAILED if state is SlotState.IDLE and self._failed[slot] else state

    def count(self, state: SlotState) -> int:
        """Return the number of slots in a state."""
        # three times as fast as numpy's count
        return self._states.tobytes().count(int(state))

    def in_flight(self, slots: slice) -> bool:
        """Return whether any of these slots is in flight."""
        return bool((self._states[slots] == SlotState.IN_FLIGHT).any())

    def check_send(self, slots: Slots | slice, name: str, *, reset: bool) -> None:
        """Raise if any slot can't accept a request.

        Raises:
            PendingCallError: if one has a request in flight, or a result that was not taken.
            EnvError: if one has failed, and this is not a reset.
            WorkerDied: if one's worker is gone.
            ResetNeededError: if one's episode has ended, autoreset is disabled, and this is not a reset.
        """
        states = self._states[slots]
        if states.tobytes().strip(b"\0"):  # any but IDLE; three times as fast as `states.any()`
            self._refuse(slots, states, name)
        if self._any_failed and not reset and self._failed[slots].any():
            self._refuse_failed(self._number(slots)[self._failed[slots]].tolist(), name)
        if self.must_reset and not reset and self._ended[slots].any():
            over = self._number(slots)[self._ended[slots]].tolist()
            raise ResetNeededError(
                f"{name}: the episodes of slots {over} are over and autoreset is disabled; reset them first, with "
                'reset(options={"reset_mask": mask})'
            )

    def note_steps(self, slots: Slots | slice, count: int) -> None:
        """Note that a step of these slots, `count` of them, is being sent."""
        self.steps += count
        if self._any_unseen:
            self._see(slots)

    def check_call(self, slots: Slots, name: str) -> None:
        """Raise if the env of any slot can't be called; those of failed slots can.

        Raises:
            PendingCallError: if one has a request in flight.
            WorkerDied: if one's worker is gone.
        """
        states = self._states[slots]
        if ((states == SlotState.IN_FLIGHT) | (states == SlotState.DEAD)).any():
            self._refuse(slots, states, name)

    def _number(self, slots: Slots | slice) -> Slots:
        return np.arange(len(self._states))[slots]

    def _refuse(self, slots: Slots | slice, states: npt.NDArray[np.uint8], name: str) -> None:
        numbers = self._number(slots)
        busy = numbers[states == SlotState.IN_FLIGHT].tolist()
        if busy:
            raise PendingCallError(
                f"{name}: slots {busy} have a request in flight; take its result first, with recv(). If another task "
                "or thread awaits it, in a step() of its own say, wait until that is over: where several use one "
                "vector env, they take turns, with a lock (asyncio.Lock, threading.Lock)",
                name,
            )
        ready = numbers[states == SlotState.READY].tolist()
        if ready:
            raise PendingCallError(f"{name}: slots {ready} have results that were not taken; recv() takes them", name)
        dead = numbers[states == SlotState.DEAD].tolist()
        if dead:
            old = self._errors[dead[0]]
            raise _died_again(f"{name}: {old}", dead, old)

    def _refuse_failed(self, failed: list[int], name: str) -> None:
        old = self._errors[failed[0]]
        message = (
            f"{name}: slots {failed} have failed and must be reset first, with reset() or "
            f'reset(options={{"reset_mask": mask}}). The failure of {old}'
        )
        if isinstance(old, WorkerDied):
            raise _died_again(message, failed, old)
        error = EnvError(message, slots=tuple(failed), pid=old.pid, traceback=old.traceback, stderr=old.stderr)
        _copy_notes(old, error)
        raise error from old.__cause__

    def move(self, slots: Slots | slice, state: SlotState) -> None:
        """Put slots into a state, except dead ones; only `fail` makes a slot DEAD."""
        if self._any_dead:
            states = self._states[slots]
            self._states[slots] = np.where(states == SlotState.DEAD, states, state)
        else:
            self._states[slots] = int(state)  # ten times as fast as with an enum

    def fail(self, error: SlotError, among: Iterable[int] | None = None) -> None:
        """Note that slots can't be stepped: until a reset (EnvError), or ever again (WorkerDied).

        Args:
            error: the error, with its slots.
            among: those of its slots whose results are being taken; None for all. The others may have been reset since.
        """
        died = isinstance(error, WorkerDied)
        for slot in error.slots if died or among is None else among:
            dead = died and not (self.can_go_on is not None and self.can_go_on(slot))
            self._any_dead |= dead
            self._any_failed |= not dead
            if self._states[slot] != SlotState.DEAD:
                self._errors[slot] = error
                if dead:
                    self._states[slot] = SlotState.DEAD
                elif slot not in self._overtaken:
                    self._failed[slot] = True

    def note_ends(self, slots: Slots | slice, ended: Any) -> None:
        """Note which episodes have ended in a step."""
        if self.must_reset:
            self._ended[slots] |= ended
            if self._overtaken:
                self._ended[list(self._overtaken)] = False

    def note_taken(self, slots: Slots) -> None:
        """Note that results of these slots, which were READY, were taken or dropped."""
        if self._overtaken:
            self._overtaken.difference_update(slots.tolist())

    def note_reset(self, slots: Slots) -> None:
        """Note that a reset of these slots is being sent: they have not failed or ended any more."""
        self.resets += 1
        self._ended[slots] = False
        self._failed[slots] = False
        self._any_failed = bool(self._failed.any())
        self._see(slots)

    def _see(self, slots: Slots | slice) -> None:
        self._unseen[slots] = False
        self._any_unseen = bool(self._unseen.any())

    def note_states(self, slots: Slots) -> None:
        """Note that these slots were put into states: as after a reset, but their observations come with a step."""
        self.note_reset(slots)
        self._overtaken.update(slots[self._states[slots] == SlotState.READY].tolist())
        self._unseen[slots] = self._states[slots] != SlotState.IN_FLIGHT  # by a step that was sent after the state
        self._any_unseen = bool(self._unseen.any())

    def unseen(self) -> Slots:
        """Return the slots that were neither reset nor stepped since they were made, or put into a state."""
        return np.flatnonzero(self._unseen)

    def over(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return which of these slots must be reset before they are stepped (autoreset disabled)."""
        over: npt.NDArray[np.bool_] = self._ended[slots]
        return over

    # ------------------------------------------------------------ pausing

    def pause(self, slots: Slots | list[int]) -> None:
        """Leave these slots out of whole batches."""
        paused = np.zeros(len(self._states), np.bool_) if self.paused is None else self.paused.copy()
        paused[slots] = True
        self.paused = paused if paused.any() else None

    def resume(self, slots: Slots) -> None:
        """Take these slots into whole batches again."""
        self.resumes += 1
        if self.paused is not None:
            paused = self.paused.copy()
            paused[slots] = False
            self.paused = paused if paused.any() else None
            self.exhausted.difference_update(slots.tolist())

    def exhaust(self, slots: list[int]) -> None:
        """Pause these slots, whose envs have no further episode."""
        self.pause(slots)
        self.exhausted.update(slots)

    @property
    def active(self) -> Slots:
        """The slots that are not paused."""
        return np.arange(len(self._states)) if self.paused is None else np.flatnonzero(~self.paused)

    def leave_out_paused(self, numbers: Slots, name: str, *, by_name: bool) -> Slots:
        """Return the positions of those of these slots that are not paused.

        Raises:
            PausedError: if one is paused, and the caller named the slots (`by_name`).
        """
        paused = np.zeros(len(numbers), np.bool_) if self.paused is None else self.paused[numbers]
        if by_name and paused.any():
            raise PausedError(f"{name}: slots {numbers[paused].tolist()} are paused; resume() them first")
        return np.flatnonzero(~paused)

    # ------------------------------------------------------------ names

    def slot_numbers(self, slots: Iterable[int] | None, *, maybe_none: bool = False) -> Slots:
        """Check the slot numbers that a caller gave, and return them as an array.

        Args:
            slots: the numbers; None for all slots.
            maybe_none: whether there may be no number.

        Raises:
            IndexError: if one is out of range.
            ValueError: if one is given twice, or none at all.
        """
        n = len(self._states)
        if slots is None:
            return np.arange(n)
        try:
            array = np.asarray(list(slots) if not isinstance(slots, np.ndarray) else slots)
        except (TypeError, ValueError):  # no iterable, or of iterables
            array = np.asarray(None)
        if maybe_none and array.shape == (0,):
            return array.astype(np.int64)
        if array.dtype == np.bool_:
            raise ValueError("slots: expected slot numbers, got booleans; use numpy.flatnonzero(mask)")
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(f"slots: expected one or more slot numbers, got {slots!r}")
        array = array.astype(np.int64)
        numbers = array.tolist()  # for a few slots much faster than numpy
        if min(numbers) < 0 or max(numbers) >= n:
            raise IndexError(f"slots: expected numbers from 0 to {n - 1}, got {numbers}")
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"slots: one is named twice in {numbers}")
        return array


def _died_again(message: str, slots: list[int], old: SlotError) -> WorkerDied:
    """Make an error about slots whose worker had died before, with what is known of that."""
    known = {"returncode": old.returncode, "running": old.running} if isinstance(old, WorkerDied) else {}
    error = WorkerDied(message, slots=tuple(slots), pid=old.pid, stderr=old.stderr, **known)
    _copy_notes(old, error)
    return error


def _copy_notes(old: SlotError, new: SlotError) -> None:
    for note in getattr(old, "__notes__", ()):
        new.add_note(note)
