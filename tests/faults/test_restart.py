"""Workers that die are started again: what their slots report, how often, and what waits meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import aioenv
from aioenv import RestartPolicy
from aioenv.core.recovery import derive_seed
from aioenv.ipc.memory import AVAILABLE
from aioenv.process.restart_policy import RestartBudget

pytestmark = pytest.mark.asyncio

TRANSPORTS = ["frames", *(["shared"] if AVAILABLE else [])]
KILL, HANG, END, FAIL = 90, 91, 92, 93


class Counter(gym.Env):
    """Observes (draw of the episode, step); does what the action says."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        self._draw = float(self.np_random.integers(1_000_000))
        return np.array([self._draw, 0.0]), {"seed": -1 if seed is None else seed}

    def step(self, action):
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == HANG:
            time.sleep(1000)
        if action == FAIL:
            raise ValueError("as asked")
        self._t += 1
        return np.array([self._draw, self._t]), float(self._t), bool(action == END), False, {}


class Walker(Counter):
    """One that tells its state, so that it can be resumed."""

    _t, _draw = 0, 0.0

    def get_state(self):
        return {"t": self._t, "draw": self._draw}

    def set_state(self, state):
        self._t, self._draw = state["t"], state["draw"]


class Limited(Walker):
    """One whose episodes are limited to the number in a file."""

    def __init__(self, left):
        self._left = left

    def reset(self, *, seed=None, options=None):
        left = int(self._left.read_text())
        if not left:
            raise aioenv.EpisodesDone
        self._left.write_text(str(left - 1))
        return super().reset(seed=seed)


class Teller(Walker):
    """One that observes its step as text, and must be reset or put into a state before it is stepped."""

    observation_space = spaces.Text(10)
    _begun = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._begun = True
        return "0", {}

    def step(self, action):
        assert self._begun
        super().step(action)
        return str(self._t), 1.0, False, False, {}

    def set_state(self, state):
        super().set_state(state)
        self._begun = True


def counters(n: int = 4, **kwargs) -> aioenv.AsyncVectorEnv:
    kwargs.setdefault("restart", RestartPolicy(backoff_s=0.01))
    return aioenv.AsyncVectorEnv([Counter] * n, num_workers=2, **kwargs)


async def died(envs: aioenv.AsyncVectorEnv, index: int) -> None:
    """Kill a worker and wait until that is known."""
    pid = envs.workers[index].pid
    os.kill(pid, signal.SIGKILL)
    while envs.workers[index].pid == pid and envs.workers[index].state in ("ready", "busy"):
        await asyncio.sleep(0)


async def test_seeds_after_a_restart_fit_where_31_bits_do():
    """`ale_py.AtariVectorEnv` adds its slots to one, and takes no more."""
    seeds = [derive_seed(seed, generation) for seed in range(64) for generation in (1, 2)]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**30


async def test_slots_are_truncated_and_begin_anew_with_seeds_of_their_own(way):
    async with counters() as envs:
        first, _ = await envs.reset(seed=5)
        await envs.step([0, 0, 0, 0])
        obs, reward, terminated, truncated, info = await envs.step([0, 0, 0, KILL])
        assert obs[:, 0].tolist() == first[:, 0].tolist()
        assert obs[:, 1].tolist() == [2, 2, 1, 1], "the last observation that is known"
        assert reward.tolist() == [2, 2, 0, 0]
        assert not terminated.any() and truncated.tolist() == [False, False, True, True]
        assert info["restarted"].tolist() == [False, False, True, True]
        assert envs.workers[1].state == "ready"
        again, reward, *_, info = await envs.step([0, 0, 0, 0])
        assert again[:, 1].tolist() == [3, 3, 0, 0] and reward.tolist() == [3, 3, 0, 0], "the autoreset"
        assert "restarted" not in info
        assert (info["seed"][2:] != [7, 8]).all() and (again[2:, 0] != first[2:, 0]).all()
        third, *_ = await envs.step([0, 0, 0, 0])
        assert third[:, 1].tolist() == [4, 4, 1, 1]
    async with counters() as envs:
        await envs.reset(seed=5)
        await envs.step([0, 0, KILL, 0])
        assert (await envs.step([0] * 4)).obs[2:].tolist() == again[2:].tolist(), "the same faults, the same run"


