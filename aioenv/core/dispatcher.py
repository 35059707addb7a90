"""Requests on their way out, replies on their way in: between the exchanges and the workers."""

from __future__ import annotations

import asyncio
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
from aioenv.core.history import SlotHistory
from aioenv.core.payloads import read_tail, read_what_can_be
from aioenv.core.pixel_renderer import PixelRenderer
from aioenv.core.recovery import WorkerRecovery
from aioenv.core.requests import Batch, BatchRequest, SentRequest, WorkerRequest
from aioenv.core.slots import SlotState, SlotTable
from aioenv.core.stats_merger import StatsMerger
from aioenv.core.wakeups import WakeupCoalescer
from aioenv.core.worker_pool import WorkerPool, WorkerSlots
from aioenv.errors import RenderError, SlotError, WireError, WorkerDied
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.messages import load
from aioenv.platform import usable_cpus
from aioenv.process.connection import CountedReply, PendingReply
from aioenv.process.restart import Restarter, RestartPolicy
from aioenv.process.supervisor import Worker
from aioenv.rendering.step_images import StepImages
from aioenv.spaces.infos import NO_RESULT, Columns
from aioenv.spaces.shared_layout import BATCH_INDEX_BYTES, COPIED
from aioenv.worker.worker_end import SpinPoller

if TYPE_CHECKING:
    from aioenv.tracing.timeline import Trace

__all__ = ["Dispatcher"]

Slots = npt.NDArray[np.int64]

# How long to poll for replies before the loop sleeps, while there are CPUs without a worker, in seconds: with what else
# a step does, below the 0.5 ms that it may keep the loop busy.
_POLL_S = 250e-6
_LANE = slice(0, 1)
# Replies up to this are in a socket as a whole, so that nobody waits for them to be read.
_MAX_REST_BYTES = 1 << 16


