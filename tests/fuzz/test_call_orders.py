"""Orders of calls that random operations (`test_fuzz.py`) have found something in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

import aioenv
from aioenv.core.slots import SlotState
from tests.fuzz.fuzz_envs import RAISE, SLOW, Chain, Chains, PatientChains, mix


def native(n: int = 3, cls: type = PatientChains, mode: str = "NextStep", **kwargs):
    return aioenv.NativeVectorEnv(lambda num_envs: cls(num_envs, mode), n, **kwargs)


@pytest.mark.asyncio
async def test_a_recv_ends_when_a_step_has_taken_all():
    for make in (lambda: aioenv.AsyncVectorEnv([Chain] * 2, debug=True), lambda: native(2, run_in="thread")):
        async with make() as envs:
            await envs.reset(seed=0)
            for step in (lambda: envs.step(np.full(2, SLOW)), lambda: envs.step_at(0, SLOW)):
                stepping, receiving = asyncio.create_task(step()), asyncio.create_task(envs.recv())
                async with asyncio.timeout(5):
                    await stepping
                    assert len((await receiving).slots) == 0, "there is nothing left"


async def ready_slots(envs, count: int) -> None:
    while envs._backend.table.count(SlotState.READY) < count:
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_recv_goes_on_with_less_when_another_has_taken_some():
    async with aioenv.AsyncVectorEnv([Chain] * 2, num_workers=2) as envs:
        await envs.reset(seed=0)
        late = envs.workers[1].pid
        os.kill(late, signal.SIGSTOP)
        envs.send([0, 0])
        both = asyncio.create_task(envs.recv(2))
        await ready_slots(envs, 1)
        assert (await envs.recv()).slots.tolist() == [0]
        os.kill(late, signal.SIGCONT)
        async with asyncio.timeout(30):
            assert (await both).slots.tolist() == [1], "there is no other to wait for"


@pytest.mark.asyncio
async def test_a_recv_goes_on_with_less_when_a_step_that_is_refused_has_dropped_some():
    async with aioenv.AsyncVectorEnv([Chain] * 2, num_workers=2) as envs:
        await envs.reset(seed=0)
        first, late = (worker.pid for worker in envs.workers)
        os.kill(late, signal.SIGSTOP)
        stepping = asyncio.create_task(envs.step([0, 0]))
        while not envs.outstanding:
            await asyncio.sleep(0)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        assert (await envs.recv()).slots.tolist() == [0]
        os.kill(first, signal.SIGSTOP)
        envs.send([0], [0])
        both = asyncio.create_task(envs.recv(2))
        refused = asyncio.create_task(envs.step([0, 0]))
        await asyncio.sleep(0)
        os.kill(late, signal.SIGCONT)
        with pytest.raises(aioenv.PendingCallError):  # slot 0 is in flight; what was cancelled of slot 1 is dropped
            await refused
        os.kill(first, signal.SIGCONT)
        async with asyncio.timeout(30):
            assert (await both).slots.tolist() == [0], "there is no other to wait for"


@pytest.mark.asyncio
async def test_a_step_is_abandoned_while_another_drains():
    """It is waited for, too: what it is read into must not be used again before that."""
    for make in (lambda: aioenv.AsyncVectorEnv([Chain] * 2, debug=True), lambda: native(2, run_in="thread")):
        async with make() as envs:
            await envs.reset(seed=0)
            first = asyncio.create_task(envs.step([SLOW, SLOW]))
            while not envs.outstanding:
                await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            draining = asyncio.create_task(envs.step([1, 1]))
            while (envs._backend.table.count(SlotState.READY)) < 2:
                await asyncio.sleep(0)
            await envs.recv(2)  # now, before the other task knows that there is nothing to wait for
            second = envs.step_at(0, SLOW)
            second.send(None)
            with pytest.raises(asyncio.CancelledError):
                second.throw(asyncio.CancelledError())
            result = await draining
            assert result.obs["count"][:, 1].tolist() == [4, 3], "each reset, stepped by all three"


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["shared", "frames"])
async def test_two_requests_in_one_read(transport):
    """What comes second, into memory that is the first one's guess, must not be taken for the first one's."""
    async with aioenv.AsyncVectorEnv([Chain] * 2, num_workers=1, transport=transport) as envs:
        await envs.reset(seed=0)
        for count in range(2, 5):
            os.kill(envs.workers[0].pid, signal.SIGSTOP)
            envs.pause(0)
            looking = asyncio.create_task(envs.step([0, 0]))  # it asks for the last observation of slot 0 first
            while envs.workers[0].state == "ready":
                await asyncio.sleep(0)
            looking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await looking
            envs.resume()
            stepping = asyncio.create_task(envs.step([0, 0]))
            while not envs.outstanding:
                await asyncio.sleep(0)
            os.kill(envs.workers[0].pid, signal.SIGCONT)
            assert (await stepping).obs["count"][:, 1].tolist() == [count, count]


@pytest.mark.asyncio
async def test_two_tasks_step_while_slots_are_paused():
    async with aioenv.AsyncVectorEnv([Chain] * 3, debug=True) as envs:
        await envs.reset(seed=0)
        envs.pause(2)
        stepping = asyncio.create_task(envs.step([SLOW] * 3))
        while not envs.outstanding:
            await asyncio.sleep(0)
        envs.pause(1)
        with pytest.raises(aioenv.PendingCallError):
            await envs.step([0] * 3)
        assert (await stepping).info["_active"].tolist() == [True, True, False]


@pytest.mark.asyncio
async def test_a_result_from_before_set_state_says_nothing_of_the_slot():
    async with aioenv.AsyncVectorEnv([Chain] * 2, debug=True, autoreset_mode=AutoresetMode.DISABLED) as envs:
        short = next(seed for seed in range(99) if mix(seed) % 6 == 0)  # an episode of one step
        long = next(seed for seed in range(99) if mix(seed) % 6 == 5)
        await envs.reset(seed=[long, long])
        states = await envs.get_state()
        await envs.reset(seed=[short, long])
        envs.send([0, RAISE])
        while envs.workers[0].state != "ready":
            await asyncio.sleep(0.001)
        await envs.set_state(states)
        with pytest.raises(aioenv.EnvError) as caught:
            await envs.recv(2)
        assert caught.value.slots == (1,)
        assert caught.value.partial.terminated[0] | caught.value.partial.truncated[0]
        await envs.step(np.zeros(2, int))
        with pytest.raises(aioenv.EnvError):  # the next one counts again
            await envs.step([0, RAISE])
        with pytest.raises(aioenv.EnvError, match="must be reset"):
            await envs.step([0, 0])


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [0, 1])
async def test_a_failure_from_before_set_state_says_nothing_of_later_ones(num_workers):
    async with native(2, num_workers=num_workers) as envs:
        await envs.reset(seed=0)
        states = await envs.get_state()
        envs.send([0, RAISE])
        while envs._backend.table.count(SlotState.READY) < 2:
            await asyncio.sleep(0)
        await envs.set_state(states)
        with pytest.raises(aioenv.EnvError):
            await envs.recv(2)
        with pytest.raises(aioenv.EnvError, match="Boom"):  # it is stepped, and this one counts
            await envs.step([0, RAISE])
        with pytest.raises(aioenv.EnvError, match="must be reset"):
            await envs.step([0, 0])


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [lambda: aioenv.AsyncVectorEnv([Chain] * 2, num_workers=1, autoreset_mode="Disabled"),
                                  lambda: native(2, mode="Disabled", run_in="thread")])  # fmt: skip
@pytest.mark.parametrize("action", [0, RAISE])
async def test_what_is_dropped_counts_all_the_same(make, action):
    """The episode that ended in it is over, and the slot that raised has failed."""
    short = next(seed for seed in range(99) if mix(seed) % 6 == 0)  # an episode of one step
    long = next(seed for seed in range(99) if mix(seed) % 6 == 5)
    async with make() as envs:
        await envs.reset(seed=[long, long if action == RAISE else short])
        stepping = asyncio.create_task(envs.step([0, action]))
        while not envs.outstanding:
            await asyncio.sleep(0)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        refused = aioenv.EnvError if action == RAISE else aioenv.ResetNeededError
        with pytest.raises(refused, match=r"must be reset|reset them first"):
            await envs.step([0, 0])
        await envs.reset(seed=[long, long])
        await envs.step([0, 0])


@pytest.mark.asyncio
@pytest.mark.parametrize("num_workers", [0, 1])
async def test_part_of_an_error_is_taken(num_workers):
    """An error of a whole vector env, taken bit by bit, does not fail a slot that was reset meanwhile."""
    async with native(num_workers=num_workers) as envs:
        await envs.reset(seed=0)
        envs.send([0, RAISE, 0])
        with pytest.raises(aioenv.EnvError):
            await envs.recv(3, max_slots=1)
        envs.send_reset([0])
        while envs.outstanding:
            try:
                await envs.recv(3)
            except aioenv.EnvError as error:
                assert num_workers, f"the same error twice: {error!r}"
        await envs.step_at(0, 0)


@pytest.mark.asyncio
async def test_a_reset_that_raises_fails_the_slots_that_were_asked():
    for num_workers in (0, 1):
        async with native(num_workers=num_workers) as envs:
            await envs.reset(seed=0)
            with pytest.raises(aioenv.EnvError) as caught:
                await envs.reset_at(1, options={"raise": 1})
            assert caught.value.slots == (1,)
            await envs.step_at(0, 0)


@pytest.mark.asyncio
async def test_no_slot_is_paused():
    for cls in (Chains, PatientChains):
        async with native(2, cls) as envs:
            await envs.reset(seed=0)
            envs.pause(np.flatnonzero([False, False]))
            envs.resume([])
            assert "_active" not in (await envs.step([0, 0])).info
    async with aioenv.AsyncVectorEnv([Chain] * 2, debug=True) as envs:
        await envs.reset(seed=0)
        envs.pause([])
        assert envs._backend.table.paused is None, "steps don't take the slower way"


@pytest.mark.asyncio
async def test_all_slots_are_paused_and_the_step_is_cancelled():
    async with native(2, run_in="thread") as envs:
        await envs.reset(seed=0)
        envs.pause([0, 1])
        task = asyncio.ensure_future(envs.step([0, 0]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while envs._inprocess._env.thread.jobs:
            await asyncio.sleep(0)
        assert not envs.outstanding
        with pytest.raises(aioenv.NoAsyncCallError):
            await envs.recv()


@pytest.mark.asyncio
async def test_a_masked_reset_of_paused_slots_alone_is_refused_like_any_other():
    for num_workers in (0, 1):
        async with native(2, num_workers=num_workers) as envs:
            await envs.reset(seed=0)
            envs.send([0, 0])
            envs.pause(1)
            with pytest.raises(aioenv.PendingCallError):
                await envs.reset(options={"reset_mask": np.array([False, True])})


class Mixed(VectorEnv):
    """Infos whose types depend on the step, and which some slots alone have."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012  # Gymnasium's own convention
    single_observation_space = spaces.Box(0, 9, (), np.float64)
    single_action_space = spaces.Discrete(4)

    def __init__(self, num_envs, mode):
        self.num_envs = num_envs
        self.observation_space = spaces.Box(0, 9, (num_envs,), np.float64)
        self.action_space = spaces.MultiDiscrete([4] * num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.num_envs), {}

    def step(self, actions):
        return self.step_some(actions, range(self.num_envs))

    def step_some(self, actions, slots):
        info = {}
        for slot in slots:
            value = [1, 2.5, np.arange(2), None][actions[slot]]
            info = self._add_info(info, {"value": value, "only": {slot: slot}} if value is not None else {}, slot)
        none = np.zeros(self.num_envs)
        return none, none, none.astype(bool), none.astype(bool), info