async def test_same_step_brings_the_new_episode_at_once():
    async with counters(autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        first, _ = await envs.reset(seed=5)
        await envs.step([0] * 4)
        obs, _, _, truncated, info = await envs.step([0, 0, KILL, 0])
        assert truncated.tolist() == [False, False, True, True] and obs[:, 1].tolist() == [2, 2, 0, 0]
        assert [o.tolist() for o in info["final_obs"][2:]] == [[first[2, 0], 1], [first[3, 0], 1]]
        assert info["restarted"].tolist() == [False, False, True, True]
        assert (await envs.step([0] * 4)).obs[:, 1].tolist() == [3, 3, 1, 1]


async def test_same_step_an_episode_that_had_just_begun_is_lost_too():
    async with counters(autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        await envs.reset(seed=5)
        began = (await envs.step([0, 0, END, 0])).obs
        _, _, _, truncated, info = await envs.step([0, 0, 0, KILL])
        assert truncated.tolist() == [False, False, True, True]
        assert info["final_obs"][2].tolist() == began[2].tolist()


@pytest.mark.parametrize("mode", AutoresetMode)
async def test_an_episode_without_a_known_observation_is_truncated(mode):
    policy = RestartPolicy(backoff_s=0.01)
    async with aioenv.AsyncVectorEnv([Teller] * 2, num_workers=2, autoreset_mode=mode, restart=policy) as envs:
        await envs.reset(seed=1)
        await envs.step([0, 0])
        states = await envs.get_state()
    async with aioenv.AsyncVectorEnv([Teller] * 2, num_workers=2, autoreset_mode=mode, restart=policy) as envs:
        await envs.set_state(states)
        await died(envs, 0)
        obs, reward, _, truncated, info = await envs.step([0, 0])
        assert truncated.tolist() == info["restarted"].tolist() == [True, False] and reward.tolist() == [0, 1]
        assert obs == ("0" if mode is AutoresetMode.SAME_STEP else None, "2")
        if mode is AutoresetMode.SAME_STEP:
            assert info["final_obs"][0] is None and info["_final_obs"].tolist() == [True, False]
        if mode is AutoresetMode.NEXT_STEP:
            assert (await envs.step([0, 0])).obs == ("0", "3")
        if mode is AutoresetMode.DISABLED:
            assert (await envs.reset(options={"reset_mask": truncated})).obs == ("0", "2")
        assert (await envs.step([0, 0])).obs[0] == "1"


async def test_without_autoreset_the_slots_wait_for_a_reset():
    async with counters(autoreset_mode=AutoresetMode.DISABLED) as envs:
        await envs.reset(seed=5)
        assert (await envs.step([KILL, 0, 0, 0])).truncated.tolist() == [True, True, False, False]
        with pytest.raises(aioenv.ResetNeededError):
            await envs.step([0] * 4)
        await envs.reset(options={"reset_mask": np.array([True, True, False, False])})
        assert (await envs.step([0] * 4)).obs[:, 1].tolist() == [1, 1, 2, 2]


async def test_a_worker_that_dies_idle_says_so_in_the_next_step(way):
    async with counters() as envs:
        await envs.reset(seed=1)
        await died(envs, 0)
        assert (await envs.step([0] * 4)).truncated.tolist() == [True, True, False, False]
        await died(envs, 0)
        obs, _ = await envs.reset(seed=1)
        assert obs[:, 1].tolist() == [0] * 4
        assert not (await envs.step([0] * 4)).truncated.any(), "a reset leaves nothing to tell"


async def test_an_episode_that_had_ended_does_not_end_twice():
    async with counters() as envs:
        await envs.reset(seed=1)
        assert (await envs.step([END, 0, 0, 0])).terminated.tolist() == [True, False, False, False]
        await died(envs, 0)
        obs, _, terminated, truncated, _ = await envs.step([0] * 4)
        assert not terminated.any() and truncated.tolist() == [False, True, False, False]
        assert obs[0, 1] == 0, "the autoreset that was due"


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("resume", [False, True])
async def test_the_last_episode_of_an_exhausted_slot_does_not_end_twice(mode, resume, tmp_path):
    left = tmp_path / "left"
    left.write_text("1")
    policy = RestartPolicy(backoff_s=0.01, resume=resume)
    envs = [partial(Limited, left), Walker]
    async with aioenv.AsyncVectorEnv(envs, num_workers=1, autoreset_mode=mode, restart=policy) as envs:
        await envs.reset(seed=1)
        assert (await envs.step([END, 0])).terminated[0]
        if mode is AutoresetMode.NEXT_STEP:
            await envs.step([0, 0])
        if mode is AutoresetMode.DISABLED:
            await envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.exhausted == (0,)
        await died(envs, 0)
        assert (await envs.step([0, 0])).truncated.tolist() == [False, not resume]
        left.write_text("1")
        envs.resume(0)
        if mode is AutoresetMode.DISABLED and not resume:
            await envs.reset(options={"reset_mask": np.array([False, True])})
        obs, reward, terminated, truncated, info = await envs.step([0, 0])
        assert obs[0, 1] == reward[0] == 0, "a reset"
        assert not (terminated.any() or truncated.any() or "restarted" in info)
        assert envs.exhausted == ()
        assert (await envs.step([0, 0])).obs[0, 1] == 1


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
async def test_a_slot_whose_last_episode_was_lost_is_exhausted(mode, tmp_path):
    left = tmp_path / "left"
    left.write_text("1")
    policy = RestartPolicy(backoff_s=0.01)
    envs = [partial(Limited, left), Walker]
    async with aioenv.AsyncVectorEnv(envs, num_workers=2, autoreset_mode=mode, restart=policy) as envs:
        await envs.reset(seed=1)
        last = (await envs.step([0, 0])).obs[0].tolist()
        await died(envs, 0)
        obs, _, _, truncated, info = await envs.step([0, 0])
        assert obs[0].tolist() == last and truncated.tolist() == [True, False]
        assert info["restarted"].tolist() == [True, False] and "_active" not in info
        if mode is AutoresetMode.SAME_STEP:
            assert info["final_obs"][0].tolist() == last and info["final_info"]["restarted"][0]
        else:
            assert (await envs.step([0, 0])).info["_active"].tolist() == [False, True]
        assert envs.exhausted == (0,)
        left.write_text("1")
        envs.resume(0)
        obs, _, _, truncated, info = await envs.step([0, 0])
        assert obs[0, 1] == 0 and not truncated.any() and "restarted" not in info
        assert (await envs.step([0, 0])).obs[0, 1] == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_same_step_an_error_of_the_reset_after_a_lost_episode_is_one_of_its_slot(transport, tmp_path):
    left = tmp_path / "left"
    left.write_text("1")
    how = {"autoreset_mode": AutoresetMode.SAME_STEP, "restart": RestartPolicy(backoff_s=0.01), "transport": transport}
    async with aioenv.AsyncVectorEnv([partial(Limited, left), Walker], num_workers=2, **how) as envs:
        await envs.reset(seed=1)
        left.write_text("none")
        await died(envs, 0)
        with pytest.raises(aioenv.EnvError, match="invalid literal") as caught:
            await envs.step([0, 0])
        assert caught.value.slots == (0,) and envs.exhausted == ()
        left.write_text("1")
        await envs.reset(options={"reset_mask": np.array([True, False])})
        obs, _, _, truncated, info = await envs.step([0, 0])
        assert obs[0, 1] == 1 and not truncated.any() and "restarted" not in info


async def test_death_in_a_reset_repeats_the_reset():
    async with counters(3) as envs:
        await envs.reset(seed=1)
        expected, _ = await envs.reset(seed=9)
        task = asyncio.ensure_future(envs.reset(seed=9))
        await asyncio.sleep(0)
        os.kill(envs.workers[0].pid, signal.SIGKILL)
        assert (await task).obs.tolist() == expected.tolist()


async def test_the_budget_ends_in_an_error_for_good():
    async with counters(restart=RestartPolicy(max_restarts=1, within_s=1000)) as envs:
        await envs.reset(seed=1)
        await envs.step([0, KILL, 0, 0])
        await envs.step([0] * 4)
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.step([0, KILL, 0, 0])
        assert caught.value.running == caught.value.slot == 1 and caught.value.slots == (0, 1)
        assert caught.value.__notes__ == ["It is not restarted any more: 1 restart in 1000 s."]
        assert caught.value.partial.obs[2:, 1].tolist() == [3, 3]
        with pytest.raises(aioenv.WorkerDied):
            await envs.step([0] * 4)
        assert [w.state for w in envs.workers] == ["dead", "ready"]
        envs.send([0, 0], [2, 3])
        assert (await envs.recv(2)).obs[:, 1].tolist() == [4, 4]


async def test_every_step_after_the_budget_tells_that_it_is_spent():
    async with counters(restart=RestartPolicy(max_restarts=1)) as envs:
        await envs.reset(seed=1)
        await envs.step([KILL, 0, 0, 0])
        await died(envs, 0)
        for _ in range(2):
            with pytest.raises(aioenv.WorkerDied) as caught:
                await envs.step([0] * 4)
            assert caught.value.__notes__ == ["It is not restarted any more: 1 restart in 60 s."]


async def test_a_worker_that_does_not_come_up_again_ends_for_good(tmp_path):
    gate = tmp_path / "gate"
    gate.touch()

    def make():
        if not gate.exists():
            raise RuntimeError("the gate is gone")
        return Counter()

    policy = RestartPolicy(max_restarts=3, backoff_s=0.01)
    async with aioenv.AsyncVectorEnv([make] * 2, num_workers=2, restart=policy) as envs:
        await envs.reset()
        gate.unlink()
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.step([KILL, 0])
        assert isinstance(caught.value.__cause__, aioenv.WorkerStartError)
        assert "the gate is gone" in str(caught.value.__cause__)


async def test_slots_that_hang_are_named_and_their_workers_restarted():
    async with counters(timeout_s=0.3, on_timeout="restart", restart=RestartPolicy(max_restarts=2)) as envs:
        await envs.reset(seed=1)
        obs, _, _, truncated, _ = await envs.step([0, HANG, 0, 0], timeout_s=0.3)
        assert truncated.tolist() == [True, True, False, False] and obs[:, 1].tolist() == [0, 0, 1, 1]
        assert (await envs.step([0] * 4)).obs[:, 1].tolist() == [0, 0, 2, 2]


async def test_a_worker_that_takes_its_time_to_come_back_is_waited_for():
    """Its start has a limit of its own: the timeout is for replies."""
    async with counters(timeout_s=0.2, on_timeout="restart", restart=RestartPolicy(backoff_s=1.0)) as envs:
        await envs.reset(seed=1)
        await envs.step([0, KILL, 0, 0])  # the first restart does not wait, the second one does
        await envs.step([0] * 4)
        obs, _, _, truncated, _ = await envs.step([0, HANG, 0, 0])
        assert truncated.tolist() == [True, True, False, False] and obs[:, 1].tolist() == [0, 0, 3, 3]


async def test_a_timeout_names_the_workers_being_restarted():
    async with counters(restart=RestartPolicy(backoff_s=1.0)) as envs:
        await envs.reset(seed=1)
        await envs.step([0, 0, 0, KILL])
        await envs.step([0] * 4)
        with pytest.raises(
            aioenv.StepTimeout, match=r"slots \[2, 3\] \(whose worker is being started again\)"
        ) as caught:
            await envs.step([0, 0, 0, KILL], timeout_s=0.3)
        assert caught.value.slots == (2, 3) and caught.value.running == ()
        ready = await envs.recv(4)
        assert ready.slots.tolist() == [0, 1, 2, 3] and ready.truncated.tolist() == [False, False, True, True]


async def test_slots_that_hang_are_named_and_their_workers_killed():
    async with counters(timeout_s=10, on_timeout="kill") as envs:
        await envs.reset(seed=1)
        with pytest.raises(aioenv.WorkerDied, match=r"no reply within timeout_s=0.2 while it ran slot 1") as caught:
            await envs.step([0, HANG, 0, 0], timeout_s=0.2)
        assert caught.value.slot == 1 and caught.value.slots == (0, 1)
        assert caught.value.partial.obs[2:, 1].tolist() == [1, 1]
        assert [w.state for w in envs.workers] == ["dead", "ready"], "killed for good, whatever the restart policy"


async def test_a_timeout_names_the_slot_and_gives_the_others_results():
    async with counters(restart=None) as envs:
        await envs.reset(seed=1)
        with pytest.raises(aioenv.StepTimeout, match=r"slots \[2, 3\] \(running just now: \[3\]\)") as caught:
            await envs.step([0, 0, 0, HANG], timeout_s=0.3)
        assert caught.value.slots == (2, 3) and caught.value.running == (3,)
        assert caught.value.partial.obs[:, 1].tolist() == [1, 1, 0, 0]
        assert caught.value.partial.reward.tolist() == [1, 1, 0, 0]
        assert [w.state for w in envs.workers] == ["ready", "draining"]
        ready = await envs.recv(2)
        assert ready.slots.tolist() == [0, 1] and ready.obs[:, 1].tolist() == [1, 1], "nothing is lost"


async def test_a_step_cancelled_in_a_restart_is_there_for_recv():
    async with counters() as envs:
        await envs.reset(seed=1)
        task = asyncio.ensure_future(envs.step([0, 0, 0, KILL]))
        while envs.workers[1].state not in ("dead", "restarting"):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ready = await envs.recv(4)
        assert ready.obs[:, 1].tolist() == [1, 1, 0, 0] and ready.truncated.tolist() == [False, False, True, True]
        assert (await envs.step([0] * 4)).obs[:, 1].tolist() == [2, 2, 0, 0]


async def test_send_and_recv_go_through_a_restart():
    async with counters() as envs:
        await envs.reset(seed=1)
        envs.send([0, KILL], [0, 2])
        ready = await envs.recv(2)
        assert ready.slots.tolist() == [0, 2] and ready.truncated.tolist() == [False, True]
        envs.send([0, 0, 0, 0])
        ready = await envs.recv(4)
        assert ready.truncated.tolist() == [False, False, False, True], "slot 3 was not in flight, and says so now"
        assert ready.obs[:, 1].tolist() == [2, 1, 0, 0]


async def test_failed_slots_stay_failed():
    async with counters() as envs:
        await envs.reset(seed=1)
        with pytest.raises(aioenv.EnvError):
            await envs.step([FAIL, 0, 0, 0])
        await died(envs, 0)
        with pytest.raises(aioenv.EnvError, match=r"slots \[0\] have failed"):
            await envs.step([0] * 4)
        await envs.reset(options={"reset_mask": np.array([True, False, False, False])})
        assert (await envs.step([0] * 4)).truncated.tolist() == [False, True, False, False]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("resume", [False, True])
async def test_a_failed_slot_shows_its_last_observation_also_after_a_restart(transport, resume):
    policy = RestartPolicy(backoff_s=0.01, resume=resume)
    envs = [Walker, Walker] if resume else [Counter, Counter]
    async with aioenv.AsyncVectorEnv(envs, num_workers=1, transport=transport, restart=policy) as envs:
        await envs.reset(seed=1)
        for _ in range(3):
            last = (await envs.step([0, 0])).obs
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.step([0, FAIL])
        assert np.array_equal(caught.value.partial.obs[1], last[1])
        await died(envs, 0)
        for seed in 5, 6, 7:  # results take turns in memory
            result = await envs.reset(seed=seed, options={"reset_mask": np.array([True, False])})
            assert np.array_equal(result.obs[1], last[1])
        with pytest.raises(aioenv.EnvError, match=r"slots \[1\] have failed"):
            await envs.step([0, 0])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("resume", [False, True])
async def test_a_slot_in_a_set_state_shows_its_last_observation_also_after_a_restart(transport, resume):
    policy = RestartPolicy(backoff_s=0.01, resume=resume)
    async with aioenv.AsyncVectorEnv([Walker] * 3, num_workers=1, transport=transport, restart=policy) as envs:
        await envs.reset(seed=1)
        states = await envs.get_state([0, 1])
        last = (await envs.step([0, 0, 0])).obs
        await envs.set_state(states, [0, 1])
        await died(envs, 0)
        for seed in 5, 6, 7:  # results take turns in memory
            result = await envs.reset(seed=seed, options={"reset_mask": np.array([False, False, True])})
            assert np.array_equal(result.obs[:2], last[:2])
        envs.pause([0])
        result = await envs.step([0, 0, 0])
        assert np.array_equal(result.obs[0], last[0])
        assert result.truncated.tolist() == [False, not resume, False]


async def test_calls_wait_for_the_restart():
    async with counters() as envs:
        await envs.reset(seed=1)
        await died(envs, 1)
        assert len(await envs.call("get_wrapper_attr", "action_space")) == 4


async def test_close_does_not_wait_for_a_restart():
    envs = await counters()
    await envs.reset(seed=1)
    task = asyncio.ensure_future(envs.step([0, 0, 0, KILL]))
    while envs.workers[1].state not in ("dead", "restarting"):
        await asyncio.sleep(0)
    await envs.close()
    with pytest.raises(aioenv.ClosedError):
        await task


@pytest.mark.parametrize("when", ["dead", "restarting"])
async def test_what_is_forgotten_in_a_restart_leaves_no_process(way, when):
    envs = await counters(restart=RestartPolicy(backoff_s=0.2))
    await envs.reset(seed=1)
    if when == "dead":  # the second restart is the first one that waits
        await envs.step([KILL, 0, 0, 0])
    await died(envs, 0)
    while envs.workers[0].state != when:
        await asyncio.sleep(0)
    workers = [member.worker for member in envs._backend.worker_pool.members]
    (restart,) = envs._backend.restarter._tasks.values()
    with pytest.warns(ResourceWarning, match="unclosed"):
        del envs
        gc.collect()
    async with asyncio.timeout(30):
        await restart
        while any(worker.state.value != "dead" for worker in workers):  # the other one had been up
            await asyncio.sleep(0)


async def test_a_state_that_is_set_after_a_restart_has_no_seed_of_the_restart():
    async with aioenv.AsyncVectorEnv([Walker] * 2, num_workers=1, restart=RestartPolicy()) as envs:
        await envs.reset(seed=5)
        states = await envs.get_state()
        assert (await envs.step([0, KILL])).truncated.all()
        await envs.set_state(states[:1], [0])
        await envs.step([END, 0])
        seeds = (await envs.step([0, END])).info["seed"]
        assert seeds[0] == -1, "its generator goes on"
        assert (await envs.step([0, 0])).info["seed"][1] == -1, "one reset had the seed"


async def test_why_a_worker_was_killed_is_not_said_of_its_next_process():
    async with counters(timeout_s=10, on_timeout="restart", restart=RestartPolicy(max_restarts=1)) as envs:
        await envs.reset(seed=1)
        assert (await envs.step([0, HANG, 0, 0], timeout_s=0.2)).truncated.any()
        await envs.step([0] * 4)
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.step([0, KILL, 0, 0])
        assert caught.value.returncode == -signal.SIGKILL and "timeout" not in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"max_restarts": 0}, "max_restarts"), ({"within_s": 0}, "within_s"), ({"backoff_s": -1}, "backoff_s")],
)
async def test_policies_are_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RestartPolicy(**kwargs)


