"""Rollouts over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.assign import spread
from aioenv.core.backend import InitialState
from aioenv.core.slots import SlotState
from aioenv.process.supervisor import LIVING, Worker, WorkerState
from aioenv.rollout.groups import Group, of_slots
from aioenv.spaces.infos import Columns, merge_infos

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.worker_pool import WorkerSlots
    from aioenv.rollout.subset import ActiveSlots

__all__ = ["RememberedState", "WorkerRolloutBackend"]

Slots = npt.NDArray[np.int64]


Asked = list[tuple[Worker, tuple[int, int]]]


class RememberedState:
    """How the last rollout has left the slots, which is known for as long as nobody else asks their workers."""

    def __init__(self) -> None:
        self._seen: InitialState | None = None
        self._asked: Asked = []

    def note(self, seen: InitialState | None, asked: Asked) -> None:
        """A rollout is over; None: it does not know either.

        Args:
            seen: what came of its requests.
            asked: what had been asked of the workers when it had sent the last of them.
        """
        self._seen, self._asked = seen, asked

    def recall(self, schedule: RequestScheduler) -> InitialState | None:
        """How things stand, if that is known; once."""
        seen, self._seen = self._seen, None
        if seen is None or self._asked != _asked(schedule):
            return None
        return seen if all(worker.state is WorkerState.READY for worker, _ in self._asked) else None


def _asked(schedule: RequestScheduler) -> Asked:
    return [(member.worker, member.worker.asked) for member in schedule.fleet.members]


class WorkerRolloutBackend:
    """See `RolloutBackend`.

    Args:
        schedule: what sends and waits.
        live: what may be asking paused slots for their observations already.
        remembered: how the last rollout has left them.
    """

    def __init__(self, schedule: RequestScheduler, live: ActiveSlots | None, remembered: RememberedState) -> None:
        self._schedule = schedule
        self._live = live
        self._remembered = remembered
        self._asked: Asked = []
        self._stepped = schedule.table.live  # what was split

    def split(self, groups: int, *, whole_workers: bool) -> list[Group]:
        """Split the slots of every worker evenly into so many groups, or as many as its smallest worker has slots.

        So every group keeps every worker busy, and a worker that is done with one finds the next one's request there.
        Slots that are paused are in none.

        Args:
            groups: how many.
            whole_workers: split the workers instead, into at most as many groups. A worker's vector env steps at once:
                then it is always so.
        """
        schedule = self._schedule
        self._stepped = live = schedule.table.live
        shares = [live[order] for _, order in schedule.fleet.shares(live)]
        if whole_workers or schedule.fleet.vectorized:
            groups = min(groups, len(shares))
            return [Group(schedule, np.concatenate(shares[start:stop])) for start, stop in spread(len(shares), groups)]
        groups = min([groups, *map(len, shares)])
        runs: list[list[Slots]] = [[] for _ in range(groups if shares else 0)]
        for slots in shares:
            for mine, (start, stop) in zip(runs, spread(len(slots), groups), strict=True):
                mine.append(slots[start:stop])
        return [Group(schedule, np.concatenate(mine)) for mine in runs]

    async def look(self, *, pending_reset: bool) -> InitialState:
        """Ask the workers (see `RolloutBackend.look`); of those in no group only who can answer now.

        Other tasks pause and resume while this drains: what counts is what was split.
        """
        schedule, table = self._schedule, self._schedule.table
        if (seen := self._remembered.recall(schedule)) is not None:
            return seen
        await schedule.drain()
        if self._live is not None:
            await self._live.take_in(None)
        stepped = {member for member, _ in schedule.fleet.shares(self._stepped)}
        unseen = set(table.unseen().tolist())

        def can_answer(member: WorkerSlots) -> bool:
            mine = range(member.start, member.stop)
            idle = all(table.state(slot) is SlotState.IDLE and slot not in unseen for slot in mine)
            return idle and member.worker.state in LIVING and not member.worker.busy

        asked = [member for member in schedule.fleet.members if member in stepped or can_answer(member)]
        slots = np.concatenate([np.arange(member.start, member.stop) for member in asked])
        everyone = Group(schedule, slots)
        everyone.send_look()
        came = await everyone.recv()
        if came.error is not None:
            raise came.error
        resets: Any = np.zeros(len(slots), np.bool_)
        if pending_reset:
            resets = np.array(await schedule.for_each(slots, "rollout", "pending_resets", lambda _: ()), np.bool_)
        return InitialState(slots, came.obs, came.objects, resets)

    def sent(self) -> None:
        """See `RolloutBackend.sent`: what others ask from now on it does not know of."""
        self._asked = _asked(self._schedule)

    def ended(self, seen: InitialState | None) -> None:
        """See `RolloutBackend.ended`."""
        self._remembered.note(seen, self._asked)

    def merge(self, infos: Sequence[Any]) -> dict[str, Any]:
        """See `RolloutBackend.merge`."""
        columns = [piece if isinstance(piece, Columns) else of_slots(*piece) for piece in infos]
        return merge_infos(sorted(columns, key=_first_position), self._schedule.num_envs)


def _first_position(columns: Columns) -> int:
    positions = columns.positions
    return int(positions.start if isinstance(positions, slice) else positions[0])
