"""Shared statistics are merged by the vector env itself: once a step, in the order of slots."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from functools import partial

import numpy as np
import pytest

import aioenv
from aioenv.stats import NormalizeObservation, NormalizeReward, SharedRunningStats
from tests.kits.stats_kit import SHAPE, Endless, Walker, needs_sharing, same

pytestmark = needs_sharing


class Knowing(NormalizeReward):
    """Tells what its process knows."""

    def know(self):
        return [pickle.dumps(s.stats.moments) for s in (self.env._statistics.slot, self._statistics.slot)]


def factories(n, base, observations, returns):
    return [
        lambda slot=slot: Knowing(NormalizeObservation(base(), observations.at(slot)), returns.at(slot))
        for slot in range(n)
    ]


async def played(num_workers, shared, play, base=Walker, n=5, **options):
    """What a vector env returned, and the statistics as they are then, here and in every slot."""
    with SharedRunningStats(SHAPE, n, shared=shared) as seen, SharedRunningStats((), n, shared=shared) as returns:
        made = factories(n, base, seen, returns)
        async with aioenv.AsyncVectorEnv(made, num_workers=num_workers, **options) as envs:
            out = await play(envs)
            known = [[pickle.loads(dump) for dump in dumps] for dumps in await envs.call("know")]
        return b"".join(map(bytes, out)), [seen.moments, returns.moments], known


async def steps(envs, n=10):
    out = [(await envs.reset(seed=3)).obs]
    for _ in range(n):
        obs, reward, *_ = await envs.step(np.zeros(envs.num_envs, np.int64))
        out += [obs, reward]
    return out


async def rollouts(groups, envs):
    await envs.reset(seed=3)
    first = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 5, groups=groups)
    second = await envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 5, groups=groups)
    return [first.obs, first.reward, second.obs, second.reward]


async def everything_sent_and_received(envs):
    out = []
    envs.send_reset(seed=3)
    for _ in range(6):
        ready = await envs.recv(min_slots=envs.num_envs)
        out += [ready.obs, ready.reward]
        envs.send(np.zeros(envs.num_envs, np.int64))
    await envs.recv(min_slots=envs.num_envs)
    return out


@pytest.mark.parametrize("shared", [True, False])
def test_ec_counts_and_identical_statistics_everywhere_without_a_word(shared):
    for num_workers in (1, 3):
        _, here, known = aioenv.run(played(num_workers, shared, steps, Endless, n=3))
        assert [moments.count for moments in here] == [3 * 11, 3 * 10]
        for moments in known:
            assert all(map(same, moments, here))


@pytest.mark.parametrize("play", [steps, partial(rollouts, 1), partial(rollouts, 2), everything_sent_and_received])
def test_the_same_bits_for_any_number_of_workers_and_without_shared_memory(play):
    (bits, here, _), *others = [aioenv.run(played(*args, play, n=4)) for args in ((1, True), (2, True), (2, False))]
    for other, moments, _ in others:
        assert other == bits
        assert all(map(same, moments, here))


def test_a_step_merges_what_the_one_before_has_shown():
    """As a loop over the envs would, that merges by hand."""
    with SharedRunningStats(SHAPE, 5) as seen, SharedRunningStats((), 5) as returns:
        envs = [make() for make in factories(5, Walker, seen, returns)]
        serial = [np.stack([env.reset(seed=3 + i)[0] for i, env in enumerate(envs)])]
        seen.merge()
        due = [False] * 5
        for _ in range(10):
            results = []
            for i, env in enumerate(envs):
                if due[i]:
                    results.append((env.reset()[0], 0.0, False))
                else:
                    results.append(env.step(0)[:3])
                due[i] = results[-1][2]
            seen.merge(), returns.merge()
            serial += [np.stack([r[0] for r in results]), np.array([r[1] for r in results])]
        bits, here, _ = aioenv.run(played(2, None, steps))
        assert bits == b"".join(map(bytes, serial))
        assert same(here[0], seen.moments) and same(here[1], returns.moments)


def test_closed_and_live_statistics_are_left_alone(keep):
    live, closed = keep(SharedRunningStats(SHAPE, live=True)), SharedRunningStats(SHAPE, 2)

    async def run():
        makes = [lambda slot=slot: NormalizeObservation(Endless(), closed.at(slot)) for slot in range(2)]
        async with aioenv.AsyncVectorEnv(makes, num_workers=1) as envs:
            await envs.reset(seed=0)
            assert closed.count == 2
            closed.close()
            await envs.step([0, 0])
            assert closed.count == 2
        async with aioenv.AsyncVectorEnv([lambda: NormalizeObservation(Endless(), live)] * 2) as envs:
            await envs.reset(seed=0)
            assert (live.count, envs._check_running().merger) == (2, None)
        async with aioenv.AsyncVectorEnv([Endless]) as envs:
            assert envs._check_running().merger is None

    aioenv.run(run())


def test_a_cancelled_step_is_counted_once():
    async def play(envs):
        await envs.reset(seed=3)
        task = asyncio.ensure_future(envs.step(np.zeros(5, np.int64)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return [(await envs.step(np.zeros(5, np.int64))).obs]

    for shared in (True, False):
        _, here, _ = aioenv.run(played(2, shared, play, Endless))
        assert [moments.count for moments in here] == [15, 10]


class Mortal(Endless):
    """Kills its process at the fourth step, once, as long as a file is there."""

    def __init__(self, path):
        self.path, self.t = path, 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.t += 1
        if self.t == 4 and os.path.exists(self.path):
            os.unlink(self.path)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

    def get_state(self):
        words = self.np_random.bit_generator.state["state"]
        # of one length, whatever the numbers: a checkpoint has a fixed size
        return {"t": np.int64(self.t), "rng": b"".join(words[name].to_bytes(16, "little") for name in ("state", "inc"))}

    def set_state(self, state):
        self.t, rng = int(state["t"]), state["rng"]
        words = {"state": int.from_bytes(rng[:16], "little"), "inc": int.from_bytes(rng[16:], "little")}
        self.np_random.bit_generator.state = {**self.np_random.bit_generator.state, "state": words}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_step_that_is_done_again_after_a_death_counts_once(tmp_path, shared, victim):
    """Slots 0 and 1 are one worker's: slot 0 has seen the step in which slot 1 dies with it, or not."""
    path = tmp_path / "kill"

    async def run(kill):
        if kill:
            path.touch()
        with SharedRunningStats(SHAPE, 3, shared=shared) as seen:

            def make(slot):
                return NormalizeObservation(Mortal(path if slot == victim else tmp_path / "none"), seen.at(slot))

            makes = [partial(make, slot) for slot in range(3)]
            policy = aioenv.RestartPolicy(resume=True)
            async with aioenv.AsyncVectorEnv(makes, num_workers=2, restart=policy) as envs:
                out = await steps(envs, 7)
                assert path.exists() is False
                os.kill(envs.workers[0].pid, signal.SIGKILL)  # between steps: nothing was seen twice either
                out += (await envs.step(np.zeros(3, np.int64)))[:2]
        return out, seen.moments

    (quiet, expected), (disturbed, moments) = aioenv.run(run(False)), aioenv.run(run(True))
    assert moments.count == expected.count == 3 * 9
    assert same(moments, expected)
    assert all((a == b).all() for a, b in zip(quiet, disturbed, strict=True))


