"""Waits for replies and images, with a limit, and what happens to workers that exceed it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from aioenv.core.results import partial_result
from aioenv.errors import StepTimeout

if TYPE_CHECKING:
    from aioenv.core.requests import BatchRequest
    from aioenv.core.slots import SlotTable
    from aioenv.core.worker_pool import WorkerPool, WorkerSlots
    from aioenv.process.restart import Restarter
    from aioenv.rendering.step_pool import StepRenderPool

__all__ = ["ON_TIMEOUT", "ReplyTimeouts", "images_late"]

ON_TIMEOUT = ("raise", "kill", "restart")
# Late workers are asked for their tracebacks if the timeout is at least so long, in seconds. Callers with shorter ones
# only poll. The question is a signal, which interrupts system calls (most of them go on), so the limit is higher for
# workers that are not to be killed.
_ASK_FROM_S, _ASK_DOOMED_FROM_S = 5.0, 1.0
# The loop may have been blocked for longer than the timeout: replies that have come are read before a worker is late.
_TURNS = 3


def images_late(what: str, pools: Sequence[StepRenderPool], timeout_s: float | None) -> StepTimeout:
    """Make the error for images that are not drawn in time."""
    owing = [f"{worker.index} (pid {worker.pid}, {worker.state.value})" for pool in pools for worker in pool.owing]
    who = f": render workers {', '.join(owing)} owe some" if owing else ""
    return StepTimeout(
        f"{what}: not all images were drawn within timeout_s={timeout_s}{who}; ask again for the others. A render "
        "worker that finishes nothing for timeout_s is replaced if restart=aioenv.RestartPolicy(...) was given"
    )


class ReplyTimeouts:
    """Waits for replies.

    Args:
        worker_pool: the workers.
        timeout_s: how long a wait may last if it has no limit of its own, in seconds; None for no limit.
        on_timeout: one of `ON_TIMEOUT`: raise a StepTimeout, or kill the workers that owe replies, with or without a
            restart. After a kill the wait goes on, for the errors or results of their slots.
        restarter: starts workers again; None if none are.
        table: the states of the slots.

    Attributes:
        pools: the pools that draw images.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        timeout_s: float | None,
        on_timeout: str,
        restarter: Restarter | None,
        table: SlotTable,
    ) -> None:
        self._worker_pool = worker_pool
        self._table = table
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._restarter = restarter
        self.pools: Sequence[StepRenderPool] = ()

    def limit(self, timeout_s: float | None) -> float | None:
        """Return the limit of a wait that was given this one, in seconds; None for no limit."""
        return self._timeout_s if timeout_s is None else timeout_s

    def wait_for(
        self, request: BatchRequest, timeout_s: float | None = None, *, shielded: bool = False
    ) -> Awaitable[None]:
        """Wait for all replies to a request.

        Args:
            request: the request. If the wait is cancelled, its future is too.
            timeout_s: in place of the limit of all waits.
            shielded: for a request that the caller cancelled earlier: don't cancel its future again, and attach no
                partial result to a StepTimeout.

        Raises:
            StepTimeout: if they don't come in time, and that is the policy.
        """
        if timeout_s is None:
            timeout_s = self._timeout_s  # as `limit`, without a call in every step
        if timeout_s is None:
            return asyncio.shield(request.done) if shielded else request.done
        return self._wait(partial(asyncio.shield, request.done), timeout_s, request, attach_partial=not shielded)

    async def wait(self, begin: Callable[[], Awaitable[object]]) -> None:
        """Wait for results of slots that are in flight.

        Args:
            begin: makes the awaitable to wait for; called again after workers were killed.

        Raises:
            StepTimeout: as `wait_for`.
        """
        if self._timeout_s is None:
            await begin()
        else:
            await self._wait(begin, self._timeout_s, None)

    async def wait_for_images(self, what: str, drawn: Callable[[], Awaitable[object]]) -> None:
        """Wait until images are drawn. The pool itself replaces render workers that hang (see `StepRenderPool`).

        Args:
            what: the user's call, for errors.
            drawn: makes the awaitable to wait for; called again after render workers were killed.

        Raises:
            StepTimeout: if that takes too long.
        """
        idle, killed = False, self._killed
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await drawn()
                return
            except TimeoutError:
                before, idle, killed = idle, self._draws_on(killed), self._killed
                # twice: a render worker that has just finished an image may hang in the next one
                if self._on_timeout == "raise" or not self.pools or (before and idle):
                    raise self._images_late(what) from None

    def _draws_on(self, killed: int) -> bool:
        """Return whether no more render workers were killed than so many, and none is being started again."""
        return self._killed == killed and not any(pool.recovering for pool in self.pools)

    def _images_late(self, what: str) -> StepTimeout:
        if self.pools:
            return images_late(what, self.pools, self._timeout_s)
        running = tuple(s for m in self._worker_pool.members if (s := m.worker.running_slot) is not None)
        hint = f" (running just now: slots {list(running)})" if running else ""
        message = f"{what}: not all images were drawn within timeout_s={self._timeout_s}{hint}"
        return StepTimeout(message, slots=running, running=running)

    @property
    def _killed(self) -> int:
        """The number of render workers that were killed because they were late."""
        return sum(pool.replaced for pool in self.pools)

    async def wait_for_restarts(self, what: str, members: Sequence[WorkerSlots]) -> None:
        """Wait until none of these workers is being started again, so that they can be called.

        Raises:
            StepTimeout: if that takes too long, and that is the policy.
        """
        if self._restarter is None or not any(map(self._restarts, members)):
            return
        try:
            async with asyncio.timeout(self._timeout_s if self._on_timeout == "raise" else None):
                for member in members:
                    await self._restarter.wait_restarted(member.worker)
        except TimeoutError:
            slots, running, who = self._describe([member for member in members if self._restarts(member)])
            message = f"{what}: no reply from {who} within timeout_s={self._timeout_s}; nothing was sent"
            raise StepTimeout(message, slots=slots, running=running) from None

    async def gather(
        self, what: str, replies: Sequence[asyncio.Future[Any]], asked: Sequence[WorkerSlots] | None = None
    ) -> list[Any]:
        """Wait for the replies to a call, and return each reply or its exception. No worker is killed for it.

        Args:
            what: the user's call, for errors.
            replies: futures of them.
            asked: the worker of each; None: some of those whose envs run the episodes.

        Raises:
            StepTimeout: if they don't come in time; later ones are dropped.
        """
        everything = asyncio.gather(*replies, return_exceptions=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await everything
        except TimeoutError:
            if all(reply.done() and not reply.cancelled() for reply in replies):  # as in `_wait`
                return [reply.exception() or reply.result() for reply in replies]
            if asked is None:
                late = [member for member in self._worker_pool.members if self._is_late(member)]
            else:
                late = [member for member, reply in zip(asked, replies, strict=True) if reply.cancelled()]
            slots, running, who = self._describe(late)
            error = StepTimeout(
                f"{what}: no reply from {who} within timeout_s={self._timeout_s}; the envs go on with it, but the "
                "results are dropped",
                slots=slots,
                running=running,
            )
            await self._ask_where(late, self._timeout_s, error)
            raise error from None

    async def _wait(
        self,
        begin: Callable[[], Awaitable[object]],
        timeout_s: float,
        request: BatchRequest | None,
        *,
        attach_partial: bool = False,
    ) -> None:
        idle, killed, extended = False, self._killed, False
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await begin()
                return
            except TimeoutError:
                for member in self._worker_pool.members:
                    member.worker.enable_reader()
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                late = self._late(request)
                if not late and not extended and not any(pool.owing for pool in self.pools):
                    extended = True  # all replies are in: the loop was blocked
                    continue
                # twice: the last reply may just have come
                if self._on_timeout == "raise" or (idle and not late):
                    error = self._timed_out(late, timeout_s, request if attach_partial else None)
                    await self._ask_where(late, timeout_s, error)
                    raise error from None
                idle, killed = not late and self._draws_on(killed), self._killed
                await self._ask_where(late, timeout_s)  # their tracebacks are in their last lines of stderr then
                for member in self._late(request):  # unless its reply has come meanwhile
                    if member not in late or self._restarts(member):  # a restart has a limit of its own
                        continue
                    if self._on_timeout == "kill" and self._restarter is not None:
                        self._restarter.disable_restart(member.worker)
                    member.worker.kill(f"no reply within timeout_s={timeout_s}")

    async def _ask_where(
        self, late: list[WorkerSlots], timeout_s: float | None, error: StepTimeout | None = None
    ) -> None:
        """Ask workers that are late for their tracebacks, and add them to the error as notes."""
        if timeout_s is None or timeout_s < (_ASK_DOOMED_FROM_S if error is None else _ASK_FROM_S):
            return
        workers = [member.worker for member in late]
        for worker, frames in zip(
            workers, await asyncio.gather(*(worker.current_stack() for worker in workers)), strict=True
        ):
            if frames and error is not None:
                slot = worker.running_slot
                who = f"worker {worker.index} (pid {worker.pid})" if slot is None else f"slot {slot} (pid {worker.pid})"
                error.add_note(f"Where {who} is, the innermost call first:\n{frames}")

    def _restarts(self, member: WorkerSlots) -> bool:
        return self._restarter is not None and self._restarter.is_restarting(member.worker)

    def _is_late(self, member: WorkerSlots) -> bool:
        """Return whether a worker owes a reply, or is being started again."""
        return member.worker.busy or self._restarts(member)

    def _late(self, request: BatchRequest | None) -> list[WorkerSlots]:
        """Return the late workers of those that have not answered a request; None: of those with slots in flight."""
        if request is not None:
            members = [part.member for part in request.parts if not part.arrived]
        else:  # the others may have a call to answer, for which no worker is killed
            members = [m for m in self._worker_pool.members if self._table.in_flight(slice(m.start, m.stop))]
        return [member for member in members if self._is_late(member)]

    def _timed_out(self, late: list[WorkerSlots], timeout_s: float, request: BatchRequest | None) -> StepTimeout:
        slots, running, who = self._describe(late)
        error = StepTimeout(
            f"no reply from {who} within timeout_s={timeout_s}; nothing is lost: recv() takes the "
            "result when it is there, and a later step() or reset() waits for it and drops it",
            slots=slots,
            running=running,
        )
        if request is not None:
            error.partial = partial_result(self._worker_pool.observations, request)
        return error

    def _describe(self, late: list[WorkerSlots]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Return the slots of workers that owe a reply, those whose envs are running, and a text that names both."""
        if not late:  # observations that are images are missing
            return (), (), "render workers, though every env has replied,"
        # each once: both envs of a slot may be late
        slots = tuple(dict.fromkeys(slot for member in late for slot in member.worker.slots))
        alive = [member for member in late if not self._restarts(member)]
        running = tuple(dict.fromkeys(slot for m in alive if (slot := m.worker.running_slot) is not None))
        hint = f" (running just now: {list(running)})" if running else ""
        if not alive:
            hint = f" (whose worker{'s are' if len(late) > 1 else ' is'} being started again)"
        return slots, running, f"slots {list(slots)}{hint}"
