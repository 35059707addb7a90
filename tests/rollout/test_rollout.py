"""Rollouts: the trajectories of a plain loop, whatever the groups; overlap; faults, cancellation, what comes after."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import aioenv
from tests.kits.compare import assert_same
from tests.kits.counter_kit import Counter, counters
from tests.kits.rollout_kit import EVERY_CASE, FIELDS, after_cancellations, assert_equal, balance, plain
from tests.kits.zoo import Sampler

pytestmark = pytest.mark.asyncio


def push(obs: Any) -> Any:
    """For InvertedPendulum: falls over after a while."""
    return (obs[:, 1:2] * 2 + 0.25).astype(np.float32)


async def compare_with_a_plain_loop(env, policy, cases, **options):
    async with aioenv.make_vec(env):  # keeps the fork server
        for mode, num_workers in cases:
            async with aioenv.make_vec(env, 13, num_workers=num_workers, autoreset_mode=mode, **options) as envs:
                obs, _ = await envs.reset(seed=5)
                expected = await plain(envs, policy, 40, obs)
                assert (expected["terminated"] | expected["truncated"]).sum() >= 13
                for groups in (1, 2, 4):
                    await envs.reset(seed=5)
                    assert_equal(await envs.rollout(policy, 40, groups), expected)


async def test_the_same_trajectories_as_a_plain_loop():
    await compare_with_a_plain_loop("CartPole-v1", balance, EVERY_CASE, max_episode_steps=23)


@pytest.mark.parametrize("cases", [EVERY_CASE[::4], pytest.param(EVERY_CASE, marks=pytest.mark.stress)])
async def test_the_same_trajectories_in_mujoco(cases):
    await compare_with_a_plain_loop("InvertedPendulum-v5", push, cases)


async def test_a_second_rollout_goes_on_where_the_first_stopped():
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for mode in AutoresetMode:
            async with aioenv.make_vec(
                "CartPole-v1", 8, num_workers=2, autoreset_mode=mode, max_episode_steps=11
            ) as envs:
                await envs.reset(seed=3)
                whole = await envs.rollout(balance, 60)
                # in the very step after an episode's end, and otherwise
                ends = np.flatnonzero((whole.terminated | whole.truncated)[:58].any(1))
                cuts = [int(ends[0]) + 1, int(ends[-1]) + 1, 59]
                for cut in cuts:
                    await envs.reset(seed=3)
                    first = await envs.rollout(balance, cut, 2)
                    second = await envs.rollout(balance, 60 - cut, 3)
                    for name in FIELDS[:-1]:
                        joined = np.concatenate([getattr(first, name), getattr(second, name)])
                        assert joined.tobytes() == getattr(whole, name).tobytes(), name
                    assert second.last_obs.tobytes() == whole.last_obs.tobytes()
                # and a plain step goes on, too
                await envs.reset(seed=3)
                first = await envs.rollout(balance, cuts[0] - 1)
                stepped = await envs.step(balance(first.last_obs))
                assert stepped.terminated.tolist() == whole.terminated[cuts[0] - 1].tolist()
                if mode is not AutoresetMode.DISABLED:
                    rest = await envs.rollout(balance, 60 - cuts[0])
                    assert rest.valid.tolist() == whole.valid[cuts[0] :].tolist()
                    assert rest.obs.tobytes() == whole.obs[cuts[0] :].tobytes()


async def test_every_sort_of_space():
    """Trees of arrays, and leaves that are objects, as observations and as actions."""
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for space in ("nested", "image", "graph"):
            await every_leaf(space)


async def every_leaf(space):
    async with aioenv.AsyncVectorEnv([lambda: Sampler(space, "nested")] * 5, num_workers=2) as envs:
        envs.action_space.seed(0)
        chosen = [envs.single_action_space.sample() for _ in range(5)]
        everyone = gym.vector.utils.concatenate(
            envs.single_action_space, chosen, gym.vector.utils.create_empty_array(envs.single_action_space, 5)
        )

        def policy(obs, slots):
            seen.append((slots.tolist(), obs))
            return gym.vector.utils.concatenate(
                envs.single_action_space,
                [chosen[slot] for slot in slots],
                gym.vector.utils.create_empty_array(envs.single_action_space, len(slots)),
            )

        await envs.reset(seed=1)
        expected = [await envs.step(everyone) for _ in range(12)]
        await envs.reset(seed=1)
        seen: list[Any] = []
        rollout = await envs.rollout(policy, 12)
        assert [slots for slots, _ in seen[:2]] == [[0, 1, 3], [2, 4]]
        assert_same(list(rollout.infos), [result.info for result in expected])
        assert rollout.reward.tolist() == [result.reward.tolist() for result in expected]
        assert_same(rollout.last_obs, expected[-1].obs)
        if space == "nested":
            for t, result in enumerate(expected[:-1]):
                assert rollout.obs["a"][0][t + 1].tolist() == list(result.obs["a"][0])  # texts
                assert_same(rollout.obs["a"][1]["b"][t + 1], result.obs["a"][1]["b"])
            assert rollout.actions["a"][0].shape == (12, 5) and rollout.actions["a"][0][3, 2] == chosen[2]["a"][0]
            assert rollout.actions["d"][:, 4].tolist() == [chosen[4]["d"]] * 12
            assert_same([obs["d"] for slots, obs in seen if slots == [2, 4]], list(rollout.obs["d"][:, [2, 4]]))
        elif space == "image":
            assert_same(rollout.obs[1:], np.stack([result.obs for result in expected[:-1]]))


# ---------------------------------------------------------------- policies


async def test_what_a_policy_is_given_and_may_give():
    async with aioenv.AsyncVectorEnv(counters(7, length=100), num_workers=2, copy=False) as envs:
        await envs.reset(seed=0)
        memory = np.zeros(7)
        kept = []

        async def recurrent(obs, *, slots):
            await asyncio.sleep(0)
            assert obs.shape == (len(slots), 2)
            memory[slots] += obs[:, 1]
            kept.append((slots.copy(), obs, obs.copy()))
            remembered, values = memory[slots], obs * 2
            slots[:] = -1  # they are its own
            return [0] * len(slots), {"value": values, "memory": remembered, "step": np.float32(obs[:, 1])}

        rollout = await envs.rollout(recurrent, 6)
        assert rollout.actions.tolist() == [[0] * 7] * 6 and rollout.actions.dtype == np.int64
        assert rollout.obs[..., 1].tolist() == [[t] * 7 for t in range(6)]
        assert sorted(rollout.extras) == ["memory", "step", "value"]
        assert np.array_equal(rollout.extras["value"], rollout.obs * 2)
        assert rollout.extras["memory"].tolist() == [[t * (t + 1) / 2] * 7 for t in range(6)]
        assert rollout.extras["step"].dtype == np.float32 and rollout.extras["step"].shape == (6, 7)
        assert [slots.tolist() for slots, *_ in kept[:3]] == [[0, 1, 4, 5], [2, 3, 6], [0, 1, 4, 5]]
        assert all(np.array_equal(obs, copy) for _, obs, copy in kept), "observations are the policy's own"

        def normalises_in_place(obs):
            obs -= 1000
            return np.zeros(len(obs), int)

        rollout = await envs.rollout(normalises_in_place, 4)
        assert rollout.obs[..., 1].tolist() == [[t] * 7 for t in range(6, 10)] and rollout.extras == {}
        assert (await envs.rollout(type("Policy", (), {"__call__": lambda _, obs: [0] * len(obs)})(), 1)).valid.all()


async def test_what_a_policy_gives_later_may_be_of_another_dtype():
    async with aioenv.AsyncVectorEnv(counters(4, length=100), num_workers=2) as envs:
        await envs.reset(seed=0)

        def policy(obs):
            t = int(obs[0, 1])
            given = [[0, "a", False, np.float32(1)], [0.7, "longer", 3, 2.0], [1, "b", True, np.float32(1)]][t]
            return [0] * len(obs), {name: [value] * len(obs) for name, value in zip("vtfw", given, strict=True)}

        extras = (await envs.rollout(policy, 3)).extras
        assert extras["v"].tolist() == [[0.0] * 4, [0.7] * 4, [1.0] * 4]
        assert extras["t"].tolist() == [["a"] * 4, ["longer"] * 4, ["b"] * 4]
        assert extras["f"].tolist() == [[0] * 4, [3] * 4, [1] * 4]
        assert extras["w"].dtype == np.float64


async def test_an_action_may_be_a_pair_itself():
    class Pairs(Counter):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Tuple((spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(3))))

        def step(self, action):
            assert action[1]["a"] == 2
            return super().step(0)

    async with aioenv.AsyncVectorEnv([Pairs] * 4, num_workers=1) as envs:
        await envs.reset(seed=0)
        rollout = await envs.rollout(lambda obs: (np.ones(len(obs), int), {"a": np.full(len(obs), 2)}), 3)
        assert rollout.actions[0].tolist() == [[1] * 4] * 3 and rollout.actions[1]["a"].tolist() == [[2] * 4] * 3
        assert rollout.extras == {}


async def test_what_is_refused():
    async with aioenv.AsyncVectorEnv(counters(4), num_workers=2) as envs:
        with pytest.raises(aioenv.ResetNeededError, match=r"slots \[0, 1, 2, 3\] have no observation"):
            await envs.rollout(lambda obs: [0] * len(obs), 1)
        await envs.reset(options={"reset_mask": np.array([True, True, False, True])})
        with pytest.raises(aioenv.ResetNeededError, match=r"slots \[2\]"):
            await envs.rollout(lambda obs: [0] * len(obs), 1)
        await envs.reset(seed=0)
        for steps, groups, message in [(0, 2, "steps.*got 0"), (1, 0, "groups.*got 0"), (2.0, 1, "steps.*2.0")]:
            with pytest.raises(ValueError, match=message):
                await envs.rollout(lambda obs: [0] * len(obs), steps, groups)
        with pytest.raises(TypeError, match="policy"):
            await envs.rollout(None, 1)
        with pytest.raises(aioenv.ActionError, match=r"group 0 of 2 \(2 slots\), step 0: .*expected shape \(2,\)"):
            await envs.rollout(lambda obs: [0] * 4, 1)

        def wrong_later(obs, slots):
            return [0] * (3 if obs[0, 1] == 2 and slots[0] == 1 else 2)

        with pytest.raises(aioenv.ActionError, match=r"group 1 of 2 \(2 slots\), step 2"):
            await envs.rollout(wrong_later, 5)
        for extras, message in [({"v": 1.0}, r"extras\['v'\].*got \(\)"), ({"v": [1.0]}, r"got \(1,\)")]:
            with pytest.raises(ValueError, match=message) as caught:
                await envs.rollout(lambda obs, extras=extras: ([0, 0], extras), 1)
            assert "group 0 of 2 (2 slots), step 0" in caught.value.__notes__[0]
        hint = r"a policy gives actions, or \(actions, \{.*\}\)"
        beside = [lambda obs: (np.zeros(2, int), obs), lambda obs: (np.zeros(2, int), obs[:, 0], obs[:, 1])]
        for policy, asks in itertools.product(beside, ("rollout", "evaluate")):
            run = envs.rollout(policy, 1) if asks == "rollout" else aioenv.evaluate(envs, policy, 1)
            with pytest.raises(aioenv.ActionError, match=hint):
                await run
        await envs.reset(seed=0)
        turns = itertools.count()
        with pytest.raises(ValueError, match=r"expected \['v'\] as before, got \['w'\]"):
            await envs.rollout(lambda obs: ([0, 0], {"vvvw"[next(turns)]: obs}), 4)
        async for _ in envs.ready():
            pass
        envs.send([0, 0], [0, 1])
        with pytest.raises(aioenv.PendingCallError, match=r"rollout: slots \[0, 1\]"):
            await envs.rollout(lambda obs: [0] * len(obs), 1)
        await envs.recv(2)
        assert (await envs.rollout(lambda obs: [0] * len(obs), 1)).reward.shape == (1, 4)


async def test_a_state_brings_no_observation():
    async with aioenv.make_vec("InvertedPendulum-v5", 4, num_workers=2) as envs:
        obs, _ = await envs.reset(seed=0)
        states = await envs.get_state()
        await envs.step(push(obs))
        await envs.set_state(states[2:], [2, 3])
        with pytest.raises(aioenv.ResetNeededError, match=r"slots \[2, 3\].*a state was set"):
            await envs.rollout(push, 1)
        stepped = await envs.step(push(obs))
        assert np.array_equal((await envs.rollout(push, 1)).obs[0], stepped.obs)


async def test_groups_span_all_workers():
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for num_envs, workers, groups, made in [(7, 3, 8, 2), (2, 2, 2, 1), (9, 2, 3, 3)]:
            await spans(num_envs, workers, groups, made)


async def spans(num_envs, workers, groups, made):
    async with aioenv.AsyncVectorEnv(counters(num_envs), num_workers=workers) as envs:
        await envs.reset()
        seen: list[list[int]] = []

        def policy(obs, slots):
            seen.append(slots.tolist())
            return [0] * len(obs)

        await envs.rollout(policy, 2, groups)
        assert len(seen) == 2 * made and seen[:made] == seen[made:]
        assert sorted(itertools.chain(*seen[:made])) == list(range(num_envs))
        assert all(set(w.slots) & set(slots) for w in envs.workers for slots in seen)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("num_workers", "split"), [(1, "slots"), (2, "workers")])
async def test_one_group_steps_while_the_others_policy_runs(gate, num_workers, split):
    """Group 1's envs don't return before group 0's policy has been asked for its second step: in lock-step, never."""
    path, open_gate = gate
    async with aioenv.AsyncVectorEnv(counters(4, gate=path), num_workers=num_workers) as envs:
        await envs.reset()

        def policy(obs, slots):
            if slots[0] == 0 and obs[0, 1] == 1:
                open_gate()
            waits = slots[0] == 2 and obs[0, 1] == 0
            return [Counter.WAIT if waits else 0, 0]

        async with asyncio.timeout(20):
            rollout = await envs.rollout(policy, 3, split=split)
        assert rollout.reward.tolist() == [[1] * 4, [2] * 4, [3] * 4]


