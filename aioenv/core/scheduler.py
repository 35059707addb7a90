"""The heart: requests go out to workers, replies come into batches, and results go to who waits for them.

Whole batches are here; what is asked of some slots, and taken by whoever is first, in `some_slots.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import getitem
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from aioenv.core.dispatcher import Dispatcher
from aioenv.core.payloads import reset_tail, step_tail
from aioenv.core.pixel_renderer import PixelRenderer
from aioenv.core.requests import BatchRequest, BatchRequestPool, SentRequest
from aioenv.core.results import ResetResult, SlotStep, StepResult
from aioenv.core.slots import SlotState, SlotTable
from aioenv.core.some_slots import Seeds, SomeSlots
from aioenv.core.timeouts import ReplyTimeouts
from aioenv.core.worker_calls import call_workers
from aioenv.core.worker_pool import WorkerPool, WorkerSlots
from aioenv.errors import NoAsyncCallError, SlotError, StaleViewWarning, warn_caller
from aioenv.ipc.frames import Kind, new_tuple
from aioenv.process.restart import RestartPolicy
from aioenv.rendering.step_images import StepImages
from aioenv.spaces.infos import Columns, merge_infos
from aioenv.spaces.layout import byte_view
from aioenv.spaces.seeding import is_seed_list

__all__ = ["RequestScheduler"]

_log = logging.getLogger("aioenv")

# Steps whose replies come while we poll don't wait for the loop; others have their turn at least so often, in seconds.
_TURN_S = 200e-6
_STALE = (
    "with copy=False results are valid until the second next step, which is now; an array of one, or a view of it, is "
    "still in use: copy what you keep, or let copy be True"
)

Result = TypeVar("Result", StepResult, ResetResult, SlotStep)


class RequestScheduler(SomeSlots):
    """Steps and resets of a started fleet.

    Args:
        fleet: started and configured workers.
        images: where states and late renders go; None if nobody wants images.
        state_size: how many float64 of physics state come with each row.
        mode: the autoreset mode.
        must_reset: whether a slot whose episode is over may not be stepped.
        copy: whether results are new arrays, or views into two batches that are used in turn.
        timeout_s: how long any wait for replies may last, in seconds; None for ever.
        on_timeout: what becomes of workers that let it pass: "raise", "kill" or "restart".
        restart: whether and how workers that died are started again.
        painter: draws the images of observations, if there are any and the workers don't.

    Attributes:
        num_envs: how many slots there are.
        table: their states.
        images, loop: as given, and the one that runs.
        dispatch: sends requests and takes in replies.
        patience: waits for them.
        restarter: who starts workers again; None if nobody does. history: what they go on from.
        episodes: counts episodes; None: nobody does.
        merge_infos: makes one info dict of the columns of a batch, of so many rows.
        needs_replies_only: whether a step ever needs more of the loop than the workers' replies.
    """

    def __init__(
        self,
        fleet: WorkerPool,
        images: StepImages | None,
        *,
        state_size: int,
        mode: AutoresetMode,
        must_reset: bool,
        copy: bool,
        timeout_s: float | None,
        on_timeout: str = "raise",
        restart: RestartPolicy | None = None,
        painter: PixelRenderer | None = None,
    ) -> None:
        self.fleet = fleet
        self.images = images
        self.num_envs = fleet.members[-1].stop
        self.loop = asyncio.get_running_loop()
        self._copy = copy
        self._abandoned = []
        self._ready = []
        self._arrival = asyncio.Event()
        self._wanted = []
        self.closing = False
        self.merge_infos = merge_infos
        self._all_slots = np.arange(self.num_envs)
        self._must_reset = must_reset
        self._last_turn = 0.0  # when the loop could last do something else, by `perf_counter`
        self.table = SlotTable(self.num_envs, must_reset=must_reset)
        self.dispatch = Dispatcher(
            fleet,
            images,
            self.table,
            state_size=state_size,
            mode=mode,
            restart=restart,
            painter=painter,
            offer=self._offer,
        )
        self.history = self.dispatch.history
        self.restarter = self.dispatch.restarter
        self.episodes = self.dispatch.episodes
        self.merger = self.dispatch.merger
        waitable = all(member.worker.waitable is not None for member in fleet.members)
        self.needs_replies_only = waitable and not (images or painter or self.merger)
        self._cuts = _cuts(fleet, self.dispatch.shared_actions)
        self._exchanges = BatchRequestPool(self.dispatch.whole, in_turn=not copy)
        self.patience = ReplyTimeouts(fleet, timeout_s, on_timeout, self.restarter)
        if self.merger is not None:
            self.merger.patience = self.patience
        self._next = self._prepare()

    # ------------------------------------------------------------ whole batches

    async def step(self, actions: Any, *, given: bool = False, timeout_s: float | None = None) -> StepResult:
        """Step all slots (see `AsyncVectorEnv.step`).

        Args:
            actions: a batch of actions.
            given: `actions` is a list of one action a slot instead, which its env gets as it is.
            timeout_s: instead of the one for all calls.
        """
        exchange = await self.send_step(actions, given=given, timeout_s=timeout_s)
        return await self.outcome(exchange, self._step_result, timeout_s)

    async def send_step(self, actions: Any, *, given: bool = False, timeout_s: float | None = None) -> BatchRequest:
        """Send a step, once what was abandoned is drained; otherwise as `begin_step`."""
        taken = self._take_apart(actions, given)
        if self._abandoned:
            await self.drain(timeout_s)
        return self._send_step(*taken)

    def begin_step(self, actions: Any, *, given: bool = False) -> BatchRequest:
        """Send a step of all slots, if `steps_here`; `step_outcome` or `step_result` gives what comes of it.

        Args, Raises: as `step`.
        """
        return self._send_step(*self._take_apart(actions, given))

    @property
    def steps_here(self) -> bool:
        """Whether a step needs no more of the loop now."""
        return self.needs_replies_only and not (self._abandoned or self.closing or self.table.paused is not None)

    async def step_outcome(self, exchange: BatchRequest, timeout_s: float | None) -> StepResult:
        """Wait for a step that was sent; otherwise as `step`."""
        return await self.outcome(exchange, self._step_result, timeout_s)

    def step_result(self, exchange: BatchRequest) -> StepResult:
        """What has come of a step that was begun here, all of whose replies are in; raises as `step`."""
        return self._hand_out(exchange, self._step_result)

    def _take_apart(self, actions: Any, given: bool) -> tuple[list[npt.NDArray[Any]], list[bytes] | None]:
        """The arrays of a batch of actions, and what else each worker gets; None if that is nothing."""
        arrays, objects = ([], []) if given else self.fleet.actions.take_apart(actions, self.num_envs)
        if not given and not objects:
            return arrays, None
        return arrays, [self._tail_of(member, objects, actions if given else None) for member in self.fleet.members]

    def _send_step(self, arrays: Sequence[npt.NDArray[Any]], tails: Sequence[bytes] | None) -> BatchRequest:
        self.table.check_send(slice(None), "step", reset=False)
        shared = self.dispatch.shared_actions if arrays else ()
        framed = arrays if not shared else [array for i, array in enumerate(arrays) if i not in shared]
        views = list(map(byte_view, framed))
        exchange = self._next
        try:
            self._begin_whole(exchange, stepped=True)
            if tails is None and not shared:
                self.dispatch.submit_steps(exchange, views, self._cuts)
            else:
                for index, part in enumerate(exchange.parts):
                    fixed: Any = list(map(getitem, views, self._cuts[index]))
                    placed = {i: arrays[i][part.start : part.stop] for i in shared} if shared else None
                    tail = tails[index] if tails is not None else b""
                    self.dispatch.submit(exchange, part, SentRequest(Kind.STEP, fixed, tail, part.slots, placed))
            self._next = self._prepare()
        except BaseException:
            self._interrupted(exchange)
            raise
        return exchange

    def _interrupted(self, exchange: BatchRequest) -> None:
        """Ctrl-C, most of all, came while a whole batch was being sent."""
        if self._next is exchange:
            self._next = self._prepare()
        self.take_back(exchange)

    def _tail_of(self, member: WorkerSlots, objects: Sequence[Sequence[Any]], given: Any) -> bytes:
        mine = slice(member.start, member.stop)
        return step_tail(
            None, [column[mine] for column in objects], None if given is None else given[mine], self.fleet.definitions
        )

    async def reset(
        self,
        seed: int | Seeds | None,
        mask: npt.NDArray[np.bool_] | None,
        options: dict[str, Any] | None,
        timeout_s: float | None = None,
    ) -> ResetResult:
        """Reset all slots, or those of a mask; the others keep their last observations."""
        seeds = self.fleet.seeds(seed, self._all_slots, anew=mask is None)
        if self._abandoned:
            await self.drain(timeout_s)
        slots = self._all_slots if mask is None else np.flatnonzero(mask)
        self.table.check_send(slice(None), "reset", reset=True)
        requests = []
        for member in self.fleet.members:
            mine = slots[(slots >= member.start) & (slots < member.stop)]
            chosen = mine.tolist()
            own = [seeds[slot] for slot in chosen]
            tail = reset_tail(member, chosen, own, options, whole=True, each=is_seed_list(seed))
            requests.append(SentRequest(Kind.RESET, (), tail, mine))
        exchange = self._next
        try:
            self._begin_whole(exchange, stepped=False)
            self.note_reset(slots, {slot: seeds[slot] for slot in slots.tolist()})
            for part, sent in zip(exchange.parts, requests, strict=True):
                self.dispatch.submit(exchange, part, sent)
            self._next = self._prepare()
        except BaseException:
            self._interrupted(exchange)
            raise
        return await self.outcome(exchange, self._reset_result, timeout_s)

    def _prepare(self) -> BatchRequest:
        """The next exchange: made ready while the workers are busy, rather than when they wait for it."""
        exchange = self._exchanges.take()
        exchange.begin(stepped=True, waiting=True)
        return exchange

    def _begin_whole(self, exchange: BatchRequest, *, stepped: bool) -> None:
        exchange.stepped = stepped
        if not self._copy and self.loop.get_debug() and not exchange.batch.unused:
            warn_caller(_STALE, StaleViewWarning)
        self.table.move(slice(None), SlotState.IN_FLIGHT)
        if self.images is not None:
            exchange.images = self.images.new_request(self._all_slots)

    async def outcome(
        self, exchange: BatchRequest, result: Callable[[BatchRequest], Result], timeout_s: float | None
    ) -> Result:
        """Wait for all replies, and hand out what `result` makes of them.

        A cancellation or timeout leaves them to `recv`.

        Raises:
            ClosedError: if the vector env was closed meanwhile.
            StepTimeout: if `timeout_s` passed.
            SlotError: if something went wrong in some slots; the result is its `partial`.
        """
        try:
            if self.dispatch.spares_cpu:
                if perf_counter() - self._last_turn > _TURN_S:
                    self._last_turn = perf_counter()
                    await asyncio.sleep(0)
                self.dispatch.poll(exchange)
            if exchange.open:
                await self.patience.wait_for(exchange, timeout_s)
                self._last_turn = perf_counter()
            if self.merger is not None and not self.closing:
                await self._merge(self.merger, len(exchange.batch.reward))
        except BaseException:
            self.abandon(exchange)
            raise
        return self._hand_out(exchange, result)

    def _hand_out(self, exchange: BatchRequest, result: Callable[[BatchRequest], Result]) -> Result:
        self.check_open()
        try:
            value = result(exchange)
        except BaseException:  # Ctrl-C: what came is lost, not the slots
            self.free_slots(exchange.slots)
            raise
        finally:
            exchange.idle = True
        for part in exchange.parts:
            if part.errors:
                raise SlotError.join(exchange.errors(), value)
        return value

    def _step_result(self, exchange: BatchRequest) -> StepResult:
        batch = exchange.batch
        self._settle(exchange)
        obs, info = self._assemble(exchange), self._infos(exchange)
        return new_tuple(StepResult, (obs, batch.reward, batch.terminated, batch.truncated, info))

    def _reset_result(self, exchange: BatchRequest) -> ResetResult:
        self._settle(exchange)
        return ResetResult(self._assemble(exchange), self._infos(exchange))

    def _assemble(self, exchange: BatchRequest) -> Any:
        layout = self.fleet.observations
        if not layout.num_objects:
            return layout.assemble(exchange.batch.obs, ())
        objects: list[list[Any]] = layout.no_objects(self.num_envs)
        for part in exchange.parts:
            for column, items in zip(objects, part.objects, strict=False):
                column[part.start : part.stop] = items
        return layout.assemble(exchange.batch.obs, objects)

    def _infos(self, exchange: BatchRequest) -> dict[str, Any]:
        columns: list[Columns] = []
        for part in exchange.parts:
            columns += part.columns
        return self.merge_infos(columns, self.num_envs) if columns else {}

    def _settle(self, exchange: BatchRequest) -> None:
        """All replies are in and about to be handed out: the slots are free again, or failed."""
        self.free_slots(slice(None))
        if exchange.stepped and self._must_reset:
            self.table.note_ends(slice(None), exchange.batch.terminated | exchange.batch.truncated)
        for part in exchange.parts:
            for error in part.errors:
                self.table.fail(error)
        if exchange.images is not None and self.images is not None:
            self.images.set_current(exchange.images, self._all_slots)
            self.images.end_result()
            exchange.images = None  # or they would be kept until it is used again

    async def for_each(self, slots: Iterable[int] | None, what: str, method: str, arguments: Any) -> tuple[Any, ...]:
        """Call a method of the workers' services for some slots (see `call_workers`)."""
        return await call_workers(self, slots, what, method, arguments)

    def close(self) -> None:
        """The workers are about to be closed: whoever waits gets a ClosedError when they are gone."""
        self.closing = True

    def free(self) -> None:
        """The workers are gone: let go of the memory that they wrote into."""
        self._exchanges.clear()
        self.dispatch.forget()
        self._abandoned.clear()
        self._ready.clear()
        self._arrival.set()
        del self._next

    # ------------------------------------------------------------ what nobody waits for any more

    def abandon(self, exchange: BatchRequest) -> None:
        """Nobody awaits this step any more; its parts become ready for `recv`, one by one."""
        if exchange.done.cancelled():
            exchange.done = self.loop.create_future()
            if exchange.open == 0:
                exchange.done.set_result(None)
        for part in exchange.parts:
            part.member.worker.abandon_requests()
        self.leave(exchange)

    def take_back(self, exchange: BatchRequest) -> None:
        """Something was raised while this was being sent: who was asked is abandoned, who was not is free again."""
        self.abandon(exchange)
        self._free_unasked(exchange)

    def leave(self, exchange: BatchRequest) -> None:
        """Nobody awaits this step for now: it is as if abandoned, but may be taken up again."""
        self.dispatch.listen()
        exchange.waiting = False
        self._abandoned.append(exchange)
        for part in exchange.parts:
            if part.arrived:
                self._offer(exchange, part)

    def take_up(self, exchange: BatchRequest, done: asyncio.Future[None]) -> None:
        """Somebody awaits a step that was left, and had this future then.

        Raises:
            NoAsyncCallError: if `recv` has taken some of it, or another call has dropped it.
        """
        whole = all(part.untaken is None or len(part.untaken) == len(part.slots) for part in exchange.parts)
        if exchange.done is not done or exchange not in self._abandoned or not whole:
            raise NoAsyncCallError(
                "the result of this step was taken by recv(), or dropped by a later call, be it of another thread: "
                "where several threads use one vector env, they take turns, with a lock (threading.Lock)",
                "step",
            )
        self._abandoned.remove(exchange)
        self._ready = [(e, p) for e, p in self._ready if e is not exchange]
        for part in exchange.parts:
            if part.untaken is not None:
                part.untaken = None
                self.table.move(part.slots, SlotState.IN_FLIGHT)
        exchange.waiting = True

    async def drain(self, timeout_s: float | None = None) -> None:
        """Wait for the replies of abandoned exchanges, then drop what nobody took of them.

        Args:
            timeout_s: instead of the one for all waits.

        Raises:
            StepTimeout: if they don't come in time, and that is the policy.
            ClosedError: if the vector env was closed meanwhile.
        """
        # looked up anew each time: other tasks take and abandon some meanwhile
        while (exchange := next((one for one in self._abandoned if one.open), None)) is not None:
            await self.patience.wait_for(exchange, timeout_s, shielded=True)
        self.check_open()
        abandoned, self._abandoned = self._abandoned, []
        for exchange in abandoned:
            exchange.idle = True
        dropped = [(e, p) for e, p in self._ready if e in abandoned]
        self._ready = [(e, p) for e, p in self._ready if e not in abandoned]
        ended: list[int] = []
        if dropped:
            self._arrival.set()
        for exchange, part in dropped:
            assert part.untaken is not None
            left = part.slots[part.untaken]
            self.table.move(left, SlotState.IDLE)
            ends = exchange.batch.terminated[part.start : part.stop] | exchange.batch.truncated[part.start : part.stop]
            ended += left[ends[part.untaken]].tolist()
            # what was taken may have been reset since
            self.table.note_ends(left, ends[part.untaken])
            for error in part.errors:
                if still := tuple(slot for slot in error.slots if slot in left):
                    error.concern(still)
                    self.table.fail(error)
            self.table.note_taken(left)
        if ended:
            _log.warning(
                "the result of a cancelled or timed-out step was dropped, and with it the ends of the episodes in "
                "slots %s; recv() would have taken it",
                sorted(ended),
            )
        if abandoned and self.merger is not None:  # what was seen in what is dropped was seen all the same
            await self._merge(self.merger, 0)


def _cuts(fleet: WorkerPool, shared: Sequence[int]) -> list[list[slice]]:
    """By worker, and by leaf that is not in shared memory: the bytes of a batch of actions that are the worker's."""
    sizes = [prod(leaf.shape) * leaf.dtype.itemsize for i, leaf in enumerate(fleet.actions.leaves) if i not in shared]
    return [[slice(m.start * size, m.stop * size) for size in sizes] for m in fleet.members]
