"""`test_ve_…`: the lines of what Habitat's `VectorEnv` did, and what comes of them on slots that never shift.

Its tiled image is with the other images (`tests/rendering/test_rendering.py`, `render(mode="grid")`).
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv.process.launch import START_METHODS
from aioenv.testing.faulty_env import FaultyEnv, faulty_envs
from tests.kits.loop_kit import run_on


class Task(gym.Env):
    """An env with a method, a property with a setter, and a number of episodes."""

    observation_space = gym.spaces.Box(0, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    number_of_episodes = 5

    def __init__(self, slot=0):
        self.slot, self.t, self._goal = slot, 0, 0

    @property
    def goal(self):
        return self._goal

    @goal.setter
    def goal(self, goal):
        self._goal = 10 * goal

    def distance(self, x, *, scale=1):
        return scale * abs(self.slot - x)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.slot, self.t], np.float32)

    def step(self, action):
        self.t += 1
        if action == 2:
            raise LookupError("no such place")
        return self.observe(), 1.0, self.t == 3, False, {}


def tasks(n):
    return [partial(Task, slot) for slot in range(n)]


def zeros(n):
    return np.zeros(n, np.int64)


def test_ve_call_and_call_at_take_methods_attributes_setters_and_keywords():
    async def main():
        async with aioenv.AsyncVectorEnv(tasks(4), num_workers=2) as envs:
            assert await envs.call("distance", 1, scale=2) == (2, 0, 2, 4)
            assert await envs.call_at(3, "distance", x=1) == 2
            await envs.call_at(3, "set_wrapper_attr", name="mark", value=5)  # keywords are the method's own
            assert await envs.call_at(3, "mark") == 5
            assert await envs.call_at([3, 0], "distance", 1, scale=3) == (6, 3)
            assert await envs.call_at(2, "slot") == 2
            await envs.set_attr("goal", [1, 2, 3, 4])
            assert await envs.get_attr("goal") == (10, 20, 30, 40)
            envs.pause(0)  # paused ones are called, too: one result a slot, live or not
            assert len(await envs.call("distance", 0)) == 4
            with pytest.raises(ValueError, match="length equal to the number of environments"):
                await envs.set_attr("goal", [1, 2, 3])
            with pytest.raises(aioenv.EnvError, match="has no attribute 'nothing'"):
                await envs.call("nothing")

    run_on("uvloop", main())


def test_ve_pause_at_twice_and_resume_all_in_the_old_order_and_close_with_paused():
    async def main():
        envs = await aioenv.AsyncVectorEnv(tasks(4), num_workers=2)
        await envs.reset(seed=0)
        envs.pause(0)
        envs.pause(0)  # not the next one: slots don't shift
        assert envs.active_slots.tolist() == [1, 2, 3]
        envs.pause(1)
        await envs.step(zeros(4))
        envs.resume_all()
        assert (await envs.step(zeros(4))).obs.tolist() == [[0, 1], [1, 1], [2, 2], [3, 2]]
        envs.pause([3, 0])
        await envs.close()
        assert [worker.state for worker in envs.workers] == ["closed"] * 2

    run_on("asyncio", main())


def test_ve_pause_keeps_a_pending_reply_and_one_slot_is_stepped_without_waiting():
    """`async_step_at` and `wait_step_at` are `send` and `recv`; what was discarded there is kept."""

    async def main():
        async with aioenv.AsyncVectorEnv(tasks(3), num_workers=3) as envs:
            await envs.reset(seed=0)
            envs.send([1], [2])
            envs.pause(2)
            assert (await envs.step(zeros(3))).obs[:2, 1].tolist() == [1, 1]
            ready = await envs.recv()
            assert (ready.slots.tolist(), ready.obs.tolist()) == ([2], [[2, 1]])
            assert (await envs.step_at(0, 1)).obs.tolist() == [0, 2]

    run_on("uvloop", main())


def test_ve_double_writes_and_reads_are_refused():
    async def main():
        async with aioenv.AsyncVectorEnv(tasks(2), num_workers=1) as envs:
            await envs.reset(seed=0)
            envs.send(zeros(2))
            for again in (partial(envs.send, zeros(2)), partial(envs.send, [0], [1])):
                with pytest.raises(aioenv.PendingCallError):
                    again()
            with pytest.raises(gym.error.AlreadyPendingCallError):
                await envs.step_at(0, 0)
            await envs.recv(2)
            with pytest.raises(gym.error.NoAsyncCallError):
                await envs.recv()

    run_on("asyncio", main())


def test_ve_spaces_and_number_of_episodes():
    async def main():
        async with aioenv.AsyncVectorEnv(tasks(2)) as envs:
            assert envs.single_observation_space == Task.observation_space
            assert envs.single_action_space == Task.action_space
            assert (envs.observation_space.shape, envs.num_envs) == ((2, 2), 2)
            assert await envs.get_attr("number_of_episodes") == (5, 5)

    run_on("asyncio", main())


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_ve_auto_reset_on_or_off_keeps_the_final_observation(mode):
    async def main():
        async with aioenv.AsyncVectorEnv(tasks(1), autoreset_mode=mode) as envs:
            await envs.reset()
            for _ in range(3):
                result = await envs.step([0])
            assert result.terminated.tolist() == [True]
            final = result.info["final_obs"][0] if mode is AutoresetMode.SAME_STEP else result.obs[0]
            assert final.tolist() == [0, 3]

    run_on("uvloop", main())


@pytest.mark.parametrize("start", [*START_METHODS, "debug"])
def test_ve_context_manager_start_methods_and_the_twin_on_threads(start):
    """All the same; and "fork" is refused."""

    async def main():
        options = {"debug": True} if start == "debug" else {"start": start}
        async with aioenv.AsyncVectorEnv(tasks(2), **options) as envs:
            await envs.reset()
            assert (await envs.step(zeros(2))).obs.tolist() == [[0, 1], [1, 1]]
        assert envs.closed
        with pytest.raises(aioenv.ClosedError):
            await envs.reset()

    run_on("asyncio", main())
    with pytest.raises(ValueError, match="is refused"):
        aioenv.AsyncVectorEnv(tasks(2), start="fork")


def test_ve_a_childs_traceback_is_reported():
    async def main():
        async with aioenv.AsyncVectorEnv(tasks(2)) as envs:
            await envs.reset()
            with pytest.raises(aioenv.EnvError, match="LookupError: no such place") as caught:
                await envs.step(np.array([0, 2]))
            assert "in step" in caught.value.traceback and isinstance(caught.value.__cause__, LookupError)

    run_on("asyncio", main())


@pytest.mark.parametrize("start", START_METHODS)
def test_ve_workers_ignore_signals(start):
    async def main():
        async with aioenv.AsyncVectorEnv(tasks(2), num_workers=2, start=start, ignore_signals=True) as envs:
            await envs.reset()
            guardians = _children(os.getpid())
            for pid in {*guardians, *(worker.pid for worker in envs.workers)}:
                for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                    os.kill(pid, number)
            assert (await envs.step(zeros(2))).obs.tolist() == [[0, 1], [1, 1]]
            assert _children(os.getpid()) == guardians
        async with aioenv.AsyncVectorEnv(tasks(1), start=start) as envs:
            os.kill(envs.workers[0].pid, signal.SIGUSR1)
            with pytest.raises(aioenv.WorkerDied, match="SIGUSR1"):
                await envs.reset()

    run_on("uvloop", main())


def _children(pid):
    """The processes that this one has started: spawned workers, and fork servers."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    state, parent = stat.read().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state != "Z":
                found.add(int(entry))
    return found


def test_ve_close_ends_stuck_workers():
    """There it waited for ever."""

    async def main():
        async with aioenv.AsyncVectorEnv(faulty_envs(2, "hangs", "step", slot=1), num_workers=2) as envs:
            await envs.reset()
            envs.send(zeros(2))
            envs.pause([0, 1])
            began = time.monotonic()
            await envs.close(grace_s=0.1)
            assert time.monotonic() - began < 5

    run_on("asyncio", main())


def test_ve_a_policy_that_pauses_by_slot_keeps_its_state():
    """Its rows stay where they are, also for slot 0 (which `any([0])` forgot)."""

    async def main():
        async with aioenv.AsyncVectorEnv([partial(FaultyEnv, slot=i, length=2 + i) for i in range(3)]) as envs:
            state = np.zeros(3)
            await envs.reset(seed=0)
            for _ in range(4):
                result = await envs.step(zeros(3))
                live = result.info.get("_active", np.ones(3, bool))
                state[live] += result.reward[live]
                envs.pause(np.flatnonzero(result.truncated)) if result.truncated.any() else None
            assert state.tolist() == [1 + 2, 1 + 2 + 3, 1 + 2 + 3 + 4]

    run_on("uvloop", main())
