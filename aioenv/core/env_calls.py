"""`EnvCalls`: calls of methods and attributes of the envs, of their states and of their actors, by pickle.

Steps take a faster path (see `scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from aioenv.core.spare_states import check_kind, join_states, split_state
from aioenv.envs import ActorID
from aioenv.errors import EnvError, OutOfStepError, ResumeError, SlotError
from aioenv.process.supervisor import ACCEPTS_REQUESTS
from aioenv.state.snapshot import EnvState
from aioenv.worker.vector_states import awaits_reset

if TYPE_CHECKING:
    from aioenv.core.backend import Backend
    from aioenv.core.spares import SpareEnvs, SpareState
    from aioenv.core.waits import Clock

__all__ = ["EnvCalls", "call_envs", "in_order", "set_attr", "spread_values"]


class EnvCalls:
    """Calls of the envs of a started vector env; see the methods of `AsyncVectorEnv` of the same names.

    Args:
        backend: sends the calls.
        clock: counts how long the caller waits.
        mode: the autoreset mode.
    """

    def __init__(self, backend: Backend, clock: Clock, mode: AutoresetMode) -> None:
        self._backend = backend
        self._clock = clock
        self._mode = mode

    # ------------------------------------------------------------ methods and attributes

    async def call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, spares: bool = False
    ) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute."""
        self._check_spares("call", spares)
        with self._clock.envs:
            return await call_envs(self._backend, None, name, args, kwargs, spares=spares)

    def _check_spares(self, what: str, spares: bool) -> None:
        if spares and self._backend.spares is None:
            raise ValueError(f"{what}: spares=True: this vector env has no spare envs (spare_envs=True)")

    async def call_at(
        self, slots: int | Iterable[int], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of the envs in some slots, or read an attribute."""
        if slots is None or isinstance(slots, bool):  # not all, nor 0 or 1
            raise ValueError(f"slots: expected one or more slot numbers, got {slots!r}")
        one = [int(slots)] if isinstance(slots, (int, np.integer)) else None
        numbers = self._backend.table.slot_numbers(slots if one is None else one)  # type: ignore[arg-type]
        with self._clock.envs:
            results = await call_envs(self._backend, numbers, name, args, kwargs)
        return results[0] if one else in_order(numbers, results)

    async def get_attr(self, name: str, *, spares: bool = False) -> tuple[Any, ...]:
        """Read an attribute of every env."""
        self._check_spares("get_attr", spares)
        with self._clock.envs:
            return await call_envs(self._backend, None, name, (), {}, what="get_attr", spares=spares)

    async def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env."""
        with self._clock.envs:
            await set_attr(self._backend, name, values)

    # ------------------------------------------------------------ states

    async def get_state(self, slots: Iterable[int] | None) -> list[EnvState]:
        """Return the states of envs, in the order in which the slots were named."""
        numbers, spares = self._backend.table.slot_numbers(slots), self._backend.spares
        noted: dict[int, SpareState] = {}

        def arguments(mine: list[int]) -> tuple[Any, ...]:  # called when all calls are about to be sent
            if spares is None:
                return ()
            n = self._backend.num_envs
            noted.update((number % n, spares.state_of(number % n)) for number in mine)
            states = [(noted[number % n], number // n) for number in mine]
            return ([state.prepared is not None and state.live != which for state, which in states],)

        with self._clock.envs:
            replies = await self._backend.call_service(
                numbers, "get_state", "get_states", arguments, spares=spares is not None
            )
        by_slot = dict(zip(np.sort(numbers).tolist(), replies, strict=True))
        if spares is not None:
            by_slot = {slot: join_states(both, noted[slot]) for slot, both in by_slot.items()}
        _refuse_misfits(by_slot)
        return [EnvState(*by_slot[slot]) for slot in numbers.tolist()]

    async def set_state(self, states: Iterable[EnvState], slots: Iterable[int] | None) -> None:
        """Bring envs into states that `get_state` gave."""
        backend, spares = self._backend, self._backend.spares
        numbers = backend.table.slot_numbers(slots)
        states = list(states) if isinstance(states, Iterable) else [states]
        if strange := [state for state in states if not isinstance(state, EnvState)]:
            raise TypeError(f"set_state: expected EnvStates, as get_state gives them, got {strange[0]!r}")
        if len(states) != len(numbers):
            raise ValueError(f"set_state: got {len(states)} states for {len(numbers)} slots")
        given = dict(zip(numbers.tolist(), states, strict=True))
        check_kind(given, spares=spares is not None)
        raw = {slot: (s.env_id, s.values, s.arrays) for slot, s in given.items()}

        def note(slot: int, reply: Any) -> None:  # other slots may fail, or the call may be cancelled
            if isinstance(reply, str):  # why the state was refused
                return
            backend.table.note_states(np.array([slot]))
            # the episode that begins with the reset is a whole one
            resets = self._mode is AutoresetMode.NEXT_STEP and awaits_reset(raw[slot])
            if backend.episodes is not None:
                backend.episodes.stats.drop(np.array([slot]))
                if resets:
                    backend.episodes.stats.await_resets([slot])
            if backend.observer is not None:
                backend.observer.note_state(slot, awaits_reset=resets)
            if backend.history is not None:
                backend.history.note_states({slot: (raw[slot], reply)})

        replies: Sequence[Any]
        with self._clock.envs:
            if spares is None:
                replies = await backend.call_service(
                    numbers, "set_state", "set_states", lambda mine: ([raw[s] for s in mine],), on_result=note
                )
            else:
                replies = await self._set_both(spares, given, note)
        _refuse_misfits(dict(zip(np.sort(numbers).tolist(), replies, strict=True)))

    async def _set_both(
        self, spares: SpareEnvs, given: dict[int, EnvState], note: Callable[[int, Any], None]
    ) -> list[Any]:
        """Set the states of both envs of slots; return for each slot why one was refused, or None.

        What the slots depend on beside them is set when the states are sent: so later steps find all of it, or nothing.

        Args:
            note: called with each slot whose two envs have taken their states.
        """
        n = self._backend.num_envs
        parts = {slot: split_state(state) for slot, state in given.items()}
        before: dict[int, tuple[SpareState, Any]] = {}

        def restore() -> None:
            for slot, (_, state, prepared) in parts.items():
                if all(member.worker.state in ACCEPTS_REQUESTS for member in spares.both_of(slot)):
                    old = spares.state_of(slot)
                    before[slot] = old, spares.restore(slot, state, prepared=prepared)

        texts: dict[int, list[str | None]] = {slot: [] for slot in parts}  # of both envs: why one was refused, or None

        def on_result(number: int, reply: Any) -> None:
            slot, both = number % n, texts[number % n]
            both.append(reply if isinstance(reply, str) else None)
            episodes, runs = self._backend.episodes, spares.state_of(slot).live == number // n
            if episodes is not None and runs and both[-1] is None:
                episodes.stats.drop(np.array([slot]))  # not with the other one: the slot may be stepped before
            if both == [None, None]:
                note(slot, None)

        def revert(raised: set[int]) -> None:
            for slot, both in texts.items():
                if slot in before and (slot in raised or (len(both) == 2 and any(both))):
                    old, request = before[slot]
                    spares.revert(slot, old._replace(prepared=None) if None in both else old, request)

        try:
            await self._backend.call_service(
                list(parts),
                "set_state",
                "set_states",
                lambda mine: ([parts[i % n][0][i // n] for i in mine],),
                spares=True,
                on_sent=restore,
                on_result=on_result,
            )
        except SlotError as exc:
            revert({slot for error in exc.errors if isinstance(error, EnvError) for slot in error.slots})
            raise
        revert(set())
        return [next(filter(None, texts[slot]), None) for slot in sorted(parts)]

    # ------------------------------------------------------------ envs of several actors (see `aioenv.envs`)

    async def actor_rewards(self) -> npt.NDArray[np.float32] | None:
        """Return the reward of each actor in the last whole step, one actor a row."""
        rewards = await self._ask("actor_rewards")
        if any(each is None for each in rewards):
            return None
        columns = [np.asarray(each, np.float32) for each in rewards]
        if len({column.shape for column in columns}) > 1:
            numbers = [len(column) for column in columns]
            raise ValueError(f"actor_rewards: expected the same number of actors in all envs, got {numbers}")
        return np.stack(columns, 1)

    async def actor_ids(self, *, same_step: bool) -> tuple[ActorID, ...]:
        """Return whose turn it is in each slot."""
        ids = await self._ask("actor_id")
        if None in ids:
            raise TypeError(
                f"the env of slot {ids.index(None)} has no actor_id(): expected one of several actors, such as "
                "aioenv.envs.SubStepEnv"
            )
        found = tuple(ActorID(*each) for each in ids)
        keys = list(dict.fromkeys(actor.step_key for actor in found))
        if same_step and len(keys) > 1:
            places = [[slot for slot, actor in enumerate(found) if actor.step_key == key] for key in keys]
            where = ", ".join(f"{key!r} in slots {slots}" for key, slots in zip(keys, places, strict=True))
            raise OutOfStepError(
                f"expected all envs in the same sub-step, got {where}; pass same_step=False, or see that they stay "
                "together: under AutoresetMode.SAME_STEP no env falls behind by a reset"
            )
        return found

    async def is_actor_done(self) -> npt.NDArray[np.bool_]:
        """Return whether the actor whose turn it is has nothing more to do, for each slot."""
        done = await self._ask("is_actor_done")
        if None in done:
            raise TypeError(f"the env of slot {done.index(None)} has no is_actor_done(): it is not of several actors")
        return np.array(done, np.bool_)

    async def _ask(self, name: str) -> tuple[Any, ...]:
        with self._clock.envs:
            return await self._backend.call_service(None, f"{name}()", "call_if_any", lambda _: (name,))


def in_order(numbers: npt.NDArray[np.int64], results: Sequence[Any]) -> tuple[Any, ...]:
    """Return results, which came in ascending order of slots, in the order in which the slots were named."""
    place = np.argsort(np.argsort(numbers))
    return tuple(results[i] for i in place.tolist())


def _check_name(what: str, name: Any) -> None:
    """Raise a TypeError if this can't be the name of a method or attribute."""
    if not isinstance(name, str):
        raise TypeError(f"{what}: name: expected a string, the name of a method or attribute of the envs, got {name!r}")


async def call_envs(
    backend: Backend,
    slots: Iterable[int] | None,
    name: str,
    args: tuple[Any, ...],
    kwargs: Any,
    what: str = "call",
    *,
    spares: bool = False,
) -> tuple[Any, ...]:
    """Call a method, or read an attribute, of the envs in `slots` (None: all); results in the order of slots.

    Args:
        backend: sends the call.
        slots: slot numbers.
        name: of the method or attribute.
        args: positional arguments of the method.
        kwargs: its keyword arguments.
        what: the user's call, for errors.
        spares: whether to call both envs of each slot.

    Raises:
        TypeError: if the name is no string.
    """
    _check_name(what, name)
    return await backend.call_service(
        slots, f"{what}({name!r})", "call_envs", lambda _: (name, args, kwargs), spares=spares
    )


async def set_attr(backend: Backend, name: str, values: Any) -> None:
    """Set an attribute of every env: to its element of a list or tuple, else all to the same value.

    Raises:
        ValueError: if a list has another length than there are slots; worded as Gymnasium's.
        TypeError: if the name is no string.
    """
    _check_name("set_attr", name)
    each = spread_values(values, backend.num_envs)

    def arguments(numbers: list[int]) -> tuple[Any, ...]:
        return name, [each[number % len(each)] for number in numbers]  # both envs of a slot get its value

    await backend.call_service(None, f"set_attr({name!r})", "set_attr", arguments, spares="living")


def spread_values(values: Any, num_envs: int) -> Sequence[Any]:
    """Return the values of an attribute, one a slot: a list or tuple itself, anything else for all of them.

    Raises:
        ValueError: if a list has another length than there are slots; worded as Gymnasium's.
    """
    if not isinstance(values, (list, tuple)):
        return [values] * num_envs
    if len(values) != num_envs:
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {num_envs} environments."
        )
    return values


def _refuse_misfits(replies: dict[int, Any]) -> None:
    """Raise if a worker answered with a text, which says why a state can't be read or set."""
    texts = {slot: reply for slot, reply in replies.items() if isinstance(reply, str)}
    if texts:
        first = min(texts)
        more = f" (and so for {len(texts) - 1} more slots)" if len(texts) > 1 else ""
        raise ResumeError(f"slot {first}: {texts[first]}{more}")
