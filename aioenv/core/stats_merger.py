"""Statistics that the envs share (`SharedRunningStats`), merged once a step without anybody having to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioenv.core.timeouts import ReplyTimeouts
from aioenv.core.worker_pool import WorkerPool
from aioenv.process.async_resource import own_task
from aioenv.process.supervisor import Worker

__all__ = ["StatsMerger"]


class StatsMerger:
    """Merges what slots have seen, in their order, whenever results are handed out and nothing else is in flight.

    So what a slot knows when it is stepped depends on steps alone, never on how fast somebody was or who had how many
    workers. In shared memory that takes no message. Statistics without it are copies in the workers; then what is new
    is fetched, merged here, and the outcome sent back, which gives the same bits.

    Args:
        worker_pool: the workers, and the statistics that their factories refer to.

    Attributes:
        timeouts: how long workers may take that have copies.
    """

    timeouts: ReplyTimeouts

    def __init__(self, worker_pool: WorkerPool) -> None:
        self._worker_pool = worker_pool
        merged = [stats for stats in worker_pool.stats if not stats.live]
        self._shared = [stats for stats in merged if stats.shared]
        self._copied = {stats.key: stats for stats in merged if not stats.shared}
        self._exchanging: asyncio.Task[None] | None = None
        self._replied: set[int] = set()  # slots that have, since the last merge: what they saw for it they see no more

    def note(self, slots: npt.NDArray[np.int64]) -> None:
        """What was asked of these slots is done."""
        self._replied.update(slots.tolist())

    async def merge(self) -> None:
        """Merge. If this is cancelled, the next one ends first what it has begun.

        Raises:
            TimeoutError: if a worker that hangs, or is stopped, holds the lock of shared memory.
            StepTimeout: if a worker does not hand out its copies in time.
        """
        for stats in self._shared:
            if not stats.closed:
                stats.merge()
        self._replied.clear()
        if not all(stats.closed for stats in self._copied.values()):
            if self._exchanging is not None and not self._exchanging.done():
                await asyncio.wait([self._exchanging])  # a merge was cancelled: what it fetched must not be lost
            self._exchanging = own_task(self._exchange())
            await asyncio.shield(self._exchanging)

    async def _exchange(self) -> None:
        workers = [member.worker for member in self._worker_pool.members]
        for taken in await self._call(workers, "take_stats"):
            for key, by_slot in taken.items():
                if key in self._copied and not self._copied[key].closed:
                    self._copied[key].put(by_slot)
        for stats in self._copied.values():
            if not stats.closed:
                stats.merge()
        await self._call(workers, "load_stats", self._states())

    async def _call(self, workers: Sequence[Worker], method: str, *args: Any) -> list[Any]:
        """What workers answer; of those that have died nothing: what they had seen is lost with them."""
        tasks = [own_task(worker.call(method, *args)) for worker in workers]
        try:
            replies = await self.timeouts.gather("merge", tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    def _states(self) -> dict[bytes, Any]:
        return {key: stats.state_dict() for key, stats in self._copied.items() if not stats.closed}

    async def catch_up(self, worker: Worker, *, resumed: bool) -> None:
        """A new process is in the place of one that died, and is about to do again what that one was doing.

        Args:
            worker: which.
            resumed: whether its slots go on where they were: then what they saw in a step that was not completed does
                not count, since they will see it again. (Of a slot that has replied since the last merge nobody knows
                what it saw in which step, and all of it stays.)
        """
        if resumed:
            again = [slot for slot in worker.slots if slot not in self._replied]
            for stats in self._shared:
                if not stats.closed:
                    stats.forget(again)
        if self._copied:
            await worker.call("load_stats", self._states())
