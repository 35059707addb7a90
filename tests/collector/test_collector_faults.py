"""Collectors that die, envs and policies that raise, cancellations and closes: nothing is lost unsaid, and left."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from tests.collector.collector_kit import Linear, assert_equal, joined, rounds, weights
from tests.kits.process_kit import environment, kill_all, processes_with


class Faulty(gym.Env):
    """Shows the seed of its episode; an action does what its number says."""

    observation_space = spaces.Box(-1, 1e6, (2,), np.float64)
    action_space = spaces.Discrete(10)
    OK, RAISE, EXIT, HANG = range(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.t = -1 if seed is None else seed, 0
        return np.array([self.seed, 0.0]), {}

    def step(self, action):
        self.t += 1
        if action == self.RAISE:
            raise ValueError(f"no step {self.t}")
        if action == self.EXIT:
            os._exit(3)
        while action == self.HANG:
            time.sleep(600)
        return np.array([self.seed, self.t]), 1.0, self.t == 7, False, {}


class Does:
    """Does something at one step of one slot, in the rollouts that are made with these weights."""

    def __init__(self):
        self.step, self.what, self.at_step, self.at_slot = 0, Faulty.OK, 0, 0

    def update(self, weights):
        self.what, self.at_step, self.at_slot = weights
        self.step = 0

    def __call__(self, obs, slots):
        self.step += 1
        if self.what == "raise" and self.step == self.at_step and self.at_slot in slots:
            raise RuntimeError("no idea")
        actions = np.zeros(len(obs), np.int64)
        if self.step == self.at_step and self.what != "raise":
            actions[slots == self.at_slot] = self.what
        return actions


DEFAULTS = {"mode": "sync", "groups": 1}


def collector_of(*, num_envs=4, num_collectors=2, steps=5, **how):
    return aioenv.RolloutCollector(
        Faulty,
        num_envs,
        policy=Does,
        steps=steps,
        num_collectors=num_collectors,
        **{**DEFAULTS, **how},
    )


# ------------------------------------------------------------ errors


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.asyncio
async def test_an_env_that_raises_ends_the_iteration(num_workers):
    async with collector_of(num_workers=num_workers) as collector:
        await collector.update((Faulty.RAISE, 3, 3))
        found = []
        with pytest.raises(aioenv.EnvError, match=r"slot 3 \(collector 1, pid \d+\): ValueError: no step 3") as caught:
            while True:
                found.append(await anext(collector))
        error = caught.value
        assert error.slots == (3,) and isinstance(error.__cause__, ValueError) and "raise ValueError" in error.traceback
        assert error.pid == collector.pids[1]
        # the slot is reset, and the round goes on; the other collector has nothing to do with it
        while len(found) < 2:
            found.append(await anext(collector))
        (again,) = (rollout for rollout in found if rollout.collector == 1)
        assert {rollout.collector for rollout in found} == {0, 1} and not again.restarted
        assert again.obs[0, 1, 1] == 0, "slot 3 has begun an episode"
        assert again.obs[0, 0, 1] > 0, "slot 2 has not"
        await collector.update()
        assert len((await rounds(collector, 1))[0]) == 2


@pytest.mark.asyncio
async def test_several_envs_that_raise():
    async with collector_of(num_collectors=1) as collector:
        await collector.update((Faulty.RAISE, 1, 0))
        with pytest.raises(aioenv.EnvError):
            await anext(collector)
        assert (await anext(collector)).collector == 0


@pytest.mark.asyncio
async def test_a_policy_that_raises_ends_the_iteration():
    async with collector_of() as collector:
        await collector.update(("raise", 2, 2))
        with pytest.raises(
            aioenv.PolicyError, match=r"the policy of slots 2 to 3 \(collector 1, pid \d+\): Runtime"
        ) as got:
            async for _ in collector:
                pass
        assert got.value.slots == (2, 3) and isinstance(got.value.__cause__, RuntimeError)
        assert any("in the policy of a rollout" in note for note in got.value.__cause__.__notes__)
        while (await anext(collector)).collector != 1:
            pass


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.asyncio
async def test_weights_that_the_policy_does_not_take(prefetch):
    async with aioenv.RolloutCollector(
        "CartPole-v1", 2, policy=lambda: lambda obs: np.zeros(len(obs), int), num_collectors=1, prefetch=prefetch
    ) as collector:
        await collector.update({"w": 1})
        for _ in range(5):  # no rollout says that it was made with weights that were refused
            with pytest.raises(aioenv.PolicyError, match="expected a policy with update"):
                await anext(collector)
        with pytest.raises(TypeError, match="cannot pickle"):
            await collector.update({"w": threading.Lock()})


class Choosy(Linear):
    def update(self, weights):
        if weights == "bad":
            raise ValueError("bad weights")


@pytest.mark.asyncio
async def test_weights_that_the_policy_refuses_at_first():
    async with aioenv.RolloutCollector("CartPole-v1", 2, policy=Choosy, steps=3, num_collectors=1, seed=0) as collector:
        await collector.update("bad")
        with pytest.raises(aioenv.PolicyError, match="ValueError: bad weights"):
            await anext(collector)
        await collector.update("good")
        first = await anext(collector)
        assert first.weights_version == 2
        await collector.update("bad")
        with pytest.raises(aioenv.PolicyError):  # the rollout that was begun before comes first
            while True:
                first = await anext(collector)
        await collector.update("good")
        assert (await anext(collector)).weights_version == 4


class Scale:
    """Raises with weights that are NaN."""

    def __init__(self):
        self.scale = 1.0

    def update(self, weights):
        self.scale = weights

    def __call__(self, obs):
        if np.isnan(self.scale):
            raise FloatingPointError("weights are NaN")
        return np.zeros(len(obs), np.int64)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.asyncio
async def test_weights_with_which_the_policy_raises_can_be_replaced(mode):
    async with aioenv.RolloutCollector(
        "CartPole-v1", 2, policy=Scale, steps=4, num_collectors=2, mode=mode
    ) as collector:
        await collector.update(float("nan"))
        with pytest.raises(aioenv.PolicyError, match="weights are NaN"):
            await anext(collector)
        await collector.update(1.0)
        found, errors = [], 1
        while len(found) < 2:
            try:
                found.append(await anext(collector))
            except aioenv.PolicyError:  # of the other collector, which had the first weights too
                errors += 1
                assert errors == 2
        assert [rollout.weights_version for rollout in found] == [2, 2]
        if mode == "sync":
            assert {rollout.collector for rollout in found} == {0, 1}
            assert not any(one.worker.busy for one in collector._pool._collectors), "the next round needs an update"
            await collector.update(2.0)
            assert [(await anext(collector)).weights_version for _ in range(2)] == [3, 3]


@pytest.mark.asyncio
async def test_an_update_after_an_error_keeps_the_rollouts_of_the_others():
    """Only one collector raises: the round still has one rollout of each."""
    async with collector_of() as collector:
        await collector.update(("raise", 2, 2))
        found = []
        with pytest.raises(aioenv.PolicyError):
            while True:
                found.append(await anext(collector))
        await collector.update((Faulty.OK, 0, 0))
        while len(found) < 2:
            found.append(await anext(collector))
        assert {rollout.collector: rollout.weights_version for rollout in found} == {0: 1, 1: 2}
        await collector.update()
        assert {(await anext(collector)).weights_version for _ in range(2)} == {3}


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (lambda: 3, "expected a factory of functions of observations, got one that returned 3"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
@pytest.mark.asyncio
async def test_a_policy_that_can_not_be_made(policy, text):
    with pytest.raises(aioenv.WorkerStartError, match=text):
        async with aioenv.RolloutCollector("CartPole-v1", 2, policy=policy, num_collectors=2):
            pass


class NoEnv(gym.Env):
    def __init__(self, slot):
        if slot == 3:
            raise KeyError("three")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.asyncio
async def test_an_env_that_can_not_be_made_is_named(num_workers):
    creator = aioenv.EnvCreator(lambda slot: NoEnv(slot) if slot == 3 else Faulty(), slot=0)
    creator = PerSlot(creator)
    with pytest.raises(
        aioenv.WorkerStartError, match="collector 1 could not start for slot 3: KeyError: 'three'"
    ) as got:
        async with aioenv.RolloutCollector(creator, 4, policy=Does, num_collectors=2, num_workers=num_workers):
            pass
    assert got.value.slots == (3,) and isinstance(got.value.__cause__, KeyError)


class PerSlot(aioenv.EnvCreator):
    """Tells each env its slot."""

    def at(self, slot):
        return self.make_variant(slot=slot)


# ------------------------------------------------------------ deaths


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("at_step", [1, 5])
@pytest.mark.asyncio
async def test_a_collector_that_dies_is_replaced(num_workers, at_step, caplog):
    plan = [*range(50, 90)]
    async with collector_of(
        num_workers=num_workers, seed_plan=plan, steps=5, restart=aioenv.RestartPolicy()
    ) as collector:
        first = await rounds(collector, 2, update=False)
        pids = collector.pids
        os.kill(pids[1], signal.SIGKILL)
        await collector.update()
        (found,) = await rounds(collector, 1)
        stats = collector.stats()
        assert collector.pids[0] == pids[0] and collector.pids[1] != pids[1]
        later = await rounds_after(collector, 2)
    by_index = {rollout.collector: rollout for rollout in found}
    assert (by_index[0].restarted, by_index[1].restarted) == (False, True)
    assert stats.restarts == 1 and stats.lost in (0, 1)
    # after 10 steps of episodes of 8 rows the slots are in their second episode; the new process begins the third one
    assert by_index[0].obs[0, :, 0].tolist() == [54, 55]
    assert by_index[1].obs[0].tolist() == [[50 + 2 + 8, 0], [50 + 3 + 8, 0]]
    assert not any(rollout.restarted for one in later for rollout in one)
    assert any("its rollout is collected again, from new episodes" in r.getMessage() for r in caplog.records)
    assert len(first) == 2


async def rounds_after(collector, count):
    """Some more rounds, after one that is over."""
    await collector.update()
    return await rounds(collector, count, update=False)


@pytest.mark.parametrize("what", [Faulty.EXIT])
@pytest.mark.asyncio
async def test_an_env_that_ends_its_process_in_every_try(what):
    async with collector_of(restart=aioenv.RestartPolicy(2, backoff_s=0.01)) as collector:
        await collector.update((what, 2, 3))
        got = []
        with pytest.raises(aioenv.WorkerDied, match=r"collector 1 .*exited with code 3") as caught:
            got.extend([rollout.collector async for rollout in collector])
        assert caught.value.slots == (2, 3) and "2 restarts" in caught.value.__notes__[0]
        assert collector.stats().restarts == 2 and collector.stats().lost == 3
        assert got in ([], [0])
        with pytest.raises(aioenv.WorkerDied):
            while True:
                await anext(collector)


@pytest.mark.asyncio
async def test_without_restarts_a_death_is_an_error():
    async with collector_of(restart=None) as collector:
        os.kill(collector.pids[0], signal.SIGKILL)
        with pytest.raises(aioenv.WorkerDied, match=r"collector 0 .* was killed by SIGKILL"):
            async for _ in collector:
                pass


@pytest.mark.asyncio
async def test_the_first_round_is_the_same_after_a_death():
    """Nothing was handed out: the new process begins as the first one did."""
    found = []
    for kill in (False, True):
        async with aioenv.RolloutCollector(
            "CartPole-v1", 4, policy=Linear, steps=50, num_collectors=2, mode="sync", seed=5
        ) as collector:
            await collector.update(weights(1))
            waiting = asyncio.ensure_future(rounds(collector, 1))
            await asyncio.sleep(0)
            if kill:
                os.kill(collector.pids[1], signal.SIGKILL)
            found.append(joined((await waiting)[0]))
    assert_equal(*found)


@pytest.mark.asyncio
async def test_a_new_process_gets_the_newest_weights():
    async with aioenv.RolloutCollector(
        "CartPole-v1", 2, policy=Linear, steps=6, num_collectors=1, restart=aioenv.RestartPolicy(100, backoff_s=0.0)
    ) as collector:
        for version in range(1, 6):
            await collector.update(weights(version))
            if version % 2:
                await anext(collector)
                os.kill(collector.pids[0], signal.SIGKILL)
            rollout = await anext(collector)
        await collector.update()  # the last ones, under another number
        os.kill(collector.pids[0], signal.SIGKILL)
        last = [await anext(collector) for _ in range(3)][-1]
    assert rollout.weights_version >= 4 and last.weights_version == 6
    assert np.array_equal(last.extras["score"], (last.obs * weights(5)["w"]).sum(-1))


@pytest.mark.asyncio
async def test_a_rollout_that_takes_too_long():
    async with collector_of(timeout_s=1.0, restart=aioenv.RestartPolicy(1)) as collector:
        await collector.update((Faulty.HANG, 2, 0))
        with pytest.raises(aioenv.WorkerDied, match=r"collector 0 .* a rollout took longer than timeout_s=1"):
            async for _ in collector:
                pass
        assert collector.stats().restarts == 1


@pytest.mark.asyncio
async def test_a_worker_of_a_collector_that_dies():
    """With a policy of restarts the collector goes on; its slots come back truncated."""
    async with collector_of(num_workers=2, num_envs=4, num_collectors=1, steps=4, mode="async") as collector:
        await anext(collector)
        (worker,) = [pid for pid in children_of(collector.pids[0], deep=True) if is_worker_of(pid, collector)][:1]
        os.kill(worker, signal.SIGKILL)
        found = [await anext(collector) for _ in range(3)]
        assert any(rollout.truncated.any() for rollout in found)
        assert collector.stats().restarts == 0


def children_of(pid, *, deep=False):
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found + [other for child in found for other in children_of(child, deep=True)] if deep else found


def is_worker_of(pid, collector):
    """Whether it is no fork server: those have children of their own."""
    return not children_of(pid) and pid not in collector.pids


# ------------------------------------------------------------ cancellation and close


@pytest.mark.asyncio
async def test_a_cancelled_iteration_loses_nothing():
    async with aioenv.RolloutCollector(
        "CartPole-v1", 4, policy=Linear, steps=30, num_collectors=2, mode="sync", seed=5
    ) as collector:
        expected = [joined(one) for one in await rounds(collector, 4)]
    async with aioenv.RolloutCollector(
        "CartPole-v1", 4, policy=Linear, steps=30, num_collectors=2, mode="sync", seed=5
    ) as collector:
        for number, theirs in enumerate(expected):
            if number:
                await collector.update(weights(number))
            mine = []
            turns = 0
            while len(mine) < 2:
                taking = asyncio.ensure_future(anext(collector))
                for _ in range(turns % 7):
                    await asyncio.sleep(0)
                turns += 1
                taking.cancel()
                await asyncio.wait([taking])
                if not taking.cancelled():
                    mine.append(taking.result())
                else:
                    await asyncio.sleep(0.001)
            assert_equal(joined(mine), theirs)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 10, 50, 200, 1000])
@pytest.mark.asyncio
async def test_a_start_that_is_cancelled_leaves_nothing(turns):
    async def use():
        async with collector_of(mode="async") as collector:
            async for _ in collector:
                pass

    running = asyncio.ensure_future(use())
    for _ in range(turns):
        await asyncio.sleep(0)
    if turns >= 50:
        await asyncio.sleep(turns / 1000)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.asyncio
async def test_close_ends_an_iteration():
    collector = await collector_of(num_collectors=1)
    await anext(collector)
    waiting = [asyncio.ensure_future(anext(collector)) for _ in range(2)]  # for an update that does not come
    await asyncio.sleep(0)
    await collector.close()
    for one in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(one, StopAsyncIteration | RuntimeError)
    await collector.close()


@pytest.mark.asyncio
async def test_a_grace_period_that_is_no_number_closes_nothing():
    collector = await collector_of(num_collectors=1)
    with pytest.raises(ValueError, match="grace_s: expected a number of seconds, got '1'"):
        await collector.close(grace_s="1")
    await anext(collector)
    await collector.close()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.asyncio
async def test_close_does_not_wait_for_a_rollout(num_workers, caplog):
    collector = await collector_of(steps=10**7, num_workers=num_workers)
    waiting = asyncio.ensure_future(anext(collector))
    await asyncio.sleep(0.2)
    started = time.perf_counter()
    await collector.close()
    assert time.perf_counter() - started < 2.0
    assert not [record.getMessage() for record in caplog.records], "nothing is wrong"
    with pytest.raises(StopAsyncIteration):
        await waiting


@pytest.mark.asyncio
async def test_a_close_that_is_cancelled_leaves_nothing():
    collector = await collector_of(num_workers=1, steps=10**7)
    waiting = asyncio.ensure_future(anext(collector))
    await asyncio.sleep(0.1)
    closing = asyncio.ensure_future(collector.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(StopAsyncIteration):
        await waiting


@pytest.mark.asyncio
async def test_a_collector_that_is_dropped():
    collector = await collector_of()
    await anext(collector)
    workers = collector._pool.workers
    with pytest.warns(ResourceWarning, match="unclosed <RolloutCollector"):
        del collector
        gc.collect()
    async with asyncio.timeout(30):
        while any(worker.state.value != "dead" for worker in workers):
            await asyncio.sleep(0)


PARENT = """
import asyncio, sys
import numpy as np
import aioenv