async def test_on_timeout_is_checked():
    with pytest.raises(ValueError, match="on_timeout: expected one of 'raise', 'kill', 'restart'"):
        counters(on_timeout="panic")
    with pytest.raises(ValueError, match="takes a policy"):
        counters(on_timeout="restart", restart=None)


async def test_a_budget_fills_again_with_time():
    now = [0.0]
    budget = RestartBudget(RestartPolicy(max_restarts=3, within_s=60, backoff_s=1.0), lambda: now[0])
    assert [budget.next_delay() for _ in range(4)] == [0.0, 1.0, 2.0, None]
    now[0] = 61.0
    assert budget.next_delay() == 0.0


async def test_render_workers_are_restarted_and_draw_again():
    config = aioenv.RenderConfig(32, 32, quality="fast", workers=2)
    policy = RestartPolicy(max_restarts=1)
    async with aioenv.make_vec("HalfCheetah-v5", 2, num_workers=1, render=config, restart=policy) as envs:
        await envs.reset(seed=1)
        expected = await envs.render()
        pool = envs._session._pool
        for again in (True, False):
            os.kill(pool.pids[0], signal.SIGKILL)
            await envs.reset(seed=1)
            if again:
                assert (await envs.render() == expected).all()
            else:
                with pytest.raises(aioenv.RenderError, match=r"render worker 0.*SIGKILL"):
                    await envs.render()


