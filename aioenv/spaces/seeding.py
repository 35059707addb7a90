"""Seeds: check those of a reset, and its reset mask; read and write the states of random generators."""

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
    "GeneratorReader",
    "check_options",
    "generator_from_words",
    "is_seed_list",
    "live_state",
    "normalize_seed",
    "normalize_seeds",
    "normalize_slot_seed",
    "seed_from_words",
    "seed_words",
    "split_reset_options",
    "spread_seeds",
    "state_words",
]


def spread_seeds(
    seed: int | Sequence[int | None] | None, slots: npt.NDArray[np.int64], num_envs: int
) -> list[int | None]:
    """Return a seed for each of `slots`: `seed + slot` for an int, the elements of a list, or None.

    Raises:
        ValueError: if the length of a list is not the number of slots.
        TypeError: if it is none of these, or an element is no int.
    """
    checked = normalize_seed(seed, len(slots), num_envs)
    if checked is None:
        return [None] * len(slots)
    return checked if isinstance(checked, list) else [checked + slot for slot in slots.tolist()]


def is_seed_list(seed: Any) -> bool:
    """Return whether this is one seed for each slot, rather than one for all of them, or None."""
    return seed is not None and not isinstance(seed, (int, np.integer))


def normalize_seed(seed: Any, n: int, num_envs: int) -> int | list[int | None] | None:
    """Return the seed of n slots as an int, a list of one for each (None: no seed), or None.

    Raises:
        ValueError, TypeError: as `spread_seeds`.
    """
    if not is_seed_list(seed):
        return None if seed is None else int(seed)
    seeds = normalize_seeds(seed)
    if len(seeds) != n:
        what = f"num_envs={num_envs}" if n == num_envs else f"the number of slots, {n},"
        raise ValueError(f"If seeds are passed as a list the length must match {what} but got length={len(seeds)}.")
    return seeds


def normalize_seeds(seed: Any) -> list[int | None]:
    """Return the elements of a sequence of seeds as a list.

    Raises:
        TypeError: if it is no sequence, or an element is no int.
    """
    try:
        if isinstance(seed, (str, Set, Mapping)):  # sets have no order
            raise TypeError("no sequence")
        if isinstance(seed, list) and set(map(type, seed)) == {int}:  # fast: there may be millions
            return [*seed]
        return [None if s is None else index(s) for s in seed]
    except TypeError:
        raise TypeError(f"seed: expected an int, a sequence of ints or None, got {seed!r}") from None


def normalize_slot_seed(seed: Any) -> int | None:
    """Return the seed of one slot as an int.

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
    """Split Gymnasium's `reset_mask` from the other reset options; the caller's dict stays as it is.

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


# The state of a generator in 64-bit words: state and increment of PCG64 (4), and its buffered 32 bits (1). A seed takes
# a kind and 128 bits.
Words = npt.NDArray[np.uint64]

RNG_WORDS, SEED_WORDS = 5, 3
_MASK = (1 << 64) - 1


class GeneratorReader:
    """Reads the states of generators repeatedly: 0.1 µs each, as long as they are the same objects."""

    def __init__(self) -> None:
        self._generators: list[Any] = []
        self._raw: list[Words] = []
        self._flat = np.empty(0, np.uint64)

    def read(self, generators: list[np.random.Generator], out: Words) -> bool:
        """Write the words of each into a row of `out`, `(k, RNG_WORDS)`; return whether the generators have changed.

        Raises:
            ValueError: if one is not a PCG64, as Gymnasium's are.
        """
        changed = self._generators != generators  # generators are equal only if they are the same object
        if changed:
            self._set_generators(generators.copy())
        if self._raw:
            np.concatenate(self._raw, out=self._flat)
            out[...] = self._flat.reshape(out.shape)
        else:
            out[...] = [state_words(generator) for generator in generators]
        return changed

    def _set_generators(self, generators: list[np.random.Generator]) -> None:
        self._generators = []
        raw = [live_state(generator) for generator in generators]
        self._raw = [array for pair in raw if pair is not None for array in pair]
        if len(self._raw) < 2 * len(raw):
            self._raw = []
        self._flat = np.empty(RNG_WORDS * len(raw), np.uint64)
        self._generators = generators


def live_state(generator: np.random.Generator) -> tuple[Words, Words] | None:
    """Return live views of the memory of a generator's state, 4 words and 1; None if there is no access to it.

    They are valid as long as the generator lives.

    Raises:
        ValueError: if it is not a PCG64.
    """
    expected = state_words(generator)
    try:
        address = generator.bit_generator.ctypes.state_address
        inner = ctypes.c_uint64.from_address(address).value
        raw = np.ctypeslib.as_array((ctypes.c_uint64 * 4).from_address(inner))
        rest = np.ctypeslib.as_array((ctypes.c_uint64 * 1).from_address(address + 8))
    except Exception:
        return None
    # numpy does not promise this memory layout: use it only if it agrees with the public state
    return (raw, rest) if [*raw.tolist(), *rest.tolist()] == expected else None


def state_words(generator: np.random.Generator) -> list[int]:
    """Return the state of a generator as words.

    Raises:
        ValueError: if it is not a PCG64.
    """
    if type(generator.bit_generator) is not np.random.PCG64:
        raise ValueError("its random generator is not PCG64")
    state: Any = generator.bit_generator.state
    inner, inc = state["state"]["state"], state["state"]["inc"]
    rest = (state["uinteger"] << 32) | state["has_uint32"]
    return [inner & _MASK, inner >> 64, inc & _MASK, inc >> 64, rest]


def generator_from_words(words: Sequence[int]) -> np.random.Generator:
    """Make a generator from the words of its state."""
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
    """Return a seed as its kind and 128 bits; a longer one is dropped: no trajectory depends on it."""
    if not isinstance(seed, int) or seed >= 1 << 128:
        return [0, 0, 0]
    return [2, seed & _MASK, seed >> 64] if seed >= 0 else [1, 0, 0]


def seed_from_words(words: Sequence[int]) -> int | None:
    """Return the seed that `seed_words` was called with."""
    kind, low, high = words
    return None if kind == 0 else -1 if kind == 1 else low | high << 64
