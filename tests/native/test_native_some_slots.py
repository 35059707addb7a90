"""Some slots of native vector envs: paused, by themselves, in numbered episodes; all against `backend="workers"`."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import sync
from aioenv.native.tasks.locomotion_2d import Hopper
from aioenv.native.tasks.locomotion_3d import Ant
from tests.kits.native_kit import HERE_AND_THERE, LIMIT, MODES, Batch, both, equal, outcomes, policy

pytestmark = pytest.mark.asyncio


# ---------------------------------------------------------------- pausing


@pytest.mark.parametrize(
    ("mode", "num_workers", "task"),
    [(MODES[0], 0, "Hopper-v5"), (MODES[1], 0, "Ant-v5"), (MODES[2], 0, "Hopper-v5"), (MODES[0], 2, "Ant-v5")],
)
async def test_paused_slots_are_those_of_single_envs(mode, num_workers, task):
    """Slots come and go, episodes end under them; every result is equal, in whole batches and by `send`."""
    rng = np.random.default_rng(1)
    singles, native = both(mode, task, num_workers=num_workers)
    async with singles, native:

        async def do(method, *args, **kwargs):
            results = [await getattr(envs, method)(*args, **kwargs) for envs in (singles, native)]
            assert equal(*results)
            return results[0]

        native.pause(4)  # before its first reset: it shows zeros
        singles.pause(4)
        result = await do("reset", seed=3)
        assert not result.obs[4].any() and result.info["_active"].tolist() == [True] * 4 + [False]
        singles.resume()
        native.resume()
        mask = np.array([False] * 4 + [True])
        await do("reset", seed=[None] * 4 + [8], options={"reset_mask": mask})
        paused: list[int] = []
        for step in range(30):
            if step % 4 == 1:
                for envs in (singles, native):
                    envs.resume_all()
                paused = rng.permutation(5)[: step % 6].tolist()
                if paused:
                    for envs in (singles, native):
                        envs.pause(paused)
            actions = rng.uniform(-1, 1, singles.action_space.shape).astype(np.float32)
            result = await do("step", actions)
            if paused:
                assert not result.reward[paused].any() and not result.info["_active"][paused].any()
            assert native.active_slots.tolist() == singles.active_slots.tolist()
            over = result.terminated | result.truncated
            if mode is AutoresetMode.DISABLED and over.any():
                await do("reset", options={"reset_mask": over})
        assert native.exhausted == ()


@HERE_AND_THERE
async def test_paused_slots_keep_what_they_are_doing(num_workers):
    singles, native = both(num_workers=num_workers)
    action = np.full((5, 3), 0.3, np.float32)
    async with singles, native:
        for envs in (singles, native):
            await envs.reset(seed=0)
            envs.send(action[:2], [3, 1])
            envs.pause([1, 2])
        assert equal(await native.step_at(0, action[0]), await singles.step_at(0, action[0]))
        for envs in (singles, native):
            with pytest.raises(aioenv.PausedError, match=r"send: slots \[2\] are paused"):
                envs.send(action[:1], [2])
            with pytest.raises(aioenv.PausedError, match=r"step_at: slots \[2\]"):
                await envs.step_at(2, action[0])
            with pytest.raises(aioenv.PausedError, match=r"send_reset: slots \[1\]"):
                envs.send_reset([1])
            with pytest.raises(aioenv.PendingCallError):
                await envs.step(action)
        taken = [await envs.recv(2) for envs in (singles, native)]
        assert equal(*taken) and taken[0].slots.tolist() == [1, 3]
        for envs in (singles, native):
            envs.send(action)  # to those that are there
        taken = [await envs.recv(3) for envs in (singles, native)]
        assert equal(*taken) and taken[0].slots.tolist() == [0, 3, 4]
        for envs in (singles, native):
            envs.send_reset(seed=[1, 2, 3, 4, 5])
        taken = [await envs.recv(3) for envs in (singles, native)]
        assert equal(*taken) and taken[0].slots.tolist() == [0, 3, 4]
        # the others are where they were: 1 has made a step, 2 none
        for envs in (singles, native):
            envs.resume()
        assert equal(await singles.step(action), await native.step(action))
        # no slot is left: a task that steps in a loop still lets others run
        for envs in (singles, native):
            envs.pause(range(5))
        assert equal(await singles.step(action), await native.step(action))
        assert equal(await singles.reset(seed=1), await native.reset(seed=1))
        assert (await native.get_state([2]))[0].env_id == "Hopper-v5"


async def test_a_cancelled_step_of_some_is_taken_or_dropped():
    singles, native = both()
    action = np.zeros((5, 3), np.float32)
    async with singles, native:
        for envs in (singles, native):
            await envs.reset(seed=0)
            envs.pause([0, 4])
            task = asyncio.ensure_future(envs.step(action))
            while not envs.outstanding:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        taken = [await envs.recv(3) for envs in (singles, native)]
        assert equal(*taken) and taken[0].slots.tolist() == [1, 2, 3]
        for envs in (singles, native):
            envs.resume(4)
        assert equal(await singles.step(action), await native.step(action))


async def test_a_timeout_while_slots_are_paused():
    actions = np.zeros((2, 3), np.float32)
    for run_in in ("auto", "inline"):
        async with aioenv.NativeVectorEnv(Hopper, 2, run_in=run_in) as envs:
            await envs.reset(seed=0)
            envs.pause(0)
            if run_in == "inline":
                for late in (envs.step(actions, timeout_s=1), envs.reset(timeout_s=1)):
                    with pytest.raises(ValueError, match="can't end early"):
                        await late
                assert (await envs.step(actions)).info["_active"].tolist() == [False, True]
                continue
            with pytest.raises(aioenv.StepTimeout):
                await envs.step(actions, timeout_s=1e-9)
            assert (await envs.recv()).slots.tolist() == [1]


async def test_rollouts_without_paused_slots():
    singles, native = both(num_workers=2)
    async with singles, native:
        rollouts = []
        for envs in (singles, native):
            await envs.reset(seed=2)
            envs.pause([0, 3])
            rollouts.append(await envs.rollout(policy, 12))
        for name in ("obs", "actions", "reward", "terminated", "truncated", "valid", "last_obs"):
            assert data_equivalence(*(getattr(rollout, name) for rollout in rollouts), exact=True), name
        assert not rollouts[1].valid[:, [0, 3]].any() and rollouts[1].valid[:, [1, 2, 4]].any()


# ---------------------------------------------------------------- one slot


@HERE_AND_THERE
async def test_one_slot_by_itself(num_workers):
    singles, native = both(AutoresetMode.SAME_STEP, num_workers=num_workers)
    action = np.full(3, -0.2, np.float32)
    async with singles, native:
        for envs in (singles, native):
            await envs.reset(seed=0)
        for step in range(12):
            slot = (1, 3)[step % 2] if step < 4 else 3
            results = [await envs.step_at(slot, action * step / 12) for envs in (singles, native)]
            assert equal(*results)
            assert [type(value) for value in results[1][1:4]] == [float, bool, bool]
        assert equal(await singles.reset_at(2, seed=77), await native.reset_at(2, seed=77))
        assert equal(await singles.reset_at(1), await native.reset_at(1))
        for envs in (singles, native):
            with pytest.raises(ValueError, match="reset_mask"):
                await envs.reset_at(2, options={"reset_mask": None})
            with pytest.raises(IndexError):
                await envs.step_at(5, action)
            with pytest.raises(aioenv.ActionError):
                await envs.step_at(1, [1])
        batch = np.tile(action, (5, 1))
        assert equal(await singles.step(batch), await native.step(batch))


class Blanks(Batch):
    """Counts the steps of each slot; a masked reset gives zeros for the slots that it leaves alone."""

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        self.obs[mask] = 0
        return np.where(mask[:, None], self.obs, 0), {}

    def step(self, actions):
        return self.step_some(actions, np.arange(self.num_envs))

    def step_some(self, actions, slots):
        self.obs[slots] += 1
        return self.obs.copy(), np.ones(self.num_envs), self.flags, self.flags, {}


@pytest.mark.parametrize("reset", ["reset_at", "send_reset"])
async def test_a_reset_of_one_slot_does_not_change_the_last_observation_of_others(reset):
    async with aioenv.NativeVectorEnv(Blanks, 3, num_workers=1) as envs:
        await envs.reset()
        await envs.step([0, 0, 0])
        if reset == "reset_at":
            await envs.reset_at(0)
        else:
            envs.send_reset([0])
            await envs.recv()
        envs.pause([1, 2])
        result = await envs.step([0, 0, 0])
        assert result.obs[1:].tolist() == [[1, 1], [1, 1]]


async def test_a_slot_whose_episode_is_over_and_one_that_never_began():
    async with aioenv.NativeVectorEnv(lambda num_envs: Hopper(num_envs, max_episode_steps=2), 2) as envs:
        await envs.reset_at(1, seed=0)
        action = np.zeros(3, np.float32)
        await envs.step_at(1, action)
        with pytest.raises(aioenv.EnvError, match=r"reset\(\)") as caught:
            await envs.step_at(0, action)
        assert caught.value.slots == (0,)
        assert (await envs.step_at(1, action)).truncated
        with pytest.raises(aioenv.EnvError):  # until it is reset
            await envs.step([action, action])
        await envs.reset_at(0)
        result = await envs.step([action, action])
        assert result.truncated.tolist() == [False, False] and (result.reward != 0).tolist() == [True, False]


# ---------------------------------------------------------------- the env itself


class Counts(Ant):
    """Remembers how many steps each slot has made, in a hook that treats all rows."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.made = self.remember("made", (), np.int64)

    def outcome(self, actions, obs):
        self.made += 1
        return super().outcome(actions, obs)