async def test_who_owes_nothing_to_the_one_that_waits_is_not_killed():
    async with counters(timeout_s=0.2, on_timeout="kill") as envs:
        await envs.reset(seed=1)
        envs.send([HANG], [2])
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.step_at(0, HANG)
        assert caught.value.slots == (0,)
        assert [w.state for w in envs.workers] == ["dead", "busy"]


class Calls(Counter):
    def read(self, path):
        with open(path) as gate:  # a fifo: blocks until the test opens its other end
            return gate.read()


async def test_recv_kills_no_worker_that_has_only_a_call_to_answer(tmp_path):
    os.mkfifo(gate := tmp_path / "gate")
    async with aioenv.AsyncVectorEnv([Calls] * 2, num_workers=2, timeout_s=0.2, on_timeout="kill") as envs:
        await envs.reset(seed=1, timeout_s=30)
        with pytest.raises(aioenv.StepTimeout, match=r"slots \[1\]"):
            await envs.call_at(1, "read", gate)
        envs.send([HANG], [0])
        with pytest.raises(aioenv.WorkerDied) as caught:
            await envs.recv()
        assert caught.value.slots == (0,)
        assert [w.state for w in envs.workers] == ["dead", "busy"]
        gate.write_text("")
        while envs.workers[1].state == "busy":
            await asyncio.sleep(0)
        assert envs.workers[1].state == "ready"