@pytest.mark.asyncio
async def test_infos_of_several_requests_in_one_recv():
    async with native(4, Mixed, run_in="thread") as envs:
        await envs.reset()
        for slot in range(4):
            envs.send([slot], [slot])
        info = (await envs.recv(4)).info
        assert info["_value"].tolist() == [True, True, True, False]
        assert list(map(str, info["value"])) == ["1.0", "2.5", "[0 1]", "0.0"]
        envs.send([0, 1], [0, 1])
        info = (await envs.recv(2)).info
        assert info["value"].tolist() in ([1, 2.5], [1, 2])  # one request: the first value decides, as in Gymnasium
        envs.send([1, 3], [0, 1])
        first = await envs.recv(2, 1)
        assert first.info["value"].tolist() == [2.5]
        assert (await envs.recv()).info == {}, "the other slot has none"


class Random(gym.Env):
    """Observes its generator; raises if told."""

    observation_space = spaces.Box(0, 1, (), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(), {}

    def step(self, action):
        if action:
            raise ValueError("as told")
        return self.np_random.random(), 0.0, False, False, {}

    def get_state(self):
        return self.np_random.bit_generator.state

    def set_state(self, state):
        self.np_random.bit_generator.state = state


async def fail_and_die(resume: bool, kill: bool) -> np.ndarray:
    """The first observation after a slot has failed, then its worker has died, then it was reset without a seed."""
    policy = aioenv.RestartPolicy(resume=resume, backoff_s=0.001)
    async with aioenv.AsyncVectorEnv([Random] * 2, num_workers=1, restart=policy) as envs:
        await envs.reset(seed=3)
        with pytest.raises(aioenv.EnvError):
            await envs.step([1, 0])
        if kill:
            (worker,) = envs.workers
            os.kill(worker.pid, signal.SIGKILL)
            while envs.workers[0].pid == worker.pid:
                await asyncio.sleep(0.001)
        return (await envs.reset_at(0)).obs


@pytest.mark.asyncio
async def test_a_failed_slot_whose_worker_dies_goes_on_with_its_generator():
    assert await fail_and_die(True, True) == await fail_and_die(True, False)


@pytest.mark.asyncio
async def test_a_failed_slot_whose_worker_dies_is_seeded_like_the_others():
    assert await fail_and_die(False, True) == await fail_and_die(False, True)


@pytest.mark.asyncio
async def test_a_rollout_times_out_after_a_slot_has_failed(tmp_path):
    """Slot 0, of the first group, raises; slot 1, of the second, then waits at a gate."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class Gated(Chain):
        def step(self, action):
            if action == SLOW:
                with open(gate) as file:
                    file.read()
            return super().step(action)

    async with aioenv.AsyncVectorEnv([Gated] * 2, num_workers=1, timeout_s=0.2) as envs:
        await envs.reset(seed=0)
        with pytest.raises(aioenv.StepTimeout) as caught:
            await envs.rollout(lambda obs, slots: np.array([[RAISE, SLOW][slots[0]]]), 2)
        assert caught.value.partial.reward.shape == (1, 2) and not caught.value.partial.valid.any()
        os.close(os.open(gate, os.O_WRONLY))
        with pytest.raises(aioenv.EnvError, match=r"slots \[0\] have failed"):
            await envs.step([0, 0])


@contextlib.asynccontextmanager
async def looking_rollout(make):
    """Envs, and a rollout of two steps that has only asked what they look like."""
    async with make() as envs:
        await envs.reset(seed=0)
        rollout = asyncio.create_task(envs.rollout(lambda obs: [0, 0], 2, 1))
        while not envs.outstanding:
            await asyncio.sleep(0)
        yield envs, rollout


over_workers_and_not = pytest.mark.parametrize(
    "make", [lambda: aioenv.AsyncVectorEnv([Chain] * 2), lambda: native(2, run_in="thread")], ids=["workers", "native"]
)


@over_workers_and_not
@pytest.mark.asyncio
async def test_what_a_cancelled_rollout_has_only_looked_at_is_no_result(make):
    async with looking_rollout(make) as (envs, rollout):
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        if envs.outstanding:  # it may have come already
            assert len((await envs.recv(2)).slots) == 0
        assert not envs.outstanding
        assert (await envs.step([0, 0])).obs["count"][:, 1].tolist() == [2, 2]


@over_workers_and_not
@pytest.mark.asyncio
async def test_a_slot_is_paused_while_a_rollout_begins(make):
    """The rollout steps it all the same, and tells what it was like in the end, not in the beginning."""
    async with looking_rollout(make) as (envs, rolling):
        envs.pause(0)
        rollout = await rolling
        assert rollout.obs["count"][:, :, 1].tolist() == [[1, 1], [2, 2]]
        assert rollout.last_obs["count"][:, 1].tolist() == [3, 3]


@pytest.mark.asyncio
async def test_a_slot_is_paused_while_a_rollout_waits_for_what_was_cancelled(tmp_path):
    """It is still the rollout's, and its worker, busy with a call, is asked for its observation like the others."""
    gates = [tmp_path / "call", tmp_path / "step"]
    for gate in gates:
        os.mkfifo(gate)

    class Gated(Chain):
        def wait(self, which):
            gates[which].read_bytes()

        def step(self, action):
            if action == SLOW:
                self.wait(1)
            return super().step(action)

    def open_gate(which):  # once an env waits at it
        os.close(os.open(gates[which], os.O_WRONLY))

    async with aioenv.AsyncVectorEnv([Gated] * 2) as envs:
        seeds = [seed for seed in range(99) if mix(seed) % 6 == 5][:2]  # episodes of six steps
        await envs.reset(seed=seeds)
        stepping = asyncio.create_task(envs.step([0, SLOW]))
        while envs._backend.table.count(SlotState.READY) + envs._backend.table.count(SlotState.IN_FLIGHT) < 2:
            await asyncio.sleep(0)
        stepping.cancel()
        rolling = asyncio.create_task(envs.rollout(lambda obs: [0, 0], 2, 1))
        while envs._backend.table.state(0) is not SlotState.READY:
            await asyncio.sleep(0)
        calling = asyncio.create_task(envs.call_at([0], "wait", 0))
        while envs.workers[0].state != "busy":
            await asyncio.sleep(0)
        envs.pause(0)
        open_gate(1)
        while envs._backend.table.state(0) is SlotState.READY:
            await asyncio.sleep(0)
        open_gate(0)
        await calling
        rollout = await rolling
        assert (rollout.obs["key"] == [mix(seed) for seed in seeds]).all()
        assert rollout.obs["count"][:, :, 1].tolist() == [[2, 2], [3, 3]]
