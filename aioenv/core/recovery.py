"""Making a worker that was started again what it was: its slots as they were, or begun anew."""

from __future__ import annotations

import contextlib
import logging

from aioenv.core.history import SlotHistory
from aioenv.core.stats_merger import StatsMerger
from aioenv.core.worker_pool import WorkerPool
from aioenv.process.supervisor import Worker

__all__ = ["WorkerRecovery"]

_log = logging.getLogger("aioenv")


class WorkerRecovery:
    """Restores workers of a fleet from what is known of their slots.

    Args:
        fleet: the workers.
        history: what is known.
        merger: of the statistics that the envs share, if there are any.
        resume: whether slots go on where they were, if that can be.
    """

    def __init__(self, fleet: WorkerPool, history: SlotHistory, merger: StatsMerger | None, *, resume: bool) -> None:
        self._fleet = fleet
        self._history = history
        self._merger = merger
        self._resume = resume
        self._members = {member.worker: member for member in fleet.members}

    async def restore(self, worker: Worker) -> None:
        """Tell a new process what the one before it knew.

        Raises:
            WorkerDied, EnvError: if it ends, or fails.
        """
        member = self._members[worker]
        first = await self._fleet.configure_worker(worker)
        if self._merger is not None:
            await self._merger.catch_up(worker, resumed=self._resume)
        if self._fleet.model_fields is not None:
            await self._fleet.model_fields.restore(worker)
        every = range(member.stop - member.start)
        lost = list(every)
        if self._resume:
            vectorized, history = self._fleet.vectorized, self._history
            rows, *known = history.resumed_env(member) if vectorized else history.resumed_rows(member)
            differences = await worker.call("resume", rows, *known)
            found = {row: text for row, text in zip(rows, differences, strict=True) if text is not None}
            for row, difference in found.items():
                slot = member.start + row
                with contextlib.suppress(Exception):  # of a handler: the worker is there
                    _log.warning("slot %d could not be resumed: %s; its episode is truncated", slot, difference)
            lost = list(found)
            if not (rows and vectorized):  # of which all rows were restored
                self._history.note_first(member, first, [row for row in every if row not in rows])
        if lost_rows := self._history.lost_rows(member, lost):
            await worker.call("reset_lost_rows", lost_rows)
        if not self._fleet.vectorized and (failed := self._history.last_of_failed(member)):
            await worker.call("keep_observations", failed)