async def test_a_timeout_holds_where_a_late_step_is_to_be_dropped_first():
    async with counters(restart=None) as envs:
        await envs.reset(seed=1)
        for call in (envs.step, envs.step, envs.reset):
            with pytest.raises(aioenv.StepTimeout, match=r"slots \[2, 3\]") as caught:
                async with asyncio.timeout(20):
                    await (call([0, 0, 0, HANG], timeout_s=0.2) if call == envs.step else call(timeout_s=0.2))
        assert caught.value.partial is None, "what there is is of another step"
        envs.pause(0)
        with pytest.raises(aioenv.StepTimeout):
            async with asyncio.timeout(20):
                await envs.step([0] * 4, timeout_s=0.2)


async def test_a_call_does_not_wait_for_a_restart_for_longer_than_it_may():
    async with counters(timeout_s=0.3, restart=RestartPolicy(backoff_s=30.0)) as envs:
        await envs.reset(seed=1)
        await died(envs, 1)
        await envs.call("get_wrapper_attr", "action_space")  # the first restart does not wait, the second one does
        await died(envs, 1)
        with pytest.raises(aioenv.StepTimeout, match=r"call.* slots \[2, 3\] \(whose worker is being started again\)"):
            await envs.call("get_wrapper_attr", "action_space")
        assert len(await envs.call_at([0, 1], "get_wrapper_attr", "action_space")) == 2


class Stuck(Counter):
    """Its state can be set once the path is gone."""

    def __init__(self, path):
        self._path, self._t = path, 0

    def get_state(self):
        return {"t": np.int64(self._t)}

    def set_state(self, state):
        if self._path.exists():
            time.sleep(1000)
        self._t = int(state["t"])


async def test_envs_that_hang_where_they_are_resumed_are_given_up(tmp_path):
    path = tmp_path / "stuck"
    policy = RestartPolicy(max_restarts=1, resume=True)
    kwargs = {"restart": policy, "timeout_s": 0.3, "on_timeout": "restart", "start_timeout_s": 3.0}
    async with aioenv.AsyncVectorEnv([lambda: Stuck(path)] * 2, num_workers=2, **kwargs) as envs:
        await envs.reset(seed=1)
        await envs.step([0, 0])
        path.touch()
        with pytest.raises(aioenv.WorkerDied) as caught:
            async with asyncio.timeout(30):
                await envs.step([KILL, 0])
        assert "not restored within start_timeout_s=3.0" in str(caught.value.__cause__)
