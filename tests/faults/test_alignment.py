"""After any cancellation at any moment, the results that follow equal a run without it, bit for bit."""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import gymnasium as gym
import numpy as np
import pytest

import aioenv
from aioenv.testing import leak_check
from tests.faults.align_kit import CancelAt, Ledger, N, Reference, as_step, same
from tests.kits.compare import assert_same
from tests.kits.loop_kit import LOOPS, run_on

SLOW_S = 0.0005
loops = pytest.mark.parametrize("loop", LOOPS)
own_server = pytest.mark.usefixtures("own_fork_server")
pytestmark = pytest.mark.usefixtures("way")


def slow_ledger():
    return Ledger(SLOW_S)


def cartpole():
    return gym.make("CartPole-v1")


def actions_of(rng: random.Random, envs: aioenv.AsyncVectorEnv) -> np.ndarray:
    return np.array([rng.randrange(int(envs.single_action_space.n)) for _ in range(N)])


# ---------------------------------------------------------------- a timeout of a random instant, then a step


class Race:
    """Operations that time out at random instants, beside a reference that never does.

    Args:
        envs: started, and never reset yet.
        reference: the same.
        seed: for the instants and the actions.
    """

    def __init__(self, envs: aioenv.AsyncVectorEnv, reference: Reference, seed: int) -> None:
        self.envs = envs
        self.reference = reference
        self.rng = random.Random(seed)
        self.late = 0

    def begin(self, kind: str):
        """An operation, and what it gives in the reference."""
        if kind == "step":
            actions = actions_of(self.rng, self.envs)
            return self.envs.step(actions), self.reference.step(actions)
        if kind == "reset":
            seed = self.rng.randrange(10**6)
            return self.envs.reset(seed=seed), self.reference.reset(seed=seed)
        return self.envs.render(), self.reference.render()

    async def check(self, kind: str) -> None:
        operation, expected = self.begin(kind)
        got = await operation
        assert_same(got if kind == "render" else as_step(got), expected)

    async def duration_s(self, kind: str) -> float:
        """How long it takes undisturbed: the median of a few."""
        times = []
        for _ in range(7):
            if kind == "render":
                await self.check("step")
            began = time.perf_counter()
            await self.check(kind)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    async def run(self, kind: str, cases: int) -> None:
        duration_s = await self.duration_s(kind)
        self.late = 0
        for _ in range(cases):
            if kind == "render":
                await self.check("step")
            operation, expected = self.begin(kind)
            try:
                async with asyncio.timeout(self.instant_s(duration_s)):
                    got = await operation
            except TimeoutError:
                self.late += 1
                if kind == "render":
                    assert_same(await self.envs.render(), expected)
                elif self.rng.random() < 0.5:  # take the late result; else the next step drops it
                    ready = await self.envs.recv(N)
                    assert ready.slots.tolist() == list(range(N))
                    assert_same(as_step(ready), expected)
            else:
                assert_same(got if kind == "render" else as_step(got), expected)
            await self.check("step")
        assert self.late, "none was late: nothing was tried"

    def instant_s(self, duration_s: float) -> float:
        """Up to twice as long as it takes; each fifth time at once, which is too soon on any machine."""
        return self.rng.uniform(0, 2 * duration_s) if self.rng.random() < 0.8 else 0.0


async def race(factory, kinds: tuple[str, ...], cases: int, *, seed: int, copy: bool = True) -> None:
    render = aioenv.RenderConfig() if "render" in kinds else None
    async with aioenv.AsyncVectorEnv([factory] * N, num_workers=2, render=render, copy=copy) as envs:
        runs = Race(envs, Reference(factory), seed)
        await runs.check("reset")
        for kind in kinds:
            await runs.run(kind, cases)
            assert not envs.outstanding


@loops
def test_timeouts_at_random_instants(loop):
    run_on(loop, race(slow_ledger, ("step", "reset", "render"), 30, seed=1))


@loops
def test_timeouts_at_random_instants_of_cartpole(loop):
    run_on(loop, race(cartpole, ("step", "reset"), 30, seed=2, copy=False))


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [3, 4])
@loops
def test_timeouts_at_five_hundred_random_instants(loop, seed):
    run_on(loop, race(slow_ledger, ("step", "reset", "render"), 500, seed=seed))
    run_on(loop, race(cartpole, ("step", "reset"), 500, seed=seed))


