"""Random generators as words of 64 bits: the states of many are read at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["RNG_WORDS", "SEED_WORDS", "Generators", "generator_of", "raw_state", "seed_of", "seed_words", "state_words"]

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
