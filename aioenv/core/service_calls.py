"""Calls of the services in the workers, beside steps: methods of envs, shared statistics, shared model fields."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from aioenv.errors import ClosedError, SlotError, WireError, WorkerDied
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.memory import SharedMemory
from aioenv.ipc.messages import CallRequest, dump, load
from aioenv.process.async_resource import internal_task
from aioenv.process.supervisor import ACCEPTS_REQUESTS
from aioenv.state.model_edits import FieldPlace

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.timeouts import ReplyTimeouts
    from aioenv.core.worker_pool import WorkerPool, WorkerSlots
    from aioenv.process.supervisor import Worker

__all__ = ["ModelFields", "StatsMerger", "call_workers"]

Array = npt.NDArray[Any]


# ------------------------------------------------------------ methods of envs


async def call_workers(
    scheduler: RequestScheduler,
    slots: Iterable[int] | None,
    what: str,
    method: str,
    arguments: Any,
    *,
    spares: Literal["none", "both", "living"] = "none",
    on_sent: Callable[[], None] | None = None,
    on_result: Callable[[int, Any], None] | None = None,
) -> tuple[Any, ...]:
    """Call a method of the workers' services for some slots (see `Backend.call_service`).

    Args:
        what: the user's call, for errors.
        arguments: returns the arguments of the method after the rows, for the numbers of one worker.
        spares: "both": call both envs of each slot. A slot's second env has the number `num_envs + slot`, and the
            result of a slot is a pair. "living": likewise, but slots go on without spare envs whose workers are gone.
        on_sent: called as soon as all calls are sent, before anything else can be.
        on_result: called with each slot and its result when it arrives (see `Backend.call_service`).
    """
    numbers = np.sort(scheduler.table.slot_numbers(slots))
    scheduler.table.check_call(numbers, what)
    shares: list[tuple[WorkerSlots, list[int]]] = []
    optional: list[WorkerSlots] = []
    n = scheduler.num_envs
    if spares == "none":
        shares = [(member, mine.tolist()) for member, mine in scheduler.worker_pool.shares(numbers)]
    else:
        assert scheduler.spares is not None
        for slot in numbers.tolist():
            if spares == "living":
                optional.append(scheduler.spares.spare_of(slot))
            both = enumerate(scheduler.spares.both_of(slot))
            shares += [(m, [slot + n * i]) for i, m in both if m not in optional or m.worker.state in ACCEPTS_REQUESTS]
    if scheduler.restarter is not None:
        await scheduler.timeouts.wait_for_restarts(what, [member for member, _ in shares])
        scheduler.check_open()
        scheduler.table.check_call(numbers, what)  # other tasks may have sent requests meanwhile
    # all calls are sent before anything is awaited: so a cancelled call was made in every env, or in none
    try:
        calls = [
            dump(CallRequest(method, ([i % n - m.start for i in mine], *arguments(mine)), {}), m.worker.definitions)
            for m, mine in shares
        ]
    except Exception as exc:
        raise TypeError(f"{what}: expected what can be pickled, got {type(exc).__name__}: {exc}") from exc
    asked = [
        _ask(member, call, None if on_result is None else partial(_tell_results, mine, on_result))
        for (member, mine), call in zip(shares, calls, strict=True)
    ]
    if on_sent is not None:
        on_sent()
    replies = await scheduler.timeouts.gather(what, asked, [member for member, _ in shares])
    if scheduler.closing and (deaths := [reply for reply in replies if isinstance(reply, SlotError)]):
        raise ClosedError(f"{what}: the vector env was closed while this was in flight") from deaths[0]
    results: dict[int, Any] = {}
    errors: list[SlotError] = []
    for (member, mine), reply in zip(shares, replies, strict=True):
        if isinstance(reply, WorkerDied) and member in optional:
            continue  # its slot goes on without it
        if isinstance(reply, SlotError):
            reply.concern(tuple(i % n for i in mine))
            errors.append(reply)
            continue
        if isinstance(reply, BaseException):
            raise reply
        if reply.kind is Kind.FAILURE:
            error = member.worker.env_error(load(reply.payload))
            error.concern(tuple(i % n for i in mine))
            errors.append(error)
            continue
        values, failures = load(reply.payload)
        for i, data in zip(mine, values, strict=True):
            try:
                results[i] = load(data) if data else None
            except WireError as exc:
                message = f"the result of {what} pickled in the worker, but here {exc}"
                error = member.worker.parent_env_error(message, [i % n])
                error.__cause__ = exc.__cause__
                errors.append(error)
        errors += [member.worker.env_error(failure) for failure in failures]
    result = tuple(results.get(slot) for slot in numbers.tolist())
    if spares != "none":
        result = tuple((results.get(slot), results.get(slot + n)) for slot in numbers.tolist())
    if errors:
        raise SlotError.join(errors, result)
    return result


def _tell_results(mine: list[int], on_result: Callable[[int, Any], None], frame: Frame) -> None:
    """Call a function with each number that a reply has a result of, and the result."""
    if frame.kind is Kind.FAILURE:
        return
    values, _ = load(frame.payload)
    for number, data in zip(mine, values, strict=True):
        if data:  # else its env has raised
            with suppress(WireError):  # the caller gets it as an error of the slot
                on_result(number, load(data))


def _ask(member: WorkerSlots, call: bytes, on_success: Callable[[Frame], None] | None) -> asyncio.Future[Frame]:
    """Send a call, and return a future of its reply, or of the error with which the worker ended.

    Args:
        on_success: called with the reply, also if the caller does not wait any more.
    """
    reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    def on_reply(outcome: Frame | SlotError) -> None:
        if on_success is not None and not isinstance(outcome, SlotError):
            on_success(outcome)
        if reply.done():  # the caller does not wait any more
            return
        if isinstance(outcome, SlotError):
            reply.set_exception(outcome)
        else:
            reply.set_result(outcome)

    try:
        member.worker.submit(Kind.CALL, (), call, on_reply=on_reply)
    except SlotError as exc:
        reply.set_exception(exc)
    return reply


# ------------------------------------------------------------ shared statistics


class StatsMerger:
    """Merges the data of slots, in their order, whenever results are handed out and nothing else is in flight.

    So the statistics that a step uses depend on the steps before alone, not on timing, nor on the number of workers. In
    shared memory that takes no message. Statistics without it are copies in the workers. Then new data is fetched,
    merged here, and the outcome sent back, which gives the same bits.

    Args:
        worker_pool: the workers, and the statistics that their factories refer to.

    Attributes:
        timeouts: waits for the replies of workers that have copies.
    """

    timeouts: ReplyTimeouts

    def __init__(self, worker_pool: WorkerPool) -> None:
        self._worker_pool = worker_pool
        merged = [stats for stats in worker_pool.stats if not stats.live]
        self._shared = [stats for stats in merged if stats.shared]
        self._copied = {stats.key: stats for stats in merged if not stats.shared}
        self._exchanging: asyncio.Task[None] | None = None
        self._replied: set[int] = set()  # the slots that have replied since the last merge

    def note(self, slots: npt.NDArray[np.int64]) -> None:
        """Note that these slots have replied."""
        self._replied.update(slots.tolist())

    async def merge(self) -> None:
        """Merge. If this is cancelled, the next merge completes it first.

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
                # a merge was cancelled: the data that it fetched must not be lost
                await asyncio.wait([self._exchanging])
            self._exchanging = internal_task(self._exchange())
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
        """Call a method of workers, and return their replies; those that have died are left out, with their data."""
        tasks = [internal_task(worker.call(method, *args)) for worker in workers]
        try:
            replies = await self.timeouts.gather("merge", tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    def _states(self) -> dict[bytes, Any]:
        return {key: stats.state_dict() for key, stats in self._copied.items() if not stats.closed}

    async def catch_up(self, worker: Worker, *, resumed: bool) -> None:
        """Bring the statistics of a restarted worker up to date, before it repeats the last request.

        Args:
            worker: the restarted worker.
            resumed: whether its slots go on where they were. Then the data of a step that was not completed is dropped,
                since that step is repeated. (For a slot that has replied since the last merge it is not known which
                data is of which step, and all of it stays.)
        """
        if resumed:
            again = [slot for slot in worker.slots if slot not in self._replied]
            for stats in self._shared:
                if not stats.closed:
                    stats.forget(again)
        if self._copied:
            await worker.call("load_stats", self._states())


# ------------------------------------------------------------ fields of models


class ModelFields:
    """Fields of the models of a native vector env, in memory that its workers share.

    The memory is made for the first field. Workers open it through the descriptor of this process. They get each field
    by a call whose reply is not awaited: requests are answered in order, so the next step uses the field.

    Args:
        defaults: for each worker the values of its model's fields, pickled; None if its env has none.
        workers: the workers, in the order of slots.
    """

    def __init__(self, defaults: Sequence[bytes | None], workers: Sequence[Worker]) -> None:
        self._pickled = defaults
        self._defaults: list[dict[str, Array]] = []  # read when the first field is asked for
        self._workers = workers
        self._memory: SharedMemory | None = None
        self._arrays: dict[str, tuple[Array, FieldPlace]] = {}

    def field(self, name: str) -> Array:
        """Return the live array of a field, `(num_envs, ...)`.

        Raises:
            ValueError: if there is no such field, or it can't be shared.
        """
        if name not in self._arrays:
            self._arrays[name] = self._make(self._read_defaults(name))
            for worker in self._workers:
                self._tell(worker, name)
        return self._arrays[name][0]

    def _read_defaults(self, name: str) -> list[Array]:
        if not self._defaults:
            if None in self._pickled:
                raise ValueError("model_field: the vector env is no NativeMujocoEnv")
            self._defaults = [load(data) for data in self._pickled if data is not None]
        values = []
        for worker, defaults in zip(self._workers, self._defaults, strict=True):
            if name not in defaults:
                raise ValueError(
                    f"model_field: {name!r} is no field of MjModel that can differ between simulations, or the env has "
                    "taken it itself"
                )
            values += [defaults[name]] * len(worker.slots)
        if len({(value.shape, value.dtype) for value in values}) > 1:
            raise ValueError(f"model_field: {name!r} has not the same shape in all workers")
        return values

    def _make(self, values: list[Array]) -> tuple[Array, FieldPlace]:
        if self._memory is None:
            self._memory = SharedMemory.create() if os.path.exists("/proc/self/fd") else None
            if self._memory is None:
                raise ValueError(
                    "model_field: this platform has no memory without a name to share; leave out num_workers="
                )
        shape = (len(values), *values[0].shape)
        page = mmap.ALLOCATIONGRANULARITY
        count = int(np.prod(shape))
        size = max(1, -(-count * values[0].itemsize // page)) * page
        offset, memory = self._memory.extend(size)
        array = np.frombuffer(memory, values[0].dtype, count).reshape(shape)
        array[...] = values
        path = f"/proc/{os.getpid()}/fd/{self._memory.fd}"
        return array, FieldPlace(path, offset, size, shape, values[0].dtype.str)

    def _tell(self, worker: Worker, name: str) -> None:
        call = CallRequest("share_model_field", (name, self._arrays[name][1]), {})
        with suppress(WorkerDied, WireError):  # it is being started again, and gets the fields then
            worker.submit(Kind.CALL, (), dump(call, worker.definitions), on_reply=lambda _: None)

    async def restore(self, worker: Worker) -> None:
        """Share the fields with the new process of a restarted worker.

        Raises:
            WorkerDied, EnvError: if it ends, or fails.
        """
        for name, (_, place) in list(self._arrays.items()):
            await worker.call("share_model_field", name, place)

    def close(self) -> None:
        """Release the memory; it is freed when no array of it is left."""
        self._arrays = {}
        if self._memory is not None:
            self._memory.close()
            self._memory = None
