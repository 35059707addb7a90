"""Statistics that processes share: slots and the order of merging, locks, deaths."""

from __future__ import annotations

import pickle
import threading
from functools import partial

import numpy as np
import pytest

import aioenv
from aioenv.process.launch import START_METHODS
from aioenv.stats import (
    NormalizeObservation,
    NormalizeReward,
    SharedRunningStats,
)
from tests.kits.process_kit import environment, run_alone
from tests.kits.stats_kit import SHAPE, Walker, Writer, close_to, needs_sharing, same, samples

pytestmark = needs_sharing


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


@pytest.mark.parametrize("size", [1, 128, 129, 1025])  # each of them with a log of another length
def test_a_slot_may_see_any_number_of_samples_before_they_are_merged(keep, size):
    """As many as its log holds, more, and none; a merge before and after."""
    stats = keep(SharedRunningStats((size,), 3))
    rng = np.random.default_rng(size)
    seen = []
    for n in (1, 0, 2, 31, 32, 70):
        data = rng.normal(1000, 0.5, (3, n, size))
        for slot, samples_of_it in zip((2, 0, 1), data, strict=True):
            for x in samples_of_it:
                stats.at(slot).update(x)
            if seen or n:
                close_to(stats.at(slot).moments, [*seen, *samples_of_it], 1e-10)
        seen += [x for slot in (1, 2, 0) for x in data[slot]]
        assert stats.merge() == 3 * n
        close_to(stats.moments, seen, 1e-10)
    with pytest.raises(ValueError, match="finite"):
        stats.at(0).update(np.full(size, np.inf))
    stats.at(0).update(np.ones((40, size)))  # a batch, then single ones
    stats.at(0).update(np.ones(size))
    stats.at(1).update(np.ones(size))
    assert stats.merge() == 42
    close_to(stats.moments, [*seen, *np.ones((42, size))], 1e-10)


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


@pytest.mark.parametrize("live", [True, False])
def test_a_reader_sees_samples_whole(keep, live):
    """Beside a writer all of whose samples have equal components, so that a torn copy would show."""
    stats = keep(SharedRunningStats((500,), 1, live=live)).at(0)
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
    assert stats.moments.count == 3_000
    assert len(counts) > 1


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("start", START_METHODS)
def test_ec_a_worker_killed_while_it_holds_the_lock_blocks_no_other(start, live):
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
    """What a script prints that may fork without harm to the tests, and is warned of it for nothing."""
    return run_alone(code, env={**environment(), "PYTHONWARNINGS": "ignore"}).stdout


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


def test_a_child_that_is_forked_while_a_thread_adds_to_a_copy_can_do_so_too():
    code = """
import os, signal
from aioenv.stats import SharedRunningStats
stats = SharedRunningStats((), 1, shared=False)
stats._table.block.acquire()  # as a thread does that adds a sample just now
child = os.fork()
if child == 0:
    signal.alarm(20)
    stats.update(1.0)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stats._table.block.release()
stats.update(3.0)
print(stats.count)
"""
    assert in_a_process(code) == "1\n"


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


def test_a_parent_does_not_wait_for_ever_for_a_stopped_worker():
    code = """
import os, signal
from aioenv.stats import SharedRunningStats, sharing
sharing.LOCK_TIMEOUT_S = 0.2
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
