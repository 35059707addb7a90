"""Spare envs: the second env of each slot, which is reset while the first one runs an episode.

Each slot has two workers with one env each. `WorkerSlots.worker` of the pool is the one whose env runs the slot's
episode. When that episode has ended, the other one takes its place: at once under SAME_STEP, with the next step under
NEXT_STEP. The env that has finished is then reset for the episode after the next. So the episodes of a slot alternate
between its two envs, for any timing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aioenv.core.recovery import derive_seed
from aioenv.core.requests import reset_payload
from aioenv.core.worker_pool import WorkerSlots
from aioenv.errors import SlotError, WorkerDied
from aioenv.ipc.frames import Frame, Kind
from aioenv.process.supervisor import ACCEPTS_REQUESTS, Worker
from aioenv.spaces.infos import Columns, Gatherer, SchemaTable

if TYPE_CHECKING:
    from aioenv.core.recovery import SlotHistory
    from aioenv.core.requests import BatchRequest, WorkerRequest
    from aioenv.core.worker_pool import WorkerPool

__all__ = ["Last", "SpareEnvs", "SpareState", "spare_seed"]

_log = logging.getLogger("aioenv")

Slots = npt.NDArray[np.int64]
# The arrays and objects of an observation, and the physics state.
Last: TypeAlias = "tuple[list[Any], Sequence[Sequence[Any]], npt.NDArray[np.float64]]"


def spare_seed(seed: int | None) -> int | None:
    """Derive the first seed of a slot's second env from the slot's seed; None for None.

    It is `numpy.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1)[0] >> 2`: 30 bits, which every env takes.
    """
    if seed is None:
        return None
    return int(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1)[0]) >> 2


class SpareState(NamedTuple):
    """What a slot's episodes depend on beside the states of its two envs.

    Attributes:
        live: which env runs the episode: 0 for the first, 1 for the second one.
        number: the number of the episode that the other one begins.
        prepared: its reset; None: there is none.
        ended: whether the next step begins that episode.
        last: the last observation and state of the episode that has ended; None: it is not known.
        lost: whether the episode was lost with its worker, and its end is not yet handed out.
    """

    live: int
    number: int
    prepared: BatchRequest | None
    ended: bool
    last: Last | None
    lost: bool = False


class _Slot:
    """The two envs of a slot.

    Args:
        live: the pool's entry of the slot, whose worker is the first one.
        second: the second worker.

    Attributes:
        slot: its number.
        live: as given; its worker is always the one whose env runs the episode.
        spare: the other worker.
        both: the workers of the first and the second env, in objects that do not change.
        number: the number of the episode that the spare env begins.
        prepared: the reset of the spare env, whose reply may not be in; None: there is none.
        taken: the reset that the slot already waits for, until its reply arrives; None otherwise.
        waiting: the request that waits for this reply; since: when it began to wait, by `perf_counter`.
        last: the last observation and state of an episode that has ended, while the next one has not begun; None: its
            episode goes on.
        restarted: whether the episode that begins now comes after such a one.
        held: whether an episode that ends is followed by a reset that was announced (see `SpareEnvs.reserve`).
        reserved: whether `prepared` is the one that was announced; reserved_seed: its seed.
        taking: whether the reset that is being sent is that one.
        seeds: by worker, the seed of its first reset.
    """

    __slots__ = (
        "_current",
        "both",
        "held",
        "last",
        "live",
        "number",
        "prepared",
        "reserved",
        "reserved_seed",
        "restarted",
        "seeds",
        "since",
        "slot",
        "spare",
        "taken",
        "taking",
        "waiting",
    )

    def __init__(self, live: WorkerSlots, second: WorkerSlots) -> None:
        self.slot = live.start
        self.live = live
        self.spare = second
        self._current = WorkerSlots(live.worker, live.start, live.stop, live.schemas)
        self.both = self._current, second
        self.number = 0
        self.prepared: BatchRequest | None = None
        self.taken: BatchRequest | None = None
        self.waiting: tuple[BatchRequest, WorkerRequest] | None = None
        self.since = 0.0
        self.last: Last | None = None
        self.restarted = self.held = self.reserved = self.taking = False
        self.reserved_seed: int | None = None
        self.seeds: dict[Worker, int | None] = {}

    def swap(self) -> None:
        """Let the two workers change places."""
        self._current, self.spare = self.spare, self._current
        self.live.worker, self.live.schemas = self._current.worker, self._current.schemas

    @property
    def current(self) -> WorkerSlots:
        """The worker whose env runs the episode, in an object that does not change."""
        return self._current


class SpareEnvs:
    """Begins the episodes of slots in their spare envs, and resets the envs whose episodes have ended.

    Args:
        worker_pool: has two workers with one env each for every slot.
        next_step: whether the mode is NEXT_STEP: the step after the last one of an episode begins the next one. Else it
            is SAME_STEP: the last step itself does.
        make_request: makes a request to some workers (see `Dispatcher.make_request`).
        read_reply: reads a reply, or the error in its place, into its worker request; pauses no exhausted slot.
        exhaust: pauses the slots of a worker request whose envs have no further episode.
        pass_on_updates: passes on the models that images need (see `Dispatcher`).
        complete: goes on with a reply that was held back until the next episode had begun; gets the error if it never
            will.
        history: the last observations of the slots, if workers are restarted; None: they are not.
        is_restarting: tells whether a worker is being restarted.
        start_restart: starts the restart of a worker that has died, with this error, if that was not done yet; tells
            whether it is being restarted. Replies may tell of a death before `note_restart` does.

    Attributes:
        ended: the slots whose next step begins an episode (NEXT_STEP).
        lost: the slots whose next step ends an episode that was lost with its worker, which is restarted.
        waits: how often a step has waited for a spare env.
        closing: whether the vector env is being closed, so that ends of workers mean nothing.
        wait_s: how long slots have waited, in seconds, those that waited at the same time added up.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        *,
        next_step: bool,
        make_request: Callable[..., BatchRequest],
        read_reply: Callable[[BatchRequest, WorkerRequest, Frame | SlotError], None],
        exhaust: Callable[[BatchRequest, WorkerRequest], None],
        pass_on_updates: Callable[[WorkerRequest], None],
        complete: Callable[[BatchRequest, WorkerRequest, SlotError | None], None],
        history: SlotHistory | None,
        is_restarting: Callable[[Worker], bool],
        start_restart: Callable[[Worker, WorkerDied], bool],
    ) -> None:
        self.ended: set[int] = set()
        self.lost: set[int] = set()
        self.waits = 0
        self.wait_s = 0.0
        self.closing = False
        self._next_step = next_step
        self._has_seeds = worker_pool.reset_plan is not None and worker_pool.reset_plan.has_seeds
        self._numbered = worker_pool.reset_plan is not None
        self._make_request = make_request
        self._read_reply = read_reply
        self._exhaust = exhaust
        self._pass_on_updates = pass_on_updates
        self._complete = complete
        self._history = history
        self._is_restarting = is_restarting
        self._start_restart = start_restart
        self._absent: set[Worker] = set()  # workers that are being restarted: until they are configured, too
        self._slots = [_Slot(*pair) for pair in zip(worker_pool.members, worker_pool.spares, strict=True)]

    # ------------------------------------------------------------ resets that the user asked for

    def episodes_of(self, slots: Sequence[int], *, start_over: bool) -> tuple[int, ...] | None:
        """Return the numbers of the episodes that a reset of these slots begins; None without a plan of resets."""
        return tuple(0 if start_over else self._slots[slot].number for slot in slots) if self._numbered else None

    def note_reset(self, seeds: Mapping[int, int | None], *, start_over: Callable[[int], bool]) -> None:
        """Discard what was prepared for slots that the user resets, and prepare the episodes after those.

        Args:
            seeds: by slot.
            start_over: whether a slot begins with episode 0 again.
        """
        for number, seed in seeds.items():
            slot = self._slots[number]
            slot.taken = slot.waiting = None
            slot.restarted = False
            self.ended.discard(number)
            self.lost.discard(number)
            if slot.held:
                slot.taking = slot.prepared is not None and slot.reserved_seed == seed and self._is_ready(slot.spare)
                slot.number += not slot.taking
                continue
            slot.prepared = None
            if not self._is_ready(slot.live) and self._is_ready(slot.spare):
                slot.swap()
            slot.number = 1 if start_over(number) else slot.number + 1
            second = None if self._has_seeds else spare_seed(seed)
            if seed is not None:
                slot.seeds = {slot.live.worker: seed, slot.spare.worker: second}
            self._prepare(slot, second)

    # ------------------------------------------------------------ resets that are known before

    def reserve(self, slot: int, seed: int | None) -> None:
        """Prepare the reset with this seed that the slot gets next; until `release`, no other episode is prepared."""
        both = self._slots[slot]
        both.held = both.reserved = True
        both.reserved_seed = seed
        self._prepare(both, seed)

    def release(self, slots: Iterable[int]) -> None:
        """Prepare the next episodes of these slots as usual again."""
        for number in slots:
            slot = self._slots[number]
            if slot.held:
                slot.held = slot.reserved = False
                self._prepare(slot, None)

    def takes_reset(self, slot: int) -> bool:
        """Return whether the reset of a slot that is being sent was prepared, so that `begin_episode` answers it."""
        return self._slots[slot].taking

    # ------------------------------------------------------------ states

    def state_of(self, number: int) -> SpareState:
        """Return what the episodes of a slot depend on, which has no request in flight."""
        slot = self._slots[number]
        live, ended = int(slot.current is slot.both[1]), number in self.ended
        return SpareState(live, slot.number, slot.prepared, ended, slot.last, number in self.lost)

    def restore(self, number: int, state: SpareState, *, prepared: bool) -> BatchRequest | None:
        """Go on from the state of another slot, which was just sent to both envs of this one.

        Args:
            number: the slot.
            state: the state; its reset is another vector env's.
            prepared: whether the state of the spare env is that of an episode that has just begun.

        Returns:
            The request for the first results of that episode; None if there is none.
        """
        slot = self._slots[number]
        self._set(slot, state)
        slot.prepared = None
        if slot.last is not None:
            slot.last = self._fitting(slot, slot.last)
        if prepared and not slot.held:
            request = slot.prepared = self._make_reset(slot.spare)
            self._send_reset(slot, slot.spare, request, None, restored=True)
        slot.reserved = False
        return slot.prepared

    def revert(self, number: int, state: SpareState, request: BatchRequest | None) -> None:
        """Return to a state before `restore`, which gave this request, since an env has refused the later one."""
        slot = self._slots[number]
        if slot.prepared is request and slot.waiting is None:  # the slot was neither reset nor stepped meanwhile
            self._set(slot, state)

    def _set(self, slot: _Slot, state: SpareState) -> None:
        slot.taken = slot.waiting = None
        slot.restarted = False
        if slot.current is not slot.both[state.live]:
            slot.swap()
        slot.number, slot.prepared, slot.last = state.number, state.prepared, state.last
        for numbers, is_in in ((self.ended, state.ended), (self.lost, state.lost)):
            (numbers.add if is_in else numbers.discard)(slot.slot)

    def _fitting(self, slot: _Slot, last: Last) -> Last:
        """Return a last observation and state, or zeros if those of this vector env have other shapes."""
        batch = self._make_reset(slot.current).batch
        mine, theirs = [*(each[0] for each in batch.received), batch.state[0]], [*last[0], last[2]]
        if [each.shape for each in mine] == [each.shape for each in theirs]:
            return last
        return [np.zeros_like(each) for each in mine[:-1]], last[1], np.zeros_like(mine[-1])

    # ------------------------------------------------------------ the ends of episodes

    def end_episode(self, request: BatchRequest, part: WorkerRequest) -> bool:
        """If this reply to a step ends an episode, let the other env take over.

        Returns:
            Whether the reply is held back, since the next episode has not begun yet; `complete` goes on with it.
        """
        batch, row = request.batch, part.start
        slot = self._slots[part.slots[0]]
        if not request.stepped and part.sent is not None and len(part.sent.slots):
            self.lost.discard(slot.slot)  # a worker that died meanwhile was started again, and got the reset again
            last, slot.last = slot.last, None
            if last is not None and (part.errors or part.exhausted) and not _has_died(part):
                slot.last = last  # of the other env, if the reset before this one raised, too
                _put_last(last, request, part)
        if part.errors and self.is_waiting(part):  # Ctrl-C while its reply was handled has ended its worker
            slot.waiting = None
        if part.errors:
            return False
        if not request.stepped:
            if part.exhausted:  # a reset of the user; the next step begins the episode after it
                slot.last = _last_of(request, part)
                self.ended.add(slot.slot)
            return False
        slot.last = None  # there is one after a reset that raised
        if not (batch.terminated[row] or batch.truncated[row]) or slot.held:
            return False
        if not self._next_step:
            return not self._take_over(slot, request, part)
        slot.last = _last_of(request, part)
        self.ended.add(slot.slot)
        return False

    def show_last(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Put the last observation of an episode into a reply that shows it: the slot's worker may not know it.

        This is so if the env that was to begin the next episode has no further one, and if the process that ran the
        episode was lost: the one in its place has no observation yet.
        """
        slot = self._slots[part.slots[0]]
        last = self._last_before_loss(slot)[0] if slot.slot in self.lost else slot.last
        if last is not None:
            _put_last(last, request, part)

    def answer_step(self, request: BatchRequest, part: WorkerRequest) -> bool:
        """Answer a step that begins an episode, or ends one that was lost; return False for any other step."""
        slot = int(part.slots[0])
        if slot in self.ended:
            self.begin_episode(request, part)
        elif slot in self.lost and self.can_take_over(part):
            self.lose_episode(request, part)
        else:
            return False
        return True

    def begin_episode(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Answer a step that begins an episode (NEXT_STEP), whose action is not used, or a reset that was prepared.

        `complete` gets the reply.
        """
        slot = self._slots[part.slots[0]]
        slot.taking = False
        batch, row = request.batch, part.start
        batch.reward[row], batch.terminated[row], batch.truncated[row] = 0.0, False, False
        still_open = request.open
        try:
            if self._take_over(slot, request, part):
                self._complete(request, part, None)
        except BaseException:  # Ctrl-C
            if request.open == still_open and not self.is_waiting(part):
                self._break_off(slot, request, part)
            raise

    def _break_off(self, slot: _Slot, request: BatchRequest, part: WorkerRequest) -> None:
        """Have a slot reset that was interrupted while its next episode began: it may be in either of its envs."""
        slot.last = slot.taken = slot.prepared = None
        self.ended.discard(slot.slot)
        error = part.member.worker.parent_env_error(
            "it was interrupted while its next episode began", part.slots.tolist()
        )
        part.columns, part.errors = (), [error]
        self._complete(request, part, error)

    def is_waiting(self, part: WorkerRequest) -> bool:
        """Return whether a worker request waits for an episode to begin."""
        waiting = self._slots[part.slots[0]].waiting
        return waiting is not None and waiting[1] is part

    def _take_over(self, slot: _Slot, request: BatchRequest, part: WorkerRequest) -> bool:
        """Let the spare env take over; return whether its episode has begun, and is in the request."""
        taken = slot.prepared
        if taken is None or not self._is_ready(slot.spare):  # the slot goes on in the env that it has
            taken = None if slot.current.worker in self._absent else self._reset_live(slot, None)
        else:
            slot.swap()
            slot.prepared, slot.reserved = None, False
            slot.number += 1
            if not slot.held:
                self._prepare(slot, None)
        if taken is not None and not taken.open and _has_died(taken.parts[0]) and self._is_restarting(slot.live.worker):
            taken = None  # `note_restart` resets it
        if taken is not None and not taken.open:
            self._begin(slot, taken, request, part)
            return True
        slot.taken, slot.waiting, slot.since = taken, (request, part), perf_counter()
        return False

    def _begin(self, slot: _Slot, taken: BatchRequest, request: BatchRequest, part: WorkerRequest) -> None:
        """Put the first results of an episode into a request."""
        source, batch, row = taken.parts[0], request.batch, part.start
        last, slot.last = slot.last, None
        self.ended.discard(slot.slot)
        part.errors = [*part.errors, *source.errors]
        if source.errors:  # as after an automatic reset that raised
            batch.reward[row], batch.terminated[row], batch.truncated[row] = 0.0, False, False
            part.columns = ()
        shown = _last_of(taken, source)
        if source.exhausted or source.errors:  # the last observation stays
            if last is None and request.stepped:
                last = _last_of(request, part)
            slot.last, shown = last, last or shown
        if source.exhausted:  # the next step tries once more
            part.exhausted = source.exhausted
            self.ended.add(slot.slot)
        _put_last(shown, request, part)
        here = slice(row, row + 1)
        part.columns = [*part.columns, *(columns._replace(positions=here) for columns in source.columns)]
        restarted, slot.restarted = slot.restarted, False
        if restarted and not source.errors:
            part.columns += _columns_of({"restarted": True}, here)
        if source.exhausted:
            self._exhaust(request, part)

    # ------------------------------------------------------------ resets of spare envs

    def _prepare(self, slot: _Slot, seed: int | None) -> None:
        """Begin the slot's next episode in its spare env; if that is being restarted, `note_restart` does so later."""
        slot.prepared = None
        if slot.spare.worker in self._absent:
            return
        request = slot.prepared = self._make_reset(slot.spare)
        self._send_reset(slot, slot.spare, request, seed)

    def _reset_live(self, slot: _Slot, seed: int | None) -> BatchRequest:
        """Begin the slot's next episode in the env that it has; return the request."""
        request = self._make_reset(slot.current)
        self._send_reset(slot, slot.current, request, seed)
        slot.number += 1
        return request

    def _make_reset(self, member: WorkerSlots) -> BatchRequest:
        request = self._make_request([(member, np.array([member.start]))], 0, reused=False)
        request.stepped = False
        return request

    def _send_reset(
        self, slot: _Slot, member: WorkerSlots, request: BatchRequest, seed: int | None, *, restored: bool = False
    ) -> None:
        part = request.parts[0]
        payload = reset_payload(
            member,
            [slot.slot],
            [seed],
            None,
            whole=False,
            automatic=True,
            episodes=(slot.number,) if self._numbered else None,
            restored=restored,
        )
        on_reply = partial(self._on_reply, slot, request)
        try:
            member.worker.submit(Kind.RESET, (), payload, into=part.into[1], on_reply=on_reply)
        except WorkerDied as error:
            on_reply(error)

    def _on_reply(self, slot: _Slot, request: BatchRequest, outcome: Frame | SlotError) -> None:
        """Note that an env was reset. Its reply is read in any case, as later ones refer to the schemas in it."""
        self._read_reply(request, request.parts[0], outcome)
        request.open = 0
        # in any case, and at once: the env does not send them again, also if its episode is discarded
        self._pass_on_updates(request.parts[0])
        if slot.prepared is request and isinstance(outcome, WorkerDied):
            slot.prepared = None
        if slot.taken is not request or slot.waiting is None:
            return
        if isinstance(outcome, WorkerDied) and self._start_restart(slot.live.worker, outcome):
            slot.taken = None  # the episode begins in the env that is there first
            if slot.prepared is not None and self._is_ready(slot.spare):
                slot.swap()
                slot.taken, slot.prepared = slot.prepared, None
                slot.number += 1
            if slot.taken is None or slot.taken.open:
                return
            request = slot.taken
        self._end_wait(slot, request)

    def _end_wait(self, slot: _Slot, taken: BatchRequest) -> None:
        assert slot.waiting is not None
        waiting, still_open = slot.waiting, slot.waiting[0].open
        self.waits += 1
        self.wait_s += perf_counter() - slot.since
        try:
            self._begin(slot, taken, *waiting)
            slot.taken = slot.waiting = None
            self._complete(*waiting, None)
        except BaseException:  # Ctrl-C: it ends the worker whose reply this is, and with it the wait
            if waiting[0].open == still_open:
                slot.taken, slot.waiting = taken, waiting
            raise

    # ------------------------------------------------------------ the ends of workers

    def can_go_on(self, slot: int) -> bool:
        """Return whether a slot has an env whose worker is alive, or is being restarted."""
        both = self._slots[slot].live, self._slots[slot].spare
        return any(_accepts(member) or self._is_restarting(member.worker) for member in both)

    def both_of(self, slot: int) -> tuple[WorkerSlots, WorkerSlots]:
        """Return the workers of a slot's first and second env, whichever runs the episode."""
        return self._slots[slot].both

    def spare_of(self, slot: int) -> WorkerSlots:
        """Return the worker of the env of a slot that runs no episode."""
        return self._slots[slot].spare

    def note_death(self, worker: Worker) -> None:
        """Note that a worker has ended, and is not restarted: its slot goes on in the other env, if that is alive."""
        slot = self._slots[worker.slots[0]]
        self._absent.discard(worker)
        if self.is_expendable(worker):
            if not self.closing:
                with contextlib.suppress(Exception):  # of a log handler
                    _log.warning(
                        "the spare env of slot %d is gone: %s; from now on steps wait for the resets of this slot",
                        slot.slot,
                        worker.death_error(),
                    )
        elif slot.live.worker is worker:
            slot.last = None
            self.ended.discard(slot.slot)
            if _accepts(slot.spare):
                slot.swap()
        if slot.waiting is not None and slot.taken is None and not self.can_go_on(slot.slot):
            self._end_wait(slot, self._reset_live(slot, None))  # which fails

    def is_expendable(self, worker: Worker) -> bool:
        """Return whether a slot goes on without this worker, and loses no episode with it."""
        slot = self._slots[worker.slots[0]]
        if slot.spare.worker is worker:
            return _accepts(slot.live)
        return slot.slot in self.ended and slot.prepared is not None and _accepts(slot.spare)

    def note_restart(self, worker: Worker, *, back: bool) -> None:
        """Note that a worker is being restarted (`back` is False), or is back: prepare an episode in its new env."""
        slot = self._slots[worker.slots[0]]
        if not back:
            self._absent.add(worker)
            if slot.spare.worker is worker:
                slot.prepared = None  # its env is gone
            # an episode that has ended, or that the other env runs, is not lost
            if slot.live.worker is worker and slot.last is None and slot.waiting is None:
                self.lost.add(slot.slot)
            return
        self._absent.discard(worker)
        seed = None if self._has_seeds else derive_seed(slot.seeds.get(worker), worker.generation)
        if slot.held and slot.reserved_seed is not None:
            seed = slot.reserved_seed
        if slot.waiting is not None and slot.taken is None:
            if slot.spare.worker is worker:
                slot.swap()
            taken = self._reset_live(slot, seed)
            slot.taken = taken if taken.open else None  # or the worker is gone again
        elif slot.spare.worker is worker and (slot.reserved or not slot.held):
            self._prepare(slot, seed)

    def can_take_over(self, part: WorkerRequest) -> bool:
        """Return whether a worker is alive in which the slot of a worker request can go on."""
        slot = self._slots[part.slots[0]]
        return self._is_ready(slot.live) or self._is_ready(slot.spare)

    def _is_ready(self, member: WorkerSlots) -> bool:
        """Return whether a worker is alive and configured."""
        return _accepts(member) and member.worker not in self._absent

    def lose_episode(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Answer a step with the truncated end of an episode that was lost with its worker; `complete` gets it."""
        slot, batch, row = self._slots[part.slots[0]], request.batch, part.start
        self.lost.discard(slot.slot)
        last, obs = self._last_before_loss(slot)
        _put_last(last, request, part)
        batch.reward[row], batch.terminated[row], batch.truncated[row] = 0.0, False, True
        info = {"restarted": True}
        if self._next_step:
            part.columns = _columns_of(info, slice(row, row + 1))
            slot.last = last
            self.ended.add(slot.slot)
            self._complete(request, part, None)
            return
        part.columns = _columns_of({"final_obs": obs, "final_info": info}, slice(row, row + 1))
        if slot.held:
            part.columns += _columns_of(info, slice(row, row + 1))
            self._complete(request, part, None)
            return
        slot.restarted = True
        if self._take_over(slot, request, part):
            self._complete(request, part, None)

    def _last_before_loss(self, slot: _Slot) -> tuple[Last, Any]:
        """Return the last results of an episode that was lost with its worker, and their observation as a whole."""
        assert self._history is not None
        arrays, objects, obs, state = self._history.last_of(slot.slot)
        return (arrays, [[item] for item in objects], state), obs


def _last_of(request: BatchRequest, part: WorkerRequest) -> Last:
    """Return a copy of the observation and state of a worker request of one slot."""
    batch, row = request.batch, part.start
    arrays = [array[row].copy() for array in batch.received]
    return arrays, [list(column) for column in part.objects], batch.state[row].copy()


def _put_last(last: Last, request: BatchRequest, part: WorkerRequest) -> None:
    batch, row = request.batch, part.start
    arrays, part.objects, batch.state[row] = last
    for mine, theirs in zip(batch.received, arrays, strict=True):
        mine[row] = theirs


def _has_died(part: WorkerRequest) -> bool:
    return any(isinstance(error, WorkerDied) for error in part.errors)


def _accepts(member: WorkerSlots) -> bool:
    return member.worker.state in ACCEPTS_REQUESTS


def _columns_of(info: dict[str, Any], positions: slice) -> list[Columns]:
    """Return the info of one row as columns."""
    gatherer, schemas = Gatherer(), SchemaTable({})
    groups = gatherer.gather([(0, info)], [0])
    schemas.update(gatherer.take_new_schemas())
    return [schemas.unpack(group, positions, 1) for group in groups]
