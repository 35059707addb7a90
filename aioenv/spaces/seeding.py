"""Check seeds and reset masks, and read and write the states of random generators."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence, Set
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "RNG_WORDS",
    "SEED_WORDS",
    "Generators",
    "check_options",
    "checked_seed",
    "generator_of",
    "is_listed",
    "listed_seeds",
    "one_seed",
    "raw_state",
    "seed_of",
    "seed_words",
    "split_reset_options",
    "spread_seeds",
    "state_words",
]


def spread_seeds(
    seed: int | Sequence[int | None] | None, slots: npt.NDArray[np.int64], num_envs: int
) -> list[int | None]:
    """One seed for each of `slots`: `seed + slot` for an int, the elements of a list, or None.

    Raises:
        ValueError: if a list has another length than there are slots.
        TypeError: if it is none of these, or an element is no int.
    """
    checked = checked_seed(seed, len(slots), num_envs)
    if checked is None:
        return [None] * len(slots)
    return checked if isinstance(checked, list) else [checked + slot for slot in slots.tolist()]


def is_listed(seed: Any) -> bool:
    """Whether this is a seed for each slot, rather than one for all of them, or None."""
    return seed is not None and not isinstance(seed, (int, np.integer))


def checked_seed(seed: Any, n: int, num_envs: int) -> int | list[int | None] | None:
    """A seed of n of all slots: an int, a list of one for each (None: no seed), or None for none at all.

    Raises:
        ValueError, TypeError: as `spread_seeds`.
    """
    if not is_listed(seed):
        return None if seed is None else int(seed)
    seeds = listed_seeds(seed)
    if len(seeds) != n:
        what = f"num_envs={num_envs}" if n == num_envs else f"the number of slots, {n},"
        raise ValueError(f"If seeds are passed as a list the length must match {what} but got length={len(seeds)}.")
    return seeds


def listed_seeds(seed: Any) -> list[int | None]:
    """The elements of a sequence of seeds.

    Raises:
        TypeError: if it is none, or an element is no int.
    """
    try:
        if isinstance(seed, (str, Set, Mapping)):  # of which the last two have no order, or no seeds
            raise TypeError("no sequence")
        if isinstance(seed, list) and set(map(type, seed)) == {int}:  # of which there may be millions
            return [*seed]
        return [None if s is None else index(s) for s in seed]
    except TypeError:
        raise TypeError(f"seed: expected an int, a sequence of ints or None, got {seed!r}") from None


def one_seed(seed: Any) -> int | None:
    """The seed of one slot, as an int.

    Raises:
        TypeError: if it is neither an int nor None.
    """
    try:
        return None if seed is None else index(seed)
    except TypeError:
        raise TypeError(f"seed: expected an int or None, got {seed!r}") from None


def check_options(options: Any) -> None:
    """Raise a TypeError unless reset options are a dict or None."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options: expected a dict or None, got {options!r}")


def split_reset_options(
    options: dict[str, Any] | None, num_envs: int
) -> tuple[npt.NDArray[np.bool_] | None, dict[str, Any] | None]:
    """Take Gymnasium's `reset_mask` out of reset options; the caller's dict stays as it is.

    Raises:
        TypeError: if the options are no dict, or the mask is not a numpy array of bool.
        ValueError: if its shape is not `(num_envs,)`, or nothing in it is True.
    """
    check_options(options)
    if options is None or "reset_mask" not in options:
        return None, options
    mask = options["reset_mask"]
    name = "`options['reset_mask']`"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{name} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(f"{name} must contain a boolean array with at least one True value, got reset_mask={mask}")
    return mask, {key: value for key, value in options.items() if key != "reset_mask"}


Words = npt.NDArray[np.uint64]

RNG_WORDS, SEED_WORDS = 5, 3
_MASK = (1 << 64) - 1


class Generators:
    """Reads the states of generators again and again: 0.1 µs each, as long as they are the same objects."""

    def __init__(self) -> None:
        self._followed: list[Any] = []
        self._raw: list[Words] = []
        self._flat = np.empty(0, np.uint64)

    def read(self, generators: list[np.random.Generator], out: Words) -> bool:
        """Write the words of each into a row of `out`, `(k, RNG_WORDS)`; whether there are others than last time.

        Raises:
            ValueError: if one is not made of PCG64, as Gymnasium's are.
        """
        others = self._followed != generators  # compares what is not identical, and that is never equal
        if others:
            self._follow(generators.copy())
        if self._raw:
            np.concatenate(self._raw, out=self._flat)
            out[...] = self._flat.reshape(out.shape)
        else:
            out[...] = [state_words(generator) for generator in generators]
        return others

    def _follow(self, generators: list[np.random.Generator]) -> None:
        self._followed = []
        raw = [raw_state(generator) for generator in generators]
        self._raw = [array for pair in raw if pair is not None for array in pair]
        if len(self._raw) < 2 * len(raw):
            self._raw = []
        self._flat = np.empty(RNG_WORDS * len(raw), np.uint64)
        self._followed = generators


def raw_state(generator: np.random.Generator) -> tuple[Words, Words] | None:
    """Live views of where a generator keeps its state, 4 words and 1; None if they can't be had.

    They are valid as long as the generator lives.

    Raises:
        ValueError: if it is not made of PCG64.
    """
    expected = state_words(generator)
    try:
        address = generator.bit_generator.ctypes.state_address
        inner = ctypes.c_uint64.from_address(address).value
        raw = np.ctypeslib.as_array((ctypes.c_uint64 * 4).from_address(inner))
        rest = np.ctypeslib.as_array((ctypes.c_uint64 * 1).from_address(address + 8))
    except Exception:
        return None
    # numpy does not promise how this lies in memory: believe it only if it is what the public state says
    return (raw, rest) if [*raw.tolist(), *rest.tolist()] == expected else None


def state_words(generator: np.random.Generator) -> list[int]:
    """The state of a generator.

    Raises:
        ValueError: if it is not made of PCG64.
    """
    if type(generator.bit_generator) is not np.random.PCG64:
        raise ValueError("its random generator is not PCG64")
    state: Any = generator.bit_generator.state
    inner, inc = state["state"]["state"], state["state"]["inc"]
    rest = (state["uinteger"] << 32) | state["has_uint32"]
    return [inner & _MASK, inner >> 64, inc & _MASK, inc >> 64, rest]


def generator_of(words: Sequence[int]) -> np.random.Generator:
    """A generator in the state that these words tell."""
    low, high, low_inc, high_inc, rest = words
    bits = np.random.PCG64()
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": low | high << 64, "inc": low_inc | high_inc << 64},
        "has_uint32": rest & 0xFFFFFFFF,
        "uinteger": rest >> 32,
    }
    return np.random.Generator(bits)


def seed_words(seed: Any) -> list[int]:
    """Kind and 128 bits; a longer seed is forgotten, on which no trajectory depends."""
    if not isinstance(seed, int) or seed >= 1 << 128:
        return [0, 0, 0]
    return [2, seed & _MASK, seed >> 64] if seed >= 0 else [1, 0, 0]


def seed_of(words: Sequence[int]) -> int | None:
    """What `seed_words` was given."""
    kind, low, high = words
    return None if kind == 0 else -1 if kind == 1 else low | high << 64
