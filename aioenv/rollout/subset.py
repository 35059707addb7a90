"""`Pausing` marks slots, which `core/groups.py` leaves out of whole batches; `SingleSlot` steps one by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aioenv.core.backend import Backend, SlotGroup
from aioenv.core.results import ResetResult, SlotStep
from aioenv.errors import ActionError, PausedError
from aioenv.spaces.infos import RowDicts
from aioenv.spaces.layout import Arrays, Layout
from aioenv.spaces.seeding import normalize_slot_seed

__all__ = ["Pausing", "SingleSlot", "check_none_paused", "one_action", "row_info", "row_infos"]

Slots = npt.NDArray[np.int64]
Result = TypeVar("Result")


# ------------------------------------------------------------ paused slots


class Pausing:
    """Pauses and resumes slots.

    Args:
        backend: has the slot table.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def pause(self, slots: int | Iterable[int]) -> None:
        """Leave slots out of whole batches (see `AsyncVectorEnv.pause`)."""
        table = self._backend.table
        numbers = table.slot_numbers(_several(slots), maybe_none=True)
        self._check_rest("pause", np.setdiff1d(table.active, numbers))
        table.pause(numbers)

    def resume(self, slots: int | Iterable[int] | None) -> None:
        """Take slots into whole batches again (see `AsyncVectorEnv.resume`)."""
        table = self._backend.table
        numbers = table.slot_numbers(None if slots is None else _several(slots), maybe_none=True)
        self._check_rest("resume", np.union1d(table.active, numbers))
        table.resume(numbers)

    def _check_rest(self, name: str, active: Slots) -> None:
        """Raise if the active slots can't be stepped without the others."""
        self._backend.check_steps_some(name, np.setdiff1d(np.arange(self._backend.num_envs), active))


def _several(slots: int | Iterable[int]) -> Iterable[int]:
    """Return a slot number, or some, as some; raise a ValueError for None, which would stand for all."""
    if slots is None:
        raise ValueError("slots: expected a slot number, or some, got None")
    return [int(slots)] if isinstance(slots, (int, np.integer)) and not isinstance(slots, bool) else slots  # type: ignore[return-value]


def check_none_paused(envs: Any, library: str) -> None:
    """Check a blocking vector env, or a wrapper of one, for a library that takes each row of a batch for a step.

    Raises:
        PausedError: if slots are paused, also for want of a further episode. Nothing was sent.
    """
    backend = getattr(getattr(envs.unwrapped, "_envs", None), "_backend", None)
    paused = None if backend is None else backend.table.paused
    if paused is not None:
        raise PausedError(
            f"step: slots {np.flatnonzero(paused).tolist()} are paused, or their envs have no further episode "
            f"(EpisodesDone), and {library} would take their last observations for steps: resume() them, or give each "
            "env as many episodes as the run needs. `episodes` and `evaluate` of aioenv run envs to their last episode"
        )


# ------------------------------------------------------------ one slot


class SingleSlot:
    """Steps and resets one slot at a time, with results that are no batches.

    Args:
        backend: steps the envs.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def step_at(self, slot: int, action: Any) -> SlotStep:
        """Step one slot (see `AsyncVectorEnv.step_at`)."""
        self._backend.check_steps_some("step_at", self._backend.table.slot_numbers([slot]))
        group = self._group(slot, "step_at")
        arrays, objects = one_action(self._backend.actions, action)
        await self._backend.drain()
        group.send_arrays(arrays, objects, "step_at")
        return await self._result(group, lambda step: step)

    async def reset_at(self, slot: int, seed: int | None, options: dict[str, Any] | None) -> ResetResult:
        """Begin an episode in one slot (see `AsyncVectorEnv.reset_at`)."""
        group = self._group(slot, "reset_at")
        seed_of_slot = normalize_slot_seed(seed)
        await self._backend.drain()
        group.send_reset(group.slots, {int(group.slots[0]): seed_of_slot}, options, "reset_at")
        return await self._result(group, lambda step: ResetResult(step.obs, step.info))

    def _group(self, slot: int, name: str) -> SlotGroup:
        table = self._backend.table
        numbers = table.slot_numbers([slot])
        table.leave_out_paused(numbers, name, by_name=True)
        return self._backend.group(numbers)

    async def _result(self, group: SlotGroup, as_result: Callable[[SlotStep], Result]) -> Result:
        try:
            outcome = await group.recv()
        finally:
            group.close()
        (obs,) = self._backend.observations.rows(outcome.obs, outcome.objects)
        info = row_info(self._backend.rollout_backend().merge(outcome.infos, by_slot=True), int(group.slots[0]))
        flags = bool(outcome.terminated[0]), bool(outcome.truncated[0])
        result = as_result(SlotStep(obs, float(outcome.reward[0]), *flags, info))
        if outcome.error is not None:
            if outcome.error.partial is None:
                for error in (outcome.error, *outcome.error.errors):
                    error.partial = result
            raise outcome.error
        return result


def one_action(layout: Layout, action: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
    """Return the arrays and objects of a single action, as of a batch of one.

    Raises:
        ActionError: if it does not fit.
    """
    try:
        return layout.take_apart(layout.batch_of_one(action), 1)
    except ActionError as exc:
        raise ActionError(f"step_at, the action as a batch of one: {exc}") from exc


def row_info(info: dict[str, Any], row: int) -> dict[str, Any]:
    """Return the info dict of one row of a batch: the keys whose mask is set there."""
    if isinstance(info, RowDicts):
        return _copied_info(info.get(row, {}))
    own: dict[str, Any] = {}
    for key, value in info.items():
        mask = _key_mask(info, key)
        if mask is not None and mask[row]:
            own[key] = _row_value(key, value, row)
    return own


def row_infos(info: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """Return the info dicts of all n rows of a batch; fast if most of them have few keys."""
    if isinstance(info, RowDicts):
        return [_copied_info(info[row]) if row in info else {} for row in range(n)]
    infos: list[dict[str, Any]] = [{} for _ in range(n)]
    for key, value in info.items():
        mask = _key_mask(info, key)
        if mask is not None:
            for row in mask.nonzero()[0].tolist():  # a tenth of the time of `flatnonzero`
                infos[row][key] = _row_value(key, value, row)
    return infos


def _copied_info(info: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an info dict, with copies of its arrays, which are views of a whole reply."""
    return {key: _copied_info(value) if type(value) is dict else _copied(value) for key, value in info.items()}


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _key_mask(info: dict[str, Any], key: str) -> Any:
    """Return which rows have a key, bool `(n,)`; None if it is itself a mask."""
    if key == "_active":
        return np.ones(len(info[key]), np.bool_)
    mask = info.get(f"_{key}")
    return mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else None


def _row_value(key: str, value: Any, row: int) -> Any:
    if key == "_active":
        return bool(value[row])
    item = row_info(value, row) if isinstance(value, dict) else value[row]
    if type(item) is np.int64 or type(item) is np.bool_:  # other scalars are Python's own types (a float64 is a float)
        return item.item()
    return _copied(item)
