"""When a worker that died is started again: the policy, and what is left of its budget."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

from aioenv.errors import StartTimeout, WorkerDied
from aioenv.process.async_resource import own_task

if TYPE_CHECKING:
    from aioenv.process.supervisor import Worker

__all__ = ["RestartBudget", "RestartPolicy", "Restarter"]

_LONGEST_DELAY_S = 30.0


@dataclass(frozen=True)
class RestartPolicy:
    """Start a worker again whose process died, with the same factories.

    Without `resume`, its slots' episodes are over: the next result of each is `truncated=True` with reward 0,
    `info["restarted"]` and the last observation that is known. The next episode is seeded from the slot's last seed
    (and from how often the worker was restarted), so that a run with the same faults is the same.

    Attributes:
        max_restarts: so many in `within_s` seconds, and the next death is for good (`WorkerDied`). Each worker has
            its own budget.
        within_s: in seconds.
        backoff_s: the first restart in `within_s` comes at once, the second after so many seconds, the third after
            twice as many, and so on.
        resume: slots go on where they were instead, as if nothing had happened. Only for envs that can: see
            `docs/reliability.md`.

    Raises:
        ValueError: if a number is out of range, or an argument is of another kind.
    """

    max_restarts: int = 3
    within_s: float = 60.0
    backoff_s: float = 0.1
    resume: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 1:
            raise ValueError(f"max_restarts: expected a positive int, got {self.max_restarts!r}")
        for name in ("within_s", "backoff_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"{name}: expected a number of seconds, got {value!r}")
        if not isinstance(self.resume, bool):
            raise ValueError(f"resume: expected True or False, got {self.resume!r}")
        if not self.within_s > 0:
            raise ValueError(f"within_s: expected a positive number of seconds, got {self.within_s!r}")
        if not self.backoff_s >= 0:
            raise ValueError(f"backoff_s: expected seconds, 0 or more, got {self.backoff_s!r}")


class RestartBudget:
    """The restarts that one worker may still have.

    Args:
        policy: how many, and how fast.
        clock: seconds that never go back.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._times: deque[float] = deque()

    def take(self) -> float | None:
        """Take one restart: how many seconds to wait before it; None if there is none left."""
        now, times, policy = self._clock(), self._times, self._policy
        while times and now - times[0] > policy.within_s:
            times.popleft()
        if len(times) >= policy.max_restarts:
            return None
        times.append(now)
        if len(times) == 1:
            return 0.0
        return min(policy.backoff_s * 2.0 ** (len(times) - 2), _LONGEST_DELAY_S)


_log = logging.getLogger("aioenv")


class _Held(NamedTuple):
    """A request that was not answered: what sends it again, and what is told if that can't be."""

    again: Callable[[], None]
    fail: Callable[[WorkerDied], object]


class Restarter:
    """Restarts workers, each within its budget.

    Args:
        workers: the workers.
        policy: how often.
        meaning: what a restart means, for the log.
        restore: makes a new process what the old one was, as far as that is known.
        lost: called when a worker is not started again any more, after a death that `begin` had accepted.
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
        self._held: dict[Worker, list[_Held]] = {worker: [] for worker in workers}
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._lost: set[Worker] = set()  # not started again any more

    def begin(self, worker: Worker, error: WorkerDied) -> bool:
        """A worker has died: whether it is started again."""
        if worker in self._tasks:
            return True
        if worker in self._lost:
            return False
        delay_s = self._next_delay(worker, error)
        if delay_s is None:
            return False
        self._tasks[worker] = own_task(self._bring_back(worker, delay_s), name=f"restart of {worker!r}")
        return True

    def _next_delay(self, worker: Worker, error: Exception) -> float | None:
        if worker in self._lost:
            return None
        delay_s = self._budgets[worker].take()
        policy = self._policy
        if delay_s is None:
            self._lost.add(worker)
            error.add_note(f"It is not restarted any more: {policy.max_restarts} restarts in {policy.within_s:g} s.")
        else:
            with contextlib.suppress(Exception):  # of a handler: it must not keep the worker from coming back
                _log.warning("%s; it is restarted, %s", str(error).partition("\n")[0], self._meaning)
        return delay_s

    def hold(
        self, worker: Worker, error: WorkerDied | None, again: Callable[[], None], fail: Callable[[WorkerDied], object]
    ) -> bool:
        """Keep a request for a worker that is, or is to be, started again.

        Args:
            error: how it has died over the request; None if it has not got it: it may be alive, but not restored.
            again: sends it again; called once the worker is back.
            fail: called if it does not come back.

        Returns:
            Whether one of the two will be called; if not, the worker is there, or is not started again.
        """
        if not (worker in self._tasks if error is None else self.begin(worker, error)):
            return False
        self._held[worker].append(_Held(again, fail))
        return True

    @property
    def busy(self) -> bool:
        """Whether a worker is being started again just now."""
        return bool(self._tasks)

    def restarts(self, worker: Worker) -> bool:
        """Whether this one is."""
        return worker in self._tasks

    def forsake(self, worker: Worker) -> None:
        """Don't start this worker again."""
        self._lost.add(worker)

    async def settled(self, worker: Worker) -> None:
        """Wait until a worker is back, or given up, if it is being started again."""
        if (task := self._tasks.get(worker)) is not None:
            await asyncio.wait([task])

    async def _bring_back(self, worker: Worker, delay_s: float) -> None:
        while True:
            try:
                await asyncio.sleep(delay_s)
                if worker not in self._lost:
                    await worker.restart()
                if worker in self._lost:  # nobody wants it any more; what was being started then nobody could kill
                    await worker.put_down("nobody wanted it any more")
                    del self._tasks[worker]
                    self._give_up(worker, None)
                    return
                await self._restore_in_time(worker)
                break
            except Exception as exc:  # whatever it is: nobody may wait for ever
                await worker.put_down("what it knew could not be restored")
                another = self._next_delay(worker, exc)
                if another is None:
                    del self._tasks[worker]
                    self._give_up(worker, exc)
                    return
                delay_s = another
        del self._tasks[worker]
        for held in self._take_held(worker):
            held.again()

    async def _restore_in_time(self, worker: Worker) -> None:
        """Envs that hang where they are put back into their states must not keep whoever waits for ever."""
        limit = asyncio.timeout(worker.start_timeout_s)
        try:
            async with limit:
                await self._restore(worker)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"{worker!r} was started again, but not restored within start_timeout_s={worker.start_timeout_s}"
            raise StartTimeout(message, slots=worker.slots, pid=worker.pid, stderr=worker.stderr) from None

    def _take_held(self, worker: Worker) -> list[_Held]:
        held, self._held[worker] = self._held[worker], []
        return held

    def _give_up(self, worker: Worker, cause: Exception | None) -> None:
        for held in self._take_held(worker):
            held.fail(self._death(worker, cause))
        self._on_lost(worker, self._death(worker, cause))

    def _death(self, worker: Worker, cause: Exception | None) -> WorkerDied:
        error = worker.death()
        error.__cause__ = cause
        for note in getattr(cause, "__notes__", ()):
            error.add_note(note)
        return error

    def abandon(self) -> None:
        """Start nothing again any more, without a loop to wait on."""
        self._lost.update(self._budgets)

    async def close(self) -> None:
        """Start nothing again any more; requests that are held fail with the death of their worker."""
        tasks, self._tasks = self._tasks, {}
        self._lost.update(self._budgets)
        for task in tasks.values():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks.values())
        for worker in tasks:
            self._give_up(worker, None)
