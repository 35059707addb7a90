"""The last worker's reply wakes the loop for a step, and no reply of the others is overlooked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import aioenv
from aioenv import EnvError, StepTimeout, WorkerDied, speedups
from aioenv.core import dispatcher
from aioenv.core import wakeups as wakeups
from aioenv.core.wakeups import WakeupCoalescer

compiled = pytest.mark.skipif(not speedups.compiled, reason="there was no C compiler")

# what an action has an env do
GO, WAIT, TELL, RAISE, FORK = range(5)


class Gated(gym.Env):
    """Counts its steps; waits at its gate if it is told to."""

    observation_space = spaces.Box(0, 1000, (1,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, gate: str) -> None:
        self.gate = gate
        self.count = 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        if action == FORK and os.fork() == 0:
            signal.pause()  # it holds the worker's socket open
        if action in (WAIT, FORK):
            with open(self.gate, encoding="ascii") as gate:  # a fifo
                gate.read()
        if action == RAISE:
            raise LookupError("as it was told")
        return np.full(1, self.count, np.float32), 1.0, False, False, {"told": "this"} if action == TELL else {}


@pytest.fixture
def gates(tmp_path, monkeypatch):
    """A gate for each of two slots, on a machine with a CPU for each of two workers."""
    monkeypatch.setattr(dispatcher, "usable_cpus", lambda: 2)
    paths = [str(tmp_path / f"gate {slot}") for slot in range(2)]
    for path in paths:
        os.mkfifo(path)
    return paths


def make(gates, **settings):
    return aioenv.AsyncVectorEnv([lambda gate=gate: Gated(gate) for gate in gates], num_workers=2, **settings)


async def stepped(envs, last: int):
    """Step until the reader of the other slot's worker is disabled: this slot's worker is thought to reply last."""
    coalescer = envs._backend.dispatcher._wakeups
    coalescer.wake()
    while not coalescer._disabled:  # again if the other one was last
        coalescer._last, coalescer._repeats = coalescer._channels[last], wakeups._REPEATS
        await envs.step([GO, GO])
    assert [channel._reader_enabled for channel in coalescer._channels] == [slot == last for slot in range(2)]
    return coalescer


@contextlib.asynccontextmanager
async def reader_disabled(gates, last=1):
    """Envs of which only the worker of the slot `last` is read; and their coalescer."""
    async with make(gates) as envs:
        await envs.reset()
        yield envs, await stepped(envs, last)


async def begun(envs, actions):
    """A step that has been sent."""
    step = asyncio.create_task(envs.step(actions))
    await asyncio.sleep(0)
    return step


async def kill_with_reader_disabled(envs):
    """Kill the worker of slot 0, and wait until that is known."""
    victim = envs._backend.worker_pool.members[0].worker
    died, told = asyncio.Event(), victim.on_death
    victim.on_death = lambda worker: (told(worker), died.set())
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.wait_for(died.wait(), 10)


async def replied(channel):
    """Wait until there is a reply in the socket of a channel that the loop does not read."""
    poll = select.poll()
    poll.register(channel.fd, select.POLLIN)
    assert await asyncio.to_thread(poll.poll, 10_000)


async def open_gate(path: str) -> None:
    """Let the env that waits there go on; return once there is one."""
    await asyncio.to_thread(lambda: open(path, "w", encoding="ascii").close())


@compiled
@pytest.mark.asyncio
async def test_a_step_ends_when_the_last_worker_has_replied(gates):
    async with reader_disabled(gates) as (envs, coalescer):
        step = await begun(envs, [GO, WAIT])
        await replied(coalescer._channels[0])
        assert not coalescer._requests[0].parts[0].arrived, "the loop does not read it"
        await open_gate(gates[1])
        obs, reward, *_ = await step
        assert reward.tolist() == [1, 1] and obs[0] == obs[1]
        assert not coalescer._channels[0]._reader_enabled, "nor from now on"


@compiled
@pytest.mark.asyncio
async def test_a_late_worker_whose_reader_is_disabled_is_waited_for(gates):
    async with reader_disabled(gates) as (envs, coalescer):
        step = asyncio.create_task(envs.step([WAIT, GO]))
        await open_gate(gates[0])
        _, reward, *_ = await step
        assert reward.tolist() == [1, 1]
        assert coalescer._channels[1]._reader_enabled


@compiled
@pytest.mark.asyncio
async def test_the_death_of_a_worker_whose_reader_is_disabled_is_noticed(gates):
    async with reader_disabled(gates) as (envs, _):
        step = await begun(envs, [WAIT, WAIT])
        await kill_with_reader_disabled(envs)
        assert not step.done()
        await open_gate(gates[1])
        with pytest.raises(WorkerDied) as caught:
            await step
        assert caught.value.slots == (0,) and caught.value.partial.reward.tolist() == [0, 1]


@compiled
@pytest.mark.asyncio
async def test_a_worker_whose_reader_is_disabled_may_die_after_its_reply(gates):
    async with reader_disabled(gates) as (envs, coalescer):
        step = await begun(envs, [GO, WAIT])
        await replied(coalescer._channels[0])
        await kill_with_reader_disabled(envs)
        await open_gate(gates[1])
        assert (await step).reward.tolist() == [1, 1]
        with pytest.raises(WorkerDied):
            await envs.step([GO, GO])


@compiled
@pytest.mark.asyncio
async def test_the_end_of_the_worker_that_is_read_is_noticed_though_its_stream_has_not_ended(gates):
    async with reader_disabled(gates) as (envs, coalescer):
        step = await begun(envs, [GO, FORK])
        await replied(coalescer._channels[0])
        gate = await asyncio.to_thread(open, gates[1], "w", encoding="ascii")  # it has forked and waits
        os.kill(envs.workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            await asyncio.wait_for(step, 10)
        gate.close()
        assert caught.value.partial.reward.tolist() == [1, 0]


@compiled
@pytest.mark.asyncio
async def test_the_death_of_the_worker_that_is_read_is_noticed(gates):
    async with reader_disabled(gates) as (envs, _):
        step = await begun(envs, [GO, WAIT])
        os.kill(envs.workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            await asyncio.wait_for(step, 10)
        assert caught.value.slots == (1,) and caught.value.partial.reward.tolist() == [1, 0]


@compiled
@pytest.mark.asyncio
async def test_recv_takes_an_unread_reply_to_a_cancelled_step(gates):
    async with reader_disabled(gates) as (envs, coalescer):
        step = await begun(envs, [GO, WAIT])
        await replied(coalescer._channels[0])
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert (await asyncio.wait_for(envs.recv(), 10)).slots.tolist() == [0]
        await open_gate(gates[1])
        assert (await envs.recv()).slots.tolist() == [1]
        await envs.step([GO, GO])


@compiled
@pytest.mark.asyncio
async def test_a_worker_with_an_unread_reply_is_not_called_late(gates):
    async with reader_disabled(gates) as (envs, _):
        with pytest.raises(StepTimeout) as caught:
            await envs.step([GO, WAIT], timeout_s=0.5)
        assert caught.value.slots == (1,) and caught.value.partial.reward.tolist() == [1, 0]
        await open_gate(gates[1])
        await envs.step([GO, GO])


@compiled
@pytest.mark.asyncio
async def test_a_worker_whose_reader_is_disabled_answers_calls(gates):
    async with reader_disabled(gates) as (envs, _):
        assert (await asyncio.wait_for(envs.call_at(0, "get_wrapper_attr", "gate"), 10)) == gates[0]
        assert list(await asyncio.wait_for(envs.get_attr("gate"), 10)) == gates
        await stepped(envs, last=0)
        assert list(await asyncio.wait_for(envs.get_attr("gate"), 10)) == gates
        envs.send([GO], [1])
        assert (await asyncio.wait_for(envs.recv(), 10)).slots.tolist() == [1]


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("last", [0, 1])
async def test_infos_and_errors_of_either_worker_are_told(gates, last):
    async with make(gates) as envs:
        await envs.reset()
        for teller in range(2):
            await stepped(envs, last)
            *_, info = await asyncio.wait_for(envs.step([TELL if slot == teller else GO for slot in range(2)]), 10)
            assert info["_told"].tolist() == [slot == teller for slot in range(2)]
            await stepped(envs, last)
            with pytest.raises(EnvError) as caught:
                await asyncio.wait_for(envs.step([RAISE if slot == teller else GO for slot in range(2)]), 10)
            assert caught.value.slots == (teller,)
            await envs.reset()


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("late", [0, 1])
async def test_readers_are_disabled_while_groups_of_a_rollout_step(gates, late):
    disabled, gate = [], None
    async with make([gates[0], gates[0], gates[1], gates[1]]) as envs:
        await envs.reset()
        coalescer = envs._backend.dispatcher._wakeups

        def policy(obs, slots):
            nonlocal gate
            disabled.append(bool(coalescer._disabled))
            if not disabled[-1]:
                coalescer._last, coalescer._repeats = coalescer._channels[1], wakeups._REPEATS
            actions = np.full(len(obs), GO)
            if gate is None and len(disabled) > 10 and disabled[-1]:  # one of this group waits, none of the other
                actions[late] = WAIT
                gate = asyncio.create_task(open_gate(gates[late]))
            return actions

        rollout = await asyncio.wait_for(envs.rollout(policy, 30, groups=2), 60)
        await gate
        assert rollout.reward.all() and rollout.valid.all()
        assert (rollout.obs[:, :, 0] == np.arange(30)[:, None]).all() and (rollout.last_obs == 30).all()
        _, reward, *_ = await asyncio.wait_for(envs.step([GO] * 4), 10)
        assert reward.all()


@compiled
@pytest.mark.asyncio
async def test_an_unread_reply_to_a_cancelled_rollout_is_not_lost(gates):
    async with make([gates[0], gates[0], gates[1], gates[1]]) as envs:
        await envs.reset()
        coalescer, asked, waits = envs._backend.dispatcher._wakeups, 0, asyncio.Event()

        def policy(obs):
            nonlocal asked
            asked += 1
            if asked == 20:
                coalescer.wake()
                coalescer._last, coalescer._repeats = (
                    coalescer._channels[1],
                    wakeups._REPEATS,
                )  # from this step on worker 0 is not read
                waits.set()
            return np.array([GO, WAIT if asked == 19 else GO])

        rollout = asyncio.create_task(envs.rollout(policy, 30, groups=2))
        await asyncio.wait_for(waits.wait(), 60)
        await replied(coalescer._channels[0])
        assert coalescer._disabled
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        ready = await asyncio.wait_for(envs.recv(min_slots=2), 10)
        assert ready.slots.tolist() == [0, 1] and asked == 20
        await open_gate(gates[1])
        await asyncio.wait_for(envs.step([GO] * 4), 10)


@compiled
@pytest.mark.asyncio
async def test_a_worker_whose_reader_is_disabled_is_closed_like_any_other(gates):
    envs = await make(gates)
    await envs.reset()
    coalescer = await stepped(envs, last=1)
    await asyncio.wait_for(envs.close(), 10)
    assert all(channel.fd == -1 and not channel._reader_enabled for channel in coalescer._channels)


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("cpus", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"episode_stats": True}, {"restart": aioenv.RestartPolicy()}])
async def test_readers_are_disabled_only_where_each_worker_has_a_cpu_and_the_parent_none(
    gates, monkeypatch, cpus, more
):
    monkeypatch.setattr(dispatcher, "usable_cpus", lambda: cpus)
    async with make(gates, **more) as envs:
        assert (envs._backend.dispatcher._wakeups is not None) == (cpus == 2)


@compiled
@pytest.mark.asyncio
async def test_the_streams_channel_disables_no_reader(gates):
    async with make(gates, channel="streams") as envs:
        assert envs._backend.dispatcher._wakeups is None
        await envs.reset()
        await envs.step([GO, GO])


@compiled
@pytest.mark.asyncio
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("when", ["between steps", "amid a step", "when the other one has replied"])
async def test_the_reader_of_a_restarted_worker_is_disabled_like_its_predecessors(gates, killed, when):
    async with make(gates, restart=aioenv.RestartPolicy()) as envs:
        await envs.reset()
        first = await stepped(envs, 1)
        dispatch_of = envs._backend.dispatcher
        if when == "between steps":
            await envs.step([GO, GO])
            os.kill(envs.workers[killed].pid, signal.SIGKILL)
            result = await envs.step([GO, GO])
        else:
            actions = [WAIT, WAIT]
            if when == "when the other one has replied":
                actions[1 - killed] = GO
            step = await begun(envs, actions)
            if actions[1 - killed] == GO:
                await replied(first._channels[1 - killed]) if killed else await arrived(first, 1)
            os.kill(envs.workers[killed].pid, signal.SIGKILL)
            if actions[1 - killed] == WAIT:
                await open_gate(gates[1 - killed])
            result = await asyncio.wait_for(step, 60)
        assert result.truncated.tolist() == [slot == killed for slot in range(2)]
        for _ in range(3):
            assert (await envs.step([GO, GO])).reward[1 - killed] == 1
        second = dispatch_of._wakeups
        assert second is not None and second is not first
        assert second._channels == [member.worker.fast_channel for member in envs._backend.worker_pool.members]
        assert not first._disabled
        await stepped(envs, 1)
        step = await begun(envs, [GO, WAIT])
        await replied(second._channels[0])
        await open_gate(gates[1])
        assert (await step).reward.tolist() == [1, 1]


async def arrived(coalescer, slot: int) -> None:
    """Wait until the reply of a worker whose reader is enabled is in."""
    while not coalescer._requests[-1].parts[slot].arrived:
        await asyncio.sleep(0)


# ------------------------------------------------------------ the count, without workers


class Channel:
    """A channel that only notes whether its reader is enabled, and how often it was polled."""

    def __init__(self) -> None:
        self.reader_enabled, self.polls = True, 0
        self.on_read = None
        self.requests = SimpleNamespace(pending={})
        self.there = 0  # how many replies are in its socket

    def enable_reader(self) -> None:
        self.reader_enabled = True

    def disable_reader(self) -> None:
        self.reader_enabled = False

    def poll(self) -> None:
        """Take a reply, if there is one."""
        self.polls += 1
        if self.there:
            self.there -= 1
            batch_request, part = self.requests.pending.pop(next(iter(self.requests.pending)))
            batch_request.open -= 1
            part.arrived = True
        self.on_read(self)


class Two:
    """A coalescer and its two channels."""

    def __init__(self) -> None:
        self.channels = self.first, self.second = Channel(), Channel()
        self.coalescer = WakeupCoalescer(self.channels)

    def begin(self):
        """A step is sent to both."""
        parts = [SimpleNamespace(arrived=False) for _ in self.channels]
        batch_request = SimpleNamespace(open=2, parts=parts)
        for channel, part in zip(self.channels, parts, strict=True):
            channel.requests.pending[id(part)] = batch_request, part
        self.coalescer.begin(batch_request)
        return batch_request

    def reply(self, *order: Channel) -> None:
        """Replies come, in this order; the loop reads the enabled ones."""
        for channel in order:
            channel.there += 1
            if channel.reader_enabled:
                channel.poll()

    def run(self, *order: Channel) -> None:
        """A step whose replies come in this order."""
        self.begin()
        self.reply(*order)

    def disable_first(self) -> None:
        """Step until the reader of the first channel is disabled."""
        for _ in range(wakeups._REPEATS + 2):
            assert self.first.reader_enabled and self.second.reader_enabled
            self.run(self.first, self.second)
        self.begin()
        assert not self.first.reader_enabled and self.second.reader_enabled
        self.reply(self.first, self.second)
        self.first.polls = self.second.polls = 0


def test_the_other_readers_are_disabled_once_the_same_worker_has_been_last_several_times():
    two = Two()
    two.disable_first()
    step = two.begin()
    two.reply(two.first)
    assert step.open == 2 and not two.first.polls
    two.reply(two.second)
    assert step.open == 0 and two.first.polls == 1 and not two.first.reader_enabled


def test_no_reader_is_disabled_while_the_last_worker_changes():
    two = Two()
    for _ in range(20):
        two.run(two.first, two.second)
        two.run(two.second, two.first)
    assert two.first.reader_enabled and two.second.reader_enabled


def test_the_reader_of_a_worker_that_owes_a_call_stays_enabled():
    two = Two()
    for _ in range(20):
        two.first.requests.pending["a call"] = SimpleNamespace(open=1), SimpleNamespace()
        step = two.begin()
        assert two.first.reader_enabled
        two.reply(two.first, two.first, two.second)
        assert not step.open


def test_the_reader_of_a_worker_that_owes_a_call_between_groups_stays_enabled():
    two = Two()
    for _ in range(wakeups._REPEATS + 1):
        two.run(two.first, two.second)
    one, another = two.begin(), two.begin()
    two.coalescer.wake()
    two.reply(two.first)
    two.coalescer._last, two.coalescer._repeats = two.second, wakeups._REPEATS
    two.first.requests.pending["a call"] = SimpleNamespace(open=1), SimpleNamespace()
    two.reply(two.second)
    third = two.begin()
    assert two.first.reader_enabled
    two.reply(two.first, two.first, two.first, two.second, two.second)
    assert not (one.open or another.open or third.open)


def test_the_reader_of_a_late_worker_is_enabled_again():
    two = Two()
    two.disable_first()
    late = two.begin()
    two.reply(two.second)
    assert two.first.reader_enabled and late.open == 1 and two.first.polls == 1
    two.reply(two.first)
    assert late.open == 0 and two.coalescer._last is two.first and two.coalescer._repeats == 0


def test_steps_of_groups_follow_each_other():
    two = Two()
    two.disable_first()
    one = two.begin()
    another = two.begin()
    assert not two.first.reader_enabled
    two.reply(two.first, two.first)
    two.reply(two.second)
    assert (one.open, another.open) == (0, 2) and two.first.polls == 1, "only what is wanted now"
    third = two.begin()
    two.reply(two.second)
    assert (another.open, third.open) == (0, 2) and two.first.polls == 2 and not two.first.reader_enabled
    two.reply(two.second)
    assert third.open == 1 and two.first.reader_enabled, "that one is late"
    two.reply(two.first)
    assert not third.open


def test_readers_are_disabled_while_other_groups_are_in_flight():
    two = Two()
    steps = [two.begin()]
    for _ in range(wakeups._REPEATS + 2):
        steps.append(two.begin())
        two.reply(two.first, two.second)
    assert not two.first.reader_enabled
    two.reply(two.first, two.second)
    assert not any(step.open for step in steps)


def test_a_step_that_ended_otherwise_does_not_hide_the_next_one():
    two = Two()
    two.disable_first()
    lost, step = two.begin(), two.begin()
    lost.open = 0  # a worker that died, say
    for channel, part in zip(two.channels, lost.parts, strict=True):
        part.arrived = True
        channel.requests.pending.pop(id(part))
    two.reply(two.first, two.second)
    assert not step.open


def test_what_is_read_without_a_step_changes_nothing():
    two = Two()
    for _ in range(20):
        two.second.poll()
    step = two.begin()
    assert two.first.reader_enabled
    two.coalescer.forget()
    two.reply(two.first, two.second)
    assert not step.open
