"""Counters for each slot in shared memory: `EpisodeCounter` for users, `ResetPlan` for seeds and options of resets."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt
from gymnasium import Env, Wrapper

from aioenv.errors import ResetNeededError
from aioenv.stats import sharing
from aioenv.stats.sharing import SharedBlock, can_share

__all__ = ["CountEpisodes", "EpisodeCounter", "ResetPlan", "SlotCounter"]


class EpisodeCounter:
    """Hands out numbers from 0, each once, to all processes that get it, or one of its slots, in a factory.

    With slots, slot i gets i, i + num_slots, i + 2 num_slots …. They are the same numbers for any number of workers,
    also after a restart of one. Without, the numbers are consecutive, in the order in which processes happen to come.

    Keep it (and don't close it) for as long as workers may start.

    Args:
        num_slots: how many slots there are, or None.

    Raises:
        ValueError: if `num_slots` is neither a positive int nor None.
        RuntimeError: if the platform has no memory that can be shared without a name.
    """

    def __init__(self, num_slots: int | None = None) -> None:
        if num_slots is not None:
            if isinstance(num_slots, bool) or not isinstance(num_slots, (int, np.integer)) or num_slots < 1:
                raise ValueError(f"num_slots: expected a positive int or None, got {num_slots!r}")
            num_slots = int(num_slots)
        if not can_share():
            raise RuntimeError("EpisodeCounter: this platform has no memory without a name that workers can open")
        self._set_up(num_slots, SharedBlock(8 * (num_slots or 1)))

    def _set_up(self, num_slots: int | None, block: SharedBlock) -> None:
        self.num_slots = num_slots
        self._block = block
        self._cells: Any = block.data.cast("q")

    def __repr__(self) -> str:
        return f"<EpisodeCounter of {self.num_slots or 'any'} slots>"

    def at(self, slot: int) -> SlotCounter:
        """Return the counter of a slot, for its factory.

        Raises:
            ValueError: if there is no such slot. A counter without slots takes any.
        """
        if isinstance(slot, bool) or not isinstance(slot, (int, np.integer)) or slot < 0:
            raise ValueError(f"slot: expected an int from 0, got {slot!r}")
        if self.num_slots is not None and slot >= self.num_slots:
            raise ValueError(f"slot: expected 0 … {self.num_slots - 1}, got {slot!r}: num_slots is {self.num_slots}")
        return SlotCounter(self, int(slot))

    def next_id(self) -> int:
        """Return the next number; only without slots.

        Raises:
            ValueError: if there are slots.
            ClosedError: if the counter is closed.
        """
        if self.num_slots is not None:
            raise ValueError("this counter has slots: ask counter.at(slot)")
        return self._count(0)

    def _count(self, cell: int) -> int:
        with self._block.locked():
            number: int = self._cells[cell]
            if self._block.shared and not sharing.counting:
                return max(number - 1, 0)  # a reset is replayed: the process that died took its number
            self._cells[cell] = number + 1
        return number

    @property
    def count(self) -> int:
        """The number of numbers that were handed out."""
        return sum(self._cells)

    def state_dict(self) -> dict[str, Any]:
        """`counts`: how many numbers each slot was handed out; without slots a single one. Also when closed."""
        with contextlib.nullcontext() if self._block.closed else self._block.locked():
            return {"counts": self._cells.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, in every process.

        Raises:
            ValueError: if it is the state of a counter with another number of slots, or no such state.
        """
        try:
            counts = [int(count) for count in state["counts"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"expected a state of state_dict(), got one without {exc}") from exc
        if len(counts) != len(self._cells) or min(counts) < 0:
            raise ValueError(f"expected {len(self._cells)} counts from 0, got {counts}")
        with self._block.locked():
            for cell, count in enumerate(counts):
                self._cells[cell] = count

    def unshared(self) -> EpisodeCounter:
        """Return a private copy in the same state: both hand out the same numbers from here on."""
        other = EpisodeCounter.__new__(EpisodeCounter)
        other._set_up(self.num_slots, SharedBlock(8 * (self.num_slots or 1), shared=False))
        other.load_state_dict(self.state_dict())
        return other

    def close(self) -> None:
        """Release the memory in this process; workers keep theirs. The counts can still be read here."""
        self._cells = memoryview(bytes(self._cells)).cast("q")
        self._block.close()
        self._block.data.release()

    def __enter__(self) -> EpisodeCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_counter, (self.num_slots, self._block)


def _rebuild_counter(num_slots: int | None, block: SharedBlock) -> EpisodeCounter:
    counter = EpisodeCounter.__new__(EpisodeCounter)
    counter._set_up(num_slots, block)
    return counter


class SlotCounter:
    """One slot of an `EpisodeCounter`, made by `EpisodeCounter.at`."""

    def __init__(self, counter: EpisodeCounter, slot: int) -> None:
        self.counter = counter
        self.slot = slot

    def __repr__(self) -> str:
        return f"<slot {self.slot} of {self.counter!r}>"

    def next_id(self) -> int:
        """Return the next number of this slot."""
        slots = self.counter.num_slots
        if slots is None:
            return self.counter.next_id()
        return self.slot + slots * self.counter._count(self.slot)


class CountEpisodes(Wrapper[Any, Any, Any, Any]):
    """Puts the number of the episode into each info dict, as "episode_id".

    Args:
        env: any env.
        counter: the source of the numbers: `EpisodeCounter.at(slot)`, or a counter without slots.

    Raises:
        ValueError: if it is a counter with slots, and not that of one slot.
    """

    def __init__(self, env: Env[Any, Any], counter: EpisodeCounter | SlotCounter) -> None:
        super().__init__(env)
        if isinstance(counter, EpisodeCounter) and counter.num_slots is not None:
            raise ValueError("counter: expected that of a slot, got that of all; pass counter.at(slot)")
        self._counter = counter
        self._id: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, with the next number."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._id = self._counter.next_id()
        return obs, {**info, "episode_id": self._id}

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step.

        Raises:
            ResetNeededError: if no episode has begun.
        """
        if self._id is None:
            raise ResetNeededError("step before reset: the episode has no number yet")
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated, {**info, "episode_id": self._id}

    def get_state(self) -> dict[str, Any]:
        """Return the number of the episode, -1 before the first."""
        return {"episode_id": -1 if self._id is None else self._id}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        self._id = None if state["episode_id"] < 0 else int(state["episode_id"])


class ResetPlan:
    """Seeds and options of resets, by slot and episode.

    Episode 0 of a slot is the one that the last reset of all slots began; each later reset of the slot adds 1. So the
    numbers are the same for any number of workers and any timing. They are counted in memory that all processes share,
    so a worker that is restarted goes on counting, from the last replies of the process before it. Where memory can't
    be shared, each worker counts for itself, from the numbers of the plan that it is sent: the parent counts in that
    one, if workers are restarted.

    Args:
        num_envs: how many slots there are.
        seeds: int64; episode k of slot i gets seed `i + k * num_envs`, modulo their number. None: no seeds.
        options: of automatic resets: a dict for all of them, or a function of slot and episode. None: no options. A
            worker gets that to which a `CommonReference` refers.
        counts_shared: whether all processes share the numbers.
        first_slot: the number of the first slot among those that the seeds and the function are for.
        all_slots: how many slots they are for; None: `num_envs`.

    Attributes:
        has_seeds: whether there are seeds.
        counts_shared: whether all processes share the numbers.
    """

    def __init__(
        self,
        num_envs: int,
        seeds: npt.NDArray[np.int64] | None = None,
        options: Any = None,
        *,
        counts_shared: bool = True,
        first_slot: int = 0,
        all_slots: int | None = None,
    ) -> None:
        block = SharedBlock(8 * num_envs, shared=counts_shared and can_share())
        self._set_up(num_envs, seeds, options, block, first_slot, num_envs if all_slots is None else all_slots)

    def _set_up(
        self,
        num_envs: int,
        seeds: npt.NDArray[np.int64] | None,
        options: Any,
        block: SharedBlock,
        first_slot: int,
        all_slots: int,
    ) -> None:
        self._num_envs, self._first_slot, self._all_slots = num_envs, first_slot, all_slots
        self._seeds = seeds
        self.has_seeds = seeds is not None
        self._options = options
        self.counts_shared = block.shared
        self._block = block
        self._begun: Any = block.data.cast("q")  # by slot; each is written by one worker alone, so without a lock
        self._replied = np.zeros(num_envs, np.int64)  # in the parent: the same, as of each slot's last reply

    def start_at(self, slot: int, episode: int) -> None:
        """Begin with this episode next."""
        self._begun[slot] = self._replied[slot] = episode

    def note_replies(self, slots: Any) -> None:
        """Note in the parent that these slots, an index of arrays, have replied: their episodes stay begun."""
        self._replied[slots] = np.array(self._begun)[slots]

    def rewind(self, slots: range) -> None:
        """Take back the episodes of these slots that have begun since their last replies: they begin again."""
        for slot in slots:
            self._begun[slot] = self._replied[slot]

    def begun(self, slot: int) -> int:
        """Return how many episodes a slot has begun."""
        count: int = self._begun[slot]
        return count

    def begin(self, slot: int) -> int:
        """Return the number of the episode that a slot begins now."""
        episode: int = self._begun[slot]
        self._begun[slot] = episode + 1
        return episode

    def seed(self, slot: int, episode: int) -> int | None:
        """Return the seed of an episode; None without seeds."""
        if self._seeds is None:
            return None
        return int(self._seeds[(self._first_slot + slot + episode * self._all_slots) % len(self._seeds)])

    def options(self, slot: int, episode: int) -> dict[str, Any] | None:
        """Return the options of the automatic reset that begins an episode; the caller may change the dict.

        Raises:
            TypeError: if the function returned neither a dict nor None.
            Exception: any exception of the function.
        """
        options = self._options
        if options is None:
            return None
        if isinstance(options, Mapping):
            return dict(options)
        slot += self._first_slot
        try:
            own: dict[str, Any] | None = options(slot, episode)
        except BaseException as exc:
            exc.add_note(f"raised by autoreset_options for slot {slot}, episode {episode}")
            raise
        if own is not None and not isinstance(own, Mapping):
            raise TypeError(
                f"autoreset_options: expected a dict or None for slot {slot}, episode {episode}, got {own!r}"
            )
        return own

    def close(self) -> None:
        """Release the memory in this process. Idempotent."""
        if not self._block.closed:
            self._begun.release()
            self._block.close()
            self._block.data.release()

    def __reduce__(self) -> tuple[Any, ...]:
        counts = self._block if self.counts_shared else bytes(self._begun)
        where = self._first_slot, self._all_slots
        return _rebuild_plan, (self._num_envs, self._seeds, self._options, counts, *where)


def _rebuild_plan(
    num_envs: int, seeds: Any, options: Any, counts: SharedBlock | bytes, first_slot: int, all_slots: int
) -> ResetPlan:
    plan = ResetPlan.__new__(ResetPlan)
    block = counts if isinstance(counts, SharedBlock) else SharedBlock(8 * num_envs, shared=False)
    plan._set_up(num_envs, seeds, options, block, first_slot, all_slots)
    if not isinstance(counts, SharedBlock):
        for slot, begun in enumerate(memoryview(counts).cast("q")):
            plan.start_at(slot, begun)
    return plan