async def test_images_are_of_the_last_states():
    config = aioenv.RenderConfig(width=8, height=8)
    async with aioenv.make_vec("CartPole-v1", 4, num_workers=2, render=config) as envs:
        await envs.reset(seed=0)
        await envs.rollout(balance, 5)
        images = await envs.render()
        assert np.array_equal(images, np.stack(await envs.call("render")))
        await envs.reset(options={"reset_mask": np.array([True, False, False, True])})
        later = await envs.render()
        assert np.array_equal(later[1:3], images[1:3]) and not np.array_equal(later[0], images[0])


# ---------------------------------------------------------------- faults


def misbehave(action: int, slot: int, at: int):
    """A policy that makes one slot's env do something when it has counted so far."""

    def policy(obs, slots):
        return np.where((slots == slot) & (obs[:, 1] == at), action, 0)

    return policy


def still(obs):
    return [0] * len(obs)


async def test_an_env_error_keeps_what_was_collected():
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for groups in (1, 2):
            async with aioenv.AsyncVectorEnv(counters(8, length=50), num_workers=2) as envs:
                await envs.reset(seed=0)
                with pytest.raises(aioenv.EnvError, match="as asked") as caught:
                    await envs.rollout(misbehave(Counter.RAISE, 1, 3), 10, groups)
                assert caught.value.slots == (1,)
                got = caught.value.partial
                assert isinstance(got, aioenv.Rollout) and len(got.infos) == 4
                assert got.obs.shape == (4, 8, 2) and got.reward.shape == (4, 8)
                done = got.valid.sum(0)
                assert done[1] == 3 and (np.delete(done, 1) == 4).all()
                for slot in range(8):
                    assert got.reward[: done[slot], slot].tolist() == list(range(1, done[slot] + 1))
                    assert got.last_obs[slot, 1] == done[slot] or slot == 1
                with pytest.raises(aioenv.EnvError, match=r"rollout: slots \[1\] have failed"):
                    await envs.rollout(still, 1)
                await envs.reset(options={"reset_mask": np.arange(8) == 1})
                again = await envs.rollout(still, 2)
                assert again.obs[0, :, 1].tolist() == [0 if slot == 1 else 4 for slot in range(8)]


