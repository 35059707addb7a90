"""Send each worker its share of a batch request, and put the replies into the batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import getitem
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from aioenv import speedups
from aioenv.core.episode_tracker import EpisodeTracker
from aioenv.core.images import PixelRenderer
from aioenv.core.recovery import SlotHistory, WorkerRecovery
from aioenv.core.requests import Batch, BatchRequest, SentRequest, WorkerRequest, read_partial_payload, read_payload
from aioenv.core.service_calls import StatsMerger
from aioenv.core.slots import SlotState, SlotTable
from aioenv.core.spares import SpareEnvs
from aioenv.core.wakeups import WakeupCoalescer
from aioenv.core.worker_pool import WorkerPool, WorkerSlots
from aioenv.errors import RenderError, SlotError, WireError, WorkerDied
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.messages import load
from aioenv.platform import usable_cpus
from aioenv.process.connection import FastReply, PendingReply
from aioenv.process.restart import Restarter
from aioenv.process.restart_policy import RestartPolicy
from aioenv.process.supervisor import Worker
from aioenv.rendering.step_images import StepImages
from aioenv.spaces.infos import NO_RESULT, Columns
from aioenv.spaces.layout import BATCH_INDEX_BYTES, COPIED
from aioenv.worker.service import PartialStep
from aioenv.worker.worker_end import SpinPoller

if TYPE_CHECKING:
    from aioenv.core.backend import ResultObserver
    from aioenv.tracing.timeline import Trace

__all__ = ["Dispatcher"]

Slots = npt.NDArray[np.int64]

# How long to poll for replies before the loop sleeps, while there are CPUs without a worker, in seconds. With the rest
# of a step it stays below the 0.5 ms for which a step may keep the loop busy.
_POLL_S = 250e-6
_SHARED_BATCH = slice(0, 1)
# Replies up to this size fit into a socket, so that a worker does not wait for them to be read.
_MAX_BYTES = 1 << 16


class Dispatcher:
    """Sends the worker requests of batch requests, and stores the replies in them.

    Args:
        worker_pool: started and configured workers.
        images: takes states and images; None if no images are drawn.
        table: the states of the slots.
        state_size: float64 numbers of physics state that come with each row.
        mode: the autoreset mode.
        restart: whether and how workers that died are started again.
        pixel_renderer: draws observations that are images; None if there are none, or the workers draw them.
        on_ready: called with each worker request whose reply is in, if no caller awaits the request as a whole.

    Attributes:
        restarter: starts workers again; None if none are.
        history: the data from which they go on.
        trace: the timeline that is being recorded; None if none is.
        episodes: counts episodes; None if they are not counted.
        spares: begins episodes in the second envs of slots; None if there are none.
        merger: merges the statistics that the envs share; None if they share none.
        has_idle_cpus: whether there are CPUs that no worker needs. A worker that has replied polls for its next
            request.
        here: the only worker, if it is a thread of this process.
        in_thread: whether the workers are threads of this process.
        plain_thread: the only worker, if it is such a thread, and its results go to the caller alone; else None.
        fast: whether the reply to a step needs nothing but `_process_reply`: then it takes the fast path.
        shared_actions: the numbers of the action leaves that lie in shared memory.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        images: StepImages | None,
        table: SlotTable,
        *,
        state_size: int,
        mode: AutoresetMode,
        restart: RestartPolicy | None,
        pixel_renderer: PixelRenderer | None,
        on_ready: Callable[[BatchRequest, WorkerRequest], None],
    ) -> None:
        self._worker_pool = worker_pool
        self._images = images
        self._pixel_renderer = pixel_renderer
        self._table = table
        self._state_size = state_size
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._poller = SpinPoller(_POLL_S)
        only = worker_pool.members[0].worker if len(worker_pool.members) == 1 else None
        self.here = only if only is not None and only.thread_channel is not None else None
        self.in_thread = all(member.worker.thread_channel is not None for member in worker_pool.members)
        # threads of workers need the interpreter's lock, which a poll would hold
        self.has_idle_cpus = not self.in_thread and len(worker_pool.members) < usable_cpus()
        shared_batches = worker_pool.shared_batches
        self.shared_actions = tuple(shared_batches[COPIED].actions) if shared_batches else ()
        self.history: SlotHistory | None = None
        self.restarter: Restarter | None = None
        self.trace: Trace | None = None
        self.observer: ResultObserver | None = None
        self.episodes: EpisodeTracker | None = None
        if worker_pool.episodes is not None:
            self.episodes = EpisodeTracker(worker_pool.episodes, mode, restarts=restart is not None)
        self.merger = StatsMerger(worker_pool) if any(not stats.live for stats in worker_pool.stats) else None
        if restart is not None:
            same_step = mode is AutoresetMode.SAME_STEP
            num_envs = worker_pool.num_envs
            self.history = SlotHistory(worker_pool, num_envs, state_size=state_size, same_step=same_step)
            recovery = WorkerRecovery(worker_pool, self.history, self.merger, resume=restart.resume)
            self.restarter = Restarter(
                worker_pool.workers,
                restart,
                meaning=_meaning(restart, spares=bool(worker_pool.spares)),
                restore=self._restore_second if worker_pool.spares else recovery.restore,
                lost=self._give_up,
            )
        self.spares: SpareEnvs | None = None
        if worker_pool.spares:
            self.spares = SpareEnvs(
                worker_pool,
                next_step=mode is AutoresetMode.NEXT_STEP,
                make_request=self.make_request,
                read_reply=self._read_outcome,
                exhaust=self._pause_exhausted,
                pass_on_updates=self._pass_on_updates,
                complete=self._finish_reply,
                history=self.history,
                is_restarting=self.restarter.is_restarting if self.restarter is not None else lambda _: False,
                start_restart=self.restarter.start_restart if self.restarter is not None else lambda *_: False,
            )
            table.can_go_on = self.spares.can_go_on
        self.fast = not ((images and images.draws) or pixel_renderer or self.merger)
        plain = self.fast and images is None and self.history is None and speedups.step_here is not None
        self.plain_thread = self.here if plain else None
        self._wakeups = self._make_wakeups()
        self._stale_wakeups = False  # whether a worker has ended since: the one in its place has another channel
        for worker in worker_pool.workers:
            worker.on_death = self._on_death

    def _make_wakeups(self) -> WakeupCoalescer | None:
        members, layout = self._worker_pool.members, self._worker_pool.observations
        channels = [m.worker.fast_channel for m in members if m.worker.fast_channel is not None]
        shared_batches = self._worker_pool.shared_batches
        shared = shared_batches[COPIED].observations if shared_batches else ()
        framed = [leaf for number, leaf in enumerate(layout.leaves) if number not in shared]
        size = sum(leaf.dtype.itemsize * prod(leaf.shape) for leaf in framed)
        most = max(member.stop - member.start for member in members) * size
        if speedups.take_replies is None or not self.fast or len(channels) < len(members) or self.spares is not None:
            return None
        # with more workers than CPUs the last one to reply varies; with fewer the parent polls
        return WakeupCoalescer(channels) if 1 < len(channels) == usable_cpus() and most <= _MAX_BYTES else None

    def enable_readers(self) -> None:
        """Let the loop watch the channels of all workers."""
        if self._wakeups is not None:
            self._wakeups.wake()

    def forget(self) -> None:
        """Release the last step."""
        if self._wakeups is not None:
            self._wakeups.forget()

    # ------------------------------------------------------------ making requests

    def make_request(
        self,
        shares: Sequence[tuple[WorkerSlots, Slots]],
        shared_batch: int,
        *,
        reused: bool,
        waiting: bool = True,
    ) -> BatchRequest:
        """Make a request to some workers about some of their slots.

        Args:
            shares: the workers, and the slots of each.
            shared_batch: the number of the shared batch that its results are written into.
            reused: whether it is used again and again, so that it may refer to itself. Otherwise it is ready to be
                sent, and is freed as soon as nothing uses it.
            waiting: whether a caller awaits all of it; else its worker requests go to `recv` one by one.
                (For one that is used once.)
        """
        batch = self._make_batch(sum(len(slots) for _, slots in shares), shared_batch)
        parts: list[WorkerRequest] = []
        for member, slots in shares:
            parts.append(WorkerRequest(member, slots, parts[-1].stop if parts else 0, batch))
        request = BatchRequest(batch, parts, self._loop)
        if not reused:
            request.reset(stepped=True, waiting=waiting)
            return request
        for part in request.parts:
            part.on_reply = partial(self._on_reply, request, part)
            if self.fast:
                always = batch.copies or bool(self._state_size) or self.episodes is not None or self.history is not None
                process: Any = self._process_reply if always or self.spares is not None else self.read_payload
                read = partial(process, request, part)
                part.fast_reply = PendingReply(part.into[0], part.on_reply, FastReply(part, request, read, always))
        return request

    def make_plain_request(self, shares: Sequence[tuple[WorkerSlots, Slots]]) -> BatchRequest:
        """Make a request for `recv` that may be used again and again for plain steps, if replies are `fast`."""
        request = self.make_request(shares, COPIED, reused=False, waiting=False)
        for part in request.parts:
            part.on_reply = partial(self._on_reply, request, part)
            read = partial(self._take_reply, request, part)
            part.fast_reply = PendingReply(part.into[0], part.on_reply, FastReply(part, None, read, True))
        return request

    def _make_batch(self, n: int, shared_batch: int) -> Batch:
        pool = self._worker_pool
        shared: Any = pool.shared_batches[shared_batch].observations if pool.shared_batches else {}
        return Batch(
            pool.observations,
            n,
            self._state_size,
            pool.checkpoint_size,
            shared,
            shared_batch,
            pool.replaced,
            self._pixel_renderer.new_buffer(n) if self._pixel_renderer is not None else None,
        )

    # ------------------------------------------------------------ sending

    def off_this_thread(self) -> contextlib.AbstractContextManager[object]:
        """Return a block in which no request runs on the caller's thread, where it could not time out."""
        if self.here is None or (channel := self.here.thread_channel) is None:
            return contextlib.nullcontext()
        return channel.all_on_thread()

    def step_here(self, request: BatchRequest, actions: npt.NDArray[Any], rows: Sequence[int] | None) -> bool:
        """Step on the caller's thread, if the only worker (`here`) is in this process and its steps are short.

        Args:
            request: the batch request.
            actions: one a row of it.
            rows: the rows of the worker that are stepped; None: all.

        Returns:
            Whether the request was answered; otherwise nothing was done.
        """
        worker = self.here
        if worker is None or worker.thread_channel is None or not self.fast:
            return False
        part = request.parts[0]
        if rows is not None and not isinstance(rows, range):
            return False
        payload = worker.thread_channel.step(rows[0] if rows else 0, len(actions), actions, part.into[0])
        if payload is None:
            return False
        if isinstance(payload, tuple):
            self.finish_step(request, PartialStep.from_tuple(payload))
            return True
        # a request that is used once has no `fast_reply`
        if payload or part.fast_reply is None or part.fast_reply.fast_path.always:  # type: ignore[union-attr]
            self._process_reply(request, part, memoryview(payload))
        part.arrived = True
        self._arrive(request, part)
        return True

    def submit_steps(
        self, request: BatchRequest, views: list[memoryview], cuts: list[list[slice]], payloads: list[bytes]
    ) -> None:
        """Send a step whose actions are arrays in frames, by the fast path if that is possible; otherwise as `submit`.

        Args:
            request: the batch request.
            views: the arrays of actions, of all worker requests, as bytes.
            cuts: by worker request, its bytes in each of these.
            payloads: by worker request, the rows of its worker that are stepped; empty for all.
        """
        parts, sent = request.parts, 0
        if self.spares is not None and (self.spares.ended or self.spares.lost):
            going_on = []
            for number, part in enumerate(parts):
                part.sent = _step_of(part, views, cuts[number], payloads[number])
                if not self.spares.answer_step(request, part):
                    part.sent = None
                    going_on.append(number)
            parts, cuts, payloads = ([each[i] for i in going_on] for each in (parts, cuts, payloads))  # type: ignore[assignment]
        if not request.waiting:
            self.enable_readers()
        if speedups.send_steps is not None and self.trace is None and not (self.restarter and self.restarter.busy):
            if self.restarter is not None:  # a worker that dies of it may get it again
                for part, mine, payload in zip(parts, cuts, payloads, strict=True):
                    part.sent = _step_of(part, views, mine, payload)
            if self._worker_pool.shared_batches:
                number = memoryview(BATCH_INDEX_BYTES[request.batch.shared_batch])
                arrays, slices = [number, *views], [[_SHARED_BATCH, *mine] for mine in cuts]
                sent = speedups.send_steps(parts, arrays, slices, payloads)
            else:
                sent = speedups.send_steps(parts, views, cuts, payloads)
            if sent == len(parts) and not request.waiting:
                return
            if sent == len(parts) == len(self._worker_pool.members):
                if self._stale_wakeups:
                    self._wakeups, self._stale_wakeups = self._make_wakeups(), False
                if self._wakeups is not None:
                    self._wakeups.begin(request)
                    return
        self.enable_readers()
        for part, mine, payload in zip(parts[sent:], cuts[sent:], payloads[sent:], strict=True):
            self.submit(request, part, _step_of(part, views, mine, payload))

    def finish_step(self, request: BatchRequest, started: PartialStep) -> None:
        """Finish a step that C has started on the caller's thread (see `ThreadChannel.step`)."""
        part = request.parts[0]
        on_reply = part.on_reply or partial(self._on_reply, request, part)
        part.member.worker.finish_step(started, part.into[0], on_reply)

    def submit(self, request: BatchRequest, part: WorkerRequest, sent: SentRequest) -> None:
        """Send one worker its part of a request. The reply, or an error in its place, is put into the request."""
        if self.trace is not None:
            self._trace_request(request, part, again=part.sent is sent)
        part.sent = sent
        if self.spares is not None and sent.kind is Kind.RESET and len(sent.slots):
            if self.spares.takes_reset(int(sent.slots[0])):
                request.batch.clear(part.start, part.stop)
                self.spares.begin_episode(request, part)
                return
        elif self.spares is not None and sent.kind is Kind.STEP and self.spares.answer_step(request, part):
            return
        if self.restarter is not None and self._hold(request, part, None):
            return
        on_reply = part.on_reply or partial(self._on_reply, request, part)
        if not request.stepped:
            request.batch.clear(part.start, part.stop)
        fixed = sent.fixed
        if shared_batches := self._worker_pool.shared_batches:
            shared_batch = request.batch.shared_batch
            fixed = [BATCH_INDEX_BYTES[shared_batch], *fixed]
            for number, actions in (sent.shared or {}).items():
                shared_batches[shared_batch].actions[number][sent.slots] = actions
        into = part.into[0 if request.stepped else 1]
        try:
            part.request_id = part.member.worker.submit(sent.kind, fixed, sent.payload, into=into, on_reply=on_reply)
        except SlotError as error:
            on_reply(error)
        except WireError as exc:
            on_reply(part.member.worker.parent_env_error(str(exc), part.slots.tolist()))
        else:
            if request.images is not None and self._images is not None:
                self._images.expect_frame(part.member.worker, part.request_id, request.images, part.slots)

    def _trace_request(self, request: BatchRequest, part: WorkerRequest, *, again: bool) -> None:
        """Note in the timeline of which step the request is that is about to be sent, and the images of it."""
        assert self.trace is not None
        step = self.trace.note_sent(part.slots.tolist(), stepped=request.stepped, again=again)
        if request.images is not None:
            request.images.step = step

    def _hold(self, request: BatchRequest, part: WorkerRequest, error: WorkerDied | None) -> bool:
        """Keep a request until its worker is back, if it is being started again (see `Restarter.queue_request`)."""
        if self.restarter is None or part.sent is None:
            return False
        again = partial(self.submit, request, part, part.sent)
        on_reply = part.on_reply or partial(self._on_reply, request, part)
        return self.restarter.queue_request(part.member.worker, error, again, on_reply)

    # ------------------------------------------------------------ replies

    def _on_reply(self, request: BatchRequest, part: WorkerRequest, outcome: Frame | SlotError) -> None:
        worker = part.member.worker
        if isinstance(outcome, WorkerDied) and self._lose_episode(request, part, outcome):
            return
        if isinstance(outcome, WorkerDied) and self._hold(request, part, outcome):
            if self._images is not None:
                self._images.forget_frame(worker, part.request_id)
            part.request_id = None
            return
        self._read_outcome(request, part, outcome)
        if part.exhausted:
            self._pause_exhausted(request, part)
        if self.spares is not None:
            if part.sent is not None and not len(part.sent.slots):
                self.spares.show_last(request, part)
            if self.spares.end_episode(request, part):
                return
        self._finish_reply(request, part, outcome)

    def _read_outcome(self, request: BatchRequest, part: WorkerRequest, outcome: Frame | SlotError) -> None:
        """Read a reply, or the error in its place, into its worker request."""
        if isinstance(outcome, SlotError):
            request.fail(part, self._worker_pool.observations, outcome)
        elif outcome.kind is Kind.FAILURE:
            error = part.member.worker.env_error(load(outcome.payload))
            request.fail(part, self._worker_pool.observations, error)
        else:
            self._store_reply(request, part, outcome.payload)

    def _finish_reply(
        self, request: BatchRequest, part: WorkerRequest, outcome: Frame | SlotError | None = None
    ) -> None:
        """Pass on the results of a worker request to all who need them; None: in place of the reply of a spare env."""
        worker = part.member.worker
        failed = isinstance(outcome, SlotError) or (outcome is not None and outcome.kind is Kind.FAILURE)
        died = outcome is None and any(isinstance(error, WorkerDied) for error in part.errors)
        part.arrived = True
        if part.render_updates:
            self._pass_on_updates(part)
        if request.images is not None and self._images is not None:
            if failed or died:
                self._images.fail(worker, part.request_id, request.images, part.slots, part.errors[0])
            elif self._state_size:
                self._images.draw(request.images, part.slots, request.batch.state[part.start : part.stop])
        if self.observer is not None:
            self.observer.note_reply(request, part)
        if self.episodes is not None:
            self.episodes.note(request, part)
        replied = not isinstance(outcome, SlotError)
        if self.merger is not None and replied and part.sent is not None:
            self.merger.note(part.sent.slots)
        if self.history is not None and replied:
            self.history.note(request, part)
        if self._pixel_renderer is not None and not failed:
            part.arrived = False  # until it is drawn
            if self.trace is not None:
                self.trace.set_step(part.slots.tolist())
            self._pixel_renderer.draw(request.batch, part, partial(self._on_drawn, request, part))
            return
        self._arrive(request, part)

    def _pass_on_updates(self, part: WorkerRequest) -> None:
        """Pass on the data beside their states that images of a worker request need."""
        start = part.member.start
        for drawer, use in ((self._images, "render"), (self._pixel_renderer, "pixels")):
            if drawer is not None:
                drawer.update_models(
                    [(start + row, update) for row, (where, update) in part.render_updates if where == use]
                )

    def _on_drawn(self, request: BatchRequest, part: WorkerRequest, error: RenderError | None) -> None:
        part.arrived = True
        if error is not None:  # the slots have the rest of their results
            failure = part.member.worker.parent_env_error(
                f"it could not be drawn: {error}", error.slots or part.slots.tolist()
            )
            failure.__cause__ = error
            part.errors = [*part.errors, failure]
        self._arrive(request, part)

    def _arrive(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Count a worker request whose reply is in, and whose observations are drawn."""
        request.open -= 1
        if not request.open and not request.done.done():
            request.done.set_result(None)
        if not request.waiting:
            self._on_ready(request, part)

    def poll(self, request: BatchRequest) -> None:
        """Poll for the replies to a request for a moment, if there is a CPU that no worker needs."""
        if self.has_idle_cpus:
            self._poller.wait(request.poll)

    def _process_reply(self, request: BatchRequest, part: WorkerRequest, payload: memoryview) -> bool:
        """Process a fast-path reply, except for counting it; return whether it is held back (see `SpareEnvs`)."""
        self._store_reply(request, part, payload)
        if part.exhausted:
            self._pause_exhausted(request, part)
        if part.render_updates:
            self._pass_on_updates(part)
        if self.spares is not None and self.spares.end_episode(request, part):
            return True
        if self.observer is not None:
            self.observer.note_reply(request, part)
        if self.episodes is not None:
            self.episodes.note(request, part)
        if self.history is not None:
            self.history.note(request, part)
        return False

    def _take_reply(self, request: BatchRequest, part: WorkerRequest, payload: memoryview) -> bool:
        """Process a fast-path reply that goes to `recv`; return True: C leaves it at that."""
        if not self._process_reply(request, part, payload):
            part.arrived = True
            self._arrive(request, part)
        return True

    def _store_reply(self, request: BatchRequest, part: WorkerRequest, payload: memoryview) -> None:
        if request.batch.shared_batch == COPIED:
            request.batch.copy_out(part.start, part.slots)
        if len(payload):
            self._read(request, part, payload)

    def read_payload(self, request: BatchRequest, part: WorkerRequest, payload: memoryview) -> None:
        """Read the payload of a reply into its worker request, and pause the slots whose envs have no further episode.

        What can't be read becomes an error of its slots.
        """
        self._read(request, part, payload)
        if part.exhausted:
            self._pause_exhausted(request, part)

    def _read(self, request: BatchRequest, part: WorkerRequest, payload: memoryview) -> None:
        worker = part.member.worker
        try:
            try:
                part.exhausted = read_payload(part, payload)
            except Exception:
                part.exhausted = read_partial_payload(part, payload)
        except Exception as exc:
            error = worker.parent_env_error(
                f"its reply can't be read: {type(exc).__name__}: {exc}", part.slots.tolist()
            )
            request.fail(part, self._worker_pool.observations, error)

    def _pause_exhausted(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Pause the slots of a worker request whose envs have no further episode."""
        exhausted = part.exhausted
        self._table.exhaust(list(exhausted))
        batch, rows = request.batch, part.start + np.searchsorted(part.slots, exhausted)
        rows = rows[~(batch.terminated[rows] | batch.truncated[rows])]  # else the last episode ended just now
        if len(rows):
            part.columns = [*part.columns, Columns(rows, NO_RESULT, [np.ones(len(rows), np.bool_)])]

    def _on_death(self, worker: Worker) -> None:
        """Have a worker that has ended started again, or mark its slots as dead."""
        self.enable_readers()
        self._stale_wakeups = True
        error = worker.death_error()
        if self._images is not None:
            self._images.fail_worker(worker, error)
        if self.restarter is None or not self.restarter.start_restart(worker, error):
            self._give_up(worker, error)
        elif self.spares is not None:
            self.spares.note_restart(worker, back=False)

    def _give_up(self, worker: Worker, error: WorkerDied) -> None:
        """Note that a worker has ended for good."""
        if self.spares is not None:
            expendable = self.spares.is_expendable(worker)
            self.spares.note_death(worker)
            if expendable:
                return
        self._fail(error)

    async def _restore_second(self, worker: Worker) -> None:
        """Configure the new process of one of two workers of a slot."""
        assert self.spares is not None
        await self._worker_pool.configure_worker(worker)
        self.spares.note_restart(worker, back=True)

    def _lose_episode(self, request: BatchRequest, part: WorkerRequest, error: WorkerDied) -> bool:
        """End the episode of a slot whose worker has died and is restarted, if the slot has another env."""
        if self.spares is None or self.restarter is None or not request.stepped:
            return False
        if not (self.spares.can_take_over(part) and self.restarter.start_restart(part.member.worker, error)):
            return False
        self.spares.lose_episode(request, part)
        return True

    def _fail(self, error: WorkerDied) -> None:
        # slots in flight get the error as their reply; one that goes on in its other env must be reset in any case
        reported, spares = (SlotState.IN_FLIGHT, SlotState.READY), self.spares
        goes_on = [slot for slot in error.slots if spares is not None and spares.can_go_on(slot)]
        if slots := tuple(s for s in error.slots if s in goes_on or self._table.state(s) not in reported):
            error.concern(slots)
            self._table.fail(error)


def _step_of(part: WorkerRequest, views: list[memoryview], cuts: list[slice], payload: bytes) -> SentRequest:
    """Take the actions of a worker request out of those of the whole batch."""
    fixed: Any = list(map(getitem, views, cuts))
    return SentRequest(Kind.STEP, fixed, payload, part.slots)


def _meaning(restart: RestartPolicy, *, spares: bool) -> str:
    """Return what a restart means for the slots of a worker, for the log."""
    if spares:
        return "the episode that it ran, if it ran one, is truncated"
    return "its slots resume" if restart.resume else "the episodes of its slots are truncated"
