"""Bringing workers back whose processes died: a new process, its slots as they were or begun anew, requests again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aioenv.engine.batch import Exchange, Part
from aioenv.engine.fleet import Fleet, Member
from aioenv.engine.history import History
from aioenv.errors import WorkerDied
from aioenv.workers.restart import Budget, RestartPolicy

__all__ = ["Recovery"]

_log = logging.getLogger("aioenv")


class Recovery:
    """Restarts the workers of a fleet, each within its budget.

    Requests that a dead worker has not answered are held, and sent again once it is back.

    Args:
        fleet: the workers.
        policy: how often, and whether slots are resumed.
        history: what their slots go on from.
        resend: sends a request again.
        give_up: called with a worker that is not restarted any more, the error, and the requests that it held.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: RestartPolicy,
        history: History,
        resend: Callable[[Exchange, Part], None],
        give_up: Callable[[Member, WorkerDied, list[tuple[Exchange, Part]]], None],
    ) -> None:
        self.history = history
        self._fleet = fleet
        self._policy = policy
        self._resend = resend
        self._give_up = give_up
        self._budgets = {member: Budget(policy) for member in fleet.members}
        self._held: dict[Member, list[tuple[Exchange, Part]]] = {member: [] for member in fleet.members}
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._lost: set[Member] = set()  # not restarted any more

    def begin(self, member: Member, error: WorkerDied) -> bool:
        """A worker has died: whether it is being brought back."""
        if member in self._tasks:
            return True
        if member in self._lost:
            return False
        delay_s = self._next_delay(member, error)
        if delay_s is None:
            return False
        loop = asyncio.get_running_loop()
        self._tasks[member] = loop.create_task(self._recover(member, delay_s), name=f"restart of {member.worker}")
        return True

    def _next_delay(self, member: Member, error: Exception) -> float | None:
        delay_s = self._budgets[member].take()
        policy = self._policy
        what = "slots resume" if policy.resume else "episodes of its slots are truncated"
        if delay_s is None:
            self._lost.add(member)
            error.add_note(f"It is not restarted any more: {policy.max_restarts} restarts in {policy.within_s:g} s.")
        else:
            _log.warning("%s; it is restarted, %s", str(error).partition("\n")[0], what)
        return delay_s

    def hold(self, exchange: Exchange, part: Part, error: WorkerDied) -> bool:
        """A request was not answered: whether it will be sent again."""
        if not self.begin(part.member, error):
            return False
        self._held[part.member].append((exchange, part))
        return True

    def forsake(self, member: Member) -> None:
        """Don't restart this worker any more."""
        self._lost.add(member)

    async def settled(self, member: Member) -> None:
        """Wait until a worker is back, or given up, if it is being brought back."""
        if (task := self._tasks.get(member)) is not None:
            await asyncio.wait([task])

    async def _recover(self, member: Member, delay_s: float) -> None:
        worker = member.worker
        while True:
            try:
                await asyncio.sleep(delay_s)
                await worker.restart()
                await self._restore(member)
                break
            except Exception as exc:  # whatever it is: nobody may wait for ever
                await worker.put_down("what it knew could not be restored")
                another = self._next_delay(member, exc)
                if another is None:
                    self._end(member, exc)
                    return
                delay_s = another
        del self._tasks[member]
        held, self._held[member] = self._held[member], []
        for exchange, part in held:
            self._resend(exchange, part)

    def _end(self, member: Member, cause: Exception) -> None:
        del self._tasks[member]
        error = member.worker.death()
        error.__cause__ = cause
        error.add_note("\n".join(getattr(cause, "__notes__", [])))
        held, self._held[member] = self._held[member], []
        self._give_up(member, error, held)

    async def _restore(self, member: Member) -> None:
        """Make a new process what the old one was, as far as that is known."""
        worker = member.worker
        await self._fleet.configure_worker(worker)
        lost = list(range(member.stop - member.start))
        if self._policy.resume:
            rows, *known = self.history.resumed_rows(member)
            differences = await worker.call("resume", rows, *known)
            lost = [row for row, difference in zip(rows, differences, strict=True) if difference is not None]
            for row, difference in zip(rows, differences, strict=True):
                if difference is not None:
                    slot = member.start + row
                    _log.warning("slot %d could not be resumed: %s; its episode is truncated", slot, difference)
        if lost_rows := self.history.lost_rows(member, lost):
            await worker.call("begin_anew", lost_rows)

    async def close(self) -> None:
        """Restart nothing any more; requests that are held get the error of their worker."""
        tasks, self._tasks = self._tasks, {}
        self._lost.update(self._fleet.members)
        for task in tasks.values():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks.values())
        for member, held in self._held.items():
            if held:
                self._held[member] = []
                self._give_up(member, member.worker.death(), held)
