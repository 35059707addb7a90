"""Getting and setting the whole state of envs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from aioenv.errors import ResumeError
from aioenv.state.env_state import EnvState
from aioenv.worker.native_states import awaits_reset

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.waits import Clock

__all__ = ["States"]


class States:
    """The part of a vector env that gets and sets states."""

    _clock: Clock
    autoreset_mode: AutoresetMode

    if TYPE_CHECKING:

        @property
        def _running(self) -> RequestScheduler: ...

    async def get_state(self, slots: Iterable[int] | None = None) -> list[EnvState]:
        """The states of envs: with `set_state` any env of the same sort goes on from there, bit for bit.

        They hold what the next steps, and the next automatic resets, depend on: all of MuJoCo's data, what wrappers
        count, the random generator, and whether a reset is due. An env that is not MuJoCo's, or a wrapper that
        Gymnasium does not have, must have `get_state()` and `set_state(state)`. Changes to a MuJoCo model are not
        among it. If this is cancelled, nothing is lost.

        Args:
            slots: slot numbers, None for all.

        Returns:
            One state for each of `slots`, in that order; `aioenv.save` writes them to a file.

        Raises:
            ResumeError: if a state can't be had; the message names the wrapper or env in the way.
            PendingCallError, EnvError, WorkerDied: as for `call`.
        """
        schedule = self._running
        numbers = schedule.table.slot_numbers(slots)
        with self._clock.envs:
            replies = await schedule.call_service(numbers, "get_state", "get_states", lambda _: ())
        by_slot = dict(zip(np.sort(numbers).tolist(), replies, strict=True))
        _refuse_misfits(by_slot)
        return [EnvState(*by_slot[slot]) for slot in numbers.tolist()]

    async def set_state(self, states: Iterable[EnvState], slots: Iterable[int] | None = None) -> None:
        """Bring envs into states that `get_state` gave, of whichever slot, worker, process or `aioenv.load`.

        A slot that has failed, or whose episode was over, can be stepped again. No observation is returned, and
        images show the new state after the next step. If this is cancelled, envs take on the states all the same, but
        a slot that had failed stays so: set them again.

        Args:
            states: one for each of `slots`, in that order.
            slots: slot numbers, None for all.

        Raises:
            ValueError: if there are more or fewer states than slots.
            TypeError: if one is no `EnvState`.
            ResumeError: if one is of another sort of env, whose slot is as it was then; the others' states are set.
            PendingCallError, EnvError, WorkerDied: as for `call`.
        """
        schedule = self._running
        numbers = schedule.table.slot_numbers(slots)
        states = list(states) if isinstance(states, Iterable) else [states]
        if strange := [state for state in states if not isinstance(state, EnvState)]:
            raise TypeError(f"set_state: expected EnvStates, as get_state gives them, got {strange[0]!r}")
        if len(states) != len(numbers):
            raise ValueError(f"set_state: got {len(states)} states for {len(numbers)} slots")
        raw = {slot: (s.env_id, s.values, s.arrays) for slot, s in zip(numbers.tolist(), states, strict=True)}
        with self._clock.envs:
            replies = await schedule.call_service(
                numbers, "set_state", "set_states", lambda mine: ([raw[s] for s in mine],)
            )
        by_slot = dict(zip(np.sort(numbers).tolist(), replies, strict=True))
        done = {slot: reply for slot, reply in by_slot.items() if not isinstance(reply, str)}
        schedule.table.note_states(np.array(list(done), np.int64))
        if schedule.episodes is not None:
            schedule.episodes.stats.drop(np.array(list(done), np.int64))
            if self.autoreset_mode is AutoresetMode.NEXT_STEP:  # what begins with the reset is a whole episode
                schedule.episodes.stats.await_resets([slot for slot in done if awaits_reset(raw[slot])])
        if schedule.history is not None:
            schedule.history.note_states({slot: (raw[slot], checkpoint) for slot, checkpoint in done.items()})
        _refuse_misfits(by_slot)


def _refuse_misfits(replies: dict[int, Any]) -> None:
    """Raise if a worker answered with a text, which says why a state can't be had or set."""
    texts = {slot: reply for slot, reply in replies.items() if isinstance(reply, str)}
    if texts:
        first = min(texts)
        more = f" (and so for {len(texts) - 1} more slots)" if len(texts) > 1 else ""
        raise ResumeError(f"slot {first}: {texts[first]}{more}")
