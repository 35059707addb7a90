"""Wrappers that normalize by shared statistics."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation as GymnasiumsNormalizeObservation

import aioenv
from aioenv.stats import (
    CountEpisodes,
    EpisodeCounter,
    NormalizeObservation,
    NormalizeReward,
    SharedRunningStats,
)
from tests.kits.stats_kit import SHAPE, Endless, Walker, needs_sharing, same

pytestmark = needs_sharing


def test_one_slot_normalizes_as_gymnasium_does(keep):
    stats = keep(SharedRunningStats(SHAPE, 1))
    ours, theirs = NormalizeObservation(Walker(), stats.at(0)), GymnasiumsNormalizeObservation(Walker())
    assert ours.observation_space == theirs.observation_space
    pairs = [(ours.reset(seed=0)[0], theirs.reset(seed=0)[0])]
    for _ in range(50):
        pairs.append((ours.step(0)[0], theirs.step(0)[0]))
        stats.merge()
    for mine, other in pairs[20:]:  # theirs begins with a ten-thousandth of a sample at 0, and counts in float32
        assert mine.dtype == other.dtype == np.float32
        np.testing.assert_allclose(mine[:2], other[:2], 0.05, 0.01)
    ours.update_running_mean = False
    before = stats.moments
    ours.step(0)
    assert (ours.update_running_mean, stats.merge(), same(stats.moments, before)) == (False, 0, True)


def test_rewards_are_divided_by_the_deviation_of_returns(keep):
    stats = keep(SharedRunningStats((), live=True))
    env, plain = NormalizeReward(Walker(), stats, gamma=0.5), Walker()
    returns, total = [], 0.0
    for seed in range(3):
        env.reset(seed=seed), plain.reset(seed=seed)
        total = 0.0
        for _ in range(5):
            reward, raw = env.step(0)[1], plain.step(0)[1]
            total = 0.5 * total + raw
            returns.append(total)
            assert reward == pytest.approx(raw / np.sqrt(np.var(returns) + 1e-8), 1e-9)
    assert NormalizeReward(Walker(), stats, clip=1e-3).reset(seed=0)
    state = env.get_state()
    env.set_state({"return": 0.0})
    env.set_state(state)
    assert env.get_state() == {"return": pytest.approx(total)}
    env.update_running_mean = False
    count = stats.count
    env.step(0)
    assert (stats.count, env.update_running_mean) == (count, False)


def test_states_of_envs_have_what_wrappers_remember():
    class Still(Endless):
        def get_state(self):
            return {}

        def set_state(self, state):
            pass

    async def main():
        with SharedRunningStats(SHAPE, 1) as stats, SharedRunningStats((), 1) as returns, EpisodeCounter(1) as counter:

            def make():
                env = NormalizeReward(NormalizeObservation(Still(), stats.at(0)), returns.at(0))
                return CountEpisodes(env, counter.at(0))

            async with aioenv.AsyncVectorEnv([make]) as envs:
                await envs.reset(seed=0)
                await envs.step([0])
                states = await envs.get_state()
                (before,) = await envs.call("get_state")
                await envs.reset()
                await envs.set_state(states)
                _, _, _, _, info = await envs.step([0])
                assert list(info["episode_id"]) == [before["episode_id"]] == [0]

    aioenv.run(main())


@pytest.mark.stress
def test_an_update_costs_less_than_ten_microseconds(keep):
    import timeit

    slot, x = keep(SharedRunningStats((17,), 4)).at(1), np.zeros(17, np.float32)
    assert min(timeit.repeat(lambda: slot.update(x), number=50, repeat=1000)) / 50 < 10e-6