@pytest.mark.stress
@loops
def test_images_of_mujoco_after_timeouts(loop, way):
    """Drawn by a pool: beside vector envs that are never interrupted."""
    if way[0] != "forkserver":
        pytest.skip("the pool's workers are like others")

    async def main() -> None:
        rng = random.Random(5)
        config = aioenv.RenderConfig(width=48, height=32, workers=2)
        make = [aioenv.make_vec("HalfCheetah-v5", 2, render=config) for _ in range(2)]
        async with make[0] as envs, make[1] as reference:
            for each in make:
                await each.reset(seed=0)
            late = 0
            for _ in range(25):
                actions = np.array([[rng.uniform(-1, 1) for _ in range(6)] for _ in range(2)])
                for each in make:
                    await each.step(actions)
                expected = await reference.render()
                try:
                    async with asyncio.timeout(rng.uniform(0, 0.003)):
                        assert_same(await envs.render(), expected)
                except TimeoutError:
                    late += 1
                    if rng.random() < 0.5:
                        assert_same(await envs.render(), expected)
            assert late

    run_on(loop, main())


# ---------------------------------------------------------------- a cancellation at every await point


class Sweep:
    """Cancels operations at their first suspension, their second, and so on, until they get to their end."""

    def __init__(self, envs: aioenv.AsyncVectorEnv) -> None:
        self.envs = envs
        self.reference = Reference(Ledger)
        self.rng = random.Random(9)
        self.notes = 0

    async def settle(self, done, *, must: bool) -> None:
        """The operation was cancelled: either it was done, in all slots, or it was not; the next step tells.

        Args:
            done: does the operation in a reference.
            must: whether it can't have been left undone.
        """
        with_it = self.reference.copy()
        late = done(with_it)
        if must and self.rng.random() < 0.5:
            assert_same(as_step(await self.envs.recv(N)), late)
        actions = actions_of(self.rng, self.envs)
        got = as_step(await self.envs.step(actions))
        if not must and same(got, self.reference.copy().step(actions)):
            self.reference.step(actions)
            return
        assert_same(got, with_it.step(actions))
        self.reference = with_it

    async def step(self, k: int) -> bool:
        actions = actions_of(self.rng, self.envs)
        cancel = await CancelAt(k).run(self.envs.step(actions))
        if cancel.hit:
            await self.settle(lambda reference: reference.step(actions), must=True)
        else:
            assert_same(as_step(cancel.result), self.reference.step(actions))
        return cancel.hit

    async def step_after_a_cancelled_one(self, k: int) -> bool:
        first = actions_of(self.rng, self.envs)
        if not (await CancelAt(1).run(self.envs.step(first))).hit:
            self.reference.step(first)
            return False
        self.reference.step(first)
        actions = actions_of(self.rng, self.envs)
        cancel = await CancelAt(k).run(self.envs.step(actions))
        if cancel.hit:
            await self.settle(lambda reference: reference.step(actions), must=False)
        else:
            assert_same(as_step(cancel.result), self.reference.step(actions))
        return cancel.hit

    async def reset(self, k: int) -> bool:
        cancel = await CancelAt(k).run(self.envs.reset(seed=k))
        if cancel.hit:
            await self.settle(lambda reference: reference.reset(seed=k), must=True)
        else:
            assert_same(as_step(cancel.result), self.reference.reset(seed=k))
        return cancel.hit

    async def render(self, k: int) -> bool:
        actions = actions_of(self.rng, self.envs)
        assert_same(as_step(await self.envs.step(actions)), self.reference.step(actions))
        cancel = await CancelAt(k).run(self.envs.render())
        assert_same(await self.envs.render() if cancel.hit else cancel.result, self.reference.render())
        await self.settle(lambda reference: None, must=False)
        return cancel.hit

    async def call(self, k: int) -> bool:
        """All envs run it or none does; and no reply goes to another call."""
        cancel = await CancelAt(k).run(self.envs.call("note", k))
        digests = await self.envs.get_attr("notes")
        assert len(set(digests)) == 1, f"some envs ran a cancelled call, others did not: {digests}"
        ran = (31 * self.notes + k + 1) % 1_000_003
        assert digests[0] in ((ran, self.notes) if cancel.hit else (ran,))
        self.notes = digests[0]
        await self.settle(lambda reference: None, must=False)
        return cancel.hit

    async def recv(self, k: int) -> bool:
        actions = actions_of(self.rng, self.envs)
        self.envs.send(actions)
        cancel = await CancelAt(k).run(self.envs.recv(N))
        ready = await self.envs.recv(N) if cancel.hit else cancel.result
        assert ready.slots.tolist() == list(range(N))
        assert_same(as_step(ready), self.reference.step(actions))
        assert not self.envs.outstanding
        return cancel.hit

    async def all(self, name: str) -> int:
        """Cancel an operation at each of its await points; how many there were."""
        operation = getattr(self, name)
        k, complete = 1, 0
        # how often it suspends depends on whose reply comes when; and where others work, too, all may be there at once
        while complete < (8 if k > 1 else 200):
            if await operation(k):
                k, complete = k + 1, 0
            else:
                complete += 1
        return k - 1


