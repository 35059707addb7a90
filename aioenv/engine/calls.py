"""Calls of env methods and attributes: the slow road, by pickle, beside the one that steps take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from aioenv.engine.fleet import Member
from aioenv.engine.solo.calls import SoloCalls
from aioenv.errors import ClosedError, SlotError, WireError
from aioenv.wire.frames import Frame, Kind
from aioenv.wire.messages import Call, dump, load

if TYPE_CHECKING:
    from aioenv.engine.schedule import Schedule
    from aioenv.engine.waits import Clock

__all__ = ["Calls", "call_envs", "for_each", "in_order", "set_attr"]


class Calls:
    """The part of a vector env that calls what envs have."""

    _clock: Clock

    if TYPE_CHECKING:

        @property
        def _running(self) -> Schedule: ...

    async def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env (or read an attribute), through its wrappers.

        If this is cancelled, the envs run it all the same; the results are dropped.

        Args:
            name: of the method or attribute, wherever in the stack of wrappers it is.
            *args: for the method.
            **kwargs: likewise.

        Returns:
            One result a slot.

        Raises:
            PendingCallError: if a slot has a request in flight. Nothing was sent.
            EnvError: if an env raised; `error.partial` has the others' results.
            WorkerDied: if a worker ended.
            StepTimeout: if `timeout_s` passed. The envs run it all the same; the results are dropped.
        """
        schedule = self._running
        with self._clock.envs:
            return await call_envs(schedule, None, name, args, kwargs)

    @overload
    async def call_at(self, slots: int, name: str, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    async def call_at(self, slots: Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...
    async def call_at(self, slots: int | Iterable[int], name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one slot's env, or of some slots' envs (or read an attribute); otherwise as `call`.

        Args:
            slots: a slot number, or some. (It stands first, so that every keyword is the method's own.)
            name: of the method or attribute, wherever in the stack of wrappers it is.
            *args: for the method.
            **kwargs: likewise.

        Returns:
            For a number its result; else a tuple of one result for each of `slots`, in that order.

        Raises:
            ValueError, IndexError: if they are no slot numbers.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        schedule = self._running
        if slots is None or isinstance(slots, bool):  # not all, nor 0 or 1
            raise ValueError(f"slots: expected one or more slot numbers, got {slots!r}")
        one = [int(slots)] if isinstance(slots, (int, np.integer)) else None
        numbers = schedule.table.named(slots if one is None else one)  # type: ignore[arg-type]
        with self._clock.envs:
            results = await call_envs(schedule, numbers, name, args, kwargs)
        return results[0] if one else in_order(numbers, results)

    async def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every env; otherwise as `call`."""
        schedule = self._running
        with self._clock.envs:
            return await call_envs(schedule, None, name, (), {}, what="get_attr")

    async def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env.

        If this is cancelled, it is set all the same.

        Args:
            name: of the attribute; it is set on the wrapper that has it, else on the env itself.
            values: a list or tuple with an element for each slot; anything else is the value of all.

        Raises:
            ValueError: if a list has another length than there are slots.
            PendingCallError, EnvError, WorkerDied, StepTimeout: as for `call`.
        """
        schedule = self._running
        with self._clock.envs:
            await set_attr(schedule, name, values)

    def model_field(self, name: str) -> npt.NDArray[Any]:
        """A live field of the models of native MuJoCo slots (see `NativeVectorEnv.model_field`).

        Raises:
            ValueError: always, since envs with a model each have none in common; with `backend="native"` they have.
        """
        raise ValueError(
            f'model_field({name!r}): only with backend="native"; of single envs, `call` a method that changes the model'
        )


def in_order(numbers: npt.NDArray[np.int64], results: Sequence[Any]) -> tuple[Any, ...]:
    """Results of slots, which came in ascending order, in the order in which the slots were named."""
    place = np.argsort(np.argsort(numbers))
    return tuple(results[i] for i in place.tolist())


def check_name(what: str, name: Any) -> None:
    """Raise a TypeError unless this may be the name of a method or attribute."""
    if not isinstance(name, str):
        raise TypeError(f"{what}: name: expected a string, the name of a method or attribute of the envs, got {name!r}")


async def call_envs(
    schedule: Schedule, slots: Iterable[int] | None, name: str, args: tuple[Any, ...], kwargs: Any, what: str = "call"
) -> tuple[Any, ...]:
    """Call a method, or read an attribute, of the envs in `slots` (None: all); results in the order of slots.

    Args:
        what: the user's call, for errors.

    Raises:
        TypeError: if the name is no string.
    """
    check_name(what, name)
    return await for_each(schedule, slots, f"{what}({name!r})", "call_envs", lambda _: (name, args, kwargs))


async def set_attr(schedule: Schedule, name: str, values: Any) -> None:
    """Set an attribute of every env: to its element of a list or tuple, else all to the same value.

    Raises:
        ValueError: if a list has another length than there are slots; worded as Gymnasium's.
        TypeError: if the name is no string.
    """
    check_name("set_attr", name)
    num_envs = schedule.num_envs
    if not isinstance(values, (list, tuple)):
        values = [values] * num_envs
    if len(values) != num_envs:
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {num_envs} environments."
        )

    def arguments(numbers: list[int]) -> tuple[Any, ...]:
        return name, [values[number] for number in numbers]

    await for_each(schedule, None, f"set_attr({name!r})", "set_attr", arguments)


async def for_each(
    schedule: Schedule | SoloCalls, slots: Iterable[int] | None, what: str, method: str, arguments: Any
) -> tuple[Any, ...]:
    """Call a method of the services of some slots; results in the order of slots.

    Args:
        what: the user's call, for errors.
        arguments: gives what the method gets after the rows, for the slots of one worker.
    """
    if isinstance(schedule, SoloCalls):
        return await schedule.for_each(slots, what, method, arguments)
    numbers = np.sort(schedule.table.named(slots))
    schedule.table.check_call(numbers, what)
    shares: list[tuple[Member, list[int]]] = []
    for member in schedule.fleet.members:
        mine = numbers[(numbers >= member.start) & (numbers < member.stop)].tolist()
        if mine:
            shares.append((member, mine))
    if schedule.restarter is not None:
        await schedule.patience.settle(what, [member for member, _ in shares])
        schedule.check_open()
        schedule.table.check_call(numbers, what)  # others may have sent something meanwhile
    # all is sent before anything is awaited: a cancellation finds the call made in every env, or in none
    try:
        calls = [
            dump(Call(method, ([s - m.start for s in mine], *arguments(mine)), {}), m.worker.definitions)
            for m, mine in shares
        ]
    except Exception as exc:
        raise TypeError(f"{what}: expected what can be pickled, got {type(exc).__name__}: {exc}") from exc
    asked = [_ask(member, call) for (member, _), call in zip(shares, calls, strict=True)]
    replies = await schedule.patience.gather(what, asked)
    if schedule.closing and (deaths := [reply for reply in replies if isinstance(reply, SlotError)]):
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


def _ask(member: Member, call: bytes) -> asyncio.Future[Frame]:
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