async def test_a_dead_worker_keeps_what_was_collected():
    async with aioenv.AsyncVectorEnv(counters(8, length=50), num_workers=2) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.rollout(misbehave(Counter.KILL, 1, 3), 10)
        assert set(caught.value.slots) == {0, 1, 2, 3} and caught.value.slot == 1
        got = caught.value.partial
        assert got.valid[:3].all() and not got.valid[3:, :4].any() and got.valid[3, 4:].all()
        assert got.reward[3].tolist() == [0] * 4 + [4] * 4
        with pytest.raises(aioenv.WorkerDied, match="rollout"):
            await envs.rollout(still, 1)


async def test_rows_of_a_restarted_worker_are_not_to_be_learnt_from():
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for mode in AutoresetMode:
            await lose_episodes(mode)


async def lose_episodes(mode):
    restart = aioenv.RestartPolicy(backoff_s=0.01)
    envs = aioenv.AsyncVectorEnv(counters(8, length=50), num_workers=2, restart=restart, autoreset_mode=mode)
    async with envs:
        await envs.reset(seed=0)
        # the new process's envs have counted nothing: they are asked once
        once = iter([Counter.KILL])

        def policy(obs, slots):
            actions = np.zeros(len(slots), int)
            if 1 in slots and obs[slots == 1, 1] == 3:
                actions[slots == 1] = next(once, 0)
            return actions

        got = await envs.rollout(policy, 8)
        lost = ~got.valid & got.truncated
        assert lost[3:5, :4].sum() == 4 and not lost[:, 4:].any()
        for t, slot in np.argwhere(lost):
            assert got.infos[t]["restarted"][slot] and got.reward[t, slot] == 0
            assert got.obs[t, slot, 1] == t, "the last observation of the episode"
            assert got.valid[t + 1, slot] == (mode is not AutoresetMode.NEXT_STEP)
        after = np.argwhere(lost[:, :4])[:, 0].max() + 1 + (mode is AutoresetMode.NEXT_STEP)
        assert got.valid[after:].all() and got.valid[:, 4:].all()
        # a worker that dies between two rollouts: the observations are remembered here
        os.kill(envs.workers[1].pid, 9)
        before = got.last_obs[4:, 1]
        got = await envs.rollout(still, 3)
        assert got.obs[0, 4:, 1].tolist() == before.tolist()
        assert got.truncated[0, 4:].all() and not got.valid[0, 4:].any()