def test_a_restarted_worker_of_copies_knows_what_the_others_do():
    async def play(envs):
        await steps(envs, 5)
        os.kill(envs.workers[0].pid, signal.SIGKILL)
        await envs.step(np.zeros(5, np.int64))
        return [(await envs.step(np.zeros(5, np.int64))).obs]

    _, here, known = aioenv.run(played(2, False, play, Endless, restart=aioenv.RestartPolicy()))
    for moments in known:
        assert all(map(same, moments, here))
    assert here[0].count > 30


class Told(Mortal):
    """Action 1 waits at a gate; action 2 kills its process, once, as long as a file is there."""

    def step(self, action):
        if action == 1:
            with open(self.path / "gate") as gate:
                gate.read()
        if action == 2 and (self.path / "kill").exists():
            (self.path / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.t = -1  # it does not die by itself
        return super().step(action)


def resumed(play, path, num_workers):
    """The moments of two slots' observations after `play` with deaths in it, and after `play` without."""

    async def run(kill):
        with SharedRunningStats(SHAPE, 2) as seen:
            makes = [lambda slot=slot: NormalizeObservation(Told(path), seen.at(slot)) for slot in range(2)]
            policy = aioenv.RestartPolicy(resume=True)
            async with aioenv.AsyncVectorEnv(makes, num_workers=num_workers, restart=policy) as envs:
                await steps(envs, 2)
                await play(envs, kill)
                await envs.step([0, 0])
        return seen.moments

    return [aioenv.run(run(kill)) for kill in (True, False)]


def test_what_a_slot_has_replied_counts_though_its_worker_dies_before_the_merge(tmp_path):
    """Slot 1 is still in the step when the worker of slot 0, which is done with it, dies."""
    os.mkfifo(tmp_path / "gate")

    async def play(envs, kill):
        step = asyncio.ensure_future(envs.step([0, 1]))
        while not envs.outstanding or envs.workers[0].state != "ready":
            await asyncio.sleep(0)
        if kill:
            os.kill(envs.workers[0].pid, signal.SIGKILL)
            while envs.workers[0].state == "ready":
                await asyncio.sleep(0)
            await envs._check_running().restarter.wait_restarted(envs._env_info.members[0].worker)
        os.close(os.open(tmp_path / "gate", os.O_WRONLY))
        await step

    disturbed, quiet = resumed(play, tmp_path, 2)
    assert disturbed.count == 2 * 5 and same(disturbed, quiet)


def test_what_was_seen_in_a_step_that_was_dropped_counts_once(tmp_path):
    """Slot 0 has seen the step after it, too, in which slot 1 dies with it."""

    async def play(envs, kill):
        # who polls may have the result before it can be cancelled
        envs._check_running().dispatcher.has_idle_cpus = False
        step = asyncio.ensure_future(envs.step([0, 0]))
        while not envs.outstanding:
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait([step])
        if kill:
            (tmp_path / "kill").touch()
        await envs.step([0, 2])

    disturbed, quiet = resumed(play, tmp_path, 1)
    assert disturbed.count == 2 * 6 and same(disturbed, quiet)


def test_statistics_of_some_envs_alone_do_not_keep_a_worker_from_coming_back(tmp_path):
    async def run():
        with SharedRunningStats(SHAPE, 1) as seen:
            makes = [lambda: NormalizeObservation(Told(tmp_path), seen.at(0)), lambda: Told(tmp_path)]
            policy = aioenv.RestartPolicy(resume=True)
            async with aioenv.AsyncVectorEnv(
                makes, num_workers=1, restart=policy, observation_mode="different"
            ) as envs:
                await envs.reset(seed=0)
                os.kill(envs.workers[0].pid, signal.SIGKILL)
                await envs.step([0, 0])
                assert seen.count == 2

    aioenv.run(run())
