"""A step of some slots and a reset of others, at the same time: what numbered episodes are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioenv.core.backend import Backend, SlotGroup, StepOutcome
from aioenv.rollout.subset import info_of
from aioenv.spaces.layout import Arrays

__all__ = ["EpisodeStepper", "SteppedSlots"]

Objects = list[list[Any]]


class SteppedSlots(NamedTuple):
    """What a step of k slots gave.

    Attributes:
        reward: float64 `(k,)`; terminated, truncated: bool `(k,)`.
        info: gives the info dict of one of them, by its place among the k.
        lost: the places of those whose episodes were lost with a worker that was restarted.
    """

    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    info: Callable[[int], dict[str, Any]]
    lost: Set[int] = frozenset()


class EpisodeStepper:
    """Steps some slots and resets others at the same time, as two groups of a backend.

    Args:
        backend: steps the envs.

    Attributes:
        obs, objects: the last observations of all slots, one row a slot.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        layout = backend.observations
        self.obs = layout.zeros(backend.num_envs)
        self.objects = layout.no_objects(backend.num_envs)
        self._groups: dict[bool, SlotGroup] = {}  # the one that was reset last, and the one that was stepped last

    async def move(
        self, stepped: Sequence[int], arrays: Arrays, objects: Objects, seeds: Mapping[int, int | None]
    ) -> SteppedSlots | None:
        """Step some slots and reset others.

        If this is cancelled, or something goes wrong, the requests in flight are abandoned.

        Args:
            stepped: slots, ascending.
            arrays, objects: actions of all slots, taken apart; rows of slots that are not stepped are not used.
            seeds: the seeds of the slots that are reset.

        Returns:
            The result of the step; None if no slot was stepped.
        """
        asked: list[SlotGroup] = []
        outcomes = []
        try:
            if stepped:
                group = self._group(list(stepped), stepped=True)
                chosen = [[column[slot] for slot in stepped] for column in objects]
                group.send_arrays([array[list(stepped)] for array in arrays], chosen, "episodes")
                asked.append(group)
            if seeds:
                group = self._group(sorted(seeds), stepped=False)
                group.send_reset(group.slots, seeds, None, "episodes")
                asked.append(group)
            for group in asked:
                outcome = await group.recv()
                if outcome.error is not None:
                    raise outcome.error
                outcomes.append(outcome)
        except BaseException:
            for group in asked:
                group.abandon()
            raise
        for group, outcome in zip(asked, outcomes, strict=True):
            put_rows(self.obs, self.objects, group.slots, outcome.obs, outcome.objects)
        return self._stepped(asked[0].slots, outcomes[0]) if stepped else None

    def _group(self, slots: list[int], *, stepped: bool) -> SlotGroup:
        group = self._groups.get(stepped)
        if group is None or group.slots.tolist() != slots:
            group = self._groups[stepped] = self._backend.group(np.array(slots))
        return group

    def _stepped(self, slots: npt.NDArray[np.int64], outcome: StepOutcome) -> SteppedSlots:
        merged: list[dict[str, Any]] = []

        def info(row: int) -> dict[str, Any]:
            if not merged:
                merged.append(self._backend.rollout_backend().merge(outcome.infos))
            return info_of(merged[0], int(slots[row]))

        lost = frozenset() if outcome.valid is None else frozenset(np.flatnonzero(~outcome.valid).tolist())
        return SteppedSlots(outcome.reward, outcome.terminated, outcome.truncated, info, lost)


def put_rows(obs: Arrays, objects: Objects, slots: npt.NDArray[np.int64], rows: Arrays, items: Objects) -> None:
    """Put the observations of some slots into arrays and lists with one row a slot."""
    for mine, theirs in zip(obs, rows, strict=True):
        mine[slots] = theirs
    for column, values in zip(objects, items, strict=False):
        for slot, item in zip(slots.tolist(), values, strict=True):
            column[slot] = item
