"""Paused slots, requests for some slots, and the observations that paused slots show."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tracemalloc
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import aioenv
from aioenv.testing.faulty_env import FaultyEnv, faulty_envs
from tests.kits.loop_kit import run_on
from tests.kits.version_kit import needs_gymnasium
from tests.kits.zoo import Sampler

MODES = list(AutoresetMode)
# before, the letters of a sample depend on the hash seed of its process
ORDERED_TEXT = needs_gymnasium("1.4")
N = 5


def counters(n, length=None):
    return [partial(FaultyEnv, slot=slot, length=length) for slot in range(n)]


def zeros(n=N):
    return np.zeros(n, np.int64)


async def wait_for_death(envs, worker):
    """Wait until the parent has heard of the end of a worker that was just killed."""
    async with asyncio.timeout(10):
        while envs.workers[worker].state not in ("dead", "restarting"):
            await asyncio.sleep(0.001)


# ------------------------------------------------------------ trajectories


class Twins:
    """What should come out: a vector env of one for each slot, which is stepped unless the slot is paused."""

    def __init__(self, make, n, mode):
        self.envs = [SyncVectorEnv([make], autoreset_mode=mode) for _ in range(n)]
        self.last = [None] * n

    def reset(self, seed, slots):
        for slot in slots:
            self.last[slot] = self.envs[slot].reset(seed=seed + slot)[0]
        return self.last

    def step(self, actions, paused):
        rows = []
        for slot, env in enumerate(self.envs):
            if slot in paused:
                rows.append((self.last[slot], np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), {}))
            else:
                rows.append(env.step(actions[slot : slot + 1]))
                self.last[slot] = rows[-1][0]
        return rows


def check(result, rows, paused):
    for slot, (obs, reward, terminated, truncated, info) in enumerate(rows):
        assert data_equivalence(row(result.obs, slot), row(obs, 0), exact=True)
        assert (result.reward[slot], result.terminated[slot]) == (reward[0], terminated[0])
        assert result.truncated[slot] == truncated[0]
        for key in ("t", "final_obs", "length", "odd_only"):
            mask = result.info.get(f"_{key}", np.zeros(len(rows), bool))
            assert mask[slot] == info.get(f"_{key}", np.zeros(1, bool))[0]
        if "t" in info and info["_t"][0]:
            assert result.info["t"][slot] == info["t"][0]
    if paused:
        assert (~result.info["_active"]).nonzero()[0].tolist() == sorted(paused)
    else:
        assert "_active" not in result.info


def row(batch, index):
    if isinstance(batch, dict):
        return {key: row(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], np.ndarray):
        return tuple(row(value, index) for value in batch)
    return batch[index]


async def _trajectories(space, mode, copy, workers, transport="auto"):
    make = partial(Sampler, space)
    twins = Twins(make, N, mode)
    rng = np.random.default_rng(0)
    envs = aioenv.AsyncVectorEnv([make] * N, num_workers=workers, autoreset_mode=mode, copy=copy, transport=transport)
    async with envs:
        envs.pause(3)
        obs, _ = await envs.reset(seed=7)
        assert space != "box" or not row(obs, 3).any()
        twins.reset(7, [0, 1, 2, 4])
        envs.resume()
        obs, _ = await envs.reset(seed=7, options={"reset_mask": np.arange(N) == 3})
        twins.reset(7, [3])
        paused = set()
        for step in range(60):
            if step % 4 == 0:
                paused = set(rng.choice(N, int(rng.integers(0, N + 1)), replace=False).tolist())
                if rng.integers(2):
                    envs.resume_all()
                    if paused:
                        envs.pause(paused)
                else:  # one after the other
                    envs.resume([slot for slot in range(N) if slot not in paused] or [0])
                    for slot in paused:
                        envs.pause(slot)
                assert envs.active_slots.tolist() == [slot for slot in range(N) if slot not in paused]
            actions = rng.integers(0, 4, N) - 3
            result = await envs.step(actions)
            check(result, twins.step(actions, paused), paused)
            over = result.terminated | result.truncated
            if mode is AutoresetMode.DISABLED and over.any():
                obs, info = await envs.reset(seed=step, options={"reset_mask": over})
                expected = twins.reset(step, over.nonzero()[0].tolist())
                for slot in range(N):
                    assert data_equivalence(row(obs, slot), row(expected[slot], 0), exact=True)
                assert ("_active" in info) is bool(paused)
    for env in twins.envs:
        env.close()


@pytest.mark.parametrize(
    ("mode", "copy", "workers", "transport"),
    [
        (AutoresetMode.NEXT_STEP, True, 2, "frames"),
        (AutoresetMode.NEXT_STEP, False, 1, "shared"),
        (AutoresetMode.SAME_STEP, False, 3, "auto"),
        (AutoresetMode.DISABLED, True, 2, "shared"),
    ],
)
def test_live_slots_go_on_as_if_alone_and_paused_ones_stand_still(mode, copy, workers, transport):
    run_on("uvloop", _trajectories("box", mode, copy, workers, transport))


@pytest.mark.parametrize("space", ["dict", pytest.param("text", marks=ORDERED_TEXT)])
def test_observations_of_every_sort_are_repeated(space):
    run_on("asyncio", _trajectories(space, AutoresetMode.NEXT_STEP, True, 2))


def test_a_worker_without_live_slots_gets_no_frame():
    async def main():
        async with aioenv.AsyncVectorEnv(counters(4), num_workers=2) as envs:
            await envs.reset(seed=0)
            envs.pause([2, 3])
            await envs.step(zeros(4))  # looks at what is paused, once
            requests = envs._session.worker_pool.members[1].worker._connection.requests
            asked = requests.next_id
            for _ in range(3):
                result = await envs.step(zeros(4))
            await envs.reset()
            assert requests.next_id == asked
            assert result.obs[:, 2].tolist() == [4, 4, 0, 0]
            envs.resume()
            assert (await envs.step(zeros(4))).obs[:, 2].tolist() == [1, 1, 1, 1]
            assert requests.next_id == asked + 1

    run_on("uvloop", main())


def test_rows_of_paused_slots_are_not_looked_at():
    async def main():
        async with aioenv.AsyncVectorEnv(counters(3), num_workers=1) as envs:
            envs.pause(1)
            await envs.reset(seed=[1, None, 3], options={"reset_mask": np.array([True, True, False])})
            await envs.reset(options={"reset_mask": np.array([False, True, False])})  # nothing is left of it
            await envs.reset()
            await envs.step(np.array([0, 2**60, 1]))
            with pytest.raises(aioenv.ActionError, match=r"expected shape \(3,\), got \(2,\)"):
                await envs.step([0, 0])
            with pytest.raises(IndexError):
                envs.pause(3)
            with pytest.raises(ValueError, match="got None"):
                envs.pause(None)
            assert envs.active_slots.tolist() == [0, 2]
            envs.pause([0, 2])
            assert (await envs.step(zeros(3))).info["_active"].tolist() == [False] * 3
            envs.send(zeros(3))
            envs.send_reset(seed=[1, 2, 3])
            assert not envs.outstanding

    run_on("asyncio", main())


# ------------------------------------------------------------ send, recv, calls, rollouts


def test_send_leaves_paused_slots_out_and_refuses_their_names():
    async def main():
        async with aioenv.AsyncVectorEnv(counters(4), num_workers=2) as envs:
            envs.pause([0, 3])
            envs.send_reset(seed=0)
            assert (await envs.recv(2)).slots.tolist() == [1, 2]
            envs.send(zeros(4))
            assert (await envs.recv(2)).obs[:, 0].tolist() == [1, 2]
            for ask in (
                lambda: envs.send([0, 0], [1, 3]),
                lambda: envs.send_reset([0]),
                lambda: asyncio.ensure_future(envs.step_at(0, 0)),
                lambda: asyncio.ensure_future(envs.reset_at(3)),
            ):
                with pytest.raises(aioenv.PausedError, match=r"slots \[[03]\] are paused; resume\(\) them first"):
                    task = ask()
                    assert await task
            assert not envs.outstanding

    run_on("uvloop", main())


def test_a_reply_in_flight_is_kept():
    async def main():
        async with aioenv.AsyncVectorEnv(counters(3), num_workers=3) as envs:
            await envs.reset(seed=0)
            await envs.step(zeros(3))
            envs.send([0], [1])
            envs.pause(1)
            for t in (2, 3):
                assert (await envs.step(zeros(3))).obs[[0, 2], 2].tolist() == [t, t]
            ready = await envs.recv()
            assert (ready.slots.tolist(), ready.obs.tolist(), ready.reward.tolist()) == ([1], [[1, 1, 2]], [2])
            assert (await envs.step(zeros(3))).obs[:, 2].tolist() == [4, 2, 4]
            # a whole step that was not awaited
            envs.resume()
            task = asyncio.ensure_future(envs.step(zeros(3)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            envs.pause(2)
            assert (await envs.step(zeros(3))).obs[:, 2].tolist() == [6, 4, 5]
            # and one of the live slots
            task = asyncio.ensure_future(envs.step(zeros(3)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            ready = await envs.recv(2)
            assert (ready.slots.tolist(), ready.obs[:, 2].tolist()) == ([0, 1], [7, 5])

    run_on("asyncio", main())


def test_calls_states_and_images_are_as_before():
    async def main():
        async with aioenv.make_vec("InvertedPendulum-v5", 3, num_workers=2) as envs:
            first, _ = await envs.reset(seed=1)
            envs.pause([1])
            await envs.step(np.zeros((3, 1)))
            await envs.set_attr("mark", [1.0, 2.0, 3.0])
            assert await envs.get_attr("mark") == (1.0, 2.0, 3.0)
            assert await envs.call_at([2, 1], "mark") == (3.0, 2.0)
            states = await envs.get_state()
            assert (await envs.step(np.zeros((3, 1)))).obs[1].tolist() == first[1].tolist()
            await envs.set_state(states[:2], [1, 0])  # crosswise
            envs.resume(1)
            result = await envs.step(np.zeros((3, 1)))
            assert result.obs[1].tolist() != first[1].tolist()
            await envs.set_state(states[:2], [0, 1])
            assert (await envs.step(np.zeros((3, 1)))).obs[0].tolist() == result.obs[1].tolist()

    run_on("asyncio", main())


def test_images_of_paused_slots_stay():
    async def main():
        render = aioenv.RenderConfig(width=32, height=24)
        async with aioenv.make_vec("CartPole-v1", 3, num_workers=2, render=render) as envs:
            await envs.reset(seed=1)
            before = await envs.render()
            envs.pause([0, 1])
            for _ in range(8):
                await envs.step(np.ones(3, np.int64))
            after = await envs.render()
            assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False]

    run_on("uvloop", main())


@pytest.mark.parametrize("where", [{"num_workers": 1}, {"backend": "native"}, {"backend": "native", "num_workers": 2}])
def test_images_are_of_the_observations_that_paused_slots_repeat(where):
    """These may be of a step that was cancelled, whose result was dropped."""

    async def main():
        config = aioenv.RenderConfig(width=24, height=18, quality="fast", workers=1)
        async with aioenv.make_vec("InvertedPendulum-v5", 2, render=config, pixels=config, **where) as envs:
            first, _ = await envs.reset(seed=1)
            actions = np.full((2, 1), 3, np.float32)
            stepping = asyncio.ensure_future(envs.step(actions))
            await asyncio.sleep(0)
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
            assert np.array_equal(await envs.render(), first)
            envs.pause(0)
            seen = (await envs.step(actions)).obs
            assert not np.array_equal(seen[0], first[0]) and np.array_equal(await envs.render(), seen)
            envs.pause(1)
            seen = (await envs.step(actions)).obs
            assert np.array_equal(await envs.render(), seen)

    run_on("asyncio", main())


def test_rollouts_do_not_step_paused_slots():
    async def main():
        async with aioenv.AsyncVectorEnv(counters(N, length=4), num_workers=2) as envs:
            await envs.reset(seed=0)
            await envs.step(zeros())
            envs.pause([1, 4])
            asked = set()

            def policy(obs, slots):
                asked.update(slots.tolist())
                return np.zeros(len(obs), np.int64)

            rollout = await envs.rollout(policy, 3)
            assert asked == {0, 2, 3}
            assert rollout.valid.all(axis=0).tolist() == [True, False, True, True, False]
            assert not rollout.valid[:, [1, 4]].any()
            assert rollout.obs[:, 1].tolist() == [[1, 1, 1]] * 3
            assert rollout.last_obs[:, 2].tolist() == [4, 1, 4, 4, 1]
            envs.pause(range(N))
            with pytest.raises(aioenv.PausedError, match="all slots are paused"):
                await envs.rollout(policy, 1)

    run_on("uvloop", main())


def test_rollouts_of_slots_far_apart():
    async def main():
        n = 30
        async with aioenv.AsyncVectorEnv(counters(n), num_workers=2) as envs:
            await envs.reset(seed=0)
            envs.pause(range(0, n, 2))
            asked = set()

            def policy(obs, slots):
                asked.update(slots.tolist())
                return slots // 2 % 2

            odd = np.arange(n) % 2 == 1
            for groups in (1, 2, 3):
                await envs.reset(seed=0)
                rollout = await envs.rollout(policy, 3, groups)
                assert (rollout.obs[..., 0] == np.arange(n)).all()
                assert (rollout.obs[..., 2] == np.where(odd, np.arange(3)[:, None], 0)).all()
                assert (rollout.last_obs[:, 2] == np.where(odd, 3, 0)).all()
                assert (rollout.actions == np.where(odd, np.arange(n) // 2 % 2, 0)).all()
                assert (rollout.reward == np.where(odd, np.arange(1, 4)[:, None], 0)).all()
                assert (rollout.valid == odd).all()
            assert asked == set(range(1, n, 2))

    run_on("uvloop", main())


def test_observations_that_are_objects_of_slots_paused_in_a_rollout():
    class Says(gym.Env):
        observation_space, action_space = spaces.Text(8), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return "0", {}

        def step(self, action):
            self.t += 1
            return str(self.t), 0.0, False, False, {}

    async def main():
        async with aioenv.AsyncVectorEnv([Says] * 3, num_workers=2) as envs:
            await envs.reset(seed=0)
            await envs.step(zeros(3))
            envs.pause([1])
            rollout = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 2)
            assert rollout.obs.tolist() == [["1", "1", "1"], ["2", "1", "2"]]
            assert list(rollout.last_obs) == ["3", "1", "3"]

    run_on("uvloop", main())


# ------------------------------------------------------------ faults


def test_a_slot_that_fails_does_not_when_it_is_paused():
    async def main():
        async with aioenv.AsyncVectorEnv(faulty_envs(3, "raises", "step", slot=1, at=2), num_workers=2) as envs:
            await envs.reset(seed=0)
            await envs.step(zeros(3))
            envs.pause(2)
            with pytest.raises(aioenv.EnvError) as caught:
                await envs.step(zeros(3))
            assert caught.value.slots == (1,)
            assert caught.value.partial.obs[[0, 2], 2].tolist() == [2, 1]
            assert caught.value.partial.info["_active"].tolist() == [True, True, False]
            envs.pause(1)  # the others go on
            assert (await envs.step(zeros(3))).obs[[0, 2], 2].tolist() == [3, 1]
            envs.resume()
            with pytest.raises(aioenv.EnvError, match="must be reset first"):
                await envs.step(zeros(3))
            assert (await envs.reset_at(1))[0].tolist() == [1, 2, 0]
            assert (await envs.step(zeros(3))).obs[:, 2].tolist() == [4, 1, 2]

    run_on("asyncio", main())


def test_the_others_go_on_when_a_dead_workers_slots_are_paused():
    async def main():
        async with aioenv.AsyncVectorEnv(counters(4), num_workers=2) as envs:
            await envs.reset(seed=0)
            os.kill(envs.workers[1].pid, signal.SIGKILL)
            with pytest.raises(aioenv.WorkerDied) as caught:
                await envs.step(zeros(4))
            envs.pause(caught.value.slots)
            for t in (2, 3):
                result = await envs.step(zeros(4))
                assert result.obs[:, 2].tolist() == [t, t, 0, 0]
            envs.resume()
            with pytest.raises(aioenv.WorkerDied):
                await envs.step(zeros(4))

    run_on("uvloop", main())


def test_a_worker_that_is_restarted_has_its_slots_paused_as_before():
    async def main():
        policy = aioenv.RestartPolicy()
        async with aioenv.AsyncVectorEnv(counters(4), num_workers=2, restart=policy) as envs:
            await envs.reset(seed=0)
            await envs.step(zeros(4))
            envs.pause([2, 3])
            await envs.step(zeros(4))
            os.kill(envs.workers[1].pid, signal.SIGKILL)
            await wait_for_death(envs, 1)
            envs.pause(1)  # whose observation was not asked for yet
            for t in (3, 4):
                result = await envs.step(zeros(4))
                assert result.obs[:, 2].tolist() == [t, 2, 1, 1]
                assert result.info.keys() == {"_active"}
            envs.resume([2, 3])
            result = await envs.step(zeros(4))
            assert result.truncated.tolist() == [False, False, True, True]
            assert result.info["restarted"].tolist() == [False, False, True, True]
            assert result.obs[:, 2].tolist() == [5, 2, 1, 1]

    run_on("asyncio", main())


def test_what_times_out_has_whole_batches_for_a_partial_result():
    async def main():
        envs = aioenv.AsyncVectorEnv(faulty_envs(3, "hangs", "step", slot=2, at=2), num_workers=3, timeout_s=0.3)
        async with envs:
            await envs.reset(seed=0)
            await envs.step(zeros(3))
            envs.pause(0)
            with pytest.raises(aioenv.StepTimeout) as caught:
                await envs.step(zeros(3))
            assert caught.value.slots == (2,)
            assert caught.value.partial.obs.tolist() == [[0, 1, 1], [1, 1, 2], [0, 0, 0]]
            ready = await envs.recv(1)
            assert ready.slots.tolist() == [1]
            envs.pause(2)  # it hangs, and the others need not care
            envs.resume(0)
            with pytest.raises(aioenv.StepTimeout):  # what was abandoned is waited for
                await envs.step(zeros(3))
            envs.send([0, 0], [0, 1])
            assert (await envs.recv(2)).obs[:, 2].tolist() == [2, 3]
            await envs.close(grace_s=0)

    run_on("uvloop", main())


# ------------------------------------------------------------ one slot


def test_one_slot_is_stepped_and_reset_alone():
    async def main():
        async with aioenv.AsyncVectorEnv([partial(Sampler, "dict", "dict")] * 3, num_workers=2) as envs:
            twin = Sampler("dict", "dict")
            envs.send_reset([0, 1], seed=5)
            obs, info = await envs.reset_at(2, seed=11)
            expected, expected_info = twin.reset(seed=11)
            equal = partial(data_equivalence, exact=True)
            assert equal(obs, expected) and info == expected_info
            action = envs.single_action_space.sample()
            result, expected = await envs.step_at(2, action), twin.step(action)
            assert equal(result.obs, expected[0])
            assert result[1:4] == expected[1:4] and [type(value) for value in result[1:4]] == [float, bool, bool]
            assert result.info["nested"]["x"] == expected[4]["nested"]["x"]
            assert "odd_only" in result.info and result.info["word"] == "odd"
            with pytest.raises(aioenv.PendingCallError):
                await envs.step_at(1, action)
            with pytest.raises(aioenv.ActionError, match="expected a dict"):
                await envs.step_at(2, 1)
            with pytest.raises(IndexError):
                await envs.reset_at(3)
            with pytest.raises(ValueError, match="reset_mask"):
                await envs.reset_at(2, options={"reset_mask": None})
            assert (await envs.recv(2)).slots.tolist() == [0, 1]

    run_on("uvloop", main())


class Wide(gym.Env):
    """Has observations of a MiB, and episodes of two steps."""

    observation_space = spaces.Box(-1, 1, (1 << 17,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1 << 17), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1 << 17), 0.0, self.steps == 2, False, {}


@pytest.mark.parametrize("method", ["reset_at", "step_at", "episodes", "rollout"])
def test_results_of_some_slots_are_freed_without_a_garbage_collection(method):
    async def run(envs):
        if method == "reset_at":
            await envs.reset_at(0)
        elif method == "step_at":
            await envs.reset()
            await envs.step_at(0, 0)
        elif method == "rollout":
            await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3)
        else:
            async for _ in envs.episodes(lambda obs: np.zeros(len(obs), np.int64), 5):
                pass
            await envs.reset()

    async def main():
        async with aioenv.AsyncVectorEnv([Wide] * 2, num_workers=1, autoreset_mode="Disabled") as envs:
            await envs.reset()
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                sizes = []
                for _ in range(6):
                    await run(envs)
                    sizes.append(tracemalloc.get_traced_memory()[0] >> 20)
            finally:
                tracemalloc.stop()
                gc.enable()
        assert sizes[-1] - sizes[1] <= 2, sizes

    run_on("asyncio", main())


@pytest.mark.parametrize("when", ["reset", "step"])
def test_what_there_is_of_one_slot_when_it_fails(when):
    with aioenv.sync.VectorEnv(faulty_envs(2, "raises", when, slot=1), num_workers=1) as envs:
        with pytest.raises(aioenv.EnvError) as caught:
            envs.reset_at(1)
            envs.step_at(1, 0)
    assert isinstance(caught.value.partial, aioenv.ResetResult if when == "reset" else aioenv.SlotStep)


def test_the_blocking_twins():
    with aioenv.sync.VectorEnv(counters(3), num_workers=2) as envs:
        envs.reset(seed=0)
        envs.pause([0, 1])
        assert envs.active_slots.tolist() == [2]
        assert envs.step(zeros(3)).info["_active"].tolist() == [False, False, True]
        envs.resume(0)
        assert envs.step_at(0, 1).obs.tolist() == [0, 1, 1]
        assert envs.reset_at(0, seed=1).obs.tolist() == [0, 2, 0]
        assert envs.call_at([2, 1], "answer") == (2001, 1000)
        assert envs.exhausted == ()
        envs.resume_all()
        assert envs.step(zeros(3)).obs[:, 2].tolist() == [1, 1, 2]
        with pytest.raises(IndexError):
            envs.pause(7)


@pytest.mark.asyncio
async def test_last_observations_in_a_rollout_where_all_slots_of_a_worker_are_paused():
    async with aioenv.make_vec("CartPole-v1", 4, num_workers=2) as envs:
        await envs.reset(seed=0)
        last, *_ = await envs.step(np.zeros(4, int))
        envs.pause([0, 2, 3])
        rollout = await envs.rollout(lambda obs: np.zeros(len(obs), int), 3)
        assert np.array_equal(rollout.obs[:, [0, 2, 3]], [last[[0, 2, 3]]] * 3)
        assert np.array_equal(rollout.last_obs[[0, 2, 3]], last[[0, 2, 3]])
        assert np.array_equal(rollout.obs[0, 1], last[1])
        assert rollout.valid.tolist() == [[False, True, False, False]] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "backend": "native"}, {"num_workers": 0}])
async def test_last_observations_in_a_rollout_where_a_paused_slot_took_a_state(options):
    actions = np.zeros((4, 3), np.float32)
    async with aioenv.make_vec("Hopper-v5", 4, **options) as envs:
        await envs.reset(seed=0)
        last, *_ = await envs.step(actions)
        envs.pause([2, 3])
        await envs.set_state(await envs.get_state([0]), [2])
        rollout = await envs.rollout(lambda obs: actions[: len(obs)], 3)
        assert np.array_equal(rollout.obs[:, 2:], [last[2:]] * 3)
        assert np.array_equal(rollout.last_obs[2:], last[2:])
        envs.resume()
        with pytest.raises(aioenv.ResetNeededError, match=r"slots \[2\]"):
            await envs.rollout(lambda obs: actions[: len(obs)], 1)


@pytest.mark.asyncio
async def test_last_observations_after_a_cancelled_step():
    async with aioenv.make_vec("CartPole-v1", 2, num_workers=2) as envs:
        for turns in range(1, 9):
            last, _ = await envs.reset(seed=turns)
            envs.pause(0)
            step = asyncio.ensure_future(envs.step(np.zeros(2, int)))
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait([step])
            if turns % 2:
                obs, *_ = await envs.step(np.zeros(2, int))
            else:
                obs = (await envs.rollout(lambda obs: np.zeros(len(obs), int), 1)).obs[0]
            assert np.array_equal(obs[0], last[0]), turns
            envs.resume()
