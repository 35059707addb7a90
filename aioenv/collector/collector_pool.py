"""The collector processes: requests and replies, weights, replacements, and the order of rollouts."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from aioenv.collector.collect_requests import (
    Begin,
    CollectReply,
    CollectRequest,
    block_size,
    buffers_in,
    load_rollout,
    new_buffers,
)
from aioenv.collector.collected import CollectedRollout, CollectorStats
from aioenv.collector.collector_service import CollectorSpaces
from aioenv.collector.weights import DumpedWeights, dump_weights, shared_spans
from aioenv.core.recovery import derive_seed
from aioenv.core.worker_pool import all_of
from aioenv.definitions.snapshot import CodeSnapshot
from aioenv.errors import AioenvError, PolicyError, SlotError, SpaceMismatchError, WireError, WorkerDied
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.memory import MemoryBlocks, SharedMemory
from aioenv.ipc.messages import Failure, dump, dump_code, load
from aioenv.process.async_resource import gather_internal, wait_through_cancel
from aioenv.process.remote import Placements, SharedData
from aioenv.process.restart import Restarter
from aioenv.process.restart_policy import RestartPolicy
from aioenv.process.supervisor import Worker

__all__ = ["Collector", "CollectorPool"]

_MEANING = "its rollout is collected again, from new episodes"
# how long an iteration in sync mode waits for `update` before it says so, in seconds
_UPDATE_WARNING_S = 5.0
# rollouts of fewer bytes travel in messages: that takes as long
_BLOCK_BYTES = 1 << 20

_log = logging.getLogger("aioenv.collector")


class CollectorPool:
    """The collectors of a `RolloutCollector`, to which nothing here refers: so one that is dropped is closed.

    Args:
        collectors: the collectors.
        program: what they are started from; large arrays in it exist as long as it does.
        placements: where they are.
        sync: whether all wait for an update after each rollout.
        max_weight_lag, prefetch, timeout_s, restart: see `RolloutCollector`.

    Attributes:
        version: the number of updates.
        spaces: of one slot; known from the start on.
    """

    spaces: CollectorSpaces

    def __init__(
        self,
        collectors: Sequence[Collector],
        program: CodeSnapshot,
        placements: Placements,
        *,
        sync: bool,
        max_weight_lag: int | None,
        prefetch: int,
        timeout_s: float | None,
        restart: RestartPolicy | None,
    ) -> None:
        self.version = 0
        self._collectors = collectors
        self._by_worker = {collector.worker: collector for collector in collectors}
        self._program: CodeSnapshot | None = program  # None: no collector is started from it any more
        self._definitions = program.table
        self._placements = placements
        self._sync = sync
        self._max_weight_lag = max_weight_lag
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._restart = restart
        self._restarter: Restarter | None = None
        self._closing = False
        self._memory: SharedMemory | None = None  # of collectors of this machine
        self._weights: DumpedWeights | None = None  # the newest
        self._round_weights: DumpedWeights | None = None  # in sync mode, those of this round
        self._rounds_begun = False  # whether any round has begun, in sync mode
        self._ready: deque[CollectedRollout | _Lost] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._begun_at: float | None = None
        self._learner_wait_s = 0.0
        self._rollouts = self._env_steps = self._stale = self._restarts = self._lost = 0

    @property
    def workers(self) -> list[Worker]:
        """The processes."""
        return [collector.worker for collector in self._collectors]

    # ------------------------------------------------------------ start and close

    async def start(self) -> None:
        """Start all collectors at once. If anything fails, or this is cancelled, none is left."""
        workers = self.workers
        try:
            await self._placements.start()
            self._share_memory()
            await all_of(worker.start() for worker in workers)
            self._agree()
        except GeneratorExit:  # its loop was closed
            self.abandon()
            raise
        except BaseException:
            await wait_through_cancel(gather_internal(*(worker.close_now() for worker in workers)))
            await self._placements.close()
            self._release()
            self._free_memory()
            raise
        if self._restart is None:
            self._release()
            return
        self._restarter = Restarter(
            workers, self._restart, meaning=_MEANING, restore=self._restore, lost=lambda *_: self._wake()
        )
        for worker in workers:
            worker.on_death = self._on_death

    def _share_memory(self) -> None:
        """Make memory for the rollouts of collectors of this machine."""
        here = [collector for collector in self._collectors if self._placements.of(collector.worker.index) is None]
        if here:
            self._memory = SharedMemory.create()
        for collector in here:
            collector.worker.memory, collector.blocks = self._memory, MemoryBlocks(self._memory)

    def _free_memory(self) -> None:
        """Release shared memory; it is freed with the last rollout in it."""
        for collector in self._collectors:
            collector.worker.memory = None
            collector.blocks.clear()
        if self._memory is not None:
            self._memory.close()

    def _agree(self) -> None:
        """Find the spaces that all collectors share.

        Raises:
            SpaceMismatchError: if they differ.
        """
        first: CollectorSpaces | None = None
        for collector in self._collectors:
            spaces: CollectorSpaces = collector.worker.description
            if first is None:
                first = spaces
            elif spaces != first and dump_code(spaces) != dump_code(first):
                raise SpaceMismatchError(
                    f"the envs of all collectors must have the same spaces: those of collector 0 are {tuple(first)}, "
                    f"those of {collector.worker.label} {tuple(spaces)}"
                )
        assert first is not None
        self.spaces = first

    async def close(self, grace_s: float) -> None:
        """End all collectors; those in the middle of a rollout at once. Iterations end."""
        self._closing = True
        self._wake()
        try:
            if self._restarter is not None:
                await self._restarter.close()
        finally:
            try:
                await gather_internal(*(worker.close(0.0 if worker.busy else grace_s) for worker in self.workers))
            finally:
                self._release()
                self._free_memory()
                await self._placements.close()

    def abandon(self) -> None:
        """Kill every process without waiting."""
        self._closing = True
        if self._restarter is not None:
            self._restarter.abandon()
        for worker in self.workers:
            worker.abandon()
        self._placements.abandon()
        self._release()
        self._free_memory()

    def _release(self) -> None:
        """Release rollouts, timers, and the snapshot of the code, since no collector is started from it any more."""
        self._ready.clear()
        self._program = None
        if self._closing:
            self._weights = self._round_weights = None
        for collector in self._collectors:
            collector.worker.forget_code()
            collector.stop_clock()

    # ------------------------------------------------------------ weights, stats

    def update(self, weights: Any) -> int:
        """Set the newest weights (see `RolloutCollector.update`)."""
        if weights is not None:
            self._weights = dump_weights(self.version + 1, weights, self._definitions, self._placements)
        else:
            last = self._weights or DumpedWeights(0, b"", (), [], {})
            self._weights = last._replace(version=self.version + 1)
        self.version += 1
        if self._sync and self._begun_at is not None:
            if any(collector.has_failed for collector in self._collectors):
                self._round_weights = self._weights  # those of the round may be why
            self._begin_round()
        return self.version

    def stats(self) -> CollectorStats:
        """Return waits and counts (see `RolloutCollector.stats`)."""
        now, count = perf_counter(), len(self._collectors)
        return CollectorStats(
            0.0 if self._begun_at is None else now - self._begun_at,
            self._learner_wait_s,
            sum(collector.idle_until(now) for collector in self._collectors) / count,
            sum(collector.policy_s for collector in self._collectors) / count,
            self._rollouts,
            self._env_steps,
            self._stale,
            self._restarts,
            self._lost,
            self.version,
            count,
        )

    # ------------------------------------------------------------ rollouts

    async def next_rollout(self) -> CollectedRollout | None:
        """Wait for the next rollout; None: there is no further one (see `RolloutCollector.__anext__`)."""
        started = perf_counter()
        if self._begun_at is None:
            self._begun_at = started
            if self._sync:
                self._begin_round()
        try:
            while True:
                self._fill()
                while self._ready:
                    taken = self._take(self._ready.popleft())
                    if taken is not None:
                        return taken
                if self._closing or all(each.finished and not each.open for each in self._collectors):
                    return None
                await self._wait()
        finally:
            self._learner_wait_s += perf_counter() - started

    def _take(self, item: CollectedRollout | _Lost) -> CollectedRollout | None:
        """Return the rollout of an item; None if it is stale. Its collector may begin the next one.

        Raises:
            AioenvError: if the item is an error.
        """
        if isinstance(item, _Lost):
            item.collector.untaken -= 1
            raise item.error
        collector = self._collectors[item.collector]
        collector.untaken -= 1
        lag = self.version - item.weights_version
        stale = self._max_weight_lag is not None and lag > self._max_weight_lag
        if self._sync:
            collector.delivered = True
            self._begin_round()
        else:
            self._fill_one(collector)
        if stale:
            self._stale += 1
            return None
        self._rollouts += 1
        self._env_steps += item.reward.size
        return item

    async def _wait(self) -> None:
        """Wait until something has changed; log a warning if only `update` can change anything, and does not come."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        warning = loop.call_later(_UPDATE_WARNING_S, _warn_of_update) if self._sync and self._round_is_over() else None
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)
            if warning is not None:
                warning.cancel()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # ------------------------------------------------------------ requests

    def _begin_round(self) -> None:
        """In sync mode, begin the next round if the last one is over, and weights were updated since; or the first."""
        last = self._round_weights
        if self._begun_at is None:
            return
        if self._rounds_begun and (not self._round_is_over() or self._weights is last):
            return
        self._rounds_begun = True
        self._round_weights = self._weights
        for collector in self._collectors:
            collector.delivered = False
        self._fill()

    def _round_is_over(self) -> bool:
        """Tell whether all rollouts of a round in sync mode were taken."""
        return all(collector.delivered or collector.finished for collector in self._collectors)

    def _fill(self) -> None:
        """Ask the collectors that may begin a rollout."""
        for collector in self._collectors:
            self._fill_one(collector)

    def _fill_one(self, collector: Collector) -> None:
        if (self._sync and collector.delivered) or self._closing:
            return
        while not collector.finished and len(collector.open) + collector.untaken <= self._prefetch:
            task = _Task()
            collector.open.append(task)
            self._send(collector, task)

    def _send(self, collector: Collector, task: _Task) -> None:
        """Ask a collector for a rollout, with the weights and the episodes that its process does not have yet."""
        weights = self._round_weights if self._sync else self._weights
        request = CollectRequest(collector.sizes, collector.begin() if collector.fresh else None)
        fixed: Sequence[Any] = ()
        shared: SharedData | None = None
        task.version = 0 if weights is None else weights.version
        if weights is not None and weights.data is not collector.weights:
            placement = self._placements.of(collector.worker.index)
            shared = weights.shared.get(placement.session) if placement is not None else None
            if shared is None or weights.data is collector.lacked:
                request = request._replace(weights=weights.data, weights_spans=weights.spans)
                fixed, shared = weights.buffers, None
            else:
                spans = shared_spans(weights, shared)
                request = request._replace(weights=weights.data, weights_spans=spans, shared=shared.number)
        buffers = task.buffers = None
        if collector.sizes is not None:
            size = block_size(collector.sizes)
            block = collector.blocks.take(size) if size >= _BLOCK_BYTES else None
            if block is None:
                buffers = new_buffers(collector.sizes)
            else:
                task.buffers = buffers_in(block.buffer, collector.sizes)
                request = request._replace(block=(block.offset, block.size))
        task.restarted |= collector.fresh and collector.has_sent
        try:
            task.request = collector.worker.submit(
                Kind.COLLECT,
                fixed,
                dump(request, self._definitions),
                into=buffers,
                on_reply=partial(self._on_reply, collector, task),
            )
        except WorkerDied as error:
            self._on_lost(collector, task, error.with_traceback(None))  # which would keep this frame, and the weights
            return
        except WireError as error:  # the weights are too large
            self._end(collector, task, error.with_traceback(None))
            return
        if shared is not None:
            collector.worker.give(shared)
        collector.weights = b"" if weights is None else weights.data
        collector.fresh = False
        collector.note_sent(self._timeout_s)

    def _on_reply(self, collector: Collector, task: _Task, outcome: Frame | SlotError) -> None:
        if isinstance(outcome, SlotError):
            assert isinstance(outcome, WorkerDied)
            self._lost += 1
            self._on_lost(collector, task, outcome)
            return
        if outcome.kind is Kind.FAILURE:
            self._end(collector, task, self._error_of(collector, load(outcome.payload)))
            return
        reply: CollectReply = load(outcome.payload)
        if reply.lacks_weights:
            collector.lacked, collector.weights = collector.weights, None
            self._send(collector, task)
            return
        if reply.refused_weights:
            collector.weights = None
        if reply.failures:
            errors = [self._error_of(collector, failure) for failure in reply.failures]
            self._end(collector, task, errors[0] if len(errors) == 1 else SlotError.join(errors, None))
            return
        if not reply.rollout:  # all envs were done before
            collector.finished = True
            collector.note_end(self._timeout_s)
            collector.open.remove(task)
            if self._sync:
                self._begin_round()
            self._wake()
            return
        if reply.in_block:
            assert task.buffers is not None
            self._deliver(collector, task, reply, task.buffers)
        elif reply.sizes and not outcome.fixed:
            self._fetch(collector, task, reply)
        else:
            self._deliver(collector, task, reply, outcome.fixed)

    def _fetch(self, collector: Collector, task: _Task, reply: CollectReply) -> None:
        """Ask for the buffers of a rollout whose sizes were not known."""
        collector.sizes = reply.sizes
        buffers = new_buffers(reply.sizes)

        def on_reply(outcome: Frame | SlotError) -> None:
            if isinstance(outcome, Frame) and outcome.kind is Kind.RESULT:
                self._deliver(collector, task, reply, outcome.fixed)
            else:
                self._on_reply(collector, task, outcome)

        request = CollectRequest(reply.sizes, fetch=task.request)
        try:
            collector.worker.submit(Kind.COLLECT, (), dump(request, self._definitions), into=buffers, on_reply=on_reply)
        except WorkerDied as error:
            self._on_lost(collector, task, error)

    def _deliver(self, collector: Collector, task: _Task, reply: CollectReply, buffers: Sequence[memoryview]) -> None:
        """Put a rollout together, for the iteration to take."""
        try:
            rollout = load_rollout(CollectedRollout, reply, buffers)
        except WireError as error:
            self._end(collector, task, error)
            return
        assert isinstance(rollout, CollectedRollout)
        rollout.collector, rollout.slots = collector.worker.index, np.array(collector.worker.slots)
        rollout.weights_version, rollout.restarted = task.version, task.restarted
        collector.note_rollout(reply, self._timeout_s)
        self._close_task(collector, task, rollout)

    def _end(self, collector: Collector, task: _Task, error: AioenvError) -> None:
        """Let the iteration raise an error in place of a rollout."""
        collector.note_end(self._timeout_s)
        self._close_task(collector, task, _Lost(collector, error))

    def _close_task(self, collector: Collector, task: _Task, item: CollectedRollout | _Lost) -> None:
        task.buffers = None
        collector.open.remove(task)
        collector.untaken += 1
        self._ready.append(item)
        self._wake()

    def _error_of(self, collector: Collector, failure: Failure) -> SlotError:
        """Make the error of a failed rollout: of a row's env, or of the policy."""
        error: SlotError = collector.worker.env_error(failure)
        return error if failure.row is not None else PolicyError.of(error)

    # ------------------------------------------------------------ deaths

    def _on_death(self, worker: Worker) -> None:
        """Replace a collector that has died, whether or not it was asked for anything."""
        if self._restarter is not None:
            self._restarter.start_restart(worker, worker.death_error())

    def _on_lost(self, collector: Collector, task: _Task, error: WorkerDied) -> None:
        """Have a rollout collected again that a collector took to its end; or raise the error."""
        collector.stop_clock()
        again = partial(self._send, collector, task)
        fail = partial(self._end, collector, task)
        if self._restarter is None or self._closing:
            fail(error)
        elif not self._restarter.queue_request(collector.worker, error, again, fail):
            fail(error)

    async def _restore(self, worker: Worker) -> None:
        """Note that a new process is up: it has neither weights nor episodes."""
        self._restarts += 1
        self._by_worker[worker].note_new_process()


