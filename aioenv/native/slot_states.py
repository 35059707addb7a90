"""Whole states of slots: what physics, task and vector env know of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode

from aioenv.spaces.generators import RNG_WORDS, SEED_WORDS, Generators, generator_of, seed_of, seed_words

if TYPE_CHECKING:
    from aioenv.native.sim_pool import SimPool

__all__ = ["SlotStates"]

Array = npt.NDArray[Any]


class SlotStates:
    """The part of `NativeMujocoEnv` that tells and sets the states of its slots."""

    num_envs: int
    autoreset_mode: AutoresetMode
    pool: SimPool
    _over: npt.NDArray[np.int64]
    _elapsed: npt.NDArray[np.int64]
    _begun: npt.NDArray[np.bool_]
    _all_begun: bool
    _rngs: list[np.random.Generator | None]
    _seeds: list[int | None]
    _memory: dict[str, Array]
    _last: dict[int, tuple[Array, Array]]  # of slots put into a state since: the last observations, and the physics
    _generators: Generators | None = None
    _seed_words: npt.NDArray[np.uint64]
    _finals: tuple[npt.NDArray[np.int64], Array] | None = None  # slots whose episodes the last step has ended, and how

    def _keep_last(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep the last observations of slots whose state is about to change: who does not step them sees these."""
        raise NotImplementedError

    def rng(self, slot: int) -> np.random.Generator:
        """The random number generator of one slot; seeded by the system if no reset has had a seed for it."""
        rng = self._rngs[slot]
        if rng is None:
            rng, self._seeds[slot] = seeding.np_random()
            self._rngs[slot] = rng
        return rng

    def physics_states(self, slots: Iterable[int] | None = None, out: Array | None = None) -> Array:
        """The physics alone, to draw it, say: `mjSTATE_INTEGRATION`, float64 `(k, state_size)`.

        Args:
            slots: which; None: all of them.
            out: where to write them.
        """
        return self.pool.get_states(slots, out)

    def observed_physics_states(self, slots: Iterable[int] | None = None) -> Array:
        """Likewise, as the last observations show it: of slots that were put into a state since, as it was before."""
        states = self.pool.get_states(slots)
        for row, slot in enumerate(self.pool.numbers(slots).tolist() if self._last else ()):
            if slot in self._last:
                states[row] = self._last[slot][1]
        return states

    def final_physics_states(self, slots: Iterable[int]) -> Array:
        """Likewise, of slots whose episodes the last step that ended any has ended (SAME_STEP): as they were then.

        Raises:
            ValueError: if it has ended none in some of them.
        """
        numbers = self.pool.numbers(slots)
        ended, states = self._finals or (np.zeros(0, np.int64), np.zeros((0, self.pool.state_size)))
        if len(others := np.setdiff1d(numbers, ended)):
            raise ValueError(f"slots: no episode has ended in {others.tolist()}, only in {ended.tolist()}")
        final: Array = states[np.searchsorted(ended, numbers)]
        return final

    def get_state(self, slots: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """The whole states of slots: whoever sets them goes on exactly as from here.

        Args:
            slots: which; None: all of them.

        Returns:
            One dict for each: `physics` (float64 array), `memory` (what the task remembers), `elapsed` (steps of the
            episode), `over` (whether it has ended), `begun`, `seed`, and `rng` (the state of the bit generator, or
            None). It pickles.
        """
        numbers = self.pool.numbers(slots)
        physics = self.pool.get_states(numbers)
        over = set(self._over.tolist())
        states = []
        for row, slot in zip(physics, numbers.tolist(), strict=True):
            rng = self._rngs[slot]
            states.append(
                {
                    "physics": row.copy(),
                    "memory": {name: array[slot].copy() for name, array in self._memory.items()},
                    "elapsed": int(self._elapsed[slot]),
                    "over": slot in over,
                    "begun": bool(self._begun[slot]),
                    "seed": self._seeds[slot],
                    "rng": None if rng is None else rng.bit_generator.state,
                }
            )
        return states

    def set_state(self, states: Sequence[dict[str, Any]], slots: Iterable[int] | None = None) -> None:
        """Set the whole states of slots, as `get_state` gave them, of whichever slots.

        With AutoresetMode.DISABLED a slot whose episode was over goes on, as a single env does.

        Args:
            states: one for each slot.
            slots: which; None: all of them.

        Raises:
            ValueError: if there is another number of states, or they are of another task, or one awaits a reset that
                AutoresetMode.SAME_STEP would not make.
        """
        numbers = self.pool.numbers(slots)
        if len(states) != len(numbers):
            raise ValueError(f"states: expected {len(numbers)}, one a slot, got {len(states)}")
        sizes = {len(state["physics"]) for state in states}
        memories = {frozenset(state["memory"]) for state in states}
        if sizes - {self.pool.state_size} or memories - {frozenset(self._memory)}:
            raise ValueError("states: they are of another task or model than this one's")
        if self.autoreset_mode is AutoresetMode.SAME_STEP and any(state["over"] for state in states):
            raise ValueError("states: one is of an episode that is over, which under SAME_STEP would never be reset")
        self._keep_last(numbers)
        self.pool.set_states(
            np.array([state["physics"] for state in states]).reshape(-1, self.pool.state_size), numbers
        )
        over = set(self._over.tolist()) - set(numbers.tolist())
        for state, slot in zip(states, numbers.tolist(), strict=True):
            for name, array in self._memory.items():
                array[slot] = state["memory"][name]
            self._elapsed[slot], self._begun[slot] = state["elapsed"], state["begun"]
            self._seeds[slot], self._rngs[slot] = state["seed"], None
            if state["over"] and self.autoreset_mode is not AutoresetMode.DISABLED:
                over.add(slot)
            if state["rng"] is not None:
                rng, _ = seeding.np_random(0)
                rng.bit_generator.state = state["rng"]
                self._rngs[slot] = rng
        self._over = np.array(sorted(over), np.int64)
        self._all_begun = bool(self._begun.all())

    # ------------------------------------------------------------ all at once, as numbers

    @property
    def checkpoint_size(self) -> int:
        """How many float64 a slot's row of `get_checkpoints` has."""
        memory: int = sum(map(_words, self._memory.values()))
        return int(self.pool.state_size) + memory + 2 + RNG_WORDS + SEED_WORDS

    def get_checkpoints(self, out: Array) -> None:
        """Write what `get_state` tells of every slot into a row each, as 64-bit words: with every step, so it is fast.

        A task that overrides it knows more: that goes behind, and `checkpoint_size` must count it.

        Args:
            out: float64 `(num_envs, checkpoint_size)`.
        """
        at = self.pool.state_size
        self.pool.get_states(None, out[:, :at])
        words = out.view(np.uint64)
        for array in self._memory.values():
            rows = array.reshape(self.num_envs, -1).view(np.uint8)
            words[:, at : at + _words(array)].view(np.uint8)[:, : rows.shape[1]] = rows
            at += _words(array)
        words[:, at] = self._elapsed
        words[:, at + 1] = self._begun
        words[self._over, at + 1] |= 2
        at += 2
        if self._generators is None:
            self._generators = Generators()
        rngs = [rng or self.rng(slot) for slot, rng in enumerate(self._rngs)]
        if self._generators.read(rngs, words[:, at : at + RNG_WORDS]):
            self._seed_words = np.array([seed_words(seed) for seed in self._seeds], np.uint64)
        at += RNG_WORDS
        words[:, at : at + SEED_WORDS] = self._seed_words

    def set_checkpoints(self, rows: Array, newest: int) -> None:
        """Bring all slots into the states of rows that `get_checkpoints` wrote.

        Args:
            rows: float64 `(num_envs, checkpoint_size)`.
            newest: the row that was written last, as far as they were not written together.
        """
        at = self.pool.state_size
        self.pool.set_states(rows[:, :at])
        words = rows.view(np.uint64)
        for array in self._memory.values():
            mine = array.reshape(self.num_envs, -1).view(np.uint8)
            mine[...] = words[:, at : at + _words(array)].view(np.uint8)[:, : mine.shape[1]]
            at += _words(array)
        self._elapsed[...] = words[:, at]
        self._begun[...] = words[:, at + 1] & 1
        self._over = (words[:, at + 1] & 2).nonzero()[0]
        self._all_begun = bool(self._begun.all())
        at += 2
        for slot, row in enumerate(words[:, at:].tolist()):
            self._rngs[slot] = generator_of(row[:RNG_WORDS])
            self._seeds[slot] = seed_of(row[RNG_WORDS : RNG_WORDS + SEED_WORDS])


def _words(array: Array) -> int:
    """How many words a row of an array takes."""
    return (array.nbytes // len(array) + 7) // 8
