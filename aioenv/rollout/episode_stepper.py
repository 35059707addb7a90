"""A step of some slots and a reset of others, at the same time: what numbered episodes are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aioenv.rollout.groups import Group
from aioenv.rollout.subset import info_of, put_part
from aioenv.spaces.infos import merge_infos
from aioenv.spaces.layout import Arrays

if TYPE_CHECKING:
    from aioenv.core.requests import BatchRequest
    from aioenv.core.scheduler import RequestScheduler

__all__ = ["EpisodeStepper", "GroupEpisodeStepper", "SteppedSlots"]

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


class EpisodeStepper(Protocol):
    """Moves slots; `obs` and `objects` hold the last observations of all, one row a slot."""

    obs: Arrays
    objects: Objects

    async def move(
        self, stepped: Sequence[int], arrays: Arrays, objects: Objects, seeds: Mapping[int, int | None]
    ) -> SteppedSlots | None:
        """Step some slots and reset others.

        If this is cancelled, or something goes wrong, what is in flight is abandoned.

        Args:
            stepped: slots, ascending.
            arrays, objects: actions of all slots, taken apart; rows of slots that are not stepped are not used.
            seeds: of the slots that are reset.

        Returns:
            What the step gave; None if nothing was stepped.
        """


class GroupEpisodeStepper:
    """Over workers, by groups: one that is stepped, one that is reset.

    Args:
        schedule: what sends and waits.
    """

    def __init__(self, schedule: RequestScheduler) -> None:
        self._schedule = schedule
        layout = schedule.fleet.observations
        self.obs = layout.zeros(schedule.num_envs)
        self.objects = layout.no_objects(schedule.num_envs)
        self._groups: dict[bool, Group] = {}  # the one that was reset last, and the one that was stepped last

    async def move(
        self, stepped: Sequence[int], arrays: Arrays, objects: Objects, seeds: Mapping[int, int | None]
    ) -> SteppedSlots | None:
        """See `EpisodeStepper.move`."""
        flights: list[tuple[Group, BatchRequest]] = []
        try:
            if stepped:
                group = self._group(list(stepped), stepped=True)
                chosen = [[column[slot] for slot in stepped] for column in objects]
                group.send_arrays([array[list(stepped)] for array in arrays], chosen, "episodes")
                flights.append((group, group.take()))
            if seeds:
                group = self._group(sorted(seeds), stepped=False)
                group.send_whole_reset(group.slots, seeds, None, "episodes")
                flights.append((group, group.take()))
            exchanges = [exchange for _, exchange in flights]
            while flights:
                group, exchange = flights.pop(0)
                await self._schedule.outcome(exchange, group.settle, None)
        except BaseException:
            for _, exchange in flights:
                self._schedule.abandon(exchange)
            raise
        for exchange in exchanges:
            for part in exchange.parts:
                put_part(self.obs, self.objects, exchange, part)
        return self._moved(exchanges[0], len(stepped)) if stepped else None

    def _group(self, slots: list[int], *, stepped: bool) -> Group:
        group = self._groups.get(stepped)
        if group is None or group.slots.tolist() != slots:
            group = self._groups[stepped] = Group(self._schedule, np.array(slots))
        return group

    def _moved(self, exchange: BatchRequest, k: int) -> SteppedSlots:
        batch = exchange.batch
        lost: set[int] = set()
        if self._schedule.restarter is not None:  # else it is an env's own word
            for columns in (c for part in exchange.parts for c in part.columns):
                if any(column.path == ("restarted",) for column in columns.schema.columns):
                    lost.update(np.arange(k)[columns.positions].tolist())
        merged: list[dict[str, Any]] = []

        def info(row: int) -> dict[str, Any]:
            if not merged:
                merged.append(merge_infos([c for part in exchange.parts for c in part.columns], k))
            return info_of(merged[0], row)

        return SteppedSlots(batch.reward, batch.terminated, batch.truncated, info, lost)
