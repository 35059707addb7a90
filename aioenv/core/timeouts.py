"""How long to wait for replies, and what becomes of workers that take longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from aioenv.core.results import partial_result
from aioenv.errors import StepTimeout

if TYPE_CHECKING:
    from aioenv.core.requests import BatchRequest
    from aioenv.core.worker_pool import WorkerPool, WorkerSlots
    from aioenv.process.restart import Restarter
    from aioenv.process.supervisor import Worker

__all__ = ["ON_TIMEOUT", "ReplyTimeouts", "images_late"]

ON_TIMEOUT = ("raise", "kill", "restart")
# From what timeout on workers that are late are asked where they are, in seconds: with shorter ones somebody looks in
# now and then. The question interrupts what they wait for (most of it goes on waiting), so those that are to live
# are asked later.
_ASK_FROM_S, _ASK_DOOMED_FROM_S = 5.0, 1.0
# The loop may have stood still for longer than the timeout: what came meanwhile is read before anybody is called late.
_TURNS = 3


class ImageSources(Protocol):
    """What there is to know of `rendering.LatePool` for those who wait for it."""

    replaced: int

    @property
    def recovering(self) -> list[Worker]:
        """Render workers that are being started again."""

    @property
    def owing(self) -> list[Worker]:
        """Render workers that have something to draw, or are being started again."""


def images_late(what: str, pools: Sequence[ImageSources], timeout_s: float | None) -> StepTimeout:
    """The error that images are not there in time."""
    owing = [f"{worker.index} (pid {worker.pid}, {worker.state.value})" for pool in pools for worker in pool.owing]
    who = f": render workers {', '.join(owing)} owe some" if owing else ""
    return StepTimeout(
        f"{what}: not all images were drawn within timeout_s={timeout_s}{who}; ask again for what is late. One that "
        "finishes nothing for timeout_s is replaced if restart=aioenv.RestartPolicy(...) was given"
    )


class ReplyTimeouts:
    """Waits for replies.

    Args:
        worker_pool: the workers.
        timeout_s: how long any wait may last, in seconds, where nobody says otherwise; None for ever.
        on_timeout: one of `ON_TIMEOUT`: raise a StepTimeout; or kill the workers that owe replies, for good or to
            have them started again, and wait on for what their slots report then.
        restarter: who starts them again; None if nobody does.

    Attributes:
        pools: what draws images.
    """

    def __init__(
        self, worker_pool: WorkerPool, timeout_s: float | None, on_timeout: str, restarter: Restarter | None
    ) -> None:
        self._worker_pool = worker_pool
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._restarter = restarter
        self.pools: Sequence[ImageSources] = ()

    def limit(self, timeout_s: float | None) -> float | None:
        """How long a wait may last, in seconds, of which this was said; None for ever."""
        return self._timeout_s if timeout_s is None else timeout_s

    def wait_for(
        self, request: BatchRequest, timeout_s: float | None = None, *, shielded: bool = False
    ) -> Awaitable[None]:
        """Wait for all replies of an request.

        Args:
            request: if this is cancelled, its future is too, unless `shielded`: then it is not what the caller asked
                for, and no part of it is told.
            timeout_s: instead of the one for all waits.

        Raises:
            StepTimeout: if they don't come in time, and that is the policy.
        """
        if timeout_s is None:
            timeout_s = self._timeout_s  # as `limit`: on the path of every step a call less
        if timeout_s is None:
            return asyncio.shield(request.done) if shielded else request.done
        return self._wait(partial(asyncio.shield, request.done), timeout_s, request, told=not shielded)

    async def wait(self, begin: Callable[[], Awaitable[object]]) -> None:
        """Wait for what `begin` gives; it is called again after workers were killed. Raises as `wait_for`."""
        if self._timeout_s is None:
            await begin()
        else:
            await self._wait(begin, self._timeout_s, None)

    async def wait_for_images(self, what: str, drawn: Callable[[], Awaitable[object]]) -> None:
        """Wait until images are drawn. Render workers that hang the pool itself replaces (see `StepRenderPool`).

        Args:
            what: the user's call, for errors.
            drawn: gives what to wait for; called again where that goes on after render workers were killed.

        Raises:
            StepTimeout: if that takes too long.
        """
        nobody, killed = False, self._killed
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await drawn()
                return
            except TimeoutError:
                before, nobody, killed = nobody, self._draws_on(killed), self._killed
                # twice: one that has finished something just now may hang since
                if self._on_timeout == "raise" or not self.pools or (before and nobody):
                    raise self._images_late(what) from None

    def _draws_on(self, killed: int) -> bool:
        """Whether no render worker was killed since so many were, and none is being started again."""
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
        """How many render workers were killed for being late."""
        return sum(pool.replaced for pool in self.pools)

    async def wait_for_restarts(self, what: str, members: Sequence[WorkerSlots]) -> None:
        """Wait for those of these workers that are being started again, so that they can be called.

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

    async def gather(self, what: str, replies: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """Wait for the replies to a call: each reply, or its exception. Workers that owe one are never killed.

        Raises:
            StepTimeout: if they don't come in time: they are dropped then.
        """
        everything = asyncio.gather(*replies, return_exceptions=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await everything
        except TimeoutError:
            if all(reply.done() and not reply.cancelled() for reply in replies):  # as in `_wait`
                return [reply.exception() or reply.result() for reply in replies]
            slots, running, who = self._describe(late := self._late())
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
        told: bool = False,
    ) -> None:
        nobody, killed, come = False, self._killed, False
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
                if not late and not come and not any(pool.owing for pool in self.pools):
                    come = True  # all is there: it was the loop that stood still
                    continue
                # twice: the last reply may have come just now
                if self._on_timeout == "raise" or (nobody and not late):
                    error = self._timed_out(late, timeout_s, request if told else None)
                    await self._ask_where(late, timeout_s, error)
                    raise error from None
                nobody, killed = not late and self._draws_on(killed), self._killed
                await self._ask_where(late, timeout_s)  # it is in what they have printed then
                for member in self._late(request):  # not if its reply has come while it was asked
                    if member not in late or self._restarts(member):  # which has a limit of its own
                        continue
                    if self._on_timeout == "kill" and self._restarter is not None:
                        self._restarter.disable_restart(member.worker)
                    member.worker.kill(f"no reply within timeout_s={timeout_s}")

    async def _ask_where(
        self, late: list[WorkerSlots], timeout_s: float | None, error: StepTimeout | None = None
    ) -> None:
        """Have workers that are late say where they are, and note it."""
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

    def _late(self, request: BatchRequest | None = None) -> list[WorkerSlots]:
        """Those that owe a reply, to an request if it is one that is waited for, or can't give one yet."""
        members = self._worker_pool.members
        if request is not None:
            members = [part.member for part in request.parts if not part.arrived]
        return [member for member in members if member.worker.busy or self._restarts(member)]

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
        """The slots of workers that owe a reply, those whose envs are being run, and both in words."""
        if not late:  # images that are observations
            return (), (), "render workers, though every env has replied,"
        slots = tuple(slot for member in late for slot in member.worker.slots)
        alive = [member for member in late if not self._restarts(member)]
        running = tuple(slot for member in alive if (slot := member.worker.running_slot) is not None)
        hint = f" (running just now: {list(running)})" if running else ""
        if not alive:
            hint = f" (whose worker{'s are' if len(late) > 1 else ' is'} being started again)"
        return slots, running, f"slots {list(slots)}{hint}"
