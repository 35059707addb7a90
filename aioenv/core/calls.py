"""Calls of env methods and attributes: the slow road, by pickle, beside the one that steps take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.waits import Clock

__all__ = ["Calls", "call_envs", "in_order", "set_attr"]


class Calls:
    """The part of a vector env that calls what envs have."""

    _clock: Clock

    if TYPE_CHECKING:

        @property
        def _running(self) -> RequestScheduler: ...

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
        numbers = schedule.table.slot_numbers(slots if one is None else one)  # type: ignore[arg-type]
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
    schedule: RequestScheduler,
    slots: Iterable[int] | None,
    name: str,
    args: tuple[Any, ...],
    kwargs: Any,
    what: str = "call",
) -> tuple[Any, ...]:
    """Call a method, or read an attribute, of the envs in `slots` (None: all); results in the order of slots.

    Args:
        what: the user's call, for errors.

    Raises:
        TypeError: if the name is no string.
    """
    check_name(what, name)
    return await schedule.call_service(slots, f"{what}({name!r})", "call_envs", lambda _: (name, args, kwargs))


async def set_attr(schedule: RequestScheduler, name: str, values: Any) -> None:
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

    await schedule.call_service(None, f"set_attr({name!r})", "set_attr", arguments)
