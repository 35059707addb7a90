"""Statistics that older systems' creators shared, without the traps: each `test_ec_…` is for one line of theirs."""

from __future__ import annotations

import os
import pickle
import signal
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.stats import (
    CountEpisodes,
    EpisodeCounter,
    NormalizeObservation,
    NormalizeReward,
    SharedRunningStats,
)
from tests.kits.stats_kit import SHAPE, Endless, Walker, Writer, needs_sharing, same, samples

pytestmark = needs_sharing


@pytest.mark.parametrize("live", [True, False])
def test_ec_counts_and_identical_statistics_everywhere(live):
    n = 3

    class Knowing(NormalizeReward):
        def know(self):
            return [pickle.dumps(s.stats.moments) for s in (self.env._statistics.slot, self._statistics.slot)]

    async def main():
        with SharedRunningStats(SHAPE, n, live=live) as observations, SharedRunningStats((), n, live=live) as rewards:

            def make(slot):
                return Knowing(NormalizeObservation(Endless(), observations.at(slot)), rewards.at(slot))

            async with aioenv.AsyncVectorEnv([partial(make, slot) for slot in range(n)], num_workers=n) as envs:
                await envs.reset(seed=0)
                for _ in range(10):
                    await envs.step(np.zeros(n, np.int64))
                    observations.merge()
                    rewards.merge()
                known = await envs.call("know")
            for dumps in known:
                moments = [pickle.loads(dump) for dump in dumps]
                assert [m.count for m in moments] == [n * 11, n * 10]
                assert same(moments[0], observations.moments)
                assert same(moments[1], rewards.moments)

    aioenv.run(main())


def test_ec_state_dict_round_trip(keep):
    a, b = keep(SharedRunningStats(SHAPE, 2, decay=0.99)), keep(SharedRunningStats(SHAPE, 3, decay=0.99))
    a.update(samples(0, 20))
    state = pickle.loads(pickle.dumps(a.state_dict()))
    b.at(0).update([7, 7, 7])  # never merged: dropped
    b.load_state_dict(state)
    assert b.merge() == 0
    assert same(a.moments, b.moments)
    for stats in (a, b):
        stats.update(samples(1, 5))
    assert same(a.moments, b.moments)
    assert a.count == 25
    for bad in ({}, {**state, "mean": np.zeros(2)}, {**state, "m2": "x"}, None):
        with pytest.raises(ValueError, match="expected"):
            b.load_state_dict(bad)
    with pytest.raises(ValueError, match=r"expected a state of state_dict\(\), got None"):
        b.load_state_dict(None)
    assert same(a.moments, b.moments)


def test_ec_freeze_and_frozen_copy(keep):
    stats = keep(SharedRunningStats(SHAPE, 1))
    slot = stats.at(0)
    slot.update(samples(0, 10))
    stats.freeze()  # merges first
    slot.update(samples(1, 3))
    stats.update(samples(1, 3))
    assert (stats.frozen, stats.merge(), stats.count, slot.moments.count) == (True, 0, 10, 10)
    copied = pickle.loads(pickle.dumps(stats.frozen_copy()))
    assert same(copied, stats.moments)
    stats.unfreeze()
    slot.update(samples(1, 3))
    assert (stats.merge(), stats.count, copied.count) == (3, 13, 10)
    with pytest.raises(ValueError, match="read-only"):
        stats.frozen_copy().mean[0] = 0
    x = samples(2, 4)
    np.testing.assert_allclose(copied.denormalize(copied.normalize(x)), x, 1e-12)
    env = NormalizeObservation(Walker(), copied)
    raw, _ = Walker().reset(seed=1)
    assert (env.reset(seed=1)[0] == copied.normalize(raw).astype(np.float32)).all()
    assert copied.count == 10


def test_ec_unique_ids():
    async def main():
        with SharedRunningStats((), 3) as stats, EpisodeCounter() as counter:
            factories = [partial(Writer, stats.at(slot), counter) for slot in range(3)]
            async with aioenv.AsyncVectorEnv(factories, num_workers=3) as envs:
                ids = [number for part in await envs.call("draw", 200) for number in part]
            assert sorted(ids) == list(range(600))
            assert (counter.next_id(), counter.count) == (600, 601)

    aioenv.run(main())


def test_ids_of_slots_are_the_same_for_any_number_of_workers_and_after_a_restart():
    async def ids(num_workers, kill):
        with EpisodeCounter(3) as counter:
            factories = [lambda slot=slot: CountEpisodes(Walker(), counter.at(slot)) for slot in range(3)]
            policy = aioenv.RestartPolicy()
            async with aioenv.AsyncVectorEnv(factories, num_workers=num_workers, restart=policy) as envs:
                seen = [(await envs.reset(seed=1)).info["episode_id"]]
                if kill:
                    os.kill(envs.workers[0].pid, signal.SIGKILL)
                for _ in range(6):
                    result = await envs.step(np.zeros(3, np.int64))
                    seen.append(result.info["episode_id"] if not kill else seen[0])
                if kill:
                    await envs.reset(seed=1)
                return np.array(seen), [counter.at(slot).next_id() for slot in range(3)]

    (one, _), (three, _) = aioenv.run(ids(1, False)), aioenv.run(ids(3, False))
    assert (one == three).all()
    assert (one % 3 == [0, 1, 2]).all()
    _, following = aioenv.run(ids(3, True))
    assert all(number % 3 == slot and number >= 6 for slot, number in enumerate(following))


def test_ec_step_before_reset_and_bad_counters():
    with EpisodeCounter(2) as counter:
        env = CountEpisodes(Walker(), counter.at(1))
        with pytest.raises(gym.error.ResetNeeded, match="no number yet"):
            env.step(0)
        assert env.reset(seed=0)[1]["episode_id"] == 1
        state = env.get_state()
        assert env.reset()[1]["episode_id"] == 3
        env.set_state(state)
        assert env.step(0)[4]["episode_id"] == 1
        with pytest.raises(ValueError, match=r"ask counter\.at"):
            counter.next_id()
        with pytest.raises(ValueError, match=r"pass counter\.at"):
            CountEpisodes(Walker(), counter)
        with pytest.raises(ValueError, match="slot: expected 0 … 1, got 2"):
            counter.at(2)
    with pytest.raises(ValueError, match="num_slots"):
        EpisodeCounter(0)
