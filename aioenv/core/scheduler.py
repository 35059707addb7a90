"""The backend over worker processes: sends requests, waits for the replies, and hands out results.

`step` and `reset` ask all slots and await the whole batch; `send` asks some slots, whose results `recv` takes as they
come. Both are requests of a group of slots (`groups.py`), which the dispatcher sends to the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from aioenv.core.dispatcher import Dispatcher
from aioenv.core.groups import ActiveSlots, RememberedState, SingleSlots, WorkerGroup, WorkerRolloutBackend
from aioenv.core.images import PixelRenderer
from aioenv.core.inline_steps import InlineSteps
from aioenv.core.requests import BatchRequest, SentRequest, WorkerRequest, reset_payload
from aioenv.core.results import Ready, ResetResult, StepResult, collect_ready
from aioenv.core.service_calls import StatsMerger, call_workers
from aioenv.core.slots import SlotState, SlotTable
from aioenv.core.timeouts import ReplyTimeouts
from aioenv.core.worker_pool import WorkerPool
from aioenv.errors import ClosedError, NoAsyncCallError, SlotError, StaleViewWarning, StepTimeout, warn_caller
from aioenv.ipc.frames import Kind, new_tuple
from aioenv.process.env_thread import YIELD_AFTER_S, yield_to_loop
from aioenv.process.restart_policy import RestartPolicy
from aioenv.process.supervisor import ACCEPTS_REQUESTS
from aioenv.rendering.step_images import StepImages
from aioenv.spaces.infos import merge_infos
from aioenv.spaces.layout import COPIED
from aioenv.spaces.seeding import is_seed_list
from aioenv.worker.vector_access import refuse_some

if TYPE_CHECKING:
    from aioenv.core.backend import ResultObserver
    from aioenv.core.episode_tracker import EpisodeTracker
    from aioenv.core.recovery import SlotHistory
    from aioenv.core.spares import SpareEnvs
    from aioenv.process.restart import Restarter
    from aioenv.tracing.timeline import Trace

__all__ = ["RequestScheduler", "Seeds"]

_log = logging.getLogger("aioenv")

# Steps whose replies come while we poll don't wait for the loop; other tasks have their turn at least so often, in
# seconds.
_TURN_S = 200e-6
_STALE = (
    "with copy=False results are valid until the second next step, which is now; an array of one, or a view of it, is "
    "still in use: copy what you keep, or let copy be True"
)

Slots = npt.NDArray[np.int64]
Seeds = Sequence[int | None]
Result = TypeVar("Result")


class RequestScheduler:
    """Steps and resets the envs of started workers (see `Backend`).

    Args:
        worker_pool: started and configured workers.
        images: takes states and images; None if no images are drawn.
        state_size: float64 numbers of physics state that come with each row.
        mode: the autoreset mode.
        must_reset: whether a slot whose episode has ended must be reset before it is stepped.
        copy: whether results are new arrays, or views into two batches that are used in turn.
        timeout_s: how long any wait for replies may last, in seconds; None for no limit.
        on_timeout: what happens to workers that exceed it: "raise", "kill" or "restart".
        restart: whether and how workers that died are started again.
        pixel_renderer: draws observations that are images; None if there are none, or the workers draw them.

    Attributes:
        num_envs: the number of slots.
        table: the states of the slots.
        worker_pool, images, copy: as given.
        loop: the running event loop.
        actions, observations, single_action_space: see `Backend`.
        dispatcher: sends requests and reads replies.
        timeouts: waits for replies.
        restarter: starts workers again; None if none are. history: the data from which they go on.
        episodes: counts episodes; None if they are not counted.
        merge_infos: makes one info dict of the columns of a batch, and the number of its rows.
        needs_replies_only: whether a step needs nothing of the loop but the workers' replies.
        remembered: the state in which the last rollout left the slots.
        closing: whether the vector env was closed.
        everyone: the group of all slots.
        inline: steps all slots on the caller's thread; None if that is not possible.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        images: StepImages | None,
        *,
        state_size: int,
        mode: AutoresetMode,
        must_reset: bool,
        copy: bool,
        timeout_s: float | None,
        on_timeout: str = "raise",
        restart: RestartPolicy | None = None,
        pixel_renderer: PixelRenderer | None = None,
    ) -> None:
        self.worker_pool = worker_pool
        self.images = images
        self.num_envs = worker_pool.num_envs
        self.actions = worker_pool.actions
        self.observations = worker_pool.observations
        self.single_action_space = worker_pool.single_action_space
        self.loop = asyncio.get_running_loop()
        self.copy = copy
        self.closing = False
        self.merge_infos = merge_infos
        self._abandoned: list[BatchRequest] = []  # cancelled or timed out: their results wait for `recv`
        self._ready: list[tuple[BatchRequest, WorkerRequest]] = []
        self._arrival = asyncio.Event()
        self._wanted: list[int] = []  # the numbers of ready slots that calls of `recv` wait for
        self._observing: BatchRequest | None = None  # the last request of `ask_observations`
        self._all_slots = np.arange(self.num_envs)
        self._last_turn = 0.0  # when the loop could last do something else, by `perf_counter`
        self.table = table = SlotTable(self.num_envs, must_reset=must_reset)
        if images is not None:
            images.paused = lambda: table.paused
        self.dispatcher = Dispatcher(
            worker_pool,
            images,
            self.table,
            state_size=state_size,
            mode=mode,
            restart=restart,
            pixel_renderer=pixel_renderer,
            on_ready=self._note_ready,
        )
        self.merger = self.dispatcher.merger
        waitable = all(member.worker.poll_fd is not None for member in worker_pool.members)
        # a reply may wait for that of a spare env
        drawn = (images and images.draws) or pixel_renderer
        self.needs_replies_only = waitable and not (drawn or self.merger or self.spares)
        self.timeouts = ReplyTimeouts(worker_pool, timeout_s, on_timeout, self.restarter, self.table)
        if self.merger is not None:
            self.merger.timeouts = self.timeouts
        self.remembered = RememberedState()
        self._active_slots: ActiveSlots | None = None
        self.everyone = WorkerGroup(self, np.arange(self.num_envs), whole=True)
        self._singles = SingleSlots(self)
        here = self.dispatcher.plain_thread
        self.inline = InlineSteps(self, here) if here is not None and InlineSteps.suit(self) else None

    @property
    def history(self) -> SlotHistory | None:
        """The data from which slots are resumed in another process; None where workers are not restarted."""
        return self.dispatcher.history

    @property
    def restarter(self) -> Restarter | None:
        """Starts workers again; None if none are."""
        return self.dispatcher.restarter

    @property
    def episodes(self) -> EpisodeTracker | None:
        """Counts episodes; None if they are not counted."""
        return self.dispatcher.episodes

    @property
    def spares(self) -> SpareEnvs | None:
        """The second envs of the slots; None if there are none."""
        return self.dispatcher.spares

    # ------------------------------------------------------------ whole batches

    async def step(self, actions: Any, *, listed: bool = False, timeout_s: float | None = None) -> StepResult:
        """Step all slots that are not paused (see `AsyncVectorEnv.step`).

        Args:
            actions: a batch of actions.
            listed: whether `actions` is a list of one action a slot instead, which its env gets as it is.
            timeout_s: in place of the limit of all calls.
        """
        if self.table.paused is not None and not listed:
            return await self._active().step(actions, timeout_s)
        if self.inline is not None and timeout_s is None:
            if (stepped := self.step_inline(actions, listed=listed)) is not None:
                if not isinstance(stepped, StepResult):
                    return await self.outcome(stepped, self._step_result, timeout_s)
                if perf_counter() - self._last_turn > YIELD_AFTER_S:
                    await self._yield_with_result(self.inline, stepped)
                return stepped
        if self._abandoned or timeout_s is not None:
            request = await self.send_step(actions, listed=listed, timeout_s=timeout_s)
        else:
            request = self.submit_step(actions, listed=listed)
        return await self.outcome(request, self._step_result, timeout_s)

    def step_inline(
        self, actions: Any, *, listed: bool = False, limit_s: float = 0.0
    ) -> StepResult | BatchRequest | None:
        """Step all slots on this thread, if that is possible at the moment (see `InlineSteps.step`)."""
        if self.inline is None or self._abandoned or self.closing or self.table.paused is not None:
            return None
        return self.inline.step(actions, listed=listed, limit_s=limit_s)

    async def _yield_with_result(self, inline: InlineSteps, result: StepResult) -> None:
        """Let the loop run other tasks while a result is in hand; a cancellation leaves it to `recv`."""
        self.table.move(slice(None), SlotState.IN_FLIGHT)
        try:
            await yield_to_loop()
        except BaseException:
            inline.leave_to_recv(result)
            raise
        finally:
            self._last_turn = perf_counter()
        self.check_open()
        self.free_slots(slice(None))

    @property
    def can_use_envs(self) -> bool:
        """Whether this thread may use the envs: steps run here, and there is nothing in flight."""
        return self.inline is not None and self.inline.possible and not (self._abandoned or self.closing)

    async def send_step(self, actions: Any, *, listed: bool = False, timeout_s: float | None = None) -> BatchRequest:
        """Drain abandoned requests, then send a step; otherwise as `submit_step`."""
        arrays, objects = ([], []) if listed else self.actions.take_apart(actions, self.num_envs)
        if self._abandoned:
            await self.drain(timeout_s)
        if timeout_s is None:
            return self.everyone.step(arrays, objects, "step", action_list=actions if listed else None)
        with self.dispatcher.off_this_thread():
            return self.everyone.step(arrays, objects, "step", action_list=actions if listed else None)

    def submit_step(self, actions: Any, *, listed: bool = False) -> BatchRequest:
        """Send a step of all slots, if `can_submit_step`; `step_outcome` or `step_result` gives its result.

        Args, Raises: as `step`.
        """
        arrays, objects = ([], []) if listed else self.actions.take_apart(actions, self.num_envs)
        return self.everyone.step(arrays, objects, "step", action_list=actions if listed else None)

    @property
    def can_submit_step(self) -> bool:
        """Whether a step can be sent, and its replies read, without the loop."""
        return self.needs_replies_only and not (self._abandoned or self.closing or self.table.paused is not None)

    async def step_outcome(self, request: BatchRequest, timeout_s: float | None) -> StepResult:
        """Wait for a step that was sent; otherwise as `step`."""
        return await self.outcome(request, self._step_result, timeout_s)

    def step_result(self, request: BatchRequest) -> StepResult:
        """Hand out the result of a step, all of whose replies are in; raises as `step`."""
        return self._hand_out(request, self._step_result)

    async def reset(
        self,
        seed: int | Seeds | None,
        mask: npt.NDArray[np.bool_] | None,
        options: dict[str, Any] | None,
        timeout_s: float | None = None,
    ) -> ResetResult:
        """Reset all slots that are not paused, or those of a mask; the others keep their last observations."""
        if self.table.paused is not None:
            return await self._active().reset(seed, mask, options, timeout_s)
        seeds = self.worker_pool.seeds(seed, self._all_slots)
        if self._abandoned:
            await self.drain(timeout_s)
        slots = self._all_slots if mask is None else np.flatnonzero(mask)
        by_slot = {slot: seeds[slot] for slot in slots.tolist()}
        listed, every = is_seed_list(seed), mask is None
        with self.dispatcher.off_this_thread() if timeout_s is not None else contextlib.nullcontext():
            request = self.everyone.reset(slots, by_slot, options, "reset", each=listed, every_slot=every)
        return await self.outcome(request, self._reset_result, timeout_s)

    def _active(self) -> ActiveSlots:
        """Return what steps the slots that are not paused; a new one after slots were resumed."""
        if self._active_slots is None or self._active_slots.resumes != self.table.resumes:
            self._active_slots = ActiveSlots(self)
        return self._active_slots

    def _step_result(self, request: BatchRequest) -> StepResult:
        batch = request.batch
        obs, info = self._obs_of(request), self._info_of(request)
        return new_tuple(StepResult, (obs, batch.reward, batch.terminated, batch.truncated, info))

    def _reset_result(self, request: BatchRequest) -> ResetResult:
        return ResetResult(self._obs_of(request), self._info_of(request))

    def _obs_of(self, request: BatchRequest) -> Any:
        layout = self.observations
        return layout.assemble(request.batch.obs, request.objects(layout) if layout.num_objects else ())

    def _info_of(self, request: BatchRequest) -> dict[str, Any]:
        columns = request.columns()
        return self.merge_infos(columns, self.num_envs) if columns else {}

    # ------------------------------------------------------------ a request, from sending to its result

    def begin(self, request: BatchRequest, index: Slots | slice, *, stepped: bool, looks: bool = False) -> None:
        """Put the slots of a request, which `index` selects, in flight: the request is about to be sent.

        Args:
            stepped: whether it is a step.
            looks: whether it only asks for observations; their images are those of earlier requests.
        """
        request.stepped = stepped
        request.looks = looks
        batch = request.batch
        if not self.copy and batch.shared_batch != COPIED and self.loop.get_debug() and not batch.unused:
            warn_caller(_STALE, StaleViewWarning)
        self.table.move(index, SlotState.IN_FLIGHT)
        if stepped:
            self.table.note_steps(index, len(batch.reward))
        if self.images is not None and self.images.draws and not looks:
            request.images = self.images.new_request(request.slots)

    def note_reset(self, slots: Slots, seeds: Mapping[int, int | None], *, start_over: Callable[[int], bool]) -> None:
        """Note that a reset of these slots is being sent, with these seeds.

        Args:
            slots, seeds: one seed a slot.
            start_over: whether the episodes of a slot are numbered from 0 again.
        """
        self.table.note_reset(slots)
        if self.spares is not None:
            self.spares.note_reset(seeds, start_over=start_over)
        if self.history is not None:
            self.history.note_seeds(seeds)

    def roll_back(self, request: BatchRequest) -> None:
        """Roll back the unsent worker requests of a batch request whose sending was interrupted, mostly by Ctrl-C.

        Worker requests that were sent are left to `recv`; slots of the others are free again.
        """
        if request.waiting:
            self.abandon(request)
        for part in request.parts:
            # held until the worker is started again
            held = part.sent is not None and part.member.worker.state not in ACCEPTS_REQUESTS
            waits = self.spares is not None and self.spares.is_waiting(part)
            if (
                held
                or waits
                or part.arrived
                or part.member.worker.receives_into(part.into[0 if request.stepped else 1])
            ):
                continue
            part.arrived = True
            request.open -= 1
            if request.images is not None and self.images is not None:
                error = part.member.worker.parent_env_error(
                    "it was interrupted before it was asked", part.slots.tolist()
                )
                self.images.fail(None, None, request.images, part.slots, error)
            self.free_slots(part.slots)
        if not request.open and not request.done.done():
            request.done.set_result(None)

    async def outcome(
        self, request: BatchRequest, result: Callable[[BatchRequest], Result], timeout_s: float | None
    ) -> Result:
        """Wait for all replies, and hand out the value that `result` makes of them.

        A cancellation or timeout leaves them to `recv`.

        Raises:
            ClosedError: if the vector env was closed meanwhile.
            StepTimeout: if `timeout_s` passed.
            SlotError: if something went wrong in some slots; the value is its `partial`.
        """
        try:
            if self.dispatcher.has_idle_cpus:
                if perf_counter() - self._last_turn > _TURN_S:
                    self._last_turn = perf_counter()
                    await asyncio.sleep(0)
                self.dispatcher.poll(request)
            elif not request.open and perf_counter() - self._last_turn > YIELD_AFTER_S:  # it ran on this thread
                await yield_to_loop()
                self._last_turn = perf_counter()
            if request.open:
                await self.timeouts.wait_for(request, timeout_s)
                self._last_turn = perf_counter()
            if self.merger is not None and not self.closing:
                await self._merge(self.merger, len(request.batch.reward))
        except BaseException:
            self.abandon(request)
            raise
        return self._hand_out(request, result)

    def _hand_out(self, request: BatchRequest, result: Callable[[BatchRequest], Result]) -> Result:
        self.check_open()
        try:
            failed = self._settle(request)
            value = result(request)
            if request.images is not None and self.images is not None:
                self.images.end_result()
                request.images = None  # or they would be kept until it is used again
        except BaseException:  # Ctrl-C: the results are lost, not the slots
            self.free_slots(request.slots)
            raise
        finally:
            request.idle = True
        if failed:
            raise SlotError.join(request.errors(), value)
        return value

    def _settle(self, request: BatchRequest) -> bool:
        """Free the slots of a request whose replies are all in, or mark them as failed; return whether any failed."""
        table, failed = self.table, False
        self.free_slots(request.index)
        if request.stepped and table.must_reset:
            table.note_ends(request.index, request.batch.terminated | request.batch.truncated)
        for part in request.parts:
            for error in part.errors:
                table.fail(error)
                failed = True
        if request.images is not None and self.images is not None:
            self.images.set_current(request.images, request.slots)
        return failed

    # ------------------------------------------------------------ some slots

    def send(self, actions: Any, slots: Iterable[int] | None) -> None:
        """Send actions to some slots; never blocks (see `AsyncVectorEnv.send`)."""
        numbers = self.table.slot_numbers(slots)
        if slots is not None:
            self.check_steps_some("send", numbers)
        paused = self.table.paused
        used = None if paused is None else np.flatnonzero(~paused[numbers])
        arrays, objects = self.actions.take_apart(actions, len(numbers), used)
        if slots is None and paused is None:
            self.everyone.step(arrays, objects, "send", waiting=False)
            return
        if paused is None and self._singles.suit(numbers, objects):
            self._singles.step(numbers, arrays)
            return
        rows: Slots | None = None  # in which order the actions are sent; None: as they are
        if paused is not None:
            rows = self.table.leave_out_paused(numbers, "send", by_name=slots is not None)
            if not len(rows):
                return
        if (numbers[1:] < numbers[:-1]).any():
            rows = np.argsort(numbers) if rows is None else rows[np.argsort(numbers[rows])]
        if rows is not None:
            numbers, arrays = numbers[rows], [array[rows] for array in arrays]
            objects = [[column[i] for i in rows.tolist()] for column in objects]
        WorkerGroup(self, numbers).step(arrays, objects, "send", waiting=False)

    def send_reset(self, slots: Iterable[int] | None, seed: int | Seeds | None, options: dict[str, Any] | None) -> None:
        """Begin episodes in some slots; never blocks (see `AsyncVectorEnv.send_reset`)."""
        numbers = self.table.slot_numbers(slots)
        seeds = dict(zip(numbers.tolist(), self.worker_pool.seeds(seed, numbers), strict=True))
        numbers = np.sort(numbers[self.table.leave_out_paused(numbers, "send_reset", by_name=slots is not None)])
        if not len(numbers):
            return
        own = {slot: seeds[slot] for slot in numbers.tolist()}
        group = WorkerGroup(self, numbers)
        listed, every = is_seed_list(seed), slots is None
        group.reset(numbers, own, options, "send_reset", each=listed, waiting=False, whole=False, every_slot=every)

    async def recv(self, min_slots: int, max_slots: int | None, deadline_s: float | None) -> Ready:
        """Take results as they come (see `AsyncVectorEnv.recv`)."""
        if not self.outstanding:
            raise NoAsyncCallError("recv: nothing is in flight and nothing is ready; send() or send_reset() first")
        if self.dispatcher.in_thread and perf_counter() - self._last_turn > YIELD_AFTER_S:
            await yield_to_loop()  # results may be there already, each time
            self._last_turn = perf_counter()
        if max_slots is not None:
            min_slots = min(min_slots, max_slots)

        async def enough() -> None:
            while not self.has_ready(min_slots):
                self._arrival.clear()
                self._wanted.append(wanted := min(min_slots, self._reachable()))
                try:
                    await self._arrival.wait()
                finally:
                    self._wanted.remove(wanted)
                if self.closing:
                    raise ClosedError("the vector env was closed while recv() waited")

        if deadline_s is None:
            await self.timeouts.wait(enough)
        else:
            try:
                async with asyncio.timeout(deadline_s):
                    await self.timeouts.wait(enough)
            except TimeoutError as exc:
                if isinstance(exc, StepTimeout):
                    raise
        if self.merger is not None:
            await self._merge(self.merger, 0)
        self.check_open()
        return self.take_ready(max_slots)

    def has_ready(self, min_slots: int) -> bool:
        """Return whether so many results are in, or all that are in flight (which may be fewer by then)."""
        return self.table.count(SlotState.READY) >= min(min_slots, self._reachable())

    @property
    def outstanding(self) -> bool:
        """Whether anything is in flight or ready."""
        return bool(self._ready) or self.table.count(SlotState.IN_FLIGHT) > 0

    def _reachable(self) -> int:
        return self.table.count(SlotState.READY) + self.table.count(SlotState.IN_FLIGHT)

    def take_ready(self, max_slots: int | None) -> Ready:
        """Take the results that are in, of up to `max_slots` slots, oldest first, in the order of slots."""
        ready, taken, errors, rest = collect_ready(self.observations, self._ready, max_slots, self.merge_infos)
        self._ready = rest
        self.table.move(ready.slots, SlotState.IDLE)
        self._arrival.set()  # another call may wait for more than there will be
        for request, slots in taken:
            if request.images is not None and self.images is not None:
                self.images.set_current(request.images, slots)
        if self.images is not None and self.images.draws and taken:
            self.images.end_result()
        for request in self._abandoned:
            request.idle = not request.open and not any(request is other for other, _ in self._ready)
        self._abandoned = [request for request in self._abandoned if not request.idle]
        self.table.note_ends(ready.slots, ready.terminated | ready.truncated)
        for error, slots in errors:
            self.table.fail(error, slots)
        self.table.note_taken(ready.slots)
        if errors:
            raise SlotError.join([error for error, _ in errors], ready)
        return ready

    def _note_ready(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Make the results of a worker request ready for `recv`."""
        if request.looks:
            self.free_slots(part.slots)
            return
        part.untaken = list(range(len(part.slots)))
        self._ready.append((request, part))
        self.table.move(part.slots, SlotState.READY)
        if self._wanted and self.table.count(SlotState.READY) >= min(self._wanted):
            self._arrival.set()

    def free_slots(self, slots: Slots | slice) -> None:
        """Make slots idle, whose results were handed out or will not come."""
        self.table.move(slots, SlotState.IDLE)
        if self._wanted:
            self._arrival.set()  # a `recv` may have nothing left to wait for

    async def _merge(self, merger: StatsMerger, slots: int) -> None:
        """Merge the statistics of the envs, if nothing else is in flight than so many slots, whose replies are in."""
        if self.table.count(SlotState.IN_FLIGHT) <= slots and not self.closing:
            await merger.merge()

    # ------------------------------------------------------------ groups, calls, images, the timeline

    def group(self, slots: Slots) -> WorkerGroup:
        """Make a group of some slots (see `Backend.group`)."""
        return WorkerGroup(self, slots)

    def ask_observations(self, slots: Slots) -> BatchRequest | None:
        """Ask for the last observations of slots, in any state.

        Returns:
            The request, for the slots whose workers are free; None if there are none.
        """
        shares = [
            (m, mine)
            for m, mine in self.worker_pool.shares(slots)
            if m.worker.state in ACCEPTS_REQUESTS and not m.worker.busy
        ]
        if not shares:
            return None
        request = self.dispatcher.make_request(shares, COPIED, reused=False)
        request.stepped = False
        for part in request.parts:
            rows = (part.slots - part.member.start).tolist()
            payload = reset_payload(part.member, [], [], None, whole=True, shown=rows)
            self.dispatcher.submit(request, part, SentRequest(Kind.RESET, (), payload, part.slots[:0]))
        self._observing = request
        return request

    async def wait_for_observations(self) -> None:
        """Wait for the reply to `ask_observations`, if that is in flight: so its workers are free."""
        if self._observing is not None:
            await self.timeouts.wait_for(self._observing, shielded=True)
            self.check_open()
            self._observing = None

    def rollout_backend(self) -> WorkerRolloutBackend:
        """Make the backend of one rollout."""
        return WorkerRolloutBackend(self)

    def check_steps_some(self, name: str, slots: Slots) -> None:
        """Raise if these slots can't be stepped without the others of their worker (see `Backend.check_steps_some`)."""
        if self.worker_pool.steps_some:
            return
        for member, mine in self.worker_pool.shares(np.sort(slots)):
            if len(mine) < member.stop - member.start:
                raise refuse_some(
                    f"{name}: slots {mine.tolist()}",
                    f"the vector env of slots {member.start} to {member.stop - 1}",
                )

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """Return a live field of the models of native slots (see `NativeVectorEnv.model_field`)."""
        self.table.check_call(self._all_slots, "model_field")
        assert self.worker_pool.model_fields is not None  # it was started
        return self.worker_pool.model_fields.field(name)

    async def call_service(
        self,
        slots: Iterable[int] | None,
        what: str,
        method: str,
        arguments: Callable[[list[int]], tuple[Any, ...]],
        *,
        spares: bool | Literal["living"] = False,
        on_sent: Callable[[], None] | None = None,
        on_result: Callable[[int, Any], None] | None = None,
    ) -> tuple[Any, ...]:
        """Call a method of the workers' services for some slots (see `Backend.call_service`)."""
        whose: Literal["none", "both", "living"] = "both" if spares else "none"
        if spares == "living":
            whose = "none" if self.spares is None else "living"
        return await call_workers(
            self, slots, what, method, arguments, spares=whose, on_sent=on_sent, on_result=on_result
        )

    async def wait_for_images(self, what: str, drawn: Callable[[], Awaitable[object]]) -> None:
        """Wait until images are drawn (see `ReplyTimeouts.wait_for_images`)."""
        await self.timeouts.wait_for_images(what, drawn)

    @property
    def observer(self) -> ResultObserver | None:
        """The object that is told of each reply (see `Backend.observer`)."""
        return self.dispatcher.observer

    def attach_observer(self, observer: ResultObserver | None) -> None:
        """Tell an object of each reply from now on (see `Backend.attach_observer`)."""
        self.dispatcher.observer = observer

    def attach_trace(self, trace: Trace | None) -> None:
        """Record requests and images in a timeline from now on; None: no longer."""
        self.dispatcher.trace = trace
        if self.images is not None:
            self.images.trace = trace

    # ------------------------------------------------------------ closing

    def check_open(self) -> None:
        """Raise a ClosedError if the vector env was closed while a caller waited."""
        if self.closing:
            raise ClosedError("the vector env was closed while this was in flight")

    def close(self) -> None:
        """Note that the workers are about to be closed: callers that wait get a ClosedError when they are gone."""
        self.closing = True
        if self.spares is not None:
            self.spares.closing = True

    def free(self) -> None:
        """Release the memory that the workers wrote into, once they are gone."""
        self.everyone.close()
        self._singles.clear()
        self.dispatcher.forget()
        self._abandoned.clear()
        self._ready.clear()
        self._arrival.set()

    # ------------------------------------------------------------ abandoned requests

    def abandon(self, request: BatchRequest) -> None:
        """Abandon a request, permanently: its worker requests become ready for `recv`, one by one."""
        if request.done.cancelled():
            request.done = self.loop.create_future()
            if request.open == 0:
                request.done.set_result(None)
        for part in request.parts:
            part.member.worker.abandon_requests()
        self.leave(request)

    def leave(self, request: BatchRequest) -> None:
        """Stop waiting for a request as if it were abandoned; `take_up` may wait for it again."""
        self.dispatcher.enable_readers()
        request.waiting = False
        self._abandoned.append(request)
        for part in request.parts:
            if part.arrived:
                self._note_ready(request, part)

    def take_up(self, request: BatchRequest, done: asyncio.Future[None]) -> None:
        """Wait again for a step that was left, when it had this future.

        Raises:
            NoAsyncCallError: if `recv` has taken some of it, or another call has dropped it.
        """
        whole = all(part.untaken is None or len(part.untaken) == len(part.slots) for part in request.parts)
        if request.done is not done or request not in self._abandoned or not whole:
            raise NoAsyncCallError(
                "the result of this step was taken by recv(), or dropped by a later call, be it of another thread: "
                "where several threads use one vector env, they take turns, with a lock (threading.Lock)",
                "step",
            )
        self._abandoned.remove(request)
        self._ready = [(r, p) for r, p in self._ready if r is not request]
        for part in request.parts:
            if part.untaken is not None:
                part.untaken = None
                self.table.move(part.slots, SlotState.IN_FLIGHT)
        request.waiting = True

    def take_back(self, request: BatchRequest, done: asyncio.Future[None]) -> None:
        """Leave the result of a step to `recv` that was handed out, but did not reach its caller.

        It stays lost if the slots were asked for something else since, or if images are drawn.

        Args:
            request: the step.
            done: its future when it was sent.
        """
        if request.done is not done or not request.idle or self.outstanding or self.closing:
            return
        if self.images is not None and self.images.draws:
            return
        request.idle = False
        self.table.move(request.index, SlotState.IN_FLIGHT)
        self.leave(request)

    def take_back_inline(self, result: StepResult) -> None:
        """Leave the last result of `step_inline` to `recv`, as `take_back`."""
        if self.inline is not None and not (self.outstanding or self.closing or self.table.paused is not None):
            self.inline.leave_to_recv(result)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Wait for the replies to abandoned requests, then drop the results that were not taken.

        Args:
            timeout_s: in place of the limit of all waits.

        Raises:
            StepTimeout: if they don't come in time, and that is the policy.
            ClosedError: if the vector env was closed meanwhile.
        """
        # looked up again each time: other tasks take and abandon some meanwhile
        while (request := next((one for one in self._abandoned if one.open), None)) is not None:
            await self.timeouts.wait_for(request, timeout_s, shielded=True)
        self.check_open()
        abandoned, self._abandoned = self._abandoned, []
        for request in abandoned:
            request.idle = True
        dropped = [(r, p) for r, p in self._ready if r in abandoned]
        self._ready = [(r, p) for r, p in self._ready if r not in abandoned]
        ended: list[int] = []
        if dropped:
            self._arrival.set()
        for request, part in dropped:
            assert part.untaken is not None
            left = part.slots[part.untaken]
            self.table.move(left, SlotState.IDLE)
            ends = request.batch.terminated[part.start : part.stop] | request.batch.truncated[part.start : part.stop]
            ended += left[ends[part.untaken]].tolist()
            # slots whose results were taken may have been reset since
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
        if abandoned and self.merger is not None:  # the envs saw those results all the same
            await self._merge(self.merger, 0)
