"""One slot by itself: stepped and reset without the others, with results that are no batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aioenv.core.requests import BatchRequest
from aioenv.core.results import ResetResult, SlotStep
from aioenv.errors import ActionError
from aioenv.rollout.groups import Group, objects_of
from aioenv.spaces.infos import RowDicts, merge
from aioenv.spaces.layout import Arrays, Layout
from aioenv.spaces.seeding import check_options, one_seed

if TYPE_CHECKING:
    from aioenv.core.scheduler import RequestScheduler
    from aioenv.core.waits import Clock

__all__ = ["OneSlot", "check_no_mask", "info_of", "infos_of", "one_action"]


class OneSlot:
    """The part of a vector env that treats a slot as one env."""

    _clock: Clock

    if TYPE_CHECKING:

        @property
        def _running(self) -> RequestScheduler: ...

    async def step_at(self, slot: int, action: Any) -> SlotStep:
        """Step one slot; others may be in flight meanwhile (`send`).

        If this is cancelled after it was sent, `recv` takes the result, or a later `step` or `reset` drops it.

        Args:
            slot: its number.
            action: an action of `single_action_space`.

        Returns:
            `(obs, reward, terminated, truncated, info)`, as the env gave them: no batch.

        Raises:
            ActionError, PendingCallError, ResetNeededError, EnvError, WorkerDied, StepTimeout: as for `step`.
            PausedError: if the slot is paused.
        """
        schedule = self._running
        group = _group(schedule, slot, "step_at")
        taken = one_action(schedule.actions, action)
        with self._clock.envs:
            await schedule.drain()
            group.send_arrays(*taken, "step_at")
            return await schedule.outcome(group.take(), lambda exchange: _result(schedule, group, exchange), None)

    async def reset_at(
        self, slot: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult:
        """Begin an episode in one slot; otherwise as `step_at`.

        Args:
            slot: its number.
            seed: for it alone: exactly this one.
            options: passed to the env's `reset`.

        Raises:
            TypeError: if the seed is no int.
            PendingCallError, PausedError, EnvError, WorkerDied, StepTimeout: as for `step_at`.
        """
        schedule = self._running
        group = _group(schedule, slot, "reset_at")
        check_no_mask(options)
        own = one_seed(seed)

        def result(exchange: BatchRequest) -> ResetResult:
            step = _result(schedule, group, exchange)
            return ResetResult(step.obs, step.info)

        with self._clock.envs:
            await schedule.drain()
            group.send_whole_reset(group.slots, {int(group.slots[0]): own}, options, "reset_at")
            return await schedule.outcome(group.take(), result, None)


def one_action(layout: Layout, action: Any) -> tuple[Arrays, Sequence[Sequence[Any]]]:
    """A single action, taken apart.

    Raises:
        ActionError: if it does not fit.
    """
    try:
        return layout.take_apart(layout.batch_of_one(action), 1)
    except ActionError as exc:
        raise ActionError(f"step_at, the action as a batch of one: {exc}") from exc


def check_no_mask(options: dict[str, Any] | None) -> None:
    """Raise if options name slots.

    Raises:
        ValueError: if there is a reset mask.
        TypeError: if they are none.
    """
    check_options(options)
    if options is not None and "reset_mask" in options:
        raise ValueError('reset_at: it is about one slot; leave out options["reset_mask"]')


def _group(schedule: RequestScheduler, slot: int, name: str) -> Group:
    numbers = schedule.table.slot_numbers([slot])
    schedule.table.leave_out_paused(numbers, name, by_name=True)
    return Group(schedule, numbers)


def _result(schedule: RequestScheduler, group: Group, exchange: BatchRequest) -> SlotStep:
    group.settle(exchange)
    batch = exchange.batch
    layout = schedule.observations
    (obs,) = layout.rows(batch.obs, objects_of(layout, exchange))
    columns = [c for part in exchange.parts for c in part.columns]
    info = info_of(merge(columns, 1), 0)
    return SlotStep(obs, float(batch.reward[0]), bool(batch.terminated[0]), bool(batch.truncated[0]), info)


def info_of(info: dict[str, Any], row: int) -> dict[str, Any]:
    """The info dict of one row of a batch: what has its mask set there."""
    own: dict[str, Any] = {}
    for key, value in info.items():
        mask = _mask_of(info, key)
        if mask is not None and mask[row]:
            own[key] = _own(key, value, row)
    return own


def infos_of(info: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """The info dicts of all n rows of a batch; most have next to nothing, in steps that end the episodes of a few."""
    if isinstance(info, RowDicts):
        return [_copied(info.get(row, {})) for row in range(n)]
    owns: list[dict[str, Any]] = [{} for _ in range(n)]
    for key, value in info.items():
        mask = _mask_of(info, key)
        if mask is not None:
            for row in np.flatnonzero(mask).tolist():
                owns[row][key] = _own(key, value, row)
    return owns


def _copied(info: dict[str, Any]) -> dict[str, Any]:
    """An info dict with arrays of its own, not those of a whole reply."""
    return {key: _copied(value) if type(value) is dict else _copy(value) for key, value in info.items()}


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _mask_of(info: dict[str, Any], key: str) -> Any:
    """Which rows have a key: bool `(n,)`; None if it is itself a mask."""
    if key == "_active":
        return np.ones(len(info[key]), np.bool_)
    mask = info.get(f"_{key}")
    return mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else None


def _own(key: str, value: Any, row: int) -> Any:
    if key == "_active":
        return bool(value[row])
    item = info_of(value, row) if isinstance(value, dict) else value[row]
    if type(item) is np.int64 or type(item) is np.bool_:  # mostly Python's own (a float64 is a float)
        return item.item()
    return _copy(item)
