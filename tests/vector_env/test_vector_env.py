"""AsyncVectorEnv: what it gives, what it refuses, and what happens when a step is cancelled, late or faulty."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import aioenv
from tests.kits.counter_kit import Counter, counters

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("way")]


async def test_results_unpack_as_gymnasiums():
    async with aioenv.AsyncVectorEnv(counters(3), num_workers=2) as envs:
        obs, info = await envs.reset(seed=[1, None, 3])
        assert obs.shape == (3, 2) and obs.dtype == np.float64
        assert info["seed"].tolist() == [1, None, 3] and info["_seed"].all()
        obs, reward, terminated, truncated, info = await envs.step([0, 0, 0])
        assert obs[:, 1].tolist() == [1, 1, 1]
        assert reward.dtype == np.float64 and terminated.dtype == truncated.dtype == np.bool_
        assert info["t"].tolist() == [1, 1, 1]
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        assert [w.slots for w in envs.workers] == [(0, 1), (2,)]
        assert all(w.state == "ready" for w in envs.workers)
    assert envs.closed and {w.state for w in envs.workers} == {"closed"}


async def test_bare_await_starts_and_attributes_wait_for_it():
    envs = aioenv.AsyncVectorEnv(counters(2))
    with pytest.raises(RuntimeError, match="start it first"):
        _ = envs.observation_space
    with pytest.raises(RuntimeError, match="start it first"):
        await envs.reset()
    assert await envs is envs
    assert await envs is envs  # again: nothing is started twice
    assert envs.single_action_space == spaces.Discrete(5)
    await envs.close()
    await envs.close()
    with pytest.raises(aioenv.ClosedError):
        await envs.reset()
    with pytest.raises(gym.error.ClosedEnvironmentError):
        await envs


async def test_arguments_are_checked_early():
    with pytest.raises(ValueError, match="at least one factory"):
        aioenv.AsyncVectorEnv([])
    with pytest.raises(TypeError, match=r"env_fns\[0\].*not the env itself"):
        aioenv.AsyncVectorEnv([Counter()])
    with pytest.raises(ValueError, match=r"fork.*refused"):
        aioenv.AsyncVectorEnv(counters(1), start="fork")
    with pytest.raises(ValueError, match="num_workers"):
        aioenv.AsyncVectorEnv(counters(1), num_workers=-1)
    with pytest.raises(ValueError, match="AutoresetMode"):
        aioenv.AsyncVectorEnv(counters(1), autoreset_mode="never")
    with pytest.raises(ValueError, match="observation_mode"):
        aioenv.AsyncVectorEnv(counters(1), observation_mode="other")
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"env_fns\[0\] can't be sent"):
        aioenv.AsyncVectorEnv([lambda: lock])
    with pytest.raises(gym.error.NameNotFound):
        aioenv.make_vec("NoSuchEnv-v0", 2)
    with pytest.raises(ValueError, match="num_envs"):
        aioenv.make_vec("CartPole-v1", 0)


async def test_wrong_actions_send_nothing():
    async with aioenv.make_vec("Pendulum-v1", 3, num_workers=2) as envs:
        await envs.reset(seed=0)
        for bad, message in [
            (np.zeros((2, 1), np.float32), r"expected shape \(3, 1\), got \(2, 1\)"),
            (np.zeros((3, 2), np.float32), r"expected shape \(3, 1\), got \(3, 2\)"),
            (np.zeros((3, 1), np.complex128), "expected dtype float32, got complex128"),
            ([[1], [2, 3], [4]], r"expected an array of shape \(3, 1\)"),
        ]:
            with pytest.raises(aioenv.ActionError, match=message):
                await envs.step(bad)
        await envs.step(np.zeros((3, 1), np.int64))  # casts


async def test_an_env_error_touches_its_slot_alone():
    async with aioenv.AsyncVectorEnv(counters(4), num_workers=2) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError, match=r"slot 1 .*KeyError: 'as asked'") as caught:
            await envs.step([0, Counter.RAISE, 0, 0])
        error = caught.value
        assert error.slot == 1 and error.pid == envs.workers[0].pid
        assert isinstance(error.__cause__, KeyError)
        assert "in step" in error.traceback and "as asked" in error.traceback
        assert error.partial.obs[[0, 2, 3], 1].tolist() == [1, 1, 1]
        assert error.partial.reward.tolist() == [1, 0, 1, 1]
        with pytest.raises(aioenv.EnvError, match=r"slots \[1\] have failed"):
            await envs.step([0] * 4)
        mask = np.array([False, True, False, False])
        obs, _ = await envs.reset(options={"reset_mask": mask})
        assert obs[:, 1].tolist() == [1, 0, 1, 1]
        obs, *_ = await envs.step([0] * 4)
        assert obs[:, 1].tolist() == [2, 1, 2, 2]
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.step([Counter.RAISE, 0, 0, Counter.RAISE])
        assert [e.slot for e in caught.value.errors] == [0, 3]


async def test_a_failed_slot_stays_failed_until_it_is_reset_itself():
    async with aioenv.AsyncVectorEnv(counters(3), num_workers=1) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.EnvError):
            await envs.step([0, Counter.RAISE, 0])
        await envs.reset(options={"reset_mask": np.array([True, False, False])})
        with pytest.raises(aioenv.EnvError, match=r"slots \[1\] have failed"):
            await envs.step([0, 0, 0])
        with pytest.raises(aioenv.EnvError, match=r"slots \[1\] have failed"):
            envs.send([0], [1])
        envs.send([0, 0], [0, 2])  # the others can be stepped
        await envs.recv(2)
        envs.send_reset([1])
        await envs.recv()
        await envs.step([0, 0, 0])


async def test_what_does_not_pickle_is_refused_and_nothing_is_stuck():
    async with aioenv.AsyncVectorEnv(counters(2), num_workers=2) as envs:
        for attempt in (envs.reset, envs.send_reset):
            with pytest.raises(TypeError, match="options: expected what can be pickled"):
                result = attempt(options={"lock": threading.Lock()})
                if asyncio.iscoroutine(result):
                    await result
        await envs.reset(seed=0)
        await envs.step([0, 0])


async def test_actions_may_be_changed_as_soon_as_they_are_sent():
    async with aioenv.AsyncVectorEnv(counters(2), num_workers=2) as envs:
        await envs.reset(seed=0)
        actions = np.zeros(2, np.int64)
        step = asyncio.ensure_future(envs.step(actions))
        await asyncio.sleep(0)
        actions[:] = Counter.RAISE
        assert (await step).reward.tolist() == [1, 1]


@pytest.mark.parametrize(("action", "how"), [(Counter.EXIT, "exited with code 7"), (Counter.KILL, "SIGKILL")])
async def test_a_dead_worker_is_named_at_once(action, how):
    async with aioenv.AsyncVectorEnv(counters(4), num_workers=2) as envs:
        await envs.reset(seed=0)
        pid = envs.workers[1].pid
        with pytest.raises(aioenv.WorkerDied, match=how) as caught:
            await envs.step([0, 0, action, 0])
        assert caught.value.slots == (2, 3) and caught.value.pid == pid
        assert caught.value.partial.obs[:2, 1].tolist() == [1, 1] and not caught.value.partial.obs[2:].any()
        if action == Counter.EXIT:
            assert caught.value.returncode == 7 and "about to exit" in caught.value.stderr
        with pytest.raises(aioenv.WorkerDied, match=how):
            await envs.step([0] * 4)
        envs.send([0, 0], [0, 1])  # the others go on
        ready = await envs.recv(2)
        assert ready.slots.tolist() == [0, 1] and ready.obs[:, 1].tolist() == [2, 2]


async def test_a_worker_killed_while_idle_is_told_before_anything_is_sent():
    async with aioenv.AsyncVectorEnv(counters(2), num_workers=2) as envs:
        await envs.reset(seed=0)
        os.kill(envs.workers[0].pid, signal.SIGKILL)
        while envs.workers[0].state != "dead":
            await asyncio.sleep(0)
        with pytest.raises(aioenv.WorkerDied, match="SIGKILL"):
            await envs.step([0, 0])
        envs.send([0], [1])
        assert (await envs.recv()).obs[0, 1] == 1


async def test_start_errors_carry_the_cause():
    def fails():
        raise RuntimeError("no such robot")

    envs = aioenv.AsyncVectorEnv([*counters(1), fails], num_workers=1)
    with pytest.raises(aioenv.WorkerStartError, match="slot 1: RuntimeError: no such robot") as caught:
        await envs
    assert caught.value.slots == (1,) and isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(aioenv.WorkerStartError, match=r"exited with code 3 while starting, at slot 2$"):
        await aioenv.AsyncVectorEnv([*counters(2), lambda: os._exit(3), *counters(1)], num_workers=2)


async def test_start_timeout_and_cancelled_start(gate):
    path, _ = gate

    def waits():
        with open(path) as handle:
            handle.read()

    with pytest.raises(aioenv.StartTimeout, match="start_timeout_s=1"):
        await aioenv.AsyncVectorEnv([waits], start_timeout_s=1)
    envs = aioenv.AsyncVectorEnv([waits])
    start = asyncio.ensure_future(envs._ensure_started())
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert envs.closed


async def test_space_mismatch_is_named():
    class Wide(Counter):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Box(-1, 1, (2,), np.float64)

    factories = [*counters(2), Wide]
    with pytest.raises(aioenv.SpaceMismatchError, match=r"observation_mode='different'.* Slot 2 has "):
        await aioenv.AsyncVectorEnv(factories, num_workers=3)
    async with aioenv.AsyncVectorEnv(factories, observation_mode="different") as envs:
        assert envs.observation_space.low[:, 0].tolist() == [-1e9, -1e9, -1]
    single = spaces.Box(-2e9, 2e9, (2,), np.float64)
    batch = spaces.Box(-2e9, 2e9, (3, 2), np.float64)
    async with aioenv.AsyncVectorEnv(factories, observation_mode=(batch, single)) as envs:
        assert (envs.observation_space, envs.single_observation_space) == (batch, single)
        assert (await envs.reset()).obs in batch
    with pytest.raises(aioenv.SpaceMismatchError, match=r"Slot 0 has .*\(2,\).* but observation_mode has .*\(3, 2\)"):
        await aioenv.AsyncVectorEnv(factories, observation_mode=(single, batch))
    with pytest.raises(TypeError, match="to be Spaces, got <class 'str'>"):
        aioenv.AsyncVectorEnv(factories, observation_mode=("same", single))


async def test_mismatched_actions_are_named():
    class Deft(Counter):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Discrete(6)

    with pytest.raises(aioenv.SpaceMismatchError, match=r"Slot 1 has Discrete\(6\), but slot 0 has Discrete\(5\)"):
        await aioenv.AsyncVectorEnv([Counter, Deft])


async def test_slots_are_checked():
    async with aioenv.AsyncVectorEnv(counters(3), num_workers=2) as envs:
        await envs.reset()
        for slots, message in (
            ([True, False, True], r"got booleans; use numpy.flatnonzero"),
            ([1, 1], r"one is named twice in \[1, 1\]"),
            ([], r"expected one or more slot numbers"),
            ([0.5], r"expected one or more slot numbers"),
            (1, r"expected one or more slot numbers, got 1"),
        ):
            with pytest.raises(ValueError, match=message):
                envs.send(np.zeros(np.size(slots), np.int64), slots)
        for slots in ([3], [-1]):
            with pytest.raises(IndexError, match="from 0 to 2"):
                envs.send([0], slots)
        envs.send([0], (2,))
        assert (await envs.recv()).slots.tolist() == [2]


async def test_timeout_loses_nothing(gate):
    path, open_gate = gate
    async with aioenv.AsyncVectorEnv(counters(2, gate=path), num_workers=2, timeout_s=0.2) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.StepTimeout, match=r"slots \[1\]"):
            await envs.step([0, Counter.WAIT])
        with pytest.raises(aioenv.PendingCallError):
            envs.send([0, 0])
        ready = await envs.recv()
        assert ready.slots.tolist() == [0] and ready.obs[0, 1] == 1
        await asyncio.get_running_loop().run_in_executor(None, open_gate)
        ready = await envs.recv()
        assert ready.slots.tolist() == [1] and ready.obs[0, 1] == 1
        obs, *_ = await envs.step([0, 0])
        assert obs[:, 1].tolist() == [2, 2]


async def test_a_cancelled_step_is_dropped_by_the_next_one(gate, caplog):
    path, open_gate = gate
    async with aioenv.AsyncVectorEnv(counters(2, gate=path, length=2), num_workers=2) as envs:
        await envs.reset(seed=0)
        await envs.step([0, 0])
        step = asyncio.ensure_future(envs.step([0, Counter.WAIT]))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await asyncio.get_running_loop().run_in_executor(None, open_gate)
        obs, reward, *_ = await envs.step([0, 0])  # the episodes ended in the dropped step: this one resets
        assert obs[:, 1].tolist() == [0, 0] and reward.tolist() == [0, 0]
        assert "slots [0, 1]" in caplog.text
        obs, *_ = await envs.step([0, 0])
        assert obs[:, 1].tolist() == [1, 1]


async def test_a_step_cancelled_before_it_began_did_nothing():
    async with aioenv.AsyncVectorEnv(counters(2)) as envs:
        await envs.reset(seed=0)
        step = asyncio.ensure_future(envs.step([0, 0]))
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        obs, *_ = await envs.step([0, 0])
        assert obs[:, 1].tolist() == [1, 1]


async def test_every_cancellation_point_keeps_replies_in_order():
    """Cancel after 0, 1, 2, … turns of the loop; whatever became of the step, the count tells."""
    async with aioenv.AsyncVectorEnv(counters(3, length=10**9), num_workers=3) as envs:
        await envs.reset(seed=0)
        for turns in range(60):
            step = asyncio.ensure_future(envs.step([0, 0, 0]))
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            before = None
            try:
                before = (await step).obs[0, 1]
            except asyncio.CancelledError:
                pass
            obs, reward, *_ = await envs.step([0, 0, 0])
            assert obs[:, 1].tolist() == [obs[0, 1]] * 3 == reward.tolist()
            assert before is None or obs[0, 1] == before + 1


async def test_send_recv_and_ready():
    async with aioenv.AsyncVectorEnv(counters(4, length=3), num_workers=2) as envs:
        with pytest.raises(aioenv.NoAsyncCallError):
            await envs.recv()
        envs.send_reset(seed=7)
        with pytest.raises(gym.error.AlreadyPendingCallError):
            envs.send([0], [2])
        first = await envs.recv(4)
        assert first.slots.tolist() == [0, 1, 2, 3] and first.reward.tolist() == [0] * 4
        assert first.info["seed"].tolist() == [7, 8, 9, 10]
        envs.send([0, 0, 0], [3, 0, 2])
        with pytest.raises(aioenv.PendingCallError):
            await envs.step([0] * 4)
        with pytest.raises(aioenv.PendingCallError):
            await envs.call("double", 1)
        two = await envs.recv(3, max_slots=2)
        assert len(two.slots) == 2
        one = await envs.recv()
        assert sorted([*two.slots, *one.slots]) == [0, 2, 3]
        assert one.info["t"].tolist() == [1]
        counts = np.zeros(4, int)
        envs.send([0] * 4)
        async for ready in envs.ready(min_slots=2):
            assert (np.diff(ready.slots) > 0).all()
            counts[ready.slots] += 1
            again = ready.slots[counts[ready.slots] < 5]
            if len(again):
                envs.send([0] * len(again), again)
        assert counts.tolist() == [5] * 4
        assert not envs.outstanding


async def test_recv_deadline(gate):
    path, open_gate = gate
    async with aioenv.AsyncVectorEnv(counters(2, gate=path), num_workers=2) as envs:
        await envs.reset(seed=0)
        envs.send([Counter.WAIT], [0])
        ready = await envs.recv(2, deadline_s=0.05)
        assert len(ready.slots) == 0 and ready.obs.shape == (0, 2)
        envs.send([0], [1])
        both = asyncio.create_task(envs.recv(2, deadline_s=60))
        await asyncio.get_running_loop().run_in_executor(None, open_gate)
        assert (await both).slots.tolist() == [0, 1]
        assert not envs.outstanding


async def test_calls():
    async with aioenv.AsyncVectorEnv(counters(3), num_workers=2) as envs:
        assert await envs.call("double", 4, plus=1) == (9, 9, 9)
        assert await envs.call_at(2, "double", 5) == 10
        assert await envs.get_attr("length") == (5, 5, 5)
        await envs.set_attr("length", [1, 2, 3])
        assert await envs.get_attr("length") == (1, 2, 3)
        await envs.set_attr("length", 9)
        assert await envs.call("length") == (9, 9, 9)
        with pytest.raises(ValueError, match="length equal to the number"):
            await envs.set_attr("length", [1])
        with pytest.raises(aioenv.EnvError, match="no_such"):
            await envs.call("no_such")
        with pytest.raises(IndexError):
            await envs.call_at(3, "double", 1)


async def test_disabled_autoreset_wants_a_reset():
    async with aioenv.AsyncVectorEnv(counters(2, length=1), autoreset_mode="Disabled") as envs:
        await envs.reset(seed=0)
        _, _, terminated, *_ = await envs.step([0, 0])
        assert terminated.all()
        with pytest.raises(aioenv.ResetNeededError, match=r"\[0, 1\]"):
            await envs.step([0, 0])
        await envs.reset(options={"reset_mask": np.array([True, False])})
        with pytest.raises(aioenv.ResetNeededError, match=r"\[1\]"):
            await envs.step([0, 0])


async def test_copy_false_gives_views_that_last_until_the_second_next_step():
    async with aioenv.AsyncVectorEnv(counters(2), copy=False) as envs:
        await envs.reset(seed=0)
        first = (await envs.step([0, 0])).obs
        second = (await envs.step([0, 0])).obs
        assert first[:, 1].tolist() == [1, 1] and second[:, 1].tolist() == [2, 2]
        third = (await envs.step([0, 0])).obs
        assert third is first and first[:, 1].tolist() == [3, 3]
        step = asyncio.ensure_future(envs.step([0, 0]))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        late = await envs.recv(2)
        assert late.obs[:, 1].tolist() == [4, 4]
        assert third[:, 1].tolist() == [3, 3]


async def test_close_ends_what_is_in_flight(gate):
    path, _ = gate
    async with aioenv.AsyncVectorEnv(counters(2, gate=path), num_workers=2) as envs:
        await envs.reset(seed=0)
        step = asyncio.ensure_future(envs.step([0, Counter.WAIT]))
        await asyncio.sleep(0)
    with pytest.raises(aioenv.ClosedError):
        await step


async def test_belongs_to_its_loop():
    async with aioenv.AsyncVectorEnv(counters(1)) as envs:

        def elsewhere():
            async def main():
                await envs.reset()

            asyncio.run(main())

        with pytest.raises(aioenv.LoopError, match="loop"):
            await asyncio.get_running_loop().run_in_executor(None, elsewhere)


async def test_the_parents_registry_reaches_the_workers():
    gym.register("AioenvCounter-v0", entry_point=Counter, kwargs={"length": 2})
    try:
        async with aioenv.make_vec("AioenvCounter-v0", 2) as envs:
            assert (await envs.call("double", 1)) == (2, 2)
            assert envs.spec.id == "AioenvCounter-v0"
        async with aioenv.AsyncVectorEnv([lambda: gym.make("AioenvCounter-v0", length=3)]) as envs:
            assert await envs.get_attr("length") == (3,)
    finally:
        del gym.registry["AioenvCounter-v0"]


async def test_worker_environment_and_wrappers():
    def read():
        env = Counter()
        env.variables = {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MY_OWN")}
        return env

    wrappers = [gym.wrappers.RecordEpisodeStatistics, lambda env: gym.wrappers.TimeLimit(env, 2)]
    async with aioenv.make_vec(read, 2, wrappers=wrappers, worker_env={"MY_OWN": "1"}) as envs:
        expected = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MY_OWN": "1"}
        assert await envs.get_attr("variables") == (expected, expected)
        await envs.reset(seed=0)
        await envs.step([0, 0])
        _, _, _, truncated, _ = await envs.step([0, 0])
        assert truncated.all()