@pytest.mark.parametrize("kind", [Hopper, Counts])
async def test_what_is_not_stepped_takes_no_physics(kind):
    env = kind(4, max_episode_steps=5)
    rng = np.random.default_rng(0)
    try:
        first, _ = env.reset(seed=0)
        slots, n = np.array([1, 2]), len(env.single_action_space.low)
        before = env.get_state([0, 3])
        for _ in range(7):  # through the end of an episode, and the reset after it
            obs, reward, terminated, truncated, info = env.step_some(rng.uniform(-1, 1, (4, n)), slots)
            assert not (reward[[0, 3]].any() or terminated[[0, 3]].any() or truncated[[0, 3]].any())
            assert (obs[[0, 3]] == first[[0, 3]]).all() and (obs[slots] != first[slots]).any(1).all()
            assert all(not mask[[0, 3]].any() for key, mask in info.items() if key.startswith("_"))
        assert data_equivalence(env.get_state([0, 3]), before, exact=True)
        if kind is Counts:
            assert env.made.tolist() == [0, 6, 6, 0], "to begin an episode is no step"
        obs, *_, info = env.step_some(np.zeros((4, n)), np.zeros(0, np.int64))
        assert (obs[0] == first[0]).all() and info == {}
        with pytest.raises(ValueError, match="actions: expected shape"):
            env.step_some(np.zeros((2, n)), slots)
    finally:
        env.close()
    with pytest.raises(aioenv.ClosedError):
        env.step_some(np.zeros((4, n)), slots)


