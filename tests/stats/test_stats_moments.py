"""Running statistics: the arithmetic, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from aioenv.stats import (
    EpisodeCounter,
    Moments,
    NormalizeObservation,
    NormalizeReward,
    SharedRunningStats,
)
from aioenv.stats.moments import combine, merge, moments_of
from tests.kits.stats_kit import SHAPE, Walker, close_to, needs_sharing, same, samples

pytestmark = needs_sharing


def test_merged_groups_are_as_all_samples_together():
    data = samples(0, 100)
    groups = [moments_of(data[a:b]) for a, b in [(0, 1), (1, 40), (40, 100)]]
    arrays = (
        np.array([float(g.count) for g in groups]),
        *(np.stack([getattr(g, n) for g in groups]) for n in ("mean", "m2")),
    )
    close_to(merge(*arrays), data, 1e-13)
    whole = Moments(0.0, 0.0, np.zeros(3), np.zeros(3))
    for group in groups:
        whole = combine(whole, group)
    close_to(whole, data, 1e-13)


def test_nothing_cancels_when_the_mean_is_large(keep):
    stats = keep(SharedRunningStats(live=True))
    data = 1e9 + np.random.default_rng(0).normal(size=1000)
    for x in data:
        stats.update(x)
    assert abs(stats.var / data.var() - 1) < 1e-7  # the sum of squares less the squared sum is off by far more than 1
    assert abs((np.square(data).mean() - data.mean() ** 2) / data.var() - 1) > 1


@pytest.mark.parametrize("batch", [1, 5])
def test_decay_is_that_of_weighted_sums(batch, keep):
    stats = keep(SharedRunningStats(SHAPE, live=True, decay=0.9))
    weight, total, squares = 0.0, 0.0, 0.0
    for part in samples(0, 40).astype(np.float64).reshape(-1, batch, 3):
        stats.update(part if batch > 1 else part[0])
        fading = 0.9**batch
        weight, total = weight * fading + batch, total * fading + part.sum(0)
        squares = squares * fading + np.square(part).sum(0)
    moments = stats.moments
    assert (moments.count, moments.weight) == (40, pytest.approx(weight, 1e-14))
    np.testing.assert_allclose(moments.mean, total / weight, 1e-13)
    np.testing.assert_allclose(moments.var, squares / weight - np.square(total / weight), 1e-9, 1e-9)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_samples_and_batches_of_every_shape(shape, keep):
    data = np.random.default_rng(0).normal(size=(12, *shape))
    stats = keep(SharedRunningStats(shape, live=True))
    assert (stats.count, np.all(stats.mean == 0), np.all(stats.var == 1)) == (0, True, True)
    for x in data[:5]:
        stats.update(x)
    stats.update(data[5:])
    close_to(stats.moments, data, 1e-12)
    assert stats.mean.shape == stats.std.shape == shape
    np.testing.assert_allclose(stats.denormalize(stats.normalize(data)), data, 1e-12)
    assert abs(stats.normalize(data, clip=0.5)).max() == 0.5


def test_bad_input_changes_nothing(keep):
    stats = keep(SharedRunningStats(SHAPE, 2))
    stats.update(samples(0, 4))
    before = stats.moments
    slot = stats.at(0)
    for bad in ([1, 2], np.zeros((0, 3)), np.zeros((1, 1, 3)), [1, np.nan, 3], [1, 2, np.inf], [[1, 2, np.nan]]):
        with pytest.raises(ValueError, match=r"expected (a sample of shape|finite)"):
            slot.update(bad)
        with pytest.raises(ValueError, match="expected"):
            stats.update(bad)
    assert stats.merge() == 0
    assert same(stats.moments, before)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="expected finite"):
        slot.update([1e200, 0, 0])  # its square is none
    for bad in ([[1e200, 0, 0]], [[1e200, 0, 0], [-1e200, 0, 0]]):
        for update in (slot.update, stats.update):
            with pytest.raises(ValueError, match="squares are finite"):
                update(bad)
    assert stats.merge() == 0
    good = stats.state_dict()
    for bad in ({"count": -1}, {"weight": np.nan}, {"mean": [0, np.inf, 0]}, {"m2": [0, -1, 0]}):
        with pytest.raises(ValueError, match="expected a state of finite numbers"):
            stats.load_state_dict({**good, **bad})
    assert same(stats.moments, before)


def test_a_batch_of_one_that_is_too_large_does_not_spoil_statistics_without_samples(keep):
    stats = keep(SharedRunningStats((), live=True))
    with pytest.raises(ValueError, match="squares are finite"):
        stats.update([1e200])
    stats.update([1.0, 3.0])
    assert (stats.mean, stats.var) == (2, 1)
    assert stats.denormalize([0.0, 1.0]).tolist() == pytest.approx([2, 3])


def test_what_is_taken_is_there_no_more(keep):
    stats = keep(SharedRunningStats((2,), 3))
    stats.at(1).update(np.array([1.0, 2.0]))
    stats.at(2).update(np.array([3.0, 5.0]))
    taken = stats.take()
    assert {slot: moments.count for slot, moments in taken.items()} == {1: 1, 2: 1}
    assert stats.take() == {} and stats.merge() == 0 and stats.count == 0
    stats.put(taken)
    assert stats.merge() == 2 and np.array_equal(stats.mean, [2.0, 3.5])


def test_what_is_closed_still_has_a_state():
    with SharedRunningStats(SHAPE, 2) as stats, EpisodeCounter(2) as counter:
        stats.update(samples(0, 4))
        counter.at(1).next_id()
        states = stats.state_dict(), counter.state_dict()
    assert str((stats.state_dict(), counter.state_dict())) == str(states)
    assert same(stats.unshared().moments, stats.moments)
    assert counter.unshared().count == counter.count == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "num_slots: expected how many envs there are, got None"),
        ({"num_slots": 0}, ValueError, "num_slots: expected a positive int"),
        ({"shape": (0,), "live": True}, ValueError, "shape: expected positive ints"),
        ({"decay": 0, "live": True}, ValueError, "decay: expected a number above 0"),
        ({"decay": 1.1, "live": True}, ValueError, "decay"),
        ({"live": True, "shared": False}, RuntimeError, "live=True takes shared memory"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        SharedRunningStats(**arguments)


def test_bad_slots_and_wrappers(keep):
    stats = keep(SharedRunningStats(SHAPE, 2))
    for slot in (-1, 2, True, "0"):
        with pytest.raises(ValueError, match="slot: expected"):
            stats.at(slot)
    with pytest.raises(ValueError, match="expected those of a slot, got those of all"):
        NormalizeObservation(Walker(), stats)
    with pytest.raises(ValueError, match=r"samples of shape \(\), got shape \(3,\)"):
        NormalizeReward(Walker(), stats.at(0))
    with pytest.raises(TypeError, match=r"stats: expected SharedRunningStats\.at"):
        NormalizeObservation(Walker(), None)
    for bad in ({"epsilon": 0}, {"clip": 0}):
        with pytest.raises(ValueError, match="expected a positive number"):
            NormalizeObservation(Walker(), stats.at(0), **bad)
    with pytest.raises(ValueError, match="gamma"):
        NormalizeReward(Walker(), stats.at(0), gamma=2)
