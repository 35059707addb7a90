"""Statistics that processes share. `test_ec_…`: the lines of what older systems' creators shared, without the traps."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation as GymnasiumsNormalizeObservation

import aioenv
from aioenv.stats import (
    CountEpisodes,
    EpisodeCounter,
    Moments,
    NormalizeObservation,
    NormalizeReward,
    SharedRunningStats,
)
from aioenv.stats.block import can_share
from aioenv.stats.moments import combine, merge, moments_of
from aioenv.workers.launch import START_METHODS

pytestmark = pytest.mark.skipif(not can_share(), reason="no memory without a name here")

SHAPE = (3,)


def samples(writer, n):
    """What a writer sees: nothing that float32 rounds, means and deviations of different sizes."""
    rng = np.random.default_rng(writer)
    return rng.normal([3, -40, 1000], [1, 7, 0.5], (n, 3)).astype(np.float32)


class Walker(gym.Env):
    """Observes random numbers; its reward is the first of them. It ends every fourth episode step, more or less."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, SHAPE, np.float32)
    action_space = gym.spaces.Discrete(3)

    def _observe(self):
        return self.np_random.normal([3, -40, 1000], [1, 7, 0.5]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        obs = self._observe()
        return obs, float(obs[0]), bool(self.np_random.random() < 0.25), False, {}


class Endless(Walker):
    """The same, but it never ends."""

    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, False, False, {}


class Writer(Endless):
    """Its process writes to statistics when called, and dies in the middle of it when told to."""

    def __init__(self, stats, counter=None):
        self.stats, self.counter = stats, counter

    def hammer(self, n):
        for sample in samples(self.stats.slot, n):
            self.stats.update(sample)
        return os.getpid()

    def draw(self, n):
        return [self.counter.next_id() for _ in range(n)]

    def know(self):
        return pickle.dumps(self.stats.stats.moments)

    def step(self, action):
        if action == 1:
            table = self.stats.stats._table
            table.block.acquire()
            for cell in (table.whole, *table.slots):
                head, state, *_ = cell._buffers[cell.sequence[0] & 1 ^ 1]
                state[...] = head[0] = np.nan  # as far as it came
            os.kill(os.getpid(), signal.SIGKILL)
        result = super().step(action)
        self.stats.update(result[0])
        return result


def close_to(moments, array, rtol):
    array = np.asarray(array, np.float64)
    np.testing.assert_allclose(moments.mean, array.mean(0), rtol)
    np.testing.assert_allclose(moments.var, array.var(0), rtol)
    assert moments.count == len(array)


def same(a, b):
    return a.count == b.count and a.weight == b.weight and (a.mean == b.mean).all() and (a.m2 == b.m2).all()


@pytest.fixture
def keep():
    """Closes at the end what it was given."""
    kept = []

    def keep(stats):
        kept.append(stats)
        return stats

    yield keep
    for stats in kept:
        stats.close()


# ------------------------------------------------------------ the arithmetic


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


# ------------------------------------------------------------ slots, and the order of merging


def test_a_slot_knows_its_own_samples_others_only_once_merged(keep):
    stats = keep(SharedRunningStats(SHAPE, 2))
    a, b = stats.at(0), stats.at(1)
    data = samples(0, 6)
    for x in data[:2]:
        a.update(x)
    b.update(data[2:5])
    close_to(a.moments, data[:2], 1e-13)
    close_to(b.moments, data[2:5], 1e-13)
    assert stats.count == 0
    assert stats.merge() == 5
    assert same(a.moments, b.moments)
    b.update(data[5])
    close_to(b.moments, data, 1e-13)
    close_to(a.moments, data[:5], 1e-13)
    assert (stats.merge(), stats.merge(), stats.count) == (1, 0, 6)


def test_the_order_of_writing_does_not_matter_the_order_of_slots_does(keep):
    data = samples(0, 8)

    def merged(order):
        stats = keep(SharedRunningStats(SHAPE, 8, decay=0.99))
        for i in order:
            stats.at(i).update(data[i])
        stats.merge()
        return stats.moments

    assert same(merged(range(8)), merged([5, 0, 7, 1, 2, 6, 3, 4]))


async def normalized(num_workers, start=None, shared=None, steps=12):
    with SharedRunningStats(SHAPE, 5, shared=shared) as obs_stats, SharedRunningStats((), 5, shared=shared) as returns:

        def make(slot):
            return NormalizeReward(NormalizeObservation(Walker(), obs_stats.at(slot)), returns.at(slot))

        seen = []
        factories = [partial(make, slot) for slot in range(5)]
        async with aioenv.AsyncVectorEnv(factories, num_workers=num_workers, start=start) as envs:
            seen.append((await envs.reset(seed=3)).obs)
            await obs_stats.exchange(envs)
            for _ in range(steps):
                obs, reward, *_ = await envs.step(np.zeros(5, np.int64))
                seen += [obs, reward]
                await obs_stats.exchange(envs)
                await returns.exchange(envs, "reward")
        return b"".join(map(bytes, seen)), obs_stats.moments, returns.moments


def test_the_same_bits_for_any_number_of_workers():
    """In shared memory or not, too."""
    results = [aioenv.run(normalized(n, start)) for n, start in [(1, None), (2, "spawn"), (5, None)]]
    results.append(aioenv.run(normalized(3, shared=False)))
    for bits, observations, returns in results[1:]:
        assert bits == results[0][0]
        assert same(observations, results[0][1])
        assert same(returns, results[0][2])
    assert results[0][1].count == 5 * 13


# ------------------------------------------------------------ many processes


async def hammered(start, n, live):
    with SharedRunningStats(SHAPE, 4, live=live) as stats:
        factories = [partial(Writer, stats.at(slot)) for slot in range(4)]
        async with aioenv.AsyncVectorEnv(factories, num_workers=4, start=start) as envs:
            pids = await envs.call("hammer", n)
        assert len(set(pids)) == 4
        stats.merge()
        assert stats.reproducible is not live
        return stats.moments


def check_against_a_sequence(moments, n):
    data = np.concatenate([samples(writer, n) for writer in range(4)])
    close_to(moments, data, 1e-12)
    with SharedRunningStats(SHAPE, live=True) as sequence:
        for x in data:
            sequence.update(x)
        close_to(sequence.moments, data, 1e-12)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("start", START_METHODS)
def test_four_writers_are_as_one(start, live):
    check_against_a_sequence(aioenv.run(hammered(start, 2_000, live)), 2_000)


@pytest.mark.stress
@pytest.mark.parametrize("live", [True, False])
def test_four_writers_with_a_hundred_thousand_updates_each_are_as_one(live):
    check_against_a_sequence(aioenv.run(hammered(None, 100_000, live)), 100_000)


def test_a_reader_sees_samples_whole(keep):
    """Beside a writer all of whose samples have equal components, so that a torn copy would show."""
    stats = keep(SharedRunningStats((500,), live=True))
    done = threading.Event()

    def write():
        for i in range(3_000):
            stats.update(np.full(500, i % 7))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    counts = set()
    while not done.is_set():
        moments = stats.moments
        counts.add(moments.count)
        assert (moments.mean == moments.mean[0]).all()
        assert (moments.m2 == moments.m2[0]).all()
    thread.join()
    assert stats.count == 3_000
    assert len(counts) > 1


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("start", START_METHODS)
def test_ec_a_worker_killed_while_it_holds_the_lock_blocks_nobody(start, live):
    async def main():
        with SharedRunningStats(SHAPE, 2, live=live) as stats:
            factories = [partial(Writer, stats.at(slot)) for slot in range(2)]
            policy = aioenv.RestartPolicy()
            async with aioenv.AsyncVectorEnv(
                factories, num_workers=2, start=start, restart=policy, timeout_s=20
            ) as envs:
                await envs.reset(seed=0)
                first = (await envs.step([0, 0])).obs
                stats.merge()
                pid = envs.workers[0].pid
                second = (await envs.step([1, 0])).obs
                assert envs.workers[0].pid != pid
                stats.merge()
                third = (await envs.step([0, 0])).obs  # slot 0 is reset in it, and slot 1 counts
                fourth = (await envs.step([0, 0])).obs
                stats.merge()
                close_to(stats.moments, [*first, second[1], third[1], *fourth], 1e-12)

    aioenv.run(main())


def in_a_process(code):
    """What a script prints that may fork without harm to the tests."""
    env = {**os.environ, "PYTHONPATH": str(Path(aioenv.__file__).parents[1])}
    arguments = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=30, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_has_a_lock_of_its_own():
    code = """
import fcntl, os
from aioenv.stats import SharedRunningStats
stats = SharedRunningStats((), live=True)
block = stats._table.block
with block.locked():
    child = os.fork()
    if child == 0:
        try:
            fcntl.flock(block._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os._exit(7)  # as it should be: the parent holds it
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
child = os.fork()
if child == 0:
    stats.update(1.0)
    block.acquire()
    os.kill(os.getpid(), 9)
os.waitpid(child, 0)
stats.update(3.0)
print(stats.count, stats.mean)
"""
    assert in_a_process(code) == "2 2.0\n"


def test_who_dies_with_the_lock_does_not_leave_it_to_its_children():
    code = """
import os, signal
from aioenv.stats import SharedRunningStats
stats = SharedRunningStats((), live=True)
read, write = os.pipe()
holder = os.fork()
if holder == 0:
    stats._table.block.acquire()
    grandchild = os.fork()
    if grandchild == 0:
        os.write(write, b"x")
        signal.pause()
    os.write(write, str(grandchild).encode())
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(holder, 0)
text = b""
while len(text) < 2 or b"x" not in text:
    text += os.read(read, 99)
stats.update(3.0)
print(stats.count)
os.kill(int(text.replace(b"x", b"")), signal.SIGKILL)
"""
    assert in_a_process(code) == "1\n"


def test_a_parent_does_not_wait_for_ever_for_who_is_stopped():
    code = """
import os, signal
from aioenv.stats import SharedRunningStats, block
block.PATIENCE_S = 0.2
stats = SharedRunningStats((), 1)
stats.at(0).update(1.0)
child = os.fork()
if child == 0:
    stats._table.block.acquire()
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(child, os.WUNTRACED)
try:
    stats.merge()
except TimeoutError as exc:
    print(exc)
print(stats.count)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(stats.merge(), stats.count)
"""
    message = "another process has held the lock of shared statistics for 0.2 s: it hangs or is stopped"
    out = in_a_process(code)
    assert message in out
    assert out.endswith("\n0\n1 1\n")


def test_a_handle_in_the_same_process_is_the_same_memory(keep):
    stats = keep(SharedRunningStats(SHAPE, 2))
    other = pickle.loads(pickle.dumps(stats.at(1)))
    other.update([1, 2, 3])
    assert stats.merge() == 1
    assert (other.moments.mean == [1, 2, 3]).all()


def test_handles_of_what_is_gone_say_so(keep):
    stats = SharedRunningStats(SHAPE, 1)
    late = partial(Writer, stats.at(0))
    envs = aioenv.AsyncVectorEnv([late], num_workers=1)  # it is pickled here
    stats.close()
    stats.close()
    assert stats.count == 0  # what is known can be read
    for use in (stats.merge, stats.freeze, partial(stats.update, [1, 2, 3]), partial(stats.at(0).update, [1, 2, 3])):
        with pytest.raises(aioenv.ClosedError):
            use()
    with pytest.raises(aioenv.ClosedError, match="can't be sent to a worker"):
        pickle.dumps(stats)

    async def start():
        await envs

    with pytest.raises(aioenv.WorkerStartError, match="keep them there for as long as workers may start"):
        aioenv.run(start())


# ------------------------------------------------------------ the EC lines


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


# ------------------------------------------------------------ wrappers


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