async def test_what_can_not_step_some_of_its_slots_says_what_it_lacks():
    async with aioenv.NativeVectorEnv(Batch, 2) as envs:
        await envs.reset()
        match = r"Batch steps all of its slots at once; give it step_some\(actions, slots\)"
        for ask in (lambda: envs.pause(0), lambda: envs.step_at(0, 0), lambda: envs.episodes(policy, 2)):
            with pytest.raises(ValueError, match=match):
                await ask()
        with pytest.raises(ValueError, match=match):
            envs.send([0], [1])
        assert envs.active_slots.tolist() == [0, 1] and (await envs.step([0, 0])).reward.tolist() == [1, 1]
    async with aioenv.NativeVectorEnv(Batch, 3, num_workers=2) as envs:
        await envs.reset()
        with pytest.raises(ValueError, match=r"pause: slots \[1\]: the vector env of slots 0 to 1 steps all"):
            envs.pause([1, 2])
        with pytest.raises(ValueError, match="episodes"):
            await aioenv.evaluate(envs, policy, 2)
        envs.pause([2])  # a whole one
        result = await envs.step([0, 0, 0])
        assert (result.reward.tolist(), result.info["_active"].tolist()) == ([1, 1, 0], [True, True, False])
        envs.pause([0, 1])
        with pytest.raises(ValueError, match=r"resume: slots \[0\]: the vector env of slots 0 to 1"):
            envs.resume([1, 2])
        envs.resume([1, 2, 0])
        assert (await envs.step([0, 0, 0])).reward.all()


# ---------------------------------------------------------------- blocking


async def test_blocking_twins():
    expected = sync.make_vec("Hopper-v5", 3, num_workers=1, max_episode_steps=LIMIT)
    with expected, sync.make_vec("Hopper-v5", 3, backend="native", max_episode_steps=LIMIT, episode_stats=True) as envs:
        both = (expected, envs)
        for each in both:
            each.reset(seed=0)
            each.pause([1])
        actions = np.zeros((3, 3), np.float32)
        assert equal(expected.step(actions), envs.step(actions))
        assert envs.active_slots.tolist() == [0, 2] and envs.exhausted == ()
        for each in both:
            each.resume_all()
        assert equal(expected.step_at(1, actions[0]), envs.step_at(1, actions[0]))
        assert equal(expected.reset_at(1, seed=4), envs.reset_at(1, seed=4))
        runs = [outcomes(sync.evaluate(each, policy, 5, seed=1)) for each in both]
        for *_, info in runs[1]:
            assert info.pop("episode")["l"] == LIMIT
        assert data_equivalence(*runs, exact=True)
        assert envs.episode_stats.total_episodes == 5