@pytest.mark.parametrize("deaths", [1, 2])
async def test_a_worker_that_dies_while_a_rollout_asks_for_its_state(deaths, monkeypatch):
    restart = aioenv.RestartPolicy(max_restarts=1, backoff_s=0.01)
    async with aioenv.AsyncVectorEnv(counters(4, length=50), num_workers=2, restart=restart) as envs:
        await envs.reset(seed=0)
        await envs.step(np.zeros(4, int))
        backend = envs._check_running()
        ask, left = backend.call_service, list(range(deaths))

        async def kill_and_ask(*args, **kwargs):
            await backend.timeouts.wait_for_restarts("", backend.worker_pool.members)
            if left:
                left.pop()
                os.kill(envs.workers[0].pid, 9)
            return await ask(*args, **kwargs)

        monkeypatch.setattr(backend, "call_service", kill_and_ask)
        if deaths == 2:
            with pytest.raises(aioenv.WorkerDied):
                await envs.rollout(still, 3)
            return
        got = await envs.rollout(still, 3)
        assert got.obs[0, :, 1].tolist() == [1] * 4 and got.truncated[0].tolist() == [True, True, False, False]
        assert got.valid.tolist() == [[False, False, True, True], [False, False, True, True], [True] * 4]


# ---------------------------------------------------------------- cancellation, timeouts, policies that raise


