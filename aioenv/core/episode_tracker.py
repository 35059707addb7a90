"""Count episodes in replies: `EpisodeTracker` for those of workers, `InProcessEpisodeTracker` for results in process.

Every reply is counted once, when it arrives, whether or not its result is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from aioenv.core.results import ResetResult, StepResult
from aioenv.spaces.infos import NO_RESULT, Column, Columns, Schema, merge_infos
from aioenv.stats.episodes import Ended, EpisodeStats

if TYPE_CHECKING:
    from aioenv.core.requests import BatchRequest, WorkerRequest

__all__ = ["EpisodeTracker", "InProcessEpisodeTracker", "check_episode_stats", "rows_of"]

_KEY = "episode"
# As Gymnasium's RecordEpisodeStatistics: return, length, time.
_SCHEMA = Schema(
    (
        Column((_KEY,), None, (), is_dict=True),
        Column((_KEY, "r"), np.dtype(np.float64), (), is_python=True),
        Column((_KEY, "l"), np.dtype(np.int64), (), is_python=True),
        Column((_KEY, "t"), np.dtype(np.float64), (), is_python=True),
    ),
    False,
    False,
)


def check_episode_stats(
    given: bool | EpisodeStats, prefix: str | None, num_envs: int, mode: AutoresetMode
) -> EpisodeStats | None:
    """Return the statistics that a vector env keeps, None if it keeps none.

    Raises:
        TypeError: if `given` is neither a bool nor an `EpisodeStats`, or `prefix` is not a string.
        ValueError: if there is a prefix but no statistics, or the statistics belong to another vector env.
    """
    if not isinstance(given, (bool, EpisodeStats)):
        raise TypeError(f"episode_stats: expected True, False or an aioenv.EpisodeStats, got {given!r}")
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f"stats_prefix: expected a string or None, got {prefix!r}")
    if given is False:
        if prefix is not None:
            raise ValueError("stats_prefix: there is nothing that it could name; pass episode_stats=True, too")
        return None
    stats = EpisodeStats() if given is True else given
    if prefix is not None:
        stats.prefix = prefix
    stats.bind(num_envs, mode)
    return stats


class EpisodeTracker:
    """Updates the statistics from the replies of workers, and adds the ends of episodes to the infos.

    Args:
        stats: the statistics.
        mode: the autoreset mode.
        restarts: whether workers are restarted; else an info "restarted" is the env's own.
    """

    def __init__(self, stats: EpisodeStats, mode: AutoresetMode, *, restarts: bool) -> None:
        self.stats = stats
        self._restarts = restarts
        stats.follow(mode)
        self._same_step = mode is AutoresetMode.SAME_STEP

    def reads(self, info: dict[str, Any]) -> bool:
        """Return whether `note` must see an info of a step."""
        return bool(self.stats.events) or self._restarts or _KEY in info

    @staticmethod
    def end_infos(ended: Ended) -> list[tuple[int, dict[str, Any]]]:
        """Return the ends of episodes as info dicts, with their rows."""
        each = zip(*(values.tolist() for values in ended), strict=True)
        return [(row, {_KEY: {"r": r, "l": length, "t": time_s}}) for row, r, length, time_s in each]

    @staticmethod
    def end_columns(ended: Ended, positions: npt.NDArray[np.int64]) -> Columns:
        """Return the ends of episodes as columns for these positions."""
        return Columns(positions, _SCHEMA, [None, ended.returns, ended.lengths, ended.times_s])

    def note(self, request: BatchRequest, part: WorkerRequest) -> None:
        """Count the reply to a worker request."""
        failed = {slot for error in part.errors for slot in error.slots} if part.errors else ()
        if failed:
            self.stats.drop(part.slots[np.isin(part.slots, list(failed))])
        if not request.stepped:
            assert part.sent is not None
            slots = part.sent.slots
            self.stats.begin(slots[~np.isin(slots, list(failed))] if failed else slots)
            self.stats.await_resets(part.exhausted)
            return
        batch, rows = request.batch, slice(part.start, part.stop)
        slots, rewards = part.slots, batch.reward[rows]
        over = batch.terminated[rows] | batch.truncated[rows]
        lost: npt.NDArray[np.bool_] | None = None
        keep = ~np.isin(slots, list(failed)) if failed else None  # None: all
        for columns in part.columns:
            if columns.schema is NO_RESULT:
                keep = np.ones(len(slots), np.bool_) if keep is None else keep
                keep[rows_of(columns, part)] = False
            elif self._restarts and any(column.path == ("restarted",) for column in columns.schema.columns):
                lost = np.zeros(len(slots), np.bool_) if lost is None else lost
                lost[rows_of(columns, part)] = True
        values = list(self._events(part, over)) if self.stats.events and part.columns else ()
        if keep is None:
            self._add_ends(part, self.stats.step(slots, rewards, over, values, lost), None)
        else:
            ended = self.stats.step(
                slots[keep], rewards[keep], over[keep], values, None if lost is None else lost[keep]
            )
            self._add_ends(part, ended, np.flatnonzero(keep))
        self.stats.await_resets(part.exhausted)

    def _add_ends(self, part: WorkerRequest, ended: Ended, where: npt.NDArray[np.int64] | None) -> None:
        """Add the ends of episodes to the infos, unless the envs have; `where` are the counted rows, None for all."""
        if not len(ended.rows) or any(c.path[0] == _KEY for each in part.columns for c in each.schema.columns):
            return
        positions = (ended.rows if where is None else where[ended.rows]) + part.start
        part.columns = [*part.columns, self.end_columns(ended, positions)]

    def _events(self, part: WorkerRequest, over: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, Any]]:
        """Yield the number, slot and value of each event of this step.

        Under SAME_STEP an episode's last events are in its final info.
        """
        for columns in part.columns:
            rows = rows_of(columns, part)
            for number, event in enumerate(self.stats.events):
                for index, column in enumerate(columns.schema.columns):
                    final = self._same_step and column.path == ("final_info", *event.path)
                    if column.is_dict or (not final and column.path != event.path):
                        continue
                    for row, value in zip(rows.tolist(), columns.values[index], strict=True):
                        # at an episode's end, values outside the final info belong to the next one's reset
                        if not self._same_step or bool(over[row]) is final:
                            yield number, int(part.slots[row]), value


class InProcessEpisodeTracker:
    """Updates the statistics from the results of a vector env in this process (see `EpisodeTracker`).

    Args:
        stats: the statistics.
        mode: the autoreset mode.
        num_envs: the number of slots.
    """

    def __init__(self, stats: EpisodeStats, mode: AutoresetMode, num_envs: int) -> None:
        self.stats = stats
        stats.follow(mode)
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._n = num_envs

    def note(
        self, slots: npt.NDArray[np.int64], resets: npt.NDArray[np.int64] | None, value: StepResult | ResetResult | Any
    ) -> None:
        """Count a result, which is a whole batch.

        Args:
            slots: the slots that were stepped or reset.
            resets: the slots of them that were reset; None: all were stepped.
            value: the result, to whose info the ends of episodes are added; or the error.
        """
        if isinstance(value, ResetResult):
            assert resets is not None
            self.stats.begin(resets)
            return
        if not isinstance(value, StepResult):
            self.stats.drop(slots)
            return
        over = (value.terminated | value.truncated)[slots]
        values = list(self._events(value.info, slots, over)) if self.stats.events and value.info else ()
        ended = self.stats.step(slots, value.reward[slots], over, values)
        if len(ended.rows) and _KEY not in value.info:
            columns = [None, ended.returns, ended.lengths, ended.times_s]
            value.info.update(merge_infos([Columns(slots[ended.rows], _SCHEMA, columns)], self._n))

    def _events(
        self, info: Mapping[Any, Any], slots: npt.NDArray[np.int64], over: npt.NDArray[np.bool_]
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield the events of this step (see `EpisodeTracker._events`)."""
        for number, event in enumerate(self.stats.events):
            for final in (False, True) if self._same_step else (False,):
                values, mask = self._column(info, ("final_info", *event.path) if final else event.path)
                if self._same_step:
                    mask = mask[slots] & (over == final)
                else:
                    mask = mask[slots]
                for slot in slots[mask].tolist():
                    yield number, slot, values[slot]

    def _column(self, info: Any, path: tuple[str, ...]) -> tuple[Any, npt.NDArray[np.bool_]]:
        """Return the infos under a path, one element a slot, and the mask of the slots that have one."""
        mask = np.ones(self._n, np.bool_)
        for key in path:
            if not isinstance(info, Mapping) or key not in info:
                return (), np.zeros(self._n, np.bool_)
            has = info.get(f"_{key}")
            if isinstance(has, np.ndarray) and has.dtype == np.bool_ and has.shape == mask.shape:
                mask &= has
            info = info[key]
        each = info.ndim > 0 if isinstance(info, np.ndarray) else isinstance(info, (list, tuple))
        each = each and len(info) == self._n
        return (info if each else [info] * self._n), mask


def rows_of(columns: Columns, part: WorkerRequest) -> npt.NDArray[np.int64]:
    """Return the places of the rows of columns in a worker request."""
    positions = columns.positions
    if isinstance(positions, slice):
        return np.arange(positions.start, positions.stop) - part.start
    rows: npt.NDArray[np.int64] = positions - part.start
    return rows