def _warn_of_update() -> None:
    _log.warning(
        'the iteration over a RolloutCollector(mode="sync") waits for update(): all rollouts of this round were taken. '
        "Call update(weights), or update() to go on with the same weights"
    )


class _Task:
    """A rollout that a collector was asked for.

    Attributes:
        request: the id of the request.
        version: of the weights that it is made with.
        restarted: see `CollectedRollout`.
        buffers: those in shared memory that it is written to; None: it travels in messages.
    """

    def __init__(self) -> None:
        self.request = -1
        self.version = 0
        self.buffers: list[memoryview] | None = None
        self.restarted = False


class _Lost:
    """An error in place of a rollout."""

    def __init__(self, collector: Collector, error: AioenvError) -> None:
        self.collector = collector
        self.error = error


class Collector:
    """A collector, as its parent sees it.

    Args:
        worker: its process.
        seed: of the first episodes of its slots; None: no seeds.

    Attributes:
        worker: as given.
        open: the rollouts that it was asked for, the oldest first.
        untaken: the number of its rollouts, and errors, that the iteration has not taken.
        delivered: in sync mode, whether its rollout of this round was taken.
        finished: whether its envs have no further episode.
        fresh: whether its process has begun no episode yet.
        has_sent: whether any process of it has sent a rollout.
        weights: the pickle of the weights that its process has; empty: those of the policy's factory. None: it has
            refused the last ones, or lacks them.
        lacked: the pickle of weights that its cluster could not share with it; None: there were none.
        sizes: of the buffers of its last rollout, in bytes; None: there was none yet.
        blocks: of shared memory, for its rollouts.
        policy_s: how long its policy ran, in seconds.
    """

    def __init__(self, worker: Worker, seed: int | list[int | None] | None) -> None:
        self.worker = worker
        self.open: list[_Task] = []
        self.untaken = 0
        self.delivered = False
        self.finished = False
        self.fresh = True
        self.has_sent = False
        self.weights: bytes | None = b""
        self.lacked: bytes | None = None
        self.sizes: tuple[int, ...] | None = None
        self.blocks = MemoryBlocks(None)
        self.policy_s = 0.0
        self._seed = seed
        self._episodes: list[int] | None = None  # of the plan, by slot
        self._restarts = 0  # since it has sent a rollout
        self._timer: asyncio.TimerHandle | None = None
        self._idle_s = 0.0
        self._idle_since: float | None = None

    @property
    def has_failed(self) -> bool:
        """Whether, in sync mode, an error was raised in place of its rollout, which was not asked for again yet."""
        return not (self.delivered or self.finished or self.open or self.untaken)

    def begin(self) -> Begin:
        """Return how the slots of a new process begin."""
        seed = self._seed
        if self._restarts:
            each = self._seed
            if isinstance(each, list):
                seed = [derive_seed(one, self._restarts) for one in each]
            else:
                seed = derive_seed(each, self._restarts)
        return Begin(seed, self._episodes, self._restarts)

    def note_new_process(self) -> None:
        """Note that the process was replaced."""
        self.fresh, self.weights = True, b""
        if self.has_sent:
            self._restarts += 1

    def note_sent(self, timeout_s: float | None) -> None:
        """Note that a rollout was asked for."""
        if self._idle_since is not None:
            self._idle_s += perf_counter() - self._idle_since
            self._idle_since = None
        if timeout_s is not None and self._timer is None:
            self._start_clock(timeout_s)

    def note_rollout(self, reply: CollectReply, timeout_s: float | None) -> None:
        """Note the reply with a rollout."""
        self.has_sent = True
        self._episodes = reply.episodes
        self.policy_s += reply.policy_s
        self.finished = reply.finished
        self.note_end(timeout_s)

    def note_end(self, timeout_s: float | None) -> None:
        """Note that a rollout has arrived, or failed."""
        self.stop_clock()
        if len(self.open) > 1 and timeout_s is not None:
            self._start_clock(timeout_s)
        if len(self.open) <= 1:
            self._idle_since = perf_counter()

    def idle_until(self, now: float) -> float:
        """Return how long it has waited for the learner, in seconds."""
        return self._idle_s + (now - self._idle_since if self._idle_since is not None else 0.0)

    def _start_clock(self, timeout_s: float) -> None:
        reason = f"a rollout took longer than timeout_s={timeout_s:g}"
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.worker.kill, reason)

    def stop_clock(self) -> None:
        """Stop to watch the time of a rollout."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
