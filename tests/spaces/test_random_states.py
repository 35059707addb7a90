"""The states of random generators as words."""

from __future__ import annotations

import numpy as np
import pytest

from aioenv.spaces.seeding import (
    RNG_WORDS,
    GeneratorReader,
    generator_from_words,
    seed_from_words,
    seed_words,
    state_words,
)


def test_the_states_of_many_are_read_as_they_are():
    rngs = [np.random.default_rng(seed) for seed in range(5)]
    reader, out = GeneratorReader(), np.zeros((5, RNG_WORDS + 2), np.uint64)[:, 1:-1]
    assert reader.read(rngs, out) and not reader.read(rngs, out)
    for count in range(3):
        rngs[count].integers(0, 9, dtype=np.int32)  # takes half of a word
        rngs[4].normal(size=count)
        assert not reader.read(rngs, out)
        assert out.tolist() == [state_words(rng) for rng in rngs]
    rngs[1] = np.random.default_rng(9)
    assert reader.read(rngs, out) and out[1].tolist() == state_words(rngs[1])
    for rng, row in zip(rngs, out.tolist(), strict=True):
        again = generator_from_words(row)
        assert again.integers(0, 9, 5, dtype=np.int32).tolist() == rng.integers(0, 9, 5, dtype=np.int32).tolist()
        assert again.random() == rng.random()


def test_only_pcg64_is_read():
    reader, out = GeneratorReader(), np.zeros((1, RNG_WORDS), np.uint64)
    for _ in range(2):
        with pytest.raises(ValueError, match="not PCG64"):
            reader.read([np.random.Generator(np.random.MT19937(1))], out)


@pytest.mark.parametrize("seed", [None, -1, 0, 7, 2**64 + 5, 2**128 - 1])
def test_seeds(seed):
    assert seed_from_words(seed_words(seed)) == seed
