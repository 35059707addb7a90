"""Workers that are pinned to CPUs."""

from __future__ import annotations

import asyncio
import os
import signal

import gymnasium as gym
import pytest

import aioenv
from aioenv import sync
from tests.kits.version_kit import native_task

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform pins no process")

CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class Pinned(gym.Wrapper):
    """Tells where it was made, and where it runs."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.made_on = self.runs_on()

    def runs_on(self) -> tuple[int, ...]:
        return tuple(sorted(os.sched_getaffinity(0)))


def tiled(count: int) -> list[tuple[int, ...]]:
    return [(CPUS[i % len(CPUS)],) for i in range(count)]


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_each_worker_has_its_cpu_before_its_envs_are_built():
    async with aioenv.AsyncVectorEnv([Pinned] * 3, num_workers=3, cpu_affinity="spread") as envs:
        assert list(await envs.call("runs_on")) == list(await envs.get_attr("made_on")) == tiled(3)
        assert [worker.cpus for worker in envs.workers] == tiled(3)
    assert sorted(os.sched_getaffinity(0)) == CPUS, "this process goes where it went before"


@pytest.mark.asyncio
async def test_cpus_and_sets_of_them():
    async with aioenv.make_vec("CartPole-v1"):  # keeps the fork server
        for given, expected in [
            ([CPUS[-1]], [(CPUS[-1],)] * 3),
            ([CPUS[0], set(CPUS)], [(CPUS[0],), tuple(CPUS), (CPUS[0],)]),
            ((range(CPUS[0], CPUS[0] + 1),), [(CPUS[0],)] * 3),
            (None, [tuple(CPUS)] * 3),
        ]:
            async with aioenv.make_vec(Pinned, 3, num_workers=3, cpu_affinity=given) as envs:
                assert list(await envs.call("runs_on")) == expected
                assert [w.cpus for w in envs.workers] == ([None] * 3 if given is None else expected)


@pytest.mark.asyncio
async def test_a_worker_that_is_started_again_is_pinned_again():
    restart = aioenv.RestartPolicy(backoff_s=0.01)
    async with aioenv.AsyncVectorEnv([Pinned] * 2, num_workers=2, cpu_affinity="spread", restart=restart) as envs:
        await envs.reset()
        old = envs.workers[1].pid
        os.kill(old, signal.SIGKILL)
        await asyncio.gather(envs.step([0, 0]))
        assert envs.workers[1].pid != old
        assert list(await envs.get_attr("made_on")) == tiled(2)
        assert envs.workers[1].cpus == tiled(2)[1]


class Threads(native_task("locomotion_2d", "Hopper")):
    """Tells how many of them compute."""

    def count(self) -> int:
        return self.pool.num_threads


class Simulates(gym.Wrapper):
    """An env that simulates ahead."""

    def __init__(self) -> None:
        super().__init__(gym.make("Hopper-v5"))
        self.pool = aioenv.SimPool(self.unwrapped.model, 8)

    def count(self) -> int:
        return self.pool.num_threads

    def close(self) -> None:
        self.pool.close()
        super().close()


@pytest.mark.asyncio
async def test_physics_has_a_thread_for_each_cpu_that_a_worker_may_use():
    for given, expected in [(None, [len(CPUS)]), ([CPUS[0]], [1]), ([CPUS], [len(CPUS)]), ("spread", [1])]:
        async with aioenv.make_vec(Threads, 8, backend="native", num_workers=1, cpu_affinity=given) as envs:
            assert sorted(set(await envs.call("count"))) == expected, given


ID = "aioenv_tests/Threads-v0"


@pytest.mark.sampled(2)
@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("num_workers", [1, 2, 3 * len(CPUS)])
@pytest.mark.parametrize("env", [Threads, ID, lambda num_envs: Threads(num_envs)], ids=["class", "id", "function"])
async def test_workers_share_the_cpus(env, num_workers):
    gym.register(ID, vector_entry_point=Threads)
    try:
        async with aioenv.make_vec(env, 8 * num_workers, num_workers=num_workers, backend="native") as envs:
            assert set(await envs.call("count")) == {max(1, len(CPUS) // num_workers)}
    finally:
        del gym.registry[ID]


@pytest.mark.asyncio
@pytest.mark.usefixtures("way")
async def test_an_argument_for_threads_and_single_envs_that_simulate():
    async with aioenv.make_vec(Threads, 16, num_workers=2, backend="native", num_threads=3) as envs:
        assert set(await envs.call("count")) == {3}, "who says how many has so many"
    async with aioenv.make_vec(Simulates, len(CPUS), num_workers=len(CPUS)) as envs:
        assert set(await envs.call("count")) == {1}, "physics in a single env does not take the others' CPUs either"


def test_blocking_code_too():
    with sync.make_vec(Pinned, 2, num_workers=2, cpu_affinity="spread") as envs:
        assert list(envs.call("runs_on")) == tiled(2)


def test_what_is_refused(monkeypatch):
    other = max(CPUS) + 1
    for affinity, message in [
        ([other], rf"may use CPUs \[{CPUS[0]}.*got \[{other}\]"),
        ([{CPUS[0], other}], rf"got \[{other}\]"),
        ("all", "\"spread\".*got 'all'"),
        ([], "one or more"),
        ([()], "one or more"),
        ([0.5], "one or more"),
        ([True], "one or more"),
        (["0"], "one or more"),
        (0, "one or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            aioenv.make_vec("CartPole-v1", cpu_affinity=affinity)
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ValueError, match="this platform can't pin"):
        aioenv.make_vec("CartPole-v1", cpu_affinity="spread")
