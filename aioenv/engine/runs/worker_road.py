"""Rollouts over workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioenv.assign import spread
from aioenv.batching.infos import Columns
from aioenv.batching.merge import merge
from aioenv.engine.calls import for_each
from aioenv.engine.runs.groups import Group, of_slots
from aioenv.engine.runs.road import Seen
from aioenv.engine.slots import SlotState
from aioenv.workers.life import LIVING, WorkerState
from aioenv.workers.supervisor import Worker

if TYPE_CHECKING:
    from aioenv.engine.fleet import Member
    from aioenv.engine.runs.pausing import Live
    from aioenv.engine.schedule import Schedule

__all__ = ["Remembered", "WorkerRoad"]

Slots = npt.NDArray[np.int64]


Asked = list[tuple[Worker, tuple[int, int]]]


class Remembered:
    """How the last rollout has left the slots, which is known for as long as nobody else asks their workers."""

    def __init__(self) -> None:
        self._seen: Seen | None = None
        self._asked: Asked = []

    def note(self, seen: Seen | None, asked: Asked) -> None:
        """A rollout is over; None: it does not know either.

        Args:
            seen: what came of its requests.
            asked: what had been asked of the workers when it had sent the last of them.
        """
        self._seen, self._asked = seen, asked

    def recall(self, schedule: Schedule) -> Seen | None:
        """How things stand, if that is known; once."""
        seen, self._seen = self._seen, None
        if seen is None or self._asked != _asked(schedule):
            return None
        return seen if all(worker.state is WorkerState.READY for worker, _ in self._asked) else None


def _asked(schedule: Schedule) -> Asked:
    return [(member.worker, member.worker.asked) for member in schedule.fleet.members]


class WorkerRoad:
    """See `Road`.

    Args:
        schedule: what sends and waits.
        live: what may be asking paused slots for their observations already.
        remembered: how the last rollout has left them.
    """

    def __init__(self, schedule: Schedule, live: Live | None, remembered: Remembered) -> None:
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

    async def look(self, *, due: bool) -> Seen:
        """Ask the workers (see `Road.look`); of those in no group only who can answer now.

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

        def can_answer(member: Member) -> bool:
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
        if due:
            resets = np.array(await for_each(schedule, slots, "rollout", "resets_due", lambda _: ()), np.bool_)
        return Seen(slots, came.obs, came.objects, resets)

    def sent(self) -> None:
        """See `Road.sent`: what others ask from now on it does not know of."""
        self._asked = _asked(self._schedule)

    def ended(self, seen: Seen | None) -> None:
        """See `Road.ended`."""
        self._remembered.note(seen, self._asked)

    def merge(self, infos: Sequence[Any]) -> dict[str, Any]:
        """See `Road.merge`."""
        columns = [piece if isinstance(piece, Columns) else of_slots(*piece) for piece in infos]
        return merge(sorted(columns, key=_first_position), self._schedule.num_envs)


def _first_position(columns: Columns) -> int:
    positions = columns.positions
    return int(positions.start if isinstance(positions, slice) else positions[0])
