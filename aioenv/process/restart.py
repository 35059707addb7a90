"""Restart workers whose processes died, each within its budget, and repeat the requests that were lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aioenv.errors import StartTimeout, WorkerDied
from aioenv.process.async_resource import internal_task
from aioenv.process.restart_policy import RestartBudget, RestartPolicy

if TYPE_CHECKING:
    from aioenv.process.supervisor import Worker

__all__ = ["Restarter"]

_log = logging.getLogger("aioenv")


class _QueuedRequest(NamedTuple):
    """A request that was not answered."""

    resend: Callable[[], None]
    fail: Callable[[WorkerDied], object]


class Restarter:
    """Restarts workers, each within its budget, and repeats their unanswered requests.

    Args:
        workers: the workers.
        policy: the restart policy.
        meaning: the consequence of a restart, for the log.
        restore: restores the state of a worker whose new process is up, as far as the state is known.
        lost: called when a worker is given up after `start_restart` had accepted its death.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: RestartPolicy,
        *,
        meaning: str,
        restore: Callable[[Worker], Awaitable[None]],
        lost: Callable[[Worker, WorkerDied], None],
    ) -> None:
        self._policy = policy
        self._meaning = meaning
        self._restore = restore
        self._on_lost = lost
        self._budgets = {worker: RestartBudget(policy) for worker in workers}
        self._queued: dict[Worker, list[_QueuedRequest]] = {worker: [] for worker in workers}
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._disabled: set[Worker] = set()  # not to be restarted any more

    def start_restart(self, worker: Worker, error: WorkerDied) -> bool:
        """Start a task that restarts a worker that has died; return False if it is not restarted any more."""
        if worker in self._tasks:
            return True
        if worker in self._disabled:
            return False
        delay_s = self._next_delay(worker, error)
        if delay_s is None:
            return False
        self._tasks[worker] = internal_task(self._restart(worker, delay_s), name=f"restart of {worker!r}")
        return True

    def _next_delay(self, worker: Worker, error: Exception) -> float | None:
        if worker in self._disabled:
            return None
        delay_s = self._budgets[worker].next_delay()
        policy = self._policy
        if delay_s is None:
            self._disabled.add(worker)
            restarts = "1 restart" if policy.max_restarts == 1 else f"{policy.max_restarts} restarts"
            error.add_note(f"It is not restarted any more: {restarts} in {policy.within_s:g} s.")
        else:
            with contextlib.suppress(Exception):  # of a log handler, which must not prevent the restart
                _log.warning("%s; it is restarted, %s", str(error).partition("\n")[0], self._meaning)
        return delay_s

    def queue_request(
        self, worker: Worker, error: WorkerDied | None, resend: Callable[[], None], fail: Callable[[WorkerDied], object]
    ) -> bool:
        """Queue a request for a worker that is being restarted, or has died and will be.

        Args:
            worker: the worker.
            error: the worker's death, which left the request unanswered. None: the request was not sent, since the
                worker's state may not be restored yet.
            resend: sends the request; called once the worker is restored.
            fail: called if the worker is given up.

        Returns:
            Whether one of the two will be called. If not, the worker is up, or is not restarted any more.
        """
        if not (worker in self._tasks if error is None else self.start_restart(worker, error)):
            return False
        self._queued[worker].append(_QueuedRequest(resend, fail))
        return True

    @property
    def busy(self) -> bool:
        """Whether any worker is being restarted."""
        return bool(self._tasks)

    def is_restarting(self, worker: Worker) -> bool:
        """Return whether this worker is being restarted."""
        return worker in self._tasks

    def disable_restart(self, worker: Worker) -> None:
        """Never restart this worker again."""
        self._disabled.add(worker)

    async def wait_restarted(self, worker: Worker) -> None:
        """Wait until a worker is restored or given up, if it is being restarted."""
        if (task := self._tasks.get(worker)) is not None:
            await asyncio.wait([task])

    async def _restart(self, worker: Worker, delay_s: float) -> None:
        while True:
            try:
                await asyncio.sleep(delay_s)
                if worker not in self._disabled:
                    await worker.restart()
                if worker in self._disabled:  # since then; while the process was starting, it could not be killed
                    await worker.kill_and_wait("it is not restarted any more")
                    del self._tasks[worker]
                    self._give_up(worker, None)
                    return
                await self._restore_in_time(worker)
                break
            except Exception as exc:  # of any kind: no request may wait forever
                await worker.kill_and_wait("its state could not be restored")
                next_delay_s = self._next_delay(worker, exc)
                if next_delay_s is None:
                    del self._tasks[worker]
                    self._give_up(worker, exc)
                    return
                delay_s = next_delay_s
        del self._tasks[worker]
        for request in self._take_queued(worker):
            request.resend()

    async def _restore_in_time(self, worker: Worker) -> None:
        """Restore a worker within its start timeout: an env may hang in it."""
        limit = asyncio.timeout(worker.start_timeout_s)
        try:
            async with limit:
                await self._restore(worker)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"{worker!r} was started again, but not restored within start_timeout_s={worker.start_timeout_s}"
            raise StartTimeout(message, slots=worker.slots, pid=worker.pid, stderr=worker.stderr) from None

    def _take_queued(self, worker: Worker) -> list[_QueuedRequest]:
        queued, self._queued[worker] = self._queued[worker], []
        return queued

    def _give_up(self, worker: Worker, cause: Exception | None) -> None:
        for request in self._take_queued(worker):
            request.fail(self._death_error(worker, cause))
        self._on_lost(worker, self._death_error(worker, cause))

    def _death_error(self, worker: Worker, cause: Exception | None) -> WorkerDied:
        error = worker.death_error()
        error.__cause__ = cause
        for note in getattr(cause, "__notes__", ()):
            error.add_note(note)
        return error

    def abandon(self) -> None:
        """Restart no worker any more, without a loop to wait on."""
        self._disabled.update(self._budgets)

    async def close(self) -> None:
        """Restart no worker any more; queued requests fail with the death of their worker."""
        tasks, self._tasks = self._tasks, {}
        self._disabled.update(self._budgets)
        for task in tasks.values():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks.values())
        for worker in tasks:
            self._give_up(worker, None)
