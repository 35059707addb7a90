"""Rollouts of a vector env in this process: some of its slots step while the policy chooses for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.assign import spread
from aioenv.core.backend import InitialState, StepOutcome
from aioenv.core.results import StepResult
from aioenv.errors import EnvError
from aioenv.inprocess.pieces import gather_infos
from aioenv.inprocess.requests import InProcessRequest
from aioenv.inprocess.some import SomeSolo
from aioenv.spaces.infos import Columns, merge
from aioenv.spaces.layout import Arrays
from aioenv.worker.vector_access import with_rows

__all__ = ["InProcessGroup", "InProcessRollout"]

Slots = npt.NDArray[np.int64]


class InProcessRollout:
    """See `RolloutBackend`.

    Args:
        solo: the vector env.
    """

    def __init__(self, solo: SomeSolo) -> None:
        self._solo = solo

    def split(self, groups: int, *, whole_workers: bool) -> list[InProcessGroup]:
        """Split the slots that are not paused into so many groups, or as many as there are slots.

        All are one group if the env steps all slots at once, or if what they draw depends on who steps with whom.
        """
        solo = self._solo
        live = solo.table.active
        groups = min(groups, len(live)) if solo.splits else 1
        return [InProcessGroup(solo, live[start:stop]) for start, stop in spread(len(live), groups)]

    async def look(self, *, pending_reset: bool) -> InitialState:
        """Ask the env (see `RolloutBackend.look`)."""
        solo = self._solo
        await solo.drain()
        value = await solo.outcome(solo.begin_look("rollout"))
        slots = np.arange(solo.num_envs)
        return InitialState(
            slots, *solo.take_apart(value.obs), solo.last.over() if pending_reset else np.zeros(len(slots), np.bool_)
        )

    def sent(self) -> None:
        """See `RolloutBackend.sent`: nothing to note."""

    def ended(self, seen: InitialState | None) -> None:
        """See `RolloutBackend.ended`. Asking a vector env in this process is as fast as finding out whether to ask."""

    def merge(self, infos: Sequence[Any]) -> dict[str, Any]:
        """See `RolloutBackend.merge`. What the env has said of all slots at once is given as it is."""
        n = self._solo.num_envs
        said = [piece for piece in infos if not isinstance(piece, Columns)]
        if len(said) == 1 and len(said[0][1]) == n:
            info = dict(said[0][0])
        else:
            info = gather_infos(said, n, [slots for _, slots in said], n)
        return {**info, **merge([piece for piece in infos if isinstance(piece, Columns)], n)}


class InProcessGroup:
    """See `SlotGroup`.

    Args:
        solo: the vector env.
        slots: ascending; all of them, if it can't step some.
    """

    def __init__(self, solo: SomeSolo, slots: Slots) -> None:
        self.slots = slots
        self.slots.flags.writeable = False
        self._solo = solo
        self._flight: InProcessRequest | None = None

    @property
    def in_flight(self) -> bool:
        """See `SlotGroup.in_flight`."""
        return self._flight is not None

    def send(self, actions: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
        """See `SlotGroup.send`; a step that is made on the loop is over when this returns."""
        solo, slots = self._solo, self.slots
        arrays, objects = solo.actions.take_apart(actions, len(slots))
        # the env gets its own: it may write to them
        batch = with_rows(solo.actions, solo.num_envs, slots.tolist(), arrays, objects)
        self._flight = solo.begin_step(batch, slots, "rollout")
        return arrays, objects

    def send_reset(self, slots: Slots) -> None:
        """See `SlotGroup.send_reset`."""
        self._flight = self._solo.begin_reset(slots, None, None, "rollout")

    async def recv(self) -> StepOutcome:
        """See `SlotGroup.recv`; what an env has raised is an error of all slots that were asked."""
        flight, self._flight = self._flight, None
        assert flight is not None
        solo, slots = self._solo, flight.slots
        n = len(slots)
        reward, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        try:
            value = await solo.outcome(flight)
        except EnvError as error:
            layout = solo.observations
            none = np.zeros(n, np.bool_)
            return StepOutcome(layout.zeros(n), layout.no_objects(n), reward, terminated, truncated, none, [], error)
        if isinstance(value, StepResult):
            reward, terminated, truncated = value.reward[slots], value.terminated[slots], value.truncated[slots]
        obs, objects = solo.take_apart(value.obs)
        if n < solo.num_envs:
            obs = [array[slots] for array in obs]
            objects = [[column[slot] for slot in slots.tolist()] for column in objects]
        infos = [(value.info, slots)]
        return StepOutcome(obs, objects, reward, terminated, truncated, None, infos, None)

    def close(self) -> None:
        """See `SlotGroup`: nothing is kept."""

    def abandon(self) -> None:
        """See `SlotGroup.abandon`."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._solo.abandon_flight(flight)
