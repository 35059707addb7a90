"""`EpisodeStats`: reduces steps to episodes, and episodes to epochs. Pure numpy, in the parent.

An episode counts when it has ended, as a whole. An episode that is cut short (by a reset, a fault, or a state that is
set) never counts, and its values are dropped.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

__all__ = ["Ended", "EpisodeEvent", "EpisodeStats", "EpochStats", "StatsWriter"]

_log = logging.getLogger("aioenv.stats")

Slots = npt.NDArray[np.int64]
_ReducerName = Literal["sum", "mean", "std", "min", "max", "median", "count", "first", "last"]
Reducer = _ReducerName | Callable[[npt.NDArray[Any]], Any]

_REDUCERS: dict[str, Callable[[npt.NDArray[Any]], Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "std": np.std,
    "min": np.min,
    "max": np.max,
    "median": np.median,
    "count": len,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
_EMPTY_VALUES = {"sum": 0.0, "count": 0.0}  # others are NaN
# the statistics without any event
_BUILT_IN = (
    *("return/mean", "return/std", "return/min", "return/max"),
    *("length/mean", "length/median", "length/total", "time/mean", "episode_count", "total_episode_count"),
)


class StatsWriter(Protocol):
    """A sink for statistics: TensorBoard, a file, a service."""

    def write(self, prefix: str, step: int, stats: Mapping[str, float]) -> None:
        """Write the statistics of an epoch.

        Args:
            prefix: their prefix: "train", say.
            step: how many steps envs had made by then, or the caller's own count.
            stats: by name; NaN where there was nothing to reduce.
        """


@dataclass(frozen=True)
class EpisodeEvent:
    """A value in info dicts, reduced to one number an episode, and then to the statistics of an epoch.

    Attributes:
        key: of the info dict; a tuple leads into nested ones.
        episode: how the values of an episode's steps become one: "sum", "mean", "std", "min", "max", "median", "count",
            "first", "last", or a function of an array. An episode without values has none ("sum" and "count": 0).
            Its exceptions are raised by `epoch` and `write`.
        epoch: how the values of all episodes become numbers: names as above, or pairs of a name and a function.
        name: the name of the event; by default the key.

    Raises:
        TypeError: if the key is neither a string nor a tuple of strings.
        ValueError: if there is no such reducer.
    """

    key: str | tuple[str, ...]
    episode: Reducer = "sum"
    epoch: _ReducerName | Sequence[_ReducerName | tuple[str, Callable[[npt.NDArray[Any]], Any]]] = (
        "mean",
        "std",
        "min",
        "max",
    )
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.key, str):
            if not isinstance(self.key, Sequence) or not all(isinstance(part, str) for part in self.key):
                raise TypeError(f"key: expected a key of the info dict, or a tuple of nested ones, got {self.key!r}")
            object.__setattr__(self, "key", tuple(self.key))
        if not self.name:
            object.__setattr__(self, "name", self.key if isinstance(self.key, str) else ".".join(self.key))
        epoch = (self.epoch,) if isinstance(self.epoch, str) else tuple(self.epoch)
        object.__setattr__(self, "epoch", tuple(tuple(one) if isinstance(one, list) else one for one in epoch))
        if not callable(self.episode) and not _is_reducer_name(self.episode):
            raise ValueError(f"{self.name}: episode: expected one of {list(_REDUCERS)}, got {self.episode!r}")
        for reducer in self.epoch:
            pair = isinstance(reducer, tuple) and len(reducer) == 2 and callable(reducer[1])
            if not pair and not _is_reducer_name(reducer):
                raise ValueError(
                    f"{self.name}: epoch: expected one of {list(_REDUCERS)}, or pairs of a name and a function, got "
                    f"{reducer!r}"
                )

    @property
    def path(self) -> tuple[str, ...]:
        """The key as a path."""
        return (self.key,) if isinstance(self.key, str) else tuple(self.key)


def _is_reducer_name(reducer: object) -> bool:
    return isinstance(reducer, str) and reducer in _REDUCERS


class EpochStats(dict[str, float]):
    """The statistics of an epoch by name; `print` shows them as a table.

    Attributes:
        prefix: their prefix.
    """

    def __init__(self, prefix: str | None, stats: Mapping[str, float]) -> None:
        super().__init__(stats)
        self.prefix = prefix

    def __str__(self) -> str:
        width = max(len(name) for name in self)
        lines = [f"{name:<{width}}  {_format(value):>12}" for name, value in self.items()]
        return "\n".join([f"{self.prefix or 'episodes'}:", *lines])


def _format(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4f}"


class Ended(NamedTuple):
    """Episodes that have just ended.

    Attributes:
        rows: the indices of their slots among those that were stepped.
        returns: float64; lengths: int64, in steps; times_s: float64.
    """

    rows: Slots
    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    times_s: npt.NDArray[np.float64]


class EpisodeStats:
    """Returns, lengths, times and events of the episodes of a vector env.

    Give it to `AsyncVectorEnv` or `make_vec` as `episode_stats`; it is `envs.episode_stats` then.

    Args:
        events: further values to reduce.
        prefix: the prefix of the statistics; None: they are not logged.
        writers: get the statistics of `write`.

    Attributes:
        total_episodes: how many episodes have ended since the beginning.
        total_steps: how many steps envs have made, without those that reset.
        prefix, writers: as above.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if two events, or two statistics, have the same name.
    """

    def __init__(
        self, events: Iterable[EpisodeEvent] = (), *, prefix: str | None = None, writers: Iterable[StatsWriter] = ()
    ) -> None:
        if isinstance(events, EpisodeEvent):
            raise TypeError(f"events: expected a sequence of them, got {events!r}; one alone goes into a list, too")
        self.events = tuple(events)
        self.prefix = prefix
        self.writers = list(writers)
        for event in self.events:
            if not isinstance(event, EpisodeEvent):
                raise TypeError(f"events: expected instances of aioenv.EpisodeEvent, got {event!r}")
        if prefix is not None and not isinstance(prefix, str):
            raise TypeError(f"prefix: expected a string or None, got {prefix!r}")
        for writer in self.writers:
            if not callable(getattr(writer, "write", None)):
                raise TypeError(f"writers: expected objects with write(prefix, step, stats), got {writer!r}")
        self.total_episodes = 0
        self.total_steps = 0
        names = [event.name for event in self.events]
        if len(set(names)) < len(names):
            raise ValueError(f"events: expected names of their own, got {names}")
        taken = set(_BUILT_IN)
        for event in self.events:
            for reducer in event.epoch:
                number = f"{event.name}/{reducer[0] if isinstance(reducer, tuple) else reducer}"
                if number in taken:
                    raise ValueError(
                        f"events: there is a number {number!r} already; call the event something else, name="
                    )
                taken.add(number)
        self._returns: npt.NDArray[np.float64] | None = None  # by slot, of the current episode
        self._ended: list[array[float]]
        self._event_values: list[list[Any]]  # one for each episode that has any
        self._failed: tuple[str, Exception] | None  # an event that could not be reduced, and why
        self._start_epoch()

    def __repr__(self) -> str:
        name = f"{self.prefix!r}, " if self.prefix else ""
        return f"<EpisodeStats {name}{self.total_episodes} episodes, {self.total_steps} steps>"

    def bind(self, num_slots: int, mode: AutoresetMode) -> None:
        """Bind these statistics to a vector env with this many slots.

        Raises:
            ValueError: if they are bound to another one.
        """
        if self._returns is not None:
            raise ValueError("episode_stats: these are another vector env's; make new ones")
        self._mode = mode
        self._returns = np.zeros(num_slots)
        self._lengths = np.zeros(num_slots, np.int64)
        self._began = np.zeros(num_slots)
        self._is_whole = np.zeros(num_slots, np.bool_)  # whether the episode was seen from its beginning
        self._pending_reset = np.zeros(num_slots, np.bool_)  # whether the next step resets instead
        self._any_pending = False  # False: no slot's next step does
        self._event_samples: list[list[list[Any]]] = [[[] for _ in range(num_slots)] for _ in self.events]

    def follow(self, mode: AutoresetMode) -> None:
        """Set the autoreset mode, which a vector env with a mode of its own reports when it is started."""
        self._mode = mode

    # ------------------------------------------------------------ steps

    def begin(self, slots: Slots) -> None:
        """Begin episodes in these slots; current ones are dropped."""
        assert self._returns is not None
        self._returns[slots] = 0
        self._lengths[slots] = 0
        self._began[slots] = perf_counter()
        self._is_whole[slots] = True
        if self._any_pending:
            self._pending_reset[slots] = False
        self._clear_events(slots)

    def drop(self, slots: Slots) -> None:
        """Drop the current episodes of these slots: they don't count."""
        self._is_whole[slots] = False
        if self._any_pending:
            self._pending_reset[slots] = False
        self._clear_events(slots)

    def await_resets(self, slots: Sequence[int]) -> None:
        """Note that no episode has begun in these slots: their next step resets instead."""
        if len(slots):
            some = np.array(slots, np.int64)
            self.drop(some)
            self._pending_reset[some] = self._any_pending = True

    def _clear_events(self, slots: Slots) -> None:
        for by_slot in self._event_samples:
            for slot in slots.tolist():
                by_slot[slot] = []

    def step(
        self,
        slots: Slots,
        rewards: npt.NDArray[np.float64],
        over: npt.NDArray[np.bool_],
        values: Iterable[tuple[int, int, Any]] = (),
        lost: npt.NDArray[np.bool_] | None = None,
    ) -> Ended:
        """Add a step of these slots; return the episodes that ended.

        Args:
            slots: which, ascending.
            rewards: float64, one each.
            over: bool: whether the episode has ended.
            values: (number of the event, slot, value) of each value in this step.
            lost: bool: whether the episode that ended was lost with its process: it does not count.
        """
        assert self._returns is not None
        stepped = where = _slice_of(slots)
        resets: set[int] = set()
        if self._any_pending and (fresh := self._pending_reset[where]).any():
            fresh = fresh.copy()
            self.begin(slots[fresh])  # this step was a reset, for any result
            self._any_pending = bool(self._pending_reset.any())
            stepped, rewards = slots[~fresh], rewards[~fresh]
            resets.update(slots[fresh].tolist())  # their values belong to no step
            # the report of a lost episode is no step of an env
            self.total_steps += len(rewards) if lost is None else int(np.count_nonzero(~(fresh | lost)))
        else:
            self.total_steps += len(rewards) if lost is None else int(np.count_nonzero(~lost))
        self._returns[stepped] = _sum(self._returns[stepped], rewards)
        self._lengths[stepped] += 1
        for event, slot, value in values:
            if self._is_whole[slot] and slot not in resets:
                self._event_samples[event][slot].append(value)
        if not over.tobytes().strip(b"\0"):  # six times as fast as `over.any()`
            return _NO_EPISODES
        counted = over & self._is_whole[where]
        if lost is not None:
            counted &= ~lost
        rows = counted.nonzero()[0]
        ended_slots = slots[rows]
        # rounded, as by Gymnasium
        times = (perf_counter() - self._began[ended_slots]).round(6)
        ended = Ended(rows, self._returns[ended_slots], self._lengths[ended_slots], times)
        self._count_ended(ended, ended_slots)
        finished = slots[over]
        if self._mode is AutoresetMode.SAME_STEP:
            self.begin(finished)
        else:
            self.drop(finished)
            if self._mode is AutoresetMode.NEXT_STEP:
                self._pending_reset[finished] = self._any_pending = True
        return ended

    def _count_ended(self, ended: Ended, slots: Slots) -> None:
        """Count episodes that have ended, and reduce the values of their steps."""
        if not len(slots):
            return
        self.total_episodes += len(slots)
        for column, each in zip(self._ended, ended[1:], strict=True):
            column.extend(each.tolist())
        for number, event in enumerate(self.events):
            for slot in slots.tolist():
                values = self._event_samples[number][slot]
                if values or (isinstance(event.episode, str) and event.episode in _EMPTY_VALUES):
                    try:
                        self._event_values[number].append(_reduce(event.episode, np.asarray(values)))
                    except Exception as exc:  # raised by `epoch`: the step did not fail
                        self._failed = self._failed or (event.name, exc)

    # ------------------------------------------------------------ epochs

    def epoch(self) -> EpochStats:
        """Return the statistics of the episodes that have ended since the last `write` or `clear`.

        "return/mean", "return/std", "return/min", "return/max"; "length/mean", "length/median", "length/total", in
        steps; "time/mean" in seconds; "episode_count", "total_episode_count" (since the beginning); and of each event
        "NAME/REDUCER". NaN where there was no episode.

        Raises:
            ValueError: if the values of an event in an episode could not be reduced; its cause is that exception.
        """
        if self._failed is not None:
            name, cause = self._failed
            raise ValueError(
                f"event {name!r}: the values of an episode could not be reduced: {type(cause).__name__}: {cause}"
            ) from cause
        returns, lengths, times = (np.array(column) for column in self._ended)
        stats = {f"return/{name}": _reduce_to_number(name, returns) for name in ("mean", "std", "min", "max")}
        stats |= {f"length/{name}": _reduce_to_number(name, lengths) for name in ("mean", "median")}
        stats |= {"length/total": float(lengths.sum()), "time/mean": _reduce_to_number("mean", times)}
        stats |= {"episode_count": float(len(returns)), "total_episode_count": float(self.total_episodes)}
        for event, values in zip(self.events, self._event_values, strict=True):
            array = np.asarray(values)
            assert not isinstance(event.epoch, str)  # see __post_init__
            for reducer in event.epoch:
                name, function = reducer if isinstance(reducer, tuple) else (reducer, reducer)
                stats[f"{event.name}/{name}"] = _reduce_to_number(function, array)
        return EpochStats(self.prefix, stats)

    def write(self, step: int | None = None) -> EpochStats:
        """Reduce the epoch, write it to the log (with a prefix) and the writers, and begin another.

        Current episodes go on, and count in the epoch in which they end.

        Args:
            step: the step for the writers; None: `total_steps`.
        """
        stats = self.epoch()
        step = self.total_steps if step is None else step
        self._start_epoch()
        if self.prefix is not None:
            _log.info("step %d, %s", step, stats)
        for writer in self.writers:
            writer.write(self.prefix or "", step, stats)
        return stats

    def clear(self) -> None:
        """Start a new epoch, and drop current episodes: those that begin later count.

        Episodes that have just begun, by a reset, and were not stepped yet count, too.
        """
        self._start_epoch()
        if self._returns is not None:
            due = self._pending_reset.copy()
            self.drop(np.flatnonzero(self._lengths))
            self._pending_reset = due

    def _start_epoch(self) -> None:
        # returns, lengths, times: 24 bytes an episode, since an epoch may be a whole training
        self._ended = [array("d") for _ in range(3)]
        self._event_values = [[] for _ in self.events]
        self._failed = None


_NO_EPISODES = Ended(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0))


def _slice_of(slots: Slots) -> Any:
    """Return ascending slots as a slice if they are successive, so that numpy makes views, not copies."""
    n = len(slots)
    first = int(slots[0]) if n else 0
    return slice(first, first + n) if n and int(slots[-1]) - first + 1 == n else slots


def _sum(returns: npt.NDArray[np.float64], rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    try:
        return returns + rewards
    except (FloatingPointError, RuntimeWarning):  # the user's numpy or warning settings are not meant for this sum
        with np.errstate(all="ignore"):
            return returns + rewards


def _reduce(reducer: Reducer, values: npt.NDArray[Any]) -> Any:
    if not len(values) and isinstance(reducer, str):
        return _EMPTY_VALUES.get(reducer, np.nan)
    return (_REDUCERS[reducer] if isinstance(reducer, str) else reducer)(values)


def _reduce_to_number(reducer: Reducer, values: npt.NDArray[Any]) -> float:
    if not len(values) and not isinstance(reducer, str):
        return np.nan
    return float(_reduce(reducer, values))
