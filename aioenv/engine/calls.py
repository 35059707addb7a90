"""Calls of env methods and attributes: the slow road, by pickle, beside the one that steps take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aioenv.engine.fleet import Fleet, Member
from aioenv.engine.slots import SlotTable
from aioenv.engine.snapshot import EnvState
from aioenv.errors import SlotError
from aioenv.wire.messages import load

if TYPE_CHECKING:
    from aioenv.engine.schedule import Schedule

__all__ = ["States", "call_envs", "get_state", "set_attr", "set_state"]


async def call_envs(
    fleet: Fleet, table: SlotTable, slots: Sequence[int] | None, name: str, args: tuple[Any, ...], kwargs: Any
) -> tuple[Any, ...]:
    """Call a method, or read an attribute, of the envs in `slots` (None: all); results in the order of slots."""
    return await _for_each(fleet, table, slots, f"call({name!r})", "call_envs", lambda _: (name, args, kwargs))


async def set_attr(fleet: Fleet, table: SlotTable, name: str, values: Any) -> None:
    """Set an attribute of every env: to its element of a list or tuple, else all to the same value.

    Raises:
        ValueError: if a list has another length than there are slots; worded as Gymnasium's.
    """
    num_envs = fleet.members[-1].stop
    if not isinstance(values, (list, tuple)):
        values = [values] * num_envs
    if len(values) != num_envs:
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {num_envs} environments."
        )

    def arguments(numbers: list[int]) -> tuple[Any, ...]:
        return name, [values[number] for number in numbers]

    await _for_each(fleet, table, None, f"set_attr({name!r})", "set_attr", arguments)


async def get_state(fleet: Fleet, table: SlotTable, slots: Iterable[int] | None) -> list[EnvState]:
    """The states of the envs in `slots` (None: all), in that order."""
    numbers = table.named(slots)
    replies = await _for_each(fleet, table, numbers, "get_state", "get_states", lambda _: ())
    by_slot = dict(zip(np.sort(numbers).tolist(), replies, strict=True))
    _refuse_misfits(by_slot)
    return [EnvState(*by_slot[slot]) for slot in numbers.tolist()]


async def set_state(fleet: Fleet, table: SlotTable, states: Iterable[EnvState], slots: Iterable[int] | None) -> None:
    """Bring the envs in `slots` (None: all) into these states, one each."""
    numbers, states = table.named(slots), list(states)
    if len(states) != len(numbers):
        raise ValueError(f"set_state: got {len(states)} states for {len(numbers)} slots")
    given = dict(zip(numbers.tolist(), states, strict=True))

    def arguments(mine: list[int]) -> tuple[Any, ...]:
        return ([(s.env_id, s.values, s.arrays) for s in map(given.__getitem__, mine)],)

    replies = await _for_each(fleet, table, numbers, "set_state", "set_states", arguments)
    by_slot = dict(zip(np.sort(numbers).tolist(), replies, strict=True))
    table.note_reset(np.array([slot for slot, refusal in by_slot.items() if refusal is None], np.int64))
    _refuse_misfits(by_slot)


def _refuse_misfits(replies: dict[int, Any]) -> None:
    """Raise if a worker answered with a text, which says why a state can't be had or set."""
    texts = {slot: reply for slot, reply in replies.items() if isinstance(reply, str)}
    if texts:
        first = min(texts)
        more = f" (and so for {len(texts) - 1} more slots)" if len(texts) > 1 else ""
        raise ValueError(f"slot {first}: {texts[first]}{more}")


class States:
    """The part of a vector env that gets and sets states."""

    if TYPE_CHECKING:

        @property
        def _started(self) -> Fleet: ...
        @property
        def _running(self) -> Schedule: ...

    async def get_state(self, slots: Iterable[int] | None = None) -> list[EnvState]:
        """The states of envs: with `set_state` any env of the same sort goes on from there, bit for bit.

        They hold what the next steps, and the next automatic resets, depend on: all of MuJoCo's data, what wrappers
        count, the random generator, and whether a reset is due. An env that is not MuJoCo's, or a wrapper that
        Gymnasium does not have, must have `get_state()` and `set_state(state)`. Changes to a MuJoCo model are not
        among it.

        Args:
            slots: slot numbers, None for all.

        Returns:
            One state for each of `slots`, in that order; `aioenv.save` writes them to a file.

        Raises:
            ValueError: if a state can't be had; the message names the wrapper or env in the way.
            PendingCallError, EnvError, WorkerDied: as for `call`.
        """
        schedule = self._running
        return await get_state(self._started, schedule.table, slots)

    async def set_state(self, states: Iterable[EnvState], slots: Iterable[int] | None = None) -> None:
        """Bring envs into states that `get_state` gave, of whichever slot, worker, process or `aioenv.load`.

        A slot that has failed, or whose episode was over, can be stepped again. No observation is returned, and
        images show the new state after the next step.

        Args:
            states: one for each of `slots`, in that order.
            slots: slot numbers, None for all.

        Raises:
            ValueError: if there are more or fewer states than slots, or one is of another sort of env, whose slot is
                as it was then; the others' states are set.
            PendingCallError, EnvError, WorkerDied: as for `call`.
        """
        schedule = self._running
        await set_state(self._started, schedule.table, states, slots)


async def _for_each(
    fleet: Fleet, table: SlotTable, slots: Iterable[int] | None, what: str, method: str, arguments: Any
) -> tuple[Any, ...]:
    numbers = np.sort(table.named(slots))
    table.check_call(numbers, what)
    shares: list[tuple[Member, list[int]]] = []
    for member in fleet.members:
        mine = numbers[(numbers >= member.start) & (numbers < member.stop)].tolist()
        if mine:
            shares.append((member, mine))
    replies = await asyncio.gather(
        *(
            member.worker.call(method, [slot - member.start for slot in mine], *arguments(mine))
            for member, mine in shares
        ),
        return_exceptions=True,
    )
    results: dict[int, Any] = {}
    errors: list[SlotError] = []
    for (member, mine), reply in zip(shares, replies, strict=True):
        if isinstance(reply, SlotError):
            reply.slots, reply.slot = tuple(mine), mine[0]
            errors.append(reply)
            continue
        if isinstance(reply, BaseException):
            raise reply
        values, failures = reply
        for slot, data in zip(mine, values, strict=True):
            results[slot] = load(data) if data else None
        errors += [member.worker.failure(failure) for failure in failures]
    partial = tuple(results.get(slot) for slot in numbers.tolist())
    if errors:
        raise SlotError.join(errors, partial)
    return partial