@pytest.mark.parametrize("how", ["cancel", "timeout", "raise"])
async def test_nothing_is_mixed_up_after_the_end_before_time(gate, how):
    """Slot 5, of group 1, waits in its third step, and group 0 has its fourth in flight."""
    path, open_gate = gate
    async with aioenv.AsyncVectorEnv(counters(6, gate=path, length=50), num_workers=2) as envs:
        for then in ("recv", "rollout", "step"):
            await end_before_time(envs, open_gate, how, then)


async def end_before_time(envs, open_gate, how, then):
    envs._check_running().timeouts._timeout_s = 0.3 if how == "timeout" else None
    await envs.reset(seed=0)
    asked = asyncio.Event()

    async def policy(obs, slots):
        if 0 in slots and obs[0, 1] == 3:
            asked.set()
            if how == "raise":
                raise RuntimeError("no idea")
            await asyncio.sleep(0)
        return misbehave(Counter.WAIT, 5, 2)(obs, slots)

    rollout = asyncio.ensure_future(envs.rollout(policy, 10))
    await asked.wait()
    if how == "cancel":
        for _ in range(3):  # so that it waits for the envs
            await asyncio.sleep(0)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    elif how == "raise":
        with pytest.raises(RuntimeError, match="no idea") as caught:
            await rollout
        assert caught.value.__notes__ == ["in the policy of a rollout: group 0 of 2 (4 slots), step 3"]
    else:
        with pytest.raises(aioenv.StepTimeout) as caught:
            await rollout
        got = caught.value.partial
        assert got.valid[:2].all() and got.valid[2].tolist() == [slot not in (2, 5) for slot in range(6)]
    envs._check_running().timeouts._timeout_s = None
    with pytest.raises(aioenv.PendingCallError):
        envs.send([0], [5])
    open_gate()
    group_0 = 4 if how in ("cancel", "timeout") else 3
    expected = [group_0, group_0, 3, group_0, group_0, 3]
    if then == "recv":
        taken: dict[int, float] = {}
        async for ready in envs.ready():
            taken.update(zip(ready.slots.tolist(), ready.obs[:, 1], strict=True))
        assert all(expected[slot] == t for slot, t in taken.items()) and {2, 5} <= taken.keys()
    if then == "step":
        result = await envs.step(np.zeros(6, int))
        assert result.obs[:, 1].tolist() == [t + 1 for t in expected]
    else:
        again = await envs.rollout(still, 3)
        assert again.obs[0, :, 1].tolist() == expected
        assert again.reward.tolist() == [[t + i for t in expected] for i in (1, 2, 3)]


async def test_every_instant_of_a_cancellation_leaves_the_envs_in_order():
    async with aioenv.AsyncVectorEnv(counters(6, length=1000), num_workers=2) as envs:
        await envs.reset(seed=0)
        async for again in after_cancellations(envs, still, 24):
            counted = np.array(await envs.get_attr("t"))
            assert (again.last_obs[:, 1] == counted).all()
            assert (again.obs[0, :, 1] == counted - 2).all() and (again.reward[0] == counted - 1).all()