class Dispatcher:
    """Sends the parts of exchanges to their workers, and puts what comes back into the exchanges.

    Args:
        fleet: started and configured workers.
        images: where states and late renders go; None if nobody wants images.
        table: the states of the slots.
        state_size: how many float64 of physics state come with each row.
        mode: the autoreset mode.
        restart: whether and how workers that died are started again.
        painter: draws the images of observations; None if there are none, or the workers do.
        offer: called with each part whose reply is in while nobody awaits the exchange as a whole.

    Attributes:
        restarter: who starts workers again; None if nobody does.
        history: what they go on from.
        trace: the timeline that is being collected; None: none is.
        episodes: counts episodes; None: nobody does.
        merger: merges the statistics that the envs share; None: they share none.
        spares_cpu: whether there are CPUs that no worker needs. One that has replied polls for its next request.
        shared_actions: the numbers of the action leaves that lie in shared memory.
    """

    def __init__(
        self,
        fleet: WorkerPool,
        images: StepImages | None,
        table: SlotTable,
        *,
        state_size: int,
        mode: AutoresetMode,
        restart: RestartPolicy | None,
        painter: PixelRenderer | None,
        offer: Callable[[BatchRequest, WorkerRequest], None],
    ) -> None:
        self._fleet = fleet
        self._images = images
        self._painter = painter
        self._table = table
        self._state_size = state_size
        self._offer = offer
        self._loop = asyncio.get_running_loop()
        self._num_envs = fleet.members[-1].stop
        self._all_slots = np.arange(self._num_envs)
        self._poller = SpinPoller(_POLL_S)
        self.spares_cpu = len(fleet.members) < usable_cpus()
        self.shared_actions = tuple(fleet.lanes[COPIED].actions) if fleet.lanes else ()
        self.history: SlotHistory | None = None
        self.restarter: Restarter | None = None
        self.trace: Trace | None = None
        self.episodes: EpisodeTracker | None = None
        if fleet.episodes is not None:
            self.episodes = EpisodeTracker(fleet.episodes, mode, restarts=restart is not None)
        self.merger = StatsMerger(fleet) if any(not stats.live for stats in fleet.stats) else None
        if restart is not None:
            self.history = SlotHistory(
                fleet, self._num_envs, state_size=state_size, resets_at_once=mode is AutoresetMode.SAME_STEP
            )
            self.restarter = Restarter(
                [member.worker for member in fleet.members],
                restart,
                meaning="its slots resume" if restart.resume else "the episodes of its slots are truncated",
                restore=WorkerRecovery(fleet, self.history, self.merger, resume=restart.resume).restore,
                lost=lambda worker, error: self._fail(error),
            )
        # whether no more is done with a step and its replies than to send it, and what `_take_in` does
        more = images, painter, self.merger
        self._plain = not any(more)
        self._no_tails = [b""] * len(fleet.members)
        self._bell = self._make_bell()
        self._stale_bell = False  # whether a worker has ended since: who comes in its place has another channel
        for member in fleet.members:
            member.worker.on_death = self._on_death

    def _make_bell(self) -> WakeupCoalescer | None:
        members, layout = self._fleet.members, self._fleet.observations
        channels = [m.worker.express for m in members if m.worker.express is not None]
        shared = self._fleet.lanes[COPIED].observations if self._fleet.lanes else ()
        framed = [leaf for number, leaf in enumerate(layout.leaves) if number not in shared]
        size = sum(leaf.dtype.itemsize * prod(leaf.shape) for leaf in framed)
        most = max(member.stop - member.start for member in members) * size
        if speedups.take_express is None or not self._plain or len(channels) < len(members):
            return None
        # with more workers who is last changes; with fewer the parent polls
        return WakeupCoalescer(channels) if 1 < len(channels) == usable_cpus() and most <= _MAX_REST_BYTES else None

    def listen(self) -> None:
        """Have the loop look at all workers."""
        if self._bell is not None:
            self._bell.wake()

    def forget(self) -> None:
        """Let go of the last step."""
        if self._bell is not None:
            self._bell.forget()

    # ------------------------------------------------------------ exchanges

    def whole(self, lane: int) -> BatchRequest:
        """An exchange with all workers."""
        batch = self.new_batch(self._num_envs, lane)
        parts = [WorkerRequest(m, self._all_slots[m.start : m.stop], m.start, batch) for m in self._fleet.members]
        exchange = BatchRequest(batch, parts, self._loop)
        if lane != COPIED:
            self.keep(exchange)
        return exchange

    def keep(self, exchange: BatchRequest) -> None:
        """This is used again and again, and may point to itself."""
        for part in exchange.parts:
            part.on_reply = partial(self._on_reply, exchange, part)
            if self._plain:
                always = exchange.batch.copies or self.episodes is not None or self.history is not None
                read = partial(self._take_in if always else self._read_tail, exchange, part)
                part.express = PendingReply(part.into[0], part.on_reply, CountedReply(part, exchange, read, always))

    def some(self, shares: Sequence[tuple[WorkerSlots, Slots]], *, stepped: bool) -> BatchRequest:
        """An exchange with some workers about some of their slots, begun; its parts are ready one by one."""
        batch = self.new_batch(sum(len(slots) for _, slots in shares), COPIED)
        parts: list[WorkerRequest] = []
        for member, slots in shares:
            parts.append(WorkerRequest(member, slots, parts[-1].stop if parts else 0, batch))
        exchange = BatchRequest(batch, parts, self._loop)
        exchange.begin(stepped=stepped, waiting=False)
        return exchange

    def new_batch(self, n: int, lane: int) -> Batch:
        """A batch of n rows, whose shared arrays lie in a lane, or are copied from it if that is `COPIED`."""
        fleet = self._fleet
        shared: Any = fleet.lanes[lane].observations if fleet.lanes else {}
        buffer = self._painter.new_buffer(n) if self._painter is not None else None
        return Batch(
            fleet.observations, n, self._state_size, fleet.checkpoint_size, shared, lane, fleet.instead, buffer
        )

    # ------------------------------------------------------------ out and in

    def submit_steps(
        self, exchange: BatchRequest, views: list[memoryview], cuts: list[list[slice]], tails: list[bytes] | None = None
    ) -> None:
        """Send a step whose actions are arrays in frames; otherwise as `submit`.

        Args:
            exchange: with one part a worker.
            views: arrays of actions, of all parts, as bytes.
            cuts: by part, where its bytes are in each of these.
            tails: by part, which rows of its worker are meant; None: all workers step all rows.
        """
        parts, sent, tails = exchange.parts, 0, tails or self._no_tails
        if speedups.send_express is not None and self.trace is None and not (self.restarter and self.restarter.busy):
            if self.restarter is not None:  # who dies of it may get it again
                for part, mine, tail in zip(parts, cuts, tails, strict=True):
                    part.sent = _of_step(part, views, mine, tail)
            sent = speedups.send_express(parts, *self._named(exchange, views, cuts), tails)
            if sent == len(parts) == len(self._fleet.members):
                if self._stale_bell:
                    self._bell, self._stale_bell = self._make_bell(), False
                if self._bell is not None:
                    self._bell.begin(exchange)
                    return
        self.listen()
        for part, mine, tail in zip(parts[sent:], cuts[sent:], tails[sent:], strict=True):
            self.submit(exchange, part, _of_step(part, views, mine, tail))

    def _named(
        self, exchange: BatchRequest, views: list[memoryview], cuts: list[list[slice]]
    ) -> tuple[list[memoryview], list[list[slice]]]:
        """What travels with a step: a lane of shared memory, if there are any, and actions."""
        if not self._fleet.lanes:
            return views, cuts
        return [memoryview(BATCH_INDEX_BYTES[exchange.batch.lane]), *views], [[_LANE, *mine] for mine in cuts]

    def submit(self, exchange: BatchRequest, part: WorkerRequest, sent: SentRequest) -> None:
        """Send a part's request; what becomes of it the exchange is told, whatever happens."""
        if self.trace is not None:
            self._number(exchange, part, again=part.sent is sent)
        part.sent = sent
        if self.restarter is not None and self._hold(exchange, part, None):
            return
        on_reply = part.on_reply or partial(self._on_reply, exchange, part)
        if not exchange.stepped:
            exchange.batch.clear(part.start, part.stop)
        fixed = sent.fixed
        if lanes := self._fleet.lanes:
            lane = exchange.batch.lane
            fixed = [BATCH_INDEX_BYTES[lane], *fixed]
            for number, actions in (sent.shared or {}).items():
                lanes[lane].actions[number][sent.slots] = actions
        into = part.into[0 if exchange.stepped else 1]
        try:
            part.request = part.member.worker.submit(sent.kind, fixed, sent.tail, into=into, on_reply=on_reply)
        except SlotError as error:
            on_reply(error)
        except WireError as exc:
            on_reply(part.member.worker.failure_here(str(exc), part.slots.tolist()))
        else:
            if exchange.images is not None and self._images is not None:
                self._images.expect_frame(part.member.worker, part.request, exchange.images, part.slots)

    def _number(self, exchange: BatchRequest, part: WorkerRequest, *, again: bool) -> None:
        """Tell the timeline of which step the request is that is about to be sent, and what is drawn of it."""
        assert self.trace is not None
        step = self.trace.sending(part.slots.tolist(), stepped=exchange.stepped, again=again)
        if exchange.images is not None:
            exchange.images.step = step

    def _hold(self, exchange: BatchRequest, part: WorkerRequest, error: WorkerDied | None) -> bool:
        """Keep a request until its worker is back, if it is being started again (see `Restarter.hold`)."""
        if self.restarter is None or part.sent is None:
            return False
        again = partial(self.submit, exchange, part, part.sent)
        on_reply = part.on_reply or partial(self._on_reply, exchange, part)
        return self.restarter.hold(part.member.worker, error, again, on_reply)

    def _on_reply(self, exchange: BatchRequest, part: WorkerRequest, outcome: Frame | SlotError) -> None:
        worker = part.member.worker
        if isinstance(outcome, WorkerDied) and self._hold(exchange, part, outcome):
            if self._images is not None:
                self._images.forget_frame(worker, part.request)
            part.request = None
            return
        part.arrived = True
        if isinstance(outcome, SlotError):
            exchange.fail(part, self._fleet.observations, outcome)
        elif outcome.kind is Kind.FAILURE:
            exchange.fail(part, self._fleet.observations, worker.failure(load(outcome.tail)))
        else:
            self._put_down(exchange, part, outcome.tail)
        if part.parcels:
            self._receive(part)
        if exchange.images is not None and self._images is not None:
            if not isinstance(outcome, Frame) or outcome.kind is Kind.FAILURE:
                self._images.fail(worker, part.request, exchange.images, part.slots, part.errors[0])
            elif self._state_size:
                self._images.draw(exchange.images, part.slots, exchange.batch.state[part.start : part.stop])
        if self.episodes is not None:
            self.episodes.note(exchange, part)
        if self.merger is not None and isinstance(outcome, Frame) and part.sent is not None:
            self.merger.note(part.sent.slots)
        if self.history is not None and isinstance(outcome, Frame):
            self.history.note(exchange, part)
        if self._painter is not None and isinstance(outcome, Frame) and outcome.kind is not Kind.FAILURE:
            part.arrived = False  # not before it is drawn
            if self.trace is not None:
                self.trace.at(part.slots.tolist())
            self._painter.draw(exchange.batch, part, partial(self._on_painted, exchange, part))
            return
        self._arrive(exchange, part)

    def _receive(self, part: WorkerRequest) -> None:
        """Hand on what states of a part need besides to be drawn."""
        start = part.member.start
        for drawer, what in ((self._images, "render"), (self._painter, "pixels")):
            if drawer is not None:
                drawer.update_models([(start + row, parcel) for row, (where, parcel) in part.parcels if where == what])

    def _on_painted(self, exchange: BatchRequest, part: WorkerRequest, error: RenderError | None) -> None:
        part.arrived = True
        if error is not None:  # of slots that have all else
            failure = part.member.worker.failure_here(
                f"it could not be drawn: {error}", error.slots or part.slots.tolist()
            )
            failure.__cause__ = error
            part.errors = [*part.errors, failure]
        self._arrive(exchange, part)

    def _arrive(self, exchange: BatchRequest, part: WorkerRequest) -> None:
        """All that there is of a part has come."""
        exchange.open -= 1
        if not exchange.open and not exchange.done.done():
            exchange.done.set_result(None)
        if not exchange.waiting:
            self._offer(exchange, part)

    def poll(self, exchange: BatchRequest) -> None:
        """Before the loop sleeps: its replies may be about to come, while there are CPUs that no worker needs."""
        if self.spares_cpu:
            self._poller.wait(exchange.poll)

    def _take_in(self, exchange: BatchRequest, part: WorkerRequest, tail: memoryview) -> None:
        """All that there is to do with a reply to a plain step but to count it."""
        self._put_down(exchange, part, tail)
        if self.episodes is not None:
            self.episodes.note(exchange, part)
        if self.history is not None:
            self.history.note(exchange, part)

    def _put_down(self, exchange: BatchRequest, part: WorkerRequest, tail: memoryview) -> None:
        if exchange.batch.lane == COPIED:
            exchange.batch.copy_out(part.start, part.slots)
        if len(tail):
            self._read_tail(exchange, part, tail)

    def _read_tail(self, exchange: BatchRequest, part: WorkerRequest, tail: memoryview) -> None:
        worker = part.member.worker
        try:
            try:
                over = read_tail(part, tail)
            except Exception:
                over = read_what_can_be(part, tail)
        except Exception as exc:
            error = worker.failure_here(f"its reply can't be read: {type(exc).__name__}: {exc}", part.slots.tolist())
            exchange.fail(part, self._fleet.observations, error)
            return
        if over:
            part.over = over
            self._table.exhaust(list(over))
            batch, rows = exchange.batch, part.start + np.searchsorted(part.slots, over)
            rows = rows[~(batch.terminated[rows] | batch.truncated[rows])]  # else the last episode ended just now
            if len(rows):
                part.columns = [*part.columns, Columns(rows, NO_RESULT, [np.ones(len(rows), np.bool_)])]

    def _on_death(self, worker: Worker) -> None:
        """A worker has ended: it is started again, or its slots can't be used any more."""
        self.listen()
        self._stale_bell = True
        error = worker.death()
        if self._images is not None:
            self._images.fail_worker(worker, error)
        if self.restarter is None or not self.restarter.begin(worker, error):
            self._fail(error)

    def _fail(self, error: WorkerDied) -> None:
        # what slots had in flight is told by the replies
        told = (SlotState.IN_FLIGHT, SlotState.READY)
        if slots := tuple(slot for slot in error.slots if self._table.state(slot) not in told):
            error.concern(slots)
            self._table.fail(error)


def _of_step(part: WorkerRequest, views: list[memoryview], cuts: list[slice], tail: bytes) -> SentRequest:
    """What a part is sent, of arrays of actions of all parts."""
    fixed: Any = list(map(getitem, views, cuts))
    return SentRequest(Kind.STEP, fixed, tail, part.slots)
