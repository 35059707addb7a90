"""Rollouts of vector envs: over workers, whose slots are a group together, and in this process, in any groups."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import sync
from tests.kits.compare import assert_same
from tests.kits.native_kit import Batch, Gate, RandomWalk, fail, here
from tests.kits.rollout_kit import FIELDS, after_cancellations, assert_equal, balance, plain

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("fork_server")]

STEPS = 20


def policy(obs):
    return np.abs(obs[:, 0] * 7).astype(np.int64) % 9


def sway(obs):
    """For Hopper."""
    return np.sin(obs[:, 5:8] * 25).astype(np.float32)


def untimed(info):
    """Infos without the times of episodes."""
    told = {key: value for key, value in info.get("episode", {}).items() if key.strip("_") != "t" and "time" not in key}
    return {**info, "episode": told} if told else info


def still(obs):
    return [0] * len(obs)


class Strolls(RandomWalk):
    """Steps some of its slots, too."""

    def step_some(self, actions, slots):
        rest = np.setdiff1d(np.arange(self.num_envs), slots).tolist()
        kept = self.get_state(rest)
        _, *others = self.step(actions)
        self.set_state(kept, rest)
        return self.at.copy(), *others


class Counts(Batch):
    """Counts the steps of each slot; action 1 of any makes it misbehave."""

    def reset(self, *, seed=None, options=None):
        self.obs[(options or {}).get("reset_mask", slice(None))] = 0
        return self.give(), {}

    def step(self, actions):
        return self.step_some(actions, np.arange(self.num_envs))

    def step_some(self, actions, slots):
        if (actions[slots] == 1).any():
            self.misbehave()
        actions[:] = 1  # they are its own
        self.obs[slots] += 1
        return self.give(), self.obs[:, 0], self.flags, self.flags, {"buffer": self.obs}


@pytest.mark.parametrize(
    ("make", "mode", "num_workers", "groups", "made"),
    [
        *((RandomWalk, mode, 2, 2, 2) for mode in AutoresetMode),
        (RandomWalk, AutoresetMode.NEXT_STEP, 3, 2, 2),
        (RandomWalk, AutoresetMode.SAME_STEP, 1, 4, 1),
        *((make, mode, 0, 3, made) for mode in AutoresetMode for make, made in ((RandomWalk, 1), (Strolls, 3))),
        (Strolls, AutoresetMode.NEXT_STEP, 0, 9, 5),
    ],
)
async def test_the_same_as_step_by_step(make, mode, num_workers, groups, made):
    made_so = partial(make, mode=mode)
    async with (
        aioenv.NativeVectorEnv(made_so, 5, num_workers=num_workers) as envs,
        aioenv.NativeVectorEnv(made_so, 5, run_in="inline") as single,
    ):
        for each in (envs, single):
            obs, _ = await each.reset(seed=2)
            for _ in range(7):  # it begins in the middle of episodes, or with resets that are due
                result = await each.step(policy(obs))
                obs = result.obs.copy()
                over = result.terminated.copy()
                result.terminated[:] = True  # they are the caller's own
                if make is Strolls:
                    result.obs[:] = 3
                if mode is AutoresetMode.DISABLED and over.any():
                    obs, _ = await each.reset(options={"reset_mask": over})
        due = over if mode is AutoresetMode.NEXT_STEP else np.zeros(5, np.bool_)
        seen = []

        def choose(obs, slots):
            seen.append(tuple(slots.tolist()))
            return policy(obs)

        record = await envs.rollout(choose, STEPS, groups)
        assert len(set(seen)) == made and sum(seen[:made], ()) == (0, 1, 2, 3, 4)
        for t in range(STEPS):
            assert_same(record.obs[t], obs)
            result = await single.step(record.actions[t])
            assert_same([record.reward[t], record.terminated[t]], [result.reward, result.terminated])
            assert_same(record.valid[t], ~due)
            obs = result.obs
            if mode is AutoresetMode.NEXT_STEP:
                due = result.terminated
            elif mode is AutoresetMode.DISABLED and result.terminated.any() and t < STEPS - 1:
                obs, _ = await single.reset(options={"reset_mask": result.terminated})
        assert_same(record.last_obs, obs)
        assert record.terminated.sum() > 5


async def test_lost_episodes_are_not_valid():
    restart = aioenv.RestartPolicy()
    async with aioenv.NativeVectorEnv(RandomWalk, 4, num_workers=2, restart=restart) as envs:
        await envs.reset(seed=1)
        asked = 0

        def choose(obs, slots):
            nonlocal asked
            asked += 0 in slots
            return np.where((slots == 0) & (asked == 2), 9, 0)

        record = await envs.rollout(choose, 4)
        assert record.truncated[1].tolist() == [True, True, False, False] == (~record.valid[1]).tolist()
        assert record.infos[1]["restarted"][:2].all() and not record.valid[2, :2].any() and record.valid[3].all()


# ---------------------------------------------------------------- in this process


@pytest.mark.parametrize("mode", AutoresetMode)
async def test_tasks_give_what_single_envs_give(mode):
    """As over `backend="workers"`, and as a loop of steps, to the bit, infos included."""
    make = partial(aioenv.make_vec, "Hopper-v5", 5, autoreset_mode=mode, max_episode_steps=9)
    stats = {"episode_stats": True}
    async with make(num_workers=2, **stats) as singles, make(backend="native", **stats) as native:
        await singles.reset(seed=3)
        expected = await singles.rollout(sway, 30)
        assert (expected.terminated | expected.truncated).sum() > 10
        for groups in (1, 2, 4):
            obs, _ = await native.reset(seed=3)
            got = await native.rollout(sway, 30, groups)
            for name in FIELDS:
                assert getattr(got, name).tobytes() == getattr(expected, name).tobytes(), name
            assert_same([untimed(info) for info in got.infos], [untimed(info) for info in expected.infos])
            if groups == 1:
                epochs = [untimed({"episode": e.episode_stats.epoch()})["episode"] for e in (singles, native)]
                assert len(epochs[0]) > 3 and epochs[0] == pytest.approx(epochs[1], rel=1e-12)  # summed in other orders
    async with make(backend="native") as native:
        obs, _ = await native.reset(seed=3)
        step_by_step = await plain(native, sway, 30, obs)
        await native.reset(seed=3)
        assert_equal(await native.rollout(sway, 30), step_by_step)


async def test_slots_with_one_generator_are_one_group():
    async with aioenv.make_vec("CartPole-v1", 6, backend="native", max_episode_steps=12) as envs:
        obs, _ = await envs.reset(seed=1)
        expected = await plain(envs, balance, 40, obs)
        assert expected["truncated"].sum() > 6
        for groups in (1, 2):
            await envs.reset(seed=1)
            assert_equal(await envs.rollout(balance, 40, groups), expected)


async def test_a_second_one_goes_on_and_paused_slots_rest():
    async with aioenv.make_vec("Hopper-v5", 5, backend="native", max_episode_steps=9) as envs:
        await envs.reset(seed=3)
        whole = await envs.rollout(sway, 20)
        await envs.reset(seed=3)
        first, second = await envs.rollout(sway, 9, 1), await envs.rollout(sway, 5, 3)  # a reset is due between them
        stepped = await envs.step(sway(second.last_obs))
        third = await envs.rollout(sway, 5)
        for name in FIELDS[:-1]:
            between = getattr(whole, name)[14:15]
            joined = np.concatenate([getattr(r, name) for r in (first, second)] + [between, getattr(third, name)])
            assert joined.tobytes() == getattr(whole, name).tobytes(), name
        assert_same(stepped.reward, whole.reward[14])
        envs.pause([1, 4])
        got = await envs.rollout(sway, 3)
        assert not got.valid[:, [1, 4]].any() and not got.reward[:, [1, 4]].any()
        assert_same(got.obs[2, [1, 4]], third.last_obs[[1, 4]])
        assert_same(got.last_obs[[1, 4]], third.last_obs[[1, 4]])
        envs.resume()
        states = await envs.get_state([2])
        await envs.set_state(states, [3])
        with pytest.raises(aioenv.ResetNeededError, match=r"slots \[3\].*a state was set"):
            await envs.rollout(sway, 1)


@here
async def test_what_a_policy_is_given_and_may_give(where):
    async with aioenv.NativeVectorEnv(Counts, 5, copy=False, **where) as envs:
        with pytest.raises(aioenv.ResetNeededError, match="never reset"):
            await envs.rollout(still, 1)
        await envs.reset()
        kept = []

        async def writes(obs, *, slots):
            await asyncio.sleep(0)
            kept.append(obs)
            obs -= slots[:, None]
            return np.zeros(len(slots), np.int64), {"slot": slots, "obs": obs}

        record = await envs.rollout(writes, 4)
        assert record.obs[..., 0].tolist() == [[t] * 5 for t in range(4)]
        assert record.extras["slot"].tolist() == [[0, 1, 2, 3, 4]] * 4
        assert (record.extras["obs"] == record.obs - np.arange(5)[:, None]).all()
        assert [obs[0, 0] for obs in kept] == [0, -3, 1, -2, 2, -1, 3, 0]
        assert record.reward.dtype == np.float64 and record.reward.tolist() == [[t + 1] * 5 for t in range(4)]
        assert not record.actions.any() and record.valid.all()
        assert [info["buffer"].tolist() for info in record.infos] == [[[t + 1] * 2] * 5 for t in range(4)]
        stats = envs.stats()
        assert stats.env_steps == 20
        with pytest.raises(aioenv.ActionError, match=r"group 1 of 2 \(2 slots\), step 0: .*expected shape \(2,\)"):
            await envs.rollout(lambda obs: [0] * 3, 1)
        assert (await envs.rollout(still, 1)).reward.tolist() == [[6, 6, 6, 5, 5]]


async def test_a_group_steps_while_the_others_policy_runs():
    """Group 1's slots don't return before group 0's policy has been asked for its second step: in lock-step, never."""
    gate = Gate()

    def choose(obs, slots):
        if slots[0] == 0 and obs[0, 0] == 1:
            gate.opened.set()
        return np.where((slots == 2) & (obs[:, 0] == 0), 1, 0)

    async with aioenv.NativeVectorEnv(partial(Counts, misbehave=gate), 4, run_in="thread") as envs:
        await envs.reset()
        async with asyncio.timeout(20):
            assert (await envs.rollout(choose, 3)).reward.tolist() == [[1] * 4, [2] * 4, [3] * 4]


