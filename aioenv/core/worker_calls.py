"""Calls over workers: a method of their services, by pickle, for some slots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from aioenv.core.worker_pool import WorkerSlots
from aioenv.errors import ClosedError, SlotError, WireError
from aioenv.ipc.frames import Frame, Kind
from aioenv.ipc.messages import CallRequest, dump, load

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler

__all__ = ["call_workers"]


async def call_workers(
    scheduler: RequestScheduler, slots: Iterable[int] | None, what: str, method: str, arguments: Any
) -> tuple[Any, ...]:
    """Call a method of the workers' services for some slots; results are in the order of slots.

    Args:
        what: the user's call, for errors.
        arguments: gives what the method gets after the rows, for the slots of one worker.
    """
    numbers = np.sort(scheduler.table.slot_numbers(slots))
    scheduler.table.check_call(numbers, what)
    shares: list[tuple[WorkerSlots, list[int]]] = []
    for member in scheduler.worker_pool.members:
        mine = numbers[(numbers >= member.start) & (numbers < member.stop)].tolist()
        if mine:
            shares.append((member, mine))
    if scheduler.restarter is not None:
        await scheduler.timeouts.wait_for_restarts(what, [member for member, _ in shares])
        scheduler.check_open()
        scheduler.table.check_call(numbers, what)  # others may have sent something meanwhile
    # all is sent before anything is awaited: a cancellation finds the call made in every env, or in none
    try:
        calls = [
            dump(CallRequest(method, ([s - m.start for s in mine], *arguments(mine)), {}), m.worker.definitions)
            for m, mine in shares
        ]
    except Exception as exc:
        raise TypeError(f"{what}: expected what can be pickled, got {type(exc).__name__}: {exc}") from exc
    asked = [_ask(member, call) for (member, _), call in zip(shares, calls, strict=True)]
    replies = await scheduler.timeouts.gather(what, asked)
    if scheduler.closing and (deaths := [reply for reply in replies if isinstance(reply, SlotError)]):
        raise ClosedError(f"{what}: the vector env was closed while this was in flight") from deaths[0]
    results: dict[int, Any] = {}
    errors: list[SlotError] = []
    for (member, mine), reply in zip(shares, replies, strict=True):
        if isinstance(reply, SlotError):
            reply.concern(tuple(mine))
            errors.append(reply)
            continue
        if isinstance(reply, BaseException):
            raise reply
        if reply.kind is Kind.FAILURE:
            error = member.worker.failure(load(reply.tail))
            error.concern(tuple(mine))
            errors.append(error)
            continue
        values, failures = load(reply.tail)
        for slot, data in zip(mine, values, strict=True):
            try:
                results[slot] = load(data) if data else None
            except WireError as exc:
                message = f"the result of {what} pickled in the worker, but here {exc}"
                error = member.worker.failure_here(message, [slot])
                error.__cause__ = exc.__cause__
                errors.append(error)
        errors += [member.worker.failure(failure) for failure in failures]
    partial = tuple(results.get(slot) for slot in numbers.tolist())
    if errors:
        raise SlotError.join(errors, partial)
    return partial


def _ask(member: WorkerSlots, call: bytes) -> asyncio.Future[Frame]:
    """Send a call; its reply, or how the worker ended, comes to the future."""
    reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    def on_reply(outcome: Frame | SlotError) -> None:
        if reply.done():  # nobody waits any more
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