async def main():
    async with aioenv.RolloutCollector(
        "CartPole-v1", 4, policy=lambda: lambda obs: np.zeros(len(obs), np.int64), steps=64, num_collectors=2,
        num_workers=int(sys.argv[1]), start=sys.argv[2],
    ) as collector:
        async for _ in collector:
            print("x", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_is_left_of_a_parent_that_is_killed(sent, start, num_workers):
    mark = f"AIOENV_TEST={uuid.uuid4()}"
    env = {**environment(), **dict([mark.split("=")])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(num_workers), start], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout.read(2) == b"x\n"
            assert len(processes_with(mark)) >= 4
            parent.send_signal(sent)
            parent.wait(10)
            deadline = time.monotonic() + 2.0
            while (left := processes_with(mark)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not left
        finally:
            kill_all(mark)


@pytest.mark.stress
@pytest.mark.parametrize("run", range(20))
@pytest.mark.asyncio
async def test_kills_at_any_moment(run, caplog):
    """Every rollout is whole: each episode begins with the seed that comes next for its slot, or one begun again."""
    rng = np.random.default_rng(run)
    caplog.set_level(logging.ERROR, "aioenv")
    policy = aioenv.RestartPolicy(1000, backoff_s=0.0)
    async with collector_of(
        mode="async", seed_plan=[*range(1000)], restart=policy, prefetch=run % 2, num_workers=run % 3
    ) as collector:
        seen: dict[int, int] = {}
        for _ in range(60):
            if rng.random() < 0.3:
                pid = collector.pids[rng.integers(2)]
                asyncio.get_running_loop().call_later(rng.random() * 0.02, kill, pid)
            rollout = await anext(collector)
            for column, slot in enumerate(rollout.slots.tolist()):
                rows = np.vstack([rollout.obs[:, column], rollout.last_obs[column]])
                begun = [divmod(int(seed) - slot, 4) for seed in rows[rows[:, 1] == 0, 0]]
                if begun and begun[0] == (seen.get(slot), 0) and rows[0, 1] == 0 and not rollout.restarted:
                    del begun[0]  # the last rollout has shown it as its last observation
                for episode, remainder in begun:
                    assert remainder == 0 and episode == seen.get(slot, -1) + 1
                    seen[slot] = episode
                assert rows[0, 1] == 0 or not rollout.restarted
        assert collector.stats().rollouts == 60


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