@here
async def test_an_error_keeps_what_was_collected(where):
    async with aioenv.NativeVectorEnv(partial(Counts, misbehave=fail), 4, **where) as envs:
        await envs.reset()
        with pytest.raises(aioenv.EnvError, match="as it was told") as caught:
            await envs.rollout(lambda obs, slots: np.where((slots == 1) & (obs[:, 0] == 2), 1, 0), 9)
        assert caught.value.slots == (0, 1)
        got = caught.value.partial
        assert got.valid.tolist() == [[True] * 4] * 2 + [[False, False, True, True]]
        assert got.reward.tolist() == [[1] * 4, [2] * 4, [0, 0, 3, 3]] and len(got.infos) == 3
        with pytest.raises(aioenv.EnvError, match=r"rollout: slots \[0, 1\] have failed"):
            await envs.rollout(still, 1)
        await envs.reset(options={"reset_mask": np.array([True, True, False, False])})
        assert (await envs.rollout(still, 2)).obs[..., 0].tolist() == [[0, 0, 3, 3], [1, 1, 4, 4]]


async def test_a_policy_that_raises_and_a_timeout():
    gate = Gate()
    async with aioenv.NativeVectorEnv(partial(Counts, misbehave=gate), 4, timeout_s=0.2) as envs:
        await envs.reset()

        def raises(obs, slots):
            if slots[0] == 2 and obs[0, 0] == 1:
                raise RuntimeError("no idea")
            return still(obs)

        with pytest.raises(RuntimeError, match="no idea") as caught:
            await envs.rollout(raises, 5)
        assert caught.value.__notes__ == ["in the policy of a rollout: group 1 of 2 (2 slots), step 1"]
        taken = await envs.recv()  # group 0 has gone on
        assert taken.slots.tolist() == [0, 1] and taken.obs[:, 0].tolist() == [2, 2]
        with pytest.raises(aioenv.StepTimeout) as timeout:
            await envs.rollout(lambda obs, slots: np.where((slots == 3) & (obs[:, 0] == 2), 1, 0), 5)
        assert timeout.value.partial.valid.tolist() == [[True] * 4, [True, True, False, False]]
        gate.opened.set()
        again = await envs.rollout(still, 1)
        assert again.obs[0, :, 0].tolist() == [5, 5, 3, 3] and again.valid.all()


