"""Rollouts whose groups are whole workers; and what one rollout tells the next of how it left the slots."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import sync
from tests.kits.compare import assert_same
from tests.kits.counter_kit import Counter, counters
from tests.kits.rollout_kit import EVERY_CASE, assert_equal, balance
from tests.kits.zoo import Sampler

pytestmark = pytest.mark.asyncio


def still(obs):
    return [0] * len(obs)


def asked(envs):
    """How many requests each worker has got."""
    return [member.worker.next_request[1] for member in envs._check_running().worker_pool.members]


# ------------------------------------------------------------ whole workers


async def test_the_same_trajectories_as_in_lock_step():
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for mode, num_workers in EVERY_CASE:
            options = {"num_workers": num_workers, "autoreset_mode": mode, "max_episode_steps": 23}
            async with aioenv.make_vec("CartPole-v1", 13, **options) as envs:
                await envs.reset(seed=5)
                expected = await envs.rollout(balance, 40, 1)
                assert (expected.terminated | expected.truncated).sum() >= 13
                for groups in (1, 2, 4):
                    await envs.reset(seed=5)
                    assert_equal(await envs.rollout(balance, 40, groups, split="workers"), expected)


async def test_a_group_is_of_whole_workers():
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for num_envs, num_workers, groups, made in [(7, 3, 8, 3), (6, 3, 2, 2), (4, 1, 2, 1), (9, 2, 1, 1)]:
            async with aioenv.AsyncVectorEnv(counters(num_envs), num_workers=num_workers) as envs:
                await envs.reset()
                seen: list[list[int]] = []

                def policy(obs, slots, seen=seen):
                    seen.append(slots.tolist())
                    return still(obs)

                await envs.rollout(policy, 2, groups, split="workers")
                assert len(seen) == 2 * made and seen[:made] == seen[made:]
                assert list(itertools.chain(*seen[:made])) == list(range(num_envs))
                for worker in envs.workers:
                    assert sum(set(worker.slots) <= set(slots) for slots in seen[:made]) == 1


async def test_errors_name_the_group_and_keep_the_rest():
    async with aioenv.AsyncVectorEnv(counters(6, length=50), num_workers=3) as envs:
        await envs.reset(seed=0)
        with pytest.raises(ValueError, match=r"split: expected one of .*'slots', 'workers'.*got 'envs'"):
            await envs.rollout(still, 1, split="envs")
        with pytest.raises(aioenv.ActionError, match=r"group 1 of 3 \(2 slots\), step 2"):
            await envs.rollout(lambda obs, slots: [0] * (2 + (2 in slots and obs[0, 1] == 2)), 5, 3, split="workers")
        await envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.rollout(
                lambda obs, slots: [Counter.RAISE if slot == 3 and obs[0, 1] == 2 else 0 for slot in slots],
                9,
                3,
                split="workers",
            )
        partial = caught.value.partial
        assert caught.value.slots == (3,) and partial.valid[2].tolist() == [True, True, True, False, True, True]


async def test_paused_slots_are_in_no_group():
    async with aioenv.AsyncVectorEnv(counters(6, length=50), num_workers=3) as envs:
        await envs.reset(seed=0)
        envs.pause([0, 1, 4])
        got = await envs.rollout(still, 3, 3, split="workers")
        assert got.valid.tolist() == [[False, False, True, True, False, True]] * 3
        assert got.last_obs[:, 1].tolist() == [0, 0, 3, 3, 0, 3]


async def test_blocking_code_may_say_so_too():
    seen = []

    def policy(obs, slots):
        seen.append(slots.tolist())
        return still(obs)

    def blocking():
        with sync.VectorEnv(counters(4), num_workers=2) as envs:
            envs.reset()
            envs.rollout(policy, 1, split="workers")

    await asyncio.to_thread(blocking)
    assert seen == [[0, 1], [2, 3]]


async def test_a_vector_env_in_this_process_has_no_workers():
    async with aioenv.make_vec("Hopper-v5", 4, backend="native") as envs:
        results = []
        for split in ("slots", "workers"):
            await envs.reset(seed=1)
            results.append(await envs.rollout(lambda obs: np.zeros((len(obs), 3)), 5, split=split))
        assert_equal(*results)


# ------------------------------------------------------------ one after another


async def test_the_next_rollout_sends_no_extra_request():
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for mode in AutoresetMode:
            options = {"num_workers": 2, "autoreset_mode": mode, "max_episode_steps": 11}
            async with aioenv.make_vec("CartPole-v1", 8, **options) as envs:
                await envs.reset(seed=3)
                whole = await envs.rollout(balance, 60)
                await envs.reset(seed=3)
                first = await envs.rollout(balance, 30, 2)
                before = asked(envs)
                second = await envs.rollout(balance, 30, 1)
                resets = 0
                if mode is AutoresetMode.DISABLED:  # requests of their own, to who has ended
                    ends = first.terminated[-1:] | first.truncated[-1:]
                    ends = np.concatenate([ends, (second.terminated | second.truncated)[:-1]])
                    resets = ends.reshape(-1, 2, 4).any(2).sum(0)
                assert (np.array(asked(envs)) - before == 30 + resets).all()
                for name in ("obs", "actions", "reward", "terminated", "truncated", "valid"):
                    joined = np.concatenate([getattr(first, name), getattr(second, name)])
                    assert joined.tobytes() == getattr(whole, name).tobytes(), name
                assert second.last_obs.tobytes() == whole.last_obs.tobytes()
                assert_same([*first.infos, *second.infos], list(whole.infos))


async def test_what_was_given_away_is_not_what_is_remembered():
    async with aioenv.AsyncVectorEnv(counters(4, length=50), num_workers=2) as envs:
        await envs.reset(seed=0)

        def policy(obs):
            obs[:] = -1  # its own
            return still(obs)

        first = await envs.rollout(policy, 3)
        first.obs[:] = first.last_obs[:] = -1
        first.terminated[:] = True
        before = asked(envs)
        second = await envs.rollout(policy, 2)
        assert asked(envs) == [count + 4 for count in before]  # two steps of two groups
        assert second.obs[:, :, 1].tolist() == [[3] * 4, [4] * 4] and second.valid.all()


async def test_whatever_is_asked_between_two_rollouts_is_seen():
    async with aioenv.AsyncVectorEnv(counters(4, length=50), num_workers=2) as envs:
        await envs.reset(seed=0)
        zero = still(range(4))

        async def some():
            envs.send(zero[:2], [1, 3])
            await envs.recv(min_slots=2)

        async def dropped():
            step = asyncio.ensure_future(envs.step(zero))
            await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])

        async def paused():
            envs.pause([0])
            await envs.step(zero)
            envs.resume([0])

        for between, expected in [
            (lambda: envs.step(zero), [4, 4, 4, 4]),
            (lambda: envs.reset(seed=1), [0, 0, 0, 0]),
            (lambda: envs.reset(options={"reset_mask": np.arange(4) == 2}), [3, 3, 0, 3]),
            (some, [3, 4, 3, 4]),
            (dropped, [4, 4, 4, 4]),
            (paused, [3, 4, 4, 4]),
        ]:
            await envs.reset(seed=0)
            await envs.rollout(still, 3)
            await between()
            assert (await envs.rollout(still, 1)).obs[0, :, 1].tolist() == expected


async def test_what_others_ask_amid_the_last_step_is_seen(gate):
    path, open_gate = gate
    async with aioenv.AsyncVectorEnv(counters(4, length=50, gate=path), num_workers=2) as envs:
        await envs.reset(seed=0)
        meddling: list[asyncio.Task[None]] = []

        async def meddle():
            while True:  # until the first group's last result was taken
                try:
                    await envs.step_at(0, 0)
                except aioenv.PendingCallError:
                    await asyncio.sleep(0)
                else:
                    return open_gate()

        def policy(obs, slots):
            last = slots[0] == 2 and obs[0, 1] == 2
            if last:
                meddling.append(asyncio.create_task(meddle()))
            return [Counter.WAIT if last else 0, 0]

        async with asyncio.timeout(20):
            await envs.rollout(policy, 3, split="workers")
            await meddling[0]
        assert (await envs.rollout(still, 1)).obs[0, :, 1].tolist() == [4, 3, 3, 3]


async def test_an_error_before_the_first_step_tells_no_nonsense(monkeypatch):
    async with aioenv.AsyncVectorEnv(counters(4, length=50), num_workers=2) as envs:
        await envs.reset(seed=0)
        envs.pause([1])
        os.kill(envs.workers[1].pid, signal.SIGKILL)
        monkeypatch.setattr(np, "empty", lambda shape, dtype=float: np.full(shape, 7, dtype))
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.rollout(still, 3)
        assert caught.value.partial.last_obs.tolist() == [[0, 0]] * 4


async def test_who_was_paused_rests_with_its_last_observation():
    async with aioenv.AsyncVectorEnv(counters(4, length=50), num_workers=2) as envs:
        await envs.reset(seed=0)
        await envs.rollout(still, 3)
        envs.pause([1, 2])
        got = await envs.rollout(still, 2)
        assert got.obs[:, :, 1].tolist() == [[3, 3, 3, 3], [4, 3, 3, 4]]
        assert got.last_obs[:, 1].tolist() == [5, 3, 3, 5]
        envs.resume()
        again = await envs.rollout(still, 1)
        assert again.obs[0, :, 1].tolist() == [5, 3, 3, 5] and again.valid.all()


async def test_a_worker_that_died_between_two_rollouts():
    async with aioenv.AsyncVectorEnv(counters(4, length=50), num_workers=2) as envs:
        await envs.reset(seed=0)
        await envs.rollout(still, 3)
        os.kill(envs.workers[1].pid, signal.SIGKILL)
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.rollout(still, 3)
        assert set(caught.value.slots) == {2, 3}


async def test_leaves_that_are_objects_are_looked_at_again():
    async with aioenv.AsyncVectorEnv([lambda: Sampler("graph", "nested")] * 4, num_workers=2) as envs:
        envs.action_space.seed(0)
        actions = envs.action_space.sample()
        await envs.reset(seed=0)
        first = await envs.rollout(lambda obs: actions, 2, 1)
        last = [graph.nodes.copy() for graph in first.last_obs]
        for graph in first.last_obs:
            graph.nodes[:] = 7
        second = await envs.rollout(lambda obs: actions, 1, 1)
        assert all(np.array_equal(mine.nodes, its) for mine, its in zip(second.obs[0], last, strict=True))