SWEPT = ["step", "step_after_a_cancelled_one", "reset", "render", "call", "recv"]


@loops
@pytest.mark.parametrize("workers", [1, 3])
def test_a_cancel_at_every_await_point(loop, workers):
    async def main() -> dict[str, int]:
        config = aioenv.RenderConfig()
        async with aioenv.AsyncVectorEnv([slow_ledger] * N, num_workers=workers, render=config) as envs:
            sweep = Sweep(envs)
            assert_same(as_step(await envs.reset(seed=0)), sweep.reference.reset(seed=0))
            return {name: await sweep.all(name) for name in SWEPT}

    points = run_on(loop, main())
    assert all(points.values()), f"no await point was hit: {points}"


async def start_cancelled_at(k: int, workers: int) -> bool:
    envs = aioenv.AsyncVectorEnv([Ledger] * 2, num_workers=workers)
    cancel = await CancelAt(k).run(envs._ensure_started())
    assert envs.closed is cancel.hit
    if not cancel.hit:
        assert (await envs.reset(seed=0)).obs[:, 0].tolist() == [1, 1]
    await envs.close()
    assert {worker.state for worker in envs.workers} == {"closed"}
    return cancel.hit


async def close_cancelled_at(k: int, again: bool) -> bool:
    """Close while a step is in flight that is not awaited."""
    envs = await aioenv.AsyncVectorEnv([slow_ledger] * 2, num_workers=2)
    await envs.reset(seed=0)
    envs.send([0, 0])
    cancel = await CancelAt(k).run(envs.close())
    assert envs.closed
    if again:
        await envs.close()
        assert {worker.state for worker in envs.workers} == {"closed"}
    return cancel.hit


def sweep_lives(loop: str, life, *, stride: int) -> int:
    """A new loop and new workers, with a fork server of their own, for each await point (each `stride`-th)."""
    k = 1
    while True:
        with leak_check():
            if not run_on(loop, life(k)):
                return k
        k += stride


@own_server
@loops
def test_a_start_cancelled_leaves_nothing(loop):
    """At each ninth await point, beginning with the first; `make stress` takes them all."""
    assert sweep_lives(loop, lambda k: start_cancelled_at(k, 2), stride=9) > 9


@own_server
@pytest.mark.stress
@pytest.mark.timeout(300)
@loops
@pytest.mark.parametrize("workers", [1, 2])
def test_a_start_cancelled_at_every_await_point_leaves_nothing(loop, workers):
    assert sweep_lives(loop, lambda k: start_cancelled_at(k, workers), stride=1) > 5


@own_server
@pytest.mark.parametrize(("loop", "again"), [("asyncio", True), ("uvloop", False)])
def test_a_close_cancelled_leaves_nothing(loop, again):
    """Likewise, at each fifth; whether another close follows it or not."""
    assert sweep_lives(loop, lambda k: close_cancelled_at(k, again), stride=5) > 5


@own_server
@pytest.mark.stress
@pytest.mark.timeout(300)
@loops
@pytest.mark.parametrize("again", [True, False])
def test_a_close_cancelled_at_every_await_point_leaves_nothing(loop, again):
    assert sweep_lives(loop, lambda k: close_cancelled_at(k, again), stride=1) > 3