@here
async def test_every_instant_of_a_cancellation_leaves_the_env_in_order(where):
    async with aioenv.NativeVectorEnv(Counts, 6, **where) as envs:
        await envs.reset()
        async for again in after_cancellations(envs, still, 16):
            assert (again.obs[1] == again.obs[0] + 1).all() and (again.last_obs == again.obs[1] + 1).all()
            assert_same(again.last_obs, np.array(await envs.get_attr("obs")))


async def test_images_are_of_the_last_states():
    """Those that are observations, and those beside."""
    config = aioenv.RenderConfig(16, 12, quality="fast", workers=1)
    make = partial(aioenv.make_vec, "Hopper-v5", 3, max_episode_steps=3, autoreset_mode=AutoresetMode.SAME_STEP)
    with_pixels, with_images = {"pixels": config}, {"render": config}
    chosen = np.random.default_rng(0).uniform(-1, 1, (3, 3)).astype(np.float32)
    async with make(backend="native", **with_pixels) as pixels, make(backend="native", **with_images) as images:
        shots = []
        await images.reset(seed=4)
        for _ in range(5):
            shots.append(await images.render())
            await images.step(chosen)
        last = await images.render()
        await images.reset(seed=4)
        await images.rollout(lambda obs, slots: chosen[slots], 5)
        assert_same(await images.render(), last)
        for groups in (1, 2):
            await pixels.reset(seed=4)
            record = await pixels.rollout(lambda obs, slots: chosen[slots], 5, groups)
            assert_same(record.obs, np.stack(shots))
            assert_same(record.last_obs, last)
            finals = record.infos[2]["final_obs"]
            assert record.truncated[2].all() and all(image.shape == (12, 16, 3) and image.any() for image in finals)


async def test_blocking():
    for num_workers in (0, 2):
        with sync.make_vec("Hopper-v5", 4, backend="native", num_workers=num_workers) as envs:
            envs.reset(seed=1)
            record = envs.rollout(lambda obs: np.zeros((len(obs), 3), np.float32), 5)
            assert record.obs.shape == (5, 4, 11) and record.valid.all() and len(record.infos[0]["x_position"]) == 4
            with pytest.raises(ZeroDivisionError):
                envs.rollout(lambda obs: 1 / 0, 5)
            assert_same(envs.rollout(lambda obs: np.zeros((len(obs), 3), np.float32), 1).obs[0], record.last_obs)
