"""Exact comparison of what two vector envs gave: types, dtypes, shapes, bytes."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(got: Any, expected: Any, where: str = "") -> None:
    """Raise AssertionError, with the way to the difference, unless the two are the same to the bit; NaN equals NaN."""
    if isinstance(expected, dict):
        assert isinstance(got, dict), f"{where}: {type(got)} is not a dict"
        assert set(got) == set(expected), f"{where}: keys differ by {sorted(map(str, set(got) ^ set(expected)))}"
        for key in expected:
            assert_same(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (tuple, list)):
        assert type(got) is type(expected), f"{where}: {type(got)} is not {type(expected)}"
        assert len(got) == len(expected), f"{where}: {got!r} is not {expected!r}"
        for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_same(mine, theirs, f"{where}[{index}]")
    elif isinstance(expected, np.ndarray):
        assert isinstance(got, np.ndarray), f"{where}: {type(got)} is not an array"
        assert got.dtype == expected.dtype, f"{where}: dtype {got.dtype} is not {expected.dtype}"
        assert got.shape == expected.shape, f"{where}: shape {got.shape} is not {expected.shape}"
        if expected.dtype == object:
            for index in np.ndindex(expected.shape):
                assert_same(got[index], expected[index], f"{where}{list(index)}")
        else:
            assert got.tobytes() == expected.tobytes() or _equal(got, expected), f"{where}: {got} is not {expected}"
    else:
        assert type(got) is type(expected), f"{where}: {type(got)} is not {type(expected)}"
        same = got == expected and repr(got) == repr(expected)  # repr tells -0.0 from 0.0
        assert same or (got != got and expected != expected), f"{where}: {got!r} is not {expected!r}"


def _equal(got: np.ndarray, expected: np.ndarray) -> bool:
    """Equal but for the bits of NaNs; -0.0 is not 0.0."""
    if got.dtype.kind not in "fc":
        return False
    nan = np.isnan(expected)
    return bool((np.isnan(got) == nan).all()) and got[~nan].tobytes() == expected[~nan].tobytes()


def same_observations(one: Any, other: Any) -> bool:
    """Whether two batches of observations, arrays or dicts of them, are equal."""
    if isinstance(other, dict):
        return list(one) == list(other) and all(same_observations(one[key], other[key]) for key in other)
    return np.array_equal(one, other)
